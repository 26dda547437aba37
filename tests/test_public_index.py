"""The pins resolve from the public index alone, for each Python that pyproject.toml allows.

Wheels that lie around, extra indexes and pip's configuration do not count: they hid for months that
nobody else could install this. Where the index does not answer the test is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
INDEX = "https://pypi.org/simple"
UNREACHABLE = re.compile(r"connection|timed out|temporary failure|proxy|name resolution", re.I)


def requirements() -> list[str]:
    """What '.[dev]' asks for, its own extras spelt out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    def spelt_out(asked: list[str]) -> Iterator[str]:
        for each in asked:
            own = re.fullmatch(r"dsv4\[([\w,]+)\]", each)
            if own is None:
                yield each
            else:
                for name in own[1].split(","):
                    yield from spelt_out(extras[name])

    return sorted(set(spelt_out([*project["dependencies"], *extras["dev"]])))


def dry_run(python: str, constraints: Path, target: Path) -> subprocess.Popen[str]:
    """Starts pip's resolution without installing, for a Python that need not be here."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull  # no find-links, no other index
    if certificates := os.environ.get("PIP_CERT"):
        environment["PIP_CERT"] = certificates
    options = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:"]
    options += ["--index-url", INDEX, "--python-version", python, "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, "-c", str(constraints)]
    return subprocess.Popen(
        [*command, *requirements()],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def resolved(run: subprocess.Popen[str]) -> bool:
    _, errors = run.communicate()
    conflict = "ResolutionImpossible" in errors or "conflicting dependencies" in errors
    if run.returncode and not conflict and UNREACHABLE.search(errors):
        pytest.skip(f"{INDEX} does not answer: {errors.strip()[-300:]}")
    assert run.returncode == 0 or conflict, errors
    return run.returncode == 0


@pytest.mark.timeout(900)  # some hundred small requests each: side by side
def test_the_pins_resolve_from_the_public_index(tmp_path: Path) -> None:
    runs = {python: dry_run(python, ROOT / "constraints.txt", tmp_path) for python in PYTHONS}
    assert {python: resolved(run) for python, run in runs.items()} == dict.fromkeys(PYTHONS, True)


@pytest.mark.nightly
def test_a_pin_that_only_a_private_wheel_satisfies_is_found(tmp_path: Path) -> None:
    """As it was: torch 2.13.0 of the public index wants another Triton."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wrong = tmp_path / "constraints.txt"
    wrong.write_text(re.sub(r"(?m)^triton==.*$", "triton==3.6.0", pins), encoding="utf-8")
    assert not resolved(dry_run("3.12", wrong, tmp_path / "target"))


def test_the_pythons_are_those_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={PYTHONS[0]}"

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
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
INDEX = "https://pypi.org/simple"
PLATFORM = "x86_64-manylinux_2_39"
UNREACHABLE = re.compile(
    r"connection|timed out|temporary failure|proxy|name resolution|lookup address|sending request",
    re.I,
)
CONFLICT = re.compile(r"ResolutionImpossible|conflicting dependencies|No solution found", re.I)


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
    options = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:"]
    options += ["--index-url", INDEX, "--python-version", python, "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, "-c", str(constraints)]
    return started([*command, *requirements()])


def compiled(python: str, constraints: Path, target: Path) -> subprocess.Popen[str]:
    """Starts uv's resolution for a Python: what pip needs a minute for, in seconds."""
    asked = target / "requirements.in"
    asked.write_text("\n".join(requirements()), encoding="utf-8")
    options = [
        "--no-config",
        "--index-url",
        INDEX,
        "--only-binary",
        ":all:",
        "--no-cache",
        "--quiet",
    ]
    options += ["--python-version", python, "--python-platform", PLATFORM]
    command = [sys.executable, "-m", "uv", "pip", "compile", *options, "-c", str(constraints)]
    return started([*command, str(asked), "-o", str(target / f"{python}.txt")])


def started(command: list[str]) -> subprocess.Popen[str]:
    """With no find-links and no other index than the one that the command names."""
    own = ("PIP_", "UV_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    environment["PIP_CONFIG_FILE"] = os.devnull
    if certificates := os.environ.get("PIP_CERT"):
        environment |= {"PIP_CERT": certificates, "SSL_CERT_FILE": certificates}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def resolved(run: subprocess.Popen[str]) -> bool:
    _, errors = run.communicate()
    unreachable = UNREACHABLE.search(errors)
    conflict = CONFLICT.search(errors) is not None and not unreachable
    if run.returncode and not conflict and unreachable:
        pytest.skip(f"{INDEX} does not answer: {errors.strip()[-300:]}")
    assert run.returncode == 0 or conflict, errors
    return run.returncode == 0


def test_the_pins_resolve_from_the_public_index(tmp_path: Path) -> None:
    runs = {python: compiled(python, ROOT / "constraints.txt", tmp_path) for python in PYTHONS}
    assert {python: resolved(run) for python, run in runs.items()} == dict.fromkeys(PYTHONS, True)


@pytest.mark.nightly
@pytest.mark.timeout(900)  # some hundred small requests each: side by side
def test_pip_resolves_them_too(tmp_path: Path) -> None:
    runs = {python: dry_run(python, ROOT / "constraints.txt", tmp_path) for python in PYTHONS}
    assert {python: resolved(run) for python, run in runs.items()} == dict.fromkeys(PYTHONS, True)


def test_a_pin_that_only_a_private_wheel_satisfies_is_found(tmp_path: Path) -> None:
    """As it was: torch 2.13.0 of the public index wants another Triton."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wrong = tmp_path / "constraints.txt"
    wrong.write_text(re.sub(r"(?m)^triton==.*$", "triton==3.6.0", pins), encoding="utf-8")
    assert not resolved(compiled("3.12", wrong, tmp_path))


def test_the_pythons_are_those_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={PYTHONS[0]}"

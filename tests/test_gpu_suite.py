"""`make gpu-test` on machines that nobody has tried: what is skipped there, and what is run."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import LOADERS

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests/gpu").glob("test_*.py"))
HOPPER = "dsv4.kernels.hopper"
EXTRAS = {
    "dsv4.tiers": "tiers",
    "tests.support.tiered": "tiers",
    "tests.support.handoff": "nixl",
    "transformers": "transformers",
}


def imported(tree: ast.AST) -> set[str]:
    """Every module that a file names in an import or in a text, with what it takes from there."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def marks(tree: ast.Module) -> set[str]:
    """Of all tests of a file: `gpu`, `extra('nixl')` and so on."""
    (given,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    each = given.elts if isinstance(given, ast.List) else [given]
    return {ast.unparse(mark).removeprefix("pytest.mark.") for mark in each}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_say_what_they_need(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names, found = imported(tree), marks(tree)
    assert "gpu" in found
    assert ("hopper" in found) == any(f"{name}.".startswith(f"{HOPPER}.") for name in names)
    for package, extra in EXTRAS.items():
        if any(f"{name}.".startswith(f"{package}.") for name in names):
            assert f"extra({extra!r})" in found
            assert extra in LOADERS


# A machine in words: torch says that its GPU is a B200, and packages are missing.
B200 = """
import sys
from types import SimpleNamespace

import torch

for missing in ("nixl_cu12", "nixl_cu13", "xxhash", "transformers"):
    sys.modules[missing] = None
torch.cuda.is_available = lambda: True
torch.cuda.get_device_properties = lambda device: SimpleNamespace(major=10, minor=0, name="B200")
"""


def test_a_b200_without_extras_skips_what_it_cannot_run(tmp_path: Path):
    (tmp_path / "b200.py").write_text(B200)
    kinds = ("hopper", "wide", "handoff", "tiers", "transformers", "devices")
    files = [str(path) for path in FILES if path.stem.split("_")[-2] in kinds]
    assert len(files) == 8
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(ROOT)))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "b200", "-p", "no:cacheprovider", "-rs", "-m", "gpu",
         *files],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Hopper's own kernels do not run on sm_100 (B200)" in ran.stdout
    assert "the hand-off needs NIXL" in ran.stdout
    assert "a tier needs xxhash" in ran.stdout
    assert "import of transformers halted" in ran.stdout
    last = ran.stdout.splitlines()[-1]
    assert "skipped" in last
    assert "passed" not in last


STUB = """#!/bin/sh
# $0 stands for Python: `-m pytest -m gpu FILE` or `-m benchmarks.run …`
echo "$PYTHONPATH: $*" >> "$TOLD"
case "$*" in
*test_append_gpu.py) exit $TEST_STATUS ;;
*benchmarks.run*) exit $BENCHMARK_STATUS ;;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("tests", "benchmarks", "passes"),
    [(0, 0, True), (5, 0, True), (1, 0, False), (139, 0, False), (255, 0, False), (0, 1, False)],
    ids=["all well", "nothing collected", "failure", "crash", "status of 255", "benchmarks"],
)
def test_benchmarks_run_whatever_tests_say(
    tmp_path: Path, tests: int, benchmarks: int, passes: bool
):
    stub, told = tmp_path / "python", tmp_path / "told"
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    environment.update(
        TOLD=str(told), TEST_STATUS=str(tests), BENCHMARK_STATUS=str(benchmarks), LC_ALL="C"
    )
    made = subprocess.run(
        ["make", "gpu-test", f"PYTHON={stub}", "COMMIT=abc1234", "GPU_TEST_JOBS=1"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = told.read_text().splitlines()
    names = [str(path.relative_to(ROOT)) for path in FILES]
    assert lines[:-1] == [f".: -m pytest -m gpu {name}" for name in names]
    assert lines[-1] == ".: -m benchmarks.run --commit abc1234"
    assert (made.returncode == 0) == passes, made.stdout + made.stderr
    said = ["FAILED" if status not in (0, 5) else "passed" for status in (tests, benchmarks)]
    assert f"GPU tests {said[0]}, benchmarks {said[1]}" in made.stdout


def test_every_file_can_be_collected():
    """A name that has moved would be noticed on a GPU machine only."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "-m", "gpu", *map(str, FILES)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert all(path.name in ran.stdout for path in FILES)

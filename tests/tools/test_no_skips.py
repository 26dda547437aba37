"""pytest --no-skips, which `make test-newest-transformers` has: what is skipped has failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = "from tests.conftest import pytest_addoption, pytest_runtest_makereport\n"
TESTS = """
import pytest

def test_that_runs():
    pass

def test_that_skips():
    pytest.skip("this library is another")

@pytest.mark.skip(reason="no such library")
def test_that_is_marked():
    pass

@pytest.mark.skip(reason="exhaustive: run with -m nightly")
def test_for_the_night():
    pass
"""


def outcome(directory: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *options]
    ended = subprocess.run(
        [*command, "--rootdir", str(directory), str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ended.returncode, ended.stdout


def test_what_is_skipped_has_failed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    code, said = outcome(tmp_path)
    assert code == 0, said
    code, said = outcome(tmp_path, "--no-skips")
    assert code == 1, said
    assert "1 failed, 1 passed, 1 skipped, 1 error" in said, said


def test_the_newest_transformers_is_tested_with_it() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\ntest-newest-transformers:")[1]
    assert "--no-skips tests/integrations" in recipe.split("\n\n")[0]

"""What the README shows works: its Python runs, its commands exist, its files are there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from dsv4.cli import app

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]


def test_python_blocks_run_one_after_the_other_where_only_the_package_is_installed(
    tmp_path: Path,
) -> None:
    """In an empty directory, and nothing of the checkout can be imported but `dsv4`."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    site, empty = tmp_path / "site", tmp_path / "empty"
    site.mkdir()
    empty.mkdir()
    (site / "dsv4").symlink_to(ROOT / "dsv4")
    beside = [path.stem for path in ROOT.iterdir() if path.is_dir() and path.name != "dsv4"]
    before = f"import sys, dsv4\nsys.modules.update(dict.fromkeys({beside}))\n"
    after = f"assert dsv4.__file__.startswith({str(site)!r}), dsv4.__file__\n"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([before, *blocks, after])],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def assert_installable(line: str, what: str) -> None:
    """This package, with extras that it has, quoted: brackets are patterns to some shells."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = re.fullmatch(r"(?:\.|([\w-]+))(?:\[([\w,]+)\])?", what)
    assert found, what
    assert found[1] in (None, project["name"])
    if found[2]:
        assert set(found[2].split(",")) <= set(project["optional-dependencies"])
        assert f'"{what}"' in line


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_these_arguments(line: str) -> None:
    program, command, *arguments = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{re.escape(command)}:", (ROOT / "Makefile").read_text("utf-8"), re.M)
        return
    if program == "pip":
        assert command == "install"
        assert_installable(line, *arguments)
        return
    assert program == ".venv/bin/dsv4"
    group: Any = typer.main.get_command(app)
    group.commands[command].make_context(command, arguments)  # raises for what it does not know


def test_each_command_is_shown() -> None:
    for command in ("plan", "verify", "bench"):
        assert any(line.startswith(f".venv/bin/dsv4 {command}") for line in COMMANDS)


def test_modules_that_are_named_exist() -> None:
    modules = re.findall(r"python -m ([\w.]+)", TEXT)
    assert modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_paths_named_in_the_tree_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    for link in links:
        if "://" not in link:
            assert (ROOT / link.split("#")[0]).exists(), link

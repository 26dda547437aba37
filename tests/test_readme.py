"""What the README shows works: its Python runs, its commands exist, its files are there."""

from __future__ import annotations

import re
import shlex
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


def test_python_blocks_run_one_after_the_other() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


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

"""Code in README and docs is real: Python runs, commands exist, and what does neither says why.

A page's Python blocks run one after the other, as a reader would. Before a block may stand

    <!-- setup            code that a reader has in another form: it runs first
    ...
    -->
    <!-- not run: why -->
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from dsv4.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if path.name != "commands.md"  # generated from --help
)
ELSEWHERE = {  # whose Python runs in a test of its own
    "README.md": "tests/test_readme.py",
    "docs/transformers.md": "tests/integrations/test_docs_transformers.py",
}
BLOCK = re.compile(
    r"<!-- setup\n(?P<setup>.*?)-->|(?:<!-- not run: (?P<why>.+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    code: str
    why_not: str | None
    line: int


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text("utf-8")
    for found in BLOCK.finditer(text):
        hidden = found["setup"] is not None
        yield Block(
            language="python" if hidden else found["language"],
            code=found["setup"] if hidden else found["code"],
            why_not=found["why"],
            line=text.count("\n", 0, found.start("setup" if hidden else "code")),
        )


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if any(b.language == language for b in blocks(page))]


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page not in ELSEWHERE])
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o700)  # a disk tier refuses what others can read
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page):
        if block.language == "python" and not block.why_not:
            code = "\n" * block.line + block.code
            exec(compile(code, page, "exec", dont_inherit=True), namespace)


def test_pages_that_run_elsewhere_do() -> None:
    for page, test in ELSEWHERE.items():
        assert page in PAGES
        assert Path(page).name in (ROOT / test).read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_code_is_in_fences(page: str) -> None:
    """What is only indented would be code that nothing here looks at."""
    text = BLOCK.sub("", (ROOT / page).read_text("utf-8"))
    for found in re.finditer(r"\n\n(?=    )", text):
        before = text[: found.start()].rstrip().rpartition("\n")[2]
        in_a_list = re.match(r"\s*(?:[-*]|\d+\.) |  ", before)
        assert in_a_list, text[found.end() :].partition("\n")[0]


def test_python_that_does_not_run_parses() -> None:
    for page in pages_with("python"):
        for block in blocks(page):
            if block.language == "python":
                compile(block.code, page, "exec", dont_inherit=True)


# ---- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_exist(page: str) -> None:
    for block in blocks(page):
        if block.language == "sh" and not block.why_not:
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    assert_exists(line)


def assert_exists(line: str) -> None:
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
        words = words[1:]
    program, *rest = words
    match os.path.basename(program), rest:
        case "dsv4", [*arguments]:
            group: Any = typer.main.get_command(app)
            while isinstance(group, typer.core.TyperGroup) and not arguments[0].startswith("-"):
                group, arguments = group.commands[arguments[0]], arguments[1:]
            try:
                group.make_context("dsv4", arguments)  # raises for what it does not know
            except typer.Exit:
                assert "--help" in rest, line
        case "make", [target, *_]:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M), line
        case "python" | "python3", ["-m", "pip" | "venv", *_]:
            pass
        case "python" | "python3", ["-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), line
        case "python" | "python3", [script, *_]:
            assert (ROOT / script).exists(), line
        case "pytest", [*arguments]:
            for path in (one for one in arguments if one.startswith("tests/")):
                assert (ROOT / path).exists(), line
        case "pip", ["install", *whats]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
            for what in whats:
                if extras := re.match(r"(?:dsv4|\.)\[([\w,]+)\]", what):
                    assert set(extras[1].split(",")) <= set(project["optional-dependencies"]), line
        case "curl", [address, *_]:  # tests/test_readme.py asks a server
            path = re.fullmatch(r"http://127\.0\.0\.1:8000(/\S*)", address)
            assert path, line
            assert f"`{path[1]}`" in (ROOT / "docs" / "serve.md").read_text("utf-8"), line
        case _:
            pytest.fail(f"{line!r} is not checked: say why before its block (not run: …)")


def test_a_command_that_does_not_exist_is_found() -> None:
    for line in ("dsv4 plan --no-such-option", "make nothing", "python -m examples.none", "rm x"):
        with pytest.raises((Exception, pytest.fail.Exception)):
            assert_exists(line)

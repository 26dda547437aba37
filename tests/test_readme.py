"""What the README shows works: its Python runs, its commands exist, its files are there."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
SHELL = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for block in SHELL for line in block.splitlines()]


def test_python_blocks_run_one_after_the_other_where_only_the_package_is_installed(
    tmp_path: Path,
) -> None:
    """In an empty directory, and nothing of the checkout can be imported but `dsv4`."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 2
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


@pytest.mark.timeout(120)
def test_the_server_answers_as_printed(tmp_path: Path) -> None:
    """On another port than the printed one, which may be taken."""
    blocks = [each.replace("\\\n", " ") for each in SHELL]
    (serve,) = (each.strip() for each in blocks if "dsv4 serve" in each)  # alone: it does not end
    (curl,) = (each.strip() for each in blocks if each.startswith("curl "))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, *arguments = shlex.split(serve)
    assert program == "dsv4"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dsv4", *arguments, "--port", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as server:
        try:
            _, address, *options = shlex.split(curl)
            asked = Request(
                address.replace(":8000", f":{port}"),
                headers=dict([options[options.index("-H") + 1].split(": ")]),
                data=options[options.index("-d") + 1].encode(),
            )
            answer = json.load(answered(asked, server))
        finally:
            server.terminate()
    assert "An entry is" in answer["choices"][0]["message"]["content"]


def answered(asked: Request, server: subprocess.Popen[bytes]) -> Any:
    """Tries until the server is up."""
    while True:
        try:
            return urlopen(asked, timeout=60)
        except URLError:
            assert server.poll() is None, server.stderr and server.stderr.read()
            time.sleep(0.1)


def test_each_command_is_shown() -> None:
    """With arguments that exist: tests/test_docs_code.py."""
    for command in ("plan", "verify", "bench", "serve"):
        assert any(line.startswith(f"dsv4 {command}") for line in COMMANDS)


def test_modules_that_are_named_exist() -> None:
    modules = re.findall(r"python -m ([\w.]+)", TEXT)
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_paths_named_in_the_tree_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    for link in links:
        if "://" not in link:
            assert (ROOT / link.split("#")[0]).exists(), link


def test_the_package_index_is_given_absolute_links() -> None:
    """As the build makes them of pyproject.toml's substitutions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = TEXT
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", TEXT)) > 30
    source = project["project"]["urls"]["Source"]
    assert all(link.startswith("https://") for link in links)
    assert {link.removeprefix(source).split("/")[1] for link in links if source in link} == {
        "blob",
        "raw",
    }

"""The tool that compares what two work trees compile, on trees with one tiny kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tools import same_ptx as tool

ROOT = Path(__file__).parents[2]
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def {name}(x):
    # {comment}
    at = x + tl.program_id(0)
    tl.store(at, tl.load(at) {operation})
"""
TEST = """
import os, subprocess, sys
from pathlib import Path

def test_it_compiles():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_tiny_sm90", "case"]
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True)

if __name__ == "__main__":
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    import kernels

    (kernel,) = [k for k in vars(kernels).values() if isinstance(k, triton.JITFunction)]
    source = ASTSource(fn=kernel, signature={"x": "*fp32"}, constexprs={}, attrs={})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


def tree(root: Path, *, name: str, comment: str, operation: str) -> Path:
    (root / "tests/kernels").mkdir(parents=True)
    (root / "kernels.py").write_text(KERNEL.format(name=name, comment=comment, operation=operation))
    (root / "tests/kernels/test_tiny_sm90.py").write_text(TEST)
    return root


def test_names_and_lines_do_not_count_and_instructions_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    before = tree(tmp_path / "before", name="one", comment="short", operation="+ 1")
    other = tree(tmp_path / "other", name="another", comment="a\n    # b", operation="+ 1")
    more = tree(tmp_path / "more", name="one", comment="short", operation="* 3 + 1")
    trees = [before, other, more]
    compiled = tool.compile_trees(trees, None, Console(stderr=True))  # each once
    monkeypatch.setattr(
        tool, "compile_trees", lambda asked, *_: [compiled[trees.index(each)] for each in asked]
    )

    code, printed = tool.main([str(before), str(other)]), capsys.readouterr().out
    assert code == 0, printed
    assert "tiny: case 1" in printed
    assert "1 of 1 cases identical" in printed

    code, printed = tool.main([str(before), str(more)]), capsys.readouterr().out
    assert code == 1, printed
    assert "different" in printed
    assert "0 of 1 cases identical" in printed


def test_what_pythonpath_names_is_found_while_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As another Triton is, which is unpacked there."""
    one = tree(tmp_path / "one", name="one", comment="short", operation="+ 1")
    kernels = one / "kernels.py"
    kernels.write_text("import unpacked\n" + kernels.read_text())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/unpacked.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "folder"))
    (found,) = tool.compile_trees([one], None, Console(stderr=True))
    assert list(found) == ["tiny: case 1"]


def test_a_tree_without_sm90_tests_is_refused(tmp_path: Path):
    command = [sys.executable, str(ROOT / "tools/same_ptx.py"), str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no tests/kernels/*_sm90.py" in done.stderr

"""Whether two work trees compile the same kernels: a refactoring of kernels is free where they do.

    python tools/same_ptx.py BEFORE AFTER [--only "append"] [--diff 20]

Runs the sm_90 tests (tests/kernels/*_sm90.py) of both trees, each in its own process and without a
GPU, and compares the PTX of every kernel that they compile. Debug lines, comments and the names of
kernels and parameters are left aside. Tests that fail are named; what they compile is compared all
the same. With PYTHONPATH=FOLDER, where another Triton is unpacked, that one compiles both.

Exit code 0: all cases identical; 1: some differ, or one tree has cases that the other has not;
2: nothing was compiled.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

TOOLS = Path(__file__).parent
_DEBUG_LINE = re.compile(r"\s*(\.loc\b|\.file\b|\$L__(tmp|func_|info_|sec_)|//)")
_DEBUG_SECTION = re.compile(r"^\s*\.section\s+\.debug.*?^\s*\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"(@!?%p\d+ )?[a-z][\w.:]*[ ;]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled kernel: its lines without debug information and names."""

    lines: tuple[str, ...]

    @classmethod
    def of(cls, ptx: str, shared_bytes: int) -> Kernel:
        ptx = _DEBUG_SECTION.sub("", ptx)
        names = re.findall(r"^\s*(?:\.\w+\s+)*\.(?:entry|func)\s+(?:\([^)]*\)\s*)?(\w+)", ptx, re.M)
        for nth, name in enumerate(dict.fromkeys(names)):
            ptx = re.sub(rf"\b{re.escape(name)}(?=\b|_param_)", f"function_{nth}", ptx)
        lines = [f"// {shared_bytes} bytes of shared memory"]
        for line in ptx.splitlines():
            text = line.partition("//")[0].strip()
            if text and not _DEBUG_LINE.match(text):
                lines.append(re.sub(r"\s+", " ", text))
        return cls(lines=tuple(lines))

    @property
    def instructions(self) -> int:
        return sum(1 for line in self.lines if _INSTRUCTION.match(line))


def recorded(folder: Path) -> dict[str, Kernel]:
    """The kernels that record_ptx.py has left in a folder, by case."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        kept = json.loads(file.read_text())
        found[kept["case"]] = Kernel.of(kept["ptx"], kept["shared_bytes"])
    return found


def compile_trees(trees: list[Path], only: str | None, console: Console) -> list[dict[str, Kernel]]:
    """What the sm_90 tests of each tree compile, both at once."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(nth) for nth in range(len(trees))]
        running = [_start(tree, folder, only) for tree, folder in zip(trees, folders, strict=True)]
        begun = time.monotonic()
        with console.status("compiling") as status:
            while any(process.poll() is None for process in running):
                counts = " and ".join(str(len(list(f.glob("*.json")))) for f in folders)
                status.update(f"{counts} kernels compiled, {time.monotonic() - begun:.0f} s")
                time.sleep(0.2)
        for tree, folder, process in zip(trees, folders, running, strict=True):
            if process.returncode:
                last = (folder / "pytest.txt").read_text().splitlines()[-12:]
                console.print(f"tests of {tree} fail:", *last, sep="\n  ", markup=False)
        return [recorded(folder) for folder in folders]


def _start(tree: Path, folder: Path, only: str | None) -> subprocess.Popen[bytes]:
    folder.mkdir()
    tests = sorted(str(file.relative_to(tree)) for file in tree.glob("tests/kernels/*_sm90.py"))
    chosen = ["-k", " and ".join(only.split())] if only else []
    plugins = ["-p", "record_ptx", "-p", "no:cacheprovider"]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", *plugins, *chosen, *tests],
        cwd=tree,
        env={**os.environ, "RECORD_PTX": str(folder), "PYTHONPATH": _python_path()},
        stdout=(folder / "pytest.txt").open("wb"),
        stderr=subprocess.STDOUT,
    )


def _python_path() -> str:
    """This folder, then what was given; a work tree is found before both."""
    return os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH"))))


def compare(before: dict[str, Kernel], after: dict[str, Kernel]) -> list[tuple[str, str, bool]]:
    """Of every case: its name, a verdict in words, and whether it is identical."""
    rows = []
    for case in sorted(before.keys() | after.keys()):
        old, new = before.get(case), after.get(case)
        if old is None or new is None:
            rows.append((case, f"only in {'BEFORE' if new is None else 'AFTER'}", False))
        elif old == new:
            rows.append((case, f"identical, {new.instructions} instructions", True))
        else:
            counts = f"{old.instructions} → {new.instructions} instructions"
            rows.append((case, f"different, {counts}", False))
    return rows


def print_difference(old: Kernel, new: Kernel, most: int, console: Console) -> None:
    lines = difflib.unified_diff(old.lines, new.lines, "BEFORE", "AFTER", lineterm="", n=2)
    for line in itertools.islice(lines, most):
        console.print(line, markup=False, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    description, _, _ = (__doc__ or "").partition("\n\n    python")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("before", type=Path, help="work tree to compare with")
    parser.add_argument("after", type=Path, help="work tree to look at")
    parser.add_argument("--only", help="words that the names of the tests must contain")
    parser.add_argument("--diff", type=int, default=0, help="lines to show of each difference")
    given = parser.parse_args(arguments)
    trees = [given.before.resolve(), given.after.resolve()]
    for tree in trees:
        if not list(tree.glob("tests/kernels/*_sm90.py")):
            parser.error(f"{tree} has no tests/kernels/*_sm90.py: give the root of a work tree")
    console = Console()
    before, after = compile_trees(trees, given.only, Console(stderr=True))
    rows = compare(before, after)
    if not rows:
        console.print("Nothing was compiled: do the tests run, and does --only match any?")
        return 2
    table = Table("case", "PTX", title=f"{given.before} → {given.after}")
    for case, verdict, same in rows:
        table.add_row(case, verdict, style=None if same else "bold red")
    console.print(table)
    if given.diff:
        for case, _, same in rows:
            if not same and case in before and case in after:
                console.print(f"\n{case}")
                print_difference(before[case], after[case], given.diff, console)
    same_cases = sum(same for _, _, same in rows)
    console.print(f"{same_cases} of {len(rows)} cases identical")
    return 0 if same_cases == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

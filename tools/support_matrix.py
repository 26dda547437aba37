"""The table of docs/gpus.md: which operation has run, or was compiled, for which target and format.

    python -m tools.support_matrix        writes it anew

"compiled" is read from tests/kernels/instructions.json: its launches were compiled for that target
(make test-gpus checks them). "run" are the targets of GPUs that have a
results file under benchmarks/results/, for the operations that tests/gpu/ runs there; entries in
host memory have run where that file has their suite.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from dsv4.kernels.target import TARGETS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpus.md"
MARKS = "<!-- written by python -m tools.support_matrix -->", "<!-- end of the matrix -->"
# a results file: the target of that GPU
GPUS = {"h200": "sm_90"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An operation on records of a format. `launches` are their names in instructions.json, `test`
    the file that runs it on a GPU, `suite` the suite that a GPU's results must have for it."""

    operation: str
    format: str
    launches: str
    test: str
    suite: str = "writes"


ROWS = (
    Row(
        operation="append, V4: window, entries, index keys",
        format="fp8_ds, mxfp4",
        launches=r"append (flash|pro) ",
        test="append",
    ),
    Row(
        operation="append, V4.1",
        format="v41_fp4, v41_fp8",
        launches=r"append v41 ",
        test="v41",
        suite="v41",
    ),
    Row(operation="append", format="fp8_row", launches=r"write fp8_row$", test="append"),
    Row(operation="append", format="bf16", launches=r"write bf16$", test="append"),
    Row(
        operation="gather",
        format="fp8_ds",
        launches=r"gather (all|entries|window)$",
        test="append",
        suite="gather",
    ),
    *(
        Row(
            operation="index queries and scores",
            format=name,
            launches=rf"(query {name}$|scores {name} )",
            test=test,
            suite="indexer",
        )
        for name, test in (
            ("mxfp4", "index_scores"),
            ("nvfp4", "index_scores"),
            ("fp8", "known_answers"),
            ("bf16", "known_answers"),
        )
    ),
    Row(
        operation="exact top-k",
        format="scores in bf16, fp32",
        launches=r"top-k ",
        test="top_k",
        suite="indexer",
    ),
    Row(
        operation="attend, V4-Flash and V4-Pro",
        format="fp8_ds",
        launches=r"attend v4-(flash|pro) ",
        test="attend",
        suite="attention",
    ),
    Row(
        operation="attend, V4.1",
        format="v41_fp4, v41_fp8",
        launches=r"attend v41",
        test="v41",
        suite="v41",
    ),
    Row(
        operation="attend",
        format="fp8_row",
        launches=r"attend fp8_row ",
        test="attend",
        suite="attention",
    ),
    Row(
        operation="attend",
        format="bf16",
        launches=r"attend bf16 ",
        test="attend",
        suite="attention",
    ),
    Row(
        operation="entries in host memory: resolve, stage, fetch",
        format="fp8_ds, v41_fp4",
        launches=r"host entries ",
        test="host_entries",
        suite="residency",
    ),
    Row(
        operation="steps planned ahead: follow",
        format="",
        launches=r"follow ",
        test="follow",
        suite="decode_step",
    ),
)


def matrix() -> str:
    compiled = json.loads((ROOT / "tests/kernels/instructions.json").read_text("utf-8"))
    suites = {target: suites_of(name) for name, target in GPUS.items()}
    lines = [
        "| operation | format | " + " | ".join(f"{t.name}" for t in TARGETS.values()) + " |",
        "| --- | --- |" + " --- |" * len(TARGETS),
    ]
    for row in ROWS:
        cells = [_cell(row, compiled.get(name, {}), suites.get(name, set())) for name in TARGETS]
        lines.append(f"| {row.operation} | {row.format} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def suites_of(gpu: str) -> set[str]:
    """The suites of a GPU's results."""
    path = ROOT / "benchmarks" / "results" / f"{gpu}.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {str(json.loads(line)["suite"]) for line in lines}


def _cell(row: Row, compiled: dict[str, object], suites: set[str]) -> str:
    if not any(re.match(row.launches, name) for name in compiled):
        return ""
    return "**run**" if row.suite in suites else "compiled"


def written(page: str) -> str:
    """The page with the table of now."""
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{matrix()}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), encoding="utf-8")

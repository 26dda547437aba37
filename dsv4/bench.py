"""Benchmark results as files: one JSON object per line, one line per case. Torch-free."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dsv4.errors import InvalidInput

# A measured time is within these limits; ratios of such times are finite.
LEAST_US, MOST_US = 1e-6, 1e15

Verdict = Literal["target", "first step", "miss", "no target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all cases of one run share: the sources, the machine, and what it reached in this run
    with a copy and with an empty kernel."""

    copy_bytes_per_us: float
    empty_launch_us: float
    commit: str
    gpu: str
    torch: str
    triton: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One measured case.

    `must_move_bytes` counts each byte that has to move once; `floor_us` is the time of a copy of
    that many bytes plus that of an empty kernel, both measured in the same run. `peers_us` are
    other libraries in that run too, `anchors_us` what they took on such a GPU in a separate run.
    `parts_us` and `parts_launches` split a step by operation. `cache_bytes` is what the cache of
    each library holds, `step_bytes` what a step allocates in addition, at its peak.
    """

    case: str
    suite: str
    series: str
    model: str
    batch: int
    microseconds: float
    launches: int
    must_move_bytes: int
    floor_us: float
    run: Run
    context: int | None = None
    target_us: float | None = None
    first_step_us: float | None = None
    peers_us: dict[str, float] = field(default_factory=dict)
    anchors_us: dict[str, float] = field(default_factory=dict)
    parts_us: dict[str, float] = field(default_factory=dict)
    parts_launches: dict[str, int] = field(default_factory=dict)
    cache_bytes: dict[str, int] = field(default_factory=dict)
    step_bytes: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def gigabytes_per_second(self) -> float:
        return self.must_move_bytes / self.microseconds / 1e3

    @property
    def percent_of_floor(self) -> float:
        """100 is the floor; a launch whose bytes are in the L2 can exceed it."""
        return 100 * self.floor_us / self.microseconds

    @property
    def verdict(self) -> Verdict:
        if self.target_us is None:
            return "no target"
        if self.microseconds <= self.target_us:
            return "target"
        if self.first_step_us is not None and self.microseconds <= self.first_step_us:
            return "first step"
        return "miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCase:
    """A case of both files. `ratio` below 1: the second is faster."""

    case: str
    a_us: float
    b_us: float

    @property
    def ratio(self) -> float:
        return self.b_us / self.a_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two results files, case by case, in the order of the first."""

    cases: tuple[ComparedCase, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cases": [{**asdict(case), "ratio": case.ratio} for case in self.cases],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def read_results(path: str | Path) -> list[BenchResult]:
    """The cases of a results file, in its order. Raises InvalidInput for a file that is missing,
    empty or not one, with the line that is wrong."""
    try:
        # an editor may have put a byte order mark first
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read results from {path}: {error}") from error
    results: list[BenchResult] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):  # texts may have other line ends
        if not line.strip():
            continue
        result = _parsed(line, where=f"line {number} of {path}")
        if result.case in line_of:
            raise InvalidInput(
                f"{path} has the case {result.case!r} in lines {line_of[result.case]} and "
                f"{number}: keep one of them"
            )
        line_of[result.case] = number
        results.append(result)
    if not results:
        raise InvalidInput(f"{path} holds no results: write some with python -m benchmarks.run")
    return results


def write_results(path: str | Path, results: Iterable[BenchResult]) -> None:
    lines = [json.dumps(_flat(result), ensure_ascii=False) for result in results]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _flat(result: BenchResult) -> dict[str, Any]:
    """A line of a file, in which the fields of the run stand among those of the case."""
    flat: dict[str, Any] = {}
    for name, value in asdict(result).items():
        flat.update(value if name == "run" else {name: value})
    return flat


def compare(a: Iterable[BenchResult], b: Iterable[BenchResult]) -> Comparison:
    a_us, b_us = ({r.case: r.microseconds for r in results} for results in (a, b))
    return Comparison(
        cases=tuple(
            ComparedCase(case=case, a_us=a_us[case], b_us=b_us[case])
            for case in a_us
            if case in b_us
        ),
        only_a=tuple(case for case in a_us if case not in b_us),
        only_b=tuple(case for case in b_us if case not in a_us),
    )


def _parsed(line: str, *, where: str) -> BenchResult:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON ({error}): it was cut short or edited") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{where} is a JSON {type(found).__name__}, expected an object")
    values = _values(BenchResult, found, where)
    run = Run(**_values(Run, found, where))
    if not LEAST_US <= values["microseconds"] <= MOST_US:
        raise InvalidInput(f"{where} has microseconds={values['microseconds']}: no time is that")
    return BenchResult(**values, run=run)


def _values(
    kind: type[Run] | type[BenchResult], found: dict[str, Any], where: str
) -> dict[str, Any]:
    """The fields of a kind that a line has, each of the type that it must be."""
    values: dict[str, Any] = {}
    for item in fields(kind):
        if item.name == "run":
            continue
        if item.name not in found:
            if item.default is MISSING and item.default_factory is MISSING:
                raise InvalidInput(
                    f"{where} has no {item.name!r}: it is not a result of this version's benchmarks"
                )
            continue
        value = found[item.name]
        if not _fits(str(item.type), value):
            raise InvalidInput(
                f"{where} has {item.name}={reprlib.repr(value)}, expected {item.type}, all numbers "
                f"finite"
            )
        values[item.name] = value
    return values


def _fits(wanted: str, value: object) -> bool:
    if wanted.endswith(" | None"):
        return value is None or _fits(wanted.removesuffix(" | None"), value)
    if wanted.startswith("dict[str, "):
        inner = wanted.removeprefix("dict[str, ").removesuffix("]")
        return isinstance(value, dict) and all(_fits(inner, v) for v in value.values())
    if wanted == "str":
        return isinstance(value, str)
    accepted = (int, float) if wanted == "float" else (int,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False

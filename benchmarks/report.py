"""`python -m benchmarks.report [results.jsonl]`: writes the tables of docs/performance.md, every
registered case with its target, those of docs/v41.md and docs/gpus.md, the plots under docs/plots/
and every figure of README and docs that has a mark (benchmarks/figures.py), from a results file.
Targets and times of others in that file are those of the current registry."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.case import ANCHORS_ARE_OF, Case
from benchmarks.figures import PAGES, ROOT, rewritten
from benchmarks.peers import MEMORY, SOURCES, WRITE_LAUNCHES
from benchmarks.registry import SUITES
from dsv4.bench import BenchResult, read_results, write_results
from dsv4.cache.schema import CacheSchema
from dsv4.errors import Dsv4Error, InvalidInput
from dsv4.model import ModelSpec
from dsv4.plots.results import plot_results
from tools import support_matrix

DOCUMENT = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200.jsonl"
PLOT_FOLDER = ROOT / "docs" / "plots"
# file name -> suites it shows
PLOTS = {
    "kernels.png": ("attention", "writes"),
    "steps.png": ("decode_step",),
    "transformers.png": ("transformers",),
}
OTHERS_NOTE = "\n".join(
    f"{' and '.join(SOURCES[key].names)}: measured by us on an H200 apart from this run, "
    f"{SOURCES[key].date}, version {SOURCES[key].version}"
    for key in ("attention", "writes")
)
BEGIN, END = "<!-- tables: written by python -m benchmarks.report -->", "<!-- end of tables -->"
TITLES = {
    "writes": "Cache writes of one layer",
    "attention": "Decode attention of one layer",
    "ranks": "Decode attention of a tensor-parallel rank, with our own time with all heads",
    "indexer": "Indexer of one layer",
    "gather": "Dequantising gather",
    "prefill": "One chunk of a prompt, all layers, host time included",
    "host": "Host",
    "prefix": "Prefix hits, host time",
}
# launches of cache writes in a decode step of V4-Flash
WRITE_LAUNCHES_TARGET = 43
# how a case of V4.1 begins -> how the case of V4-Flash begins that it is compared with
V41_BESIDE = {
    "step v41-flash": "step v4-flash",
    "chunk v41-flash": "chunk v4-flash",
    "attend v41": "attend flash csa",
    "append v41 pairs batch": "append flash csa flush batch",
    "append v41 pairs prefill": "append flash csa prefill",
    "index scores v41": "index scores",
}
# V4-Flash, bytes
MEMORY_TARGETS = {
    "bytes a token": 3_550,
    "bytes a request, at any length": 15_600_000,
    "the same, online HCA state, without the draft layer's window": 4_800_000,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    path = parser.parse_args().results
    try:
        results = held_against(read_results(path))
        write_results(path, results)
        for page in PAGES:
            document = ROOT / page
            text = page_text(page, document.read_text(encoding="utf-8"), results)
            document.write_text(text, encoding="utf-8")
        support_matrix.PAGE.write_text(
            support_matrix.written(support_matrix.PAGE.read_text(encoding="utf-8")),
            encoding="utf-8",
        )
        PLOT_FOLDER.mkdir(exist_ok=True)
        for name, suites in PLOTS.items():
            note = OTHERS_NOTE if name == "kernels.png" else ""
            plot_results(drawn(results, name), PLOT_FOLDER / name, suites=suites, note=note)
    except Dsv4Error as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{DOCUMENT}: {summary(results)}")
    return 0


def updated(document: str, made: str) -> str:
    """The document with new tables between its marks. Raises InvalidInput if they are missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidInput(f"the document has no lines {BEGIN!r} and {END!r}: put them back")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def page_text(page: str, text: str, results: Sequence[BenchResult]) -> str:
    """A page of README and docs with all that is written from results."""
    if page == "docs/performance.md":
        text = updated(text, tables(results))
    if page == "docs/v41.md":
        text = updated(text, v41_table(results))
    return rewritten(text, results, page=page)


def held_against(results: Sequence[BenchResult]) -> list[BenchResult]:
    """Results with the targets and the times of others that the registry has now: they were not
    measured in the run."""
    cases = {case.name: case for listed in SUITES.values() for case in listed()}
    return [
        replace(
            result,
            target_us=cases[result.case].target_us,
            first_step_us=cases[result.case].first_step_us,
            anchors_us=cases[result.case].anchors_us,
        )
        if result.case in cases and result.run.gpu == ANCHORS_ARE_OF
        else result
        for result in results
    ]


def drawn(results: Sequence[BenchResult], name: str) -> list[BenchResult]:
    """What a picture shows: of writes the model that others were measured with."""
    if name != "kernels.png":
        return list(results)
    return [r for r in results if r.suite != "writes" or r.model == "v4-flash"]


def _at(commits: Sequence[str]) -> str:
    return f"commit {commits[0]}" if len(commits) == 1 else f"commits {' and '.join(commits)}"


def tables(results: Sequence[BenchResult]) -> str:
    measured = {result.case: result for result in results}
    sections = [summary(results), _conditions(results)]
    for suite, title in TITLES.items():
        sections += [f"## {title}", _cases_table(SUITES[suite](), measured)]
    sections += ["## Whole decode steps", _steps_table(SUITES["decode_step"](), measured)]
    decoding = _decoding_table(SUITES["transformers"](), measured)
    sections += ["## Decoding with transformers, five layers", decoding]
    sections += ["## Memory, V4-Flash", _memory_table()]
    sections += ["## Others: versions, dates, machines", _sources_table()]
    return "\n\n".join(sections)


def v41_table(results: Sequence[BenchResult]) -> str:
    """Cases of V4.1 with the corresponding ones of V4-Flash, each with its commit."""
    measured = {result.case: result for result in results}
    rows, left_out = [], 0
    for case in SUITES["v41"]():
        found = measured.get(case.name)
        if found is None:
            left_out += 1
            continue
        v4 = _beside(case.name, measured)
        steps = found.parts_us if found.parts_us.keys() <= {"append", "select", "attend"} else {}
        rows.append(
            (
                case.name,
                f"{found.microseconds:,.1f}",
                f"{v4.microseconds:,.1f}" if v4 else "",
                f"{found.microseconds / v4.microseconds:.2f}" if v4 else "",
                _times(steps) or _times(found.peers_us),
                str(found.launches),
                f"{found.percent_of_floor:.0f} %",
                _target(case),
                _mark(found),
            )
        )
    header = ("case, µs", "ours", "V4-Flash", "of it", "of which, or beside it", "launches")
    text = _table((*header, "of floor", "target", ""), rows) if rows else ""
    shown = [found for found in results if found.suite == "v41"]
    told = (_conditions(shown) if shown else "", text, _left_out(left_out).strip())
    return "\n\n".join(filter(None, told))


def _beside(name: str, measured: dict[str, BenchResult]) -> BenchResult | None:
    """The measured case of V4-Flash that does as much as a case of V4.1."""
    for own, other in V41_BESIDE.items():
        if name.startswith(own):
            return measured.get(other + name.removeprefix(own))
    return None


def summary(results: Sequence[BenchResult]) -> str:
    verdicts = [result.verdict for result in results if result.verdict != "no target"]
    return (
        f"Of {len(verdicts)} measured cases with a target, {verdicts.count('target')} reach it, "
        f"{verdicts.count('first step')} reach the first step and {verdicts.count('miss')} miss."
    )


def _conditions(results: Sequence[BenchResult]) -> str:
    def of(name: str) -> str:
        return ", ".join(sorted({str(getattr(result.run, name)) for result in results}))

    copies = [result.run.copy_bytes_per_us / 1e6 for result in results]
    empties = [result.run.empty_launch_us for result in results]
    return (
        f"{of('gpu')}; torch {of('torch')}, triton {of('triton')}; "
        f"{_at(sorted({result.run.commit for result in results}))}. Copy "
        f"{_range(copies, 2)} TB/s, an empty kernel in a graph {_range(empties, 2)} µs."
    )


def _range(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _cases_table(cases: Iterable[Case], measured: dict[str, BenchResult]) -> str:
    rows, left_out = [], 0
    for case in cases:
        found = measured.get(case.name)
        if found is not None:
            ours = (
                _times(found.peers_us),
                _target(case),
                f"{found.microseconds:.1f}",
                str(found.launches),
                f"{found.percent_of_floor:.0f} %" if found.launches else "",
                _mark(found),
            )
        elif case.target_us is not None:
            ours = ("", _target(case), "not measured", "", "", "")
        else:
            left_out += 1
            continue
        rows.append((case.name, _times(case.anchors_us), *ours))
    header = (
        "case, µs",
        "others, measured separately",
        "peer, same run",
        "target",
        "ours",
        "launches",
        "of floor",
    )
    return _table((*header, ""), rows) + _left_out(left_out)


def _steps_table(cases: Iterable[Case], measured: dict[str, BenchResult]) -> str:
    rows, write_launches, left_out = [], set(), 0
    for case in cases:
        found = measured.get(case.name)
        if found is None:
            left_out += 1
            continue
        if case.model == "v4-flash":
            write_launches.add(found.parts_launches["append"])
        parts = [f"{found.parts_us[part]:,.0f}" for part in ("append", "select", "attend")]
        rows.append(
            (
                case.name,
                f"{found.microseconds:,.0f}",
                *parts,
                str(found.launches),
                f"{found.percent_of_floor:.0f} %",
                found.note,
            )
        )
    header = ("case, µs", "step", "append", "select", "attend", "launches", "of floor", "blocks")
    peers = ", ".join(f"{name} {count}" for name, count in WRITE_LAUNCHES.items())
    ours = ", ".join(str(count) for count in sorted(write_launches)) or "not measured"
    return (
        f"{_table(header, rows) if rows else ''}{_left_out(left_out)}\n\n"
        f"Launches of cache writes in a decode step of V4-Flash: {peers}; target "
        f"{WRITE_LAUNCHES_TARGET}; ours {ours}."
    ).lstrip()


def _decoding_table(cases: Iterable[Case], measured: dict[str, BenchResult]) -> str:
    rows, left_out = [], 0
    for case in cases:
        found = measured.get(case.name)
        if found is None:
            left_out += 1
            continue
        times = {"dsv4": found.microseconds, **found.peers_us}
        for name, time_us in times.items():
            launches = str(found.launches) if name == "dsv4" else ""
            cache, step = found.cache_bytes.get(name), found.step_bytes.get(name)
            bytes_held = (f"{count:,}" if count is not None else "" for count in (cache, step))
            rows.append((case.name, name, f"{time_us:,.0f}", launches, *bytes_held))
    header = ("case", "", "µs a token", "launches", "cache, bytes", "allocated in a step, bytes")
    return (_table(header, rows) if rows else "") + _left_out(left_out)


def _left_out(count: int) -> str:
    return f"\n\n{count} registered cases have no result in this file." if count else ""


def _memory_table() -> str:
    model = ModelSpec.preset("v4-flash")
    schema = CacheSchema.build(model)
    online = CacheSchema.build(model, hca_state="online")
    drafts = sum(
        page.payload_bytes
        for page in online.layout.pages
        if page.kind == "window" and model.layers[page.layer].draft
    )
    ours = (schema.bytes.per_token, schema.bytes.per_request, online.bytes.per_request - drafts)
    rows = [
        (
            what,
            paper,
            vllm,
            sglang,
            f"{target:,}",
            f"{found:,.0f}",
            "reached" if found <= target else f"**miss** ({found / target:.2f} x)",
        )
        for (what, (paper, vllm, sglang)), target, found in zip(
            MEMORY.items(), MEMORY_TARGETS.values(), ours, strict=True
        )
    ]
    header = ("", "DeepSeek's papers", "vLLM", "SGLang", "target", "ours", "")
    return _table(header, rows)


def _sources_table() -> str:
    rows = [
        (", ".join(source.names), source.of, source.version, source.date, source.measured)
        for source in SOURCES.values()
    ]
    lines = [("whose", "what", "version", "date", "where and how"), ["---"] * 5, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _times(times_us: dict[str, float]) -> str:
    return ", ".join(f"{name} {time_us:,.1f}" for name, time_us in times_us.items())


def _target(case: Case) -> str:
    if case.target_us is None:
        return ""
    first = f" (first {case.first_step_us:.1f})" if case.first_step_us is not None else ""
    return f"{case.target_us:.1f}{first}"


def _mark(result: BenchResult) -> str:
    """Reached or not, and by how much of what was wanted."""
    if result.target_us is None:
        return ""
    match result.verdict:
        case "target":
            return "reached"
        case "first step":
            return f"first step; target {result.microseconds / result.target_us:.2f} x"
        case _:
            wanted = result.first_step_us or result.target_us
            return f"**miss** ({result.microseconds / wanted:.2f} x)"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())

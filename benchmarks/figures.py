"""Figures in prose: `8.5 µs<!--= us("append flash csa flush batch 256") -->`.

A mark is an HTML comment, so a reader does not see it. It is a Python expression over the results
file, over what others were measured at (benchmarks/peers.py) and over what the package computes.
The numbers before it, as many as the expression has values, are its figures: `python -m
benchmarks.report` writes them, each with as many decimals as it had, and a test fails where one
differs. `_` is the value of a number that is not the mark's; `{1,8,64}` in the name of a case
stands for several.

Anything else that looks like a measured figure must say when and where it was measured,
in its paragraph, item or table, or stand in ELSEWHERE with a reason: `unsourced` lists what does
neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import CHUNK_ATTENTION_US, INDEX_SCORES_US, MEMORY
from dsv4.bench import BenchResult
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import StateLayout
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec
from dsv4.planner import LinkSizing, plan, plan_link
from dsv4.planning.deployment import Load, Weights, deploy
from dsv4.planning.gpus import parse_gpus
from dsv4.planning.layouts import layout_of
from dsv4.planning.weights import PRESET_WEIGHTS
from dsv4.residency_planner import plan_residency
from dsv4.units import parse_bytes, parse_link, parse_tokens

ROOT = Path(__file__).parents[1]
# pages that are journals of dated runs: each of their sections names commit, day and machine
JOURNALS = ("docs/kernels/append_log.md", "docs/kernels/read_log.md")
PAGES = (
    "README.md",
    *sorted(
        path
        for found in (ROOT / "docs").rglob("*.md")
        if (path := found.relative_to(ROOT).as_posix()) not in JOURNALS
    ),
)
_TRANSFORMERS = "versions of transformers"
_TRITON = "a version of Triton"
_CHOSEN = "a condition of the example, chosen"
# page -> words with figures in them (of a table: its first row, for all of it) -> what checks these
# figures, or why no check is needed.
ELSEWHERE: dict[str, dict[str, str]] = {
    "docs/distributed.md": {
        "| V4-Flash | bytes | 25 Gb/s | 100 Gb/s | 400 Gb/s |": "rates of links; rows have marks",
        "At 20,000 and 3,000 tokens per second": _CHOSEN,
        "of 400 Gb/s": _CHOSEN,
        "ends after 30 s": "PROBE_S of dsv4/cache/handoff/probe.py",
    },
    "docs/exactness.md": {
        "by up to 2^-7.9": "bounded by tests/cache/test_online_state.py",
        "off from 3.10 on": _TRITON,
    },
    "docs/gpus.md": {
        **dict.fromkeys(("3.6", "3.7", "3.8", "3.9"), _TRITON),
        "| portable kernel | instructions per tile, sm_90 \u2192 sm_100 | H200, measured | B200, "
        "estimated | bytes at 8 TB/s |": "estimates, and named so; the H200's column is in the "
        "journals of 2026-11-15",
        "up to 12 % of the loop": "140 of 1,182 instructions",
        "its 1.5 to 8 ms per layer": "a 64th of the table above it",
    },
    "docs/kernels/append.md": {
        "4,096 clocks, 2.3 \u00b5s": "arithmetic from rates of the GPU",
        "17 ns per entry and, with 2.5 entries per token, 43 ns per token": "named an estimate",
    },
    "docs/run_v4_flash.md": {
        "(compute capability 8.9 or newer)": "a property of GPUs",
        "| GiB | 2 | 4 | 8 |": "sizes of the tensors of DeepSeek's checkpoint",
        **dict.fromkeys(("5.17", "5.18", "5.20"), _TRANSFORMERS),
        "| code \u00d7 code | arenas and table | buffers, workspace and snapshots | rotation "
        "tables |": "arenas and tables: tests/integrations/test_docs_run_v4_flash.py; the rest is "
        "what `dsv4 plan` prints",
    },
    "docs/transformers.md": dict.fromkeys(("since 5.20", "up to 5.18"), _TRANSFORMERS),
}

Values = NDArray[np.float64]

_MARK = re.compile(r"<!--=(.*?)-->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
_COMMIT = re.compile(r"\b[0-9a-f]{7}\b")
_UNITS = (
    r"(?:(?:µs|ns|ms|s|seconds?|minutes?|times (?:as|faster|slower|longer)|[KMGT]i?B/s|[MG]b/s"
    r"|TFLOP/s|tokens (?:a|per) second)(?!\w)|%|[x\u00d7](?!\w|\s*[\d(]))"
)
# a time, a rate, a share, or any number with decimals, but not what is wanted, and no version
_MEASURED = re.compile(
    rf"(?<![\w.,])(?<![A-Za-z]-)(?<!wanted )"
    rf"(?:\d[\d,]*(?:\.\d+)?\s?{_UNITS}|\d[\d,]*\.\d+(?![\w.]*\w))"
)
_VERSION = re.compile(
    r"(?:torch|triton|tritons?|transformers|python|numpy|typer|rich|matplotlib|version|obstore"
    r"|xxhash|prometheus-client|pytest)\W{0,2}(?:\d[\d.]*(?: to |, | and |/)?)*$",
    re.IGNORECASE,
)
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
_MACHINE = re.compile(r"H200|EPYC|\bcores?\b|processor")


# ---- marks --------------------------------------------------------------------------------------


def rewritten(text: str, results: Sequence[BenchResult], *, page: str = "the page") -> str:
    """The page with the figures that its marks stand for. Raises InvalidInput for a mark that
    cannot be evaluated, or that has fewer numbers before it than values."""
    return _marked(text, results, page, _written)


def _marked(
    text: str, results: Sequence[BenchResult], page: str, write: Callable[[Any, str], str]
) -> str:
    """The text with `write(value, number)` in the place of each number that a mark stands for."""
    names = namespace(results)
    pieces: list[str] = []
    end = 0
    for found in _MARK.finditer(text):
        where = f"{page}, mark {found[1].strip()!r}"
        values = _evaluated(found[1], names, where)
        before = text[end : found.start()]
        paragraph = before.rfind("\n\n") + 1
        pieces.append(before[:paragraph] + _filled(before[paragraph:], values, where, write))
        pieces.append(found[0])
        end = found.end()
    return "".join([*pieces, text[end:]])


def _evaluated(source: str, names: dict[str, Any], where: str) -> list[Any]:
    try:
        value = eval(source.strip(), {"__builtins__": {}}, names)
    except Exception as error:
        raise InvalidInput(f"{where}: {type(error).__name__}: {error}") from error
    return _flat(value)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, tuple):
        return [one for item in value for one in _flat(item)]
    return [float(one) for one in np.ravel(value)]


def _filled(text: str, values: list[Any], where: str, write: Callable[[Any, str], str]) -> str:
    """The last numbers of `text` replaced by `values`."""
    pattern = _COMMIT if isinstance(values[0], str) else _NUMBER
    places = list(pattern.finditer(text))[-len(values) :]
    if len(places) < len(values):
        raise InvalidInput(
            f"{where} has {len(values)} values and {len(places)} numbers in front of it, in its "
            f"paragraph and after other marks: write some, the report puts them right"
        )
    for place, value in reversed(list(zip(places, values, strict=True))):
        if value != value:  # `_`
            continue
        text = text[: place.start()] + write(value, place[0]) + text[place.end() :]
    return text


def _written(value: Any, like: str) -> str:
    """With as many decimals as it had."""
    if isinstance(value, str):
        return value
    return f"{value:,.{len(like.partition('.')[2])}f}"


# ---- what a mark can name -----------------------------------------------------------------------


def namespace(results: Sequence[BenchResult]) -> dict[str, Any]:
    """Every function takes names of cases and gives an array, so that arithmetic goes element by
    element."""
    measured = {result.case: result for result in results}

    def of(take: Callable[..., float]) -> Callable[..., Values]:
        def values(pattern: str, *arguments: str) -> Values:
            return np.array([take(measured[name], *arguments) for name in _expanded(pattern)])

        return values

    def beside(name: str, *others: str) -> list[float]:
        """Ours, then others measured separately."""
        return [measured[name].microseconds, *(measured[name].anchors_us[one] for one in others)]

    def of_other(name: str, *patterns: str) -> Values:
        """Our times over those of another library, measured separately."""
        found = [measured[one] for pattern in patterns for one in _expanded(pattern)]
        return np.array([r.microseconds / r.anchors_us[name] for r in found])

    def commit() -> str:
        commits = sorted({result.run.commit for result in results})
        if len(commits) != 1:
            raise InvalidInput(f"the results are of several commits: {', '.join(commits)}")
        return commits[0]

    def verdicts(which: str) -> int:
        return sum(result.verdict == which for result in results)

    return {
        "_": np.nan,
        "us": of(lambda r: r.microseconds),
        "ms": of(lambda r: r.microseconds / 1e3),
        "part": of(lambda r, name: r.parts_us[name]),
        "part_launches": of(lambda r, name: r.parts_launches[name]),
        "peer": of(lambda r, name: r.peers_us[name]),
        "other": of(lambda r, name: r.anchors_us[name]),
        "beside": beside,
        "target": of(lambda r: r.target_us or np.nan),
        "first": of(lambda r: r.first_step_us or np.nan),
        "floor": of(lambda r: r.floor_us),
        "empty": of(lambda r: r.run.empty_launch_us),
        "launches": of(lambda r: r.launches),
        "tb_per_s": of(lambda r: r.gigabytes_per_second / 1e3),
        "copy_tb_per_s": of(lambda r: r.run.copy_bytes_per_us / 1e6),
        "cache_bytes": of(lambda r, name: r.cache_bytes[name]),
        "commit": commit,
        "verdicts": verdicts,
        "with_target": lambda: sum(result.verdict != "no target" for result in results),
        "span": lambda *values: np.array([np.min(_joined(values)), np.max(_joined(values))]),
        "count": lambda condition: np.sum(condition),
        "len": len,
        "most": lambda *values: np.max(_joined(values)),
        "of_other": of_other,
        "longer": lambda name, *patterns: 100 * (of_other(name, *patterns) - 1),
        "SCORES": tuple(f"index scores {n} x {entries}" for n, entries in INDEX_SCORES_US),
        "vllm_token_bytes": float(MEMORY["bytes a token"][1].replace(",", "")),
        "chunk_attention": lambda heads, entries: CHUNK_ATTENTION_US[heads, entries],
        "schema": _schema,
        "requests": _requests,
        "resident_requests": _resident_requests,
        "weights": _weights,
        "deployed": _deployed,
        "memory": _memory,
        "snapshot_bytes": lambda model: plan(_schema(model)).snapshot_bytes,
        "state_bytes": _state_bytes,
        "link": _link,
        "handoff_ms": lambda *asked: 1e3 * _link(*asked).handoffs[0].seconds,
        "handoff_bytes": lambda *asked: _link(*asked).handoffs[0].handoff_bytes,
        "token_bytes": lambda *model, **options: _schema(*model, **options).bytes.per_token,
        "request_bytes": lambda *model, **options: _schema(*model, **options).bytes.per_request,
    }


def _joined(values: Sequence[Any]) -> Values:
    return np.concatenate([np.ravel(value) for value in values])


def _expanded(pattern: str) -> Iterator[str]:
    """`a {1,2}` is `a 1` and `a 2`; with a semicolon, choices may have commas."""
    pieces = re.split(r"\{([^}]*)\}", pattern)
    choices = [
        re.split(";" if ";" in piece else ",", piece) if at % 2 else [piece]
        for at, piece in enumerate(pieces)
    ]
    return ("".join(chosen) for chosen in product(*choices))


def _schema(model: str, **options: Any) -> CacheSchema:
    return CacheSchema.build(ModelSpec.preset(model), **options)


def _requests(model: str, memory: str, context: str) -> int:
    """The number that `dsv4 plan` prints."""
    found = plan(
        _schema(model),
        memory_bytes=parse_bytes(memory),
        context_tokens=parse_tokens(context),
    )
    assert found.requests is not None
    return found.requests


def _resident_requests(model: str, memory: str, host_memory: str, context: str) -> int:
    """The same with --host-memory."""
    return plan_residency(
        _schema(model),
        memory_bytes=parse_bytes(memory),
        host_memory_bytes=parse_bytes(host_memory),
        context_tokens=parse_tokens(context),
        link_bytes_per_second=1,  # the number does not depend on it
    ).requests


def _weights(model: str) -> int:
    """Bytes of the checkpoint, without draft layers."""
    spec = ModelSpec.preset(model)
    return Weights.derived(spec, PRESET_WEIGHTS[model], drafts=False).total_bytes


def _deployed(
    model: str, gpus: str, context: str, whose: str = "dsv4", host_memory: str | None = None
) -> Values:
    """As many requests as `dsv4 plan --gpus` says; of vLLM and SGLang at least and at most."""
    host_bytes = None if host_memory is None else parse_bytes(host_memory)
    found, spec = parse_gpus(gpus), ModelSpec.preset(model)
    (fit,) = deploy(
        spec,
        found,
        Weights.derived(spec, PRESET_WEIGHTS[model], drafts=False),
        layout=layout_of(found.count),
        make_schema=CacheSchema.build,
        contexts=[parse_tokens(context)],
        load=Load(host_memory_bytes=host_bytes),
        compare=False,
    ).chosen.fits
    if whose == "host memory":
        counts = [fit.with_host_memory or 0]
    else:
        counts = [fit.requests] if whose == "dsv4" else sorted(set(fit.peers[whose]))
    return np.array(counts, dtype=float)


def _memory(what: str, whose: str) -> list[float]:
    """What others keep: each number of it."""
    found = MEMORY[what][("", "vLLM", "SGLang").index(whose)]
    return [float(number.replace(",", "")) for number in _NUMBER.findall(found)]


def _state_bytes(model: str, tokens: int, **options: Any) -> int:
    """What is read of a request's state, at this number of tokens, when it goes to another
    machine."""
    spans = StateLayout(_schema(model, **options)).used_spans(tokens)
    return sum(end - start for start, end in spans)


def _link(model: str, context: str, link: str, **rates: Any) -> LinkSizing:
    """What `dsv4 plan --link` computes for one request."""
    return plan_link(
        _schema(model),
        link_bits_per_second=parse_link(link),
        context_tokens=parse_tokens(context),
        **rates,
    )


# ---- what has no mark ---------------------------------------------------------------------------


def unsourced(text: str, results: Sequence[BenchResult], *, page: str) -> list[str]:
    """Figures that no mark stands for, that are not dated where they stand, and that ELSEWHERE
    does not name. Code is not looked at."""
    held = ELSEWHERE.get(page, {})
    told = _marked(text, results, page, lambda value, number: "figure")
    missing = []
    for block in _blocks(told, held):
        if _is_dated(block):
            continue
        block = " ".join(block.split())
        for words in held:
            block = block.replace(words, "")
        for found in _MEASURED.finditer(block):
            if not _VERSION.search(block[: found.start()]):
                around = block[max(found.start() - 50, 0) : found.end() + 30]
                missing.append(f"{page}: {found[0]!r} in {around!r}")
    return missing


def _blocks(text: str, held: Iterable[str]) -> Iterator[str]:
    """Paragraphs, items and rows of tables, without code. Rows of a table that follows a dated
    paragraph, or whose first row is held elsewhere, are left out."""
    text = re.sub(r"<!-- tables: written by.*?<!-- end of tables -->", "", text, flags=re.DOTALL)
    text = _COMMENT.sub("", text)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4}.*\n)+", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"(`+)[^`\n]+?\1", "code", text)
    before = ""
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.startswith("|"):
            yield from re.split(r"\n(?=[-*] |\d+\. |#)", paragraph)
        elif not _is_dated(before) and paragraph.splitlines()[0] not in held:
            yield from paragraph.splitlines()
        before = paragraph


def _is_dated(block: str) -> bool:
    return bool(_DATE.search(block) and _MACHINE.search(block))


def undated(text: str, *, page: str) -> list[str]:
    """Sections of a journal that have figures but do not name their commit or day."""
    sections = re.split(r"^(?=##+ )", text, flags=re.MULTILINE)
    return [
        f"{page}: {section.splitlines()[0]!r}"
        for section in sections
        if _MEASURED.search(section)
        and not (_DATE.search(section) and _MACHINE.search(section) and _COMMIT.search(section))
    ]

"""What people see of a demo: lines everywhere, a moving view on a terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from dsv4.demo.bill import flash_bill
from dsv4.demo.events import (
    CacheState,
    DemoEvent,
    DemoReport,
    PartBegins,
    PartResult,
    PrefixResult,
    StepEvent,
    Verdict,
)
from dsv4.demo.screen import bytes_lines, demo_view, print_report

PREFIX = PrefixResult(
    shared_tokens=8,
    first_prompt_tokens=9,
    first_run_tokens=9,
    first_seconds=1.0,
    second_prompt_tokens=9,
    second_run_tokens=1,
    second_seconds=0.1,
    reused_tokens=8,
    source="snapshot",
    snapshot_bytes=10,
)


def step(nth: int, *, csa: int, hca: int, taken: int) -> StepEvent:
    return StepEvent(
        part="batch",
        step=nth,
        lengths={"A": 100 + nth},
        chosen={"A": [*range(40, 41 + nth)]},
        said={"A": " ".join(["word"] * (1 + nth))},
        transformers_bytes=5 << 20,
        cache=CacheState(
            blocks_live=3,
            blocks_total=5,
            slots_live=1,
            slots_total=2,
            blocks_taken=taken,
            closed={"csa": csa, "hca": hca},
            entries={"csa": 90, "hca": 7},
            block_bytes=1 << 20,
            slot_bytes=2 << 20,
            trained_bytes=1 << 19,
        ),
    )


def result(verdict: Verdict) -> PartResult:
    return PartResult(
        part="batch",
        title="one batch",
        note="what came out",
        verdict=verdict,
        seconds=1.5,
        tokens=4,
    )


EVENTS: list[DemoEvent] = [
    PartBegins(part="batch", title="one batch"),
    step(0, csa=80, hca=6, taken=3),
    step(1, csa=2, hca=0, taken=0),
    step(2, csa=0, hca=1, taken=0),
    result("agrees"),
]


def shown(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with demo_view(console) as view:
        for event in EVENTS:
            view(event)
    return out.getvalue()


def test_without_a_terminal_there_are_only_lines() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert text.splitlines() == [
        "1  one batch",
        "   prompts: groups closed: 80 CSA, 6 HCA; blocks taken: 3; ███░░ 3 of 5 blocks, "
        "1 of 2 slots",
        "   token 2: groups closed: 1 HCA; ███░░ 3 of 5 blocks, 1 of 2 slots",
        "   A: word word word",
        "   fp32: 1 MiB in blocks, 2 MiB in slots; transformers: 5 MiB",
        "   fp8 and fp4, as V4 was trained: 512 KiB",
        "   ✓ what came out  [1.5 s]",
    ]


def test_more_bytes_than_transformers_has_are_explained() -> None:
    event = step(0, csa=0, hca=0, taken=0)
    assert event.cache is not None
    ours = event.cache.block_bytes + event.cache.slot_bytes
    for theirs, lines in ((ours, 2), (ours - 1, 3)):
        found = bytes_lines(replace(event, transformers_bytes=theirs), event.cache)
        assert len(found) == lines
        assert ("a slot reserves a full window" in found[1]) == (lines == 3)


def test_a_terminal_shows_every_step_while_it_runs() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(terminal=True))
    for expected in ("A             101  word word", "CSA entries   90 +2", "3,145,728 in fp32"):
        assert expected in text
    assert "   ✓ what came out  [1.5 s]\n" in text


def test_a_difference_is_the_last_word() -> None:
    for verdict, last in (
        ("agrees", "Passed: 4 tokens compared."),
        ("differs", "FAILED: one batch: what came out"),
    ):
        console = Console(file=io.StringIO(), width=200)
        report = DemoReport(parts=[result(verdict)], prefix=PREFIX)  # type: ignore[arg-type]
        print_report(console, report, flash_bill())
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue().splitlines()[-1] == last

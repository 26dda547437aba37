"""The demo on the screen: lines, and on a terminal a live view above them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dsv4.demo.bill import Fit, FlashBill
from dsv4.demo.events import (
    CacheState,
    DemoEvent,
    DemoReport,
    PartBegins,
    PartResult,
    StepEvent,
    Verdict,
)
from dsv4.units import format_bytes, format_tokens

_MARKS: dict[Verdict, tuple[str, str]] = {
    "agrees": ("✓ ", "green"),
    "differs": ("✗ ", "bold red"),
    "not compared": ("· ", ""),
}
_LETTERS_SHOWN = 60


class DemoView:
    """Takes the events of a demo. Lines stay; while a part runs, `live` shows its newest step."""

    def __init__(self, console: Console, live: Live | None = None) -> None:
        self.console, self._live = console, live
        self._parts = 0
        self._last: StepEvent | None = None

    def __call__(self, event: DemoEvent) -> None:
        match event:
            case PartBegins():
                self._parts += 1
                self._last = None
                self._show(Text("   running"))
                self._line(Text(f"{self._parts}  {event.title}", style="bold"))
            case StepEvent():
                self._last = event
                self._show(step_view(event))
                if (cache := event.cache) and (cache.blocks_taken or cache.closed.get("hca")):
                    self._line(Text(f"   {step_line(event, cache)}"))
            case PartResult():
                self._end(event)

    def _end(self, result: PartResult) -> None:
        self._show(Group())
        if self._last is not None and self._last.cache is not None:
            for name, said in self._last.said.items():
                self._line(Text(f"   {name}: {said}"))
            for line in bytes_lines(self._last, self._last.cache):
                self._line(Text(f"   {line}"))
        for question, answer in result.said.items():
            self._line(Text(f"   {question} {answer}"))
        mark, style = _MARKS[result.verdict]
        text = Text.assemble("   ", (mark + result.note, style), f"  [{result.seconds:.1f} s]")
        self._line(text)

    def _show(self, view: RenderableType) -> None:
        if self._live is not None:
            self._live.update(view, refresh=True)

    def _line(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)


@contextmanager
def demo_view(console: Console) -> Iterator[DemoView]:
    """A live view on a terminal, lines elsewhere."""
    if console.quiet or not console.is_terminal:
        yield DemoView(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield DemoView(console, live)


# ---- a step --------------------------------------------------------------------------------------


def step_line(event: StepEvent, cache: CacheState) -> str:
    """What a step did to the cache: "token 6: groups closed: 4 CSA, 1 HCA; …"."""
    closed = ", ".join(f"{n} {kind.upper()}" for kind, n in cache.closed.items() if n)
    done = [f"groups closed: {closed}"] if closed else []
    if cache.blocks_taken:
        done.append(f"blocks taken: {cache.blocks_taken}")
    what = "prompts" if event.step == 0 else f"token {event.step}"
    return (
        f"{what}: {'; '.join(done)}; {_bar(cache)} {cache.blocks_live} of {cache.blocks_total} "
        f"blocks, {cache.slots_live} of {cache.slots_total} slots"
    )


def bytes_lines(event: StepEvent, cache: CacheState) -> list[str]:
    """Bytes here and in transformers' own caches; if there are more here, the reason."""
    theirs = event.transformers_bytes
    lines = [
        f"fp32: {format_bytes(cache.block_bytes)} in blocks, {format_bytes(cache.slot_bytes)} in "
        f"slots" + ("" if theirs is None else f"; transformers: {format_bytes(theirs)}")
    ]
    if theirs is not None and cache.block_bytes + cache.slot_bytes > theirs:
        lines.append(
            "larger here: a slot reserves a full window and full groups from the start, "
            "transformers grows them token by token"
        )
    return [*lines, f"fp8 and fp4, as V4 was trained: {format_bytes(cache.trained_bytes)}"]


def step_view(event: StepEvent) -> Group:
    """The newest step: each request's tokens, and the cache under them."""
    table = Table(box=None, pad_edge=True)
    table.add_column("request")
    table.add_column("in cache", justify="right")
    table.add_column("generated")
    for name, text in event.said.items():
        more = "… " if len(text) > _LETTERS_SHOWN else ""
        table.add_row(name, f"{event.lengths[name]:,}", Text(more + text[-_LETTERS_SHOWN:]))
    if event.cache is None:
        held = Text(f"  transformers' cache: {format_bytes(event.transformers_bytes or 0)}")
        return Group(table, held)
    return Group(table, Text(), _cache_table(event, event.cache))


def _cache_table(event: StepEvent, cache: CacheState) -> Table:
    table = Table.grid(padding=(0, 2))
    blocks = Text.assemble((_bar(cache), "cyan"), f" {cache.blocks_live} of {cache.blocks_total}")
    table.add_row("  blocks", blocks)
    table.add_row("  slots", f"{cache.slots_live} of {cache.slots_total}")
    for kind, total in cache.entries.items():
        new = f"+{cache.closed[kind]}" if cache.closed[kind] else ""
        table.add_row(f"  {kind.upper()} entries", Text.assemble(f"{total:,} ", (new, "green")))
    held = cache.block_bytes + cache.slot_bytes
    table.add_row("  bytes", f"{held:,} in fp32; {cache.trained_bytes:,} in fp8 and fp4")
    if event.transformers_bytes is not None:
        table.add_row("  transformers", f"{event.transformers_bytes:,}")
    return table


def _bar(cache: CacheState) -> str:
    return "█" * cache.blocks_live + "░" * (cache.blocks_total - cache.blocks_live)


# ---- the end -------------------------------------------------------------------------------------


def print_report(console: Console, report: DemoReport, bill: FlashBill) -> None:
    console.print()
    _print_bill(console, bill)
    wrong = [part for part in report.parts if part.verdict == "differs"]
    for part in wrong:
        text = Text(f"FAILED: {part.title}: {part.note}", style="bold red")
        console.print(text, soft_wrap=True)
    if not wrong:
        compared = sum(part.tokens for part in report.parts if part.verdict == "agrees")
        found = f"Passed: {compared} tokens compared."
        if report.prefix is None:
            found += " For the rest of the demo: pip install 'dsv4[transformers]'"
        text = Text(found, "bold green")
        console.print(text, soft_wrap=True)


def _print_bill(console: Console, bill: FlashBill) -> None:
    console.print(Text("The real V4-Flash", style="bold"))
    lines = [
        f"{bill.bytes_per_token:,.0f} bytes per token of context "
        f"({bill.bf16_bytes_per_token:,.0f} unquantised in bf16)",
        f"{bill.bytes_per_request:,} bytes per live request, at any length",
    ]
    for memory in sorted({fit.memory_bytes for fit in bill.fits}):
        lines.append(
            f"{memory / 1e9:.0f} GB (10^9 bytes) for the cache alone: {_fits(bill.fits, memory)}"
        )
    most = max(fit.memory_bytes for fit in bill.v41_fits)
    lines.append(
        f"V4.1-Flash: {bill.v41_bytes_per_token:,.0f} bytes per token, "
        f"{bill.v41_bytes_per_request:,} per live request; "
        f"{most / 1e9:.0f} GB: {_fits(bill.v41_fits, most)}"
    )
    for line in lines:
        console.print(Text(f"   {line}"), soft_wrap=True)
    console.print()


def _fits(fits: list[Fit], memory_bytes: int) -> str:
    found = [fit for fit in fits if fit.memory_bytes == memory_bytes]
    return " or ".join(
        f"{fit.requests:,} requests of {format_tokens(fit.context_tokens)} tokens" for fit in found
    )

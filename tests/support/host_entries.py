"""One layer of slots whose entries are on the device, in host memory or in both, with all tables,
poisoned; for the reference, interpreted kernels and GPUs."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.cache.pages import Page
from dsv4.cache.records import RecordFormat
from dsv4.ops.calls import EntrySource, HotRows, Resolving
from tests.support.numbers import Numbers

SLOTS, BLOCKS, PAGE_ROWS, RATIO = 3, 9, 4, 4
ENTRIES = BLOCKS * PAGE_ROWS
POISON = 0xEE
FORMATS = {
    "v4": records.fp8_ds(192, 64),
    "v41": records.entry_format("v41_fp4", head_dim=64, rope_dim=16),
    "words of 4 bytes": records.entry_format("fp8_row", head_dim=64, rope_dim=16),
    "no scales": records.entry_format("bf16", head_dim=64, rope_dim=16),
}


class Machine:
    """The memory of one layer and its tables, poisoned: some blocks on the device, all in host
    memory, those on the device differently. Machines of one seed are equal."""

    def __init__(
        self,
        seed: int,
        *,
        record: RecordFormat = FORMATS["v4"],
        hot_blocks: int = 4,
        device: int = 7,
        on: str = "cpu",
    ) -> None:
        numbers = Numbers(seed)
        self.page = Page(
            kind="entries", layer=0, offset_bytes=32, rows=PAGE_ROWS, format=record, apart=True
        )
        row_bytes = 32 + -(-self.page.payload_bytes // 32) * 32 + 64
        rows = device + SLOTS * hot_blocks
        self.arena = torch.full((rows, row_bytes), POISON, dtype=torch.uint8)
        self.arena[:device] = numbers.integers(0, 256, device, row_bytes).to(torch.uint8)
        self.arena = self.arena.to(on)
        blocks = SLOTS * BLOCKS
        self.host = numbers.integers(0, 256, blocks, row_bytes).to(torch.uint8)
        if on != "cpu":
            self.host = self.host.pin_memory()
        self.block_table = numbers.permutation(blocks).reshape(SLOTS, BLOCKS).int().to(on)
        self.table = torch.full((SLOTS, BLOCKS), -1, dtype=torch.int32)
        self.table.view(-1)[numbers.permutation(blocks)[:device]] = torch.arange(device).int()
        self.table = self.table.to(on)
        self.on = on
        records_each = hot_blocks * PAGE_ROWS
        # slices of the tables of several layers, as a manager has them
        wide = torch.full((SLOTS, 3 * max(ENTRIES, records_each)), -1, dtype=torch.int32, device=on)
        one = torch.zeros((SLOTS, 3), dtype=torch.int32, device=on)
        self.hot = HotRows(
            first_row=device,
            records=records_each,
            place=wide.short()[:, 5 : 5 + ENTRIES],
            entry_of=wide.clone()[:, 3 : 3 + records_each],
            used=torch.zeros_like(wide)[:, 1 : 1 + records_each],
            clock=one.clone()[:, 1],
            hand=one.clone()[:, 2],
            counted=torch.zeros(3, dtype=torch.int64, device=on),
        )
        self.source = EntrySource(
            arena=self.arena, page=self.page, block_table=self.table, ratio=RATIO
        )

    def resolving(
        self, requests: list[tuple[int, int, int]], selected: Tensor, *, padding: int = 2
    ) -> Resolving:
        """A decode step of (slot, start, count), with rows of padding among them."""
        batch, tokens = [], []
        for nth, (slot, start, count) in enumerate(requests):
            batch.append((slot, start, count, len(tokens)))
            tokens += [(slot, start + each, nth, 1) for each in range(count)]
        missing, on = (-1,) * 4, self.on
        rows, k = len(tokens) + padding, selected.shape[1]
        out = torch.full((rows, k + 3), -77, dtype=torch.int32, device=on)
        requests_listed = len(batch) + padding
        misses = torch.full(
            (requests_listed, self.hot.records + 1, 2), -77, dtype=torch.int32, device=on
        )
        return Resolving(
            selected=torch.cat((selected, torch.zeros(padding, k, dtype=torch.int32))).to(on),
            tokens=torch.tensor([*tokens, *[missing] * padding], dtype=torch.int32, device=on),
            batch=torch.tensor([*batch, *[missing] * padding], dtype=torch.int32, device=on),
            entries=self.source,
            block_table=self.block_table,
            host=self.host,
            hot=self.hot,
            rows=out[:, :k],
            misses=misses,
            miss_count=torch.full((requests_listed,), -77, dtype=torch.int32, device=on),
            tokens_per_request=max((count for _, _, count in requests), default=1),
        )

    def state(self) -> dict[str, Tensor]:
        """All bytes, what lies between the columns included."""
        found = {"arena": self.arena, "host": self.host, "table": self.table}
        for field in fields(self.hot):
            value = getattr(self.hot, field.name)
            if isinstance(value, Tensor):
                whole = value.untyped_storage()
                form = torch.empty(0, dtype=value.dtype, device=value.device)
                found[field.name] = form.set_(whole)
        return found


def check(expected: Machine, found: Machine, calls: tuple[Resolving, Resolving]) -> None:
    after = found.state()
    for name, value in expected.state().items():
        assert torch.equal(value.cpu(), after[name].cpu()), name
    for name in ("rows", "miss_count", "misses"):
        of_reference, of_kernel = (getattr(call, name) for call in calls)
        assert torch.equal(of_reference.cpu(), of_kernel.cpu()), name


def selection(numbers: Numbers, tokens: int, k: int) -> Tensor:
    """No entry twice in a row; some past what a token sees, some -1."""
    rows = [numbers.permutation(ENTRIES + 4)[:k] for _ in range(tokens)]
    selected = torch.stack(rows).sort().values if rows else torch.zeros(0, k, dtype=torch.int64)
    selected[numbers.integers(0, 7, *selected.shape) == 0] = -1
    return selected.int()

"""Selected entries that are in host memory are read as if they were on the device: whatever is hot,
rows name the records that the selection names."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import records
from dsv4.cache.pages import Page
from dsv4.ops.calls import EntrySource, HotRows, Resolving, Staging
from dsv4.reference.host_entries import resolve, stage
from dsv4.reference.pages import page_rows
from tests.support.numbers import Numbers

SLOTS, BLOCKS, PAGE_ROWS, RATIO, K = 3, 12, 4, 4, 5
HOT_BLOCK_ROWS, ON_DEVICE, OTHER = 4, 5, 16  # bytes of other layers before the page
HOT = HOT_BLOCK_ROWS * PAGE_ROWS
ENTRIES = BLOCKS * PAGE_ROWS
POISON = 0xEE
PAGE = Page(
    kind="entries",
    layer=0,
    offset_bytes=OTHER,
    rows=PAGE_ROWS,
    format=records.fp8_ds(192, 64),
    apart=True,
)


class HostEntries:
    """Slots whose blocks are on the device, in host memory or in both; all else is poison."""

    def __init__(self, seed: int, *, on_device: int = ON_DEVICE) -> None:
        self.numbers = Numbers(seed)
        row_bytes = OTHER + PAGE.payload_bytes
        arena_rows = on_device + SLOTS * HOT_BLOCK_ROWS
        self.arena = torch.full((arena_rows, row_bytes), POISON, dtype=torch.uint8)
        blocks = SLOTS * BLOCKS + 2
        self.host = self.numbers.integers(0, 256, blocks, row_bytes).to(torch.uint8)
        order = self.numbers.permutation(blocks)
        self.block_table = order[: SLOTS * BLOCKS].reshape(SLOTS, BLOCKS).int()
        self.table = torch.full((SLOTS, BLOCKS), -1, dtype=torch.int32)
        for row, at in enumerate(self.numbers.permutation(SLOTS * BLOCKS)[:on_device].tolist()):
            slot, block = divmod(at, BLOCKS)
            self.table[slot, block] = row
            self.arena[row] = self.host[self.block_table[slot, block]]
            if row % 2:
                self.host[self.block_table[slot, block]] = POISON  # only on the device
        self.hot = HotRows(
            first_row=on_device,
            records=HOT,
            place=torch.full((SLOTS, ENTRIES), -1, dtype=torch.int16),
            entry_of=torch.full((SLOTS, HOT), -1, dtype=torch.int32),
            used=torch.zeros(SLOTS, HOT, dtype=torch.int32),
            clock=torch.zeros(SLOTS, dtype=torch.int32),
            hand=torch.zeros(SLOTS, dtype=torch.int32),
            counted=torch.zeros(3, dtype=torch.int64),
        )
        self.source = EntrySource(arena=self.arena, page=PAGE, block_table=self.table, ratio=RATIO)

    def wanted(self, slot: int, entry: int) -> list[int]:
        block, record = divmod(entry, PAGE_ROWS)
        row = int(self.table[slot, block])
        if row < 0:
            return record_of(self.host[int(self.block_table[slot, block])], record)
        return record_of(self.arena[row], record)

    def step(self, requests: list[tuple[int, int, int]], selected: torch.Tensor) -> Resolving:
        """A decode step of (slot, start, count), None for padding, with one row of padding."""
        batch, tokens = [], []
        for nth, (slot, start, count) in enumerate(requests):
            batch.append((slot, start, count, len(tokens)))
            tokens += [(slot, start + each, nth, 1) for each in range(count)]
        call = Resolving(
            selected=selected,
            tokens=torch.tensor([*tokens, (-1,) * 4], dtype=torch.int32),
            batch=torch.tensor([*batch, (-1,) * 4], dtype=torch.int32),
            entries=self.source,
            block_table=self.block_table,
            host=self.host,
            hot=self.hot,
            rows=torch.full_like(selected, -77),
            misses=torch.full((len(batch) + 1, HOT, 2), -77, dtype=torch.int32),
            miss_count=torch.full((len(batch) + 1,), -77, dtype=torch.int32),
            tokens_per_request=max(count for _, _, count in requests),
        )
        resolve(call)
        return call


def record_of(row: torch.Tensor, record: int) -> list[int]:
    data, scales = page_rows(row[None], PAGE)
    return [*data[0, record].tolist(), *scales[0, record].tolist()]


def drawn(numbers: Numbers, tokens: int) -> torch.Tensor:
    """Entries that may also be past what a token sees, and -1."""
    rows = [numbers.permutation(ENTRIES)[:K] for _ in range(tokens)]
    selected = torch.stack(rows).sort().values
    selected[numbers.integers(0, 9, *selected.shape) == 0] = -1
    return torch.cat((selected, torch.zeros(1, K, dtype=selected.dtype))).int()


@pytest.mark.parametrize("drafts", [0, 2])
def test_rows_name_the_selected_records_whatever_is_hot(drafts: int):
    case = HostEntries(drafts)
    expected = torch.zeros(3, dtype=torch.int64)
    for _ in range(50):
        order = case.numbers.permutation(SLOTS).tolist()[: 1 + int(case.numbers.integers(0, 2))]
        starts = case.numbers.integers(0, ENTRIES * RATIO - drafts, len(order)).tolist()
        requests = [(slot, start, 1 + drafts) for slot, start in zip(order, starts, strict=True)]
        selected = drawn(case.numbers, len(order) * (1 + drafts))
        hot_before = {
            slot: set(case.hot.entry_of[slot][case.hot.entry_of[slot] >= 0].tolist())
            for slot in order
        }
        call = case.step(requests, selected)
        for nth, (slot, start, count) in enumerate(requests):
            hot, missed = hot_before[slot], set()
            for token in range(nth * count, (nth + 1) * count):
                visible = (start + token - nth * count + 1) // RATIO
                for entry, at in zip(
                    selected[token].tolist(), call.rows[token].tolist(), strict=True
                ):
                    if not 0 <= entry < visible:
                        assert at == -1
                        continue
                    row, record = divmod(at, PAGE_ROWS)
                    assert record_of(case.arena[row], record) == case.wanted(slot, entry)
                    if case.table[slot, entry // PAGE_ROWS] < 0:
                        is_miss = entry not in hot and entry not in missed
                        missed |= {entry} if is_miss else set()
                        expected += torch.tensor(
                            (not is_miss, is_miss, is_miss * PAGE.record_bytes)
                        )
            assert call.miss_count[nth] == len(missed)
            for entry, record in enumerate(case.hot.place[slot].tolist()):
                assert record < 0 or case.hot.entry_of[slot, record] == entry
        assert (call.rows[-1] == -77).all(), "padding"
        assert call.miss_count[-1] == -77
    assert torch.equal(case.hot.counted, expected)
    assert expected[0] > 0, "nothing was hot"
    assert expected[1] > SLOTS * HOT, "nothing was replaced"


def test_a_record_named_in_the_step_is_never_replaced_in_it():
    """Three tokens name as many entries as there are hot records, and nothing fits besides."""
    case = HostEntries(5, on_device=0)
    for first in (0, 3, 1, 6):
        wanted = torch.arange(first, first + HOT - 1).reshape(3, K)
        call = case.step([(1, ENTRIES * RATIO - 3, 3)], torch.cat((wanted, wanted[:1])).int())
        for entry, at in zip(
            wanted.flatten().tolist(), call.rows[:3].flatten().tolist(), strict=True
        ):
            row, record = divmod(at, PAGE_ROWS)
            assert record_of(case.arena[row], record) == case.wanted(1, entry)


def test_an_entry_named_twice_in_a_row_is_found_twice():
    case = HostEntries(6, on_device=0)
    for _ in range(2):
        call = case.step(
            [(0, ENTRIES * RATIO - 1, 1)], torch.tensor([[3, 3, 7, 7, 3], [0] * K]).int()
        )
        for entry, at in zip((3, 3, 7, 7, 3), call.rows[0].tolist(), strict=True):
            row, record = divmod(at, PAGE_ROWS)
            assert record_of(case.arena[row], record) == case.wanted(0, entry)


@pytest.mark.parametrize("which", [("all",), ("host", "device"), ("device", "host")])
def test_a_chunk_stages_the_blocks_that_its_requests_see(which: tuple[str, ...]):
    case = HostEntries(7)
    staged_page = Page(
        kind="entries", layer=0, offset_bytes=0, rows=PAGE_ROWS, format=PAGE.format, apart=True
    )
    staged = EntrySource(
        arena=torch.full((2 * BLOCKS, PAGE.payload_bytes), POISON, dtype=torch.uint8),
        page=staged_page,
        block_table=torch.arange(SLOTS * BLOCKS, dtype=torch.int32).reshape(SLOTS, BLOCKS)
        % (2 * BLOCKS),
        ratio=RATIO,
    )
    before = case.arena.clone(), case.host.clone()
    batch = torch.tensor([(2, 0, 41, 0), (1, 70, 9, 41), (-1,) * 4], dtype=torch.int32)
    for part in which:
        call = Staging(
            batch=batch,
            entries=case.source,
            block_table=case.block_table,
            host=case.host,
            staged=staged,
            which=part,
        )
        stage(call)
    expected = torch.full_like(staged.arena, POISON)
    for slot, blocks in ((2, 3), (1, 5)):
        for block in range(blocks):
            row = int(case.table[slot, block])
            source = case.arena[row] if row >= 0 else case.host[case.block_table[slot, block]]
            expected[staged.block_table[slot, block]] = source[OTHER:]
    assert torch.equal(staged.arena, expected)
    assert torch.equal(case.arena, before[0])
    assert torch.equal(case.host, before[1])

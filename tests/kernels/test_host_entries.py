"""Interpreted kernels of entries in host memory: all that a step leaves is what the reference
leaves, byte for byte, whatever was hot before."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.cache.pages import Page
from dsv4.cache.records import RecordFormat
from dsv4.errors import InvalidInput
from dsv4.kernels import host_entries as kernels
from dsv4.ops.calls import EntrySource, HotRows, Resolving, Staging
from dsv4.reference import host_entries as reference
from dsv4.reference.pages import page_rows
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
    ) -> None:
        numbers = Numbers(seed)
        self.page = Page(
            kind="entries", layer=0, offset_bytes=32, rows=PAGE_ROWS, format=record, apart=True
        )
        row_bytes = 32 + -(-self.page.payload_bytes // 32) * 32 + 64
        rows = device + SLOTS * hot_blocks
        self.arena = torch.full((rows, row_bytes), POISON, dtype=torch.uint8)
        self.arena[:device] = numbers.integers(0, 256, device, row_bytes).to(torch.uint8)
        blocks = SLOTS * BLOCKS
        self.host = numbers.integers(0, 256, blocks, row_bytes).to(torch.uint8)
        self.block_table = numbers.permutation(blocks).reshape(SLOTS, BLOCKS).int()
        self.table = torch.full((SLOTS, BLOCKS), -1, dtype=torch.int32)
        self.table.view(-1)[numbers.permutation(blocks)[:device]] = torch.arange(device).int()
        records_each = hot_blocks * PAGE_ROWS
        # slices of the tables of several layers, as a manager has them
        wide = torch.full((SLOTS, 3 * max(ENTRIES, records_each)), -1, dtype=torch.int32)
        one = torch.zeros((SLOTS, 3), dtype=torch.int32)
        self.hot = HotRows(
            first_row=device,
            records=records_each,
            place=wide.short()[:, 5 : 5 + ENTRIES],
            entry_of=wide.clone()[:, 3 : 3 + records_each],
            used=torch.zeros_like(wide)[:, 1 : 1 + records_each],
            clock=one.clone()[:, 1],
            hand=one.clone()[:, 2],
            counted=torch.zeros(3, dtype=torch.int64),
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
        missing = (-1,) * 4
        rows, k = len(tokens) + padding, selected.shape[1]
        out = torch.full((rows, k + 3), -77, dtype=torch.int32)
        misses = torch.full((len(batch) + padding, self.hot.records + 1, 2), -77, dtype=torch.int32)
        return Resolving(
            selected=torch.cat((selected, torch.zeros(padding, k, dtype=torch.int32))),
            tokens=torch.tensor([*tokens, *[missing] * padding], dtype=torch.int32),
            batch=torch.tensor([*batch, *[missing] * padding], dtype=torch.int32),
            entries=self.source,
            block_table=self.block_table,
            host=self.host,
            hot=self.hot,
            rows=out[:, :k],
            misses=misses,
            miss_count=torch.full((len(batch) + padding,), -77, dtype=torch.int32),
            tokens_per_request=max((count for _, _, count in requests), default=1),
        )

    def state(self) -> dict[str, Tensor]:
        """All bytes, what lies between the columns included."""
        found = {"arena": self.arena, "host": self.host, "table": self.table}
        for field in fields(self.hot):
            value = getattr(self.hot, field.name)
            if isinstance(value, Tensor):
                whole = value.untyped_storage()
                found[field.name] = torch.empty(0, dtype=value.dtype).set_(whole)
        return found


def check(expected: Machine, found: Machine, calls: tuple[Resolving, Resolving]) -> None:
    after = found.state()
    for name, value in expected.state().items():
        assert torch.equal(value, after[name]), name
    for name in ("rows", "miss_count", "misses"):
        of_reference, of_kernel = (getattr(call, name) for call in calls)
        assert torch.equal(of_reference, of_kernel), name


def selection(numbers: Numbers, tokens: int, k: int) -> Tensor:
    """No entry twice in a row; some past what a token sees, some -1."""
    rows = [numbers.permutation(ENTRIES + 4)[:k] for _ in range(tokens)]
    selected = torch.stack(rows).sort().values if rows else torch.zeros(0, k, dtype=torch.int64)
    selected[numbers.integers(0, 7, *selected.shape) == 0] = -1
    return selected.int()


@pytest.mark.parametrize(
    ("k", "drafts", "hot_blocks", "look", "record"),
    [
        (5, 0, 2, 1024, "v4"),
        (5, 2, 4, 8, "v4"),
        (8, 1, 4, 4, "v41"),
        (3, 4, 5, 16, "words of 4 bytes"),
        (16, 0, 4, 1024, "no scales"),
    ],
)
def test_lives_of_slots_equal_the_reference(
    k: int, drafts: int, hot_blocks: int, look: int, record: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernels, "LOOK_RECORDS", look)
    expected, found = (Machine(3, record=FORMATS[record], hot_blocks=hot_blocks) for _ in range(2))
    numbers, missed, hits = Numbers(k + drafts), 0, 0
    for nth in range(9):
        slots = numbers.permutation(SLOTS).tolist()[: 0 if nth == 4 else 1 + nth % SLOTS]
        most = ENTRIES * RATIO - drafts
        starts = numbers.integers(0 if nth % 2 else most - 8, most, len(slots)).tolist()
        requests = [(slot, start, 1 + drafts) for slot, start in zip(slots, starts, strict=True)]
        selected = selection(numbers, len(slots) * (1 + drafts), k)
        calls = expected.resolving(requests, selected), found.resolving(requests, selected)
        reference.resolve(calls[0])
        kernels.resolve(calls[1])
        check(expected, found, calls)
        hits, missed = expected.hot.counted[:2].tolist()
    assert hits > 0
    assert missed > (expected.hot.entry_of >= 0).sum(), "nothing was replaced"


def test_rows_of_the_arena_that_no_request_names_stay():
    """All that changes is hot records of the requests that ran; free rows keep their poison."""
    machine = Machine(1)
    before = machine.arena.clone()
    call = machine.resolving([(2, 100, 1)], selection(Numbers(0), 1, 5))
    kernels.resolve(call)
    own = machine.hot.first_row + 2 * 4
    changed = (machine.arena != before).any(dim=1).nonzero().flatten().tolist()
    assert changed
    assert set(changed) <= set(range(own, own + 4))


def test_an_entry_named_twice_is_read_twice():
    """And its second record, once it is replaced, does not take the first one's place away."""
    for seed in (3, 4):
        machine, numbers = Machine(seed, device=0, hot_blocks=2), Numbers(seed)
        for _ in range(6):
            selected = numbers.integers(0, 10, 1, 5).int()
            call = machine.resolving([(1, ENTRIES * RATIO - 1, 1)], selected)
            kernels.resolve(call)
            for entry, at in zip(selected[0].tolist(), call.rows[0].tolist(), strict=True):
                block = int(machine.block_table[1, entry // PAGE_ROWS])
                wanted = bytes_of(machine, machine.host[block], entry % PAGE_ROWS)
                row, record = divmod(at, PAGE_ROWS)
                assert bytes_of(machine, machine.arena[row], record) == wanted


def bytes_of(machine: Machine, arena_row: Tensor, record: int) -> list[int]:
    parts = page_rows(arena_row[None], machine.page)
    return [byte for part in parts for byte in part[0, record].tolist()]


def test_the_reference_too_reads_an_entry_twice_that_is_named_twice():
    machine, numbers = Machine(0, device=0, hot_blocks=2), Numbers(4)
    for _ in range(6):
        selected = numbers.integers(0, 10, 1, 5).int()
        call = machine.resolving([(1, ENTRIES * RATIO - 1, 1)], selected)
        reference.resolve(call)
        named = [
            machine.hot.entry_of[1, at - machine.hot.first_row * PAGE_ROWS - 16]
            for at in call.rows[0]
        ]
        assert named == selected[0].tolist()


def test_more_tokens_than_hot_records_are_refused():
    call = Machine(0).resolving([(0, 40, 1)], selection(Numbers(0), 1, 5))
    with pytest.raises(InvalidInput, match="4 tokens of a request select 5 entries each"):
        kernels.resolve(replace(call, tokens_per_request=4))


def test_misses_of_one_request_are_shared_by_all_programs(monkeypatch: pytest.MonkeyPatch):
    """Whatever their number, every record is fetched."""
    for programs, at_once in ((1, 1), (3, 2), (64, 4)):
        monkeypatch.setattr(kernels, "FETCH_PROGRAMS", programs)
        monkeypatch.setattr(kernels, "FETCH_AT_ONCE", at_once)
        expected, found = Machine(2), Machine(2)
        selected = selection(Numbers(4), 3, 15)
        requests = [(0, 2, 1), (2, ENTRIES * RATIO - 1, 1), (1, 50, 1)]
        calls = expected.resolving(requests, selected), found.resolving(requests, selected)
        reference.resolve(calls[0])
        kernels.resolve(calls[1])
        check(expected, found, calls)


@pytest.mark.parametrize("record", ["v4", "v41", "no scales"])
@pytest.mark.parametrize("programs", [1, 40])
def test_chunks_stage_what_the_reference_stages(
    record: str, programs: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernels, "STAGE_PROGRAMS", programs)
    monkeypatch.setattr(kernels, "PIECE_BYTES", 256)
    machine = Machine(5, record=FORMATS[record])
    page = replace(machine.page, offset_bytes=0)
    numbers = Numbers(9)
    batch = torch.tensor(
        [(2, 0, 41, 0), (-1,) * 4, (1, 70, 9, 41), (0, 0, 3, 50), (-1,) * 4], dtype=torch.int32
    )
    table = numbers.permutation(SLOTS * BLOCKS).reshape(SLOTS, BLOCKS).int()
    found = []
    for stage in (reference.stage, kernels.stage):
        row_bytes = page.payload_bytes
        arena = torch.full((SLOTS * BLOCKS, row_bytes), POISON, dtype=torch.uint8)
        staged = EntrySource(arena=arena, page=page, block_table=table, ratio=RATIO)
        stage(
            Staging(
                batch=batch,
                entries=machine.source,
                block_table=machine.block_table,
                host=machine.host,
                staged=staged,
            )
        )
        found.append(arena)
    assert torch.equal(*found)
    written = (found[0] != POISON).any(dim=1)
    assert written.sum() == 3 + 5

"""Interpreted kernels of entries in host memory: all that a step leaves is what the reference
leaves, byte for byte, whatever was hot before."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.kernels import host_entries as kernels
from dsv4.ops.calls import EntrySource, Staging
from dsv4.reference import host_entries as reference
from dsv4.reference.pages import page_rows
from tests.support.host_entries import (
    BLOCKS,
    ENTRIES,
    FORMATS,
    PAGE_ROWS,
    POISON,
    RATIO,
    SLOTS,
    Machine,
    check,
    selection,
)
from tests.support.numbers import Numbers


@pytest.mark.parametrize(
    ("k", "drafts", "hot_blocks", "look", "record"),
    [
        (5, 0, 2, 1024, "v4"),
        (5, 2, 4, 8, "v4"),
        (8, 1, 4, 4, "v41"),
        (3, 3, 3, 16, "words of 4 bytes"),
        (16, 0, 4, 1024, "no scales"),
    ],
)
def test_lives_of_slots_equal_the_reference(
    k: int, drafts: int, hot_blocks: int, look: int, record: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernels, "LOOK_RECORDS", look)
    expected, found = (
        Machine(3, record=FORMATS[record], hot_blocks=hot_blocks, device=4) for _ in range(2)
    )
    numbers, missed, hits = Numbers(k + drafts), 0, 0
    for nth in range(8):
        slots = [[2, 0], [0], [2]][nth % 3] if nth != 5 else []
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
    for programs, words in ((1, 1), (3, 128), (64, 512)):
        monkeypatch.setattr(kernels, "FETCH_PROGRAMS", programs)
        monkeypatch.setattr(kernels, "FETCH_WORDS", words)
        expected, found = Machine(2), Machine(2)
        selected = selection(Numbers(4), 3, 15)
        requests = [(0, 2, 1), (2, ENTRIES * RATIO - 1, 1), (1, 50, 1)]
        calls = expected.resolving(requests, selected), found.resolving(requests, selected)
        reference.resolve(calls[0])
        kernels.resolve(calls[1])
        check(expected, found, calls)


@pytest.mark.parametrize(
    ("record", "programs", "which"),
    [("v4", 1, "all"), ("v41", 40, "all"), ("no scales", 40, "host"), ("v4", 3, "device")],
)
def test_chunks_stage_what_the_reference_stages(
    record: str,
    programs: int,
    which: Literal["all", "host", "device"],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kernels, "STAGE_PROGRAMS", programs)
    monkeypatch.setattr(kernels, "SIDE_PROGRAMS", programs)
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
                which=which,
            )
        )
        found.append(arena)
    assert torch.equal(*found)
    written = int((found[0] != POISON).any(dim=1).sum())
    assert written == 3 + 5 if which == "all" else 0 < written < 3 + 5

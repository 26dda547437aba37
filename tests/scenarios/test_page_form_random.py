"""Random lives of V4.1's requests in pages of whole records: every output bit is that of a manager
whose pages are planes, and every record has the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import Page
from dsv4.cache.requests import Request
from dsv4.reference.pages import page_rows
from tests.scenarios.test_residency_random import POISON, Worlds, assert_both_were_needed

MODEL = "v41-tiny"


class Forms(Worlds):
    layouts = ({"page_form": "planes"}, {"page_form": "records"})

    def poison(self) -> None:
        """All blocks and slots that are free."""
        for manager in self.managers:
            manager.memory.block_arena.bytes[manager._parts.table.allocator._free] = POISON
            live = {request.slot for request in manager.requests}
            free = [slot for slot in range(manager.memory.max_requests) if slot not in live]
            manager.memory.slot_arena.bytes[free] = POISON
            manager.memory.workspace.staging.fill_(POISON)

    def assert_same_records(self) -> int:
        """Returns how many were compared."""
        count = 0
        for pair in self.pairs:
            found = [
                records(manager, request)
                for manager, request in zip(self.managers, pair.requests, strict=True)
            ]
            for (name, planes), (_, whole) in zip(*found, strict=True):
                assert torch.equal(planes, whole), name
                count += len(whole)
        return count


class FormsApart(Worlds):
    layouts = ({"page_form": "planes"}, {"page_form": "records", "entries_apart": True})


def records(manager: KVCacheManager, request: Request) -> Iterator[tuple[str, Tensor]]:
    """The bytes of each record that a later step can read, without padding: [records, bytes]."""
    schema, length = manager.schema, request.length
    for page in schema.layout.pages:
        if page.kind == "window":
            positions = range(max(0, length - schema.model.window + 1), length)
            at = [(request.slot, position % page.rows) for position in positions]
            arena = manager.memory.slot_arena.bytes
        else:
            ratio = schema.model.layers[page.layer].ratio
            entries = range(length // ratio)
            at = [(request.block_ids[e // page.rows], e % page.rows) for e in entries]
            arena = manager.memory.block_arena.bytes
        yield f"{page.kind} of layer {page.layer} at {length}", _bytes(arena, page, at)


def _bytes(arena: Tensor, page: Page, at: list[tuple[int, int]]) -> Tensor:
    data, scales = page_rows(arena, page)
    scales = scales[..., : page.format.scale_row_bytes]
    row, nth = torch.tensor(at, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return torch.cat((data[row, nth], scales[row, nth]), dim=1)


CASES = [(0, 1), (2, 2)]


@pytest.mark.parametrize(("drafts", "plans"), CASES)
def test_outputs_and_records_do_not_depend_on_the_form(drafts: int, plans: int) -> None:
    live(5, drafts, plans, calls=45)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("drafts", "plans"), CASES)
def test_many_outputs_and_records_do_not_depend_on_the_form(
    drafts: int, plans: int, seed: int
) -> None:
    live(seed, drafts, plans, calls=150)


def live(seed: int, drafts: int, plans: int, *, calls: int) -> None:
    worlds = Forms(MODEL, seed, drafts=drafts, plans=plans)
    compared = 0
    for _ in range(calls):
        worlds.live(1, two=plans > 1)
        compared += worlds.assert_same_records()
    assert worlds.counts["step"] > 10
    assert worlds.counts["fork"]
    assert worlds.counts["snapshot"], "no prefix came from a snapshot"
    assert compared > 10_000


@pytest.mark.parametrize(("drafts", "plans"), CASES)
def test_with_entries_in_host_memory_too(drafts: int, plans: int) -> None:
    worlds = FormsApart(MODEL, 5, drafts=drafts, plans=plans)
    worlds.live(45, two=plans > 1)
    assert_both_were_needed(worlds)

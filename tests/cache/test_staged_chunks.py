"""What a chunk reads from host memory: one layer's entries come up while another one is read.

Launches beside the current stream are over at once on a CPU. Here they are put off until something
waits for them, as late as a GPU may do them, or all at once, as early as it may.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request
from dsv4.cache.residency.chunks import ChunkEntries, SideStream
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.calls import Attention, Staging
from tests.support.attending_model import AttendingModel

LENGTH, CHUNK = 900, 100
IDS = [7 * n % 512 for n in range(LENGTH + CHUNK)]
POISON = 0xEE


class Late(SideStream):
    """Launches happen when something waits for them, in their order."""

    def __init__(self) -> None:
        self.put_off: deque[tuple[int, Callable[[], None]]] = deque()
        self.begun = 0

    def run(self, call: Callable[[], None], uses: tuple[Tensor, ...]) -> Any:
        self.begun += 1
        self.put_off.append((self.begun, call))
        return self.begun

    def hold_back(self, event: Any) -> None:
        while event is not None and self.put_off and self.put_off[0][0] <= event:
            self.put_off.popleft()[1]()

    def hold_back_for_all(self) -> None:
        self.hold_back(self.begun)


class Calls:
    """Notes of which layer what is staged, when it is launched."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.found = list[tuple[int, str]]()
        self._stage = manager._parts.backend.stage

    def __call__(self, call: Staging) -> None:
        self.found.append((call.entries.page.layer, call.which))
        self._stage(call)


def model_of(name: str, **changes: Any) -> ModelSpec:
    return replace(ModelSpec.preset(name), **changes)


def made(
    spec: ModelSpec, *, apart: bool, requests: int = 1, **options: Any
) -> tuple[KVCacheManager, AttendingModel]:
    together, of_host = (
        CacheSchema.build(spec, max_context=1024, entries_apart=flag) for flag in (False, True)
    )
    schema = of_host if apart else together
    if apart:
        options["host_memory"] = 24 * schema.bytes.entries
    manager = KVCacheManager(
        schema, num_blocks=24, max_requests=requests, max_step_tokens=256, **options
    )
    return manager, AttendingModel(together)


def chunks_of(manager: KVCacheManager) -> ChunkEntries:
    entries = manager.memory.lanes[0].entries
    assert entries is not None
    return entries.chunks


def live(manager: KVCacheManager, model: AttendingModel, seed: int = 0) -> Request:
    request = manager.admit_request(LENGTH + CHUNK)
    ids = IDS[seed:] + IDS[:seed]
    while request.length < LENGTH:
        count = min(256, LENGTH - request.length)
        model.step(manager, [(request, ids[request.length :][:count])])
    return request


def leave(manager: KVCacheManager) -> int:
    """All blocks that may leave the device do; returns how many are in host memory only."""
    residency = manager._parts.residency
    assert residency is not None
    residency.copies.pump()
    for block_id in [b for b in residency.places.with_rows() if residency.places.in_host[b]]:
        residency._leave(block_id)
    residency.tables.send()
    entries = manager.memory.entries
    assert entries is not None
    entries.arena.bytes[residency.places._free] = POISON
    return residency.stats().blocks_only_in_host


def one_chunk(
    manager: KVCacheManager, model: AttendingModel, requests: list[Request]
) -> torch.Tensor:
    count = CHUNK // len(requests)
    if manager._parts.residency is not None:
        chunks_of(manager).rows.fill_(POISON)
    return model.step(manager, [(r, IDS[r.length :][:count]) for r in requests])


@pytest.mark.parametrize("name", ["tiny", "v41-tiny"])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_a_layers_entries_come_up_while_the_one_before_is_read(name: str, late: bool, count: int):
    spec = model_of(name)
    plain, model = made(spec, apart=False, requests=count)
    requests = [live(plain, model, seed) for seed in range(count)]
    expected = one_chunk(plain, model, requests)
    manager, _ = made(spec, apart=True, requests=count)
    requests = [live(manager, model, seed) for seed in range(count)]
    assert leave(manager) > 3
    if late:
        chunks_of(manager).side = Late()
    manager._parts.backend.stage = calls = Calls(manager)  # type: ignore[method-assign, assignment]
    assert torch.equal(one_chunk(manager, model, requests), expected)
    owners = {page.layer for page in manager.memory.entries.layout.pages}  # type: ignore[union-attr]
    from_host = [layer for layer, which in calls.found if which != "device"]
    assert calls.found[0] == (min(owners), "all")  # nothing came before it
    assert {which for _, which in calls.found[1:]} == {"host", "device"}
    # each comes over the link once, whoever else reads it; of more requests than fit, twice
    assert from_host == sorted(list(owners) * count)
    manager.check_invariants()


def test_what_broke_off_is_waited_for_before_its_memory_is_used_again():
    """The next step may write all that a launch beside it reads."""
    manager, model = made(model_of("tiny"), apart=True)
    request = live(manager, model)
    leave(manager)
    late = chunks_of(manager).side = Late()
    plan = manager.prepare_forward([(request, CHUNK)])

    def stop(call: Attention) -> None:
        if late.put_off:
            raise RuntimeError("stop")
        attend(call)

    attend, manager._parts.backend.attend = manager._parts.backend.attend, stop  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="stop"):
        model.run(manager, plan.batch, IDS[LENGTH:])
    manager._parts.backend.attend = attend  # type: ignore[method-assign]
    assert late.put_off
    manager.fail(plan)
    assert not late.put_off
    manager.rewind(request, 700)
    next_plan = manager.prepare_forward([(request, CHUNK)])
    manager.abandon(next_plan)
    manager.check_invariants()


@pytest.mark.parametrize("count", [1, 2])
def test_entries_that_layers_share_make_room_for_the_next_early(count: int):
    """V4.1: while the first of them reads, not only while the last does. Those of two groups of
    requests fill the staging."""
    manager, model = made(model_of("v41-tiny"), apart=True, requests=count)
    requests = [live(manager, model, seed) for seed in range(count)]
    leave(manager)
    manager._parts.backend.stage = calls = Calls(manager)  # type: ignore[method-assign, assignment]
    attend, before = manager._parts.backend.attend, list[tuple[int, str]]()

    def first_read(call: Attention) -> None:
        if calls.found and not before:
            before.extend(calls.found)
        attend(call)

    manager._parts.backend.attend = first_read  # type: ignore[method-assign]
    one_chunk(manager, model, requests)
    first, other = (page.layer for page in manager.memory.entries.layout.pages)  # type: ignore[union-attr]
    assert before == [(first, "all"), (other if count == 1 else first, "host")]


def test_host_memory_stays_pinned_as_long_as_a_handle_may_read_it():
    manager, _ = made(model_of("tiny"), apart=True)
    pool = weakref.ref(manager._parts.residency._pool)  # type: ignore[union-attr]
    handle = manager.acquire(1)
    del manager
    gc.collect()
    assert pool() is not None
    del handle
    gc.collect()
    assert pool() is None


def test_what_a_graph_captures_to_forget_is_forgotten_at_the_next_step_too(
    monkeypatch: pytest.MonkeyPatch,
):
    """Capturing does not run it, and the graph may never be replayed."""
    manager, _ = made(model_of("tiny"), apart=True)
    entries = manager.memory.entries
    assert entries is not None
    entries.lost.add(0)
    monkeypatch.setattr(type(entries), "is_capturing", lambda self: True)
    entries.forget_lost()
    assert entries.lost == {0}
    monkeypatch.undo()
    entries.place[0].fill_(3)
    manager.prepare_forward([(manager.admit_request(3), 3)])
    assert not entries.lost
    assert bool((entries.place[0] == -1).all())

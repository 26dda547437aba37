"""Values of the wrong kind: a typed error, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.cache import build
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import ContextOverflow, Dsv4Error, InvalidInput, PlanError, RequestError
from dsv4.model import AttentionType
from dsv4.tiers.host import HostTier
from tests.support.faults import everything
from tests.support.lives import TINY, Text, tiny_stack
from tests.support.stack import Stack
from tests.support.tiered import options


class Thing:
    """Nothing that a call can use. Its name is the same in every process that collects tests."""

    def __repr__(self) -> str:
        return "Thing()"


ODD: tuple[Any, ...] = (
    *(None, True, "3", b"3", 2.0, -1, float("nan"), 1j, Thing(), [], {}, (1,)),
    *(np.float64(2), np.bool_(True), np.array([1, 2]), torch.tensor(1.5), torch.tensor([1, 2])),
)
NO_COUNT = [odd for odd in ODD if odd is not None]


SCHEMA = CacheSchema.build(TINY, max_context=512)
CSA = next(s.layer for s in TINY.layers if s.attention is AttentionType.CSA)
HCA = next(s.layer for s in TINY.layers if s.attention is AttentionType.HCA)


def scene() -> tuple[Stack, Request]:
    stack = tiny_stack(drafts=3, prefix=PrefixOptions(snapshots=2), num_blocks=8)
    text = Text.random(stack, 0, 300)
    request = stack.manager.admit_request(text.ids[:20])
    stack.step([(request, text.stream, 20)])
    return stack, request


COUNTS: dict[str, Callable[[KVCacheManager, Request, Any], object]] = {
    "fork": lambda m, r, odd: m.fork(r, odd),
    "rewind": lambda m, r, odd: m.rewind(r, odd),
    "extend": lambda m, r, odd: m.room.extend(r, odd),
    "block_id": lambda m, r, odd: m.room.block_id(r, odd),
    "evict": lambda m, r, odd: m.prefix.evict(odd),
    "acquire": lambda m, r, odd: m.acquire(odd),
    "new tokens": lambda m, r, odd: m.prepare_forward([(r, odd)]),
    "start": lambda m, r, odd: m.prepare_forward([(r, 1, odd)]),
    "pad_tokens": lambda m, r, odd: m.prepare_forward([(r, 1)], pad_tokens=odd),
    "pad_requests": lambda m, r, odd: m.prepare_forward([(r, 1)], pad_requests=odd),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_no_count(name: str):
    stack, request = scene()
    before = everything(stack.manager)
    for odd in NO_COUNT:
        with pytest.raises(Dsv4Error):
            COUNTS[name](stack.manager, request, odd)
    assert everything(stack.manager) == before


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint16])
def test_numpy_integers_are_whole_numbers(kind: type):
    stack, request = scene()
    manager, one = stack.manager, kind(1)
    (fork,) = manager.fork(request, one)
    manager.rewind(request, kind(19))
    assert manager.room.extend(request, kind(120)) != []
    assert manager.room.block_id(request, one) == request.block_ids[1]
    manager.prefix.evict(kind(0))
    plan = manager.prepare_forward(
        [(request, kind(2), kind(19)), (fork, one)], pad_tokens=kind(8), pad_requests=kind(3)
    )
    manager.acquire(one, plan.batch)
    manager.commit(plan, [one, one], ids=[kind(1), kind(2), kind(3)], partial=True)
    assert (request.length, fork.length) == (20, 21)
    manager.release_request(manager.admit_request(kind(9)))
    KVCacheManager(stack.schema, num_blocks=kind(2), max_requests=one, max_step_tokens=kind(9))


def test_what_are_no_steps():
    stack, request = scene()
    before = everything(stack.manager)
    for steps in (
        *(None, 3, "ab", {}, {1: 2}, Thing(), [1], [None], [()], ((0, 1),), [[0, 1]]),
        *(((request, 1) for _ in range(1)), iter([(request, 1)])),
    ):
        with pytest.raises(Dsv4Error):
            stack.manager.prepare_forward(steps)
    assert everything(stack.manager) == before


def test_what_is_no_acceptance_and_no_ids():
    stack, request = scene()
    manager = stack.manager
    plan = manager.prepare_forward([(request, 1)])
    before = everything(manager)
    for odd in (
        *(odd for odd in NO_COUNT if not isinstance(odd, tuple)),
        *([True], [1.0], [[1]], "1", [None], ["1"], [1, 2], (x for x in [1])),
        *(torch.ones(1, dtype=torch.bfloat16), torch.ones(1, device="meta")),
    ):
        with pytest.raises(PlanError):
            manager.commit(plan, odd, partial=True)
        with pytest.raises(InvalidInput):
            manager.commit(plan, ids=odd, partial=True)
    assert everything(manager) == before
    assert not plan.done
    manager.abandon(plan)


@pytest.mark.parametrize("name", ["admit_request", "prefix.pin"])
def test_what_are_no_tokens(name: str):
    stack, _ = scene()
    before = everything(stack.manager)
    for odd in (*NO_COUNT[2:], [True, 2], [1.5], ["a"], [None], [[1, 2]], torch.ones(2)):
        if isinstance(odd, list | tuple | torch.Tensor | np.ndarray) and len(np.shape(odd)) == 1:
            ids = np.asarray(odd)
            if ids.dtype.kind == "i" and not any(isinstance(each, bool) for each in odd):
                continue  # ids
            if not ids.size:
                continue
        with pytest.raises(Dsv4Error):
            attrgetter(name)(stack.manager)(odd)
    for salt in (3, True, b"a", ["a"]):
        with pytest.raises(InvalidInput, match="salt"):
            attrgetter(name)(stack.manager)([1, 2], salt)
    assert everything(stack.manager) == before


@pytest.mark.parametrize(
    "name",
    [
        *("prefix.prompt", "prefix.look_up", "prefix.pin", "room.needed_blocks", "admit_request"),
        *("tiers.fetch", "supply_ids"),
    ],
)
def test_a_request_is_no_prompt(name: str):
    """It has calls that tensors have; none of them is made."""
    stack = tiny_stack(prefix=options(), num_blocks=8, tiers=[HostTier(1 << 20)])
    text = Text.random(stack, 0, 20)
    request = stack.manager.admit_request(text.ids)
    stack.step([(request, text.stream, 20)])
    before = everything(stack.manager)
    first = (request,) if name == "supply_ids" else ()
    with pytest.raises(InvalidInput):
        attrgetter(name)(stack.manager)(*first, request)
    stack.manager.check_invariants()
    assert everything(stack.manager) == before
    assert stack.manager.room.can_admit(request) is False  # type: ignore[arg-type]
    assert everything(stack.manager) == before


def test_a_prompt_may_be_too_long_for_another_manager():
    """Its schema says the same in blocks, and takes shorter contexts."""
    made = KVCacheManager(SCHEMA, num_blocks=4, max_requests=1, prefix=PrefixOptions())
    short = CacheSchema.build(TINY, max_context=256)
    manager = KVCacheManager(short, num_blocks=4, max_requests=1, prefix=PrefixOptions())
    before, prompt = everything(manager), made.prefix.prompt(list(range(300)))
    for call in (manager.admit_request, manager.prefix.look_up, manager.room.needed_blocks):
        with pytest.raises(ContextOverflow):
            call(prompt)
    assert manager.room.can_admit(prompt) is False
    assert everything(manager) == before
    assert manager.room.needed_blocks(made.prefix.prompt(list(range(256)))) == 2


def test_who_accepts_too_many_tokens_is_told_how_many_there_are():
    stack, request = scene()
    plan = stack.manager.prepare_forward([(request, 3)])
    for wrong in (5, -1):
        with pytest.raises(PlanError, match=f"accepts {wrong} of 3 tokens: accept between 0 and 3"):
            stack.manager.commit(plan, [wrong])
    stack.manager.abandon(plan)


def test_what_cannot_be_released_later():
    stack, request = scene()
    before = everything(stack.manager)
    for odd in ODD:
        with pytest.raises(InvalidInput):
            stack.manager.room.release_later(odd)
    assert everything(stack.manager) == before
    other = tiny_stack().manager
    with pytest.raises(RequestError, match="not a request that this manager admitted"):
        other.room.release_later(request)
    assert stack.manager.requests == (request,)
    stack.manager.room.release_later(request)
    assert stack.manager.requests == ()
    stack.manager.room.extend(stack.manager.admit_request(3), 0)
    stack.manager.room.release_later(request)  # it has gone already


def test_what_is_no_time_to_wait():
    stack = tiny_stack(prefix=options(), num_blocks=8, tiers=[HostTier(1 << 20)])
    manager, before = stack.manager, everything(stack.manager)
    for odd in ODD:
        if type(odd) in (int, float, np.float64) and not np.isnan(odd):
            continue  # a number
        for call in (manager.tiers.admit, manager.tiers.resume):
            with pytest.raises(InvalidInput, match="timeout_s"):
                call([1, 2, 3], timeout_s=odd)
        with pytest.raises(InvalidInput, match="timeout_s"):
            manager.tiers.drain(odd)
    assert everything(manager) == before
    manager.release_request(manager.tiers.admit([1, 2, 3], timeout_s=np.float32(0)))
    assert manager.tiers.drain(np.int64(30))


def test_what_is_neither_true_nor_false():
    stack, request = scene()
    manager, before = stack.manager, everything(stack.manager)
    for odd in (*(odd for odd in ODD if odd is not True), 0, 1):
        with pytest.raises(InvalidInput, match="reuse"):
            manager.admit_request([1, 2], reuse=odd)
        with pytest.raises(InvalidInput, match="chunks_apart"):
            manager.prepare_forward([(request, 1)], chunks_apart=odd)
    assert everything(manager) == before


def test_what_a_layer_is_not_bound_to():
    stack, request = scene()
    plan = stack.manager.prepare_forward([(request, 1)])
    for odd in (*NO_COUNT, np.array(1), request):
        with pytest.raises(PlanError):
            stack.manager.acquire(0, odd)
    for odd in (*NO_COUNT[:8], np.array(1.0), torch.tensor(1.0)):
        with pytest.raises(InvalidInput):
            plan.mark_appended(odd)
    assert not plan.batch.written.appended
    stack.manager.abandon(plan)


@pytest.mark.parametrize(
    "options",
    [
        *({"tiers": odd} for odd in (*ODD[:9], [3], ["disk"], {"a": 1}, np.array([1, 2]))),
        *({"device": odd} for odd in ("nowhere", "cuda:99", None, 1.5, True, [], "", 1 << 63)),
        *({"handoff": odd} for odd in ODD[1:]),
        *({"prefix": odd} for odd in (True, "full", {}, PrefixOptions)),
        *({"backend": odd} for odd in ("cuda", "", 3, True, ODD[-1], ODD[-3])),
        *({"num_blocks": odd} for odd in NO_COUNT),
        *({"max_requests": odd} for odd in NO_COUNT),
        *({"max_step_tokens": odd} for odd in NO_COUNT),
        *({"schema": odd} for odd in (None, "tiny", 3)),
    ],
    ids=repr,
)
def test_what_is_no_option_of_a_manager(options: dict[str, Any]):
    given = {"schema": SCHEMA, "num_blocks": 2, "max_requests": 1, "max_step_tokens": 8}
    with pytest.raises(Dsv4Error):
        KVCacheManager(**{**given, **options})


@pytest.mark.parametrize(
    "make",
    [
        *(lambda odd=odd: PrefixOptions(policy=odd) for odd in ("full", None, 3, SnapshotPolicy)),
        *(lambda odd=odd: PrefixOptions(snapshots=odd) for odd in (None, True, -1, "4", 2.0)),
        *(lambda odd=odd: PrefixOptions(where=odd) for odd in (None, "disk", 3, *ODD[-3:])),
        *(lambda odd=odd: PrefixOptions(replay=odd) for odd in (None, "", 3, *ODD[-3:])),
        *(
            lambda odd=odd: CacheSchema.build(TINY, hca_state=odd)
            for odd in (None, "", 3, *ODD[-3:])
        ),
        *(lambda odd=odd: PrefixOptions(model_id=odd) for odd in (None, 3, b"a")),
        lambda: SnapshotPolicy("often"),  # type: ignore[arg-type]
        lambda: SnapshotPolicy("periodic", True),
        lambda: build.manager_from_budget(SCHEMA, None),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_option(make: Callable[[], object]):
    with pytest.raises(InvalidInput):
        make()


@pytest.mark.parametrize("layer", [0, CSA, HCA])
def test_what_a_layer_does_not_take(layer: int):
    stack, request = scene()
    manager, text = stack.manager, Text.random(stack, 0, 300)
    plan = manager.prepare_forward([(request, 1)])
    handle, weights = manager.acquire(layer, plan.batch), stack.weights[layer]
    kv, projections = stack.inputs(plan, [text.stream], layer)
    before = everything(manager)
    for odd in (None, 3, "w", {}, kv):
        with pytest.raises(InvalidInput):
            handle.append(kv, *projections, weights=odd)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            handle.write_swa(kv, weights=odd)  # type: ignore[arg-type]
    for odd in (None, 3, "w", [1.0], np.zeros((1, 128))):
        with pytest.raises(InvalidInput):
            handle.append(odd, *projections, weights=weights)
    assert everything(manager) == before
    handle.append(kv, *projections, weights=weights)
    q = torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    sink = torch.zeros(4)
    entries = torch.zeros(1, 4, dtype=torch.int32) if layer == CSA else None
    for odd in (3, "w", [1.0], np.zeros((1, 4, 128)), True):
        for name in ("q", "sink", "out", "lse", "inverse_rope"):
            given: dict[str, Any] = {"q": q, "sink": sink, "indices": entries, name: odd}
            with pytest.raises(InvalidInput):
                handle.attend(**given)
        with pytest.raises(Dsv4Error):
            handle.gather_compressed_kv(odd)  # type: ignore[arg-type]
        with pytest.raises(Dsv4Error):
            handle.gather_all_compressed_kv(odd)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            handle.gather_swa_kv(odd)  # type: ignore[arg-type]


def test_what_is_no_top_k():
    stack, request = scene()
    manager, text = stack.manager, Text.random(stack, 0, 300)
    plan = manager.prepare_forward([(request, 1)])
    stack.write(plan, [text.stream])
    model = stack.schema.model
    q = torch.zeros(1, model.index_heads, model.index_dim, dtype=torch.bfloat16)
    weights = torch.zeros(1, model.index_heads, dtype=torch.bfloat16)
    handle, rope = manager.acquire(CSA, plan.batch), stack.weights[CSA].rope
    for top_k in (*NO_COUNT, 0):
        with pytest.raises(InvalidInput):
            handle.select(q, weights, rope=rope, top_k=top_k)
    assert handle.select(q, weights, rope=rope, top_k=np.int32(3)).shape == (1, 3)

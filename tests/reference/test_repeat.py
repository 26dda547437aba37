"""Calls of the reference that come again: what they compute is what the checked way computes, of
the tensors they are given then, and none of these is kept."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from dsv4.cache.repeats import Repeats
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.reference.repeat import Repetition, repeatable
from tests.support.numbers import Numbers
from tests.support.reading import queries, read
from tests.support.stack import Stack

TINY = ModelSpec.preset("tiny")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    values: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    parts: tuple[Inner, ...]
    out: Tensor


def add(call: Sum, base: Tensor, *, more: Tensor) -> None:
    call.out[:] = base + more
    for part in call.parts:
        call.out.add_(part.values * part.scale)


def tensors(seed: int) -> list[Tensor]:
    return [*Numbers(seed).normal(4, 3).unbind(), torch.empty(3)]


def calls(given: list[Tensor], base: Tensor) -> list[partial[None]]:
    a, b, more, _, out = given
    parts = Inner(values=a, scale=2.0), Inner(values=b, scale=-1.0)
    return [partial(add, Sum(parts=parts, out=out), base, more=more)]


def test_others_take_the_place_of_the_first() -> None:
    base, first = torch.ones(3), tensors(0)
    asked = calls(first, base)
    again = repeatable(asked, first, [base])
    assert again is not None
    others = tensors(1)
    assert again.places(others) is not None
    again.run([], others)
    assert torch.equal(others[4], base + others[2] + others[0] * 2.0 + others[1] * -1.0)
    assert torch.equal(first[4], base + first[2] + first[0] * 2.0 + first[1] * -1.0)
    assert asked[0].args[0].out is first[4]  # what was asked for stays as it was


def test_nothing_is_kept() -> None:
    base, first = torch.ones(3), tensors(0)
    again = repeatable(calls(first, base), first, [base])
    assert again is not None
    others = tensors(1)
    again.run([], others)
    broken = [*tensors(2)[:4], torch.empty(2)]
    with pytest.raises(RuntimeError):
        again.run([], broken)
    seen = [weakref.ref(each) for each in (*first, *others, *broken)]
    del first, others, broken
    assert [each() for each in seen] == [None] * len(seen)


@pytest.mark.parametrize("twice", [0, 2])
def test_a_tensor_that_is_two_arguments_is_not_guessed(twice: int) -> None:
    base, first = torch.ones(3), tensors(0)
    first[1] = (first[0], base)[twice // 2]
    assert repeatable(calls(first, base), first, [base]) is None
    assert torch.equal(first[4], base + first[2] + first[0] * 2.0 + first[1] * -1.0)


def life(counts: tuple[int, ...]) -> list[Tensor]:
    """Eight steps of as many tokens per request: what was read in each, then all bytes."""
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=1)
    stack = Stack(schema, layers=range(len(TINY.layers)), backend="reference", kv_norm=False)
    streams = [stack.stream(seed, 512) for seed in range(len(counts))]
    asked = [queries(stack, seed, 512) for seed in range(len(counts))]
    requests = [stack.manager.admit_request() for _ in counts]
    found: list[Tensor] = []
    for _ in range(8):
        plan = stack.manager.prepare_forward([*zip(requests, counts, strict=True)])
        for layer in stack.layers:
            stack.write(plan, streams, [layer])
            found.extend(each for each in read(stack, plan, layer, asked) if each is not None)
        stack.manager.commit(plan)
    return [*found, stack.manager.memory.block_arena.bytes, stack.manager.memory.slot_arena.bytes]


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (5, 30)], ids=["decode", "drafts", "chunks"])
def test_steps_repeated_are_steps_checked(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight steps of one shape, by repetition from the third on, and always checked."""
    made = []
    run = Repetition.run

    def counted(self: Repetition, places: list[int], tensors: list[Tensor]) -> None:
        made.append(self)
        run(self, places, tensors)

    monkeypatch.setattr(Repetition, "run", counted)
    results = []
    for find in (Repeats.find, lambda *_: (None, None)):
        monkeypatch.setattr(Repeats, "find", find)
        results.append(life(counts))
        assert bool(made) == (len(results) == 1)
        made.clear()
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)

"""Rejected drafts: the request goes on as if they had never been written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.errors import PlanError, SchemaError
from dsv4.model import ModelSpec
from tests.support.stack import (
    HCA_STATES,
    Stack,
    Stream,
    layers_to_run,
    logical_bytes,
    readable_bytes,
)

TINY = ModelSpec.preset("tiny")
MAX_BATCH = 64
# phases mod 128 around the end of a group of 128, and a few inside it
SPREAD = (0, 1, 63, 95, 110, 114, *range(119, 128))
FALSE_SEED = 1000
MAX_WIDTH = 140  # tokens of the widest step that is partly rejected


@dataclass(frozen=True)
class Case:
    """A request of `length` tokens that drafts `width` and keeps `accepted` of them."""

    length: int
    width: int
    accepted: int


def tiny_schema(drafts: int, state: HcaState = "raw") -> CacheSchema:
    """The shortest rings that survive so many drafts."""
    return CacheSchema.build(TINY, max_context=1024, max_draft_tokens=drafts, hca_state=state)


def build(schema: CacheSchema, requests: int) -> Stack:
    return Stack(
        schema,
        layers=layers_to_run(schema),
        max_requests=requests,
        num_blocks=requests * 6,
        max_step_tokens=requests * 600,
    )


class Streams:
    """True and false tokens of a request; few streams serve many requests."""

    def __init__(self, stack: Stack, tokens: int) -> None:
        self._true = [stack.stream(seed, tokens) for seed in range(3)]
        self._false = [stack.stream(FALSE_SEED + seed, tokens) for seed in range(2)]

    def true(self, nth: int) -> Stream:
        return self._true[nth % len(self._true)]

    def wrong_from(self, nth: int, start: int, accepted: int, attempt: int = 0) -> Stream:
        """From `start` on `accepted` true tokens, then others; what lies before is not there."""
        true, false = self.true(nth), self._false[(nth + attempt) % len(self._false)]
        kept, wrong = (
            slice(start, start + accepted),
            slice(start + accepted, start + MAX_WIDTH),
        )

        def compose(t: Tensor, f: Tensor) -> Tensor:
            tokens = torch.empty_like(t)
            tokens[kept], tokens[wrong] = t[kept], f[wrong]
            return tokens

        return Stream(
            kv={layer: compose(t, false.kv[layer]) for layer, t in true.kv.items()},
            projections={
                layer: tuple(map(compose, tensors, false.projections[layer]))
                for layer, tensors in true.projections.items()
            },
        )


def assert_same_readable(stack: Stack, request: Request, other: Stack, twin: Request) -> None:
    assert request.length == twin.length
    mine, theirs = readable_bytes(stack, request), readable_bytes(other, twin)
    assert mine.keys() == theirs.keys()
    for name, found in mine.items():
        assert torch.equal(found, theirs[name]), f"{name} at length {request.length}"


def check(drafts: int, cases: Sequence[Case], state: HcaState = "raw") -> None:
    """Drafts and rejects, many requests at once, and compares with requests that never did: right
    after the rejection, a few tokens on, and (every fourth) when all rings have turned."""
    schema = tiny_schema(drafts, state)
    for at in range(0, len(cases), MAX_BATCH):
        _check_batch(schema, cases[at : at + MAX_BATCH])


def _check_batch(schema: CacheSchema, cases: Sequence[Case]) -> None:
    stack, never = build(schema, len(cases)), build(schema, len(cases))
    onward = schema.ring_rows
    streams = Streams(stack, max(c.length + c.width for c in cases) + 5 + onward)
    true = [streams.true(nth) for nth in range(len(cases))]
    requests = [stack.manager.admit_request() for _ in cases]
    twins = [never.manager.admit_request() for _ in cases]
    stack.step([(r, s, c.length) for r, s, c in zip(requests, true, cases, strict=True)])
    stack.step(
        [
            (request, streams.wrong_from(nth, case.length, case.accepted), case.width)
            for nth, (request, case) in enumerate(zip(requests, cases, strict=True))
        ],
        accepted=[case.accepted for case in cases],
    )
    never.step([(r, s, c.length + c.accepted) for r, s, c in zip(twins, true, cases, strict=True)])
    for request, twin in zip(requests, twins, strict=True):
        assert_same_readable(stack, request, never, twin)
    for count in (1, 4):
        stack.step([(r, s, count) for r, s in zip(requests, true, strict=True)])
        never.step([(r, s, count) for r, s in zip(twins, true, strict=True)])
    for request, twin in zip(requests, twins, strict=True):
        assert_same_readable(stack, request, never, twin)
    few = range(0, len(cases), 4)
    stack.step([(requests[nth], true[nth], onward) for nth in few])
    never.step([(twins[nth], true[nth], onward) for nth in few])
    for nth in few:
        found, expected = logical_bytes(stack, requests[nth]), logical_bytes(never, twins[nth])
        assert torch.equal(found[0], expected[0]), f"blocks after {cases[nth]}"
        assert torch.equal(found[1], expected[1]), f"slot after {cases[nth]}"


# ---- every width, every accepted count ----------------------------------------------------------


@pytest.mark.parametrize("drafts", range(1, 17))
def test_every_accepted_count_at_every_phase_of_four(drafts: int):
    width = 1 + drafts
    base = 128 + 2 * width  # the window ring has turned
    check(
        drafts,
        [
            Case(length, width, accepted)
            for length in range(base, base + 4)
            for accepted in range(width + 1)
        ],
    )


@pytest.mark.parametrize("state", HCA_STATES)
@pytest.mark.parametrize("drafts", [1, 3, 7, 16])
def test_a_spread_of_phases_of_128(drafts: int, state: HcaState):
    width = 1 + drafts
    check(
        drafts,
        [
            Case(128 + phase, width, accepted)
            for phase in SPREAD
            for accepted in sorted({0, width // 2, width - 1})
        ],
        state,
    )


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("state", HCA_STATES)
@pytest.mark.parametrize("drafts", range(1, 17))
def test_every_phase_of_128_and_every_accepted_count(drafts: int, state: HcaState):
    width = 1 + drafts
    check(
        drafts,
        [
            Case(128 + phase, width, accepted)
            for phase in range(128)
            for accepted in range(width + 1)
        ],
        state,
    )


@pytest.mark.parametrize("state", HCA_STATES)
def test_drafts_at_the_start_of_a_request(state: HcaState):
    """The first groups, where no previous one is there."""
    check(
        4,
        [Case(length, 5, accepted) for length in (1, 2, 3, 4, 5, 7) for accepted in range(6)],
        state,
    )


def test_fewer_drafts_than_the_rings_hold_and_none():
    check(
        16,
        [
            Case(length, width, accepted)
            for length in (253, 254, 255, 256)
            for width in (0, 1, 2, 5)
            for accepted in range(width + 1)
        ],
    )


@pytest.mark.parametrize("state", HCA_STATES)
def test_the_end_of_a_chunk_can_be_rejected(state: HcaState):
    """A wide step may lose as many tokens as a narrow one."""
    check(
        3,
        [
            Case(length, width, width - rejected)
            for length in (1, 126, 200)
            for width in (9, 130, 140)
            for rejected in range(5)
        ],
        state,
    )


# ---- whole lives --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", HCA_STATES)
@pytest.mark.parametrize("drafts", [1, 3, 7, 16])
def test_lives_of_drafts_and_rejections(drafts: int, state: HcaState):
    """Ragged and zero-width steps, some requests absent, rejections in a row with other tokens
    each time, at the end the same as one prefill of the tokens that stayed."""
    rng = random.Random(drafts)
    schema = tiny_schema(drafts, state)
    stack = build(schema, 9)
    streams = Streams(stack, 600)
    requests = [stack.manager.admit_request() for _ in range(9)]
    stack.step([(r, streams.true(n), rng.randrange(1, 270)) for n, r in enumerate(requests)])
    for attempt in range(40):
        work, accepted = [], []
        for nth in rng.sample(range(9), rng.randrange(1, 10)):
            width = rng.randrange(2 + drafts)
            kept = rng.choice((0, 0, rng.randrange(width + 1), width))
            kept = min(kept, width)
            stream = streams.wrong_from(nth, requests[nth].length, kept, attempt)
            work.append((requests[nth], stream, width))
            accepted.append(kept)
        stack.step(work, accepted=accepted)
        if attempt % 13 == 12:
            never = build(schema, 9)
            twins = [never.manager.admit_request() for _ in requests]
            never.step([(t, streams.true(n), requests[n].length) for n, t in enumerate(twins)])
            for request, twin in zip(requests, twins, strict=True):
                assert_same_readable(stack, request, never, twin)


@pytest.mark.parametrize("state", HCA_STATES)
@pytest.mark.parametrize("length", [125, 126, 127, 128, 255])
def test_rejections_in_a_row(length: int, state: HcaState):
    """Nothing is accepted three times over, with different tokens each time, then all is."""
    schema = tiny_schema(5, state)
    stack, never = build(schema, 1), build(schema, 1)
    streams = Streams(stack, length + 200)
    request, twin = stack.manager.admit_request(), never.manager.admit_request()
    stack.step([(request, streams.true(0), length)])
    never.step([(twin, streams.true(0), length)])
    for attempt in range(3):
        stack.step([(request, streams.wrong_from(0, length, 0, attempt), 6)], accepted=[0])
        assert_same_readable(stack, request, never, twin)
    stack.step([(request, streams.wrong_from(0, length, 1), 6)], accepted=[1])
    for count in (6, 140):
        stack.step([(request, streams.true(0), count)])
    never.step([(twin, streams.true(0), 147)])
    for mine, theirs in zip(logical_bytes(stack, request), logical_bytes(never, twin), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("state", HCA_STATES)
def test_an_abandoned_narrow_step_is_a_rejection_of_all(state: HcaState):
    schema = tiny_schema(3, state)
    stack, never = build(schema, 1), build(schema, 1)
    streams = Streams(stack, 300)
    request, twin = stack.manager.admit_request(), never.manager.admit_request()
    stack.step([(request, streams.true(0), 126)])
    plan = stack.manager.prepare_forward([(request, 4)])
    stack.write(plan, [streams.wrong_from(0, 126, 0)])
    stack.manager.abandon(plan)
    never.step([(twin, streams.true(0), 126)])
    assert_same_readable(stack, request, never, twin)
    stack.step([(request, streams.true(0), 4)])
    never.step([(twin, streams.true(0), 4)])
    assert_same_readable(stack, request, never, twin)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [1, 4, 16])
def test_a_ring_too_short_for_the_drafts_has_no_schema(drafts: int):
    shortest = TINY.window + drafts
    with pytest.raises(SchemaError, match=f"max_draft_tokens={drafts}.*ring_rows >= {shortest}"):
        CacheSchema.build(TINY, max_draft_tokens=drafts, ring_rows=shortest - 1)
    CacheSchema.build(TINY, max_draft_tokens=drafts, ring_rows=shortest)


@pytest.mark.parametrize("drafts", [0, 2, 16])
def test_more_rejections_than_the_rings_survive_are_refused(drafts: int):
    schema = tiny_schema(drafts)
    stack = build(schema, 1)
    stream = stack.stream(0, 200)
    request = stack.manager.admit_request()
    stack.step([(request, stream, 130)])
    plan = stack.manager.prepare_forward([(request, drafts + 3)])
    stack.write(plan, [stream])
    before = logical_bytes(stack, request)
    with pytest.raises(PlanError, match=f"rejects {drafts + 2} tokens.*survive {drafts + 1}"):
        stack.manager.commit(plan, [1])
    assert request.length == 130
    assert all(
        torch.equal(a, b) for a, b in zip(before, logical_bytes(stack, request), strict=True)
    )
    stack.manager.commit(plan, [2])
    assert request.length == 132

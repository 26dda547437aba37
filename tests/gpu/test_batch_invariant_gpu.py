"""A batch-invariant manager: every bit that a token reads is the same in all steps that it could
be in.

One prompt as one chunk, as chunks, token by token, beside others and in another order: V4-Flash's
layers, with and without selection.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from tests.support.reading import Queries, queries, read
from tests.support.stack import Stack

pytestmark = pytest.mark.gpu

LAYERS = (0, 2, 3)
TOKENS = 1200
# the steps of the first request; what the others do beside it
CUTS: dict[str, tuple[list[int], list[list[int]]]] = {
    "one chunk": ([1200], []),
    "chunks": ([512, 37, 600, 51], []),
    "chunks beside others": ([700, 500], [[400, 300], [1, 64]]),
    "tokens at the end": ([1190, *[1] * 10], []),
    "tokens beside many": ([1190, *[1] * 10], [[5, *[1] * 10]] * 40),
    "tokens beside one": ([1190, *[1] * 10], [[700, *[1] * 10]]),
}


@pytest.fixture(scope="module")
def stack() -> Stack:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"), max_context=4096)
    return Stack(
        schema,
        layers=LAYERS,
        max_requests=48,
        num_blocks=256,
        max_step_tokens=2048,
        device="cuda",
        batch_invariant=True,
    )


def life(stack: Stack, cut: str, *, last: bool = False) -> list[Tensor]:
    """What the first request reads, token by token; with `last` its rows are behind the others."""
    steps, others = CUTS[cut]
    manager = stack.manager
    tokens = [TOKENS, *(sum(other) for other in others)]
    streams = [stack.stream(seed, count) for seed, count in enumerate(tokens)]
    asked: list[Queries] = [queries(stack, seed, count) for seed, count in enumerate(tokens)]
    requests = [manager.admit_request() for _ in streams]
    order = list(range(len(streams)))
    if last:
        order = [*order[1:], 0]
    found: dict[tuple[int, str], list[Tensor]] = {}
    for nth, count in enumerate(steps):
        counts = [count, *(other[nth] for other in others)]
        plan = manager.prepare_forward([(requests[i], counts[i]) for i in order])
        first = sum(counts[i] for i in order[: order.index(0)])
        rows = slice(first, first + count)
        for layer in LAYERS:
            stack.write(plan, [streams[i] for i in order], layers=[layer])
            out, lse, chosen = read(stack, plan, layer, [asked[i] for i in order])
            found.setdefault((layer, "out"), []).append(out[rows])
            found.setdefault((layer, "lse"), []).append(lse[rows])
            if chosen is not None:
                found.setdefault((layer, "chosen"), []).append(chosen[rows])
        manager.commit(plan, partial=True)  # a layer of each kind
    for request in requests:
        manager.release_request(request)
    return [torch.cat(pieces) for pieces in found.values()]


@pytest.mark.parametrize("cut", [name for name in CUTS if name != "one chunk"])
def test_bits_are_those_of_one_chunk(stack: Stack, cut: str) -> None:
    wanted = life(stack, "one chunk")
    for last in (False, True):
        for found, one in zip(life(stack, cut, last=last), wanted, strict=True):
            assert torch.equal(found.view(torch.uint8), one.view(torch.uint8)), cut

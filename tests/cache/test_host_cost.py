"""What a step costs the host does not depend on how long its requests are."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import FrameType

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec

REQUESTS, STEPS, LONGEST = 16, 300, 1_048_576


def calls_of_decode_steps(blocks: int) -> Counter[str]:
    """Every call of Python or C that some steps make, by name, each request in another phase."""
    schema = CacheSchema.build(replace(ModelSpec.preset("tiny"), max_context=LONGEST))
    manager = KVCacheManager(
        schema, num_blocks=8 * REQUESTS, max_requests=REQUESTS, max_step_tokens=REQUESTS
    )
    requests = [manager.admit_request() for _ in range(REQUESTS)]
    for nth, request in enumerate(requests):  # as if they had been computed
        request.length = blocks * schema.block_tokens + 8 * nth
        request.block_ids = [0] * (blocks + 1)
        request.published_blocks = blocks + 1
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, what: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(what, "__qualname__", repr(what))] += 1

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            manager.commit(manager.prepare_forward([(request, 1) for request in requests]))
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_makes_the_same_calls_at_8k_and_at_1m_tokens():
    short, long = calls_of_decode_steps(64), calls_of_decode_steps(8184)
    assert short["KVCacheManager.prepare_forward"] == STEPS
    assert short == long

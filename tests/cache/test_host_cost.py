"""What a step costs the host does not depend on how long its requests are, nor, but for the blocks
that they complete, on how many there are."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from types import FrameType

import numpy as np

from benchmarks.host import DRAFTS, decoding_requests, drafting_requests

REQUESTS, STEPS = 16, 300


def calls_of(steps: Callable[[], None]) -> Counter[str]:
    """Every call of Python or C that they make, by name."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, what: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(what, "__qualname__", repr(what))] += 1

    gc.disable()  # it calls finalisers, and Hypothesis's callback, whenever it likes
    sys.setprofile(count)
    try:
        steps()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def calls_of_decode_steps(context: int) -> Counter[str]:
    """Each request in another phase."""
    manager, requests = decoding_requests(context, REQUESTS, "cpu")

    def steps() -> None:
        for _ in range(STEPS):
            manager.commit(
                manager.prepare_forward([(request, 1) for request in requests]), partial=True
            )

    return calls_of(steps)


def calls_of_draft_steps(context: int, requests: int, steps: int) -> Counter[str]:
    """With prefix cache, ids and drafts."""
    manager, made = drafting_requests(context, requests, "cpu", steps=steps)
    draw, ids = Random(0), np.arange((1 + DRAFTS) * requests)
    kept = np.array([[draw.randint(1, 1 + DRAFTS) for _ in made] for _ in range(steps)])

    def run() -> None:
        for accepted in kept:
            plan = manager.prepare_forward([(request, 1 + DRAFTS) for request in made])
            plan.mark_appended()
            manager.commit(plan, accepted, ids=ids)

    return calls_of(run)


def test_a_step_makes_the_same_calls_at_8k_and_at_1m_tokens():
    short, long = calls_of_decode_steps(8192), calls_of_decode_steps(1_048_576)
    assert short["KVCacheManager.prepare_forward"] == STEPS
    assert short == long


def test_a_step_with_drafts_and_ids_makes_the_same_calls_at_2k_and_at_1m_tokens():
    short, long = (calls_of_draft_steps(context, REQUESTS, 60) for context in (2048, 1_048_576))
    assert short["PrefixIndex.add"] > REQUESTS // 2, "some blocks are completed"
    assert short == long


def test_no_call_is_made_per_request_unless_it_completes_a_block():
    """3 or 60 requests in the first half of their block: the same calls, those for ids included."""
    few, many = (calls_of_draft_steps(2048, requests, 10) for requests in (3, 60))
    assert few["RecentIds.learn"] == 10
    assert "PrefixIndex.add" not in few
    assert few == many

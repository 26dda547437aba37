"""What a step costs the host does not depend on how long its requests are."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType

from benchmarks.host import decoding_requests

REQUESTS, STEPS = 16, 300


def calls_of_decode_steps(context: int) -> Counter[str]:
    """Every call of Python or C that some steps make, by name, each request in another phase."""
    manager, requests = decoding_requests(context, REQUESTS, "cpu")
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, what: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(what, "__qualname__", repr(what))] += 1

    gc.disable()  # it calls finalisers, and Hypothesis's callback, whenever it likes
    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            manager.commit(manager.prepare_forward([(request, 1) for request in requests]))
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_a_step_makes_the_same_calls_at_8k_and_at_1m_tokens():
    short, long = calls_of_decode_steps(8192), calls_of_decode_steps(1_048_576)
    assert short["KVCacheManager.prepare_forward"] == STEPS
    assert short == long

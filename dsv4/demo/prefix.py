"""The prefix part of the demo: two prompts with the same beginning, which `generate` of an
accelerated model computes only once."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from dsv4.cache.prefix.resume import Resume
from dsv4.demo.events import PrefixResult
from dsv4.integrations.transformers import PagedCache, accelerate, restore


class PutTimes:
    """A streamer: generate passes it the prompt before running it, then each token it chooses."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def put(self, ids: Tensor) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """generate calls it; there is nothing to do."""

    @property
    def prompt_seconds(self) -> float:
        return self._times[1] - self._times[0]


def run_twice(
    model: Any, first: Tensor, second: Tensor, *, new_tokens: int, records: str
) -> tuple[PrefixResult, list[int]]:
    """What the second prompt saved, and the tokens it got. The model is unchanged afterwards."""
    longest = max(len(first), len(second)) + new_tokens
    resumes: list[Resume] = []
    times = [PutTimes(), PutTimes()]
    accelerate(model, max_batch=1, max_context=longest, records=records)
    try:
        for prompt, put in zip((first, second), times, strict=True):
            answer = model.generate(
                prompt[None],
                max_new_tokens=new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                streamer=put,
            )
            cache: PagedCache = answer.past_key_values
            resumes.append(cache.requests[0].resume)
    finally:
        restore(model)
    cache.reset()
    cache.manager.check_invariants()
    stats = cache.manager.stats().prefix
    assert stats is not None
    shared = (first[: len(second)] == second[: len(first)]).int().cumprod(0).sum()
    result = PrefixResult(
        shared_tokens=int(shared),
        first_prompt_tokens=len(first),
        first_run_tokens=len(first) - resumes[0].start,
        first_seconds=times[0].prompt_seconds,
        second_prompt_tokens=len(second),
        second_run_tokens=len(second) - resumes[1].start,
        second_seconds=times[1].prompt_seconds,
        reused_tokens=resumes[1].reused_tokens,
        source=resumes[1].source,
        snapshot_bytes=stats.snapshot_bytes,
    )
    return result, answer.sequences[0, len(second) :].tolist()

"""`with manager.step(…)`: committed at the end, failed after whatever went wrong in it."""

from __future__ import annotations

from typing import Any

import pytest

import dsv4
from dsv4.errors import InvalidInput, PlanError
from dsv4.testing import RandomModel
from tests.support.faults import Interrupts


def small(**options: Any) -> dsv4.KVCacheManager:
    return dsv4.Cache(
        "tiny",
        memory="16MiB",
        max_requests=4,
        max_context=1024,
        max_draft_tokens=3,
        max_step_tokens=256,
        prefix=dsv4.PrefixOptions(snapshots=4),
        **options,
    )


def test_the_end_of_the_block_commits_with_the_ids() -> None:
    cache = small()
    model, prompt = RandomModel(cache.schema), [n % 32 for n in range(200)]
    request = cache.admit_request(prompt)
    with cache.step([(request, 200)], ids=prompt) as plan:
        model.logits(prompt, cache, plan)
        assert cache.room.open_plans == [plan]
        assert request.length == 0
    assert (cache.room.open_plans, request.length) == ([], 200)
    answer = list(range(20)) * 3
    for at in range(0, 60, 4):
        with cache.step([(request, 4)], ids=answer[at : at + 4]) as plan:
            model.logits(answer[at : at + 4], cache, plan)
    cache.release_request(request)
    again = cache.admit_request([*prompt, *answer[:56], 1])  # what was generated is cached too
    assert again.resume.reused_tokens == 256


def test_a_commit_in_the_block_says_what_is_kept() -> None:
    cache = small()
    model, request = RandomModel(cache.schema), cache.admit_request(3)
    for kept, length in ((4, 4), (1, 5), (0, 5)):
        with cache.step([(request, 4)], ids=[9, 9, 9, 9]) as plan:
            model.logits([9, 9, 9, 9], cache, plan)
            cache.commit(plan, [kept], ids=[9, 9, 9, 9])
        assert request.length == length
    with cache.step([(request, 4)]) as plan:
        cache.abandon(plan)
    assert request.length == 5


def test_options_are_those_of_prepare_forward() -> None:
    cache = small()
    request = cache.admit_request(3)
    with cache.step([(request, 1)], pad_tokens=8, pad_requests=2) as plan:
        assert plan.batch.padded_tokens == 8
        cache.abandon(plan)
    with (
        pytest.raises(InvalidInput, match="chunks_apart"),
        cache.step([], chunks_apart=3),  # type: ignore[arg-type]
    ):
        raise AssertionError


class Broken(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Broken])
def test_after_an_exception_the_step_has_failed(error: type[BaseException]) -> None:
    cache = small()
    model, request = RandomModel(cache.schema), cache.admit_request(3)

    def broken_step() -> None:
        with cache.step([(request, 3)]) as plan:
            model.logits([1, 2, 3], cache, plan)
            raise error

    with pytest.raises(error):
        broken_step()
    assert (cache.room.open_plans, request.length) == ([], 0)
    assert not request.is_torn
    with cache.step([(request, 3)]) as plan:
        model.logits([1, 2, 3], cache, plan)
    assert request.length == 3


def test_a_step_that_a_layer_lacks_fails_at_the_end() -> None:
    cache = small()
    request = cache.admit_request(3)
    with pytest.raises(PlanError, match="layers"), cache.step([(request, 3)]):
        pass
    assert (cache.room.open_plans, request.length) == ([], 0)


def test_after_an_interrupt_anywhere_in_it_the_next_step_runs() -> None:
    """In calls of the manager too; only between these and the block may the plan stay open."""
    cache = small()
    model = RandomModel(cache.schema)

    def step(request: dsv4.Request, ids: list[int]) -> None:
        with cache.step([(request, len(ids))], ids=ids) as plan:
            model.logits(ids, cache, plan)

    at = interrupted = open_after = 0
    is_over = False
    while not is_over:
        request = cache.admit_request([1, 2, 3])
        try:
            with Interrupts(at).injected():
                step(request, [1, 2, 3])
            is_over = True
        except KeyboardInterrupt:
            interrupted += 1
        if cache._parts.guard.is_shut:
            cache.recover()
        if cache.room.open_plans:
            open_after += 1
            cache.fail(cache.room.open_plans[0])
        assert not request.is_torn
        if not request.length:
            step(request, [1, 2, 3])
        assert request.length == 3
        cache.check_invariants()
        cache.release_request(request)
        at += 17
    assert interrupted > 30
    assert open_after <= interrupted // 10

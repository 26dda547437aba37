"""A request goes on to the end of a longer prompt: the next turn of a conversation."""

from __future__ import annotations

import pytest

from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks
from tests.oracles.bookkeeping import nothing_changes
from tests.support.lives import Text, assert_cold, run_to, tiny_stack


@pytest.mark.parametrize(
    "length", [127, 200, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 256))]
)
def test_a_turn_runs_what_is_new_and_is_cached(length: int):
    """To the token, where a new admission would start at a block; its blocks have snapshots."""
    stack = tiny_stack(drafts=1, prefix=PrefixOptions(policy=full()), num_blocks=24)
    manager, text = stack.manager, Text.random(stack, 0, 700)
    request = manager.admit_request(text.ids[: max(1, length - 5)])
    run_to(stack, request, text, length)
    resume = manager.continue_request(request, text.ids[:600])
    assert resume == request.resume
    assert (resume.start, resume.end, resume.source) == (length, 600, "rings")
    assert len(request.block_ids) == 5
    run_to(stack, request, text, 600)
    assert_cold(stack, request, text.stream)
    manager.check_invariants()
    manager.release_request(request)
    assert manager.prefix.look_up(manager.prefix.prompt(text.ids[:600])).start == 512
    stats = manager.stats().prefix
    assert stats is not None
    assert (stats.hits["state"], stats.tokens_skipped) == (1, length)


def test_what_does_not_go_on_is_refused_and_nothing_has_changed():
    stack = tiny_stack(drafts=1, prefix=PrefixOptions(policy=full()), num_blocks=6)
    manager, text = stack.manager, Text.random(stack, 0, 900)
    other = text.then(Text.random(stack, 1, 900), 100)
    request = manager.admit_request(text.ids[:150])
    run_to(stack, request, text, 200)
    plain = manager.admit_request(100)
    before = manager.stats(), request.resume
    for prompt, error in (
        (other.ids[:300], InvalidInput),
        (text.ids[:200], InvalidInput),
        (text.ids[:150], InvalidInput),
        (manager.prefix.prompt(text.ids[:300], "other"), InvalidInput),
        (text.ids[:770], OutOfBlocks),
        (list(range(5000)), ContextOverflow),
    ):
        with pytest.raises(error):
            manager.continue_request(request, prompt)
        assert (manager.stats(), request.resume) == before
    with pytest.raises(InvalidInput, match="must be given as ids"):
        manager.continue_request(plain, text.ids[:300])
    manager.check_invariants()
    run_to(stack, request, text, 250)
    assert_cold(stack, request, text.stream)


def test_what_is_to_be_replayed_is_a_part_of_the_prompt():
    """Entries below `reused_tokens` exist and are not written again: they are of the old tokens."""
    stack = tiny_stack(prefix=PrefixOptions(policy=zero()), num_blocks=12)
    manager, text = stack.manager, Text.random(stack, 0, 400)
    run_to(stack, manager.admit_request(text.ids[:200]), text, 200)
    for length in (0, 30):
        other = text.then(Text.random(stack, 1, 400), length)
        request = manager.admit_request(text.ids[:200])
        assert (request.length, request.reused_tokens) == (0, 128)
        run_to(stack, request, text, length)
        for prompt in (other.ids[:300], text.ids[:128]):
            with nothing_changes(manager), pytest.raises(InvalidInput, match="from the 128 of"):
                manager.continue_request(request, prompt)
        manager.continue_request(request, text.ids[:300])
        run_to(stack, request, text, 300)
        assert_cold(stack, request, text.stream)
        manager.release_request(request)


def test_tokens_must_be_known():
    stack = tiny_stack(drafts=1, prefix=PrefixOptions(policy=full()), num_blocks=12)
    manager, text = stack.manager, Text.random(stack, 0, 400)
    request = manager.admit_request(text.ids[:100])
    run_to(stack, request, text, 100)
    plan = manager.prepare_forward([(request, 2)])
    stack.write(plan, [text.stream])
    manager.commit(plan)
    with pytest.raises(InvalidInput, match="supply"):
        manager.continue_request(request, text.ids[:300])
    manager.supply_ids(request, text.ids[100:102])
    manager.continue_request(request, text.ids[:300])
    run_to(stack, request, text, 300)
    assert_cold(stack, request, text.stream)


def test_without_a_prefix_cache_it_is_refused():
    stack = tiny_stack(drafts=1)
    request = stack.manager.admit_request(5)
    with pytest.raises(InvalidInput, match="no prefix cache"):
        stack.manager.continue_request(request, [1, 2, 3])

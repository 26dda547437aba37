"""Hints at admission, through a manager: what is evicted first, that nothing else changes, and that
they go wherever the request goes."""

from __future__ import annotations

from operator import attrgetter

import pytest

from dsv4 import Hints, PrefixOptions, full
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.requests import Request
from dsv4.errors import InvalidInput
from tests.support.lives import Text, run_to, tiny_stack
from tests.support.stack import Stack

OPTIONS = PrefixOptions(policy=full(), snapshots=4)


def stack_of(num_blocks: int) -> Stack:
    return tiny_stack(prefix=OPTIONS, num_blocks=num_blocks, max_requests=2)


def run(stack: Stack, text: Text, tokens: int, hints: Hints | None = None) -> None:
    request = stack.manager.admit_request(text.ids[:tokens], hints=hints)
    run_to(stack, request, text, tokens)
    stack.manager.release_request(request)
    stack.manager.check_invariants()


def cached(stack: Stack, text: Text, tokens: int) -> int:
    prompt = stack.manager.prefix.prompt(text.ids[:tokens])
    return stack.manager.prefix.look_up(prompt).reused_tokens // stack.schema.block_tokens


def nodes(stack: Stack) -> list[PrefixNode]:
    assert stack.manager._parts.prefix
    return list(stack.manager._parts.prefix.index.nodes())


def test_a_lower_priority_goes_first() -> None:
    stack = stack_of(6)
    cheap, dear, new = (Text.random(stack, nth, 300) for nth in range(3))
    run(stack, dear, 257, Hints(priority=2))
    run(stack, cheap, 257, Hints(priority=-2))
    run(stack, new, 257)
    assert (cached(stack, dear, 257), cached(stack, cheap, 257)) == (2, 1)


def test_a_time_to_stay_is_a_floor_and_no_promise() -> None:
    stack = stack_of(6)
    kept, plain, new, large = (Text.random(stack, nth, 700) for nth in range(4))
    run(stack, kept, 257, Hints(ttl_s=3600.0))
    run(stack, plain, 257, Hints(priority=8))
    run(stack, new, 257)
    assert (cached(stack, kept, 257), cached(stack, plain, 257)) == (2, 1)
    run(stack, large, 641)  # needs what has a time to stay too
    assert cached(stack, kept, 257) < 2


def test_what_a_newer_state_of_a_session_leaves_behind_goes_first() -> None:
    stack = stack_of(8)
    old, rest, other = (Text.random(stack, nth, 600) for nth in range(3))
    run(stack, other, 257)
    run(stack, old, 385, Hints(session="s", priority=8, ttl_s=3600.0))
    newer = old.then(rest, 200)  # a tool call was rendered anew
    run(stack, newer, 385, Hints(session="s"))
    assert (cached(stack, old, 385), cached(stack, newer, 385)) == (3, 3)
    assert stack.manager.prefix.evict(2) == 2
    assert (cached(stack, old, 385), cached(stack, newer, 385)) == (1, 3)
    assert cached(stack, other, 257) == 2


def test_another_session_or_salt_supersedes_nothing() -> None:
    stack = stack_of(16)
    old, rest = Text.random(stack, 0, 600), Text.random(stack, 1, 600)
    run(stack, old, 385, Hints(session="s"))
    newer = old.then(rest, 200)
    run(stack, newer, 385, Hints(session="t"))
    request = stack.manager.admit_request(newer.ids[:385], "salt", hints=Hints(session="s"))
    run_to(stack, request, newer, 385)
    stack.manager.release_request(request)
    stack.manager.prefix.evict(0)
    assert not any(node.is_superseded for node in nodes(stack))


def test_a_final_request_of_a_session_goes_first() -> None:
    stack = stack_of(6)
    last, plain, new = (Text.random(stack, nth, 300) for nth in range(3))
    run(stack, plain, 257)
    run(stack, last, 257, Hints(session="s", final=True, ttl_s=3600.0))
    run(stack, new, 257)
    assert (cached(stack, plain, 257), cached(stack, last, 257)) == (2, 1)


def hints_of(request: Request) -> Hints | None:
    assert request.trail is not None
    return request.trail.hints


def test_hints_go_where_the_request_goes() -> None:
    stack = stack_of(16)
    text, hints = Text.random(stack, 0, 600), Hints(priority=3)
    manager = stack.manager
    prompt = manager.prefix.prompt(text.ids[:257], hints=hints)
    request = manager.admit_request(prompt)
    run_to(stack, request, text, 257)
    (fork,) = manager.fork(request, 1)
    assert hints_of(request) == hints_of(fork) == hints
    manager.release_request(fork)
    manager.continue_request(request, text.ids[:400])
    run_to(stack, request, text, 400)
    assert {node.hints for node in nodes(stack)} == {hints}
    manager.release_request(request)
    again = manager.admit_request(prompt, hints=Hints(priority=1))  # nearer ones win
    assert hints_of(again) == Hints(priority=1)
    assert hints_of(manager.admit_request(prompt)) == hints


@pytest.mark.parametrize("call", ["admit_request", "prefix.prompt"])
@pytest.mark.parametrize("prefix", [OPTIONS, None])
def test_what_is_no_hints_is_refused_and_nothing_has_changed(
    call: str, prefix: PrefixOptions | None
) -> None:
    stack = tiny_stack(prefix=prefix, num_blocks=4)
    before = stack.manager.stats()
    with pytest.raises(InvalidInput, match="hints is dict"):
        attrgetter(call)(stack.manager)([1, 2, 3], hints={"priority": 1})
    assert stack.manager.stats() == before


def test_a_session_that_nothing_can_write_down_is_refused() -> None:
    with pytest.raises(InvalidInput, match="of UTF-8"):
        Hints(session="\ud800")


def test_without_ids_or_a_prefix_cache_hints_change_nothing() -> None:
    stack = tiny_stack(prefix=None, num_blocks=4)
    stack.manager.release_request(stack.manager.admit_request([1, 2], hints=Hints(priority=1)))
    other = stack_of(4)
    other.manager.release_request(other.manager.admit_request(130, hints=Hints(priority=1)))
    assert nodes(other) == []

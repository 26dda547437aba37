"""Why a prompt was not found, compared with a list of all prompts that ever ran."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsv4 import Explainer, Explanation, Hints, InvalidInput, KVCacheManager, PrefixOptions, full
from dsv4.cache.prefix.hints import MOST_PRIORITY
from dsv4.errors import ThreadError
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from tests.events.lives import BLOCK, SCHEMA, Asked, Lives, make

TIMEOUT_S = 60.0


def blocks(*firsts: int) -> list[int]:
    """Whole blocks: of each the first id, and what follows is the same in all."""
    return [id_ for first in firsts for id_ in (first, *range(1000, 1000 + BLOCK - 1))]


def explained(num_blocks: int = 24, **more: Any) -> tuple[KVCacheManager, Explainer, Lives]:
    memory = more.pop("memory", 16_384)
    manager = make(num_blocks, **more)
    return manager, Explainer(manager, blocks=memory), Lives(manager, 1)


@contextmanager
def closing(tier: DiskTier) -> Iterator[DiskTier]:
    try:
        yield tier
    finally:
        tier.close(TIMEOUT_S)


# ---- each reason ---------------------------------------------------------------------------------


def test_a_prompt_that_is_not_longer_than_a_block_is_too_short() -> None:
    _, explainer, lives = explained()
    lives.run((blocks(1), None))
    for ids in ([], [1], blocks(1)):
        found = explainer.explain(ids)
        assert (found.kind, found.found_tokens, found.tokens) == ("too_short", 0, len(ids))


def test_a_prompt_that_never_came_was_never_seen() -> None:
    _, explainer, lives = explained()
    lives.run((blocks(1, 2), None))
    found = explainer.explain([*blocks(9, 2), 5])
    assert (found.kind, found.found_tokens, found.is_complete) == ("never_seen", 0, True)
    assert str(found).endswith("The block from token 0 on was never cached.")


def test_what_goes_on_after_all_that_is_cached_was_never_seen() -> None:
    _, explainer, lives = explained()
    lives.run((blocks(1, 2), None))
    found = explainer.explain(blocks(1, 2, 3, 4))
    assert (found.kind, found.found_tokens) == ("never_seen", 2 * BLOCK)


def test_nothing_is_missing_where_every_whole_block_is_found() -> None:
    _, explainer, lives = explained(prefix=PrefixOptions(policy=full(), model_id="tiny 1"))
    lives.run((blocks(1, 2), None))
    found = explainer.explain([*blocks(1, 2), 7])
    assert (found.kind, found.found_tokens) == (None, 2 * BLOCK)
    assert "No whole block is missing" in str(found)


def test_the_tokens_of_a_replay_are_counted() -> None:
    manager, explainer, lives = explained()  # without snapshots
    lives.run((blocks(1, 2), None))
    found = explainer.explain([*blocks(1, 2), 7])
    resume = manager.prefix.look_up(manager.prefix.prompt([*blocks(1, 2), 7]))
    assert found.replayed_tokens == len(resume.replay) == 2 * BLOCK
    assert "run again" in str(found)


@pytest.mark.parametrize("at", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1])
def test_the_token_that_differs_is_named_with_both_ids(at: int) -> None:
    _, explainer, lives = explained()
    lives.run((blocks(1, 2, 3), None))
    ids = [*blocks(1, 2, 3), 8]
    ids[at] = 31_999
    found = explainer.explain(ids)
    assert (found.kind, found.found_tokens) == ("differs", at // BLOCK * BLOCK)
    assert found.difference is not None
    difference = found.difference
    assert (difference.at, difference.is_cached) == (at, True)
    nth = at - difference.first
    assert difference.given[nth] == 31_999
    assert difference.cached[nth] == blocks(1, 2, 3)[at]
    last = difference.first + len(difference.given)
    assert difference.given == tuple(ids[difference.first : last])
    assert difference.cached == tuple(blocks(1, 2, 3)[difference.first : last])
    assert f"at token {at}: 31999 in place of" in str(found)


def test_the_prompt_that_it_follows_for_longest_is_named() -> None:
    _, explainer, lives = explained()
    for at in (10, 60, 30):
        ids = blocks(1)
        ids[at] = 7
        lives.run((ids, None))
    found = explainer.explain([*blocks(1), 1])
    assert found.difference is not None
    assert (found.difference.at, found.difference.cached[60 - found.difference.first]) == (60, 7)


def test_what_was_evicted_says_when_for_whom_and_why() -> None:
    manager, explainer, lives = explained(num_blocks=6)
    lives.run((blocks(1, 2), "a"), hints=Hints(session="first"))
    lives.run((blocks(11, 12, 13, 14, 15), "a"), hints=Hints(session="second"))
    found = explainer.explain(blocks(1, 2, 3), "a")
    assert (found.kind, found.found_tokens) == ("evicted", BLOCK)
    assert found.leaving is not None
    assert found.leaving.whom == "session 'second'"
    assert found.leaving.rule == "worth_least"
    assert 0 <= found.leaving.seconds_ago < 600
    assert manager.prefix.evict() > 0
    again = explainer.explain(blocks(1, 2, 3), "a")
    assert again.leaving is not None
    assert (again.leaving.rule, again.leaving.whom) == ("asked", "the caller")
    lives.run((blocks(1, 2), "a"))
    assert explainer.explain([*blocks(1, 2), 1], "a").kind is None


@pytest.mark.parametrize(
    ("hints", "rule"),
    [
        (Hints(session="s", final=True), "final"),
        (Hints(ttl_s=3600), "ttl"),
        (Hints(priority=-MOST_PRIORITY), "priority"),
        (Hints(priority=1), "worth_least"),
    ],
)
def test_the_rule_is_that_of_the_policy(hints: Hints, rule: str) -> None:
    _, explainer, lives = explained(num_blocks=4)
    lives.run((blocks(1, 2), None), hints=hints)
    lives.run((blocks(11, 12, 13, 14), None))
    found = explainer.explain(blocks(1, 2, 3))
    assert found.leaving is not None
    assert (found.kind, found.leaving.rule) == ("evicted", rule)
    assert found.leaving.whom == "a request of the same salt"


def test_a_superseded_branch_says_so() -> None:
    _, explainer, lives = explained(num_blocks=6)
    lives.run((blocks(1, 2), None), hints=Hints(session="s"))
    lives.run((blocks(1, 3), None), hints=Hints(session="s"))
    lives.run((blocks(11, 12, 13, 14), None))
    found = explainer.explain(blocks(1, 2, 3))
    assert found.leaving is not None
    assert found.leaving.rule == "superseded"


def test_a_request_without_ids_evicts_without_a_name() -> None:
    manager, explainer, lives = explained(num_blocks=4)
    lives.run((blocks(1, 2), None))
    manager.admit_request(4 * BLOCK)
    found = explainer.explain(blocks(1, 2, 3))
    assert found.leaving is not None
    assert found.leaving.whom == "a request without token ids"


def test_a_record_that_was_refused_says_which_tier(tmp_path: Path) -> None:
    """In a process that had never seen the prompt before."""
    with closing(DiskTier(tmp_path / "store", 1 << 30)) as tier:
        lives = Lives(make(tiers=[tier]), 1)
        lives.run((blocks(1, 2), None))
        assert lives.manager.tiers.drain(TIMEOUT_S)
    for file in (tmp_path / "store").rglob("*"):
        if file.is_file() and file.stat().st_size > 300 and "index" not in file.name:
            damaged = bytearray(file.read_bytes())
            damaged[300] ^= 1
            file.write_bytes(damaged)
    with closing(DiskTier(tmp_path / "store", 1 << 30)) as tier:
        manager, explainer, lives = explained(tiers=[tier])
        request = manager.tiers.admit(blocks(1, 2, 3), timeout_s=TIMEOUT_S)
        manager.release_request(request)
        found = explainer.explain(blocks(1, 2, 3))
        assert (found.kind, found.found_tokens) == ("refused", 0)
        assert found.leaving is not None
        assert found.leaving.tier == tier.name
        lives.run((blocks(1, 2), None))
        assert explainer.explain([*blocks(1, 2), 1]).kind is None
        manager.tiers.close(TIMEOUT_S)


def test_what_a_tier_still_has_is_said_of_the_evicted() -> None:
    manager, explainer, lives = explained(num_blocks=6, tiers=[HostTier(1 << 26)])
    lives.run((blocks(1, 2), None))
    assert manager.tiers.drain(TIMEOUT_S)
    manager.prefix.evict()
    found = explainer.explain(blocks(1, 2, 3))
    assert found.leaving is not None
    assert found.leaving.in_tier
    assert "A tier had it then" in str(found)
    fetch = manager.tiers.fetch(blocks(1, 2, 3))
    while not fetch.poll():
        time.sleep(0.001)
    assert explainer.explain([*blocks(1, 2), 1]).kind is None
    manager.tiers.close(TIMEOUT_S)


def test_prompts_of_other_managers_are_of_another_model() -> None:
    manager, explainer, _ = explained()
    for prefix in (
        None,
        PrefixOptions(model_id="tiny 2"),
        PrefixOptions(model_id="tiny 1", key=bytes(16)),
    ):
        other = make(prefix=prefix).prefix.prompt(blocks(1, 2))
        found = explainer.explain(other)
        assert (found.kind, found.found_tokens) == ("other_model", 0)
    assert explainer.explain(manager.prefix.prompt(blocks(1, 2))).kind == "never_seen"


# ---- salts ---------------------------------------------------------------------------------------


def test_that_another_salt_has_it_is_said_only_where_salts_are_asked_for() -> None:
    _, explainer, lives = explained()
    lives.run((blocks(1, 2, 3), "secret"))
    ids = [*blocks(1, 2, 3), 1]
    for salt in (None, "", "mine"):
        found = explainer.explain(ids, salt)
        assert (found.kind, found.difference, found.leaving) == ("never_seen", None, None)
        assert explainer.explain(ids, salt, salts=True).kind == "other_salt"
        other = explainer.explain([9, *ids], salt, salts=True)
        assert other.kind == "never_seen"
    lives.run((blocks(1), "mine"))
    assert explainer.explain(ids, "mine", salts=True).kind == "other_salt"
    assert explainer.explain(ids, "mine").kind == "never_seen"


def test_a_salt_learns_no_name_of_another() -> None:
    _, explainer, lives = explained(num_blocks=6)
    lives.run((blocks(1, 2), "a"), hints=Hints(session="mine"))
    lives.run((blocks(11, 12, 13, 14, 15), "b"), hints=Hints(session="hidden"))
    found = explainer.explain(blocks(1, 2, 3), "a")
    assert found.leaving is not None
    assert found.leaving.whom == "another salt"
    assert "hidden" not in str(found)
    assert "hidden" not in str(found.to_dict())


def longest_common(one: list[int], other: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def expected(asked: Asked, found_blocks: int, ran: list[Asked]) -> tuple[str | None, int | None]:
    """Why the next block is missing, and the first token that differs, from all that ran."""
    ids, salt = asked
    if (found_blocks + 1) * BLOCK >= len(ids):
        return (None if found_blocks else "too_short"), None
    end = (found_blocks + 1) * BLOCK
    whole = [other for other, of in ran if of == salt and len(other) >= end]
    common = max((longest_common(ids, other) for other in whole), default=0)
    if common >= end:
        return "evicted", None
    if common >= max(1, found_blocks * BLOCK):
        return "differs", common
    return "never_seen", None


@pytest.mark.parametrize("seed", range(2))
def test_it_agrees_with_a_list_of_all_prompts(seed: int) -> None:
    """Evictions and shared beginnings, three salts. Every answer follows from what ran before."""
    manager, explainer, _ = explained()
    lives, draw = Lives(manager, seed), random.Random(seed)
    kinds: dict[str | None, int] = {}
    for _ in range(100):
        for asked in lives.questions(4):
            found = explainer.explain(*asked)
            kind, at = expected(asked, found.found_tokens // BLOCK, lives.asked)
            assert found.kind == kind
            assert (None if found.difference is None else found.difference.at) == at
            assert found.is_complete
            kinds[found.kind] = kinds.get(found.kind, 0) + 1
        lives.run(lives.prompt())
        if draw.random() < 0.1:
            manager.prefix.evict(draw.randrange(1, 6))
    assert min(kinds[kind] for kind in ("never_seen", "differs", "evicted", "too_short", None)) > 5


# ---- memory, time, misuse ------------------------------------------------------------------------


def test_its_memory_is_bounded_and_answers_say_so() -> None:
    manager, explainer, lives = explained(memory=10)
    history = explainer._history
    for nth in range(50):
        lives.run((blocks(2 * nth, 2 * nth + 1), None))
        assert len(history) <= 10
        for names in (history._after, history._roots_of):
            assert sum(map(len, names.values())) <= 10
        assert all(names for names in history._after.values())
    found = explainer.explain([*blocks(0, 1), 1])
    assert (found.kind, found.is_complete) == ("never_seen", False)
    assert "as far as is remembered" in str(found)
    manager.check_invariants()


def test_a_difference_whose_tokens_are_forgotten_is_still_a_difference() -> None:
    _, explainer, lives = explained(memory=2)
    lives.run((blocks(1, 2), None))
    lives.run((blocks(11, 12), None))
    found = explainer.explain(blocks(1, 3, 4))
    assert (found.kind, found.difference, found.is_complete) == ("differs", None, False)
    assert "not remembered" in str(found)


def test_refusals_are_bounded_too() -> None:
    _, explainer, _ = explained(memory=4)
    for nth in range(100):
        explainer._history.refused(nth.to_bytes(32, "little"), "disk")
    assert len(explainer._history._refused) == 4


def test_a_step_that_completes_no_block_costs_nothing() -> None:
    manager, explainer, _ = explained()
    calls: list[str] = []
    history = explainer._history
    history.cached = lambda new, trail: calls.append("cached")  # type: ignore[method-assign]
    request = manager.admit_request(blocks(1)[:4])
    for nth in range(20):
        plan = manager.prepare_forward([(request, 1)])
        plan.mark_appended(set(SCHEMA.backbone_layers))
        manager.commit(plan, ids=[blocks(1)[nth]] if nth < 4 else [7])
    assert calls == []


def test_bad_values_are_typed_errors() -> None:
    manager, explainer, lives = explained()
    lives.run((blocks(1, 2), None))
    before = (len(explainer._history), manager.stats())
    for bad in ("text", [1.5], [-1], [[1]], None, 7, [2**40], [True]):
        with pytest.raises(InvalidInput):
            explainer.explain(bad)  # type: ignore[arg-type]
    for bad in (1, b"salt", ["a"]):
        with pytest.raises(InvalidInput):
            explainer.explain(blocks(1, 2), bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="salt already"):
        explainer.explain(manager.prefix.prompt(blocks(1, 2)), "a")
    with pytest.raises(InvalidInput, match="salts"):
        explainer.explain(blocks(1, 2), salts=1)  # type: ignore[arg-type]
    for bad in (0, -1, 1.5, None, True):
        with pytest.raises(InvalidInput, match="blocks"):
            Explainer(manager, blocks=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="prefix"):
        Explainer(make(prefix=None))
    assert (len(explainer._history), manager.stats()) == before
    assert len(manager._parts.prefix.notices.observers) == 1


def test_it_waits_for_no_other_call() -> None:
    manager, explainer, _ = explained()
    manager._parts.guard.enter("commit")
    with pytest.raises(ThreadError, match="look_up"):
        explainer.explain(blocks(1, 2))
    manager._parts.guard.leave()
    assert explainer.explain(blocks(1, 2)).kind == "never_seen"


def test_an_interrupt_leaves_it_right() -> None:
    manager, explainer, lives = explained()
    lives.run((blocks(1, 2), None))
    node = manager._parts.prefix.index.newest(1)[0]
    manager._parts.prefix.notices.recovered(
        [each for each in manager._parts.prefix.index.nodes() if each is not node]
    )
    found = explainer._history.why(manager.prefix.prompt(blocks(1, 2, 3)).trail, 1, salts=False)  # type: ignore[arg-type]
    assert found[0] == "evicted"
    assert found[2] is not None
    assert found[2].rule == "interrupt"


def test_it_can_be_closed_and_comes_late() -> None:
    manager, explainer, lives = explained()
    lives.run((blocks(1, 2), None))
    late = Explainer(manager)
    assert not late.explain(blocks(7, 8, 9)).is_complete
    assert late.explain(blocks(1, 3, 4)).kind == "differs"
    explainer.close()
    explainer.close()
    lives.run((blocks(5, 6), None))
    assert repr(explainer) == "Explainer(0 blocks are remembered)"
    assert explainer.explain(blocks(5, 7, 8)).kind == "differs"
    assert isinstance(explainer.explain(blocks(5, 7, 8)), Explanation)

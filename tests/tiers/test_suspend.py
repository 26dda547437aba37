"""A live request leaves the device and comes back: every byte that it can read is what it was."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4.cache.pages import PageForm
from dsv4.cache.prefix.options import zero
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.cache.state import StateLayout
from dsv4.errors import InvalidInput, RequestError
from dsv4.model import ModelSpec
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Kind
from tests.support.lives import TINY, Text, drafted, run_to
from tests.support.stack import HCA_STATES, PAGE_FORMS, readable_bytes
from tests.support.tiered import (
    BLOCK,
    SCHEMA,
    TIMEOUT_S,
    Places,
    assert_like_cold,
    disk,
    empty,
    options,
    stack_with,
)
from tests.support.tiers import python

LENGTHS = (1, 127, 129, 300, 512)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("state", HCA_STATES)
def test_a_request_comes_back_as_it_was(length: int, state: HcaState):
    tier = HostTier(8 << 20)
    stack = stack_with([tier], drafts=2, state=state)
    text = Text.random(stack, length, 900)
    request = stack.manager.admit_request(text.ids[: max(1, length - 70)])
    run_to(stack, request, text, length, chunk=64)
    before = readable_bytes(stack, request)
    suspended = stack.manager.tiers.suspend(request)
    assert request.released
    assert stack.manager.stats().slots_free == stack.manager.memory.max_requests
    assert stack.manager.tiers.drain(TIMEOUT_S)
    assert suspended.stored is True
    empty(stack)
    again = stack.manager.tiers.resume(text.ids[:length], timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.length, len(again.resume.run)) == ("state", length, 0)
    after = readable_bytes(stack, again)
    assert before.keys() == after.keys()
    for name, rows in before.items():
        assert rows.equal(after[name]), name
    run_to(stack, again, text, length + 200, chunk=50)
    assert_like_cold(stack, again, text)
    stack.manager.check_invariants()
    stack.manager.release_request(again)
    stack.manager.prefix.evict()
    assert stack.manager.stats().blocks_free == stack.manager.stats().blocks_total


@pytest.mark.parametrize(("before", "after"), [(0, 3), (5, 0), (3, 3)])
@pytest.mark.parametrize("length", [200, 385])
def test_it_comes_back_in_another_manager_with_other_drafts(
    tmp_path: Path, before: int, after: int, length: int
):
    first = disk(tmp_path)
    stack = stack_with([first], drafts=before)
    text = Text.random(stack, 5, 900)
    request = stack.manager.admit_request(text.ids[:100])
    run_to(stack, request, text, length, chunk=40)
    stack.manager.tiers.suspend(request)
    assert stack.manager.tiers.drain(TIMEOUT_S)
    first.close(TIMEOUT_S)
    second = disk(tmp_path)
    other = stack_with([second], drafts=after)
    again = other.manager.tiers.resume(text.ids[:length], timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.length) == ("state", length)
    assert_like_cold(other, again, text)
    run_to(other, again, text, length + 150, chunk=1 + after)
    assert_like_cold(other, again, text)
    assert other.manager.stats().tiers[0].loaded_bytes > 0
    second.close(TIMEOUT_S)


@pytest.mark.parametrize("form", PAGE_FORMS)
@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (3, 2)])
def test_a_request_of_v41_comes_back_with_other_drafts(before: int, after: int, form: PageForm):
    """Its tails leave out the last token of each group."""
    model, tier = ModelSpec.preset("v41-tiny"), HostTier(8 << 20)
    stack = stack_with([tier], drafts=before, model=model, form=form)
    other = stack_with([tier], drafts=after, model=model, form=form)
    for length in (129, 130):
        text = Text.random(stack, length, 200)
        request = stack.manager.admit_request(text.ids[:100])
        run_to(stack, request, text, length, chunk=15)
        draft = drafted(stack, request)
        stack.manager.tiers.suspend(request)
        assert stack.manager.tiers.drain(TIMEOUT_S)
        again = other.manager.tiers.resume(text.ids[:length], timeout_s=TIMEOUT_S)
        assert again.resume.source == "state"
        # a draft reads a whole window, one row more than a step does
        assert torch.equal(drafted(other, again), draft)
        run_to(other, again, text, length + 3, chunk=1)
        assert_like_cold(other, again, text)


@pytest.mark.parametrize("length", [60, 300])
def test_a_longer_prompt_goes_on_from_where_a_request_was_suspended(length: int):
    """A conversation: what was said is not run again, not one token of it."""
    stack = stack_with([HostTier(8 << 20)])
    text = Text.random(stack, 6, 900)
    request = stack.manager.admit_request(text.ids[:50])
    run_to(stack, request, text, length)
    stack.manager.tiers.suspend(request)
    assert stack.manager.tiers.drain(TIMEOUT_S)
    empty(stack)
    again = stack.manager.tiers.admit(text.ids[:500], timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.resume.run) == ("state", range(length, 500))
    run_to(stack, again, text, 500)
    assert_like_cold(stack, again, text)
    prefix = stack.manager.stats().prefix
    assert prefix
    assert (prefix.hits["state"], prefix.tokens_skipped) == (1, length)
    stack.manager.check_invariants()


def test_rejected_drafts_do_not_come_back(tmp_path: Path):
    places = Places("host and disk", tmp_path)
    stack = stack_with(places.tiers, drafts=3)
    text, wrong = Text.random(stack, 6, 600), Text.random(stack, 7, 600)
    request = stack.manager.admit_request(text.ids[:200])
    run_to(stack, request, text, 250)
    mixed = text.then(wrong, 252)
    stack.step([(request, mixed.stream, 4)], accepted=[2], ids=mixed.ids[250:254].tolist())
    stack.manager.tiers.suspend(request)
    assert stack.manager.tiers.drain(TIMEOUT_S)
    empty(stack)
    again = stack.manager.tiers.resume(text.ids[:252], timeout_s=TIMEOUT_S)
    assert again.resume.source == "state"
    run_to(stack, again, text, 400, chunk=4)
    assert_like_cold(stack, again, text)
    places.close()


def test_without_its_state_a_request_runs_what_is_missing(tmp_path: Path):
    places = Places("disk", tmp_path)
    stack = stack_with(places.tiers)
    text = Text.random(stack, 8, 600)
    request = stack.manager.admit_request(text.ids[:300])
    run_to(stack, request, text, 300)
    stack.manager.tiers.suspend(request)
    assert stack.manager.tiers.drain(TIMEOUT_S)
    empty(stack)
    tiers = stack.manager.tiers
    assert tiers
    trail = stack.manager.prefix.prompt(text.ids[:300]).trail
    assert trail is not None
    places.tiers[0].drop([tiers.labels.of_state(trail, 300).key])
    places.close()
    places = Places("disk", tmp_path)
    stack = stack_with(places.tiers)
    again = stack.manager.tiers.resume(text.ids[:300], timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.resume.start) == ("snapshot", 256)
    run_to(stack, again, text, 350)
    assert_like_cold(stack, again, text)
    places.close()


def test_a_tier_that_is_closed_keeps_nothing_and_says_so():
    tier = HostTier(8 << 20)
    stack = stack_with([tier])
    text = Text.random(stack, 9, 600)
    request = stack.manager.admit_request(text.ids[:300])
    run_to(stack, request, text, 300)
    tier.close(TIMEOUT_S)
    suspended = stack.manager.tiers.suspend(request)
    stack.manager.tiers.drain(TIMEOUT_S)
    assert suspended.stored is False
    again = stack.manager.tiers.resume(text.ids[:300], timeout_s=TIMEOUT_S)
    assert again.resume.start == 256  # its blocks are cached as ever
    run_to(stack, again, text, 350)
    assert_like_cold(stack, again, text)


def test_a_tier_that_is_closed_already_is_refused():
    tier = HostTier(8 << 20)
    tier.close(TIMEOUT_S)
    with pytest.raises(InvalidInput, match="is closed, and would keep nothing"):
        stack_with([tier])


def test_after_the_tiers_of_a_manager_are_closed_a_request_stays_where_it_is():
    tier = HostTier(8 << 20)
    stack = stack_with([tier])
    text = Text.random(stack, 9, 600)
    request = stack.manager.admit_request(text.ids[:300])
    run_to(stack, request, text, 300)
    stack.manager.tiers.close(TIMEOUT_S)
    with pytest.raises(RequestError, match=r"closed.*suspend it before"):
        stack.manager.tiers.suspend(request)
    run_to(stack, request, text, 350)
    assert_like_cold(stack, request, text)
    stack.manager.room.release_later(request, suspend=True)  # only released then
    assert stack.manager.requests == ()
    stack.manager.check_invariants()
    tier.close(TIMEOUT_S)


def test_what_can_not_be_suspended_says_why():
    stack = stack_with([HostTier(8 << 20)])
    text = Text.random(stack, 1, 600)
    counted = stack.manager.admit_request(300)
    with pytest.raises(InvalidInput, match="token ids"):
        stack.manager.tiers.suspend(counted)
    known = stack.manager.admit_request(text.ids[:100])
    run_to(stack, known, text.stream, 150)
    with pytest.raises(InvalidInput, match="100 of the 150 token ids"):
        stack.manager.tiers.suspend(known)
    stack.manager.supply_ids(known, text.ids[100:150])
    stack.manager.tiers.suspend(known)
    with pytest.raises(RequestError, match="released"):
        stack.manager.tiers.suspend(known)


def test_a_replay_that_is_not_over_leaves_no_state():
    """Its rings are not those of its tokens yet: nobody may find them."""
    tier = HostTier(8 << 20)
    stack = stack_with([tier], prefix=options(zero()), num_blocks=16)
    text = Text.random(stack, 2, 1700)
    request = stack.manager.admit_request(text.ids[:1500])
    run_to(stack, request, text, 1500)
    stack.manager.release_request(request)
    again = stack.manager.admit_request(text.ids[:1500])
    assert again.resume.source == "replay"
    run_to(stack, again, text, again.resume.start + 100)
    suspended = stack.manager.tiers.suspend(again)
    assert suspended.stored is False
    assert stack.manager.tiers.drain(TIMEOUT_S)
    assert not any(key.kind is Kind.STATE for key in tier._rows)
    back = stack.manager.tiers.resume(text.ids[:1500], timeout_s=TIMEOUT_S)
    run_to(stack, back, text, 1600)
    assert_like_cold(stack, back, text)


def test_a_state_says_nothing_of_who_had_the_memory_before():
    """Equal tokens, equal bytes: whatever lay in slot and block."""
    found = []
    for poison in (0x00, 0xFF):
        tier = HostTier(8 << 20)
        stack = stack_with([tier], drafts=1)
        stack.manager.memory.slot_arena.bytes.fill_(poison)
        stack.manager.memory.block_arena.bytes.fill_(poison)
        text = Text.random(stack, 3, 300)
        request = stack.manager.admit_request(text.ids[:70])
        run_to(stack, request, text, 70)
        stack.manager.tiers.suspend(request)
        assert stack.manager.tiers.drain(TIMEOUT_S)
        (key,) = (key for key in tier._rows if key.kind is Kind.STATE)
        entry = tier._rows.get(key)
        assert entry is not None
        found.append(b"".join(map(bytes, entry.value.parts.payload)))
    assert found[0] == found[1]
    assert any(found[0])


@pytest.mark.parametrize("length", [1, 130, 259])
def test_a_state_is_the_same_for_all_ring_sizes(length: int):
    sizes = []
    for drafts, rows in ((0, None), (7, None), (2, 300)):
        schema = CacheSchema.build(TINY, max_context=2048, max_draft_tokens=drafts, ring_rows=rows)
        layout = StateLayout(schema)
        sizes.append(layout.payload_bytes)
        payload = np.arange(layout.payload_bytes, dtype=np.uint64).astype(np.uint8)
        slot = np.zeros(schema.bytes.slot, dtype=np.uint8)
        layout.scatter(payload, length, slot)
        back = np.empty_like(payload)
        layout.gather(slot, layout.block_of(payload), length, back, written=length)
        again = np.zeros_like(slot)
        layout.scatter(back, length, again)
        assert np.array_equal(slot, again)
        ones = np.full_like(slot, 0xFF), np.full(schema.bytes.block, 0xFF, dtype=np.uint8)
        layout.gather(*ones, length, back, written=length)
        used = np.zeros_like(back)
        for start, end in layout.used_spans(length):
            used[start:end] = 0xFF
        assert np.array_equal(back, used)
    assert len(set(sizes)) == 1
    assert sizes[0] < 4 * SCHEMA.bytes.slot + SCHEMA.bytes.block


CHILD = """
import sys
from tests.support.lives import Text, run_to
from tests.support.tiered import disk, stack_with
from pathlib import Path
tier = disk(Path(sys.argv[1]))
stack = stack_with([tier], drafts=int(sys.argv[2]))
text = Text.random(stack, 4, 900)
request = stack.manager.admit_request(text.ids[:350])
run_to(stack, request, text, 390)
suspended = stack.manager.tiers.suspend(request)
assert stack.manager.tiers.drain(60.0)
assert suspended.stored
print("stored", flush=True)
sys.stdin.read()
"""


def test_it_comes_back_after_its_process_was_killed(tmp_path: Path):
    with python(CHILD, tmp_path, 3, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "stored"
        child.kill()
        child.wait()
    tier = disk(tmp_path)
    stack = stack_with([tier], drafts=0)
    text = Text.random(stack, 4, 900)
    again = stack.manager.tiers.resume(text.ids[:390], timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.length) == ("state", 390)
    run_to(stack, again, text, 600)
    assert_like_cold(stack, again, text)
    assert len(again.block_ids) == 600 // BLOCK + 1
    tier.close(TIMEOUT_S)

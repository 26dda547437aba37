"""A request goes from one manager to another over NIXL: every byte that it can read is what it was,
whatever the settings of both; and what cannot be taken changes nothing."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.cache.handoff.offer import Offer
from dsv4.cache.handoff.options import HandoffOptions
from dsv4.cache.pages import PageForm
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.options import PrefixOptions, zero
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.schema import HcaState
from dsv4.errors import (
    ContextOverflow,
    Dsv4Error,
    InvalidInput,
    OfferError,
    OutOfBlocks,
    OutOfSlots,
    RequestError,
)
from dsv4.metrics import prometheus_text
from dsv4.model import ModelSpec, v4_layers
from tests.support.faults import everything
from tests.support.handoff import (
    assert_equal,
    assert_nothing_left,
    close,
    grown,
    handing,
    side,
    tidy,
    until,
)
from tests.support.lives import TINY, Text, assert_cold, drafted, run_to, tiny_stack
from tests.support.stack import PAGE_FORMS, Stack
from tests.support.tiered import BLOCK, options

TOKENS = 900


@pytest.fixture(scope="module")
def owner() -> Iterator[Stack]:
    stack = side("prefill", drafts=3, max_requests=3)
    yield stack
    close(stack)


@pytest.fixture(scope="module")
def taker() -> Iterator[Stack]:
    stack = side("decode", drafts=1, num_blocks=17, max_requests=2)
    yield stack
    close(stack)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    names = [name for name in ("owner", "taker") if name in request.fixturenames]
    assert_nothing_left(*(request.getfixturevalue(name) for name in names))


def hand_over(owner: Stack, taker: Stack, text: Text, length: int) -> tuple[Any, Any]:
    """The request here and the one there, both live."""
    request = grown(owner, text, length)
    arrival = taker.manager.handoff.accept(owner.manager.handoff.offer(request))
    return request, arrival.wait()


# ---- every byte is what it was -------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 127, 128, 301])
def test_a_request_arrives_as_it_is(owner: Stack, taker: Stack, length: int):
    text = Text.random(owner, length, TOKENS)
    request, copy = hand_over(owner, taker, text, length)
    assert (copy.length, copy.resume.source, len(copy.resume.run)) == (length, "state", 0)
    assert_equal(owner, request, taker, copy)
    run_to(owner, request, text, length + 13, chunk=4)  # the owner goes on too
    run_to(taker, copy, text, length + 13, chunk=2)
    assert_equal(owner, request, taker, copy)
    assert_cold(taker, copy, text.stream)
    owner.manager.check_invariants()
    taker.manager.check_invariants()


def test_what_is_cached_there_is_not_read_and_what_arrives_is_cached(owner: Stack, taker: Stack):
    text = Text.random(owner, 20, TOKENS)
    other = text.then(Text.random(owner, 21, TOKENS), 300)
    request, copy = hand_over(owner, taker, text, 400)
    taker.manager.release_request(copy)
    found = taker.manager.prefix.look_up(taker.manager.prefix.prompt(text.ids[:400]))
    assert found.reused_tokens == 3 * BLOCK
    owner.manager.release_request(request)
    branch = grown(owner, other, 420)
    before = handing(taker).stats()
    arrival = taker.manager.handoff.accept(owner.manager.handoff.offer(branch))
    copy = arrival.wait()
    schema = taker.schema
    assert arrival.skipped_blocks == 2
    assert handing(taker).stats().blocks_skipped == before.blocks_skipped + 2
    assert (
        arrival.read_bytes
        < 2 * schema.bytes.block + handing(taker).side.labels.state.payload_bytes + 512
    )
    assert_cold(taker, copy, other.stream)


def test_equal_blocks_that_are_computed_meanwhile_are_one(owner: Stack, taker: Stack):
    text = Text.random(owner, 22, TOKENS)
    request = grown(owner, text, 300)
    arrival = taker.manager.handoff.accept(owner.manager.handoff.offer(request))
    own = taker.manager.admit_request(text.ids[:300])
    run_to(taker, own, text, 300)
    copy = arrival.wait()
    assert copy.block_ids[:2] == own.block_ids[:2]
    run_to(taker, copy, text, 320)
    assert_cold(taker, copy, text.stream)
    taker.manager.check_invariants()


def test_one_offer_is_for_many(owner: Stack, taker: Stack):
    text = Text.random(owner, 23, TOKENS)
    third = side("decode 2", num_blocks=5, prefix=None)
    request = grown(owner, text, 333)
    offer = owner.manager.handoff.offer(request, takers=3)
    owner.manager.release_request(request)
    arrivals = [stack.manager.handoff.accept(offer) for stack in (taker, third, taker)]
    copies = [arrival.wait() for arrival in arrivals]
    for stack, copy in zip((taker, third, taker), copies, strict=True):
        run_to(stack, copy, text, 340, chunk=3)
        assert_cold(stack, copy, text.stream)
    until(owner.manager, lambda: not handing(owner).leases.held)  # all three have it
    assert_nothing_left(third)
    close(third)


def test_a_request_moves_on_with_drafts_pending(owner: Stack, taker: Stack):
    """Drafts that were rejected lie past the length; the step that verifies others is open."""
    text, wrong = Text.random(owner, 24, TOKENS), Text.random(owner, 25, TOKENS)
    request = grown(owner, text, 250)
    mixed = text.then(wrong, 252)
    owner.step([(request, mixed.stream, 4)], accepted=[2], ids=mixed.ids[250:254].tolist())
    plan = owner.manager.prepare_forward([(request, 4)])
    owner.write(plan, [text.then(wrong, 253).stream])
    copy = taker.manager.handoff.accept(owner.manager.handoff.offer(request)).wait()
    assert copy.length == 252
    assert_cold(taker, copy, text.stream)
    owner.manager.commit(plan, [1], ids=text.ids[252:256].tolist())
    run_to(owner, request, text, 265, chunk=4)
    assert_cold(owner, request, text.stream)
    run_to(taker, copy, text, 258, chunk=2)
    assert_cold(taker, copy, text.stream)


def test_draft_layers_come_along(owner: Stack, taker: Stack):
    """Guesses of a plan that never runs are nowhere; those of the taker's own plan are as ever."""
    text = Text.random(owner, 26, TOKENS)
    request = grown(owner, text, 200)
    plan = owner.manager.prepare_forward([(request, 3)], drafts=2)
    drafting = [spec.layer for spec in owner.schema.model.layers if spec.draft]
    wrong = Text.random(owner, 27, TOKENS)
    for step in plan.drafts:
        owner.write(step, [wrong.stream], drafting)
    offer = owner.manager.handoff.offer(request)
    owner.manager.abandon(plan)
    owner.manager.release_request(request)
    copy = taker.manager.handoff.accept(offer).wait()
    assert_cold(taker, copy, text.stream)


def test_it_moves_from_hand_to_hand_and_back(owner: Stack, taker: Stack):
    text = Text.random(owner, 28, TOKENS)
    request = grown(owner, text, 140)
    for length in (180, 260, 300):
        copy = taker.manager.handoff.accept(owner.manager.handoff.offer(request)).wait()
        owner.manager.release_request(request)
        run_to(taker, copy, text, length - 5, chunk=40)
        request = owner.manager.handoff.accept(taker.manager.handoff.offer(copy)).wait()
        taker.manager.release_request(copy)
        run_to(owner, request, text, length, chunk=3)
        assert_cold(owner, request, text.stream)


@pytest.mark.parametrize(
    ("here", "there", "state"),
    [
        ({"drafts": 0}, {"drafts": 5}, "online"),
        ({"drafts": 4, "ahead": 1, "max_open_plans": 2}, {"drafts": 0}, "raw"),
        ({"prefix": None}, {}, "raw"),
        ({}, {"prefix": None}, "online"),
        ({"prefix": None}, {"prefix": None, "num_blocks": 3}, "raw"),
        ({"prefix": options(zero()), "num_blocks": 40}, {"max_requests": 1}, "raw"),
        ({"handoff": {"sums": False}}, {"handoff": {"states": 1}, "num_blocks": 4}, "raw"),
    ],
    ids=["drafts", "ahead", "no cache", "cache off", "none", "sizes", "sums"],
)
def test_settings_may_differ(here: dict[str, Any], there: dict[str, Any], state: HcaState):
    one, other = side("prefill", state=state, **here), side("decode", state=state, **there)
    text = Text.random(one, 1, TOKENS)
    request = grown(one, text, 301)
    copy = other.manager.handoff.accept(one.manager.handoff.offer(request)).wait()
    assert_equal(one, request, other, copy)
    run_to(other, copy, text, 304, chunk=1)
    assert_cold(other, copy, text.stream)
    known = copy.trail is not None
    assert known == bool(one.manager.prefix and other.manager.prefix)
    assert_nothing_left(one, other)
    close(one, other)


# ---- what cannot be taken ------------------------------------------------------------------------


def test_other_schemas_and_models_are_refused(owner: Stack, taker: Stack):
    request = grown(owner, Text.random(owner, 2, TOKENS), 200)
    offer = owner.manager.handoff.offer(request)
    online = side("decode", state="online")
    with pytest.raises(OfferError, match="hca_state=raw") as error:
        online.manager.handoff.accept(offer)
    assert error.value.reason == "schema"
    assert pickle.loads(pickle.dumps(error.value)).reason == "schema"
    other = side("decode", prefix=PrefixOptions(model_id="tiny 2"), handoff={"model_id": ""})
    with pytest.raises(OfferError, match="model_id") as error:
        other.manager.handoff.accept(offer)
    assert error.value.reason == "model"
    assert_nothing_left(online, other)
    close(online, other)
    assert taker.manager.handoff.accept(offer).wait().length == 200


def test_stages_of_a_pipeline_take_their_own_layers_alone():
    """Each has a manager of its layers. Stages with layers of the same kinds differ by model_id."""
    cuts = {"stage 0 of 3": (0, 4, 128), "stage 1 of 3": (4, 128), "stage 2 of 3": (4, 128)}

    def stage(name: str) -> Stack:
        layers = v4_layers(cuts[name], backbone=len(cuts[name]))
        model = replace(TINY, layers=layers)
        given = {"model_id": f"tiny, {name}"}
        return side(name, model=model, prefix=None, handoff=given)

    here, there = [stage(name) for name in cuts], [stage(name) for name in cuts]
    offers = []
    for one in here:
        request = one.manager.admit_request(200)
        run_to(one, request, one.stream(3, 220), 200)
        offers.append(one.manager.handoff.offer(request))
    for nth, offer in enumerate(offers):
        for other, taker in enumerate(there):
            if other != nth:
                with pytest.raises(OfferError) as error:
                    taker.manager.handoff.accept(offer)
                assert error.value.reason == ("model" if {nth, other} == {1, 2} else "schema")
        copy = there[nth].manager.handoff.accept(offer).wait()
        run_to(there[nth], copy, there[nth].stream(3, 220), 210, chunk=1)
        assert_cold(there[nth], copy, there[nth].stream(3, 220))
    assert_nothing_left(*here, *there)
    close(*here, *there)


@pytest.mark.parametrize("form", PAGE_FORMS)
def test_a_request_of_v41_arrives(form: PageForm):
    model = ModelSpec.preset("v41-tiny")
    one = side("prefill", model=model, drafts=3, form=form)
    other = side("decode", model=model, drafts=2, form=form)
    for length in (129, 130):
        text = Text.random(one, length, 200)
        request = grown(one, text, length, chunk=15)
        copy = other.manager.handoff.accept(one.manager.handoff.offer(request)).wait()
        assert torch.equal(drafted(other, copy), drafted(one, request))
        run_to(other, copy, text, length + 3, chunk=1)
        assert_cold(other, copy, text.stream)
    assert_nothing_left(one, other)
    close(one, other)


def test_pages_of_another_form_are_refused():
    model = ModelSpec.preset("v41-tiny")
    one, other = (side(form, model=model, form=form) for form in PAGE_FORMS)
    for owner, taker in ((one, other), (other, one)):
        offer = owner.manager.handoff.offer(grown(owner, Text.random(owner, 3, 200), 130))
        with pytest.raises(OfferError, match="page_form=records") as error:
            taker.manager.handoff.accept(offer)
        assert error.value.reason == "schema"
    assert_nothing_left(one, other)
    close(one, other)


def test_without_memory_nothing_changes(owner: Stack):
    request = grown(owner, Text.random(owner, 3, TOKENS), 500)
    offer = owner.manager.handoff.offer(request)
    small = side("decode", num_blocks=3, max_requests=1)
    before = everything(small.manager)
    with pytest.raises(OutOfBlocks) as error:
        small.manager.handoff.accept(offer)
    assert error.value.never
    assert everything(small.manager) == before
    wide = side("decode", num_blocks=5, max_requests=1)
    busy = wide.manager.admit_request(200)
    before = everything(wide.manager)
    with pytest.raises(OutOfSlots):
        wide.manager.handoff.accept(offer)
    assert everything(wide.manager) == before
    wide.manager.release_request(busy)
    assert wide.manager.handoff.accept(offer).wait().length == 500
    assert_nothing_left(small, wide)
    close(small, wide)


def test_a_longer_context_than_the_taker_s_is_refused(owner: Stack, taker: Stack):
    text = Text.random(owner, 4, TOKENS)
    offer = Offer.unpack(owner.manager.handoff.offer(grown(owner, text, 200)))
    longer = 2049 + 128
    fields = {name: getattr(offer, name) for name in Offer.__slots__}
    fields |= {"tokens": longer, "rows": (0,) * 17, "generations": (0,) * 17, "sums": None}
    with pytest.raises(ContextOverflow):
        taker.manager.handoff.accept(Offer(**{**fields, "ids": None}).pack())


def test_damaged_offers_are_refused(owner: Stack, taker: Stack):
    offer = owner.manager.handoff.offer(grown(owner, Text.random(owner, 5, TOKENS), 200))
    before, random = everything(taker.manager), Random(5)
    damaged: list[Any] = [offer[:length] for length in range(0, len(offer), 97)]
    damaged += [offer + b"\0", offer[1:], b"", None, "offer", np.zeros(3)]
    for at in [*range(40), *random.sample(range(len(offer)), 100)]:
        flipped = bytearray(offer)
        flipped[at] ^= 1 << random.randrange(8)
        damaged.append(bytes(flipped))
    for each in damaged:
        with pytest.raises(OfferError) as error:
            taker.manager.handoff.accept(each)
        assert error.value.reason in ("damaged", "version")
    assert everything(taker.manager) == before
    assert taker.manager.handoff.accept(bytearray(offer)).wait().length == 200


def test_addresses_that_nobody_has_are_refused(owner: Stack, taker: Stack):
    offer = Offer.unpack(
        owner.manager.handoff.offer(grown(owner, Text.random(owner, 31, TOKENS), 200))
    )
    fields = {name: getattr(offer, name) for name in Offer.__slots__}
    before, far = everything(taker.manager), (1 << 64) - 8
    pieces = tuple((far, span) for _, span in offer.state_pieces)
    for wrong in ({"rows": (far,)}, {"pledge_at": far}, {"state_pieces": pieces}):
        with pytest.raises(OfferError, match="address") as error:
            taker.manager.handoff.accept(Offer(**{**fields, **wrong}).pack())
        assert error.value.reason == "damaged"
    assert everything(taker.manager) == before


def test_ids_that_are_not_those_of_the_digests_are_refused(owner: Stack, taker: Stack):
    offer = Offer.unpack(
        owner.manager.handoff.offer(grown(owner, Text.random(owner, 6, TOKENS), 200))
    )
    fields = {name: getattr(offer, name) for name in Offer.__slots__}
    for at in (0, 127, 128, 199):
        assert offer.ids is not None
        ids = offer.ids.copy()
        ids[at] += 1
        with pytest.raises(OfferError, match="ids"):
            taker.manager.handoff.accept(Offer(**{**fields, "ids": ids}).pack())


def test_ids_below_0_are_refused_though_they_are_those_of_the_digests(owner: Stack, taker: Stack):
    offer = Offer.unpack(
        owner.manager.handoff.offer(grown(owner, Text.random(owner, 6, TOKENS), 200))
    )
    assert offer.ids is not None
    assert offer.root is not None
    fields = {name: getattr(offer, name) for name in Offer.__slots__}
    ids = offer.ids.copy()
    ids[7] = -1
    trail = TokenTrail(offer.root, owner.schema.block_tokens, ids)
    label = handing(owner).side.labels.of_state(trail, offer.tokens)
    fields |= {"ids": ids, "state_digest": label.digest, "state_parent": label.parent}
    with pytest.raises(OfferError, match="ids below 0") as caught:
        taker.manager.handoff.accept(Offer(**fields).pack())
    assert caught.value.reason == "damaged"


def test_offers_end_by_the_owner_s_clock_by_hand_and_when_taken(owner: Stack, taker: Stack):
    text = Text.random(owner, 7, TOKENS)
    request = grown(owner, text, 300)
    expired = owner.manager.handoff.offer(request, lease_s=0.01)
    withdrawn, taken = owner.manager.handoff.offer(request), owner.manager.handoff.offer(request)
    assert owner.manager.handoff.withdraw(withdrawn)
    assert not owner.manager.handoff.withdraw(withdrawn)
    with pytest.raises(OfferError):
        owner.manager.handoff.withdraw(withdrawn[:-1])
    assert taker.manager.handoff.accept(taken).wait().length == 300
    until(owner.manager, lambda: not handing(owner).leases.held)
    for offer in (expired, withdrawn, taken):
        arrival = taker.manager.handoff.accept(offer)
        with pytest.raises(OfferError) as error:
            arrival.wait()
        assert error.value.reason == "gone"
        assert arrival.request is None
    stats = handing(owner).stats()
    assert (stats.offers_standing, stats.offers_expired) == (0, 1)
    again = taker.manager.admit_request(text.ids[:300])  # what did not come is computed
    run_to(taker, again, text, 320)
    assert_cold(taker, again, text.stream)


def test_an_offer_outlives_its_request_and_pressure(owner: Stack, taker: Stack):
    """The owner's pool is full of others' tokens, and still has what it has offered."""
    text = Text.random(owner, 8, TOKENS)
    request = grown(owner, text, 700)
    offer = owner.manager.handoff.offer(request)
    owner.manager.release_request(request)
    for seed in (9, 10, 11):
        with pytest.raises(OutOfBlocks):
            owner.manager.admit_request(900)
        other = Text.random(owner, seed, TOKENS)
        busy = grown(owner, other, 800)
        owner.manager.check_invariants()
        owner.manager.release_request(busy)
    copy = taker.manager.handoff.accept(offer).wait()
    assert_cold(taker, copy, text.stream)


def test_what_cannot_be_offered_says_why(owner: Stack, taker: Stack):
    text = Text.random(owner, 12, TOKENS)
    request = owner.manager.admit_request(text.ids[:300])
    with pytest.raises(RequestError, match="0 tokens"):
        owner.manager.handoff.offer(request)
    plan = owner.manager.prepare_forward([(request, 200)])
    owner.write(plan, [text.stream])
    with pytest.raises(RequestError, match="chunk"):
        owner.manager.handoff.offer(request)
    owner.manager.commit(plan, ids=text.ids[:200].tolist())
    for wrong in ({"takers": 0}, {"lease_s": 0}, {"lease_s": True}):
        with pytest.raises(InvalidInput):
            owner.manager.handoff.offer(request, **wrong)
    with pytest.raises(InvalidInput, match="deadline_s"):
        taker.manager.handoff.accept(owner.manager.handoff.offer(request), deadline_s=-1)
    with pytest.raises(RequestError):
        taker.manager.handoff.offer(request)
    plan = owner.manager.prepare_forward([(request, 100)])
    owner.write(plan, [text.stream])
    owner.manager.fail(plan)
    with pytest.raises(RequestError, match="rewind"):
        owner.manager.handoff.offer(request)


def test_options_are_checked():
    alone = tiny_stack().manager
    with pytest.raises(InvalidInput, match="hands nothing over"):
        alone.handoff.accept(b"")
    with pytest.raises(InvalidInput, match="which weights"):
        side("x", prefix=None, handoff={"model_id": ""})
    with pytest.raises(InvalidInput, match="same to both"):
        side("x", handoff={"model_id": "another"})
    for wrong in ({"name": ""}, {"name": "x", "offers": 0}, {"name": "x", "lease_s": "long"}):
        with pytest.raises(Dsv4Error):
            HandoffOptions(**wrong)  # type: ignore[arg-type]


def test_too_many_at_once_are_told_to_wait():
    owner = side("prefill", handoff={"states": 2, "offers": 3})
    request = grown(owner, Text.random(owner, 13, TOKENS), 200)
    offers = [owner.manager.handoff.offer(request) for _ in range(2)]
    before = everything(owner.manager)
    for _ in range(3):
        with pytest.raises(OfferError) as error:
            owner.manager.handoff.offer(request)
        assert error.value.reason == "busy"
    assert everything(owner.manager) == before
    owner.manager.handoff.withdraw(offers[0])
    tidy(owner.manager)
    owner.manager.handoff.offer(request)
    assert_nothing_left(owner)
    close(owner)


# ---- wrong bytes are never seen ------------------------------------------------------------------


class Between:
    """Does something when a taker has read all but the owner's pledge."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, taker: Stack, what: Any) -> None:
        link, self.done = handing(taker).side.link, 0
        transfer = link._transfer

        def between(read: Any, spans: Any, note: bytes) -> None:
            if spans is read.last:
                self.done += 1
                what()
            transfer(read, spans, note)

        monkeypatch.setattr(link, "_transfer", between)


@pytest.mark.parametrize("sums", [True, False])
def test_an_offer_that_ends_during_the_read_is_not_believed(
    owner: Stack, taker: Stack, sums: bool, monkeypatch: pytest.MonkeyPatch
):
    """The pledge alone tells: with blocks on a GPU there are no sums."""
    options = HandoffOptions(name="x", sums=sums)
    monkeypatch.setattr(handing(owner), "side", replace(handing(owner).side, options=options))
    text = Text.random(owner, 14, TOKENS)
    request = grown(owner, text, 300)
    offer = owner.manager.handoff.offer(request)
    owner.manager.release_request(request)

    def rewrite() -> None:
        owner.manager.handoff.withdraw(offer)
        owner.manager.prefix.evict()
        owner.manager.memory.block_arena.bytes.fill_(7)

    between = Between(monkeypatch, taker, rewrite)
    arrival = taker.manager.handoff.accept(offer)
    with pytest.raises(OfferError) as error:
        arrival.wait()
    assert (between.done, error.value.reason) == (1, "gone")
    assert (
        taker.manager.prefix.look_up(taker.manager.prefix.prompt(text.ids[:300])).reused_tokens == 0
    )


@pytest.mark.parametrize("what", ["block", "state"])
def test_bytes_that_break_on_the_way_are_refused(
    owner: Stack, taker: Stack, what: str, monkeypatch: pytest.MonkeyPatch
):
    text = Text.random(owner, 15, TOKENS)
    offer = owner.manager.handoff.offer(grown(owner, text, 300))

    def break_one() -> None:
        (arrival,) = handing(taker).arrivals.open
        if what == "block":
            taker.manager.memory.block_arena.bytes[arrival.landing.block_ids[1], 77] ^= 4
        else:
            assert arrival.landing.row is not None
            arrival.landing.row.parts.payload[0][99] ^= 4

    Between(monkeypatch, taker, break_one)
    arrival = taker.manager.handoff.accept(offer)
    with pytest.raises(OfferError, match=what) as error:
        arrival.wait()
    assert error.value.reason == "refused"
    assert (
        taker.manager.prefix.look_up(taker.manager.prefix.prompt(text.ids[:300])).reused_tokens == 0
    )


def test_a_cancelled_arrival_gives_all_back(owner: Stack, taker: Stack):
    offer = owner.manager.handoff.offer(grown(owner, Text.random(owner, 16, TOKENS), 500))
    arrival = taker.manager.handoff.accept(offer)
    arrival.cancel()
    assert arrival.poll()
    assert arrival.error is not None
    assert arrival.error.reason == "cancelled"
    until(taker.manager, lambda: not handing(taker).arrivals.open)
    assert taker.manager.stats().blocks_in_flight == 0


def test_a_device_error_at_the_end_leaves_nothing(
    owner: Stack, taker: Stack, monkeypatch: pytest.MonkeyPatch
):
    text = Text.random(owner, 17, TOKENS)
    offer = owner.manager.handoff.offer(grown(owner, text, 300), takers=2)

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    arrival = taker.manager.handoff.accept(offer)
    with monkeypatch.context() as patch:
        patch.setattr(taker.manager.memory, "publish", broken)
        with pytest.raises(OfferError) as error:
            arrival.wait()
    assert error.value.reason == "failed"
    taker.manager.check_invariants()
    assert_cold(taker, taker.manager.handoff.accept(offer).wait(), text.stream)


def test_a_link_that_is_closed_reads_no_more_and_gives_its_memory_back():
    one, other = side("prefill"), side("decode")
    text = Text.random(one, 18, TOKENS)
    request = grown(one, text, 300)
    offer = one.manager.handoff.offer(request)
    close(one)
    with pytest.raises(OfferError, match="closed"):
        one.manager.handoff.offer(request)
    arrival = other.manager.handoff.accept(offer)
    with pytest.raises(OfferError) as error:
        arrival.wait()
    assert error.value.reason in ("failed", "gone")
    tidy(one.manager)
    assert_nothing_left(one, other)
    close(other)


def test_a_manager_that_is_closed_takes_nothing_and_recovers(
    owner: Stack, monkeypatch: pytest.MonkeyPatch
):
    offer = owner.manager.handoff.offer(grown(owner, Text.random(owner, 32, TOKENS), 300))
    closed, busy = side("decode"), side("decode 2")
    close(closed)
    before = everything(closed.manager)
    with pytest.raises(OfferError, match="closed"):
        closed.manager.handoff.accept(offer)
    assert everything(closed.manager) == before
    assert_nothing_left(closed)
    # a read that has not settled never does: its memory stays taken, all else goes on
    monkeypatch.setattr(handing(busy).side.link, "_advance", lambda read: None)
    arrival = busy.manager.handoff.accept(offer)
    close(busy)
    busy.manager.recover()
    assert arrival.error is not None
    assert arrival.error.reason == "cancelled"
    assert busy.manager.stats().blocks_in_flight == 3
    busy.manager.release_request(busy.manager.admit_request(200))
    busy.manager.check_invariants()


def test_a_manager_that_nobody_uses_ends_its_link():
    stack = side("prefill")
    stack.manager.handoff.offer(grown(stack, Text.random(stack, 19, TOKENS), 200))
    link = handing(stack).side.link
    thread = link._thread
    assert thread is not None
    assert thread.is_alive()
    del stack
    gc.collect()
    assert not thread.is_alive()
    assert link._nixl is None


def test_metrics_tell_of_it(owner: Stack, taker: Stack):
    hand_over(owner, taker, Text.random(owner, 30, TOKENS), 200)
    pytest.importorskip("prometheus_client")
    text = prometheus_text(owner.manager) + prometheus_text(taker.manager)
    assert 'dsv4_handoff_offers_total{what="made"}' in text
    assert 'dsv4_handoff_requests_total{what="arrived"}' in text


# ---- hints ---------------------------------------------------------------------------------------


def test_the_taker_says_what_is_worth_keeping_there(owner: Stack, taker: Stack):
    text, hints = Text.random(owner, 77, TOKENS), Hints(session="chat", priority=3, ttl_s=60)
    request = grown(owner, text, 300)
    offer = owner.manager.handoff.offer(request)
    with pytest.raises(InvalidInput, match="hints"):
        taker.manager.handoff.accept(offer, hints="chat")  # type: ignore[arg-type]
    assert_nothing_left(taker)
    copy = taker.manager.handoff.accept(offer, hints=hints).wait()
    assert taker.manager._parts.prefix
    trail = taker.manager.prefix.prompt(text.ids[:300]).trail
    assert trail is not None
    nodes = taker.manager._parts.prefix.index.match(trail, 2)
    assert [node.hints for node in nodes] == [hints] * 2
    assert copy.trail is not None
    assert copy.trail.hints == hints

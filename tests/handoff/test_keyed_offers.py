"""Offers between managers with a key: one with another key, or without, is refused and counted, and
what arrives is checked with it."""

from __future__ import annotations

import hmac
import random
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4.cache.handoff.offer import Offer
from dsv4.errors import OfferError
from dsv4.tiers.record import payload_sum
from dsv4.tiers.secret import Secret
from tests.support.handoff import (
    assert_equal,
    assert_nothing_left,
    close,
    grown,
    handing,
    side,
)
from tests.support.lives import Text, assert_cold
from tests.support.stack import Stack
from tests.support.tiered import options

MINE, THEIRS = b"m" * 32, b"t" * 32
TOKENS = 900


def make(name: str, key: bytes | None, **more: Any) -> Stack:
    return side(name, prefix=options(key=key), **more)


@pytest.fixture(scope="module")
def owner() -> Iterator[Stack]:
    stack = make("owner", MINE)
    yield stack
    close(stack)


@pytest.fixture(scope="module")
def taker() -> Iterator[Stack]:
    stack = make("taker", MINE)
    yield stack
    close(stack)


@pytest.fixture(autouse=True)
def _nothing_is_left(owner: Stack, taker: Stack) -> Iterator[None]:
    yield
    assert_nothing_left(owner, taker)


def offered(stack: Stack, seed: int, length: int = 300) -> bytes:
    request = grown(stack, Text.random(stack, seed, TOKENS), length)
    packed: bytes = stack.manager.handoff.offer(request)
    stack.manager.release_request(request)
    return packed


def reason(stack: Stack, packed: bytes) -> str:
    with pytest.raises(OfferError) as error:
        stack.manager.handoff.accept(packed).wait()
    assert MINE.hex() not in str(error.value)
    return error.value.reason


def test_a_request_goes_over_with_the_same_key(owner: Stack, taker: Stack) -> None:
    text = Text.random(owner, 1, TOKENS)
    request = grown(owner, text, 300)
    packed = owner.manager.handoff.offer(request)
    plain = payload_sum([handing(owner).side.block_bytes(request.block_ids[0])])
    assert plain not in packed  # sums are MACs too
    arrived = taker.manager.handoff.accept(packed).wait()
    assert_equal(owner, request, taker, arrived)
    assert_cold(taker, arrived, text.stream)
    # cached under the names that this manager computes itself
    taker.manager.release_request(arrived)
    assert taker.manager.prefix.look_up(text.ids[:300]).reused_tokens == 256


def test_an_offer_of_another_key_or_none_is_refused_and_counted(owner: Stack, taker: Stack) -> None:
    packed = offered(owner, 2)
    for name, key in (("other", THEIRS), ("none", None)):
        other = make(name, key)
        if key is not None:
            assert reason(other, packed) == "untrusted"
            assert other.manager.stats().handoff.errors["untrusted"] == 1
        theirs = offered(other, 3)
        before = taker.manager.stats().handoff.errors.get("untrusted", 0)
        assert reason(taker, theirs) == "untrusted"
        assert taker.manager.stats().handoff.errors["untrusted"] == before + 1
        assert taker.manager.stats().handoff.arrivals_open == 0
        assert_nothing_left(other)
        close(other)


def test_a_block_that_was_replaced_on_its_way_is_refused(
    owner: Stack, taker: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = grown(owner, Text.random(owner, 4, TOKENS), 300)
    packed = owner.manager.handoff.offer(request)
    handing(owner).side.block_bytes(request.block_ids[1])[7] ^= 1
    assert reason(taker, packed) == "refused"
    owner.manager.release_request(request)


def test_a_signature_of_the_engine_comes_in_addition(owner: Stack) -> None:
    def sign(packed: bytes) -> bytes:
        return hmac.digest(b"engine", packed, "sha256")

    def verify(packed: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(sign(packed), signature)

    both = {"sign": sign, "verify": verify}
    one, other = (make(name, MINE, handoff=both) for name in ("signs", "verifies"))
    assert other.manager.handoff.accept(offered(one, 5)).wait().length == 300
    assert reason(one, offered(owner, 6)) == "untrusted"  # the key alone
    assert_nothing_left(one, other)
    close(one, other)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_damaged_offers_are_never_used(owner: Stack, taker: Stack, count: int) -> None:
    """All with a right checksum: bytes replaced, cut, lengthened, another signature."""
    packed, draw = offered(owner, 7, length=140), random.Random(count)
    accepted = handing(taker).side.verify
    assert Offer.unpack(packed, accepted).tokens == 140
    free = taker.manager.stats().blocks_free
    reasons = set()
    for _ in range(count):
        data = bytearray(packed[:-16])
        kind = draw.randrange(4)
        if kind == 0:
            data[draw.randrange(12, len(data))] ^= 1 << draw.randrange(8)
        elif kind == 1:
            at = draw.randrange(12, len(data))
            data[at : at + 8] = draw.randbytes(len(data[at : at + 8]))
        elif kind == 2:
            del data[draw.randrange(400, len(data)) :]
        else:
            data[-32:] = draw.randbytes(32)
        if data == packed[:-16]:
            continue
        made = bytes(data) + payload_sum([memoryview(bytes(data))])
        with pytest.raises(OfferError) as error:
            taker.manager.handoff.accept(made)
        reasons.add(error.value.reason)
    assert reasons == {"untrusted", "damaged"}
    assert taker.manager.stats().blocks_free == free
    assert Secret(MINE).offer_mac(packed[: -16 - 32]) == packed[-48:-16]

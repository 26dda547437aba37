"""Object storage's own faults, with a real S3 server: killed, stopped, damaged, forbidden."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dsv4.errors import InvalidInput
from dsv4.tiers.object import ObjectTier
from dsv4.tiers.record import Reason
from dsv4.tiers.tier import Limits, State
from tests.support.tiers import (
    PATIENT,
    Memory,
    assert_never_wrong,
    chain,
    file_bytes,
    found,
    free_port,
    label,
    load,
    s3_config,
    s3_server,
    states,
    store,
    until,
    wait,
)

QUICK = Limits(threads=4, deadline_s=1.0, rest_s=0.2)  # where a deadline is to pass


@contextmanager
def connected(port: int, place: str = "s3://bucket/faults", **options: Any) -> Iterator[ObjectTier]:
    options = {"limits": PATIENT, **options}
    tier = ObjectTier(place, config=s3_config(port), allow_http=True, **options)
    try:
        yield tier
    finally:
        tier.close(5.0)


def rested(tier: ObjectTier) -> None:
    until(lambda: not tier.stats().resting)


def test_objects_are_named_by_their_keys(s3_port: int, memory: Memory) -> None:
    """Any S3 client finds them, under the prefix."""
    wanted = label("named")
    with connected(s3_port, "s3://bucket/one/two") as tier:
        assert store(tier, [memory.filled(wanted, pieces=3)]) == [State.DONE]
        import obstore

        bare = obstore.store.from_url(
            "s3://bucket", config=s3_config(s3_port), client_options={"allow_http": True}
        )
        data = bytes(obstore.get(bare, f"one/two/{wanted.key}").bytes())
        assert data == file_bytes(wanted)[: wanted.record_bytes]


def test_damaged_objects_are_refused_and_deleted(s3_port: int, memory: Memory) -> None:
    good = label("damaged", payload_bytes=20_000)
    whole = bytes(file_bytes(good)[: good.record_bytes])
    flipped, other = bytearray(whole), file_bytes(label("b", payload_bytes=20_000))
    flipped[9_000] ^= 8
    with connected(s3_port) as tier:
        for data, reason in (
            (bytes(flipped), Reason.PAYLOAD_SUM),
            (bytes(len(whole)), Reason.MAGIC),
            (bytes(other[: len(whole)]), Reason.DIGEST),
            (whole[:9_000], Reason.SHORT),
            (whole + b"\0", Reason.PAYLOAD_BYTES),
        ):
            tier._obstore.put(tier._bucket, str(good.key), data)
            progress = wait(tier, tier.load([memory.blank(good)]))
            assert states(progress) == [State.REFUSED]
            refusal = progress.outcomes[0].refusal
            assert refusal is not None
            assert refusal.reason is reason
            assert found(tier, [good]) == [False]
        assert store(tier, [memory.filled(good)]) == [State.DONE]
        assert assert_never_wrong(tier, memory, [good]) == [State.DONE]


def test_a_server_that_is_killed_stopped_and_comes_back(memory: Memory) -> None:
    port, labels = free_port(), chain("a", 3)
    with connected(port) as tier, connected(port, limits=QUICK) as quick:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DROPPED] * 3
        with s3_server(port) as server:
            rested(tier)
            assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 3
            assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 3

            os.kill(server.pid, signal.SIGSTOP)
            ticket = quick.load([memory.blank(each) for each in labels])
            assert states(wait(quick, ticket, settled=False)) == [State.MISSING] * 3
            until(lambda: quick.poll(ticket).settled)  # requests end with the deadline
            os.kill(server.pid, signal.SIGCONT)
            assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 3
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            assert assert_never_wrong(tier, memory, labels) == [State.MISSING] * 3
            rested(tier)
            assert found(tier, labels) == [False] * 3
            assert store(tier, [memory.filled(label("b"))]) == [State.DROPPED]
        assert tier.stats().outages >= 3


def test_a_bucket_that_does_not_exist_costs_records(s3_port: int, memory: Memory) -> None:
    with connected(s3_port, "s3://nowhere/at/all") as tier:
        assert store(tier, [memory.filled(label("a"))]) == [State.DROPPED]
        rested(tier)
        assert load(tier, [memory.blank(label("a"))]) == [State.MISSING]


@pytest.mark.parametrize("url", ["nonsense", "ftp://a/b", "s3://"])
def test_a_place_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="is no place for objects"):
        ObjectTier(url)

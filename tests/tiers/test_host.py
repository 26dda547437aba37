"""Host memory: rows without copies, room by order of use, what is held stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsv4.errors import InvalidInput
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Kind, Label, Reason, check, seal
from dsv4.tiers.sizes import HEADER_BYTES
from dsv4.tiers.tier import State
from tests.support.tiers import (
    Memory,
    chain,
    found,
    label,
    load,
    payload_in,
    payload_of,
    states,
    store,
    until,
    wait,
)

UNIT = 4096
ROW = UNIT - HEADER_BYTES  # a payload that fills one unit


@pytest.fixture
def tier() -> Iterator[HostTier]:
    tier = HostTier(8 * UNIT)
    yield tier
    tier.close(5.0)


def used(tier: HostTier, labels: list[Label]) -> None:
    """Marks records as used, behind everything that waits to be marked."""
    until(lambda: not tier._later and not tier._running)
    for row in tier.hold(labels):
        if row is not None:
            tier.release(row)


def test_the_longest_unused_makes_room(tier: HostTier, memory: Memory) -> None:
    labels = [label(("x", nth), payload_bytes=ROW) for nth in range(8)]
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 8
    stats = tier.stats()
    assert (stats.held_records, stats.held_bytes, stats.capacity_bytes) == (8, 8 * UNIT, 8 * UNIT)
    used(tier, labels[:2])
    more = [label(("y", nth), payload_bytes=ROW) for nth in range(2)]
    assert store(tier, [memory.filled(each) for each in more]) == [State.DONE] * 2
    assert found(tier, [*labels, *more]) == [True] * 2 + [False] * 2 + [True] * 6
    assert tier.stats().held_bytes == 8 * UNIT


def test_what_leans_on_a_block_goes_before_it(tier: HostTier, memory: Memory) -> None:
    """Of one prompt the last blocks go first: a prompt without its start is of no use."""
    labels = chain("a", 8, payload_bytes=ROW)
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 8
    used(tier, labels)
    other = label("b", payload_bytes=3 * UNIT - HEADER_BYTES)
    assert store(tier, [memory.filled(other)]) == [State.DONE]
    assert found(tier, labels) == [True] * 5 + [False] * 3


def test_sizes_mix_and_rows_may_lie_in_pieces(tier: HostTier, memory: Memory) -> None:
    """Every other row goes, and a long record takes the holes."""
    labels = [label(("x", nth), payload_bytes=ROW) for nth in range(8)]
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 8
    tier.drop([each.key for each in labels[::2]])
    until(lambda: tier.stats().held_records == 4)
    long = label("long", kind=Kind.SNAPSHOT, payload_bytes=4 * UNIT - HEADER_BYTES - 100)
    assert store(tier, [memory.filled(long, pieces=3)]) == [State.DONE]
    (row,) = tier.hold([long])
    assert row is not None
    assert len(row.parts.payload) == len(row.parts.whole) == 4
    assert check(row.record) is None
    tier.release(row)
    records = [memory.blank(each) for each in [long, *labels[1::2]]]
    assert load(tier, records) == [State.DONE] * 5
    assert [payload_in(r) for r in records] == [payload_of(r.label) for r in records]


def test_a_row_is_filled_in_place_and_seen_when_it_is_published(
    tier: HostTier, memory: Memory
) -> None:
    wanted = label("a", payload_bytes=10_000)
    row = tier.take(wanted)
    assert row is not None
    assert tier.region.holds(row.parts.header)
    assert found(tier, [wanted]) == [False]
    row.parts.payload[0][:] = payload_of(wanted)
    seal(row.record)
    tier.publish(row)
    tier.release(row)
    assert found(tier, [wanted]) == [True]
    assert tier.take(wanted) is None  # it is there
    record = memory.blank(wanted)
    assert load(tier, [record]) == [State.DONE]
    assert payload_in(record) == payload_of(wanted)


def test_rows_are_zero_behind_their_payload(tier: HostTier, memory: Memory) -> None:
    """What another record left there would go to disk with this one."""
    assert store(tier, [memory.filled(label("a", payload_bytes=8 * UNIT - HEADER_BYTES))]) == [
        State.DONE
    ]
    wanted = label("b", payload_bytes=100)
    row = tier.take(wanted)
    assert row is not None
    assert not any(row.parts.whole[0][HEADER_BYTES + 100 :])
    tier.release(row)


def test_a_row_that_is_given_up_leaves_nothing(tier: HostTier) -> None:
    row = tier.take(label("a", payload_bytes=8 * UNIT - HEADER_BYTES))
    assert row is not None
    assert tier.take(label("b", payload_bytes=ROW)) is None  # all of it is held
    tier.release(row)
    assert tier.stats().held_records == 0
    again = tier.take(label("b", payload_bytes=8 * UNIT - HEADER_BYTES))
    assert again is not None
    tier.release(again)


def test_what_is_held_stays_whoever_asks_for_room(tier: HostTier, memory: Memory) -> None:
    labels = [label(("x", nth), payload_bytes=ROW) for nth in range(8)]
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 8
    (row,) = tier.hold([labels[0]])
    assert row is not None
    big = label("big", payload_bytes=7 * UNIT - HEADER_BYTES)
    assert store(tier, [memory.filled(big)]) == [State.DONE]
    assert payload_in(row.record) == payload_of(labels[0])
    whole = label("whole", payload_bytes=8 * UNIT - HEADER_BYTES)
    assert store(tier, [memory.filled(whole)]) == [State.DROPPED]
    tier.drop([labels[0].key])  # forgotten, but not overwritten
    until(lambda: found(tier, [labels[0]]) == [False])
    assert payload_in(row.record) == payload_of(labels[0])
    assert store(tier, [memory.filled(whole)]) == [State.DROPPED]
    tier.release(row)
    assert store(tier, [memory.filled(whole)]) == [State.DONE]


def test_two_rows_of_one_record_the_first_published_wins(tier: HostTier) -> None:
    wanted = label("a", payload_bytes=ROW)
    rows = [tier.take(wanted), tier.take(wanted)]
    for row in rows:
        assert row is not None
        row.parts.payload[0][:] = payload_of(wanted)
        seal(row.record)
        tier.publish(row)
        tier.release(row)
    stats = tier.stats()
    assert (stats.held_records, stats.held_bytes) == (1, UNIT)


def test_a_record_larger_than_the_tier_is_dropped_and_nothing_goes(
    tier: HostTier, memory: Memory
) -> None:
    assert store(tier, [memory.filled(label("a"))]) == [State.DONE]
    too_large = label("b", payload_bytes=8 * UNIT)
    assert store(tier, [memory.filled(too_large)]) == [State.DROPPED]
    assert found(tier, [label("a")]) == [True]


def test_memory_that_broke_is_refused(tier: HostTier, memory: Memory) -> None:
    wanted = label("a")
    assert store(tier, [memory.filled(wanted)]) == [State.DONE]
    (row,) = tier.hold([wanted])
    assert row is not None
    row.parts.payload[0][4000] ^= 1
    tier.release(row)
    progress = wait(tier, tier.load([memory.blank(wanted)]))
    assert states(progress) == [State.REFUSED]
    refusal = progress.outcomes[0].refusal
    assert refusal is not None
    assert refusal.reason is Reason.PAYLOAD_SUM
    assert tier.stats().held_records == 0


def test_a_tier_of_no_bytes_is_refused() -> None:
    with pytest.raises(InvalidInput, match="capacity_bytes=4095"):
        HostTier(4095)

"""Host memory: rows without copies, room by order of use, what is held stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dsv4.errors import InvalidInput
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import PASSING, HostRow, HostTier
from dsv4.tiers.record import Kind, Label, Reason, check, seal
from dsv4.tiers.sizes import HEADER_BYTES
from dsv4.tiers.tier import State
from tests.support.tiers import (
    ROOT,
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


# ---- what is held can be reached -----------------------------------------------------------------


def put(tier: HostTier, wanted: Label, *, passing: bool = True) -> bool:
    """As a record comes down from the device: whether it is held then."""
    row = tier.take(wanted, passing=passing)
    if row is None:
        return tier.holds(wanted.key)
    kept = tier.publish(row)
    tier.release(row)
    assert kept == tier.holds(wanted.key)
    return kept


def reachable(tier: HostTier, labels: list[Label]) -> int:
    """Blocks from the start of a prompt on, without a gap."""
    held = [tier.holds(each.key) for each in labels]
    return held.index(False) if False in held else len(held)


def rows_of(blocks: int) -> HostTier:
    return HostTier(blocks * UNIT)


@pytest.mark.parametrize("passing", [False, True])
def test_of_a_prompt_that_is_too_long_the_beginning_is_kept(passing: bool) -> None:
    """Some room at its end is given up for blocks that only pass through, an eighth at most."""
    tier, labels = rows_of(12), chain("a", 15, payload_bytes=ROW)
    for each in labels:
        put(tier, each, passing=passing)
    count = reachable(tier, labels)
    assert count == tier.stats().held_records == (11 if passing else 12)
    assert put(tier, label("other", payload_bytes=ROW))
    assert reachable(tier, labels) >= 11
    tier.close(1.0)


def test_a_batch_that_passes_takes_little_of_what_is_kept() -> None:
    """Rows of a whole prompt are taken before the first one is published."""
    tier, labels = rows_of(64), chain("a", 200, payload_bytes=ROW)
    left = labels
    while left:
        rows = []
        while left and (row := tier.take(left[0])) is not None:
            rows.append(row)
            left = left[1:]
        assert rows  # somebody may always pass
        for row in rows:
            tier.publish(row)
        for row in rows:
            tier.release(row)
    assert reachable(tier, labels) == tier.stats().held_records >= 64 - 64 // PASSING
    assert tier._extents.free_units + tier.stats().held_records == 64  # type: ignore[operator]
    assert tier._passing_units == 0
    tier.close(1.0)


def test_prompts_that_grow_side_by_side_can_all_be_reached() -> None:
    tier, prompts = rows_of(110), [chain(name, 15, payload_bytes=ROW) for name in range(8)]
    for nth in range(15):
        for labels in prompts:
            put(tier, labels[nth])
    counts = [reachable(tier, labels) for labels in prompts]
    assert sum(counts) == tier.stats().held_records >= 109
    assert sorted(counts)[1:] == [15] * 7  # the one that was used longest ago has given way
    tier.close(1.0)


def test_what_is_always_used_on_the_device_stays_here() -> None:
    """One system prompt, hit above; sixty prompts behind it, and sixty others."""
    tier, system = rows_of(40), chain("system", 16, payload_bytes=ROW)
    for each in system:
        assert put(tier, each)
    for nth in range(60):
        tier.use(system)
        own = chain(nth, 6, payload_bytes=ROW)
        if nth % 2:
            own = []
            for at in range(4):
                parent = (own or system)[-1]
                own.append(
                    label(
                        (nth, at),
                        parent=parent.digest,
                        tokens=parent.tokens + 128,
                        payload_bytes=ROW,
                    )
                )
        for each in own:
            assert put(tier, each)
        assert reachable(tier, system) == 16
    tier.close(1.0)


def test_a_use_of_a_long_prompt_keeps_what_is_left_of_it() -> None:
    """Its end had to go: the use is one of the last block that is there."""
    tier, labels = rows_of(4), chain("a", 9, payload_bytes=ROW)
    for each in labels:
        put(tier, each, passing=False)
    tier.drop([each.key for each in labels[3:]])
    until(lambda: tier.stats().held_records == 3)
    other = label("b", payload_bytes=ROW)
    assert put(tier, other)
    tier.use(labels)
    assert put(tier, label("c", payload_bytes=ROW))
    assert reachable(tier, labels) == 3
    assert not tier.holds(other.key)
    tier.close(1.0)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_held_can_be_reached_after_any_life(seed: int) -> None:
    """Prompts that share beginnings, snapshots, hits above and here, readers, every capacity."""
    draw = Random(seed)
    tier = rows_of(draw.choice((1, 2, 7, 30, 90)))
    labels: list[Label] = []
    snapshots: dict[Label, Label] = {}
    prompts: list[list[Label]] = []
    for nth in range(25):
        trunk = draw.choice(prompts) if prompts and draw.random() < 0.6 else []
        blocks = trunk[: draw.randrange(len(trunk) + 1)]
        for at in range(draw.randrange(1, 25)):
            parent, tokens = (blocks[-1].digest, blocks[-1].tokens) if blocks else (ROOT, 0)
            each = label((nth, at), parent=parent, tokens=tokens + 128, payload_bytes=ROW)
            blocks = [*blocks, each]
            labels.append(each)
            if draw.random() < 0.2:
                snapshots[each] = replace(each, kind=Kind.SNAPSHOT, payload_bytes=3 * UNIT)
        prompts.append(blocks)
    held: list[HostRow] = []
    for _ in range(600):
        blocks = draw.choice(prompts)
        match draw.randrange(6):
            case 0 | 1 | 2:  # computed, written through: what is here already is used
                for each in blocks[reachable(tier, blocks) :]:
                    put(tier, each, passing=draw.random() < 0.5)
                    if each in snapshots:
                        put(tier, snapshots[each])
            case 3:
                tier.use(blocks[: draw.randrange(1, len(blocks) + 1)], snapshots.get(blocks[-1]))
            case 4:
                held += [row for row in tier.hold(blocks[-3:]) if row is not None]
            case 5:
                while held and draw.random() < 0.9:
                    tier.release(held.pop(draw.randrange(len(held))))
        for each in (*labels, *snapshots.values()):
            if tier.holds(each.key) and each.parent != ROOT:
                assert tier.holds(each.leans_on), "held, and the block before it is not"
        records, held_bytes = tier.stats().held_records, tier.stats().held_bytes
        assert tier._extents.free_units * UNIT + held_bytes == tier.region.memory.nbytes  # type: ignore[operator]
        assert records == sum(tier.holds(each.key) for each in (*labels, *snapshots.values()))
    for row in held:
        tier.release(row)
    assert not any(entry.value.holds for entry in map(tier._rows.get, tier._rows) if entry)
    for nth in range(200):  # nothing is stuck: all of it gives way
        assert put(tier, label(("last", nth), payload_bytes=ROW))
    assert not any(tier.holds(each.key) for each in labels)
    tier.close(1.0)


def test_a_state_is_kept_though_its_blocks_had_to_go() -> None:
    """They may still be on the device."""
    tier, labels = rows_of(4), chain("a", 6, payload_bytes=ROW)
    for each in labels:
        put(tier, each)
    end = labels[-1]
    state = label("s", kind=Kind.STATE, parent=end.digest, tokens=800, payload_bytes=ROW)
    assert put(tier, state)
    tier.close(1.0)


def test_room_is_found_in_a_look_whatever_is_held() -> None:
    """A hung disk holds rows: each is passed over once, not with every row that is taken."""
    tier = rows_of(8000)
    held = []
    for nth in range(7900):
        row = tier.take(label(nth, payload_bytes=ROW))
        assert row is not None
        tier.publish(row)
        held.append(row)
    begin = time.thread_time()
    for nth in range(300):
        assert put(tier, label(("new", nth), payload_bytes=ROW))
    assert time.thread_time() - begin < 1.0  # with each one passed over each time: minutes
    for row in held:
        tier.release(row)
    for nth in range(8000):
        assert put(tier, label(("again", nth), payload_bytes=ROW))
    assert tier.stats().held_records == 8000
    tier.close(1.0)


def test_records_that_are_removed_leave_nothing_behind(tier: HostTier) -> None:
    """Not in the order of use either."""
    kept = label("kept", payload_bytes=ROW)
    assert put(tier, kept)
    for nth in range(2000):
        each = label(nth, payload_bytes=ROW)
        assert put(tier, each)
        tier._drop([each.key])
    assert len(tier._rows._heap) < 200
    assert list(tier._rows._leaning) == [kept.leans_on]


def test_what_is_remembered_of_records_that_had_to_go_is_bounded(
    tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4.tiers.host.MOST_LOST", 100)
    for nth in range(500):
        put(tier, label(nth, payload_bytes=ROW))
    assert len(tier._lost) <= 100


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity_bytes", [None, 1e6, True, -1, 0])
def test_a_capacity_is_a_whole_number(capacity_bytes: Any) -> None:
    with pytest.raises(InvalidInput, match="capacity_bytes="):
        HostTier(capacity_bytes)


@pytest.mark.parametrize("power", [48, 62, 63, 80])
def test_more_memory_than_there_is_is_refused_with_figures(power: int) -> None:
    with pytest.raises(InvalidInput, match=r"capacity_bytes=[0-9,]+: .* the machine has [0-9,]+"):
        HostTier(1 << power)


def test_a_tier_of_no_bytes_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'8 sacks' is not a number of bytes"):
        HostTier("8 sacks")
    with pytest.raises(InvalidInput, match="capacity_bytes=4095"):
        HostTier(4095)


def test_memory_is_given_as_a_number_or_as_people_write_it(tmp_path: Path):
    with closing(HostTier("8MiB")) as host, closing(DiskTier(tmp_path / "d", "64 MiB")) as disk:
        assert host.stats().capacity_bytes == 8 << 20
        assert disk.stats().capacity_bytes == 64 << 20

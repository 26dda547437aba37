"""What goes first, and where it lay: the order of use and the units of host memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsv4.tiers.extents import MOST_PIECES, Extent, Extents
from dsv4.tiers.lru import Lru
from dsv4.tiers.record import Kind, Label
from tests.support.tiers import BLOCK_TOKENS, ROOT, chain, label


def held(*labels: Label) -> Lru[None]:
    lru: Lru[None] = Lru()
    for each in labels:
        lru.add(each.key, 10, None, each)
    return lru


def test_the_oldest_goes_first_and_bytes_are_counted() -> None:
    a, b, c = (label(name) for name in "abc")
    lru = held(a, b, c)
    lru.touch([a])
    assert list(lru.oldest()) == [b.key, c.key, a.key]
    assert lru.used_bytes == 30
    assert lru.remove(b.key) is not None
    assert lru.remove(b.key) is None
    assert (len(lru), lru.used_bytes) == (2, 20)


def test_what_is_removed_on_the_way_does_not_stop_the_way() -> None:
    labels = chain("a", 5)
    lru = held(*labels)
    for key in lru.oldest():
        lru.remove(key)
    assert len(lru) == 0


def test_a_use_of_the_last_block_keeps_those_before_it() -> None:
    labels, other = chain("a", 4), label("other")
    lru = held(*labels, other)
    assert lru.touch([labels[3]]) == [each.key for each in reversed(labels)]
    assert list(lru) == [other.key, *(each.key for each in reversed(labels))]


def test_snapshots_and_states_lean_on_blocks() -> None:
    a, b = chain("a", 2)
    snapshot = label(("a", 1), kind=Kind.SNAPSHOT, parent=a.digest, tokens=b.tokens)
    assert snapshot.digest == b.digest
    state = label("s", kind=Kind.STATE, parent=b.digest, tokens=b.tokens)
    lru = held(a, b, snapshot, state)
    lru.touch([snapshot, state])
    assert list(lru) == [state.key, snapshot.key, b.key, a.key]


def test_a_record_that_is_not_held_still_keeps_what_it_leans_on() -> None:
    """Its block lies in a faster tier, and will come down again."""
    labels, other = chain("a", 3), label("other")
    lru = held(*labels[:2], other)
    lru.touch([labels[2]])
    assert list(lru) == [other.key, labels[1].key, labels[0].key]


def test_labels_tell_what_a_scan_cannot_know() -> None:
    labels = chain("a", 3)
    lru: Lru[None] = Lru()
    for each in reversed(labels):
        lru.add(each.key, 10, None)
    lru.touch(labels)
    assert list(lru) == [each.key for each in reversed(labels)]


@given(st.data())
def test_no_block_is_older_than_what_leans_on_it(data: st.DataObject) -> None:
    """A tree of prompts, used in any order."""
    labels: list[Label] = []
    for nth in range(data.draw(st.integers(1, 20))):
        before = data.draw(st.sampled_from([None, *labels]))
        parent = ROOT if before is None else before.digest
        tokens = BLOCK_TOKENS + (0 if before is None else before.tokens)
        labels.append(label(("tree", nth), parent=parent, tokens=tokens))
    lru = held(*labels)
    lru.touch(labels)
    for _ in range(data.draw(st.integers(0, 5))):
        lru.touch(data.draw(st.lists(st.sampled_from(labels))))
    age = {key: nth for nth, key in enumerate(lru)}
    for each in labels:
        if each.leans_on in age:
            assert age[each.leans_on] > age[each.key]


# ---- units ---------------------------------------------------------------------------------------


def test_one_run_where_there_is_one_else_several() -> None:
    extents = Extents(10)
    first, second, third = (extents.take(3) for _ in range(3))
    assert (first, second, third) == ((Extent(0, 3),), (Extent(3, 3),), (Extent(6, 3),))
    assert first is not None
    assert third is not None
    extents.give(first)
    assert extents.take(2) == (Extent(0, 2),)  # the smallest hole that is large enough
    extents.give(third)
    assert extents.take(4) == (Extent(6, 4),)  # it has grown together with the last unit
    assert extents.take(1) == (Extent(2, 1),)
    assert extents.take(1) is None


def test_a_record_in_too_many_pieces_has_no_room() -> None:
    extents = Extents(4 * MOST_PIECES)
    taken = [extents.take(1) for _ in range(4 * MOST_PIECES)]
    for each in taken[::2]:
        assert each is not None
        extents.give(each)
    assert extents.free_units == 2 * MOST_PIECES
    assert extents.take(MOST_PIECES + 1) is None
    pieces = extents.take(MOST_PIECES)
    assert pieces is not None
    assert len(pieces) == MOST_PIECES
    assert extents.free_units == MOST_PIECES


@given(st.lists(st.integers(1, 12), max_size=60), st.randoms(use_true_random=False))
def test_no_unit_is_given_twice_and_none_is_lost(sizes: list[int], random) -> None:  # type: ignore[no-untyped-def]
    extents = Extents(40)
    live: list[tuple[Extent, ...]] = []
    for size in sizes:
        taken = extents.take(size)
        if taken is not None:
            assert sum(count for _, count in taken) == size
            live.append(taken)
        elif live:
            extents.give(live.pop(random.randrange(len(live))))
        used = [unit for each in live for first, n in each for unit in range(first, first + n)]
        assert len(used) == len(set(used)) == 40 - extents.free_units
        assert all(0 <= unit < 40 for unit in used)
    for each in live:
        extents.give(each)
    assert extents.take(40) == (Extent(0, 40),)

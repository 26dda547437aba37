"""Rows of the snapshot pool: each has one owner, and the least recently used one goes first."""

from __future__ import annotations

import random

import pytest

from dsv4.cache.prefix.eviction import LeastRecentlyUsed
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.rows import SnapshotRows
from dsv4.cache.recover import recover_rows
from dsv4.errors import Dsv4Error


class Blocks:
    """Some cached blocks, and how often memory was about to be used for something else."""

    def __init__(self, rows: int, blocks: int = 12) -> None:
        self.warnings = 0
        self.nodes = [PrefixNode(bytes([n]), n, None) for n in range(blocks)]
        self.policy = LeastRecentlyUsed()
        self.rows = SnapshotRows(rows, self.policy, self._warn)

    def _warn(self) -> None:
        self.warnings += 1

    def keep(self, block: int) -> int:
        row = self.rows.reserve()
        assert row is not None
        self.rows.attach(self.nodes[block], row)
        return row

    def kept(self) -> list[int]:
        return [node.block_id for node in self.nodes if node.snapshot is not None]

    def check(self, *reserved: int) -> None:
        self.rows.check_invariants(self.nodes, reserved)


def test_free_rows_go_first_and_then_the_least_recently_used():
    blocks = Blocks(3)
    assert [blocks.keep(n) for n in range(3)] == [0, 1, 2]
    assert blocks.warnings == 0
    blocks.policy.snapshot_used(blocks.nodes[0])
    assert blocks.keep(3) == 1
    assert blocks.kept() == [0, 2, 3]
    assert (blocks.warnings, blocks.rows.evictions, blocks.rows.used) == (1, 1, 3)
    blocks.check()


def test_what_a_pin_keeps_stays():
    blocks = Blocks(2)
    blocks.keep(0)
    blocks.keep(1)
    blocks.nodes[0].pins = 1
    assert blocks.keep(2) == 1
    blocks.nodes[2].pins = 1
    assert blocks.rows.reserve() is None
    assert blocks.rows.choose(1) == []
    assert blocks.rows.take_in_flight() is None
    assert blocks.kept() == [0, 2]


def test_no_rows_at_all():
    blocks = Blocks(0)
    assert blocks.rows.reserve() is None
    assert blocks.rows.choose(3) == []
    blocks.check()


def test_choosing_changes_nothing_and_what_was_chosen_is_what_is_reserved():
    blocks = Blocks(4)
    for n in range(3):
        blocks.keep(n)
    chosen = blocks.rows.choose(3)
    assert chosen == [3, 0, 1]
    assert blocks.kept() == [0, 1, 2]
    assert blocks.warnings == 0
    blocks.rows.reserve_chosen(chosen)
    assert blocks.kept() == [2]
    blocks.check(*chosen)
    for row in chosen:
        blocks.rows.give_back(row)
    blocks.check()


def test_a_row_in_flight_lands_or_comes_back():
    blocks = Blocks(2)
    first, second = blocks.rows.take_in_flight(), blocks.rows.take_in_flight()
    assert first is not None
    assert second is not None
    blocks.check()
    assert blocks.rows.reserve() is None  # nothing is there to be evicted
    blocks.rows.attach(blocks.nodes[5], first)
    blocks.rows.give_back(second)
    blocks.check()
    assert blocks.kept() == [5]


def test_a_lost_row_and_a_doubled_one_are_found():
    blocks = Blocks(2)
    row = blocks.rows.reserve()
    with pytest.raises(Dsv4Error, match="lost or doubled"):
        blocks.check()
    assert row is not None
    blocks.check(row)
    with pytest.raises(Dsv4Error, match="lost or doubled"):
        blocks.check(row, row)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_life_against_a_list(seed: int):
    """The model: nodes with a snapshot in the order of their last use, and how many rows others
    have."""
    draw = random.Random(seed)
    total = draw.randint(1, 6)
    blocks = Blocks(total)
    order: list[PrefixNode] = []
    reserved: list[int] = []
    for _ in range(300):
        node = draw.choice(blocks.nodes)
        dice = draw.random()
        if dice < 0.4:
            victim = next((each for each in order if not each.pins), None)
            full = len(order) + len(reserved) == total
            row = blocks.rows.take_in_flight() if draw.random() < 0.3 else blocks.rows.reserve()
            if row is None:
                assert full
                assert victim is None
                continue
            if full:
                assert victim is not None
                assert victim.snapshot is None
                order.remove(victim)
            reserved.append(row)
        elif dice < 0.6 and reserved:
            row = reserved.pop()
            if node.snapshot is None:
                blocks.rows.attach(node, row)
                order.append(node)
            else:
                blocks.rows.give_back(row)
        elif dice < 0.75 and node in order:
            if node.snapshot is not None:
                blocks.policy.snapshot_used(node)
            order.remove(node)
            order.append(node)
        elif dice < 0.8 and node in order:
            blocks.rows.drop(node)
            order.remove(node)
        elif dice < 0.9:
            node.pins = 1 - node.pins
        else:
            count = draw.randint(0, total)
            free = total - len(order) - len(reserved)
            rows = [each.snapshot for each in order if not each.pins]
            expected = rows[: max(0, count - free)]
            chosen = blocks.rows.choose(count)
            assert chosen[min(count, free) :] == expected
            if draw.random() < 0.5:
                blocks.rows.reserve_chosen(chosen)
                order = [each for each in order if each.snapshot is not None]
                reserved += chosen
        if (
            draw.random() < 0.05
        ):  # an interrupt: what was in flight or reserved for a commit is free
            recover_rows(blocks.rows, blocks.nodes, [])
            reserved = []
        assert order == list(blocks.policy.snapshots())
        in_flight = blocks.rows._in_flight
        blocks.check(*(row for row in reserved if row not in in_flight))

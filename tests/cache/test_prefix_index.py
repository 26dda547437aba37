"""The tree of cached prefixes: digests, what is evicted first, what never is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.trail import TokenTrail, chain_root, token_ids
from dsv4.errors import InvalidInput

ROOT = chain_root(fingerprint="f", model_id="m", salt=None)
BLOCK = 4


def trail(*tokens: int, root: bytes = ROOT) -> TokenTrail:
    return TokenTrail(root, BLOCK, token_ids(list(tokens)))


def can_evict(tree: Tree, count: int) -> bool:
    victims = tree.index.choose(count)
    tree.index.spare(victims)
    return len(victims) == count


class Tree:
    """An index over a pool, filled by hand: nodes have names, requests are lists of them."""

    def __init__(self, total: int = 10) -> None:
        self.allocator = BlockAllocator(total)
        self.index = PrefixIndex(self.allocator)
        self.nodes: dict[str, PrefixNode] = {}

    def add(self, name: str, parent: str | None = None, *, held: bool = False) -> None:
        (block,) = self.allocator.take(1)
        above = None if parent is None else self.nodes[parent]
        self.nodes[name] = self.index.add(name.encode(), block, above)
        if not held:
            self.allocator.release([block])

    def evict(self, count: int, **options: bool) -> list[str]:
        victims = self.index.choose(count, **options)
        assert all(self.index.get(node.digest) is node for node in victims)  # cached until dropped
        self.index.drop(victims)
        self.index.check_invariants()
        self.allocator.check_invariants()
        return [node.digest.decode() for node in victims]


# ---- digests ----------------------------------------------------------------------------------


def test_a_digest_depends_on_every_token_up_to_the_end_of_its_block():
    base = trail(*range(12))
    for nth in range(12):
        tokens = list(range(12))
        tokens[nth] += 1
        other = trail(*tokens)
        for block in range(3):
            assert (other.digest(block) == base.digest(block)) == ((block + 1) * BLOCK <= nth)


def test_tokens_are_not_confused_with_their_order_or_width():
    digests = {
        trail(*tokens).digest(0)
        for tokens in ((1, 2, 3, 4), (4, 3, 2, 1), (1, 2, 3, 4 << 8), (0, 0, 0, 0), (1, 0, 2, 0))
    }
    assert len(digests) == 5


def test_roots_separate_layouts_models_and_salts():
    names = ("", "a", "ab", "b")
    roots = {
        chain_root(fingerprint=f, model_id=m, salt=s)
        for f in names
        for m in names
        for s in (None, *names)
    }
    assert len(roots) == 4 * 4 * 5


def test_growing_a_trail_equals_making_it_at_once():
    whole = trail(*range(20))
    grown = trail(*range(5))
    for at in range(5, 20, 3):
        grown.learn(at, token_ids(list(range(at, min(20, at + 3)))))
        grown.digest(len(grown.ids) // BLOCK - 1)
    assert grown.ids.tolist() == whole.ids.tolist()
    assert [grown.digest(b) for b in range(5)] == [whole.digest(b) for b in range(5)]
    twin = grown.copy()
    grown.cut(9)
    grown.learn(9, token_ids([99, 99, 99]))
    assert grown.digest(1) == whole.digest(1)
    assert grown.digest(2) != whole.digest(2)
    assert twin.digest(4) == whole.digest(4)


def test_the_callers_array_is_neither_kept_nor_written():
    mine = np.arange(8, dtype=np.int32)
    grown = TokenTrail(ROOT, BLOCK, token_ids(mine))
    before = grown.digest(0)
    mine[:] = 7
    assert grown.ids.tolist() == list(range(8))
    grown.cut(2)
    grown.learn(2, token_ids([5, 5, 5]))
    assert mine.tolist() == [7] * 8
    assert grown.digest(0) != before


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**31], [1.5], [[1, 2]], ["a"], None, [[1], [2, 3]], [None], np.array([1.0])],
)
def test_ids_that_are_none(tokens: object):
    with pytest.raises(InvalidInput):
        token_ids(tokens)


# ---- eviction ----------------------------------------------------------------------------------


def test_leaves_go_first_and_then_their_parents():
    tree = Tree()
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("x", None), ("y", "x")):
        tree.add(name, parent)
    assert tree.evict(3) == ["c", "b", "a"]  # the whole older branch before the newer one
    assert tree.evict(2) == ["y", "x"]
    assert tree.allocator.free == 10


def test_a_use_saves_a_branch_with_all_before_it():
    tree = Tree()
    for name, parent in (("a", None), ("b", "a"), ("x", None), ("y", "x")):
        tree.add(name, parent)
    tree.index.touch(tree.nodes["b"])
    assert tree.evict(4) == ["y", "x", "b", "a"]


def test_a_use_of_the_middle_does_not_save_the_end():
    tree = Tree()
    for name, parent in (("a", None), ("b", "a"), ("x", None)):
        tree.add(name, parent)
    tree.index.touch(tree.nodes["a"])
    assert tree.evict(3) == ["b", "x", "a"]


def test_what_a_request_holds_or_a_pin_marks_stays_with_all_before_it():
    tree = Tree()
    for name, parent in (("a", None), ("b", "a"), ("c", "b")):
        tree.add(name, parent)
    tree.add("held", "c", held=True)
    for name, parent in (("p", None), ("q", "p")):
        tree.add(name, parent)
    tree.nodes["q"].pins = 1
    assert tree.allocator.idle == 5
    assert tree.evict(1) == []
    assert not can_evict(tree, 1)
    tree.nodes["q"].pins = 0
    assert can_evict(tree, 2)
    assert not can_evict(tree, 3)
    assert tree.evict(3) == []
    assert tree.evict(3, or_fewer=True) == ["q", "p"]
    tree.allocator.release([tree.nodes["held"].block_id])
    assert tree.evict(4) == ["held", "c", "b", "a"]


def test_random_trees_lose_the_least_recently_used_leaf():
    """Against a model that looks at every node each time."""
    rng = random.Random(3)
    for _ in range(60):
        tree = Tree(60)
        stamps: dict[str, int] = {}
        parents: dict[str, str | None] = {}
        for clock in range(120):
            dice = rng.random()
            if dice < 0.5 and tree.allocator.free:
                name = str(clock)
                parents[name] = rng.choice([None, *stamps])
                tree.add(name, parents[name], held=False)
                stamps[name] = clock
            elif dice < 0.75 and stamps:
                name = rng.choice(list(stamps))
                tree.index.touch(tree.nodes[name])
                stamps[name] = clock
            elif stamps:
                leaves = [n for n in stamps if n not in {parents[m] for m in stamps}]
                victim = min(leaves, key=stamps.__getitem__)
                assert tree.evict(1) == [victim]
                parent = parents[victim]
                if parent is not None:  # a use of the child was one of the parent
                    stamps[parent] = max(stamps[parent], stamps[victim])
                del stamps[victim]


def test_evicted_digests_are_remembered_for_a_while():
    tree = Tree(total=2)
    for name in ("a", "b"):
        tree.add(name)
    tree.evict(2)
    assert tree.index.was_evicted(b"a")
    assert not tree.index.was_evicted(b"c")
    for name in ("c", "d", "e"):
        tree.add(name)
        tree.evict(1)
    assert not tree.index.was_evicted(b"a")
    tree.add("e")
    assert not tree.index.was_evicted(b"e")

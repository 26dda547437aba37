"""The library of routers: names as events say them, the index against sets, what is chosen."""

from __future__ import annotations

import pickle
import random

import pytest

from dsv4.cache.prefix.options import PrefixOptions
from dsv4.errors import InvalidInput
from dsv4.events.ledger import Cached, Ledger
from dsv4.events.wire import BlockStored
from dsv4.routing.names import Naming
from dsv4.routing.router import NoReplica, Router, Routing, RoutingCosts
from dsv4.routing.where import Where
from tests.events.lives import BLOCK, SCHEMA, make

MEDIA = ("GPU", "CPU", "STORAGE")


@pytest.mark.parametrize("key", [None, bytes(range(32))])
def test_names_are_those_of_events(key: bytes | None):
    options = PrefixOptions(model_id="m", key=key)
    naming = Naming(
        fingerprint=SCHEMA.content_fingerprint, model_id="m", block_tokens=BLOCK, key=key
    )
    ids, salt = [n % 100 for n in range(3 * BLOCK + 5)], "a tenant"
    trail = make(prefix=options).prefix.prompt(ids, salt).trail
    assert trail is not None
    note = Cached(trail.chain, None, 0, trail.ids.tobytes(), salt, None)
    (event,) = Ledger(BLOCK).read([note])
    assert isinstance(event, BlockStored)
    assert naming.names(ids, salt) == event.block_hashes
    assert naming.names(ids) != event.block_hashes  # without the salt
    assert pickle.loads(pickle.dumps(naming)).names(ids, salt) == event.block_hashes
    assert "0x" not in repr(naming)
    assert key is None or str(key) not in repr(naming)


class Sets:
    """What `Where` is, written as sets."""

    def __init__(self) -> None:
        self.media: dict[str, dict[str, set[int]]] = {}

    def find(self, names: list[int]) -> dict[str, tuple[int, ...]]:
        found = {}
        for replica, media in self.media.items():
            counts = [0, 0, 0]
            for name in names:
                where = [nth for nth, medium in enumerate(MEDIA) if name in media[medium]]
                if not where:
                    break
                counts[where[0]] += 1
            if any(counts):
                found[replica] = tuple(counts)
        return found


@pytest.mark.parametrize("seed", range(4))
def test_the_index_is_what_events_said(seed: int):
    draw, where, sets = random.Random(seed), Where[str](10_000), Sets()
    for _ in range(3000):
        replica, act = draw.choice("abcd"), draw.random()
        if replica not in sets.media or act < 0.01:
            where.add(replica)
            sets.media[replica] = {medium: set() for medium in MEDIA}
        medium = draw.choice(MEDIA)
        names = draw.sample(range(40), draw.randrange(6))
        if act < 0.02:
            where.remove(replica)
            del sets.media[replica]
        elif act < 0.03:
            where.clear(replica)
            sets.media[replica] = {medium: set() for medium in MEDIA}
        elif act < 0.6:
            where.store(replica, names, medium)
            sets.media[replica][medium].update(names)
        else:
            where.drop(replica, names, medium)
            sets.media[replica][medium].difference_update(names)
        asked = draw.sample(range(40), 8)
        assert where.find(asked) == sets.find(asked)
        for each, media in sets.media.items():
            assert where.blocks(each) == len(set().union(*media.values()))
        every = [media for each in sets.media.values() for media in each.values()]
        assert len(where) == len(set().union(*every))


def test_what_was_not_used_for_the_longest_is_forgotten_the_end_of_a_prompt_first():
    where = Where[str](6)
    where.add("a")
    where.store("a", [1, 2, 3])
    where.store("a", [4, 5, 6])
    where.find([1, 2, 3])
    where.store("a", [7, 8])
    assert where.find([4, 5, 6]) == {}
    assert where.find([1, 2, 3]) == {"a": (3, 0, 0)}
    where.store("a", [9, 10, 11, 12])  # 6, 7, 8 and 3 go
    assert where.find([1, 2, 3]) == {"a": (2, 0, 0)}
    assert where.blocks("a") == len(where) == 6


def test_the_longest_prefix_is_chosen_unless_its_replica_is_busier_than_it_saves():
    router = Router("ab", block_tokens=128)
    router.stored("b", [1, 2, 3])
    assert router.choose([1, 2, 3, 4]).replica == "b"
    assert router.choose([1, 2, 3, 4]).blocks == (3, 0, 0)
    assert router.choose([1, 2, 3, 4], None, {"b": 383}).replica == "b"
    assert router.choose([1, 2, 3, 4], None, {"b": 385}).replica == "a"
    assert router.choose([9], None, {"a": 1}).replica == "b"


def test_the_device_is_cheaper_than_host_memory_and_that_than_storage_and_computing():
    router = Router("abcd", costs=RoutingCosts(host=0.1, storage=0.5))
    router.stored("a", [1, 2], "STORAGE")
    assert router.choose([1, 2]).replica == "a"
    router.stored("b", [1, 2], "CPU")
    assert router.choose([1, 2]).replica == "b"
    router.stored("c", [1, 2], "GPU")
    assert router.choose([1, 2]).replica == "c"
    router.removed("c", [2], "GPU")
    assert router.choose([1, 2]).replica == "b"  # 25.6 against 128
    router.cleared("b")
    router.remove("c")
    assert router.choose([1, 2]).replica == "a"
    assert router.choose([1, 2]).blocks == (0, 0, 2)


def test_a_session_stays_until_another_replica_is_much_cheaper():
    router = Router("ab", costs=RoutingCosts(stay_tokens=100))
    assert not router.choose([1], "chat", {"a": 1}).stayed
    choice = router.choose([1, 2], "chat", {"b": 100})
    assert (choice.replica, choice.stayed) == ("b", True)
    choice = router.choose([1, 2], "chat", {"b": 101})
    assert (choice.replica, choice.stayed) == ("a", False)
    assert router.choose([1, 2], "chat", {"b": 0, "a": 50}).replica == "a"
    router.remove("a")
    assert router.choose([1, 2], "chat").replica == "b"


def test_sticky_and_round_robin_ask_for_no_blocks():
    sticky = Router("ab", routing="sticky")
    sticky.stored("b", [1, 2, 3])
    assert sticky.choose([1, 2, 3]).replica == "a"  # it has fewer
    assert sticky.choose([1], "chat", {"a": 9}).replica == "b"
    assert sticky.choose([1], "chat", {"b": 1e9}).replica == "b"
    turns = Router("abc", routing="round-robin")
    assert "".join(turns.choose([1], "chat").replica for _ in range(5)) == "abcab"


def test_without_a_match_the_replica_with_fewer_blocks_is_chosen_of_equally_busy_ones():
    router = Router("abc")
    router.stored("a", [1, 2])
    router.stored("b", [3])
    assert router.choose([9]).replica == "c"


@pytest.mark.parametrize("routing", ["prefix", "sticky", "round-robin"])
def test_a_replica_to_avoid_is_chosen_only_where_there_is_no_other(routing: Routing):
    router = Router("ab", routing=routing)
    router.stored("a", [1, 2, 3])
    assert router.choose([1, 2, 3], "chat", {"b": 1}).replica == "a"
    avoided = [router.choose([1, 2, 3], "chat", {"b": 1}, avoid="a") for _ in range(3)]
    assert [each.replica for each in avoided] == ["b", "b", "b"]
    assert avoided[0].blocks == (0, 0, 0)
    assert router.choose([1, 2, 3], None, avoid="ab").replica in "ab"


def test_what_cannot_be_is_refused():
    with pytest.raises(NoReplica, match="add one"):
        Router[str]().choose([1])
    with pytest.raises(InvalidInput, match="add it first"):
        Router("a").stored("b", [1])
    with pytest.raises(InvalidInput, match="'GPU'"):
        Router("a").stored("a", [1], "TAPE")
    with pytest.raises(InvalidInput, match="round-robin"):
        Router("a", routing="random")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="host=-1"):
        RoutingCosts(host=-1)

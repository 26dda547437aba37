"""What a consumer learns from events is what is cached: after random lives, evictions, tiers, lost
messages, restarts. The consumer is written from the format alone."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from dsv4 import EventPublisher, InvalidInput, KVCacheManager, OutOfBlocks
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.options import PrefixOptions, zero
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.events import ledger, sender
from dsv4.routing.names import block_hash
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Kind
from tests.events.consumer import TIMEOUT_S, Consumer, Decoder, Reader, decode
from tests.events.lives import BLOCK, SCHEMA, Asked, Lives, cached, make
from tests.support.tiers import PATIENT

ANY = "tcp://127.0.0.1:*"
IDS = list(range(4 * BLOCK + 5))


@pytest.fixture
def ends() -> Iterator[list[Callable[[], object]]]:
    """What a test has opened is closed."""
    calls: list[Callable[[], object]] = []
    yield calls
    for call in reversed(calls):
        call()


@pytest.fixture
def publish(ends: list[Any]) -> Callable[..., EventPublisher]:
    def make_one(manager: KVCacheManager, endpoint: str = ANY, **more: Any) -> EventPublisher:
        publisher = EventPublisher(manager, endpoint, **{"replay": ANY, **more})
        ends.append(lambda: publisher.close(TIMEOUT_S))
        return publisher

    return make_one


@pytest.fixture
def subscribe(ends: list[Any]) -> Callable[..., Reader]:
    def make_one(publisher: EventPublisher, **more: Any) -> Reader:
        replay = more.pop("replay", publisher.replay_endpoint)
        reader = Reader(publisher.endpoint, replay, BLOCK, **more)
        ends.append(reader.close)
        assert reader.read_one()  # subscribed, and up to date
        return reader

    return make_one


def assert_knows(
    known: Consumer, manager: KVCacheManager, asked: list[Asked], *tiers: Any
) -> list[int]:
    """The same number of blocks for every prompt; returns them."""
    assert known.trouble == []
    media = ["GPU", *("CPU" if isinstance(each, HostTier) else "STORAGE" for each in tiers)]
    found = []
    for ids, salt in asked:
        ours = cached(manager, (ids, salt), tiers=tiers)
        assert known.blocks(ids, media[:1], salt) == ours[0]
        assert known.blocks(ids, media, salt) == ours[-1]
        found.append(ours[-1])
    return found


# ---- the format ----------------------------------------------------------------------------------


def test_a_batch_has_the_fields_of_the_format_and_no_others(publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager, topic="kv@pod@model", data_parallel_rank=None)
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"kv@pod")
    sub.connect(publisher.endpoint)
    assert sub.poll(TIMEOUT_S * 1000)
    first = sub.recv_multipart()
    assert first[0] == b"kv@pod@model"
    assert decode(first[2])[1:] == [[], None]
    lives = Lives(manager, 1)
    lives.run((IDS, "salt"))
    found: list[Any] = []
    numbers = [int.from_bytes(first[1], "big")]
    while sum(len(event["block_hashes"]) for event in found) < 4:
        assert sub.poll(TIMEOUT_S * 1000)
        _, seq, payload = sub.recv_multipart()
        assert len(seq) == 8
        numbers.append(int.from_bytes(seq, "big"))
        found += decode(payload)[1]
    context.destroy(linger=0)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    before, tokens = None, []
    for event in found:
        count = len(event["block_hashes"])
        assert event == {
            "type": "BlockStored",
            "block_hashes": event["block_hashes"],
            "parent_block_hash": before,
            "token_ids": event["token_ids"],
            "block_size": 128,
            "medium": "GPU",
            "extra_keys": [["salt"]] * count,
            "cache_salt": "salt",
        }
        assert all(0 <= each < 1 << 63 for each in event["block_hashes"])
        before = event["block_hashes"][-1]
        tokens += event["token_ids"]
    assert tokens == IDS[: 4 * BLOCK]


def test_the_decoder_of_these_tests_reads_what_the_format_knows() -> None:
    assert decode(b"\x93\xcb\x3f\xf8" + bytes(6) + b"\x90\xc0") == [1.5, [], None]
    assert decode(b"\x84\xa1a\x01\xa1b\xcc\xc8\xa1c\xd0\x80\xa1d\xc3") == {
        **{"a": 1, "b": 200},
        **{"c": -128, "d": True},
    }
    assert decode(b"\xdc\x00\x01\xdf\x00\x00\x00\x01\xd9\x01x\xc4\x02\x00\x01") == [{"x": b"\0\1"}]
    with pytest.raises(AssertionError):
        decode(b"\x01\x02")
    assert Decoder(b"\xcf" + b"\xff" * 8).value() == (1 << 64) - 1


# ---- random lives --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_consumer_knows_what_is_cached_after_any_life(
    seed: int, publish: Any, subscribe: Any
) -> None:
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, seed)
    for _ in range(6):
        lives.some(10)
        found = assert_knows(reader.catch_up(publisher), manager, lives.questions(100))
        assert max(found) >= 3
    manager.prefix.evict()
    known = reader.catch_up(publisher)
    assert known.media == {"GPU": set()}
    assert publisher.stats().blocks == 0
    assert reader.known.gaps == 1  # when it came


@pytest.mark.parametrize("which", ["host", "disk", "host and disk"])
def test_tiers_are_media_of_their_own(
    which: str, tmp_path: Path, publish: Any, subscribe: Any, ends: list[Any]
) -> None:
    room = 12 * SCHEMA.bytes.block
    tiers: list[Any] = []
    if "host" in which:
        tiers.append(HostTier(room, limits=PATIENT))
    if "disk" in which:
        tiers.append(DiskTier(tmp_path / "tier", 3 * room, limits=PATIENT))
    ends += [lambda tier=tier: tier.close(TIMEOUT_S) for tier in tiers]
    manager = make(num_blocks=16, tiers=tiers)
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 3)
    reached = 0
    for _ in range(4):
        lives.some(8)
        found = assert_knows(reader.catch_up(publisher), manager, lives.questions(60), *tiers)
        reached = max(reached, *found)
        manager.prefix.evict()
        known = reader.catch_up(publisher)
        assert not known.media["GPU"]
        assert_knows(known, manager, lives.questions(60), *tiers)
    assert reached >= 4
    assert all(known.media["CPU" if isinstance(t, HostTier) else "STORAGE"] for t in tiers)
    assert len(known.media.get("CPU", ())) <= 12


@pytest.mark.parametrize("with_tier", [False, True])
def test_entries_that_left_the_device_are_in_host_memory_too(
    with_tier: bool, publish: Any, subscribe: Any, ends: list[Any]
) -> None:
    """A hit needs no copy: the block stays on GPU, and is on CPU at once if a tier has it too."""
    apart = replace(SCHEMA, entries_apart=True)
    tier = HostTier(5 * (apart.bytes.block + 8192), limits=PATIENT)
    ends.append(lambda: tier.close(TIMEOUT_S))
    manager = KVCacheManager(
        apart,
        num_blocks=24,
        max_requests=4,
        max_step_tokens=512,
        backend="reference",
        host_memory=24 * apart.bytes.entries,
        tiers=[tier] if with_tier else [],
        prefix=PrefixOptions(policy=zero(), model_id="tiny 1"),
    )
    residency = manager._parts.residency
    assert residency is not None
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 8)
    away = tiered = 0
    for nth in range(6):
        lives.some(4)
        if nth == 3:
            manager.recover()
        known = reader.catch_up(publisher)
        assert known.trouble == []
        assert manager._parts.prefix
        nodes = list(manager._parts.prefix.index.nodes())
        on_host = {node.digest for node in nodes if residency.places.is_away(node.block_id)}
        away += len(on_host)
        keys = [key.digest for key in tier._rows if key.kind is Kind.BLOCK]
        tiered += len(keys)
        assert known.media["GPU"] == {block_hash(node.digest) for node in nodes}
        assert known.media.get("CPU", set()) == {block_hash(d) for d in on_host.union(keys)}
        late = subscribe(publisher).catch_up(publisher)  # and for who comes late
        assert late.media == known.media
    assert away > 10
    assert (tiered > 10) == with_tier
    manager.prefix.evict()
    known = reader.catch_up(publisher)
    assert not known.media["GPU"]
    assert known.media["CPU"] == {
        block_hash(key.digest) for key in tier._rows if key.kind is Kind.BLOCK
    }


# ---- what is missed ------------------------------------------------------------------------------


def test_who_comes_late_asks_for_the_beginning(publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager)
    lives = Lives(manager, 4)
    lives.some(10)
    reader = subscribe(publisher)
    assert_knows(reader.catch_up(publisher), manager, lives.questions(50))
    assert publisher.stats().replays == 1
    assert publisher.stats().snapshots == 0


def test_what_is_not_kept_any_more_comes_as_everything_that_is_cached(
    publish: Any, subscribe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "SNAPSHOT_BLOCKS", 3)
    manager = make()
    publisher = publish(manager, buffer_batches=2)
    lives = Lives(manager, 5)
    lives.some(20)
    reader = subscribe(publisher)
    found = assert_knows(reader.catch_up(publisher), manager, lives.questions(50))
    assert max(found) >= 3
    assert publisher.stats().snapshots == 1
    lives.some(5)
    assert_knows(reader.catch_up(publisher), manager, lives.questions(50))
    # and what is asked for again is the same
    before = {medium: set(blocks) for medium, blocks in reader.known.media.items()}
    assert reader.replay(0) >= 2
    assert reader.known.media == before


def test_lost_messages_are_replayed(publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 6)
    for _ in range(5):
        lives.some(3)
        reader.catch_up(publisher)
        lives.some(3)
        while not reader.sub.poll(100):
            manager.prefix.evict(1)
        reader.sub.recv_multipart()  # lost
        manager.prefix.evict(1)
        assert_knows(reader.catch_up(publisher), manager, lives.questions(20))
    assert reader.known.gaps == 6


def test_a_restart_is_a_new_epoch_that_consumers_survive(publish: Any, subscribe: Any) -> None:
    first = make()
    publisher = publish(first)
    reader = subscribe(publisher)
    lives = Lives(first, 7)
    lives.some(10)
    reader.catch_up(publisher)
    place, replay, epoch = publisher.endpoint, publisher.replay_endpoint, publisher.epoch
    last = epoch + publisher.stats().batches
    publisher.close(TIMEOUT_S)
    second = make()
    publisher = publish(second, place, replay=replay)
    assert publisher.epoch > last
    lives = Lives(second, 8)
    lives.some(5)
    found = assert_knows(reader.catch_up(publisher), second, lives.questions(50))
    assert max(found) >= 2
    assert reader.known.clears >= 2


def test_a_process_that_ended_without_a_word_leaves_nothing(publish: Any, subscribe: Any) -> None:
    """Its last messages were lost with it."""
    first = make()
    publisher = publish(first)
    reader = subscribe(publisher)
    Lives(first, 9).some(10)
    assert reader.catch_up(publisher).media["GPU"]
    place, replay = publisher.endpoint, publisher.replay_endpoint
    publisher._sender._ledger.clear = lambda: []
    publisher.close(TIMEOUT_S)
    second = make()
    publisher = publish(second, place, replay=replay)
    assert not reader.catch_up(publisher).media.get("GPU")


# ---- no step waits -------------------------------------------------------------------------------


def test_a_consumer_that_reads_nothing_delays_no_step(publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager, buffer_batches=4)
    reader = subscribe(publisher, RCVHWM=1, RCVBUF=4096)
    lives = Lives(manager, 10)
    lives.some(60)  # with nothing read
    until = time.monotonic() + TIMEOUT_S
    while publisher.stats().waiting:
        assert time.monotonic() < until
    assert publisher.stats().notes_dropped == 0
    assert_knows(reader.catch_up(publisher), manager, lives.questions(50))


def test_a_salt_that_no_message_can_have_is_not_announced(publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 20)
    lives.run((IDS, "\ud800"))
    lives.run((IDS[::-1], "mine"))
    known = reader.catch_up(publisher)
    assert known.blocks(IDS[::-1], ["GPU"], "mine") == len(known.media["GPU"]) == 4
    assert publisher.stats().notes_dropped == 0


def test_notes_that_could_not_be_sent_are_lost_and_consumers_forget(
    publish: Any, subscribe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 21)
    lives.run((IDS, None))
    assert reader.catch_up(publisher).blocks(IDS, ["GPU"]) == 4
    real, failed = sender.pack, list[int]()

    def fails_once(*given: Any) -> bytes:
        if not failed:
            failed.append(1)
            raise UnicodeEncodeError("utf-8", "", 0, 1, "a bug")
        return real(*given)

    monkeypatch.setattr(sender, "pack", fails_once)
    lives.run((IDS[::-1], None))
    known = reader.catch_up(publisher)
    assert (publisher.stats().resets, publisher.stats().notes_dropped > 0) == (1, True)
    assert not known.media.get("GPU")
    lives.run((IDS, None))
    known = reader.catch_up(publisher)
    assert known.blocks(IDS, ["GPU"]) == 4
    assert known.trouble == []


def test_too_many_notes_are_dropped_and_consumers_forget(
    publish: Any, subscribe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = sender.Sender._send_notes
    manager = make()
    publisher = publish(manager, most_waiting=5)
    reader = subscribe(publisher)
    lives = Lives(manager, 11)

    def stuck(self: sender.Sender) -> bool:
        assert gate.wait(TIMEOUT_S)
        return real(self)

    monkeypatch.setattr(sender.Sender, "_send_notes", stuck)
    lives.run((IDS, None))
    lives.run((list(range(1, 900)), None))
    lives.run((list(range(2, 900)), None))
    assert publisher.stats().notes_dropped > 0
    gate.set()
    known = reader.catch_up(publisher)
    assert publisher.stats().resets == 1
    assert not known.media.get("GPU")
    # less than there is, never more; and what is used is known again
    assert cached(manager, (IDS, None)) == [4]
    lives.run((IDS, None))
    known = reader.catch_up(publisher)
    assert known.blocks(IDS, ["GPU"]) == 4
    assert known.trouble == []
    lives.some(5)
    known = reader.catch_up(publisher)
    for ids, salt in lives.questions(50):
        assert known.blocks(ids, ["GPU"], salt) <= cached(manager, (ids, salt))[0]
    assert known.trouble == []


def test_replays_are_bounded_too(publish: Any, subscribe: Any) -> None:
    """A reader that asks and asks and reads nothing costs a buffer, and no thread."""
    manager = make()
    publisher = publish(manager, buffer_batches=8)
    reader = subscribe(publisher)
    lives = Lives(manager, 12)
    lives.some(10)
    context = zmq.Context()
    greedy = context.socket(zmq.DEALER)
    greedy.set(zmq.RCVHWM, 1)
    greedy.set(zmq.RCVBUF, 4096)
    greedy.connect(publisher.replay_endpoint)
    asked = 4000
    for _ in range(asked):
        greedy.send_multipart([b"", bytes(8)])
    until = time.monotonic() + TIMEOUT_S
    while publisher.stats().replays < asked:
        assert time.monotonic() < until, publisher.stats()
        time.sleep(0.01)
    assert publisher.stats().replays_cut > 0
    assert_knows(reader.catch_up(publisher), manager, lives.questions(20))
    context.destroy(linger=0)


# ---- crafted requests ----------------------------------------------------------------------------


def crafted(draw: random.Random) -> list[bytes]:
    """Frames that are no request, or one for any number."""
    kind = draw.randrange(6)
    some = draw.randbytes(draw.randrange(0, 40))
    if kind == 0:
        return [b"", draw.randbytes(8)]
    if kind == 1:
        return [some]
    if kind == 2:
        return [b"", some]
    if kind == 3:
        return [some, draw.randbytes(8)]
    if kind == 4:
        return [draw.randbytes(5) for _ in range(draw.randrange(1, 6))]
    return [b"", b"\xff" * 8]


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_crafted_requests_change_nothing(count: int, publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager, buffer_batches=4)
    reader = subscribe(publisher)
    lives = Lives(manager, 13)
    lives.some(5)
    draw = random.Random(1)
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(publisher.replay_endpoint)
    upstream = context.socket(zmq.XSUB)
    upstream.connect(publisher.endpoint)
    sent = 0
    for nth in range(count):
        frames = crafted(draw)
        sent += 1
        peer.send_multipart(frames)
        if nth % 7 == 0:
            upstream.send_multipart([draw.randbytes(9), draw.randbytes(2)])
            upstream.send(b"\x01" + draw.randbytes(4))
        while peer.poll(0):
            peer.recv_multipart()
    until = time.monotonic() + TIMEOUT_S
    while (stats := publisher.stats()).replays + stats.replays_refused < sent:
        assert time.monotonic() < until, stats
        while peer.poll(10):
            peer.recv_multipart()
    assert stats.replays_refused > 0
    giant = context.socket(zmq.DEALER)
    giant.connect(publisher.replay_endpoint)
    giant.send_multipart([b"", bytes(1 << 20)])  # its connection ends
    context.destroy(linger=0)
    lives.some(5)
    assert_knows(reader.catch_up(publisher), manager, lives.questions(50))


# ---- whose blocks --------------------------------------------------------------------------------


def test_equal_prompts_with_different_salts_are_different(publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 14)
    lives.run((IDS, "mine"))
    known = reader.catch_up(publisher)
    assert [known.blocks(IDS, ["GPU"], salt) for salt in ("mine", None, "yours")] == [4, 0, 0]
    lives.run((IDS, None))
    known = reader.catch_up(publisher)
    assert [known.blocks(IDS, ["GPU"], salt) for salt in ("mine", None, "yours")] == [4, 4, 0]


def test_a_session_is_named(publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 18)
    lives.run((IDS, None), hints=Hints(session="a conversation"))
    lives.run((IDS[::-1], None))
    known = reader.catch_up(publisher)
    assert known.blocks(IDS, ["GPU"]) == known.blocks(IDS[::-1], ["GPU"]) == 4
    assert sorted(map(str, known.sessions.values())) == 4 * ["None"] + 4 * ["a conversation"]


def test_a_salt_that_is_not_known_here_is_not_taken_for_none(publish: Any, subscribe: Any) -> None:
    """As of a prompt that came from another machine, with the root alone."""
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    trail = manager.prefix.prompt(IDS, "a salt").trail
    assert trail is not None
    assert manager._parts.prefix
    foreign = TokenTrail(trail.root, BLOCK, trail.ids)
    foreign.hash_blocks(4)
    manager._parts.prefix.notices.landed(PrefixNode(foreign.digest(0), 0, None), foreign)
    manager._parts.prefix.notices.landed(PrefixNode(trail.digest(0), 0, None), trail)
    known = reader.catch_up(publisher)
    assert [known.blocks(IDS, ["GPU"], salt) for salt in (None, "a salt")] == [0, 1]


def test_blocks_that_were_cached_before_are_announced_when_used(
    publish: Any, subscribe: Any
) -> None:
    manager = make()
    lives = Lives(manager, 15)
    lives.run((IDS, None))
    publisher = publish(manager)
    reader = subscribe(publisher)
    assert reader.catch_up(publisher).blocks(IDS, ["GPU"]) == 0
    lives.run((IDS, None))
    assert reader.catch_up(publisher).blocks(IDS, ["GPU"]) == 4
    manager.prefix.evict()
    known = reader.catch_up(publisher)
    assert known.media == {"GPU": set()}
    assert known.trouble == []


def test_an_interrupt_leaves_no_block_that_is_not_cached(
    publish: Any, subscribe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 16)
    lives.run((IDS, None))
    assert manager._parts.prefix
    notices = manager._parts.prefix.notices

    def interrupted(victims: object, cause: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(notices, "evicted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.prefix.evict(2)
    manager.recover()
    known = reader.catch_up(publisher)
    assert cached(manager, (IDS, None)) == [2]
    assert known.blocks(IDS, ["GPU"]) == 2
    assert known.trouble == []


# ---- beginning and end ---------------------------------------------------------------------------


def test_refusals_say_what_to_give_and_change_nothing(publish: Any) -> None:
    manager = make()
    for arguments, words in (
        ({"endpoint": 5557}, "give an address to bind"),
        ({"endpoint": "127.0.0.1:5557"}, "give an address to bind"),
        ({"endpoint": "tcp://256.0.0.1:1"}, "cannot be bound"),
        ({"endpoint": ANY, "replay": "tcp://"}, "replay='tcp://'"),
        ({"endpoint": ANY, "topic": b"kv"}, "topic is bytes"),
        ({"endpoint": ANY, "topic": "x" * 300}, "at most 255"),
        ({"endpoint": ANY, "data_parallel_rank": -1}, "data_parallel_rank=-1"),
        ({"endpoint": "tcp://127.0.0.1:65535", "data_parallel_rank": 1}, "65536"),
        ({"endpoint": ANY, "buffer_batches": 0}, "buffer_batches=0"),
        ({"endpoint": ANY, "buffer_bytes": 0.5}, "buffer_bytes=0.5"),
        ({"endpoint": ANY, "most_waiting": None}, "most_waiting=None"),
    ):
        threads = set(threading.enumerate())
        with pytest.raises(InvalidInput, match=words):
            EventPublisher(manager, **arguments)
        assert set(threading.enumerate()) <= threads
    with pytest.raises(InvalidInput, match="prefix="):
        EventPublisher(make(prefix=None), ANY)
    publisher = publish(manager)
    with pytest.raises(InvalidInput, match="in use"):
        EventPublisher(manager, publisher.endpoint)
    assert manager._parts.prefix
    assert manager._parts.prefix.notices.observers == [publisher._listener]
    assert repr(publisher) == (
        f"EventPublisher({publisher.endpoint}, replays at {publisher.replay_endpoint})"
    )


def test_a_rank_has_ports_of_its_own(publish: Any) -> None:
    free = publish(make())
    port = int(free.endpoint.rpartition(":")[2])
    free.close(TIMEOUT_S)
    publisher = publish(make(), f"tcp://127.0.0.1:{port - 1}", data_parallel_rank=1)
    assert publisher.endpoint == f"tcp://127.0.0.1:{port}"


def test_after_close_the_manager_goes_on_alone(publish: Any, subscribe: Any) -> None:
    manager = make()
    publisher = publish(manager)
    reader = subscribe(publisher)
    lives = Lives(manager, 17)
    lives.run((IDS, None))
    reader.catch_up(publisher)
    publisher.close(TIMEOUT_S)
    publisher.close(TIMEOUT_S)
    assert reader.read_one()
    assert reader.known.media == {}
    lives.some(3)
    with pytest.raises(OutOfBlocks):
        manager.admit_request(4000)
    assert publisher.stats().waiting == 0


def test_a_manager_that_is_dropped_ends_its_publisher(subscribe: Any) -> None:
    manager = make()
    publisher = EventPublisher(manager, ANY, replay=ANY)
    thread = publisher._sender._thread
    reader = subscribe(publisher)
    del publisher
    gc.collect()
    assert thread.is_alive()
    del manager
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert reader.read_one()
    assert reader.known.clears == 2


def test_events_of_many_blocks_are_cut() -> None:
    book = ledger.Ledger(BLOCK)
    book._most = 3
    digests = [bytes([n]) * 32 for n in range(8)]
    ids = bytes(4 * BLOCK * 8)
    events = book.read([ledger.Cached(digests, None, 0, ids, None, None)])
    assert [len(each.block_hashes) for each in events] == [3, 3, 2]
    assert [len(each) for each in ledger.batches(events, 4 * BLOCK)] == [2, 1]
    events = book.read([ledger.Kept("GPU", digests, there=False)])
    assert [len(each.block_hashes) for each in events] == [3, 3, 2]
    assert len(book) == 0

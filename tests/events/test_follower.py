"""A router's index, fed by `Follower` from a publisher's sockets, against what is cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.msgpack import encode as msgpack

from dsv4.cache.manager import KVCacheManager
from dsv4.events.follower import Follower
from dsv4.events.publisher import EventPublisher
from dsv4.routing.names import Naming
from tests.events.consumer import TIMEOUT_S
from tests.events.lives import BLOCK, SCHEMA, Lives, cached, make

ANY = "tcp://127.0.0.1:*"
NAMING = Naming(fingerprint=SCHEMA.content_fingerprint, model_id="tiny 1", block_tokens=BLOCK)


class Known:
    """What one replica's events say is on its device."""

    def __init__(self) -> None:
        self.names = set[int]()
        self.clears = 0

    def stored(self, names: list[int], medium: str | None) -> None:
        assert medium == "GPU"
        self.names |= set(names)

    def removed(self, names: list[int], medium: str | None) -> None:
        self.names -= set(names)

    def cleared(self) -> None:
        self.names.clear()
        self.clears += 1


@contextmanager
def published(manager: KVCacheManager, **more: int) -> Iterator[EventPublisher]:
    publisher = EventPublisher(manager, ANY, replay=ANY, **more)
    try:
        yield publisher
    finally:
        publisher.close(TIMEOUT_S)


def agrees(known: Known, lives: Lives) -> bool:
    """About every prompt that was ever asked."""
    for ids, salt in lives.asked:
        names, found = NAMING.names(ids, salt), 0
        while found < len(names) and names[found] in known.names:
            found += 1
        if found != cached(lives.manager, (ids, salt))[0]:
            return False
    return True


async def until(holds: Callable[[], bool]) -> None:
    late = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < late, "the index does not become right"
        await asyncio.sleep(0.01)


def follower(publisher: EventPublisher, known: Known) -> Follower:
    assert publisher.replay_endpoint is not None
    return Follower(publisher.endpoint, publisher.replay_endpoint, known)


@pytest.mark.parametrize("kept", [10_000, 4], ids=["all is kept", "little is kept"])
def test_an_index_that_comes_late_becomes_right_and_stays_so(kept: int):
    """From a replay of what was sent, or of everything that is cached."""
    lives, known = Lives(make(), 3), Known()

    async def run(publisher: EventPublisher) -> None:
        task = asyncio.create_task(follower(publisher, known).run())
        await until(lambda: bool(known.names) and agrees(known, lives))
        for _ in range(3):
            lives.some(4)
            await until(lambda: agrees(known, lives))
        task.cancel()

    with published(lives.manager, buffer_batches=kept) as publisher:
        lives.some(12)
        asyncio.run(run(publisher))


def test_a_second_index_learns_the_same():
    """As one that was started anew, while events go on."""
    lives, first, second = Lives(make(), 5), Known(), Known()

    async def run(publisher: EventPublisher) -> None:
        tasks = [asyncio.create_task(follower(publisher, first).run())]
        lives.some(8)
        await until(lambda: agrees(first, lives))
        tasks[0].cancel()
        lives.some(8)
        tasks.append(asyncio.create_task(follower(publisher, second).run()))
        await until(lambda: agrees(second, lives) and bool(second.names))
        tasks[1].cancel()

    with published(lives.manager) as publisher:
        asyncio.run(run(publisher))


@pytest.mark.parametrize(
    "frames",
    [
        [b"", (1 << 63).to_bytes(8, "big"), b"\xc1"],
        [b"", bytes(8), b"", b"a frame more"],
        [b"alone"],
        [b"", b"no number", msgpack([0.0, [{"type": "BlockRemoved", "block_hashes": "x"}], None])],
        [b"", (1 << 63).to_bytes(8, "big"), msgpack([0.0, [{"type": "BlockStolen"}], None])],
        [
            b"",
            (1 << 63).to_bytes(8, "big"),
            msgpack([0.0, [{"type": "BlockRemoved", "block_hashes": [1]}] * 2]),
        ],
    ],
)
def test_what_makes_no_sense_is_asked_for_anew(
    caplog: pytest.LogCaptureFixture, frames: list[bytes]
):
    lives, known = Lives(make(), 7), Known()

    async def run(publisher: EventPublisher) -> None:
        one = follower(publisher, known)
        task = asyncio.create_task(one.run())
        await until(lambda: one.replays == 1)
        sender = publisher._sender
        one._last = None  # as if all of it were news
        sender._publisher.send_multipart(frames)
        await until(lambda: "asked for anew" in caplog.text)
        lives.some(6)
        await until(lambda: agrees(known, lives) and bool(known.names))
        task.cancel()

    with published(lives.manager) as publisher:
        asyncio.run(run(publisher))


def test_a_process_whose_clock_is_behind_that_of_its_forerunner_is_heard(
    monkeypatch: pytest.MonkeyPatch,
):
    """Numbers begin with the time: these are smaller than those that were heard before."""
    old, new, known = Lives(make(), 11), Lives(make(), 12), Known()
    forerunner = EventPublisher(old.manager, ANY, replay=ANY)
    place, replay = forerunner.endpoint, forerunner.replay_endpoint

    async def run() -> None:
        task = asyncio.create_task(follower(forerunner, known).run())
        old.some(6)
        await until(lambda: agrees(known, old) and bool(known.names))
        forerunner._sender._ledger.clear = lambda: []  # it ends without a word
        forerunner.close(TIMEOUT_S)
        monkeypatch.setattr(time, "time_ns", lambda: 10**18)
        publisher = EventPublisher(new.manager, place, replay=replay)
        assert publisher.epoch < forerunner.epoch
        new.some(6)
        await until(lambda: agrees(known, new) and agrees(known, old) is False)
        task.cancel()
        publisher.close(TIMEOUT_S)

    asyncio.run(run())


def test_a_number_that_lies_does_not_make_a_follower_deaf():
    lives, known = Lives(make(), 11), Known()

    async def run(publisher: EventPublisher) -> None:
        one = follower(publisher, known)
        task = asyncio.create_task(one.run())
        lives.some(6)
        await until(lambda: agrees(known, lives) and bool(known.names))
        far = 1 << 63
        payload = msgpack([0.0, [], None])
        publisher._sender._publisher.send_multipart([b"", far.to_bytes(8, "big"), payload])
        await until(lambda: one._last == far)
        lives.some(6)
        await until(lambda: agrees(known, lives))
        task.cancel()

    with published(lives.manager) as publisher:
        asyncio.run(run(publisher))


@pytest.mark.parametrize("kept", [10_000, 2], ids=["all is kept", "little is kept"])
def test_messages_that_are_lost_on_the_way_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, kept: int
):
    """All that are published while nobody listens."""
    lives, known, hear = Lives(make(), 13), Known(), Follower._note
    deaf, lost = False, 0

    async def note(one: Follower, *message: Any) -> None:
        nonlocal lost
        lost += deaf
        if not deaf:
            await hear(one, *message)

    monkeypatch.setattr(Follower, "_note", note)

    async def run(publisher: EventPublisher) -> None:
        nonlocal deaf
        one = follower(publisher, known)
        task = asyncio.create_task(one.run())
        for _ in range(4):
            deaf, before = True, lost
            while lost < before + 2:
                lives.some(2)
                await asyncio.sleep(0.02)
            deaf, replays = False, one.replays
            while one.replays == replays:  # the next one shows the gap
                lives.some(1)
                await asyncio.sleep(0.02)
            await until(lambda: agrees(known, lives))
        task.cancel()

    with published(lives.manager, buffer_batches=kept) as publisher:
        asyncio.run(run(publisher))

"""Reads what a replica publishes into an index of who has which blocks. Torch-free. Needs
`dsv4[events]`.

A consumer that has just subscribed, or has missed messages, asks for a replay: the publisher sends
what it still keeps, or else everything that is cached. So an index that was lost is built again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from dsv4.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from dsv4.extras import needed_by

with needed_by("a consumer of events"):
    import msgspec
    import zmq
    import zmq.asyncio

LOGGER = logging.getLogger("dsv4.events")
REPLAY_S = 5.0  # that a replay may take between two of its messages
_decode = msgspec.msgpack.Decoder(tuple[float, list[Event], int | None]).decode


class Index(Protocol):
    """What is kept of one replica's events: `dsv4.routing.Router` does it for all of them."""

    def stored(self, names: list[int], medium: str | None) -> None: ...

    def removed(self, names: list[int], medium: str | None) -> None: ...

    def cleared(self) -> None: ...


class Follower:
    """Follows one publisher until it is cancelled. A message that makes no sense is logged, and
    everything is asked for again; so it is where numbers go back, which those of one process never
    do."""

    def __init__(self, endpoint: str, replay: str, index: Index) -> None:
        self._endpoint, self._replay_endpoint, self._index = endpoint, replay, index
        self._last: int | None = None  # that was read
        self._heard: int | None = None  # that came unasked
        self.replays = 0

    async def run(self) -> None:
        context = zmq.asyncio.Context()
        try:
            subscriber = context.socket(zmq.SUB)
            subscriber.subscribe(b"")
            subscriber.connect(self._endpoint)
            while True:
                frames = await subscriber.recv_multipart()
                try:
                    _, seq, payload = frames
                    await self._note(context, int.from_bytes(seq, "big"), payload)
                except (msgspec.MsgspecError, ValueError, TimeoutError) as error:
                    LOGGER.warning("events of %s: %s: asked for anew", self._endpoint, error)
                    self._last = None
        finally:
            context.destroy(linger=0)

    async def _note(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        heard, self._heard = self._heard, number
        if heard is not None and number <= heard:  # another process, its clock set back
            self._last = None
            self._index.cleared()
        last = self._last
        if last is not None and number <= last:
            return
        if last is None or number != last + 1:
            await self._replay(context, 0 if last is None else last + 1)
        if self._last is None or number > self._last:
            self._read(number, payload)

    async def _replay(self, context: zmq.asyncio.Context, start: int) -> None:
        """Raises TimeoutError."""
        self.replays += 1
        asker = context.socket(zmq.DEALER)
        try:
            asker.connect(self._replay_endpoint)
            await asker.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    _, _, seq, payload = await asker.recv_multipart()
                if not payload:
                    return
                self._read(int.from_bytes(seq, "big"), payload)
        finally:
            asker.close(linger=0)

    def _read(self, number: int, payload: bytes) -> None:
        _, events, _ = _decode(payload)
        for event in events:
            match event:
                case BlockStored():
                    self._index.stored(event.block_hashes, event.medium)
                case BlockRemoved():
                    self._index.removed(event.block_hashes, event.medium)
                case AllBlocksCleared():
                    self._index.cleared()
        self._last = number

"""A router's side of KV events, written from the format alone: a decoder of MessagePack by hand,
and a consumer that knows which tokens are where. It shares no code with the publisher."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

TIMEOUT_S = 60.0
_SIZED = {0xD9: "B", 0xDA: ">H", 0xDB: ">I", 0xC4: "B", 0xC5: ">H", 0xC6: ">I"}
_NUMBERS = {
    **{0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"},
    **{0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q", 0xCA: ">f", 0xCB: ">d"},
}


class Decoder:
    """One value of MessagePack's specification; what is left over is an error."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def some(self, count: int) -> bytes:
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def value(self) -> Any:
        head = self.number("B")
        if head < 0x80:
            return head
        if head < 0x90:
            return self.map(head & 15)
        if head < 0xA0:
            return self.array(head & 15)
        if head < 0xC0:
            return self.some(head & 31).decode()
        if head >= 0xE0:
            return head - 256
        if head in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[head]
        if head in _NUMBERS:
            return self.number(_NUMBERS[head])
        if head in _SIZED:
            data = self.some(self.number(_SIZED[head]))
            return data.decode() if head >= 0xD9 else data
        if head in (0xDC, 0xDD):
            return self.array(self.number(">H" if head == 0xDC else ">I"))
        assert head in (0xDE, 0xDF), f"byte {head:x}"
        return self.map(self.number(">H" if head == 0xDE else ">I"))

    def array(self, count: int) -> list[Any]:
        return [self.value() for _ in range(count)]

    def map(self, count: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(count)}


def decode(data: bytes) -> Any:
    decoder = Decoder(data)
    value = decoder.value()
    assert decoder.at == len(data)
    return value


Place = tuple[int | None, tuple[int, ...], str | None]  # block before, tokens, salt


@dataclass
class Consumer:
    """Keeps what events say. `sound`: no event contradicted what it knew."""

    block_tokens: int
    places: dict[int, Place] = field(default_factory=dict)
    by_place: dict[Place, int] = field(default_factory=dict)
    media: dict[str, set[int]] = field(default_factory=dict)
    sessions: dict[int, str | None] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    last: int | None = None
    gaps: int = 0
    clears: int = 0

    def read(self, seq: int, payload: bytes) -> None:
        ts, events, _ = decode(payload)
        assert isinstance(ts, float)
        assert abs(ts - time.time()) < 3600
        for event in events:
            getattr(self, event["type"])(**{k: v for k, v in event.items() if k != "type"})
        self.last = seq

    def BlockStored(
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        medium: str = "GPU",
        extra_keys: list[list[str] | None] | None = None,
        session_id: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        assert block_size == self.block_tokens
        assert len(token_ids) == block_size * len(block_hashes)
        if cache_salt is None:
            assert extra_keys is None
        else:
            assert extra_keys == [[cache_salt]] * len(block_hashes)
        parent = parent_block_hash
        if parent is not None and parent not in self.places:
            self.trouble.append("a block after one that is not known")
        for nth, own in enumerate(block_hashes):
            tokens = tuple(token_ids[nth * block_size : (nth + 1) * block_size])
            place = (parent, tokens, cache_salt)
            if self.places.setdefault(own, place) != place:
                self.trouble.append("one hash for two blocks")
            self.by_place[place] = own
            if own in self.media.setdefault(medium, set()):
                self.trouble.append("stored twice")
            self.media[medium].add(own)
            self.sessions[own] = session_id
            parent = own

    def BlockRemoved(self, block_hashes: list[int], medium: str = "GPU") -> None:
        for own in block_hashes:
            if own not in self.media.get(medium, ()):
                self.trouble.append("removed what was not there")
            self.media[medium].discard(own)

    def AllBlocksCleared(self) -> None:
        self.clears += 1
        self.media.clear()

    def blocks(self, ids: Sequence[int], media: Sequence[str], salt: str | None = None) -> int:
        """How many blocks of a prompt are there: in the first medium, then on in the next."""
        count, before = 0, None
        for medium in media:
            while (count + 1) * self.block_tokens <= len(ids):
                tokens = ids[count * self.block_tokens : (count + 1) * self.block_tokens]
                own = self.by_place.get((before, tuple(tokens), salt))
                if own is None or own not in self.media.get(medium, ()):
                    break
                count, before = count + 1, own
        return count


class Reader:
    """A consumer on its sockets: it subscribes, and asks for what it missed as routers do."""

    def __init__(self, endpoint: str, replay: str | None, block_tokens: int, **more: int) -> None:
        self.context, self.known = zmq.Context(), Consumer(block_tokens)
        self.sub = self.context.socket(zmq.SUB)
        for name, value in more.items():
            self.sub.set(getattr(zmq, name), value)
        self.sub.subscribe(b"")
        self.sub.connect(endpoint)
        self.dealer = None
        if replay is not None:
            self.dealer = self.context.socket(zmq.DEALER)
            self.dealer.connect(replay)

    def close(self) -> None:
        self.context.destroy(linger=0)

    def read_one(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether a message came."""
        if not self.sub.poll(timeout_s * 1000):
            return False
        _, seq, payload = self.sub.recv_multipart()
        number = int.from_bytes(seq, "big")
        known = self.known
        if known.last is not None and number <= known.last:
            return True
        if number != (0 if known.last is None else known.last + 1):
            known.gaps += 1
            if self.dealer is not None:
                self.replay(0 if known.last is None else known.last + 1)
        if known.last is None or number > known.last:
            known.read(number, payload)
        return True

    def replay(self, start: int) -> int:
        """Reads all that a replay brings; returns how many messages that were."""
        assert self.dealer is not None
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        count = 0
        while True:
            assert self.dealer.poll(TIMEOUT_S * 1000), "a replay has no end"
            empty, _, seq, payload = self.dealer.recv_multipart()
            assert empty == b""
            if not payload:
                assert seq == b"\xff" * 8
                return count
            self.known.read(int.from_bytes(seq, "big"), payload)
            count += 1

    def catch_up(self, publisher: Any) -> Consumer:
        """Reads until it knows all that was reported to the publisher so far."""
        until = time.monotonic() + TIMEOUT_S
        while (stats := publisher.stats()).waiting:
            assert time.monotonic() < until, stats
            time.sleep(0.001)
        wanted = publisher.epoch + stats.batches - 1
        while self.known.last is None or self.known.last < wanted:
            assert self.read_one(), (self.known.last, wanted)
        return self.known

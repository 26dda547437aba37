"""Which blocks consumers know, and the events that keep them up to date. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from dsv4.events.wire import (
    CPU,
    GPU,
    MOST_BLOCKS,
    MOST_TOKENS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)
from dsv4.routing.names import block_hash

# a place that consumers know as CPU: the entries of a block whose other bytes are on the device
ENTRIES = "CPU, entries"
MOST_GONE = 4_096  # blocks that are nowhere, and whose tokens are remembered


class Cached(NamedTuple):
    """Consecutive blocks of a prompt are on the device, from number `depth` on: what consumers need
    to name them. `parent` is None for the first block of a prompt, `ids` are the bytes of int32."""

    digests: Sequence[bytes]
    parent: bytes | None
    depth: int
    ids: bytes
    salt: str | None
    session: str | None


class Kept(NamedTuple):
    """Blocks came into a medium (`there`), or left it; the medium may be `ENTRIES` too."""

    medium: str
    digests: Collection[bytes]
    there: bool


class Only(NamedTuple):
    """Of the blocks on the device, with or without their entries, these are left."""

    digests: Collection[bytes]


Note: TypeAlias = Cached | Kept | Only


class _Name(NamedTuple):
    """What consumers need to name one block."""

    digest: bytes
    parent: bytes | None
    depth: int
    ids: bytes
    salt: str | None
    session: str | None


def _as_told(medium: str) -> str:
    return CPU if medium == ENTRIES else medium


@dataclass(slots=True)
class _Block:
    """What consumers know of one block."""

    name: _Name | None = None
    media: set[str] = field(default_factory=set)

    @property
    def told(self) -> list[str]:
        """The media that consumers know, in alphabetical order."""
        return sorted(set(map(_as_told, self.media)))


class Ledger:
    """The state of a consumer that has read everything. A block is announced once its tokens are
    known, and after the block before it: consumers cannot place it otherwise."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._most = min(MOST_BLOCKS, MOST_TOKENS // block_tokens)
        self._blocks: dict[bytes, _Block] = {}
        # a tier may still be storing them; the oldest first
        self._gone = OrderedDict[bytes, _Name]()

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> list[Event]:
        """Nothing is known any more."""
        self._blocks.clear()
        self._gone.clear()
        return [AllBlocksCleared()]

    def read(self, notes: Iterable[Note]) -> list[Event]:
        """What these notes change for a consumer, in their order."""
        events: list[Event] = []
        for note in notes:
            match note:
                case Cached():
                    self._cached(note, events)
                case Kept(medium, digests, True):
                    for digest in digests:
                        self._put(digest, medium, events)
                case Kept(medium, digests, False):
                    self._take(digests, medium, events)
                case Only(left):
                    for medium in (GPU, ENTRIES):
                        gone = [d for d, each in self._blocks.items() if medium in each.media]
                        self._take(
                            [digest for digest in gone if digest not in left], medium, events
                        )
        return events

    def everything(self, most_blocks: int) -> Iterator[list[Event]]:
        """All that is known, for a consumer that knows nothing; about `most_blocks` at a time.
        Blocks come after the blocks before them."""
        named = [each for each in self._blocks.values() if each.name is not None and each.media]
        named.sort(key=_depth)
        events: list[Event] = [AllBlocksCleared()]
        count = 0
        for each in named:
            for medium in each.told:
                assert each.name is not None
                self._store(each.name, medium, events)
                count += 1
            if count >= most_blocks:
                yield events
                events, count = [], 0
        yield events

    def _cached(self, run: Cached, events: list[Event]) -> None:
        parent = run.parent
        if parent is not None and not self._is_named(parent):
            return  # what came before it was lost: it is announced when it is used
        size = 4 * self._block_tokens
        for nth, digest in enumerate(run.digests):
            block = self._blocks.setdefault(digest, _Block())
            if block.name is None:
                ids = run.ids[nth * size : (nth + 1) * size]
                depth = run.depth + nth
                block.name = _Name(digest, parent, depth, ids, run.salt, run.session)
                for medium in block.told:
                    self._store(block.name, medium, events)
            self._put(digest, GPU, events)
            parent = digest

    def _is_named(self, digest: bytes) -> bool:
        block = self._blocks.get(digest)
        return block is not None and block.name is not None

    def _put(self, digest: bytes, medium: str, events: list[Event]) -> None:
        block = self._blocks.get(digest)
        if block is None:
            block = self._blocks[digest] = _Block(self._gone.pop(digest, None))
        before = block.told
        block.media.add(medium)
        if block.name is not None and block.told != before:
            self._store(block.name, _as_told(medium), events)

    def _take(self, digests: Iterable[bytes], medium: str, events: list[Event]) -> None:
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None or medium not in block.media:
                continue
            before = block.told
            block.media.remove(medium)
            if block.name is not None and block.told != before:
                self._remove(digest, _as_told(medium), events)
            if not block.media:
                del self._blocks[digest]
                if block.name is not None:
                    self._gone[digest] = block.name
        while len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)

    def _store(self, name: _Name, medium: str, events: list[Event]) -> None:
        """Adds a block to the last event if it comes right after that event's last block."""
        own, parent = block_hash(name.digest), None
        if name.parent is not None:
            parent = block_hash(name.parent)
        ids = np.frombuffer(name.ids, np.int32).tolist()
        last = events[-1] if events else None
        keys = None if name.salt is None else [name.salt]
        if (
            isinstance(last, BlockStored)
            and parent == last.block_hashes[-1]
            and (medium, name.salt, name.session) == (last.medium, last.cache_salt, last.session_id)
            and len(last.block_hashes) < self._most
        ):
            last.block_hashes.append(own)
            last.token_ids += ids
            if last.extra_keys is not None:
                last.extra_keys.append(keys)
            return
        events.append(
            BlockStored(
                block_hashes=[own],
                parent_block_hash=parent,
                token_ids=ids,
                block_size=self._block_tokens,
                medium=medium,
                extra_keys=None if keys is None else [keys],
                session_id=name.session,
                cache_salt=name.salt,
            )
        )

    def _remove(self, digest: bytes, medium: str, events: list[Event]) -> None:
        last = events[-1] if events else None
        if (
            isinstance(last, BlockRemoved)
            and last.medium == medium
            and len(last.block_hashes) < self._most
        ):
            last.block_hashes.append(block_hash(digest))
        else:
            events.append(BlockRemoved(block_hashes=[block_hash(digest)], medium=medium))


def _depth(block: _Block) -> int:
    return 0 if block.name is None else block.name.depth


def batches(events: Sequence[Event], most_tokens: int) -> Iterator[list[Event]]:
    """Splits events into batches of about `most_tokens` tokens."""
    batch: list[Event] = []
    tokens = 0
    for event in events:
        batch.append(event)
        if isinstance(event, BlockStored):
            tokens += len(event.token_ids)
        if tokens >= most_tokens:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch

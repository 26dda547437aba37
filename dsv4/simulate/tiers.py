"""The books of simulated tiers: which records are in host memory and on the disk, which go first,
and how many bytes move. Torch-free.

The rules are those of `HostTier`, over the same `Leaves`: a record is kept as long as another one
leans on it, of the rest the longest unused one makes room, and what leans on a block that found no
room is not kept. Everything that is cached is stored at once; copies take no time on the way down.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import NewlyCached, Observer
from dsv4.cache.prefix.resume import PrefixMatch
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import SnapshotLayout
from dsv4.tiers.key import Key, Kind
from dsv4.tiers.leaves import Leaves
from dsv4.tiers.sizes import HEADER_BYTES, padded

MOST_LOST = 65_536  # as in dsv4/tiers/host.py
Report = Callable[[str, Iterable[bytes], bool], None]  # medium, blocks, whether they are there now


class CountedLabel(NamedTuple):
    """A record, as far as books go."""

    key: Key
    leans_on: Key


class CountedTier:
    """One tier. `medium` is the word of events for it."""

    def __init__(self, name: str, medium: str, capacity_bytes: int) -> None:
        self.name, self.medium, self.capacity_bytes = name, medium, capacity_bytes
        self._rows: Leaves[None] = Leaves()
        self._lost = OrderedDict[Key, None]()  # oldest first
        self.stored_bytes = self.loaded_bytes = self.evictions = self.refused = 0
        self.most_used_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    @property
    def used_bytes(self) -> int:
        return self._rows.used_bytes

    def store(self, label: CountedLabel, size_bytes: int) -> list[Key] | None:
        """Keeps a record. Returns what had to go; None if it is not kept, or was there already."""
        if label.key in self._rows:
            return None
        is_block = label.key.kind is Kind.BLOCK
        if label.leans_on in self._lost and label.leans_on not in self._rows:
            self._lose(label.key)
            self.refused += 1
            return None
        gone: list[Key] = []
        self._rows.lean(label.leans_on)  # it must not make room itself
        try:
            has_room = self._make_room(size_bytes, gone)
        finally:
            self._rows.lean_no_more(label.leans_on)
        if not has_room:
            self._lose(label.key)
            self.refused += 1
            return gone or None
        if is_block:
            self._lost.pop(label.key, None)
        self._rows.add(label, size_bytes, None)
        self.stored_bytes += size_bytes
        self.most_used_bytes = max(self.most_used_bytes, self._rows.used_bytes)
        return gone

    def use(self, key: Key) -> None:
        self._rows.touch(key)

    def _make_room(self, size_bytes: int, gone: list[Key]) -> bool:
        if size_bytes > self.capacity_bytes:
            return False
        while self._rows.used_bytes + size_bytes > self.capacity_bytes:
            entry = self._rows.pop(lambda _: True)
            if entry is None:
                return False
            self._lose(entry.key)
            gone.append(entry.key)
            self.evictions += 1
        return True

    def _lose(self, key: Key) -> None:
        if key.kind is Kind.BLOCK:
            self._lost.pop(key, None)
            self._lost[key] = None
            if len(self._lost) > MOST_LOST:
                self._lost.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What tiers have of a prompt: its blocks from `first` on, each as the number of its tier, and
    the tier and the digest of a state."""

    first: int
    blocks: tuple[int, ...]
    snapshot: tuple[int, bytes] | None


class CountedTiers(Observer):
    """All tiers of one replica, the fastest first: what the prefix cache reports goes into each."""

    def __init__(self, schema: CacheSchema, tiers: Sequence[CountedTier], report: Report) -> None:
        self.tiers, self._report = tuple(tiers), report
        self._sizes = {
            Kind.BLOCK: padded(HEADER_BYTES + schema.bytes.block + schema.bytes.entries),
            Kind.SNAPSHOT: padded(HEADER_BYTES + SnapshotLayout(schema).row_bytes),
        }

    def size_bytes(self, kind: Kind) -> int:
        return self._sizes[kind]

    def cached(self, new: NewlyCached, trail: TokenTrail) -> None:
        kind = Kind.SNAPSHOT if new.is_snapshot else Kind.BLOCK
        own = Key(kind, new.node.digest)
        leans_on = Key(Kind.BLOCK, new.node.digest if new.is_snapshot else new.parent)
        label = CountedLabel(own, leans_on)
        for tier in self.tiers:
            gone = tier.store(label, self._sizes[kind])
            if gone:
                blocks = [key.digest for key in gone if key.kind is Kind.BLOCK]
                self._report(tier.medium, blocks, False)
            if own in tier and not new.is_snapshot:
                new.node.stored = True
                if gone is not None:
                    self._report(tier.medium, (own.digest,), True)

    def used(self, match: PrefixMatch, trail: TokenTrail) -> None:
        """What is used on the device counts as used in the tiers below too."""
        for tier in self.tiers:
            held = [node for node in match.nodes[-1:] if Key(Kind.BLOCK, node.digest) in tier]
            if not held:
                held = self._last_held(tier, match.nodes)
            for node in held:
                tier.use(Key(Kind.BLOCK, node.digest))
            if match.snapshot is not None:
                tier.use(Key(Kind.SNAPSHOT, match.snapshot.digest))

    def _last_held(self, tier: CountedTier, nodes: Sequence[PrefixNode]) -> list[PrefixNode]:
        for node in reversed(nodes):
            if Key(Kind.BLOCK, node.digest) in tier:
                return [node]
        return []

    def find(self, chain: Sequence[bytes], first: int, last: int) -> tuple[int, ...]:
        """The fastest tier that has each of the blocks from `first` to `last` of a prompt, up to
        the first gap."""
        blocks: list[int] = []
        for nth in range(first, last):
            key = Key(Kind.BLOCK, chain[nth])
            where = next((n for n, tier in enumerate(self.tiers) if key in tier), None)
            if where is None:
                break
            blocks.append(where)
        return tuple(blocks)

    def find_snapshot(self, digest: bytes) -> tuple[int, bytes] | None:
        """Which tier has the state at the end of a block, and its digest."""
        key = Key(Kind.SNAPSHOT, digest)
        found = (nth for nth, tier in enumerate(self.tiers) if key in tier)
        return next(((nth, digest) for nth in found), None)

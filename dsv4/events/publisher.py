"""Publishes what a manager caches and evicts, for routers. Torch-free. Needs `dsv4[events]`."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from dsv4.cache.prefix.observer import NewlyCached, Observer
from dsv4.cache.prefix.trail import TokenTrail, token_ids
from dsv4.errors import InvalidInput, is_utf8, require_count, require_timeout, require_type
from dsv4.events.ledger import ENTRIES, Cached, Kept, Only
from dsv4.events.sender import EventStats, Sender
from dsv4.events.wire import CPU, GPU, STORAGE
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Key, Kind

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager
    from dsv4.cache.prefix.cache import PrefixCache
    from dsv4.cache.prefix.node import PrefixNode
    from dsv4.cache.prefix.resume import PrefixMatch

MOST_TOPIC = 255


class EventPublisher:
    """Publishes KV events in vLLM's format on a ZeroMQ socket: which blocks of which tokens are
    stored where, and which were removed. Every process that can connect learns all token ids.

    `endpoint` and `replay` are addresses to bind; with a `data_parallel_rank` their ports are that
    much higher, as consumers expect. Every message begins with `topic`. `buffer_batches` messages,
    of `buffer_bytes` at most, are kept for consumers that missed some; for one that missed more a
    replay has everything that is cached.
    No call of the manager waits for a consumer: with `most_waiting` notes in the queue, consumers
    forget everything instead, and learn of a block again when it is used.

    Make it right after the manager: blocks that are cached already are announced when they are
    used. Raises InvalidInput, MissingExtra.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        data_parallel_rank: int | None = None,
        buffer_batches: int = 10_000,
        buffer_bytes: int = 256 << 20,
        most_waiting: int = 100_000,
    ) -> None:
        prefix = manager._parts.prefix
        if not prefix:
            raise InvalidInput(
                "events report what is cached, and nothing is: build the manager with prefix=..."
            )
        require_type("topic", topic, str)
        if len(topic.encode()) > MOST_TOPIC:
            raise InvalidInput(f"topic has {len(topic.encode())} bytes: at most {MOST_TOPIC}")
        rank = data_parallel_rank
        if rank is not None:
            rank = require_count("data_parallel_rank", rank, at_least=0)
        self._sender = Sender(
            _address("endpoint", endpoint, rank),
            None if replay is None else _address("replay", replay, rank),
            topic=topic.encode(),
            rank=rank,
            block_tokens=prefix.schema.block_tokens,
            buffer_batches=require_count("buffer_batches", buffer_batches),
            buffer_bytes=require_count("buffer_bytes", buffer_bytes),
            most_waiting=require_count("most_waiting", most_waiting),
        )
        self._sender.start()
        residency = manager._parts.residency
        away = (lambda block_id: False) if residency is None else residency.places.is_away
        listener = _Listener(prefix, self._sender, away)
        self._listeners, self._listener = prefix.notices.observers, listener
        self._listeners.append(self._listener)
        if manager.tiers:
            for tier in manager.tiers.all:
                watch = getattr(tier, "watch", None)
                if watch is not None:
                    watch(_Watcher(self._sender, CPU if isinstance(tier, HostTier) else STORAGE))

    def __repr__(self) -> str:
        replay = f", replays at {self.replay_endpoint}" if self.replay_endpoint else ""
        return f"EventPublisher({self.endpoint}{replay})"

    @property
    def endpoint(self) -> str:
        """Where events are published, with the port that was bound."""
        return self._sender.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where consumers ask for what they missed."""
        return self._sender.replay_endpoint

    @property
    def epoch(self) -> int:
        """The number of its first message: larger than all numbers of a process before it."""
        return self._sender.epoch

    def stats(self) -> EventStats:
        """What was published, replayed and lost since it was made."""
        return self._sender.stats()

    def close(self, timeout_s: float) -> None:
        """Sends that everything is cleared, waiting for at most `timeout_s`. What happens later is
        not published."""
        seconds = require_timeout(timeout_s)
        if self._listener in self._listeners:
            self._listeners.remove(self._listener)
        self._listener.end()
        self._sender.join(max(0.0, seconds))


class _Listener(Observer):
    """Passes what a prefix cache reports on. The cache owns it, and it the sender: both end with
    the manager, if the publisher is not closed before."""

    def __init__(self, prefix: PrefixCache, sender: Sender, is_away: Callable[[int], bool]) -> None:
        self._sender, self._block_tokens = sender, prefix.schema.block_tokens
        self._is_away = is_away  # whether the entries of a block are only in host memory
        self._digests: dict[int, bytes] = {}  # of cached blocks, as far as they were reported
        self._came_late = len(prefix.index) > 0
        self._unsalted = prefix.trail(token_ids([]), None).root
        self.end = weakref.finalize(self, sender.stop)

    def cached(self, new: NewlyCached, trail: TokenTrail) -> None:
        if not new.is_snapshot:
            self.landed(new.node, trail)

    def landed(self, node: PrefixNode, trail: TokenTrail) -> None:
        self._name(trail, node.depth, [node])

    def used(self, match: PrefixMatch, trail: TokenTrail) -> None:
        """Consumers may not know these: the publisher came later, or they were asked to forget."""
        if match.nodes and (self._came_late or self._sender.has_lost):
            self._name(trail, 0, match.nodes)

    def evicted(self, victims: Sequence[PrefixNode]) -> None:
        if not victims:
            return
        digests = [node.digest for node in victims]
        left = [self._digests.pop(node.block_id, None) for node in victims]
        self._sender.put([Kept(GPU, digests, there=False)])
        if any(left):
            self._sender.put([Kept(ENTRIES, digests, there=False)])

    def entries_left(self, block_ids: Sequence[int]) -> None:
        found = [self._digests[b] for b in block_ids if b in self._digests]
        if found:
            self._sender.put([Kept(ENTRIES, found, there=True)])

    def recovered(self, nodes: Collection[PrefixNode]) -> None:
        self._came_late = True  # some may have been cached without a report
        self._digests = {node.block_id: node.digest for node in nodes}
        self._sender.put([Only(frozenset(node.digest for node in nodes))])

    def _name(self, trail: TokenTrail, first: int, nodes: Sequence[PrefixNode]) -> None:
        """Blocks of a prompt are cached, from number `first` on. Not those of a prompt from another
        machine with a salt that is not known here: consumers would take them for blocks of prompts
        without one. Not those of a salt that is not UTF-8, which no message can have."""
        salt = trail.tenant.salt
        if trail.root != self._unsalted if salt is None else not is_utf8(salt):
            return
        end = first + len(nodes)
        run = Cached(
            digests=trail.chain[first:end],
            parent=trail.chain[first - 1] if first else None,
            depth=first,
            ids=trail.ids[first * self._block_tokens : end * self._block_tokens].tobytes(),
            salt=salt,
            session=None if trail.hints is None else trail.hints.session,
        )
        self._sender.put([run])
        self._digests.update((node.block_id, node.digest) for node in nodes)
        away = [node.digest for node in nodes if self._is_away(node.block_id)]
        if away:
            self._sender.put([Kept(ENTRIES, away, there=True)])


class _Watcher:
    """Passes what a tier reports on, from any thread."""

    def __init__(self, sender: Sender, medium: str) -> None:
        self._sender, self._medium = sender, medium

    def __call__(self, keys: Sequence[Key], there: bool) -> None:
        digests = [key.digest for key in keys if key.kind is Kind.BLOCK]
        if digests:
            self._sender.put([Kept(self._medium, digests, there)])


def _address(name: str, value: object, rank: int | None) -> str:
    """An address to bind, for a data-parallel rank. Raises InvalidInput."""
    if not isinstance(value, str) or not re.match(r"(tcp|ipc|inproc)://.", value):
        raise InvalidInput(
            f"{name}={value!r}: give an address to bind, as in tcp://*:5557, ipc://FILE or "
            f"inproc://NAME"
        )
    if not rank:
        return value
    found = re.fullmatch(r"(tcp://.*:)([0-9]{1,5})", value)
    if found is None:
        return f"{value}_dp{rank}" if not value.startswith("tcp") else value
    port = int(found[2]) + rank
    if port > 65_535:
        raise InvalidInput(f"{name}={value!r}: rank {rank} would have port {port}: choose a lower")
    return f"{found[1]}{port}"

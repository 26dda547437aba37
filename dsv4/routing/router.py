"""Chooses the replica of a request. Torch-free.

A choice weighs tokens: what a replica would have to compute of the prompt, what it would have to
bring from host memory or storage, at a fraction of the cost of computing, and what it is busy with.
The least sum is chosen. With a stale index a request is slower, never wrong: the replica
looks up what it has itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, Literal, get_args

from dsv4.errors import Dsv4Error, InvalidInput, is_number, require_count
from dsv4.routing.where import NO_BLOCKS, Blocks, R, Where

Routing = Literal["prefix", "round-robin", "sticky"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)


class NoReplica(Dsv4Error):
    """No replica can be chosen yet: wait until one is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCosts:
    """What a token of a prompt costs a replica that has it, as a fraction of computing it: where
    its block lies on the device, in host memory or in storage. `load` is what a token weighs that
    the replica is busy with. A session stays at its replica unless another one is cheaper by more
    than `stay_tokens`."""

    device: float = 0.0
    host: float = 0.05
    storage: float = 0.25
    load: float = 1.0
    stay_tokens: float = 512.0

    def __post_init__(self) -> None:
        for name in ("device", "host", "storage", "load", "stay_tokens"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < float("inf"):
                raise InvalidInput(f"routing costs: {name}={value!r}: must be a number, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[R]):
    """The replica, how many blocks of the prompt it has where as far as is known, and whether it is
    the one that the session was at."""

    replica: R
    blocks: Blocks
    stayed: bool


class Router(Generic[R]):
    """Chooses among replicas. It is fed by their events, and not thread-safe.

    `routing` says how: "prefix" by what is cached and by load; "sticky" a session's replica as long
    as it is there, and the least busy one for requests without; "round-robin" one after the other.
    At most `most_blocks` names of blocks and `most_sessions` sessions are remembered.
    """

    def __init__(
        self,
        replicas: Iterable[R] = (),
        *,
        routing: Routing = "prefix",
        block_tokens: int = 128,
        costs: RoutingCosts | None = None,
        most_blocks: int = 1 << 20,
        most_sessions: int = 1 << 16,
    ) -> None:
        if routing not in ROUTINGS:
            raise InvalidInput(f"routing={routing!r}: must be one of {', '.join(ROUTINGS)}")
        self.routing: Routing = routing
        self._block_tokens = require_count("block_tokens", block_tokens)
        self._costs = RoutingCosts() if costs is None else costs
        self._where: Where[R] = Where(most_blocks)
        self._most_sessions = require_count("most_sessions", most_sessions)
        self._sessions: OrderedDict[str, R] = OrderedDict()
        self._replicas: list[R] = []
        self._next = 0
        for replica in replicas:
            self.add(replica)

    # ---- replicas and their events -----------------------------------------------------------

    @property
    def replicas(self) -> tuple[R, ...]:
        return tuple(self._replicas)

    @property
    def blocks_known(self) -> int:
        """How many names of blocks are remembered."""
        return len(self._where)

    def blocks_of(self, replica: R) -> int:
        """Of them, those that a replica has. Raises InvalidInput."""
        return self._where.blocks(replica)

    def add(self, replica: R) -> None:
        """A replica takes requests from now on. One that is there already has started anew: what it
        had is forgotten."""
        if replica not in self._where:
            self._replicas.append(replica)
        self._where.add(replica)

    def remove(self, replica: R) -> None:
        """The replica takes no more requests, and its sessions go to others."""
        self._where.remove(replica)
        self._replicas.remove(replica)

    def stored(self, replica: R, names: Iterable[int], medium: str | None = None) -> None:
        """These blocks are in a medium of the replica: BlockStored."""
        self._where.store(replica, names, medium)

    def removed(self, replica: R, names: Iterable[int], medium: str | None = None) -> None:
        """These blocks left a medium of the replica: BlockRemoved."""
        self._where.drop(replica, names, medium)

    def cleared(self, replica: R) -> None:
        """The replica has nothing: AllBlocksCleared, or it was started anew."""
        self._where.clear(replica)

    # ---- choosing ----------------------------------------------------------------------------

    def choose(
        self,
        names: Sequence[int],
        session: str | None = None,
        loads: Mapping[R, float] | None = None,
        avoid: Collection[R] = (),
    ) -> Choice[R]:
        """The replica for a prompt whose whole blocks have these names. `loads` are the tokens that
        replicas are busy with; one that is not in it is idle. Those to `avoid` are chosen only if
        all others are gone. Raises NoReplica."""
        if not self._replicas:
            raise NoReplica("no replica takes requests: add one, or wait until one has started")
        loads = {} if loads is None else loads
        among = [each for each in self._replicas if each not in avoid] or self._replicas
        last = None if session is None else self._sessions.get(session)
        if last not in self._where or (avoid and last not in among):
            last = None
        found: Mapping[R, Blocks] = {}
        if self.routing == "round-robin":
            chosen, last = among[self._next % len(among)], None
            self._next += 1
        elif self.routing == "sticky":
            chosen = self._idlest(among, loads) if last is None else last
        else:
            found = self._where.find(names)
            if avoid:
                found = {each: blocks for each, blocks in found.items() if each in among}
            chosen = self._cheapest(names, found, self._idlest(among, loads), loads, last)
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._most_sessions:
                self._sessions.popitem(last=False)
        return Choice(
            replica=chosen,
            blocks=found.get(chosen, NO_BLOCKS),
            stayed=last is not None and chosen == last,
        )

    def _idlest(self, among: Sequence[R], loads: Mapping[R, float]) -> R:
        """Of equally busy ones, the one with the fewest blocks; the first of those."""
        blocks, least, idlest = self._where.blocks, (inf, 0), among[0]
        for each in among:
            busy = loads.get(each, 0.0), blocks(each)
            if busy < least:
                least, idlest = busy, each
                if busy == (0.0, 0):  # none is less: of a thousand most need no look
                    break
        return idlest

    def _cheapest(
        self,
        names: Sequence[int],
        found: Mapping[R, Blocks],
        idlest: R,
        loads: Mapping[R, float],
        last: R | None,
    ) -> R:
        costs, tokens = self._costs, self._block_tokens

        def cost(replica: R) -> float:
            device, host, storage = found.get(replica, NO_BLOCKS)
            blocks = float(len(names) - device - host - storage)
            blocks += costs.device * device + costs.host * host + costs.storage * storage
            return blocks * tokens + costs.load * loads.get(replica, 0.0)

        # all that have nothing of it differ only in their load
        best = min((*found, idlest), key=cost)
        if last is not None and cost(last) <= cost(best) + costs.stay_tokens:
            return last
        return best

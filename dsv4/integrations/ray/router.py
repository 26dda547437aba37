"""Which replica gets a request: the library of `dsv4.routing`, in a process of its own.

It knows what replicas announce, twice a second, and what their events say. Everything that it knows
can be learned again: a router that starts anew hears of the replicas within a second and asks for
their events from the beginning. Without one, Ray Serve chooses, by queues alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from math import inf
from typing import Any

from dsv4.events.follower import Follower
from dsv4.integrations.ray.messages import Announcement, Ids, Role, Way
from dsv4.routing.router import Router, Routing

LOGGER = logging.getLogger("dsv4.ray")
MOST_SILENCE_S = 3.0  # after which a replica that announces nothing gets no requests
MOST_BLOCKS = 1 << 20


@dataclass(slots=True, kw_only=True)
class Member:
    """A replica as it was announced last. `sent` are tokens of requests since then."""

    newest: Announcement
    heard_s: float
    following: asyncio.Task[None]
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class _View:
    """What the events of one replica say goes to the router."""

    router: Router[str]
    replica: str

    def stored(self, names: list[int], medium: str | None) -> None:
        self.router.stored(self.replica, names, medium)

    def removed(self, names: list[int], medium: str | None) -> None:
        self.router.removed(self.replica, names, medium)

    def cleared(self) -> None:
        self.router.cleared(self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A replica, and how many of the prompt's tokens it has."""

    replica: str
    member: Member
    cached: int


class RouterReplica:
    """One for an application."""

    def __init__(self, routing: Routing, prefill_from: int, silence_s: float) -> None:
        self._routing: Routing = routing
        self._from = prefill_from
        self._silence_s = min(silence_s, MOST_SILENCE_S)
        self._members: dict[Role, dict[str, Member]] = {"prefill": {}, "decode": {}}
        self._routers: dict[Role, Router[str]] = {}

    async def announce(self, about: Announcement) -> None:
        """A replica takes requests. One that says what cannot be has said nothing."""
        if not 0 <= about.load < inf:
            LOGGER.warning("%s says that its load is %s: not heard", about.replica, about.load)
            return
        now, members = time.monotonic(), self._members[about.role]
        member = members.get(about.replica)
        if member is not None and member.newest.endpoint == about.endpoint:
            member.newest, member.heard_s, member.sent = about, now, 0.0
            return
        if member is not None:  # another process under its name
            self._drop(about.role, about.replica)
        router = self._router(about)
        router.add(about.replica)
        follower = Follower(about.endpoint, about.replay, _View(router, about.replica))
        task = asyncio.create_task(follower.run())
        members[about.replica] = Member(newest=about, heard_s=now, following=task)

    async def choose(
        self, ids: Ids, salt: str | None, session: str | None, avoided: frozenset[str]
    ) -> Way | None:
        """None if no replica is known: it may be announced at any time. A prompt goes to a prefill
        replica if the one that answers lacks `prefill_from` tokens of it. A
        request cannot go on from blocks that came from elsewhere, until an answer has passed them:
        a replica that keeps no states of requests (in tiers) is taken to lack all."""
        self._forget_silent()
        decode, prefill = self._choose("decode", ids, salt, session, avoided), None
        if decode is None:
            return None
        lacking = len(ids) - decode.cached
        helpers = self._members["prefill"]
        if helpers and (lacking if decode.member.newest.resumes else len(ids)) >= self._from:
            prefill = self._choose("prefill", ids, salt, session, avoided)
        if prefill is None:
            decode.member.sent += lacking
            return Way(decode=decode.replica, prefill=None)
        decode.member.sent += 1
        prefill.member.sent += len(ids) - prefill.cached
        return Way(decode=decode.replica, prefill=prefill.replica)

    async def reroute(self, routing: Routing) -> None:
        """From now on requests are routed so. What is known stays."""
        self._routing = routing
        for router in self._routers.values():
            router.routing = routing

    async def state(self) -> dict[str, Any]:
        """What it knows of the replicas."""
        self._forget_silent()
        return {
            "pid": os.getpid(),
            "routing": self._routing,
            "replicas": {
                name: {
                    "role": role,
                    "pid": member.newest.pid,
                    "node": member.newest.node,
                    "jobs": member.newest.jobs,
                    "load": member.newest.load,
                    "cached_tokens": member.newest.cached_tokens,
                    "prompt_tokens": member.newest.prompt_tokens,
                    "blocks": self._routers[role].blocks_of(name),
                }
                for role, members in self._members.items()
                for name, member in members.items()
            },
        }

    # ---- inside

    def _router(self, about: Announcement) -> Router[str]:
        router = self._routers.get(about.role)
        if router is None:
            router = self._routers[about.role] = Router(
                routing=self._routing,
                block_tokens=about.naming.block_tokens,
                most_blocks=MOST_BLOCKS,
            )
        return router

    def _drop(self, role: Role, name: str) -> None:
        self._members[role].pop(name).following.cancel()
        self._routers[role].remove(name)

    def _forget_silent(self) -> None:
        oldest = time.monotonic() - self._silence_s
        for role, members in self._members.items():
            for name in [name for name, each in members.items() if each.heard_s < oldest]:
                self._drop(role, name)

    def _choose(
        self,
        role: Role,
        ids: Ids,
        salt: str | None,
        session: str | None,
        avoided: frozenset[str],
    ) -> _Chosen | None:
        """None if no replica of this role has announced itself."""
        members = self._members[role]
        if not members:
            return None
        naming = next(iter(members.values())).newest.naming
        loads = {name: each.newest.load + each.sent for name, each in members.items()}
        names = naming.names(ids, salt)
        choice = self._routers[role].choose(names, session, loads, avoid=avoided)
        return _Chosen(
            replica=choice.replica,
            member=members[choice.replica],
            cached=sum(choice.blocks) * naming.block_tokens,
        )

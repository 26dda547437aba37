"""`manager.tiers`: memory below the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.changes import Uncopied, changes, release_now
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.prefix.resume import PrefixMatch, Resume
from dsv4.cache.prefix.trail import TokenIds
from dsv4.cache.requests import Condition, Request
from dsv4.cache.residency.records import blocks_of
from dsv4.cache.stats import TransferStats
from dsv4.cache.transfers.aside import Aside
from dsv4.cache.transfers.copies import Copies
from dsv4.cache.transfers.fetch import Fetch, Fetches
from dsv4.cache.transfers.labels import Labels
from dsv4.cache.transfers.offload import Offload, Route, Suspended
from dsv4.cache.transfers.worker import Worker
from dsv4.errors import InvalidInput, RecoveryNeeded, RequestError, ThreadError, require_timeout
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.record import Kind, Region
from dsv4.tiers.sizes import HEADER_BYTES, padded
from dsv4.tiers.tier import CLOSE_S, Tier, TierStats

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager

TIER_CALLS = ("register", "lookup", "load", "store", "poll", "cancel", "stats")
STAGED_BLOCKS = 64  # of host memory, where no tier keeps any
STAGED_SNAPSHOTS = 4
FETCH_POLL_S = 0.0002


class Tiers(Uncopied):
    """The tiers of one manager, the fastest first: what it caches is stored there too (`offload`),
    and loaded again for a prompt (`fetches`).

    All copies end in a host tier; without one, in a little host memory for that alone. No call
    waits for a tier or for the device except `admit`, `resume`, `drain` and `close`, which have
    timeouts; and no call raises because a tier failed. They count as calls of the manager: one at
    a time changes it, and a call that raises has changed nothing.
    """

    _instead = "build another manager"
    _internal: ClassVar[frozenset[str]] = frozenset(
        (
            *("before_release", "end_fetches", "fetches", "host", "labels", "offload"),
            *("pump", "release_deferred", "route", "stats", "tier_stats"),
        )
    )

    def __init__(self, manager: KVCacheManager, tiers: Sequence[Tier]) -> None:
        parts, memory = manager._parts, manager.memory
        prefix = parts.prefix
        if not prefix:
            raise InvalidInput("tiers keep prefixes: build the manager with prefix=PrefixOptions()")
        _require_tiers(tiers, prefix.options.model_id, encrypt=prefix.options.encrypt)
        self._manager, self._parts, self._guard = manager, parts, parts.guard
        self._tiers, self._prefix = tuple(tiers), prefix
        self.labels = Labels(prefix.schema, prefix.options.secret())
        hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
        self.host = hosts[0] if hosts else _staging(self.labels)
        shares = parts.residency is not None and bool(hosts)
        self.host.open_for(self, alone=shares)
        if memory.device.type == "cuda":
            self.host.pin()
        below = [tier for tier in self._tiers if tier is not self.host]
        for tier in below:
            tier.register(self.host.region)
        self.route = Route(
            # calls of these do not wait; host memory needs no thread for that
            tiers=[tier if isinstance(tier, HostTier) else Aside(tier) for tier in self._tiers],
            host=self.host,
            host_is_tier=bool(hosts),
            has_below=bool(below),
            copies=Copies(memory.device, self.host.region.memory),
            worker=Worker(self.host, below, host_is_tier=bool(hosts)),
            notices=prefix.notices,
        )
        blocks = blocks_of(memory.block_arena.bytes, parts.residency, parts.table.allocator)
        for shared in blocks.share(self.host):
            for tier in below:
                tier.register(Region(name="entries", memory=shared))
        if blocks.shares:
            parts.table.supply.make_room = self.host.keep_limit
        self.offload = Offload(
            self.route,
            prefix=prefix,
            labels=self.labels,
            blocks=blocks,
            slot_arena=memory.slot_arena.bytes,
        )
        self.fetches = Fetches(
            self.route,
            prefix=prefix,
            table=parts.table,
            labels=self.labels,
            blocks=blocks,
        )
        self._suspended = self._resumed = 0
        prefix.notices.observe(self.offload)
        prefix.index.has_tiers = True  # blocks that are stored elsewhere are evicted first

    def __bool__(self) -> bool:
        """Whether the manager has tiers."""
        return True

    @property
    def all(self) -> tuple[Tier, ...]:
        """The fastest first."""
        return self._tiers

    def __repr__(self) -> str:
        return f"Tiers({', '.join(map(repr, self._tiers))})"

    # ---- calls -----------------------------------------------------------------------------------

    @changes
    def fetch(self, prompt: TokenIds | Prompt, salt: str | None = None) -> Fetch:
        """Starts to bring what tiers have of a prompt after what is cached, and returns at once:
        `poll` the fetch until it is over, then `manager.admit_request` finds what came. Blocks that
        bytes are on their way into are in flight: no request has them. What cannot be loaded is
        left out, and no tier raises. Raises InvalidInput, ContextOverflow."""
        return self._fetch(prompt, salt, last=1)

    def admit(
        self, prompt: TokenIds | Prompt, salt: str | None = None, *, timeout_s: float
    ) -> Request:
        """`fetch`, waiting for at most `timeout_s`, then `manager.admit_request`. What has not
        arrived by then is computed. If the prompt continues a suspended request, it continues from
        its state. Other calls may come in between. Raises what both raise."""
        return self._admit(prompt, salt, timeout_s, last=1)

    @changes
    def suspend(self, request: Request) -> Suspended:
        """Takes a live request off the device; `resume` with its token ids restores it unchanged:
        after a preemption, a long wait, in another process, with other draft settings. Its slot and
        blocks are released at once; its whole blocks stay cached as usual.

        The ids of all its tokens must be known (`commit(ids=...)`, `supply_ids`). In the middle of
        a replay no state is kept; what is missing is computed again. Raises InvalidInput;
        RequestError, also after `close`, which nothing is stored after.
        """
        self._parts.steps.require_unplanned(request)
        if not self.route.tiers:
            raise RequestError(
                f"manager.tiers is closed, so nothing would keep the state of request "
                f"{request.serial}: suspend it before close, or release it"
            )
        if request.condition is not Condition.INCOMPLETE:  # not all of whose ids are known
            request.require("suspend")
        known = 0 if request.trail is None else len(request.trail.ids)
        if request.trail is None or known < request.length:
            raise InvalidInput(
                f"{known} of the {request.length} token ids of request {request.serial} are known: "
                f"admit it with ids and supply the others, because it is found by its ids"
            )
        suspended = self._suspend(request)
        self._parts.leaving.release(request)
        return suspended

    def resume(
        self, prompt: TokenIds | Prompt, salt: str | None = None, *, timeout_s: float
    ) -> Request:
        """Restores the suspended request with these token ids, waiting for at most `timeout_s`. If
        its state is there, `request.resume.run` is empty; if not, it does what `admit` does. Raises
        what that raises."""
        return self._admit(prompt, salt, timeout_s, last=0)

    @changes
    def drain(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` until all that is cached is kept by tiers, or dropped: before
        the process ends. Returns whether that is so. Closes no tier."""
        return self._drain(require_timeout(timeout_s))

    @changes
    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Cancels fetches, drains for at most `timeout_s`, and ends the thread. From now on
        nothing is stored and nothing is loaded; the manager can still be used. Closes no tier: they
        belong to the caller. A manager that is dropped does the same, without waiting, when it is
        collected."""
        until = time.monotonic() + require_timeout(timeout_s)
        for fetch in tuple(self.route.open):
            self.fetches.cancel(fetch)
        self._drain(timeout_s)
        self._end_quotas()
        self.route.tiers = ()
        self.route.worker.close(max(0.0, until - time.monotonic()))
        self.host.close_for(self)
        if not self.route.host_is_tier:
            self.host.close(max(0.0, until - time.monotonic()))

    def _end_quotas(self) -> None:
        """Those that this manager was given do not outlive it in its tiers."""
        for root in self._parts.table.supply.quotas:
            for tier in self._tiers:
                if isinstance(tier, HostTier | DiskTier):
                    tier.limit(root, None)

    # ---- up --------------------------------------------------------------------------------------

    def _fetch(
        self, prompt: TokenIds | Prompt, salt: str | None, *, last: int, with_state: bool = False
    ) -> Fetch:
        """For all tokens of a prompt except the `last` ones."""
        count, trail = self._parts.admission.read(prompt, salt)
        if trail is None:
            raise InvalidInput(f"{prompt!r}: tiers are asked for token ids, not for a count")
        self.pump()
        tokens = max(0, count - last)
        fetch = Fetch(
            trail, tokens, with_state=with_state, poll=self._poll_fetch, cancel=self._cancel_fetch
        )
        self._guard.change.hand_out(fetch)
        self.fetches.start(fetch)
        return fetch

    @changes
    def _fetch_with_state(self, prompt: Prompt, salt: str | None, last: int) -> Fetch:
        return self._fetch(prompt, salt, last=last, with_state=True)

    @changes
    def _poll_fetch(self, fetch: Fetch) -> None:
        self.pump()
        self.fetches.advance(fetch)

    @changes
    def _cancel_fetch(self, fetch: Fetch) -> None:
        self.fetches.cancel_now(fetch)

    def _admit(
        self, prompt: TokenIds | Prompt, salt: str | None, timeout_s: float, *, last: int
    ) -> Request:
        manager = self._manager
        if not isinstance(prompt, Prompt):
            prompt, salt = manager.prefix.prompt(prompt, salt), None
        seconds = require_timeout(timeout_s)
        if self._parts.table.supply.limits:
            self._parts.admission.require_within(prompt, salt)
        fetch = self._fetch_with_state(prompt, salt, last)
        try:
            self._wait_for(fetch, seconds)
            return self._admit_state(prompt, fetch) or manager.admit_request(prompt)
        except BaseException:  # ends now, or with the next call if another one is inside
            self._guard.defer(fetch)
            with suppress(ThreadError, RecoveryNeeded):
                release_now(self)
            raise

    def _wait_for(self, fetch: Fetch, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not fetch.poll() and time.monotonic() < until:
            time.sleep(FETCH_POLL_S)
        fetch.cancel()

    @changes
    def _admit_state(self, prompt: Prompt, fetch: Fetch) -> Request | None:
        """A request with the state that was fetched; None if it or a block before it did not
        arrive."""
        row = self.fetches.take_state(fetch)
        return None if row is None else self._admit_row(prompt, fetch, row)

    def _admit_row(self, prompt: Prompt, fetch: Fetch, row: HostRow) -> Request | None:
        """With the state in a row of host memory, which is released."""
        try:
            tokens = row.label.tokens
            blocks = tokens // self.labels.block_tokens
            nodes = self._prefix.index.match(fetch.trail, blocks)
            if len(nodes) < blocks:
                return None
            resume = Resume(start=tokens, reused_tokens=tokens, end=len(prompt), source="state")
            match, trail = PrefixMatch(nodes, resume, None), fetch.trail.copy()
            state = self._state_of(row, tokens)
            request = self._parts.admission.from_state(self._prefix, match, trail, *state)
            self._resumed += 1
            return request
        finally:
            self.host.release(row)

    def _state_of(self, row: HostRow, length: int) -> tuple[Tensor, Tensor]:
        """A state as a slot of this schema and as the unfinished block, on the host."""
        layout = self.labels.state
        payload = np.concatenate([np.frombuffer(each, np.uint8) for each in row.parts.payload])
        slot = np.zeros(self._prefix.schema.bytes.slot, dtype=np.uint8)
        layout.scatter(payload, length, slot)
        return torch.from_numpy(slot), torch.from_numpy(layout.block_of(payload))

    # ---- down ------------------------------------------------------------------------------------

    def _suspend(self, request: Request) -> Suspended:
        self._suspended += 1
        suspended = self.offload.suspend(request)
        self.pump()
        return suspended

    def _drain(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while True:
            self.pump()
            if self.offload.is_idle:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.0005)

    # ---- for the manager -------------------------------------------------------------------------

    def _release_deferred(self) -> None:
        self._manager._release_deferred()

    def pump(self) -> None:
        """Advances what is on its way: after each step, and with each call of tiers."""
        self.offload.pump()
        self.fetches.clean()

    def before_release(self, request: Request) -> None:
        """Keeps the state of a request that is about to be released, if it can be kept."""
        trail = request.trail
        known = trail is not None and len(trail.ids) >= request.length
        if known and request.condition.allows("suspend"):
            self._suspend(request)

    def release_deferred(self, item: object) -> bool:
        """Ends a fetch that nothing refers to any more; False if it is not a fetch."""
        if not isinstance(item, Fetch):
            return False
        self.fetches.release(item)
        return True

    def end_fetches(self) -> None:
        """After an interrupt: nothing is in flight any more."""
        self.route.copies.finish()
        self.offload.release_begun()
        self.fetches.abandon_all()

    def stats(self) -> TransferStats:
        offload, fetches, route = self.offload, self.fetches, self.route
        return TransferStats(
            records_waiting=offload.waiting,
            records_copied=offload.copied,
            records_stored=offload.stored,
            records_dropped=offload.dropped,
            records_refused=route.refused,
            records_fetched=route.records,
            bytes_copied=offload.copied_bytes,
            bytes_fetched=route.bytes,
            tokens_fetched=fetches.tokens,
            tokens_by_tier=dict(fetches.tokens_by_tier),
            fetches=fetches.started,
            fetches_cancelled=fetches.cancelled,
            fetches_open=len(route.open),
            requests_suspended=self._suspended,
            requests_resumed=self._resumed,
        )

    def tier_stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats() for tier in self._tiers)


def _require_tiers(tiers: Sequence[Tier], model_id: str, *, encrypt: bool) -> None:
    """InvalidInput."""
    if not model_id:
        raise InvalidInput(
            "tiers outlive the process, so records must say which weights they are of: give "
            "PrefixOptions(model_id=...), for example a hash of the checkpoint's index"
        )
    for tier in tiers:
        if not all(callable(getattr(tier, call, None)) for call in TIER_CALLS):
            raise InvalidInput(
                f"{tier!r} is not a tier: give HostTier(...), DiskTier(...) or what has the calls "
                f"{', '.join(TIER_CALLS)}"
            )
        if getattr(tier, "is_closed", False):
            raise InvalidInput(f"{tier!r} is closed, and would keep nothing: make another one")
        if encrypt and not (isinstance(tier, HostTier) or getattr(tier, "encrypts", False)):
            raise InvalidInput(
                f"encrypt=True: {tier!r} would get records as they are: encrypt where it keeps "
                f"them, or leave it out"
            )
    if len({tier.name for tier in tiers}) != len(tiers):
        raise InvalidInput("two tiers have the same name: give each one its own")
    if sum(isinstance(tier, HostTier) for tier in tiers) > 1:
        raise InvalidInput("two host tiers: one is enough, give it more memory")


def _staging(labels: Labels) -> HostTier:
    """Host memory that records only pass through, for a manager without a host tier."""
    most = [(Kind.BLOCK, STAGED_BLOCKS), (Kind.SNAPSHOT, STAGED_SNAPSHOTS), (Kind.STATE, 1)]
    size_bytes = sum(
        rows * padded(HEADER_BYTES + labels.payload_bytes(kind)) for kind, rows in most
    )
    return HostTier(size_bytes, name="staging")

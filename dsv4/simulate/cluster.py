"""A trace on many replicas: who gets which request, and what happens when. Torch-free."""

from __future__ import annotations

import gc
import heapq
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from dsv4.cache.hot_rows import HotLayout
from dsv4.cache.prefix.eviction import EvictionPolicy, LeastRecentlyUsed
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import Cause, NewlyCached, Observer
from dsv4.cache.prefix.options import SnapshotPolicy, periodic
from dsv4.cache.prefix.retention import Retention
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.schema import CacheSchema, compute_block_budget
from dsv4.cache.state import SnapshotLayout
from dsv4.errors import InvalidInput, is_number, require_count, require_flag
from dsv4.residency_planner import selected_bytes
from dsv4.routing.router import ROUTINGS, Router, Routing
from dsv4.simulate.device import Device
from dsv4.simulate.names import block_names, name_of
from dsv4.simulate.replica import EntryPlaces, Replica, SimJob
from dsv4.simulate.results import Percentiles, Simulated
from dsv4.simulate.speeds import Speeds
from dsv4.simulate.tiers import CountedTier, CountedTiers
from dsv4.simulate.trace import TraceRequest

UNBOUNDED_BLOCKS = 1 << 40  # of a device without a limit
MOST_REPLICAS = 1 << 20  # more are a slip
POLICIES: dict[str, Callable[[Callable[[], float]], EvictionPolicy]] = {
    "retention": lambda now: Retention(now=now),
    "lru": lambda now: LeastRecentlyUsed(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. `memory_bytes` is what a replica's cache has on its device (None: no
    limit): slots for `max_requests` requests and `snapshots` states (default: as many as two for
    each slot) come from it too. `host_bytes` and `disk_bytes` are those of its tiers; with
    `residency` host memory has the entries instead, of which a request's hot rows answer
    `hot_share`. `most_waiting` requests wait at a replica, others are refused. `untimed`: one
    request after the other, without answers."""

    schema: CacheSchema
    speeds: Speeds
    replicas: int = 1
    memory_bytes: int | None = None
    host_bytes: int = 0
    disk_bytes: int = 0
    routing: Routing = "prefix"
    policy: str = "retention"
    residency: bool = False
    hot_share: float = 0.0
    max_requests: int = 64
    step_tokens: int = 8192
    snapshot_policy: SnapshotPolicy = field(default_factory=lambda: periodic(1024))
    snapshots: int | None = None
    most_waiting: int | None = None
    router_blocks: int = 1 << 20
    untimed: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidInput."""
        for name in ("replicas", "max_requests", "step_tokens", "router_blocks"):
            require_count(name, getattr(self, name))
        for name in ("host_bytes", "disk_bytes", "snapshots", "most_waiting"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), at_least=0)
        if self.replicas > MOST_REPLICAS:
            raise InvalidInput(f"replicas={self.replicas}: at most {MOST_REPLICAS:,} are simulated")
        for name in ("residency", "untimed"):
            require_flag(name, getattr(self, name))
        if self.policy not in POLICIES:
            raise InvalidInput(f"policy={self.policy!r}: must be one of {', '.join(POLICIES)}")
        if self.routing not in ROUTINGS:
            raise InvalidInput(f"routing={self.routing!r}: must be one of {', '.join(ROUTINGS)}")
        if not is_number(self.hot_share) or not 0 <= self.hot_share <= 1:
            raise InvalidInput(f"hot_share={self.hot_share!r}: must be a number from 0 to 1")
        if self.hot_share and not self.residency:
            raise InvalidInput(f"hot_share={self.hot_share!r} is of residency, which is off")
        if self.residency and self.disk_bytes:
            raise InvalidInput(
                "with residency host memory has the entries, and no tiers are simulated below: "
                "leave out the disk"
            )
        if self.residency and not (self.host_bytes and self.memory_bytes):
            raise InvalidInput(
                "residency keeps entries in host memory: say how much of it there is, and of the "
                "device's"
            )
        if not self.schema.bytes.block:
            raise InvalidInput("a model of window-only layers keeps nothing in blocks: no prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many blocks and snapshots a replica has, and where its entries are."""

    blocks: int
    snapshots: int
    places: EntryPlaces | None

    @classmethod
    def of(cls, setup: Setup) -> Sizes:
        """Raises PoolTooSmall, InvalidInput."""
        schema = setup.schema
        rows = 2 * setup.max_requests if setup.snapshots is None else setup.snapshots
        if setup.snapshot_policy.kind == "zero":
            rows = 0
        if setup.memory_bytes is None:
            return cls(blocks=UNBOUNDED_BLOCKS, snapshots=rows, places=None)
        other_bytes = rows * SnapshotLayout(schema).row_bytes
        if not setup.residency:
            budget = compute_block_budget(
                schema,
                memory_bytes=setup.memory_bytes,
                max_requests=setup.max_requests,
                context=schema.block_tokens,
                other_bytes=other_bytes,
            )
            return cls(blocks=budget.num_blocks, snapshots=rows, places=None)
        hot = HotLayout(schema)
        chunk_rows = -(-setup.step_tokens // schema.block_tokens)
        budget = compute_block_budget(
            schema,
            memory_bytes=setup.memory_bytes,
            max_requests=setup.max_requests,
            context=schema.block_tokens,
            other_bytes=other_bytes + setup.max_requests * hot.slot_bytes + 2 * hot.staged_bytes,
            host_bytes=setup.host_bytes,
            needed_entry_rows=chunk_rows + setup.max_requests * hot.open_rows,
        )

        def selected(tokens: int) -> int:
            return selected_bytes(schema, tokens)

        places = EntryPlaces(
            rows=budget.entry_rows,
            block_bytes=schema.bytes.entries,
            selected=selected,
            hot_share=setup.hot_share,
        )
        return cls(blocks=budget.num_blocks, snapshots=rows, places=places)


class Feed(Observer):
    """What a replica's events say to the router."""

    def __init__(self, router: Router[int], replica: int) -> None:
        self._router, self._replica = router, replica

    def cached(self, new: NewlyCached, trail: TokenTrail) -> None:
        if not new.is_snapshot:
            self._router.stored(self._replica, (name_of(new.node.digest),))

    def landed(self, node: PrefixNode, trail: TokenTrail) -> None:
        self._router.stored(self._replica, (name_of(node.digest),))

    def left(self, victims: Sequence[PrefixNode], cause: Cause) -> None:
        self._router.removed(self._replica, [name_of(node.digest) for node in victims])

    def report(self, medium: str, digests: Iterable[bytes], is_there: bool) -> None:
        names = [name_of(digest) for digest in digests]
        if is_there:
            self._router.stored(self._replica, names, medium)
        else:
            self._router.removed(self._replica, names, medium)


class Simulation:
    """All replicas of a setup, made when their first request comes. `run` is called once."""

    def __init__(self, setup: Setup) -> None:
        """Raises InvalidInput, PoolTooSmall."""
        self.setup, self.sizes = setup, Sizes.of(setup)
        self.now_s = 0.0
        self.replicas: dict[int, Replica] = {}
        self._tiers: dict[int, CountedTiers] = {}
        self._router: Router[int] = Router(
            range(setup.replicas),
            routing=setup.routing,
            block_tokens=setup.schema.block_tokens,
            most_blocks=setup.router_blocks,
        )
        schema = setup.schema
        self._most_tokens = min(schema.max_context, self.sizes.blocks * schema.block_tokens)
        self._feeds = setup.routing != "round-robin" and setup.replicas > 1
        self._events: list[tuple[float, int, int]] = []  # when, number of the event, replica
        self._valid: dict[int, int] = {}  # of each replica, the number of its event
        self._number = 0
        self._loads: dict[int, float] = {}
        # of requests and steps that have ended
        self._ttft_s, self._steps_s, self._step_counts = array("d"), array("d"), array("q")
        self._hit = [0, 0, 0]  # device, host, disk
        self._asked = self._answers = self._requests = self._refused = 0

    def run(
        self,
        trace: Iterable[TraceRequest],
        progress: Callable[[int], None] | None = None,
    ) -> Simulated:
        """Replays a trace, whose requests come in the order of time. `progress` is called with the
        number of requests that have come, a thousand at a time. Raises InvalidInput."""
        began_s = time.perf_counter()
        last_s = 0.0
        with _uncollected():
            for number, request in enumerate(trace):
                if request.at_s < last_s:
                    raise InvalidInput(
                        f"request {number} of the trace comes before the one before it"
                    )
                last_s = request.at_s
                self._arrive(number, request)
                if progress is not None and number % 1000 == 999:
                    progress(number + 1)
            self._advance(inf)
            return self._result(time.perf_counter() - began_s)

    # ---- what happens ------------------------------------------------------------------------

    def _arrive(self, number: int, request: TraceRequest) -> None:
        setup = self.setup
        self._advance(inf if setup.untimed else request.at_s)
        at_s = max(self.now_s, request.at_s) if setup.untimed else request.at_s
        self.now_s = at_s
        prompt = max(1, request.input_tokens)
        new = 1 if setup.untimed else max(1, request.output_tokens)
        names = block_names(request, setup.schema.block_tokens)
        self._requests += 1
        self._asked += prompt
        if prompt + new > self._most_tokens:  # as the server says at once
            self._refused += 1
            return
        whole = prompt // setup.schema.block_tokens
        chosen = self._choose(names[:whole], request.session)
        replica = self.replicas.get(chosen)
        if replica is None:
            replica = self._make(chosen)
        if setup.most_waiting is not None and len(replica.waiting) >= max(1, setup.most_waiting):
            self._refused += 1
            return
        session = request.session
        replica.submit(
            SimJob(
                number=number,
                arrival_s=at_s,
                prompt_tokens=prompt,
                new_tokens=new,
                names=names,
                # a session that is only guessed is not a hint: what it leaves may be another's
                hints=Hints(session=session) if session and session[0] != "#" else None,
            )
        )
        if replica.flight is None:
            self._begin(chosen, replica)
        else:
            self._schedule(chosen, replica.flight.end_s)
            self._note_load(chosen, replica)  # those that come at once see each other

    def _choose(self, names: list[int], session: str | None) -> int:
        if self.setup.replicas == 1:
            return 0
        return self._router.choose(names, session, self._loads).replica

    def _advance(self, until_s: float) -> None:
        """Everything that happens up to a time."""
        events = self._events
        while events and events[0][0] <= until_s:
            at_s, number, which = heapq.heappop(events)
            if self._valid.get(which) != number:
                continue
            del self._valid[which]
            self.now_s = at_s
            replica = self.replicas[which]
            replica.finish()
            self._begin(which, replica)

    def _begin(self, which: int, replica: Replica) -> None:
        at_s = replica.begin(self.now_s)
        if at_s is not None:
            self._schedule(which, at_s)
        self._note_load(which, replica)

    def _note_load(self, which: int, replica: Replica) -> None:
        """What replicas announce: tokens that have not run, and one for each request."""
        load = replica.load + len(replica.running) + len(replica.waiting)
        if load:
            self._loads[which] = load
        else:
            self._loads.pop(which, None)

    def _schedule(self, which: int, at_s: float) -> None:
        self._number += 1
        self._valid[which] = self._number
        heapq.heappush(self._events, (at_s, self._number, which))

    def _make(self, which: int) -> Replica:
        setup, feed = self.setup, Feed(self._router, which)
        device = Device(
            setup.schema,
            POLICIES[setup.policy](self._now),
            num_blocks=self.sizes.blocks,
            snapshots=setup.snapshot_policy,
            snapshot_rows=self.sizes.snapshots,
            has_state_bytes=self._has_state_bytes,
            now=self._now,
        )
        tiers = None
        if not setup.residency and (setup.host_bytes or setup.disk_bytes):
            kept = [
                CountedTier(name, medium, size)
                for name, medium, size in (
                    ("host", "CPU", setup.host_bytes),
                    ("disk", "DISK", setup.disk_bytes),
                )
                if size
            ]
            report = feed.report if self._feeds else lambda *_: None
            tiers = self._tiers[which] = CountedTiers(setup.schema, kept, report)
            device.observe(tiers)
        if self._feeds:
            device.observe(feed)
        replica = self.replicas[which] = Replica(
            device,
            setup.speeds,
            max_requests=setup.max_requests,
            step_tokens=setup.step_tokens,
            tiers=tiers,
            places=self.sizes.places,
            on_step=self._stepped,
            on_end=self._ended,
        )
        return replica

    def _now(self) -> float:
        return self.now_s

    @cached_property
    def _has_state_bytes(self) -> bool:
        return SnapshotLayout(self.setup.schema).row_bytes > 0

    # ---- what is counted ---------------------------------------------------------------------

    def _stepped(self, step_s: float, steps: int) -> None:
        self._steps_s.append(step_s)
        self._step_counts.append(steps)

    def _ended(self, job: SimJob, now_s: float) -> None:
        self._refused += job.is_refused
        if job.first_s is not None:
            self._ttft_s.append(job.first_s - job.arrival_s)
        self._answers += job.known - job.prompt_tokens
        elsewhere = 0
        names = [name for name, size in self._tier_sizes if size]
        for name, tokens in zip(names, job.landed, strict=False):
            used = min(tokens, job.shared - elsewhere)
            self._hit[1 if name == "host" else 2] += used
            elsewhere += used
        self._hit[0] += job.shared - elsewhere

    @property
    def _tier_sizes(self) -> tuple[tuple[str, int], ...]:
        return ("host", self.setup.host_bytes), ("disk", self.setup.disk_bytes)

    def _result(self, wall_s: float) -> Simulated:
        setup, replicas = self.setup, [*self.replicas.values()]
        tiers = [tier for each in self._tiers.values() for tier in each.tiers]
        entries = setup.schema.bytes.entries
        down = sum(tier.stored_bytes for tier in tiers)
        if setup.residency:  # each block that was ever used is copied once
            down += sum(len(each.device.index) + each.device.index.evictions for each in replicas)
            down = down * entries
        peaks = {
            tier: max((each.most_used_bytes for each in tiers if each.name == tier), default=0)
            for tier in ("host", "disk")
        }
        used = max((each.device.allocator.most_used for each in replicas), default=0)
        peaks["device"] = used * setup.schema.bytes.block
        if setup.residency:
            peaks["host"] = used * entries
        device, host, disk = self._hit
        return Simulated(
            replicas=setup.replicas,
            memory_bytes=setup.memory_bytes,
            host_bytes=setup.host_bytes,
            disk_bytes=setup.disk_bytes,
            routing=setup.routing,
            policy=setup.policy,
            residency=setup.residency,
            blocks=self.sizes.blocks,
            requests=self._requests,
            refused=self._refused,
            tokens_asked=self._asked,
            tokens_hit={"device": device, "host": host, "disk": disk},
            tokens_run={
                "all": sum(each.counts.tokens_run for each in replicas),
                "replayed": sum(each.counts.tokens_replayed for each in replicas),
                "answers": self._answers,
            },
            evictions=sum(each.device.index.evictions for each in replicas),
            preemptions=sum(each.counts.preemptions for each in replicas),
            steps=sum(each.counts.steps for each in replicas),
            bytes_moved={
                "down": down,
                "up": sum(tier.loaded_bytes for tier in tiers)
                + sum(each.counts.fetched_bytes for each in replicas),
            },
            peaks=peaks,
            ttft=Percentiles.of(self._ttft_s),
            step=Percentiles.of(self._steps_s, self._step_counts),
            span_s=self.now_s,
            has_weights=setup.speeds.has_weights,
            wall_s=wall_s,
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, in all threads: nothing here makes any, and with tens of
    millions of cached blocks it takes more time than all that is simulated."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def simulate(
    trace: Iterable[TraceRequest],
    setup: Setup,
    progress: Callable[[int], None] | None = None,
) -> Simulated:
    """What a trace does on a setup. Raises InvalidInput, PoolTooSmall."""
    return Simulation(setup).run(trace, progress)

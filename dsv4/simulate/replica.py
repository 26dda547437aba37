"""One simulated replica: the steps of `dsv4.engine.Engine`, in counts. Torch-free.

A job waits, is admitted, runs its prompt in chunks and then a token a step, and gives its blocks
back when memory is short, as there; tests/simulate/test_engine.py holds both together. Steps of
decodes alone, in which no request needs a block, are taken many at once.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.resume import replay_start
from dsv4.errors import OutOfBlocks
from dsv4.simulate.device import Device, Held
from dsv4.simulate.names import NamedTrail
from dsv4.simulate.speeds import Speeds
from dsv4.simulate.tiers import CountedTiers, Found
from dsv4.tiers.key import Kind

LOOK_AHEAD = 4  # of the engine


@dataclass(slots=True, eq=False, kw_only=True)
class SimJob:
    """A request. `known` counts its tokens that exist, `device_tokens` and the others those that
    were found when it was first admitted, `skipped` those that did not run again."""

    number: int
    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    names: list[int]
    hints: Hints | None = None
    known: int = 0
    held: Held | None = None
    trail: NamedTrail | None = None
    is_refused: bool = False
    first_s: float | None = None
    last_step: int = 0
    preemptions: int = 0
    skipped: int = 0
    shared: int = 0
    landed: tuple[int, ...] = ()  # tokens that each tier gave
    ready_s: float | None = None  # when what tiers have of it has arrived
    found: Found | None = None

    @property
    def is_complete(self) -> bool:
        return self.known >= self.prompt_tokens + self.new_tokens

    def __lt__(self, other: SimJob) -> bool:
        return self.number < other.number


@dataclass(slots=True, eq=False)
class Share:
    job: SimJob
    held: Held
    count: int
    samples: bool


@dataclass(slots=True, eq=False, kw_only=True)
class Flight:
    """`steps` equal steps, one after the other."""

    shares: list[Share]
    steps: int
    begin_s: float
    step_s: float
    snapshots: list[tuple[Held, int, int]] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return self.begin_s + self.steps * self.step_s


@dataclass(slots=True, eq=False, kw_only=True)
class Counts:
    """What replicas have done."""

    tokens_run: int = 0
    tokens_replayed: int = 0
    steps: int = 0
    preemptions: int = 0
    fetched_bytes: int = 0  # of entries, by steps


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPlaces:
    """Residency: how many blocks have their entries on the device too, what entries of a block
    take, how many bytes a token's selections name at a context, and which share of them a request's
    hot rows have."""

    rows: int
    block_bytes: int
    selected: Callable[[int], int]
    hot_share: float


class Replica:
    """`begin` starts what can run at a time, `finish` ends it. Its driver calls `finish` at
    `until`, and `submit` and `begin` in between."""

    def __init__(
        self,
        device: Device,
        speeds: Speeds,
        *,
        max_requests: int,
        step_tokens: int,
        tiers: CountedTiers | None = None,
        places: EntryPlaces | None = None,
        on_step: Callable[[float, int], None] | None = None,
        on_end: Callable[[SimJob, float], None] | None = None,
    ) -> None:
        self.device, self.speeds = device, speeds
        self.max_requests, self.step_tokens = max_requests, step_tokens
        self.tiers, self._places = tiers, places
        self._on_step, self._on_end = on_step, on_end
        self.waiting: list[SimJob] = []  # by number, as those that run
        self.running: list[SimJob] = []
        self.flight: Flight | None = None
        self.counts = Counts()
        self.load = 0  # tokens of prompts that have not run
        self._link_free_s = 0.0
        device.index.has_tiers = tiers is not None

    # ---- driving -----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, job: SimJob) -> None:
        """A job that came. A running flight ends with the step that runs now."""
        job.known = job.prompt_tokens
        job.trail = self._trail(job)
        self.load += job.prompt_tokens
        insort(self.waiting, job)
        flight = self.flight
        if flight is not None and flight.steps > 1:
            passed = int((job.arrival_s - flight.begin_s) / flight.step_s) + 1
            flight.steps = max(1, min(flight.steps, passed))

    def begin(self, now_s: float) -> float | None:
        """Launches the next steps. Returns when something happens next, None if nothing will."""
        assert self.flight is None
        self.admit(now_s)
        shares = self.schedule()
        while shares:
            try:
                self._launch(shares, now_s)
            except OutOfBlocks as error:
                self._make_room(error, now_s)
                shares = [share for share in shares if share.job.held is share.held]
                continue
            break
        if self.flight is not None:
            return self.flight.end_s
        later = [job.ready_s for job in self.waiting if job.ready_s is not None]
        later = [at for at in later if at > now_s]
        if later:
            return min(later)
        return None if self.is_idle else now_s

    def finish(self) -> None:
        """The steps that run have ended: what they have computed is cached, answers grow."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        steps, end_s = flight.steps, flight.end_s
        self.counts.steps += steps
        if self._on_step is not None:
            self._on_step(flight.step_s, steps)
        ended, most = False, self.device.schema.max_decode_tokens
        for share in flight.shares:
            job, held = share.job, share.held
            job.last_step = self.counts.steps
            count = share.count if steps == 1 else steps
            if job.first_s is None:
                self.load -= count
            self.counts.tokens_run += count
            if held.length < held.resume.reused_tokens:
                replayed = min(count, held.resume.reused_tokens - held.length)
                self.counts.tokens_replayed += replayed
            if share.samples:
                job.known += steps
                if job.first_s is None:
                    job.first_s = flight.begin_s + flight.step_s
            self.device.advance(held, count, is_chunk=share.count > most)
            ended = ended or job.is_complete
        self.device.finish_snapshots(flight.snapshots)
        if ended:
            self._end_jobs(end_s)

    # ---- in the order of a step --------------------------------------------------------------

    def _end_jobs(self, now_s: float) -> None:
        for job in [job for job in self.running if job.is_complete or job.is_refused]:
            self._leave(job)
            self._ended(job, now_s)

    def _ended(self, job: SimJob, now_s: float) -> None:
        if job.first_s is None:
            self.load -= job.prompt_tokens  # nothing of it has run
        if self._on_end is not None:
            self._on_end(job, now_s)

    def _leave(self, job: SimJob) -> None:
        held, job.held = job.held, None
        self.running.remove(job)
        assert held is not None
        self.device.release(held)

    def _trail(self, job: SimJob) -> NamedTrail:
        block_tokens = self.device.schema.block_tokens
        trail = NamedTrail(job.names, block_tokens, job.known, job.number)
        trail.hints = job.hints
        return trail

    def admit(self, now_s: float) -> None:
        """Waiting jobs get blocks, as long as one block is left for each job that runs."""
        device = self.device
        while self.waiting and len(self.running) < self.max_requests:
            job = self._next_waiting(now_s)
            if job is None:
                return
            assert job.trail is not None
            spare = device.spare - len(self.running)
            if self.running and device.needed_blocks(job.trail) > spare:
                return
            try:
                if device.schema.blocks_for(job.trail.prompt_tokens) > device.allocator.total:
                    raise OutOfBlocks(
                        needed=0, free=0, total=0, asker_blocks=device.allocator.total + 1
                    )
                held = job.held = device.admit(job.trail)
            except OutOfBlocks as error:
                if error.never:
                    self.waiting.remove(job)
                    job.is_refused = True
                    self._ended(job, now_s)
                    continue
                return
            self.waiting.remove(job)
            insort(self.running, job)
            job.trail = job.found = job.ready_s = None
            if job.known == job.prompt_tokens:
                job.skipped, job.shared = held.length, held.resume.reused_tokens
                if job.first_s is None:
                    self.load -= held.length

    def _next_waiting(self, now_s: float) -> SimJob | None:
        """The oldest, or the first of a few that is mostly cached; with tiers, of those whose
        prompts have arrived."""
        waiting: Sequence[SimJob] = self.waiting[:LOOK_AHEAD]
        if self.tiers is not None:
            waiting = [job for job in waiting if self._has_arrived(job, self.tiers, now_s)]
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        return max(waiting, key=self._is_cheap)

    def _is_cheap(self, job: SimJob) -> bool:
        assert job.trail is not None
        return 2 * self.device.look_up(job.trail).start > job.trail.prompt_tokens

    def schedule(self) -> list[Share]:
        """Decodes first, those that waited longest before others; then chunks, the oldest first."""
        decodes, chunks = list[Share](), list[Share]()
        for job in self.running:
            held = job.held
            assert held is not None
            left = job.known - held.length
            (chunks if left > 1 else decodes).append(Share(job, held, left, True))
        decodes.sort(key=lambda share: share.job.last_step)
        left, shares = self.step_tokens, list[Share]()
        for share in (*decodes, *chunks):
            if left <= 0:
                break
            share.samples = share.count <= left
            share.count = min(share.count, left)
            left -= share.count
            shares.append(share)
        return shares

    def _launch(self, shares: list[Share], now_s: float) -> None:
        """Raises OutOfBlocks."""
        device = self.device
        pairs = [(share.held, share.count) for share in shares]
        reserved = device.reserve(pairs)
        most = device.schema.max_decode_tokens
        chunks = [pair for pair in pairs if pair[1] > most]
        snapshots = device.plan_snapshots(chunks) if chunks else []
        device.settle(pairs, reserved)
        device.rows.reserve_chosen([row for _, _, row in snapshots])
        few = [held for held, count in pairs if count <= most]
        decoding = sum(count for held, count in pairs if count <= most)
        step_s = self.speeds.step_s(
            decoding,
            sum(held.length for held in few),
            [(count, held.length) for held, count in chunks],
        )
        if self._places is not None:
            step_s += self._fetch_s(self._places, few, chunks)
        steps = 1
        if len(shares) == len(self.running) and all(
            share.count == 1 and share.samples for share in shares
        ):
            steps = self._equal_steps(shares)
        self.flight = Flight(
            shares=shares, steps=steps, begin_s=now_s, step_s=step_s, snapshots=snapshots
        )

    def _equal_steps(self, shares: Sequence[Share]) -> int:
        """How many steps follow in which nothing but lengths changes: no block ends before the
        last of them, no job ends, and none that waits is about to arrive."""
        block_tokens = self.device.schema.block_tokens
        steps = block_tokens
        for share in shares:
            job, held = share.job, share.held
            left = job.prompt_tokens + job.new_tokens - job.known
            steps = min(steps, left, block_tokens - held.length % block_tokens)
        return 1 if self._is_waiting_for_tiers else max(1, steps)

    @property
    def _is_waiting_for_tiers(self) -> bool:
        return any(job.ready_s is not None for job in self.waiting[:LOOK_AHEAD])

    def _make_room(self, error: OutOfBlocks, now_s: float) -> None:
        """Takes memory from the youngest job whose memory helps."""
        helping = [
            job
            for job in self.running
            if job.held is not None and self.device.released_blocks(job.held)
        ]
        job = (helping or self.running)[-1]
        is_alone = len(self.running) == 1
        job.preemptions += 1
        self.counts.preemptions += 1
        if job.first_s is None:
            held = job.held
            assert held is not None
            self.load += held.length  # all of it waits again
        self._leave(job)
        if is_alone:  # it will never have enough
            job.is_refused = True
            self._ended(job, now_s)
            return
        job.trail = self._trail(job)
        insort(self.waiting, job)

    # ---- tiers and residency -----------------------------------------------------------------

    def _has_arrived(self, job: SimJob, tiers: CountedTiers, now_s: float) -> bool:
        """Whether what tiers have of a prompt is on the device. The first look begins to bring it;
        prompts come one after the other."""
        if job.found is None:
            self._begin_fetch(job, tiers, now_s)
        if job.ready_s is None:
            return True
        if job.ready_s > now_s:
            return False
        self._land(job, tiers)
        return True

    def _begin_fetch(self, job: SimJob, tiers: CountedTiers, now_s: float) -> None:
        device, trail = self.device, job.trail
        assert trail is not None
        block_tokens = device.schema.block_tokens
        cached = device.cached_blocks(trail)
        last = max(0, trail.prompt_tokens - 1) // block_tokens
        blocks = tiers.find(trail.chain, cached, last)
        replay = replay_start(device.schema, (cached + len(blocks)) * block_tokens)
        snapshot = None
        for nth in range(cached + len(blocks) - 1, -(-replay // block_tokens) - 2, -1):
            node = device.index.get(trail.chain[nth]) if nth >= 0 else None
            if nth < 0 or (node is not None and node.snapshot is not None):
                break
            snapshot = tiers.find_snapshot(trail.chain[nth])
            if snapshot is not None:
                break
        found = job.found = Found(first=cached, blocks=blocks, snapshot=snapshot)
        if not blocks and snapshot is None:
            return
        sizes = [0] * len(tiers.tiers)
        for where in found.blocks:
            sizes[where] += tiers.size_bytes(Kind.BLOCK)
        if snapshot is not None:
            sizes[snapshot[0]] += tiers.size_bytes(Kind.SNAPSHOT)
        rates = {"host": self.speeds.host_rate, "disk": self.speeds.disk_rate}
        seconds = 0.0
        for tier, size in zip(tiers.tiers, sizes, strict=True):
            tier.loaded_bytes += size
            seconds += size / rates[tier.name]
        self._link_free_s = max(self._link_free_s, now_s) + seconds
        job.ready_s = self._link_free_s

    def _land(self, job: SimJob, tiers: CountedTiers) -> None:
        device, trail, found = self.device, job.trail, job.found
        assert trail is not None
        assert found is not None
        landed = device.land(trail, found.first, len(found.blocks)) if found.blocks else 0
        if found.snapshot is not None:
            device.land_snapshot(found.snapshot[1])
        if job.known == job.prompt_tokens:
            block_tokens = device.schema.block_tokens
            tokens = [0] * len(tiers.tiers)
            for where in found.blocks[:landed]:
                tokens[where] += block_tokens
            job.landed = tuple(tokens)
        job.ready_s = None

    def _fetch_s(
        self, places: EntryPlaces, few: Sequence[Held], chunks: Sequence[tuple[Held, int]]
    ) -> float:
        """Seconds to fetch the entries that this step reads and the device does not have. Blocks of
        requests are the last to leave the device, so only what requests hold beyond its rows is
        missing."""
        held_blocks = self.device.allocator.held
        away = max(0, held_blocks - places.rows) / max(1, held_blocks)
        if not away:
            return 0.0
        named = sum(places.selected(held.length) for held in few) * (1 - places.hot_share)
        block_tokens = self.device.schema.block_tokens
        named += sum(held.length // block_tokens * places.block_bytes for held, _ in chunks)
        self.counts.fetched_bytes += int(away * named)
        return away * named / self.speeds.link_rate

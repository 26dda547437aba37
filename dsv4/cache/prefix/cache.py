"""Cached prefixes: found again, resumed, kept, evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.changes import LOGGER
from dsv4.cache.prefix.blocks import CachedBlocks
from dsv4.cache.prefix.caching import Adopt, BlockCaching
from dsv4.cache.prefix.captures import Captures
from dsv4.cache.prefix.costs import Costs
from dsv4.cache.prefix.hints import Hints, Sessions
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import Notices
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.pins import Pins
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.prefix.resume import PrefixMatch, Resume, StateSource, replay_start, resume_after
from dsv4.cache.prefix.retention import Retention
from dsv4.cache.prefix.rows import SnapshotRows
from dsv4.cache.prefix.snapshots import SnapshotPool
from dsv4.cache.prefix.trail import (
    Ids,
    RecentIds,
    StepIds,
    Tenant,
    TokenIds,
    TokenTrail,
    chain_root,
    token_ids,
)
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, bytes_by_kind
from dsv4.cache.stats import HitKind, MissReason, PrefixCounters, PrefixStats
from dsv4.cache.step.shape import I64
from dsv4.errors import Dsv4Error, InvalidInput

K = TypeVar("K")
_HIT_KINDS: dict[StateSource, HitKind] = {
    "snapshot": "snapshot",
    "replay": "replay",
    "nothing": "blocks_only",
    "state": "state",
    "rings": "state",
    "cut_replay": "cut_replay",
}


class Caching(BlockCaching):
    """What requests compute is cached: each complete block whose tokens are known goes into the
    index, and blocks that another request has cached before are adopted, so that one copy is
    left."""

    def __init__(
        self,
        schema: CacheSchema,
        allocator: BlockAllocator,
        index: PrefixIndex,
        captures: Captures,
        notices: Notices,
    ) -> None:
        self._block_tokens, self._max_decode_tokens = schema.block_tokens, schema.max_decode_tokens
        super().__init__(allocator, index, notices)
        self._captures = captures

    def read_ids(self, plan: ForwardPlan, kept: I64, ids: TokenIds, recent: RecentIds) -> StepIds:
        """Those of a step that is committed. Raises InvalidInput if they do not fit the step, or
        contradict what is known."""
        return StepIds.read(plan, kept, token_ids(ids), recent, self._block_tokens)

    def note_commit(
        self,
        plan: ForwardPlan,
        kept: I64,
        ends: I64,
        learned: StepIds | None,
        newest: Callable[[], I64],
        slot_arena: Tensor,
        adopt: Adopt[Request],
    ) -> None:
        """Learns ids, caches the blocks that the step completed, and takes their snapshots. Blocks
        that another request has cached before are adopted, so that one copy is left.

        The rings still hold the state at every boundary that decode batches have crossed; `newest`
        is the end of what has been written to them, including plans after this one.
        """
        if learned is not None:
            learned.learn(plan, ends)
        firsts, lasts = plan.starts // self._block_tokens, ends // self._block_tokens
        rows = (lasts > firsts).nonzero()[0]
        if len(rows):
            self._cache_rows(plan, rows, firsts, lasts, newest, slot_arena, adopt)
        if plan.prefill is not None:
            self._captures.finish(plan, plan.prefill, kept)

    def _cache_rows(
        self,
        plan: ForwardPlan,
        rows: I64,
        firsts: I64,
        lasts: I64,
        newest: Callable[[], I64],
        slot_arena: Tensor,
        adopt: Adopt[Request],
    ) -> None:
        """The blocks that the requests in these rows of a step completed, as far as ids are
        known."""
        of_rows = zip(
            rows.tolist(), firsts.take(rows).tolist(), lasts.take(rows).tolist(), strict=True
        )
        for row, first, end in of_rows:
            request = plan.requests[row]
            trail = request.trail
            if trail is None:
                continue
            last = min(end, trail.take_recent() // self._block_tokens)
            # the snapshots of a chunk are taken by `finish`
            is_chunk = plan.counts[row] > self._max_decode_tokens
            for node in self.cache_blocks(request, trail, first, last, adopt):
                if not is_chunk:
                    slot, written = slot_arena[request.slot], int(newest()[row])
                    self._captures.take(request, trail, node, slot, written=written)

    def supply_ids(self, request: Request, ids: Ids, slot: Tensor, adopt: Adopt[Request]) -> None:
        """Adds ids of tokens that a request has computed before they were known."""
        trail = request.trail
        assert trail is not None
        start = len(trail.ids)
        sound = request.length if request.incomplete_from is None else request.incomplete_from
        trail.learn(start, ids[: max(0, sound - start)])
        block_tokens = self._block_tokens
        first, last = start // block_tokens, len(trail.ids) // block_tokens
        if last > first:
            written = request.written_tokens
            for node in self.cache_blocks(request, trail, first, last, adopt):
                self._captures.take(request, trail, node, slot, written=written)

    def note_arrival(self, request: Request, trail: TokenTrail, adopt: Adopt[Request]) -> None:
        """For whole blocks of a request that came from another machine, all of whose ids are known:
        adopts those that were cached meanwhile, and caches the others."""
        blocks = len(trail.ids) // self._block_tokens
        trail.hash_blocks(blocks)
        for node in self.cache_blocks(request, trail, 0, blocks, adopt):
            self._index.touch(node)


class PrefixCache:
    """The index of cached blocks and the snapshots at their ends. `caching` is how blocks get into
    it."""

    def __init__(
        self,
        schema: CacheSchema,
        allocator: BlockAllocator,
        options: PrefixOptions,
        device: torch.device,
    ) -> None:
        if not schema.bytes.block:
            raise InvalidInput(
                "a model of window-only layers keeps nothing in blocks, so no prefix can be cached"
            )
        if options.policy.period_tokens % schema.block_tokens:
            raise InvalidInput(
                f"periodic({options.policy.period_tokens}) is not a multiple of block_tokens="
                f"{schema.block_tokens}: snapshots are taken where blocks end"
            )
        self._cuts = options.replay == "cut"
        if self._cuts:
            _check_cut(schema)
        self.schema, self.options = schema, options
        secret = self._secret = options.secret()
        self._key = "" if secret is None else secret.identity
        self._keyed = () if secret is None else (secret, secret.link)
        policy = options.eviction()
        if isinstance(policy, Retention):
            policy.costs = Costs.of(schema)
        self.index = PrefixIndex(allocator, policy)
        if options.events:
            self.index.events = []
        self._allocator = allocator
        self._bytes_by_kind = bytes_by_kind(schema)["block"]
        self.pool = SnapshotPool(schema, options.rows, where=options.where, device=device)
        self.notices = Notices(schema.block_tokens, has_state_bytes=self.pool.layout.row_bytes > 0)
        self._sessions = Sessions(policy, self.notices)
        before_reuse = self.notices.before_reuse
        self.rows = SnapshotRows(options.rows, policy, before_reuse)
        self.pins = Pins(self.index, schema.block_tokens)
        self.blocks = CachedBlocks(allocator, self.index, self.rows, self.pins, self.notices)
        self.captures = Captures(options.policy, self.index, self.rows, self.pool, self.notices)
        self.caching = Caching(schema, allocator, self.index, self.captures, self.notices)
        self._counters = PrefixCounters()

    def __bool__(self) -> Literal[True]:
        """Whether the manager has a prefix cache."""
        return True

    def required(self) -> PrefixCache:
        """Itself: a manager that has none refuses."""
        return self

    # ---- a request begins --------------------------------------------------------------------

    def trail(self, ids: Ids, salt: str | None) -> TokenTrail:
        root = chain_root(
            fingerprint=self.schema.content_fingerprint,
            model_id=self.options.model_id,
            salt=salt,
        )
        if self._secret is not None:
            root = self._secret.root(root)
        return TokenTrail(root, self.schema.block_tokens, ids, Tenant(salt, *self._keyed))

    def prompt(self, ids: Ids, salt: str | None, hints: Hints | None = None) -> Prompt:
        """A prompt with all its digests computed."""
        trail = self.trail(ids, salt)
        trail.hints = hints
        trail.hash_blocks(len(ids) // self.schema.block_tokens)
        return Prompt(len(ids), trail, self._family)

    @property
    def _family(self) -> tuple[str, ...]:
        return self.schema.content_fingerprint, self.options.model_id, self._key

    def trail_of(self, prompt: Prompt) -> TokenTrail:
        """Raises InvalidInput for a prompt of another schema or model, or without a trail."""
        if prompt.trail is None:
            raise InvalidInput(
                "this prompt was made by a manager without a prefix cache: make it with this one"
            )
        if prompt.family != self._family:
            raise InvalidInput(
                "this prompt was made for another schema or model, or with another key"
            )
        return prompt.trail

    def cached_blocks(self, trail: TokenTrail) -> int:
        """How many blocks `match` would find. Changes nothing."""
        blocks = max(0, len(trail.ids) - 1) // self.schema.block_tokens
        trail.hash_blocks(blocks)
        return self.index.count(trail.chain[:blocks])

    def look_up(self, trail: TokenTrail) -> Resume:
        """What `match` would answer, by bisection. Changes nothing."""
        blocks = self.cached_blocks(trail)
        reused = blocks * self.schema.block_tokens
        # a snapshot where a replay would start is at the end of the block before
        first = max(0, replay_start(self.schema, reused) // self.schema.block_tokens - 1)
        nodes: list[PrefixNode | None] = [None] * blocks
        nodes[first:] = [self.index.get(digest) for digest in trail.chain[first:blocks]]
        return resume_after(self.schema, nodes, blocks, len(trail.ids), cut=self._cuts).resume

    def match(self, trail: TokenTrail, *, reuse: bool = True) -> PrefixMatch:
        """What of a prompt is cached; without `reuse` as if nothing were. The last token always
        runs: it gives the first logits."""
        tokens = trail.take_recent()
        most = max(0, tokens - 1) // self.schema.block_tokens if reuse else 0
        nodes = self.index.match(trail, most)
        return resume_after(self.schema, nodes, len(nodes), tokens, cut=self._cuts)

    def match_own(self, request: Request, length: int) -> PrefixMatch:
        """The position from which a request that has computed `length` tokens can reach them
        again."""
        blocks = length // self.schema.block_tokens
        trail = request.trail
        if request.incomplete_from is not None:  # not all layers have the entries after it
            blocks = min(blocks, request.incomplete_from // self.schema.block_tokens)
        if request.approximate_from is not None:  # what comes after it differs from a cold run
            blocks = min(blocks, request.approximate_from // self.schema.block_tokens)
        known = 0 if trail is None else min(blocks, len(trail.ids) // self.schema.block_tokens)
        nodes = [] if trail is None else self.index.match(trail, known)
        return resume_after(self.schema, nodes, blocks, length, cut=self._cuts)

    def use(self, match: PrefixMatch, trail: TokenTrail) -> None:
        """Counts an admission, or a request that continues to the end of another prompt from its
        own state, and marks what it used."""
        counted, resume = self._counters, match.resume
        has_state = resume.source in ("state", "rings")
        tokens_asked = counted.tokens_asked + resume.end
        if trail.hints is not None:
            self._heed(match, trail, trail.hints)
        if match.nodes or has_state:
            if resume.source != "snapshot" and not has_state:
                _log_replay(resume)
            self._counters = replace(
                counted,
                tokens_asked=tokens_asked,
                hits=_one_more(counted.hits, _HIT_KINDS[resume.source]),
                tokens_skipped=counted.tokens_skipped + resume.start,
                tokens_shared=counted.tokens_shared + resume.reused_tokens,
            )
            if match.nodes:
                self.index.ages.found(match.nodes)
                self.index.policy.returned(match.nodes[-1])
            if match.snapshot is not None and match.snapshot.snapshot is not None:
                self.index.policy.snapshot_used(match.snapshot)
            for observer in self.notices.observers:
                observer.used(match, trail)
            return
        misses = _one_more(counted.misses, self._miss_reason(resume, trail))
        self._counters = replace(counted, tokens_asked=tokens_asked, misses=misses)

    def _heed(self, match: PrefixMatch, trail: TokenTrail, hints: Hints) -> None:
        self._sessions.admitted(trail, hints)
        if match.nodes:
            match.nodes[-1].hints = hints

    def _miss_reason(self, resume: Resume, trail: TokenTrail) -> MissReason:
        if resume.end <= self.schema.block_tokens:
            return "too_short"
        return "evicted" if self.index.was_evicted(trail.digest(0)) else "not_cached"

    def put_state(self, match: PrefixMatch, slot: Tensor) -> None:
        """Copies the state at the start of `match.resume` into a slot. Before a replay the slot is
        zeroed: finite values, which influence nothing once the replay has finished. The windows of
        draft layers, which snapshots leave out, start as zeros too."""
        if match.resume.source != "nothing":
            slot.zero_()
        if match.snapshot is not None and match.snapshot.snapshot is not None:
            self.pool.restore(slot, match.snapshot.snapshot, match.resume.start)

    # ---- what tiers had ----------------------------------------------------------------------

    def adopt_snapshot(self, digest: bytes, row: int) -> None:
        """A row in flight, whose bytes are there and checked, holds the state after a block."""
        node = self.index.get(digest)
        if node is None or node.snapshot is not None:
            self.rows.give_back(row)
        else:
            self.rows.attach(node, row)

    # ---- looking -----------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Of snapshots, on the device."""
        return self.pool.memory_bytes()

    def stats(self, *, idle_blocks: int) -> PrefixStats:
        return PrefixStats(
            **asdict(self._counters),
            blocks_indexed=len(self.index),
            block_evictions=self.index.evictions,
            snapshots_total=self.pool.rows,
            snapshots_used=self.rows.used,
            snapshot_evictions=self.rows.evictions,
            snapshot_bytes=self.pool.layout.row_bytes,
            block_lifetime_s=self.index.ages.lifetime.read(),
            block_idle_s=self.index.ages.idle.read(),
            block_gap_s=self.index.ages.gap.read(),
            cached_bytes_by_kind={
                kind: count * idle_blocks for kind, count in self._bytes_by_kind.items()
            },
        )

    def check_invariants(self, open_plans: Sequence[ForwardPlan]) -> None:
        """Raises Dsv4Error unless every snapshot row has exactly one owner."""
        self.index.check_invariants()
        references = self._allocator.references
        for node in self.index.nodes():
            parent = node.parent
            if parent is not None and references(node.block_id) > references(parent.block_id):
                raise Dsv4Error(
                    f"block {node.block_id} is held by a request that does not hold the one before"
                )
        self.rows.check_invariants(self.index.nodes(), self.captures.rows_of(open_plans))


def _check_cut(schema: CacheSchema) -> None:
    """InvalidInput for a model that is not served with cut replays, or whose replay could not run
    in one prefill batch."""
    window, most = schema.model.window, schema.max_decode_tokens
    if not schema.model.cut_replays:
        raise InvalidInput(
            f"replay='cut' is how DeepSeek serves V4.1, and {schema.model.name} is not V4.1: use "
            f"replay='exact'"
        )
    if window <= most:
        raise InvalidInput(
            f"replay='cut' runs {window} tokens as one chunk, but with "
            f"max_draft_tokens={schema.max_draft_tokens} that is not a chunk: use replay='exact'"
        )


def _log_replay(resume: Resume) -> None:
    LOGGER.debug(
        "%d tokens are cached, but no snapshot near their end: %d of %d run again",
        *(resume.reused_tokens, len(resume.replay), resume.reused_tokens),
    )


def _one_more(counts: dict[K, int], kind: K) -> dict[K, int]:
    return {**counts, kind: counts[kind] + 1}

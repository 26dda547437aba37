"""Between two captured graphs: who runs, which rows they write, what closes.

A plan is arithmetic on the lengths of its requests. Its index tensors live in buffers that never
move (graphs captured over them stay valid) and reach the device in one copy, padded with -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.changes import Uncopied
from dsv4.cache.prefix.snapshots import WideCaptures
from dsv4.cache.requests import Growth, Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.step.shape import I64, StepShape
from dsv4.cache.step.work_items import chunk_groups, closing_groups, without_existing
from dsv4.errors import InvalidInput, PlanError, is_whole
from dsv4.ops.calls import FollowedDrafts, FollowedItems, Following
from dsv4.ops.columns import request_columns, token_columns

# what a layer stores of a step, where it is written piece by piece
WINDOW, TAILS, ENTRIES = 1, 2, 4
LEAST_REACH = 2048
MOST_SHOWN = 4  # requests, in the repr of a plan


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardPlan(Uncopied):
    """One step: `counts[i]` new tokens of `requests[i]`, the first at `starts[i]`.

    The tokens of a step lie one after the other in the order of the requests; `num_tokens` rows in
    all, then padding up to `padded_tokens`. The index tensors are cut to the padded sizes, for
    which kernels are launched. A step is `narrow` if no request has more tokens than its rings can
    lose; only then may it be padded, and so captured. Of another step it is known how far it
    `reaches`: no token stands at that position or behind it. Steps of the same `sizes` read with
    the same launches, and with the same `item_counts` write so too.

    A plan that is `behind` another one goes on where that one's requests will be, `rows_before`
    being their rows there. Where `unknown_starts` is true only the device knows the start until the
    plan before is committed: `starts` and `ends` are then the latest that can be. `latest_ends`
    stay what `ends` were at first. Where `counted_rows` is true the device reads how many tokens
    the plan before keeps; elsewhere all are taken for kept.

    `draft_steps` are for draft layers alone: the nth has one row per request, for the nth of its
    tokens. A plan with chunks apart has a `narrow_half` and, if there are chunks, a `wide_half`.
    Handles are bound to these, each with rows and index tensors of its own, and not to the plan;
    `whole` is the plan that a half or a draft step is of, and that is committed.

    A plan of cut replays has its `window_cut`: no token sees a window row in front of its request's
    start. `attend` keeps to it; a kernel of the engine's own must too. Where `window_lost`, a ring
    may have lost the oldest row of the window in front of a start, which only a draft step reads.
    """

    shape: StepShape
    starts: I64
    ends: I64
    latest_ends: I64
    narrow: bool
    reaches: int | None
    batch: Tensor
    tokens: Tensor
    items: dict[int, Tensor]
    sizes: tuple[int, ...]
    item_counts: tuple[int, ...]
    num_layers: int
    draft_layers: frozenset[int]
    backbone_layers: tuple[int, ...]
    lane: int = 0
    behind: ForwardPlan | None = None
    rows_before: I64 | None = None
    unknown_starts: NDArray[np.bool_] | None = None
    counted_rows: NDArray[np.bool_] | None = None
    draft_steps: tuple[ForwardPlan, ...] = ()
    narrow_half: ForwardPlan | None = None
    wide_half: ForwardPlan | None = None
    whole: ForwardPlan | None = None
    is_draft: bool = False
    window_cut: bool = False
    window_lost: bool = False
    captures: WideCaptures | None = None
    done: bool = False
    touched: bool = False
    appended_layers: set[int] = field(default_factory=set)
    stored_layers: set[int] = field(default_factory=set)
    last_appended: int | None = None
    unfinished_layers: set[int] = field(default_factory=set)
    _parts: dict[int, int] = field(default_factory=dict)
    _instead: ClassVar[str] = "prepare_forward makes a plan for each step"

    def __repr__(self) -> str:
        """Its first requests with their tokens; no tensors."""
        counts, starts = self.counts.tolist(), self.starts.tolist()
        if self.unknown_starts is not None:
            starts = [
                f"{start} at most" if unknown else start
                for start, unknown in zip(starts, self.unknown_starts, strict=True)
            ]
        some = [f"{n} at {start}" for n, start in zip(counts, starts, strict=True)]
        if len(some) > MOST_SHOWN:
            some[MOST_SHOWN:] = ["…"]
        padding = self.padded_tokens - self.num_tokens
        return (
            f"ForwardPlan({'over' if self.is_over else 'open'}: {self.num_tokens} tokens"
            f"{f' and {padding} of padding' if padding else ''}, {len(counts)} requests"
            f"{': ' if some else ''}{', '.join(some)})"
        )

    def mark_appended(self, layers: Iterable[int] | None = None) -> None:
        """What Python does not see, the replay of a captured graph or a kernel of the engine's own,
        has appended the step in these layers (default: all but those that draft): `commit` refuses
        a step that a layer lacks. Raises PlanError, InvalidInput."""
        if self.is_over:
            raise PlanError("this plan is over: mark it before commit")
        if self.halves:
            for half in self.halves:
                half.mark_appended(layers)
            return
        chosen: Sequence[int] = self.backbone_layers
        if layers is not None:
            chosen = require_layers(layers, self.num_layers)
        if chosen:
            self.appended_layers.update(chosen)
            self.stored_layers.update(chosen)
            self.touched, self.last_appended = True, chosen[-1]

    def begin_append(self, layer: int) -> None:
        """A layer is about to write. Until it has, and for good if an error or an interrupt comes
        in between, nobody knows what is there."""
        self.touched, self.last_appended = True, None
        self.unfinished_layers.add(layer)

    def note_append(self, layer: int) -> None:
        """A layer has written this step; a chunk's staged rows are now that layer's."""
        self.appended_layers.add(layer)
        self.stored_layers.add(layer)
        self.last_appended = layer
        self.unfinished_layers.discard(layer)

    def note_part(self, layer: int, part: int, needed: int) -> None:
        """A layer has written one of WINDOW, TAILS and ENTRIES. With all of `needed` it has stored
        the step."""
        if part & WINDOW:
            self.appended_layers.add(layer)
            self.last_appended = layer
        parts = self._parts[layer] = self._parts.get(layer, 0) | part
        if parts & needed == needed:
            self.stored_layers.add(layer)
        self.unfinished_layers.discard(layer)

    @property
    def is_stored(self) -> bool:
        """Whether every layer, but for those that draft, has stored the step."""
        if self.halves:
            return all(half.is_stored for half in self.halves)
        return self.stored_layers.issuperset(self.backbone_layers) or not self.num_tokens

    @property
    def halves(self) -> tuple[ForwardPlan, ...]:
        """Those of a plan with chunks apart; none of any other."""
        if self.narrow_half is None:
            return ()
        if self.wide_half is None:
            return (self.narrow_half,)
        return self.narrow_half, self.wide_half

    @property
    def is_over(self) -> bool:
        """Whether the plan, or the one that this belongs to, was committed or given up."""
        return self.done or (self.whole is not None and self.whole.done)

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.shape.requests

    @property
    def slots(self) -> I64:
        return self.shape.slots

    @property
    def counts(self) -> I64:
        return self.shape.counts

    @property
    def num_tokens(self) -> int:
        return self.shape.num_tokens

    @property
    def padded_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def positions(self) -> Tensor:
        """int32 [padded_tokens], a view of `tokens`: the position of each token, -1 for padding."""
        position: Tensor = token_columns(self.tokens).position
        return position

    @property
    def clamped_positions(self) -> Tensor:
        """int32 [padded_tokens], a new tensor: positions as a rotary table takes them, 0 for
        padding. A captured graph reads them anew with each replay."""
        return self.positions.clamp_min(0)

    @property
    def batch_rows(self) -> Tensor:
        """int32 [padded_tokens], a view of `tokens`: which of `requests` each token is of, -1 for
        padding."""
        row: Tensor = token_columns(self.tokens).batch_row
        return row

    @property
    def last_rows(self) -> Tensor:
        """int64 [padded requests], a new tensor: the row of each request's last token, whose
        logits give the next one; 0 for padding and for requests without tokens."""
        columns = request_columns(self.batch)
        row: Tensor = (columns.first_row + columns.count - 1).clamp_min(0).long()
        row *= columns.count > 0
        return row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Before:
    """The plan that a new one is behind: `rows` are its requests' rows there, or -1;
    `counted_rows` says of which of them the device reads how many tokens are kept there,
    `unknown_starts` of which only the device knows the length, None if of none."""

    plan: ForwardPlan
    rows: I64
    counted_rows: NDArray[np.bool_]
    unknown_starts: NDArray[np.bool_] | None

    def first(self, count: int) -> Before:
        """The same of so many requests, the first."""
        unknown = None if self.unknown_starts is None else self.unknown_starts[:count]
        return Before(
            plan=self.plan,
            rows=self.rows[:count],
            counted_rows=self.counted_rows[:count],
            unknown_starts=unknown,
        )


def require_layers(layers: object, num_layers: int) -> list[int]:
    """Layers of the model, as given. Raises InvalidInput."""
    try:
        chosen: list[Any] = list(layers) if isinstance(layers, Iterable) else [layers]
    except TypeError:  # arrays and tensors of no dimension
        chosen = [layers]
    for layer in chosen:
        if not is_whole(layer) or not 0 <= layer < num_layers:
            raise InvalidInput(f"layer {layer!r} of a model with {num_layers} layers")
    return [int(layer) for layer in chosen]


class PlanOptions(TypedDict, total=False):
    """What `prepare_forward` may be asked for, but for steps that overlap."""

    pad_tokens: int | None
    pad_requests: int | None
    drafts: int
    chunks_apart: bool


class StepOptions(TypedDict):
    """What of a plan its requests and lengths do not say."""

    pad_tokens: int | None
    pad_requests: int | None
    before: Before | None
    drafts: int


def make_plan(
    schema: CacheSchema,
    buffers: StepBuffers,
    shape: StepShape,
    starts: I64,
    ends: I64,
    reused: I64,
    *,
    pad_tokens: int | None,
    pad_requests: int | None,
    before: Before | None = None,
    drafts: int = 0,
) -> ForwardPlan:
    """Fills the host buffer with a step and cuts the device's tensors to size. Entries below
    `reused` tokens of a request exist and are not written.

    Takes no blocks and copies nothing to the device.
    """
    item_counts = fill_step(schema, buffers, shape, starts, ends, reused, before)
    tokens, batch_rows = shape.num_tokens, len(shape.requests)
    if pad_tokens is not None or pad_requests is not None:
        tokens = tokens if pad_tokens is None else int(pad_tokens)
        batch_rows = batch_rows if pad_requests is None else int(pad_requests)
        item_counts = {
            ratio: buffers.max_items(ratio, tokens=tokens, requests=batch_rows)
            for ratio in buffers.ratios
        }
    narrow = is_narrow(schema, shape)
    reaches = None if narrow else reach(schema, ends)
    plan = ForwardPlan(
        shape=shape,
        starts=starts,
        ends=ends,
        latest_ends=ends,
        behind=None if before is None else before.plan,
        rows_before=None if before is None else before.rows,
        unknown_starts=None if before is None else before.unknown_starts,
        counted_rows=None if before is None else before.counted_rows,
        narrow=narrow,
        reaches=reaches,
        batch=buffers.cut("batch", batch_rows),
        tokens=buffers.cut("tokens", tokens),
        items={ratio: buffers.cut(f"items_{ratio}", count) for ratio, count in item_counts.items()},
        sizes=(narrow, batch_rows, tokens, shape.most_tokens, reaches or 0),
        item_counts=tuple(item_counts.values()),
        num_layers=len(schema.layers),
        draft_layers=schema.draft_layers,
        backbone_layers=schema.backbone_layers,
    )
    if drafts:
        buffers.fill_drafts(drafts, shape, starts)
        plan.draft_steps = tuple(
            _draft_step(buffers, plan, nth, batch_rows) for nth in range(drafts)
        )
    return plan


def _draft_step(buffers: StepBuffers, plan: ForwardPlan, nth: int, batch_rows: int) -> ForwardPlan:
    starts, requests = plan.starts + nth, len(plan.requests)
    return ForwardPlan(
        shape=StepShape(
            requests=plan.requests,
            slots=plan.slots,
            counts=(plan.counts > nth).astype(np.int64),
            num_tokens=requests,
            most_tokens=1,
            first_rows=np.arange(requests),
        ),
        starts=starts,
        ends=starts + 1,
        latest_ends=starts + 1,
        narrow=True,
        reaches=None,
        batch=buffers.cut_draft("draft_batch", nth, batch_rows),
        tokens=buffers.cut_draft("draft_tokens", nth, batch_rows),
        items={},
        sizes=(nth, True, batch_rows, batch_rows, 1),
        item_counts=(),
        num_layers=plan.num_layers,
        draft_layers=plan.draft_layers,
        backbone_layers=plan.backbone_layers,
        whole=plan,
        is_draft=True,
    )


def make_halves(
    schema: CacheSchema,
    buffers: StepBuffers,
    chunk_buffers: StepBuffers,
    shape: StepShape,
    starts: I64,
    ends: I64,
    reused: I64,
    *,
    pad_tokens: int | None,
    pad_requests: int | None,
    before: Before | None = None,
    drafts: int = 0,
) -> ForwardPlan:
    """A plan with chunks apart: what `make_plan` does, once for the requests with a few tokens, in
    rows that never move, and once for the others."""
    count = narrow_requests(schema, shape)
    narrow_shape, wide_shape = shape.split(count)
    narrow_half = make_plan(
        schema,
        buffers,
        narrow_shape,
        starts[:count],
        ends[:count],
        reused[:count],
        pad_tokens=pad_tokens,
        pad_requests=pad_requests,
        before=None if before is None else before.first(count),
        drafts=drafts,
    )
    wide_half = None
    if wide_shape.requests:
        wide_half = make_plan(
            schema,
            chunk_buffers,
            wide_shape,
            starts[count:],
            ends[count:],
            reused[count:],
            pad_tokens=None,
            pad_requests=None,
        )
    plan = ForwardPlan(
        shape=shape,
        starts=starts,
        ends=ends,
        latest_ends=ends,
        behind=None if before is None else before.plan,
        rows_before=None if before is None else before.rows,
        unknown_starts=None if before is None else before.unknown_starts,
        counted_rows=None if before is None else before.counted_rows,
        narrow=wide_half is None,
        reaches=None,
        batch=buffers.cut("batch", 0),
        tokens=buffers.cut("tokens", 0),
        items={},
        sizes=(),
        item_counts=(),
        num_layers=len(schema.layers),
        draft_layers=schema.draft_layers,
        backbone_layers=schema.backbone_layers,
        draft_steps=narrow_half.draft_steps,
        narrow_half=narrow_half,
        wide_half=wide_half,
    )
    for each in (*plan.halves, *plan.draft_steps):
        each.whole = plan
    return plan


def narrow_requests(schema: CacheSchema, shape: StepShape) -> int:
    """How many requests of a step have so few tokens that they are no chunk. PlanError unless they
    come first."""
    is_chunk = shape.counts > schema.max_narrow_tokens
    count = len(is_chunk) - int(is_chunk.sum())
    if is_chunk[:count].any():
        raise PlanError(
            f"chunks are planned apart, but request {int(is_chunk.argmax())} of the step with "
            f"{shape.counts[is_chunk.argmax()]} tokens stands in front of others with "
            f"{schema.max_narrow_tokens} or fewer: put the chunks last"
        )
    return count


def reach(schema: CacheSchema, ends: I64) -> int:
    """A bound on the positions of a wide step, the least of `all_reaches`."""
    longest = int(ends.max(initial=0))
    return next(bound for bound in all_reaches(schema) if longest <= bound)


def all_reaches(schema: CacheSchema) -> list[int]:
    """Few, for launches of one serve other steps too."""
    found = [LEAST_REACH]
    while found[-1] < schema.max_context:
        found.append(4 * found[-1])
    return [*found[:-1], schema.max_context]


def is_narrow(schema: CacheSchema, shape: StepShape) -> bool:
    return shape.most_tokens <= schema.max_narrow_tokens


def fill_step(
    schema: CacheSchema,
    buffers: StepBuffers,
    shape: StepShape,
    starts: I64,
    ends: I64,
    reused: I64,
    before: Before | None = None,
) -> dict[int, int]:
    """Writes a step into the host buffer. Returns how many work items each ratio has."""
    buffers.fill_tokens(schema, shape, starts, ends)
    replays = np.count_nonzero(reused > starts)
    narrow, counts = is_narrow(schema, shape), {}
    unknown = None if before is None else before.unknown_starts
    # what the device fills in has no items here
    known_ends = ends if unknown is None else np.where(unknown, starts, ends)
    for ratio in buffers.ratios:
        if narrow:
            items = closing_groups(ratio, starts, known_ends, most_tokens=shape.most_tokens)
        else:
            overlap = ratio in buffers.overlapping_ratios
            items = chunk_groups(ratio, starts, known_ends, overlap=overlap)
        if replays:
            items = without_existing(items, reused // ratio)
        counts[ratio] = buffers.fill_items(ratio, items)
    if before is not None and unknown is not None:
        rows = unknown.nonzero()[0]
        return buffers.fill_follows(rows, before.rows[rows], reused[rows], counts, narrow=narrow)
    return counts


def following(
    schema: CacheSchema, buffers: StepBuffers, plan: ForwardPlan, accepted: Tensor | None
) -> Following:
    """What the device does to fill in where the requests of a plan start. With chunks apart, that
    is the narrow half's: of a chunk the start is known."""
    plan = plan.narrow_half or plan
    assert plan.behind is not None
    assert plan.unknown_starts is not None
    drafts = None
    if plan.draft_steps:
        drafts = FollowedDrafts(
            batch=buffers.on_device["draft_batch"],
            tokens=buffers.on_device["draft_tokens"],
            steps=len(plan.draft_steps),
            rows=buffers.max_requests,
        )
    return Following(
        follows=buffers.cut("follows", int(plan.unknown_starts.sum())),
        batch=plan.batch,
        tokens=plan.tokens,
        items=tuple(
            FollowedItems(ratio=ratio, overlap=ratio in buffers.overlapping_ratios, items=items)
            for ratio, items in plan.items.items()
        ),
        batch_before=(plan.behind.narrow_half or plan.behind).batch,
        accepted=accepted,
        narrow=plan.narrow,
        most_tokens=schema.max_narrow_tokens,
        drafts=drafts,
    )


def fill_new_blocks(
    schema: CacheSchema, buffers: StepBuffers, growth: Growth, published: Sequence[int]
) -> int:
    """Lists the block ids that the device's table does not have yet: of each request those behind
    the `published` ones that it holds, and its new ones. Returns how many; that they are published
    is the caller's to say."""
    at: list[int] = []
    ids: list[int] = []
    new_ids, new, most = growth.reserved.block_ids, 0, schema.max_blocks_per_request
    for request, first, last, missing in zip(
        growth.requests, published, growth.blocks, growth.missing, strict=True
    ):
        table_row = request.slot * most
        at += range(table_row + first, table_row + last)
        if first < last - missing:
            ids += request.block_ids[first:last]
        ids += new_ids[new : new + missing]
        new += missing
    buffers.fill_new_blocks(at, ids)
    return len(ids)


def check_step(
    schema: CacheSchema,
    buffers: StepBuffers,
    shape: StepShape,
    *,
    pad_tokens: int | None,
    pad_requests: int | None,
    drafts: int = 0,
    chunks_apart: bool = False,
) -> None:
    """Raises PlanError when a step does not fit the buffers, or its padding or its draft steps do
    not fit it."""
    if chunks_apart:
        check_step(schema, buffers, shape, pad_tokens=None, pad_requests=None)
        shape, _ = shape.split(narrow_requests(schema, shape))
    if not is_whole(drafts) or not 0 <= drafts <= buffers.max_drafts:
        raise PlanError(
            f"{drafts!r} draft steps: give a whole number up to {buffers.max_drafts}"
            + ("" if schema.draft_layers else ", for the model has no draft layers")
        )
    if drafts and not is_narrow(schema, shape):
        raise PlanError(
            f"{drafts} draft steps beside {shape.most_tokens} tokens of one request: plan chunks "
            f"apart, or in a step of their own"
        )
    for name, live, padded, most in (
        ("tokens", shape.num_tokens, pad_tokens, buffers.max_tokens),
        ("requests", len(shape.requests), pad_requests, buffers.max_requests),
    ):
        if live > most:
            raise PlanError(
                f"{live} {name} in one step, but the manager was built for {most}: "
                f"split the step, or build it with a larger limit"
            )
        if padded is None:
            continue
        if not is_whole(padded) or not live <= padded <= most:
            raise PlanError(
                f"cannot pad {live} {name} to {padded!r}: the size must be a whole number between "
                f"{live} and {most}"
            )
        if not is_narrow(schema, shape):
            raise PlanError(
                f"a step with {shape.most_tokens} tokens of one request cannot be padded: a graph "
                f"holds at most {schema.max_narrow_tokens} per request (1 + max_draft_tokens)"
            )

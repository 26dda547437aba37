"""Between two steps: who runs next, which rows they write, which groups close.

A plan is arithmetic on the lengths of its requests. Its batches have the index tensors; these reach
the device in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.batch import Batch, describe_step, require_layers
from dsv4.cache.changes import Uncopied
from dsv4.cache.memory import Lane
from dsv4.cache.requests import Growth, Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.step.shape import I64, StepShape
from dsv4.cache.step.work_items import chunk_groups, closing_groups, without_existing
from dsv4.errors import PlanError, is_whole
from dsv4.ops.calls import FollowedDrafts, FollowedItems, Following

LEAST_POSITION_BOUND = 2048


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardPlan(Uncopied):
    """One step: `counts[i]` new tokens of `requests[i]`, the first at `starts[i]`.

    Handles are bound to its batches, each with rows and index tensors of its own: `decode`, of
    requests with a few tokens each, or `prefill`. A plan whose chunks are apart has both if there
    are chunks, and its requests are those of `decode` and then those of `prefill`. `batch` is the
    only batch of any other plan. `drafts` are for draft layers alone: the nth has one row per
    request, for the nth of its tokens.

    A plan `after` another one goes on where that one's requests will be, `rows_before` being their
    rows there. Where `unknown_starts` is true only the device knows the start until the plan before
    is committed: `starts` and `ends` are then the latest that can be. `latest_ends` stay what
    `ends` were at first. Where `counted_rows` is true the device reads how many tokens the plan
    before keeps; elsewhere all are taken to be kept.
    """

    shape: StepShape
    starts: I64
    ends: I64
    latest_ends: I64
    decode: Batch | None
    prefill: Batch | None
    drafts: tuple[Batch, ...] = ()
    lane: int = 0
    after: ForwardPlan | None = None
    rows_before: I64 | None = None
    unknown_starts: NDArray[np.bool_] | None = None
    counted_rows: NDArray[np.bool_] | None = None
    done: bool = False
    batches: tuple[Batch, ...] = field(init=False)
    _instead: ClassVar[str] = "prepare_forward makes a plan for each step"

    def __post_init__(self) -> None:
        batches = self.decode, self.prefill
        self.batches = tuple(batch for batch in batches if batch is not None)

    def __repr__(self) -> str:
        """Its first requests with their tokens; no tensors."""
        starts: list[object] = self.starts.tolist()
        if self.unknown_starts is not None:
            starts = [
                f"{start} at most" if unknown else start
                for start, unknown in zip(starts, self.unknown_starts, strict=True)
            ]
        padded = sum(batch.padded_tokens for batch in self.batches)
        said = describe_step(self.shape, starts, padded)
        return f"ForwardPlan({'over' if self.done else 'open'}: {said})"

    @property
    def batch(self) -> Batch:
        """The only batch. Raises PlanError where chunks are apart."""
        if len(self.batches) > 1:
            raise PlanError(
                "the chunks of this plan are apart: bind the layer to plan.decode and to "
                "plan.prefill"
            )
        return self.batches[0]

    @property
    def is_stored(self) -> bool:
        """Whether every layer, except those that draft, has stored the step."""
        return all(batch.is_stored for batch in self.batches)

    def mark_appended(self, layers: Iterable[int] | None = None) -> None:
        """`Batch.mark_appended` of all its batches. Raises PlanError, InvalidInput."""
        if layers is not None and not self.done:
            layers = require_layers(layers, len(self.batches[0].schema.layers))
        for batch in self.batches:
            batch.mark_appended(layers)

    def close(self) -> None:
        """The plan is over, and so is all that belongs to it."""
        self.done = True
        for batch in (*self.batches, *self.drafts):
            batch.done = True

    def start_at(self, starts: I64, unknown: NDArray[np.bool_] | None) -> None:
        """More is known about where its requests start."""
        self.starts, self.ends, self.unknown_starts = starts, starts + self.counts, unknown
        first = 0
        for batch in self.batches:
            last = first + len(batch.requests)
            batch.starts, batch.ends = starts[first:last], self.ends[first:last]
            first = last
        for nth, batch in enumerate(self.drafts):
            batch.starts = starts[: len(batch.requests)] + nth
            batch.ends = batch.starts + 1

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Before:
    """The plan that a new one comes after: `rows` are the new one's requests' rows there, or -1;
    `counted_rows` says for which of them the device reads how many tokens are kept there,
    `unknown_starts` for which only the device knows the length, None if for none."""

    plan: ForwardPlan
    rows: I64
    counted_rows: NDArray[np.bool_]
    unknown_starts: NDArray[np.bool_] | None

    def first(self, count: int) -> Before:
        """The same for the first `count` requests."""
        unknown = None if self.unknown_starts is None else self.unknown_starts[:count]
        return Before(
            plan=self.plan,
            rows=self.rows[:count],
            counted_rows=self.counted_rows[:count],
            unknown_starts=unknown,
        )


class PlanOptions(TypedDict, total=False):
    """What `prepare_forward` may be asked for, except overlap with another step."""

    pad_tokens: int | None
    pad_requests: int | None
    drafts: int
    chunks_apart: bool


def make_plan(
    schema: CacheSchema,
    lane: Lane,
    shape: StepShape,
    starts: I64,
    ends: I64,
    reused: I64,
    *,
    pad_tokens: int | None,
    pad_requests: int | None,
    before: Before | None,
    drafts: int,
    chunks_apart: bool,
) -> ForwardPlan:
    """Fills the host buffers with a step and cuts the device's tensors to size. Entries below
    `reused` tokens of a request exist and are not written. With `chunks_apart` requests with a few
    tokens have rows that never move, and the others rows of their own.

    Takes no blocks and copies nothing to the device.
    """
    decode: Batch | None
    prefill: Batch | None
    count = decode_requests(schema, shape) if chunks_apart else len(shape.requests)
    if not chunks_apart:
        batch = make_batch(
            schema,
            lane.buffers,
            shape,
            starts,
            ends,
            reused,
            pad_tokens=pad_tokens,
            pad_requests=pad_requests,
            before=before,
        )
        decode, prefill = (batch, None) if batch.is_decode else (None, batch)
    else:
        few, chunks = shape.split(count)
        decode = make_batch(
            schema,
            lane.buffers,
            few,
            starts[:count],
            ends[:count],
            reused[:count],
            pad_tokens=pad_tokens,
            pad_requests=pad_requests,
            before=None if before is None else before.first(count),
        )
        prefill = None
        if chunks.requests:
            prefill = make_batch(
                schema, lane.chunk_buffers, chunks, starts[count:], ends[count:], reused[count:]
            )
            decode.alone = prefill.alone = False
    plan = ForwardPlan(
        shape=shape,
        starts=starts,
        ends=ends,
        latest_ends=ends,
        decode=decode,
        prefill=prefill,
        drafts=()
        if not drafts or decode is None
        else _draft_batches(schema, lane.buffers, decode, drafts),
        lane=lane.number,
        after=None if before is None else before.plan,
        rows_before=None if before is None else before.rows,
        unknown_starts=None if before is None else before.unknown_starts,
        counted_rows=None if before is None else before.counted_rows,
    )
    for batch in (*plan.batches, *plan.drafts):
        batch.lane = lane.number
    return plan


def make_batch(
    schema: CacheSchema,
    buffers: StepBuffers,
    shape: StepShape,
    starts: I64,
    ends: I64,
    reused: I64,
    *,
    pad_tokens: int | None = None,
    pad_requests: int | None = None,
    before: Before | None = None,
) -> Batch:
    """Fills the host buffer with the rows of some requests, and cuts the device's to size."""
    item_counts = fill_step(schema, buffers, shape, starts, ends, reused, before)
    tokens, requests = shape.num_tokens, len(shape.requests)
    if pad_tokens is not None or pad_requests is not None:
        tokens = tokens if pad_tokens is None else int(pad_tokens)
        requests = requests if pad_requests is None else int(pad_requests)
        item_counts = buffers.most_item_counts(tokens=tokens, requests=requests)
    return cut_batch(
        schema,
        buffers,
        shape,
        starts,
        ends,
        padded_requests=requests,
        padded_tokens=tokens,
        item_counts=item_counts,
    )


def cut_batch(
    schema: CacheSchema,
    buffers: StepBuffers,
    shape: StepShape,
    starts: I64,
    ends: I64,
    *,
    padded_requests: int,
    padded_tokens: int,
    item_counts: dict[int, int],
    bound: int | None = None,
) -> Batch:
    """A batch whose rows lie in the buffers. `bound` is the position bound of a prefill batch
    (default: what `ends` need)."""
    decode = is_decode(schema, shape)
    if decode:
        bound = None
    elif bound is None:
        bound = position_bound(schema, ends)
    return Batch(
        schema=schema,
        shape=shape,
        starts=starts,
        ends=ends,
        is_decode=decode,
        position_bound=bound,
        request_rows=buffers.cut("batch", padded_requests),
        tokens=buffers.cut("tokens", padded_tokens),
        items={ratio: buffers.cut(f"items_{ratio}", count) for ratio, count in item_counts.items()},
        sizes=(decode, padded_requests, padded_tokens, shape.most_tokens, bound or 0),
        item_counts=tuple(item_counts.values()),
    )


def _draft_batches(
    schema: CacheSchema, buffers: StepBuffers, batch: Batch, drafts: int
) -> tuple[Batch, ...]:
    buffers.fill_drafts(drafts, batch.shape, batch.starts)
    return tuple(_draft_batch(schema, buffers, batch, nth) for nth in range(drafts))


def _draft_batch(schema: CacheSchema, buffers: StepBuffers, batch: Batch, nth: int) -> Batch:
    starts, requests = batch.starts + nth, len(batch.requests)
    padded = batch.request_rows.shape[0]
    return Batch(
        schema=schema,
        shape=StepShape(
            requests=batch.requests,
            slots=batch.slots,
            counts=(batch.counts > nth).astype(np.int64),
            num_tokens=requests,
            most_tokens=1,
            first_rows=np.arange(requests),
        ),
        starts=starts,
        ends=starts + 1,
        is_decode=True,
        position_bound=None,
        request_rows=buffers.cut_draft("draft_batch", nth, padded),
        tokens=buffers.cut_draft("draft_tokens", nth, padded),
        items={},
        sizes=(nth, True, padded, padded, 1),
        item_counts=(),
        layers=schema.draft_layers,
        alone=False,
    )


def decode_requests(schema: CacheSchema, shape: StepShape) -> int:
    """How many requests of a step have few enough tokens for a decode batch. PlanError unless they
    come first."""
    is_chunk = shape.counts > schema.max_decode_tokens
    count = len(is_chunk) - int(is_chunk.sum())
    if is_chunk[:count].any():
        raise PlanError(
            f"chunks are planned apart, but request {int(is_chunk.argmax())} of the step with "
            f"{shape.counts[is_chunk.argmax()]} tokens comes before others with "
            f"{schema.max_decode_tokens} or fewer: put the chunks last"
        )
    return count


def position_bound(schema: CacheSchema, ends: I64) -> int:
    """A bound on the positions of a prefill batch, the least of `all_position_bounds`."""
    longest = int(ends.max(initial=0))
    return next(bound for bound in all_position_bounds(schema) if longest <= bound)


def all_position_bounds(schema: CacheSchema) -> list[int]:
    """Few, so that launches with one serve many batches."""
    found = [LEAST_POSITION_BOUND]
    while found[-1] < schema.max_context:
        found.append(4 * found[-1])
    return [*found[:-1], schema.max_context]


def is_decode(schema: CacheSchema, shape: StepShape) -> bool:
    return shape.most_tokens <= schema.max_decode_tokens


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
    decode, counts = is_decode(schema, shape), {}
    unknown = None if before is None else before.unknown_starts
    # what the device fills in has no items here
    known_ends = ends if unknown is None else np.where(unknown, starts, ends)
    for ratio in buffers.ratios:
        if decode:
            items = closing_groups(ratio, starts, known_ends, most_tokens=shape.most_tokens)
        else:
            overlap = ratio in buffers.overlapping_ratios
            items = chunk_groups(ratio, starts, known_ends, overlap=overlap)
        if replays:
            items = without_existing(items, reused // ratio)
        counts[ratio] = buffers.fill_items(ratio, items)
    if before is not None and unknown is not None:
        rows = unknown.nonzero()[0]
        return buffers.fill_follows(rows, before.rows[rows], reused[rows], counts, decode=decode)
    return counts


def following(
    schema: CacheSchema, buffers: StepBuffers, plan: ForwardPlan, accepted: Tensor | None
) -> Following:
    """What the device does to fill in where the requests of a plan start. With chunks apart these
    are requests of the decode batch: the start of a chunk is known."""
    batch = plan.batches[0]
    assert plan.after is not None
    assert plan.unknown_starts is not None
    drafts = None
    if plan.drafts:
        drafts = FollowedDrafts(
            batch=buffers.on_device["draft_batch"],
            tokens=buffers.on_device["draft_tokens"],
            steps=len(plan.drafts),
            rows=buffers.max_requests,
        )
    return Following(
        follows=buffers.cut("follows", int(plan.unknown_starts.sum())),
        batch=batch.request_rows,
        tokens=batch.tokens,
        items=tuple(
            FollowedItems(ratio=ratio, overlap=ratio in buffers.overlapping_ratios, items=items)
            for ratio, items in batch.items.items()
        ),
        batch_before=plan.after.batches[0].request_rows,
        accepted=accepted,
        narrow=batch.is_decode,
        most_tokens=schema.max_decode_tokens,
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
        shape, _ = shape.split(decode_requests(schema, shape))
    if not is_whole(drafts) or not 0 <= drafts <= buffers.max_drafts:
        raise PlanError(
            f"{drafts!r} draft steps: give a whole number up to {buffers.max_drafts}"
            + ("" if schema.draft_layers else ", for the model has no draft layers")
        )
    if drafts and not is_decode(schema, shape):
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
        if not is_decode(schema, shape):
            raise PlanError(
                f"a step with {shape.most_tokens} tokens of one request cannot be padded: a graph "
                f"holds at most {schema.max_decode_tokens} per request (1 + max_draft_tokens)"
            )

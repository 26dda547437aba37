"""Between two steps: which requests run next, which rows they write, which groups close.

A plan is arithmetic on the lengths of its requests. Its batches have the index tensors; these reach
the device in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.batch import (
    Batch,
    describe_step,
    draft_batches,
    make_batch,
    require_layers,
)
from dsv4.cache.changes import Uncopied
from dsv4.cache.memory import Lane
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.step.shape import I64, Before, StepShape, StepTokens
from dsv4.errors import PlanError, is_whole
from dsv4.ops.calls import FollowedDrafts, FollowedItems, Following


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardPlan(Uncopied):
    """One step: `counts[i]` new tokens of `requests[i]`, the first at `starts[i]`.

    Handles are bound to its batches, each with rows and index tensors of its own: `decode`, of
    requests with a few tokens each, or `prefill`. A plan with `chunks_apart` has both if there are
    chunks, and its requests are those of `decode` and then those of `prefill`. `batch` is the only
    batch of any other plan. `drafts` are only for draft layers: the nth has one row per request,
    for the nth of its tokens.

    A plan `after` another one starts where that one leaves its requests; `rows_before` are their
    rows there. Where `unknown_starts` is true, only the device knows the start until the earlier
    plan is committed: `starts` and `ends` are then upper bounds. `latest_ends` stay what `ends`
    were at first. Where `counted_rows` is true, the device reads how many tokens the earlier plan
    keeps; elsewhere all are assumed to be kept.
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
    _internal: ClassVar[frozenset[str]] = frozenset(
        (
            "close",
            "counted_rows",
            "is_stored",
            "latest_ends",
            "note_before",
            "rows_before",
            "shape",
            "start_at",
        )
    )

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
        shown = describe_step(self.shape, starts, padded)
        return f"ForwardPlan({'over' if self.done else 'open'}: {shown})"

    @property
    def batch(self) -> Batch:
        """The only batch. Raises PlanError if there are two (`chunks_apart`)."""
        if len(self.batches) > 1:
            _refuse_two_batches()
        return self.batches[0]

    @property
    def is_stored(self) -> bool:
        """Whether every layer, except those that draft, has stored the step."""
        return all(batch.written.is_complete for batch in self.batches)

    def mark_appended(self, layers: Iterable[int] | None = None) -> None:
        """`Batch.mark_appended` of all its batches. Raises PlanError, InvalidInput."""
        if layers is not None and not self.done:
            layers = require_layers(layers, len(self.batches[0].written.schema.layers))
        for batch in self.batches:
            batch.mark_appended(layers)

    def close(self) -> None:
        """The plan is over, and so are all its batches."""
        self.done = True
        for batch in (*self.batches, *self.drafts):
            batch.done = True

    def note_before(self, before: Before) -> None:
        """Its requests start where another plan leaves them."""
        self.after, self.rows_before = before.plan, before.rows
        self.unknown_starts, self.counted_rows = before.unknown_starts, before.counted_rows

    def start_at(self, starts: I64, unknown: NDArray[np.bool_] | None) -> None:
        """Updates where its requests start, once more is known."""
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
        """Its requests, in the order in which they were given."""
        return self.shape.requests

    @property
    def slots(self) -> I64:
        """The slot of each request."""
        return self.shape.slots

    @property
    def counts(self) -> I64:
        """How many tokens each request runs."""
        return self.shape.counts

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, without padding."""
        return self.shape.num_tokens


def _refuse_two_batches() -> NoReturn:
    raise PlanError(
        "the chunks of this plan are apart: bind the layer to plan.decode and to plan.prefill"
    )


class PlanOptions(TypedDict, total=False):
    """What `prepare_forward` may be asked for, except overlap with another step."""

    pad_tokens: int | None
    pad_requests: int | None
    drafts: int
    chunks_apart: bool


PLAIN: PlanOptions = {
    "pad_tokens": None,
    "pad_requests": None,
    "drafts": 0,
    "chunks_apart": False,
}


def make_plan(lane: Lane, step: StepTokens, options: PlanOptions) -> ForwardPlan:
    """Fills the host buffers with a step and cuts the device's tensors to size. With `chunks_apart`
    the requests with a few tokens have rows that never move, and the others rows of their own.

    Takes no blocks and copies nothing to the device.
    """
    few, chunks, drafts = step, None, options["drafts"]
    if options["chunks_apart"]:
        few, chunks = step.split(decode_requests(lane.buffers.schema, step.shape))
    padding = options["pad_tokens"], options["pad_requests"]
    batch = make_batch(lane.buffers, few, lane.number, padding)
    decode, prefill = (batch, None) if batch.is_decode else (None, batch)
    if chunks is not None and chunks.shape.requests:
        prefill = make_batch(lane.chunk_buffers, chunks, lane.number)
        batch.part, prefill.part = "decode", "prefill"
    plan = ForwardPlan(
        shape=step.shape,
        starts=step.starts,
        ends=step.ends,
        latest_ends=step.ends,
        decode=decode,
        prefill=prefill,
        drafts=draft_batches(lane.buffers, batch, int(drafts)) if drafts else (),
        lane=lane.number,
    )
    if step.before is not None:
        plan.note_before(step.before)
    return plan


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


def following(buffers: StepBuffers, plan: ForwardPlan, accepted: Tensor | None) -> Following:
    """The operation with which the device computes where the requests of a plan start. With
    `chunks_apart` these are requests of the decode batch: the start of a chunk is known."""
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
        most_tokens=buffers.schema.max_decode_tokens,
        drafts=drafts,
    )


def check_step(buffers: StepBuffers, shape: StepShape, options: PlanOptions) -> None:
    """Raises PlanError when a step does not fit into the buffers, or its padding or draft steps do
    not fit the step."""
    schema, drafts = buffers.schema, options["drafts"]
    if options["chunks_apart"]:
        check_step(buffers, shape, PLAIN)
        shape, _ = shape.split(decode_requests(schema, shape))
    few = shape.most_tokens <= schema.max_decode_tokens
    is_count = type(drafts) is int or is_whole(drafts)
    if not is_count or not 0 <= drafts <= (buffers.max_drafts if few else 0):
        _refuse_drafts(buffers, shape, drafts)
    for name, live, padded, most in (
        ("tokens", shape.num_tokens, options["pad_tokens"], buffers.max_tokens),
        ("requests", len(shape.requests), options["pad_requests"], buffers.max_requests),
    ):
        fits = padded is None or (few and is_whole(padded) and live <= padded <= most)
        if live > most or not fits:
            _refuse_size(schema, shape, name, live, padded, most)


def _refuse_drafts(buffers: StepBuffers, shape: StepShape, drafts: int) -> NoReturn:
    if not is_whole(drafts) or not 0 <= drafts <= buffers.max_drafts:
        raise PlanError(
            f"{drafts!r} draft steps: give a whole number up to {buffers.max_drafts}"
            + ("" if buffers.schema.draft_layers else ", for the model has no draft layers")
        )
    raise PlanError(
        f"{drafts} draft steps with {shape.most_tokens} tokens of one request: plan chunks "
        f"apart, or in a step of their own"
    )


def _refuse_size(
    schema: CacheSchema, shape: StepShape, name: str, live: int, padded: int | None, most: int
) -> NoReturn:
    if live > most:
        raise PlanError(
            f"{live} {name} in one step, but the manager was built for {most}: "
            f"split the step, or build it with a larger limit"
        )
    if not is_whole(padded) or not live <= padded <= most:
        raise PlanError(
            f"cannot pad {live} {name} to {padded!r}: the size must be a whole number between "
            f"{live} and {most}"
        )
    raise PlanError(
        f"a step with {shape.most_tokens} tokens of one request cannot be padded: a graph "
        f"holds at most {schema.max_decode_tokens} per request (1 + max_draft_tokens)"
    )

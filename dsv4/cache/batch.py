"""The rows that one launch covers: what a layer's handle is bound to for a step.

A batch is arithmetic on the lengths of its requests. Its index tensors live in buffers that never
move (graphs captured over them stay valid), cut to the sizes for which kernels are launched and
padded with -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from torch import Tensor

from dsv4.cache.changes import Uncopied
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.step.shape import I64, StepShape, StepTokens
from dsv4.errors import InvalidInput, PlanError, is_whole
from dsv4.ops.calls import CompressorWrite
from dsv4.ops.columns import request_columns, token_columns

# what a layer stores of a step, where it is written piece by piece
WINDOW, TAILS, ENTRIES = 1, 2, 4
MOST_SHOWN = 4  # requests, in a repr
LEAST_POSITION_BOUND = 2048


# tokens and requests that a batch is padded to
Padding = tuple[int | None, int | None]
UNPADDED: Padding = (None, None)

BatchPart = Literal["decode", "prefill", "drafts"]


class BatchCaptures(Protocol):
    """Snapshots that a prefill batch leaves: every layer supplies its part before and after its
    append."""

    @property
    def rows(self) -> Sequence[int]:
        """Rows of the snapshot pool that are reserved for them."""

    def before_append(self, layer: int, writes: Sequence[CompressorWrite]) -> None:
        """Nothing of the batch is written yet."""

    def after_append(self, layer: int) -> None:
        """The layer's window rows are staged."""


@dataclass(slots=True, eq=False, kw_only=True)
class Written:
    """Which layers have written a batch, and so which may write or read it.

    `appended` have written its window rows, `stored` all of it. `last` is the layer that has
    appended most recently; a chunk's staged rows are that layer's. Of `unfinished` layers an append
    has begun and not ended. `touched`: some layer has begun. All layers except draft layers must
    store the batch, unless it `is_empty`. Where it is `repeatable`, as a decode batch is, a layer
    may append again, and the window rows of all layers stay readable.

    `window_lost`: the rings may already have overwritten the oldest of the `window` rows before a
    request's start, which only a draft step of a DSpark layer reads.
    """

    schema: CacheSchema
    repeatable: bool
    is_empty: bool
    window_lost: bool = False
    appended: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    last: int | None = None
    touched: bool = False
    _parts: dict[int, int] = field(default_factory=dict)

    def begin(self, layer: int) -> None:
        """A layer is about to write. Until it has, or forever if an error or an interrupt comes in
        between, the content is undefined."""
        self.touched, self.last = True, None
        self.unfinished.add(layer)

    def note(self, layer: int) -> None:
        """A layer has written the batch."""
        self.appended.add(layer)
        self.stored.add(layer)
        self.last = layer
        self.unfinished.discard(layer)

    def note_part(self, layer: int, part: int, needed: int) -> None:
        """A layer has written one of WINDOW, TAILS and ENTRIES. With all of `needed` it has stored
        the batch."""
        if part & WINDOW:
            self.appended.add(layer)
            self.last = layer
        parts = self._parts[layer] = self._parts.get(layer, 0) | part
        if parts & needed == needed:
            self.stored.add(layer)
        self.unfinished.discard(layer)

    def note_unseen(self, layers: Iterable[int] | None) -> None:
        """Something that Python does not see has written the batch in these layers, or in all that
        must. Raises InvalidInput."""
        chosen: Sequence[int] = self.schema.backbone_layers
        if layers is not None:
            chosen = require_layers(layers, len(self.schema.layers))
        if chosen:
            self.appended.update(chosen)
            self.stored.update(chosen)
            self.touched, self.last = True, chosen[-1]

    @property
    def is_complete(self) -> bool:
        """Whether every layer that must has stored the batch."""
        return self.stored.issuperset(self.schema.backbone_layers) or self.is_empty

    def require_unwritten(self, layer: int) -> None:
        """Raises PlanError if the layer cannot append. A prefill batch overwrites the rows it has
        staged, and the rings that its own writes are made from, so each layer writes it once, even
        if that fails."""
        if self.repeatable:
            return
        if self.unfinished:
            raise PlanError(
                f"an append of layer {min(self.unfinished)} to this plan raised, and a prefill "
                f"step is not repeatable: call fail(plan)"
            )
        if layer in self.appended:
            raise PlanError(
                f"layer {layer} has appended this plan already, and a prefill step is not "
                f"repeatable: append once for each layer and plan, or call fail(plan)"
            )

    def require_written(self, layer: int) -> None:
        """Raises PlanError if the window rows that the layer reads are not there."""
        if self.last != layer and (not self.repeatable or layer not in self.appended):
            raise PlanError(
                f"layer {layer} reads before it has appended this plan"
                + ("" if self.repeatable else ", or after another layer reused the staging")
                + ": call append first"
            )

    def require_readable(self, layer: int, owner: int) -> None:
        """Raises PlanError if the window rows that the layer reads are not there, or the entries,
        which belong to `owner`."""
        self.require_written(layer)
        if owner != layer and owner not in self.stored:
            raise PlanError(
                f"layer {layer} reads the entries of layer {owner}, which has not appended "
                f"this plan: call its append first"
            )


@dataclass(slots=True, eq=False, kw_only=True)
class Batch(Uncopied):
    """`counts[i]` new tokens of `requests[i]`, the first at `starts[i]`: all or some of a plan's.

    Tokens lie one after the other in the order of the requests: `num_tokens` rows, then padding up
    to `padded_tokens`. `request_rows`, `tokens` and `items` are the index tensors of requests,
    tokens and each compression ratio's work items.

    In a decode batch no request has more tokens than its rings can lose
    (`schema.max_decode_tokens`). Only decode batches may be padded, and so captured in a graph. Any
    other is a prefill batch; its `position_bound` is greater than every position in it. Batches of
    the same `sizes` read with the same launches; those that also have the same `item_counts` write
    with the same launches.

    `part` says which one it is where its plan has several: its "decode" or its "prefill" batch if
    chunks are apart, or one of its "drafts", to which only draft layers are bound. It is None where
    it is the only one. A batch is `done` when its plan is over. `written` knows which layers may
    write and read it.

    In a batch of cut replays (`window_cut`) no token sees a window row from before its request's
    start. `attend` ensures that; a kernel of the engine's own must too.
    """

    shape: StepShape
    starts: I64
    ends: I64
    is_decode: bool
    position_bound: int | None
    request_rows: Tensor
    tokens: Tensor
    items: dict[int, Tensor]
    sizes: tuple[int, ...]
    item_counts: tuple[int, ...]
    written: Written
    part: BatchPart | None = None
    lane: int = 0
    window_cut: bool = False
    captures: BatchCaptures | None = None
    done: bool = False
    _instead: ClassVar[str] = "prepare_forward makes a plan with its batches for each step"

    def __repr__(self) -> str:
        """Its first requests with their tokens; no tensors."""
        kind = "decode" if self.is_decode else "prefill"
        shown = describe_step(self.shape, self.starts.tolist(), self.padded_tokens)
        return f"Batch({kind}, {'over' if self.done else 'open'}: {shown})"

    def mark_appended(self, layers: Iterable[int] | None = None) -> None:
        """Something that Python does not see, the replay of a captured graph or a kernel of the
        engine's own, has appended the batch in these layers (default: all except draft layers):
        `commit` refuses a step that a layer has not stored. Raises PlanError, InvalidInput."""
        if self.done:
            raise PlanError("this plan is over: mark it before commit")
        self.written.note_unseen(layers)

    # ---- its requests and rows ---------------------------------------------------------------

    @property
    def requests(self) -> tuple[Request, ...]:
        """Its requests, in the order of their tokens."""
        return self.shape.requests

    @property
    def counts(self) -> I64:
        """How many tokens each request has in it."""
        return self.shape.counts

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, without padding."""
        return self.shape.num_tokens

    @property
    def padded_tokens(self) -> int:
        """Rows of every tensor of the batch: tokens and padding."""
        return self.tokens.shape[0]

    @property
    def positions(self) -> Tensor:
        """int32 [padded_tokens], a view of `tokens`: the position of each token, -1 for padding."""
        position: Tensor = token_columns(self.tokens).position
        return position

    @property
    def clamped_positions(self) -> Tensor:
        """int32 [padded_tokens], a new tensor: positions in the form that a rotary table takes, 0
        for padding. A captured graph reads them again with each replay."""
        return self.positions.clamp_min(0)

    @property
    def batch_rows(self) -> Tensor:
        """int32 [padded_tokens], a view of `tokens`: the index in `requests` of each token's
        request, -1 for padding."""
        row: Tensor = token_columns(self.tokens).batch_row
        return row

    @property
    def last_rows(self) -> Tensor:
        """int64 [padded requests], a new tensor: the row of each request's last token, whose
        logits give the next one; 0 for padding and for requests without tokens."""
        columns = request_columns(self.request_rows)
        row: Tensor = (columns.first_row + columns.count - 1).clamp_min(0).long()
        row *= columns.count > 0
        return row


def make_batch(
    buffers: StepBuffers, step: StepTokens, lane: int, padding: Padding = UNPADDED
) -> Batch:
    """Fills the host buffer with the rows of a step, and cuts the device's to size."""
    item_counts = buffers.fill(step)
    tokens, requests = step.shape.num_tokens, len(step.shape.requests)
    if padding != UNPADDED:
        tokens, requests = (
            own if padded is None else int(padded)
            for own, padded in zip((tokens, requests), padding, strict=True)
        )
        item_counts = buffers.most_item_counts(tokens=tokens, requests=requests)
    return cut_batch(
        buffers, step, lane=lane, requests=requests, tokens=tokens, item_counts=item_counts
    )


def cut_batch(
    buffers: StepBuffers,
    step: StepTokens,
    *,
    lane: int,
    requests: int,
    tokens: int,
    item_counts: dict[int, int],
    bound: int | None = None,
) -> Batch:
    """A batch whose rows, padding included, lie in the buffers. `bound` is the position bound of a
    prefill batch (default: what the ends need). Those of cut replays are read with launches of
    their own."""
    schema, most = buffers.schema, step.shape.most_tokens
    decode = most <= schema.max_decode_tokens
    if decode:
        bound = None
    elif bound is None:
        bound = position_bound(schema, step.ends)
    return Batch(
        shape=step.shape,
        starts=step.starts,
        ends=step.ends,
        is_decode=decode,
        position_bound=bound,
        request_rows=buffers.cut("batch", requests),
        tokens=buffers.cut("tokens", tokens),
        items={ratio: buffers.cut(f"items_{ratio}", count) for ratio, count in item_counts.items()},
        sizes=(decode, requests, tokens, most, bound or 0, step.window_cut),
        item_counts=tuple(item_counts.values()),
        written=Written(schema=schema, repeatable=decode, is_empty=not step.shape.num_tokens),
        lane=lane,
        window_cut=step.window_cut,
    )


def draft_batches(buffers: StepBuffers, batch: Batch, drafts: int) -> tuple[Batch, ...]:
    """Batches for draft layers: the nth has the nth token of each request of a decode batch."""
    buffers.fill_drafts(drafts, batch.shape, batch.starts)
    requests, padded = len(batch.requests), batch.request_rows.shape[0]
    found = []
    for nth in range(drafts):
        shape = StepShape(
            requests=batch.requests,
            slots=batch.shape.slots,
            counts=(batch.counts > nth).astype(np.int64),
            num_tokens=requests,
            most_tokens=1,
            first_rows=np.arange(requests),
        )
        one = Batch(
            shape=shape,
            starts=batch.starts + nth,
            ends=batch.starts + nth + 1,
            is_decode=True,
            position_bound=None,
            request_rows=buffers.cut_draft("draft_batch", nth, padded),
            tokens=buffers.cut_draft("draft_tokens", nth, padded),
            items={},
            sizes=(nth, True, padded, padded, 1),
            item_counts=(),
            written=Written(schema=buffers.schema, repeatable=True, is_empty=not requests),
            part="drafts",
            lane=batch.lane,
        )
        found.append(one)
    return tuple(found)


def position_bound(schema: CacheSchema, ends: I64) -> int:
    """A bound on the positions of a prefill batch: the smallest of `all_position_bounds` that
    holds."""
    longest = int(ends.max(initial=0))
    return next(bound for bound in all_position_bounds(schema) if longest <= bound)


def all_position_bounds(schema: CacheSchema) -> list[int]:
    """Only a few values, so that launches with one of them serve many batches."""
    found = [LEAST_POSITION_BOUND]
    while found[-1] < schema.max_context:
        found.append(4 * found[-1])
    return [*found[:-1], schema.max_context]


def require_layers(layers: object, num_layers: int) -> list[int]:
    """Layers of the model, as given. Raises InvalidInput."""
    try:
        chosen: list[Any] = list(layers) if isinstance(layers, Iterable) else [layers]
    except TypeError:  # arrays and tensors without dimensions
        chosen = [layers]
    for layer in chosen:
        if not is_whole(layer) or not 0 <= layer < num_layers:
            raise InvalidInput(f"layer {layer!r} of a model with {num_layers} layers")
    return [int(layer) for layer in chosen]


def describe_step(shape: StepShape, starts: Sequence[object], padded_tokens: int) -> str:
    """The first requests of a step with their tokens, for a repr."""
    some = [f"{n} at {start}" for n, start in zip(shape.counts.tolist(), starts, strict=True)]
    if len(some) > MOST_SHOWN:
        some[MOST_SHOWN:] = ["…"]
    padding = padded_tokens - shape.num_tokens
    return (
        f"{shape.num_tokens} tokens{f' and {padding} of padding' if padding else ''}, "
        f"{len(shape.requests)} requests{': ' if some else ''}{', '.join(some)}"
    )

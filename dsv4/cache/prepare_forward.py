"""Between two captured graphs: who runs, which rows they write, what closes.

A plan is arithmetic on the lengths of its requests. Its index tensors live in buffers that never
move (graphs captured over them stay valid) and reach the device in one copy, padded with -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from dsv4.cache.guard import Uncopied
from dsv4.cache.prefix.snapshots import WideCaptures
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.step.shape import I64, StepShape
from dsv4.cache.step.work_items import chunk_groups, closing_groups, without_existing
from dsv4.errors import InvalidInput, PlanError, is_whole
from dsv4.ops.columns import request_columns, token_columns

# what a layer stores of a step, where it is written piece by piece
WINDOW, TAILS, ENTRIES = 1, 2, 4
LEAST_REACH = 2048


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardPlan(Uncopied):
    """One step: `counts[i]` new tokens of `requests[i]`, the first at `starts[i]`.

    The tokens of a step lie one after the other in the order of the requests; `num_tokens` rows in
    all, then padding up to `padded_tokens`. The index tensors are cut to the padded sizes, for
    which kernels are launched. A step is `narrow` if no request has more tokens than its rings can
    lose; only then may it be padded, and so captured. Of another step it is known how far it
    `reaches`: no token stands at that position or behind it. Steps of the same `sizes` read with
    the same launches, and with the same `item_counts` write so too.
    """

    shape: StepShape
    starts: I64
    ends: I64
    narrow: bool
    reaches: int | None
    batch: Tensor
    tokens: Tensor
    items: dict[int, Tensor]
    sizes: tuple[int, ...]
    item_counts: tuple[int, ...]
    num_layers: int
    draft_layers: frozenset[int]
    lane: int = 0
    captures: WideCaptures | None = None
    done: bool = False
    touched: bool = False
    appended_layers: set[int] = field(default_factory=set)
    stored_layers: set[int] = field(default_factory=set)
    last_appended: int | None = None
    _parts: dict[int, int] = field(default_factory=dict)
    _instead: ClassVar[str] = "prepare_forward makes a plan for each step"

    def mark_appended(self, layers: Iterable[int] | None = None) -> None:
        """A captured graph has appended the step in these layers (default: all but those that
        draft). Python does not see what a graph runs, and only a step that every layer has stored
        is cached. Raises PlanError, InvalidInput."""
        if self.done:
            raise PlanError("this plan is over: mark it before commit")
        known = range(self.num_layers)
        if layers is None:
            chosen = [layer for layer in known if layer not in self.draft_layers]
        else:
            chosen = require_layers(layers, self.num_layers)
        for layer in chosen:
            self.note_append(layer)

    def note_append(self, layer: int) -> None:
        """A layer has written this step; a chunk's staged rows are now that layer's."""
        self.touched = True
        self.appended_layers.add(layer)
        self.stored_layers.add(layer)
        self.last_appended = layer

    def note_part(self, layer: int, part: int, needed: int) -> None:
        """A layer has written one of WINDOW, TAILS and ENTRIES. With all of `needed` it has stored
        the step."""
        self.touched = True
        if part & WINDOW:
            self.appended_layers.add(layer)
            self.last_appended = layer
        parts = self._parts[layer] = self._parts.get(layer, 0) | part
        if parts & needed == needed:
            self.stored_layers.add(layer)

    @property
    def is_stored(self) -> bool:
        """Whether every layer, but for those that draft, has stored the step."""
        return len(self.stored_layers - self.draft_layers) == self.num_layers - len(
            self.draft_layers
        )

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


def require_layers(layers: object, num_layers: int) -> list[int]:
    """Layers of the model, as given. Raises InvalidInput."""
    chosen: list[Any] = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in chosen:
        if not is_whole(layer) or not 0 <= layer < num_layers:
            raise InvalidInput(f"layer {layer!r} of a model with {num_layers} layers")
    return [int(layer) for layer in chosen]


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
) -> ForwardPlan:
    """Fills the host buffer with a step and cuts the device's tensors to size. Entries below
    `reused` tokens of a request exist and are not written.

    Takes no blocks and copies nothing to the device.
    """
    item_counts = fill_step(schema, buffers, shape, starts, ends, reused)
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
    return ForwardPlan(
        shape=shape,
        starts=starts,
        ends=ends,
        narrow=narrow,
        reaches=reaches,
        batch=buffers.cut("batch", batch_rows),
        tokens=buffers.cut("tokens", tokens),
        items={ratio: buffers.cut(f"items_{ratio}", count) for ratio, count in item_counts.items()},
        sizes=(narrow, batch_rows, tokens, shape.most_tokens, reaches or 0),
        item_counts=tuple(item_counts.values()),
        num_layers=len(schema.layers),
        draft_layers=schema.draft_layers,
    )


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
    return shape.most_tokens <= schema.max_rollback_tokens


def fill_step(
    schema: CacheSchema,
    buffers: StepBuffers,
    shape: StepShape,
    starts: I64,
    ends: I64,
    reused: I64,
) -> dict[int, int]:
    """Writes a step into the host buffer. Returns how many work items each ratio has."""
    buffers.fill_tokens(schema, shape, starts, ends)
    replays = bool((reused > starts).any())
    counts: dict[int, int] = {}
    for ratio in buffers.ratios:
        if is_narrow(schema, shape):
            items = closing_groups(ratio, starts, ends, most_tokens=shape.most_tokens)
        else:
            overlap = ratio in buffers.overlapping_ratios
            items = chunk_groups(ratio, starts, ends, overlap=overlap)
        if replays:
            items = without_existing(items, reused // ratio)
        counts[ratio] = buffers.fill_items(ratio, items, ends)
    return counts


def fill_new_blocks(
    schema: CacheSchema,
    buffers: StepBuffers,
    growing: Sequence[tuple[Request, int]],
    new_ids: Sequence[list[int]],
) -> int:
    """Lists the block ids that the device's table does not have yet, of each request up to so many
    blocks, `new_ids` behind those that it holds. Returns how many; that they are published is the
    caller's to say."""
    at: list[int] = []
    ids: list[int] = []
    for (request, last), new in zip(growing, new_ids, strict=True):
        first = request.published_blocks
        table_row = request.slot * schema.max_blocks_per_request
        at.extend(range(table_row + first, table_row + last))
        ids.extend(request.block_ids[first:last])
        ids.extend(new)
    buffers.fill_new_blocks(at, ids)
    return len(ids)


def check_step(
    schema: CacheSchema,
    buffers: StepBuffers,
    shape: StepShape,
    *,
    pad_tokens: int | None,
    pad_requests: int | None,
) -> None:
    """Raises PlanError when a step does not fit the buffers, or its padding does not fit it."""
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
                f"holds at most {schema.max_rollback_tokens} per request (1 + max_draft_tokens)"
            )

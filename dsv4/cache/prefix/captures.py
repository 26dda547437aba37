"""Takes snapshots: from the rings where these still have the state; and layer by layer while a
chunk runs, for after it the state at the boundaries inside it is in no ring.

    plan     chooses the boundaries and the rows of the pool, when a step is prepared
    reserve  takes these rows, once nothing can fail any more
    …        each layer hands over its part around its append: the handle calls `ChunkCaptures`
    finish   attaches what is complete to the blocks, when the step is committed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.changes import LOGGER
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import Notices
from dsv4.cache.prefix.options import SnapshotPolicy
from dsv4.cache.prefix.rows import SnapshotRows
from dsv4.cache.prefix.snapshots import SnapshotPool
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.state import LiveRows, previous_kinds, window_parts
from dsv4.cache.step.shape import I64
from dsv4.cache.workspace import Workspace
from dsv4.ops.calls import CompressorWrite
from dsv4.ops.columns import staged_row
from dsv4.reference.pages import ring_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A boundary that a chunk crosses: of batch row `batch_row`, into snapshot `row`."""

    batch_row: int
    boundary: int
    row: int


class ChunkCaptures:
    """The snapshots of one prefill batch. `layers` have supplied their part."""

    def __init__(
        self,
        pool: SnapshotPool,
        captures: Sequence[Capture],
        batch: Batch,
        slot_arena: Tensor,
        workspace: Workspace,
    ) -> None:
        self.captures = tuple(captures)
        self.layers: set[int] = set()
        self._pool, self._slot_arena, self._workspace = pool, slot_arena, workspace
        device, window = pool.device, pool.layout.schema.model.window

        def column(values: list[int]) -> Tensor:
            host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
            return host.to(device, non_blocking=True)

        batch_rows = [c.batch_row for c in captures]
        self._rows = column([c.row for c in captures])
        self._slots = column(batch.shape.slots[batch_rows].tolist())
        self._boundaries = column([c.boundary for c in captures])
        self._first_tokens = column(batch.shape.first_rows[batch_rows].tolist())
        begins = column(batch.starts[batch_rows].tolist())
        # token row of the boundary: the first token that is not in the snapshot
        self._ends = self._first_tokens + self._boundaries - begins
        # the last window - 1 rows before the boundary, [captures, window - 1]
        self._staged_rows = staged_row(
            self._first_tokens[:, None],
            begins[:, None],
            column(batch_rows)[:, None],
            self._boundaries[:, None] + torch.arange(1 - window, 0, device=device),
            window,
        )

    @property
    def rows(self) -> list[int]:
        return [capture.row for capture in self.captures]

    def before_append(self, layer: int, writes: Sequence[CompressorWrite]) -> None:
        """Captures the previous stream of the last group of each boundary: the tails still have the
        rows from before the chunk."""
        for write in writes:
            if write.layout.overlap:
                kinds = previous_kinds(write.layout.kind)
                for kind, rows in zip(kinds, self._last_groups(write), strict=True):
                    self._store(self._pool.layout.rows_of(layer, kind), rows)

    def after_append(self, layer: int) -> None:
        """The window rows of each boundary, which are staged now: the last part of a layer."""
        page, staging = self._workspace.staging_page, self._workspace.staging
        for kind, width, offset in window_parts(page):
            part = self._pool.layout.rows_of(layer, kind)
            if part is not None:
                rows = staging.as_strided((page.rows, width), (width, 1), offset)
                self._store(part, rows[self._staged_rows])
        self.layers.add(layer)

    def _last_groups(self, write: CompressorWrite) -> tuple[Tensor, Tensor]:
        """Values and biased gates fp32 [captures, ratio, width]: what the tails would hold."""
        layout, c, z = write.layout, write.c, write.z
        assert c is not None
        assert z is not None
        assert write.ape is not None
        assert layout.kb is not None
        assert layout.zb is not None
        nth = torch.arange(-layout.ratio, 0, device=self._slot_arena.device)
        token = self._ends[:, None] + nth
        is_new = (token >= self._first_tokens[:, None])[..., None]
        token = token.clamp_min(0)
        width = layout.width
        ring_row = (self._boundaries[:, None] + nth) % layout.kb.rows
        at = (self._slots[:, None], ring_row)
        old_k, old_z = (
            ring_rows(self._slot_arena, ring, width)[at] for ring in (layout.kb, layout.zb)
        )
        new_z = z[:, :width][token] + write.ape[:, :width]  # the group starts at row 0 of ape
        return torch.where(is_new, c[:, :width][token], old_k), torch.where(is_new, new_z, old_z)

    def _store(self, part: LiveRows | None, rows: Tensor) -> None:
        assert part is not None
        target = self._pool.rows_of(part)
        data = rows.contiguous().view(torch.uint8).view(len(self.captures), part.rows, -1)
        if target.device == data.device:
            target[self._rows] = data
        else:
            for capture, taken in zip(self.captures, data, strict=True):
                target[capture.row].copy_(taken, non_blocking=True)


class Captures:
    """Chooses which snapshots are taken, and finishes them."""

    def __init__(
        self,
        policy: SnapshotPolicy,
        index: PrefixIndex,
        rows: SnapshotRows,
        pool: SnapshotPool,
        notices: Notices,
    ) -> None:
        self._policy, self._schema = policy, pool.layout.schema
        self._index, self._rows, self._pool, self._notices = index, rows, pool, notices

    # ---- of chunks ---------------------------------------------------------------------------

    def plan(self, batch: Batch, slot_arena: Tensor, workspace: Workspace) -> ChunkCaptures | None:
        """Chooses a row for each boundary in a prefill batch that is to have a snapshot. Changes
        nothing."""
        if not self._pool.rows:
            return None
        block_tokens = self._schema.block_tokens
        wanted: list[tuple[int, int]] = []
        # the rings have all states of other batches
        chunks = batch.counts > self._schema.max_decode_tokens
        for row in chunks.nonzero()[0].tolist():
            request = batch.requests[row]
            start, end = int(batch.starts[row]), int(batch.ends[row])
            trail = request.trail
            if trail is None:
                continue
            first, known = start // block_tokens + 1, len(trail.ids)
            for block in range(first, min(end, known) // block_tokens + 1):
                if self._is_wanted(request, trail, block * block_tokens):
                    node = self._index.get(trail.digest(block - 1))
                    if node is None or node.snapshot is None:
                        wanted.append((row, block * block_tokens))
        # the longest prefixes first, if there are too few rows
        captures = [
            Capture(batch_row=batch_row, boundary=boundary, row=row_id)
            for (batch_row, boundary), row_id in zip(
                reversed(wanted), self._rows.choose(len(wanted)), strict=False
            )
        ]
        if not captures:
            return None
        return ChunkCaptures(self._pool, captures, batch, slot_arena, workspace)

    def reserve(self, planned: ChunkCaptures) -> None:
        """Reserves the rows that `plan` has chosen, until `finish` or `give_back`."""
        self._rows.reserve_chosen(planned.rows)

    def finish(self, plan: ForwardPlan, batch: Batch, kept: I64) -> None:
        """A snapshot is valid once its step has happened, every layer has stored it and given its
        part, and the tokens up to it are known: an earlier step may have left the request
        incomplete."""
        if batch.captures is None:
            return
        assert isinstance(batch.captures, ChunkCaptures)
        complete = plan.is_stored and self._has_every_layer(batch.captures.layers)
        kept = kept[len(plan.requests) - len(batch.requests) :]  # chunks come last
        for capture in batch.captures.captures:
            request = batch.requests[capture.batch_row]
            reached = batch.starts[capture.batch_row] + kept[capture.batch_row]
            trail, node = request.trail, None
            known = 0 if trail is None else min(reached, trail.take_recent())
            if complete and trail is not None and capture.boundary <= known:
                block = capture.boundary // self._schema.block_tokens - 1
                node = self._index.get(trail.digest(block))
            if node is None or node.snapshot is not None:
                self._rows.give_back(capture.row)
            else:
                assert trail is not None
                self._rows.attach(node, capture.row)
                self._notices.cached(node, trail, is_snapshot=True)

    def give_back(self, plan: ForwardPlan) -> None:
        """For a step that did not happen."""
        for row in self.rows_of([plan]):
            self._rows.give_back(row)

    @staticmethod
    def rows_of(open_plans: Iterable[ForwardPlan]) -> list[int]:
        """Rows that are reserved for these plans."""
        taken = [batch.captures for plan in open_plans for batch in plan.batches]
        return [row for captures in taken if captures is not None for row in captures.rows]

    # ---- of few tokens -----------------------------------------------------------------------

    def take(
        self, request: Request, trail: TokenTrail, node: PrefixNode, slot: Tensor, *, written: int
    ) -> None:
        """Takes the state at the end of a cached block from the request's slot, whose rings hold
        tokens up to `written`; does nothing if it is not wanted, is there already, or is in no ring
        any more.

        The step has happened whether or not there is memory for its snapshot, so an error of the
        device is only logged; if the device is lost, the next launch raises.
        """
        boundary = (node.depth + 1) * self._schema.block_tokens
        if boundary < written - self._schema.max_rollback_tokens or node.snapshot is not None:
            return
        row = self._rows.reserve() if self._is_wanted(request, trail, boundary) else None
        if row is None:
            return
        try:
            self._pool.capture(slot, row, boundary)
        except RuntimeError as error:
            self._rows.give_back(row)
            LOGGER.warning("no snapshot at %d tokens: %s", boundary, error)
        else:
            self._rows.attach(node, row)
            self._notices.cached(node, trail, is_snapshot=True)

    def _is_wanted(self, request: Request, trail: TokenTrail, boundary: int) -> bool:
        """Whether the state at a boundary is exact, wanted by the policy, and can be kept."""
        return (
            self._pool.rows > 0
            and (rings_exact_from := request.rings_exact_from) is not None
            and boundary >= rings_exact_from
            and self._policy.wants(boundary, trail.prompt_tokens, self._schema.block_tokens)
        )

    def _has_every_layer(self, layers: set[int]) -> bool:
        """Whether these are all layers except draft layers, which not every engine runs."""
        return all(spec.draft or spec.layer in layers for spec in self._schema.model.layers)

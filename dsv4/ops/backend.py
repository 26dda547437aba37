"""The operations of a layer, and what each promises. dsv4/reference has them in plain PyTorch for
any device, dsv4/kernels in Triton; mypy checks that both agree with this file.

What backends write is the same byte for byte; what they compute from it differs at most in the
order of fp32 sums. None of these calls allocates on the device or looks at device data on the host,
except in the reference, which does both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

from torch import Tensor

from dsv4.cache.pages import Page
from dsv4.cache.records import RecordFormat
from dsv4.model import ModelSpec
from dsv4.ops.calls import (
    Attention,
    CompressorWrite,
    EntrySource,
    Following,
    Resolving,
    Scoring,
    Selection,
    Staging,
    StepTensors,
    WindowSource,
    WindowWrite,
)

BackendName = Literal["reference", "triton"]


class Repetition(Protocol):
    """A call that can be made again with other tensors of the same types, shapes and strides."""

    def places(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """Where `tensors` lie, or None where they cannot replace those of the first call."""

    def run(self, places: list[int], tensors: Sequence[Tensor]) -> None:
        """The call, with `tensors` at `places`. Checks nothing."""


class Backend(Protocol):
    """One implementation of everything that a layer computes in a step."""

    @property
    def name(self) -> BackendName: ...

    def check_format(self, record: RecordFormat) -> None:
        """Raises SchemaError for a record format that this backend has no code for."""

    def check_ratio(self, layer: int, ratio: int) -> None:
        """Raises SchemaError for a compression ratio that this backend has no code for."""

    def check_apart(self) -> None:
        """Raises SchemaError if this backend has no code for entries that are kept apart."""

    def repeatable(
        self, calls: Sequence[partial[None]], tensors: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> Repetition | None:
        """Makes `calls` of this backend's operations, which use `tensors` and `fixed`, and returns
        how to make them again with other tensors in place of `tensors`; None where that would be no
        faster than making a new call."""

    def warm_up(
        self, calls: Callable[[], None], *, workers: int, progress: Callable[[int, int], None]
    ) -> int:
        """Compiles what `calls` would launch, in up to `workers` processes, and launches nothing.
        `progress` is called with how many of how many binaries are ready. Returns how many there
        are; 0, without calling `progress`, where nothing is compiled."""

    # ---- where a step starts -------------------------------------------------------------------

    def follow(self, call: Following) -> None:
        """Fills in where requests start: their rows of `batch`, the positions of their tokens
        (those of draft steps too), and the work items of the groups that these close
        (step/shape.py); items that are not needed become padding. An accepted count below 0 or
        above the request's tokens is clamped to that range."""

    # ---- writes --------------------------------------------------------------------------------

    def append(
        self, step: StepTensors, window: WindowWrite | None, compressors: Sequence[CompressorWrite]
    ) -> None:
        """Everything that one layer writes in a step: window rows into the ring (and, in a prefill
        step, into the staging), projections into the tails, closed groups into their blocks.
        Groups are read before tails are overwritten. Padding rows write nothing.
        """

    def write_records(
        self, arena: Tensor, page: Page, arena_row: Tensor, page_row: Tensor, rows: Tensor
    ) -> None:
        """Writes row i of `rows`, of the format's value type, into row `page_row[i]` of the page in
        arena row `arena_row[i]`; where either is negative nothing is written."""

    # ---- gathers -------------------------------------------------------------------------------

    def gather_entries(
        self, source: EntrySource, *, slot: Tensor, position: Tensor, indices: Tensor, out: Tensor
    ) -> None:
        """Decodes entries `indices` int32 [rows, k] of each row's slot into `out` [rows, k, width],
        of the value type of the records' format.

        `position` is the query's: an index below 0, or of an entry that it cannot see, gives zeros.
        Rows with a negative slot are padding and stay untouched.
        """

    def gather_all_entries(
        self, source: EntrySource, *, slot: Tensor, position: Tensor, out: Tensor, lengths: Tensor
    ) -> None:
        """Decodes all entries visible at `position` of each row's slot, in order, into `out`
        [rows, n, width]; `lengths` int32 [rows] receives how many, at most n. Rows of `out` past
        these, and padding rows (negative slot), stay untouched."""

    def gather_window(
        self,
        source: WindowSource,
        *,
        batch: Tensor,
        batch_row: Tensor,
        position: Tensor,
        out: Tensor,
        lengths: Tensor,
    ) -> None:
        """Decodes the window of the query at `position` of each batch row, oldest first, into `out`
        [rows, window, width]; `lengths` int32 [rows] receives how many. Rows of `out` past these,
        and padding rows (negative `batch_row`), stay untouched."""

    # ---- selection -----------------------------------------------------------------------------

    def prepare_index_queries(
        self,
        q: Tensor,
        *,
        tokens: Tensor,
        rope: Tensor,
        record: RecordFormat,
        out: Tensor,
        transform: bool = True,
    ) -> None:
        """Rotates `q` [tokens, heads, width], with `transform` applies a Hadamard transform, then
        encodes and decodes it with `record`; the result goes into `out`, of the same shape and type
        (the value type of `record`).

        `rope` is the layer's table (dsv4.rope). Padding rows of `out` are not touched. A head with
        a NaN or an infinity becomes NaN in all channels.
        """

    def index_scores(self, call: Scoring) -> None:
        """I = Σ_h w_h · ReLU(q_h · k) of every token and every entry that it sees.

        `q` comes from prepare_index_queries, and `weights` are already scaled; both are of the
        value type of the keys. With `round_bf16` dots, products and the sum are rounded to bf16, as
        the model was trained; otherwise all is fp32. The heads are added in a fixed order, so a
        score depends on its query and its key alone.

        Only entries that the token sees are written: columns from (position + 1) // ratio on, the
        rows of padding tokens and those of tokens that see at most `skip_visible` entries keep what
        they held.
        """

    def select(self, call: Selection) -> None:
        """The exact `top_k` entries of every token: entries ascending, followed by -1.

        Of equal scores the lowest entries are taken; -0 equals +0, and NaN is below every number,
        -inf included. Padding rows of `out` and of candidates are not touched. The size of a piece
        of tokens follows from shapes alone, never from lengths. Raises InvalidInput when one
        token's scores do not fit into the workspace; nothing has been launched then.
        """

    def select_workspace_bytes(
        self, rows: int, *, keys: EntrySource, top_k: int, block_entries: int = 0
    ) -> int:
        """The workspace with which `select` handles `rows` tokens at a time; `block_entries` is the
        block size where it publishes candidates."""

    # ---- entries in host memory ----------------------------------------------------------------

    def resolve(self, call: Resolving) -> None:
        """Writes where the selected entries lie on the device, fetching them where necessary.

        For each request, after its clock has advanced to `now`: entries on the device are where the
        table says; entries with a place are hits, and their records are used `now`. Then, token by
        token and in the order of k, the others are misses. The misses of a token take the records
        from `hand` on, in a circle, without those used `now`; `hand` moves past the last one taken.
        Its former entry loses its place; the new one's record is copied there from the host.

        `rows` has record numbers (EntrySource), -1 for indices that are negative or not visible, in
        the order of `selected`; rows of padding tokens stay unchanged. A row of `selected` names no
        entry twice; if it does, `rows` is right all the same. Counted are the named entries that
        are not on the device: an entry that a token named before is a hit.
        """

    def stage(self, call: Staging) -> None:
        """Copies the pages of all blocks (or `which`) with entries that the newest tokens of the
        step's requests see. Padding rows copy nothing."""

    # ---- attention -----------------------------------------------------------------------------

    def attend(self, call: Attention) -> None:
        """One softmax over window rows and compressed entries. Keys are values.

        With logits l = q·k / sqrt(head_dim) and M their maximum
            out = Σ exp(l - M) k / (Σ exp(l - M) + exp(sink - M))
            lse = log Σ exp(l), without the sink
        in fp32, except that exp(l - M) is rounded to the type of `q` before it multiplies k, as
        DeepSeek's kernel does. `q` is of the value type of the records. Indices that are negative
        or not visible are skipped; one named twice counts twice. A query without any key gives
        0 and -inf; rows of padding stay unchanged. With `inverse_rope` the last channels of the
        rounded output are rotated back by the query's position and rounded again.
        """

    def attend_workspace_bytes(self, tokens: int, *, model: ModelSpec, max_entries: int) -> int:
        """The workspace that `attend` needs for up to `tokens` queries of up to `max_entries`
        entries; a multiple of 4."""

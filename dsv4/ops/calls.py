"""What one layer asks of a backend in one step: small frozen objects, one form for all backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dsv4.cache.pages import CompressorLayout, Page
from dsv4.errors import require_type

# ---- what engines hand over ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """`ape` fp32 [ratio, columns] is added to the gate logits, where the model has it; `norm` fp32
    [width]."""

    norm: Tensor
    ape: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyProjection:
    """Index keys computed from the latent: `weight` [index_dim, head_dim], of the type of the
    entries' values, then `norm` fp32 [index_dim]."""

    weight: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of a layer that the cache applies.

    `rope` is the table of dsv4.rope for this layer (`LayerSpec.yarn`). With `kv_norm` fp32
    [head_dim] the layer hands over raw KV projections; without it, KV after norm and RoPE.
    `compressor` makes entries, `index_compressor` index keys, in the layers that have them.
    `index_projection` is for layers whose index keys come from the latent (V4.1).
    Raises InvalidInput for weights that do not fit together; `append` checks the tensors.
    """

    rope: Tensor
    compressor: CompressorWeights | None = None
    index_compressor: CompressorWeights | None = None
    index_projection: KeyProjection | None = None
    kv_norm: Tensor | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None:
                require_type(name, value, kind)


_KINDS: dict[str, type] = {
    "compressor": CompressorWeights,
    "index_compressor": CompressorWeights,
    "index_projection": KeyProjection,
}


# ---- where a step starts ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedItems:
    """The work items of a ratio, in rows that have yet to be filled."""

    ratio: int
    overlap: bool
    items: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedDrafts:
    """Draft steps: `batch` and `tokens` hold `steps` times `rows` rows, one per request."""

    batch: Tensor
    tokens: Tensor
    steps: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """Requests of a step that start where the previous step leaves them, which only the device
    knows.

    `follows` (columns.py) lists them and the rows of `items` reserved for them, as many as their
    tokens can close at most. `batch_before` is the tensor of the previous step; of its tokens
    `accepted` int32 or int64 [requests] are kept, or all of them if it is not given. All index
    tensors of the step lie in one storage. No request has more than `most_tokens`.
    """

    follows: Tensor
    batch: Tensor
    tokens: Tensor
    items: tuple[FollowedItems, ...]
    batch_before: Tensor
    accepted: Tensor | None
    narrow: bool
    most_tokens: int
    drafts: FollowedDrafts | None = None


# ---- writes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """The arenas and a step's index tensors, cut to the padded sizes (columns.py names their
    columns). Rows of -1 are padding and write nothing.

    `narrow` (a decode step): no request has more tokens in the step than its rings can lose
    (schema.max_rollback_tokens), so what it writes does not overwrite what it reads.
    `scratch` fp32 [items, head_dim] and `arrived` int32 [items] serve groups that several programs
    pool together; `arrived` is 0 between launches.

    Entries that are kept apart (`Page.apart`) go to `entries_arena`, through `entry_table` as
    others through `block_table`."""

    block_arena: Tensor
    slot_arena: Tensor
    block_table: Tensor
    batch: Tensor
    tokens: Tensor
    rope: Tensor
    rms_eps: float
    narrow: bool
    scratch: Tensor
    arrived: Tensor
    entries_arena: Tensor | None = None
    entry_table: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowWrite:
    """`kv` [tokens, head_dim] into the ring. With `norm` fp32 [head_dim] the rows are raw
    projections: RMSNorm and RoPE come first.

    With `staging` (uint8 [1, bytes] holding `staging_page`) this is a prefill step: every row goes
    there too, and first the `window` - 1 rows before each request's first token, from the ring.
    Without `keep` rows go to the staging alone.
    """

    page: Page
    kv: Tensor
    norm: Tensor | None
    window: int
    staging: Tensor | None = None
    staging_page: Page | None = None
    keep: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWrite:
    """fp32 projections `c`, `z` [tokens, columns] into tails and, where groups close, entries. For
    a layout that is not gated, `c` is of the type of the entries' values, and `z` is left out. With
    `keys` the latent of each entry gives its index key.

    `items` are the work items of the ratio in the step's buffers. Without `c` and `z` the groups
    are read from the tails, which must hold the step's tokens already. `compress` and `write_tails`
    say which half of the work to do. With `dense` [items, width] the entries of a decode step go
    there and not into blocks.
    """

    layout: CompressorLayout
    items: Tensor
    ape: Tensor | None
    norm: Tensor
    c: Tensor | None
    z: Tensor | None
    keys: KeyProjection | None = None
    compress: bool = True
    write_tails: bool = True
    dense: Tensor | None = None


# ---- reads -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSource:
    """The window rows of a step's requests: records of `page` in `arena` (uint8 [rows, bytes]).

    A decode step reads the ring: position p of slot s is row p % page.rows of arena row s. A
    prefill step (`staged`) reads staged rows, because its own tokens have overwritten the ring: all
    in arena row 0, position p of batch row b at page row columns.staged_row(…), for p from start[b]
    - (window - 1), where not negative, to the newest token. `window` tokens, the query's own
    included, are visible.
    """

    arena: Tensor
    page: Page
    window: int
    staged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySource:
    """Compressed entries or indexer keys: entry e of slot s is row e % page.rows of `page` in
    arena row block_table[s, e // page.rows]. Visible to the query at t: e < (t + 1) // ratio.

    For entries that are kept apart, `block_table` has rows of their arena. Where they were
    `resolved` (`Resolving`), indices say where entries lie: record i % page.rows of arena row
    i // page.rows, whatever the table has; all of them are visible."""

    arena: Tensor
    page: Page
    block_table: Tensor
    ratio: int
    resolved: bool = False

    @property
    def capacity(self) -> int:
        """Entries that a row of the block table can name."""
        return self.block_table.shape[1] * self.page.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Indexer scores of a step's tokens into fp32 `scores` [tokens, columns], where column j is
    entry j; `Backend.index_scores` specifies the arithmetic.

    `q` [tokens, index heads, index_dim] are prepared queries, `weights` [tokens, index heads] their
    scaled weights. Rows of tokens that see at most `skip_visible` entries are left alone: a top-k
    of that size takes all of them. `tokens_per_request` is the most tokens that one request has in
    the step, and `workspace` contiguous uint8 memory whose content is lost: both are for speed.
    """

    q: Tensor
    weights: Tensor
    tokens: Tensor
    keys: EntrySource
    scores: Tensor
    round_bf16: bool = True
    skip_visible: int = 0
    tokens_per_request: int = 1
    workspace: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The first of two levels of selection: int32 `blocks` [tokens, n], ascending, followed by -1;
    block b is the entries [b · block_entries, (b + 1) · block_entries).

    With `publish` the n best blocks are written there, a block's score being the highest of its
    visible entries'; the block of the newest visible entry is always among them, and of equal
    blocks the lowest are taken. Without it, entries are selected from these blocks only.
    """

    blocks: Tensor
    block_entries: int
    publish: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The `top_k` entries of every token by score into int32 `out` [tokens, top_k].

    `workspace` is contiguous uint8 memory whose content is lost; tokens are handled in pieces whose
    scores fit into it. No token sees more than `max_visible` entries; without it, all that the
    block table can name may be seen. When `candidates` are published, the selection does not depend
    on them.
    """

    q: Tensor
    weights: Tensor
    tokens: Tensor
    keys: EntrySource
    top_k: int
    out: Tensor
    workspace: Tensor
    round_bf16: bool = True
    tokens_per_request: int = 1
    candidates: Candidates | None = None
    max_visible: int | None = None

    @property
    def columns(self) -> int:
        """Entries that a token of this call can see."""
        if self.max_visible is None:
            return self.keys.capacity
        return min(self.keys.capacity, self.max_visible)


@dataclass(frozen=True, slots=True, kw_only=True)
class HotRows:
    """Records of one layer's entries that slots have fetched from host memory. Slot s has the
    `records` of arena rows `first_row` + s · n to `first_row` + (s + 1) · n - 1, where n is
    records / page.rows: hot record h is record h % page.rows of the row h // page.rows of these.

    `place` int16 [slots, entries] is the hot record of an entry, or -1, `entry_of` int32 [slots,
    records] the reverse. `used` int32 [slots, records] is the value of `clock` int32 [slots] when a
    record was named last, `hand` int32 [slots] the record that is replaced next. `counted` int64
    [3] counts hits, misses and bytes fetched.
    """

    first_row: int
    records: int
    place: Tensor
    entry_of: Tensor
    used: Tensor
    clock: Tensor
    hand: Tensor
    counted: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolving:
    """Finds the entries `selected` int32 [tokens, k], which a decode step reads, wherever they are,
    and fetches those that are only in host memory; `Backend.resolve` says how.

    `entries` are those on the device: its table has -1 for blocks that are not. `host` uint8
    [blocks, bytes], on the host, has the same pages, in row block_table[slot, block]. No request
    has more than `tokens_per_request` tokens, in this step and in those that repeat it with other
    numbers (captured graphs do), and that many times k is at most `hot.records`.
    `rows` int32 [tokens, k] is the result. `misses` int32 [requests, n, 2] and `miss_count` int32
    [requests] are lost.
    """

    selected: Tensor
    tokens: Tensor
    batch: Tensor
    entries: EntrySource
    block_table: Tensor
    host: Tensor
    hot: HotRows
    rows: Tensor
    misses: Tensor
    miss_count: Tensor
    tokens_per_request: int


# of those that a chunk reads: all blocks, those only in host memory, those on the device
Which = Literal["all", "host", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Copies the entries that the requests of a prefill step see, from `entries` or, where its
    table has -1, from row block_table[slot, block] of `host` (as in `Resolving`), to where `staged`
    has the same blocks of the same slots. `which` limits it to blocks that are only in host memory,
    or to those on the device."""

    batch: Tensor
    entries: EntrySource
    block_table: Tensor
    host: Tensor
    staged: EntrySource
    which: Which = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Queries `q` [tokens, heads, head_dim] (after RoPE) over window and entries, into `out`,
    shaped and typed like `q`, and fp32 `lse` [tokens, heads]; `sink` fp32 [heads].

    `tokens` and `batch` are the step's index tensors. Of `entries` a query sees those that
    `indices` int32 [tokens, k] names, or all visible ones without `indices`. With `inverse_rope`,
    the rotation table of the layer, the output is rotated back. `workspace` fp32 holds partial
    results; it is 0 before its first use. With `joint` (staged windows only) all queries of a
    request see the window of its last token in the step; with `window_cut` (staged windows only)
    they see no row before the request's first token in the step.

    With `batch_invariant` a query's result is the same to the bit whatever else is in the call,
    whether its window is staged or not.

    The rest is for speed: `tokens_per_request` is the most tokens that one request has in the step,
    `max_visible` the most entries that a token sees, if that is known, and `decoded` contiguous
    uint8 memory whose content is lost.
    """

    q: Tensor
    sink: Tensor
    tokens: Tensor
    batch: Tensor
    window: WindowSource
    entries: EntrySource | None
    indices: Tensor | None
    out: Tensor
    lse: Tensor
    inverse_rope: Tensor | None = None
    workspace: Tensor | None = None
    joint: bool = False
    batch_invariant: bool = False
    tokens_per_request: int = 1
    max_visible: int | None = None
    decoded: Tensor | None = None
    window_cut: bool = False

    @property
    def max_entries(self) -> int:
        """How many entries a query of this call can have."""
        if self.entries is None:
            return 0
        return self.entries.capacity if self.indices is None else self.indices.shape[1]

"""What one layer writes in one step, as both backends take it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.schema import CompressorLayout, Page


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """`ape` fp32 [ratio, columns] is added to the gate logits; `norm` fp32 [width]."""

    ape: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """What of a layer's weights the cache applies.

    `rope` is the table of dsv4.rope for this layer (`LayerSpec.yarn`). With `kv_norm` fp32
    [head_dim] the layer hands over raw KV projections; without, KV after norm and RoPE.
    """

    rope: Tensor
    compressor: CompressorWeights | None = None
    index_compressor: CompressorWeights | None = None
    kv_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """The arenas and a step's index tensors, cut to the padded sizes (step_buffers.py names
    their columns). Rows of -1 are padding and write nothing.

    `narrow`: no request has more tokens in the step than its rings can lose
    (schema.max_rollback_tokens), so what it writes leaves what it reads alone.
    `scratch` fp32 [items, head_dim] and `arrived` int32 [items] serve groups that several programs
    pool together; `arrived` is 0 between launches."""

    block_arena: Tensor
    slot_arena: Tensor
    block_table: Tensor
    batch: Tensor
    tokens: Tensor
    window: Tensor
    rope: Tensor
    rms_eps: float
    narrow: bool
    scratch: Tensor
    arrived: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowWrite:
    """`kv` [tokens, head_dim] into the ring. With `norm` fp32 [head_dim] the rows are raw
    projections: RMSNorm and RoPE come first.

    With `chunk` (uint8 [1, bytes] holding `chunk_page`) the step is wide: every row goes there too,
    and before that the `window` - 1 rows in front of each request's first token, from the ring.
    """

    page: Page
    kv: Tensor
    norm: Tensor | None
    window: int
    chunk: Tensor | None = None
    chunk_page: Page | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWrite:
    """fp32 projections `c`, `z` [tokens, columns] into tails and, where groups close, entries.

    `items` are the "groups" of the ratio in StepBuffers. Without `c` and `z` the groups are read
    from the tails, which must hold the step's tokens already. `compress` and `write_tails` say
    which half of the work to do. With `dense` [items, width] the entries of a narrow step go there
    and not into blocks.
    """

    layout: CompressorLayout
    items: Tensor
    ape: Tensor
    norm: Tensor
    c: Tensor | None
    z: Tensor | None
    compress: bool = True
    write_tails: bool = True
    dense: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSource:
    """The window rows of a step's requests: records of `page` in `arena` (uint8 [rows, bytes]).

    A narrow step reads the ring: position p of slot s is row p % page.rows of arena row s. A wide
    one (`chunk`) reads staged rows, because its own tokens have overwritten the ring: all in arena
    row 0, position p of batch row b at page row
        first_row[b] + (window - 1) * b + p - (start[b] - (window - 1))
    for p from start[b] - (window - 1), where not negative, to the newest token. `window` tokens,
    the query's own included, are visible.
    """

    arena: Tensor
    page: Page
    window: int
    chunk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySource:
    """Compressed entries or indexer keys: entry e of slot s is row e % page.rows of `page` in
    arena row block_table[s, e // page.rows]. Visible to the query at t: e < (t + 1) // ratio."""

    arena: Tensor
    page: Page
    block_table: Tensor
    ratio: int

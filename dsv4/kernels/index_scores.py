"""The score of each entry for each query: I = Σ_h w_h · ReLU(q_h · k), in one launch.

A program multiplies a tile of entries (rows of the matrix instruction) with all heads of a token
(columns), so the sum over heads stays within four neighbouring lanes. Work is divided on the
device: every program counts the tiles of all tokens and takes an equal share of them. Long and
short requests of a batch thus keep all processors busy, whatever the lengths, and no program is
launched for entries that no token sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.kernels.codes import bf16_power_of_two, e2m1_value, e4m3_or_nan, power_of_two
from dsv4.kernels.dot import as_operand, dot, load_bf16
from dsv4.kernels.launch import Launch
from dsv4.kernels.numerics import INTERPRETED, round_bf16
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_store import RecordConstants, page_constants
from dsv4.kernels.rows import load_token, score_columns, token_at
from dsv4.kernels.target import (
    bf16_products,
    processors,
    score_registers,
    score_tile,
    speaks_ptx,
    target_of,
)
from dsv4.ops.calls import Candidates, EntrySource, Scoring
from dsv4.ops.constants import MIN_HEADS

NUM_WARPS = 4
NUM_STAGES = 3
PROGRAMS_PER_PROCESSOR = 4
# Interpreted: few, so that shares of work begin and end inside requests.
PROGRAMS_WITHOUT_GPU = 3
# Neighbouring tokens that share the keys they load form a band.
MAX_BAND = 16
# A program looks at the lengths of all tokens of its launch at once.
MAX_TOKENS = 256


def _decode_nibble(nth: int) -> str:
    """PTX: code `nth` of the words in $4 times the powers of two in $5, into ${nth}."""
    # by how many bits a code's fields move to where bf16 has them
    sign, size = 12 - 4 * nth, 6 - 4 * nth
    aligned = f"shl.b32 sign, $4, {sign};\n        and.b32 sign, sign, 0x80008000;"
    word = aligned if sign else "and.b32 sign, $4, 0x80008000;"
    shift = f"shl.b32 size, $4, {size};" if size > 0 else f"shr.u32 size, $4, {-size};"
    return f"""
        {word}
        {shift}
        and.b32 size, size, 0x01C001C0;
        or.b32 size, size, sign;
        mul.rn.bf16x2 size, size, unit;
        mul.rn.bf16x2 ${nth}, size, $5;"""


# unit is 2^126, twice
DECODE_MXFP4 = tl.constexpr(
    "{.reg .b32 sign, size, unit; mov.b32 unit, 0x7E807E80;"
    + "".join(map(_decode_nibble, range(4)))
    + "}"
)
WEIGHTED_RELU = tl.constexpr("""
        {
        .reg .b32 pair;
        cvt.rn.relu.bf16x2.f32 pair, $3, $2;
        mul.rn.bf16x2 pair, pair, $4;
        shl.b32 $0, pair, 16;
        and.b32 $1, pair, 0xFFFF0000;
        }
        """)


@dataclass(frozen=True, slots=True)
class ScoreConstants:
    """A launch as compile-time constants. Up to BANDS bands of BAND tokens; TILE entries; ROUND:
    dots, products and sums are bf16 numbers. With BLOCKS, columns are the entries of BLOCKS
    candidate blocks of SPAN entries each."""

    HEADS: int
    HEADS_PADDED: int
    WIDTH: int
    RATIO: int
    PAGE_ROWS: int
    BAND: int
    BANDS: int
    TILE: int
    ROUND: bool
    RECORD: RecordConstants
    SPAN: int
    BLOCKS: int


# Bundles are packed inside the kernel. Comments give the shapes of block values: [entries] are the
# TILE entries of a tile, [heads] all heads, padded.


class ScoreArguments(NamedTuple):
    """The arguments that the signatures of this kernel and of Hopper's begin with, as
    `AttendArguments`."""

    q_ptr: Tensor
    weights_ptr: Tensor
    tokens_ptr: Tensor
    arena: Tensor
    table_ptr: Tensor
    scores_ptr: Tensor
    rows: int
    columns: int
    skip_visible: int
    q_stride: int
    q_head_stride: int
    weights_stride: int
    arena_stride: int
    table_stride: int
    scores_stride: int
    data_offset: int
    scale_offset: int


class _Tokens(NamedTuple):
    """The tokens of a launch, and which of their entries are scored: at most `columns`, and none
    for tokens that see no more than `skip_visible`."""

    ptr: Any
    rows: Any
    columns: Any
    skip_visible: Any


class _Queries(NamedTuple):
    q: Any
    weights: Any
    stride: Any
    head_stride: Any
    weights_stride: Any


class _Keys(NamedTuple):
    """Where keys are: byte offsets in a block."""

    arena: Any
    table: Any
    block_bytes: Any
    table_stride: Any
    data: Any
    scale: Any
    candidates: Any
    candidates_stride: Any


class _Scores(NamedTuple):
    ptr: Any
    stride: Any


class _Query(NamedTuple):
    """One token's query: `q` in four quarters [channels / 4, heads], as keys are cut."""

    q: Any
    weight: Any  # [heads]


def index_scores(call: Scoring) -> None:
    """Same result as the reference, bit for bit where the dot product is exact in fp32 (MXFP4 and
    NVFP4 unless scales differ by very much).

    One launch per 256 tokens. Up to 16 neighbouring tokens share the keys they load, depending on
    how many tokens a request usually has (`tokens_per_request`). Raises InvalidInput for a width
    below 64.
    """
    for piece in pieces(call):
        index_scores_launch(piece).run()


def candidate_scores(call: Scoring, candidates: Candidates) -> None:
    """The same for the entries of each token's candidate blocks: column j is entry
    j % block_entries of block j // block_entries in the token's list."""
    first = 0
    for piece in pieces(call):
        rows = slice(first, first + piece.tokens.shape[0])
        of = replace(candidates, blocks=candidates.blocks[rows])
        index_scores_launch(replace(piece, tokens_per_request=1), of).run()
        first = rows.stop


def pieces(call: Scoring) -> Iterator[Scoring]:
    """The call as runs of tokens that one launch can handle."""
    count = call.tokens.shape[0]
    if count <= MAX_TOKENS:
        yield call
        return
    for first in range(0, count, MAX_TOKENS):
        rows = slice(first, first + MAX_TOKENS)
        yield replace(
            call,
            q=call.q[rows],
            weights=call.weights[rows],
            tokens=call.tokens[rows],
            scores=call.scores[rows],
        )


def index_scores_launch(call: Scoring, candidates: Candidates | None = None) -> Launch:
    """The launch of a call that is one piece."""
    _, heads, width = call.q.shape
    if width < 64 or width & (width - 1):
        raise InvalidInput(
            f"indexer keys of {width} channels: the kernel multiplies quarters of a power of two "
            f"of at least 64"
        )
    rows, columns = call.scores.shape
    band = min(triton.next_power_of_2(max(call.tokens_per_request, 1)), MAX_BAND)
    bands = triton.cdiv(rows, band)
    most = score_tile(target_of(call.q.device), band)
    tile = min(most, max(16, triton.next_power_of_2(columns)))
    programs = min(_programs(call.q.device), bands * triton.cdiv(columns, tile))
    constants = ScoreConstants(
        HEADS=heads,
        HEADS_PADDED=max(MIN_HEADS, triton.next_power_of_2(heads)),
        WIDTH=width,
        RATIO=call.keys.ratio,
        PAGE_ROWS=call.keys.page.rows,
        BAND=band,
        BANDS=max(16, triton.next_power_of_2(bands)),
        TILE=tile,
        ROUND=call.round_bf16,
        RECORD=_index_record(call.keys),
        SPAN=1 if candidates is None else candidates.block_entries,
        BLOCKS=0 if candidates is None else candidates.blocks.shape[1],
    )
    options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES, "enable_fp_fusion": False}
    powers = constants.RECORD.SCALE == "ue8m0"
    registers = score_registers(target_of(call.q.device), band, powers=powers)
    if registers is not None:
        options["maxnreg"] = registers
    blocks = call.tokens if candidates is None else candidates.blocks
    arguments = (*run_time_arguments(call), blocks, blocks.stride(0))
    return Launch(_index_scores_kernel, (programs,), arguments, {"S": constants}, options)


def run_time_arguments(call: Scoring) -> ScoreArguments:
    keys = call.keys
    rows, columns = call.scores.shape
    return ScoreArguments(
        q_ptr=call.q,
        weights_ptr=call.weights,
        tokens_ptr=call.tokens,
        arena=keys.arena,
        table_ptr=keys.block_table,
        scores_ptr=call.scores,
        rows=rows,
        columns=columns,
        skip_visible=call.skip_visible,
        q_stride=call.q.stride(0),
        q_head_stride=call.q.stride(1),
        weights_stride=call.weights.stride(0),
        arena_stride=keys.arena.stride(0),
        table_stride=keys.block_table.stride(0),
        scores_stride=call.scores.stride(0),
        data_offset=keys.page.offset_bytes,
        scale_offset=keys.page.scale_offset_bytes,
    )


def _index_record(keys: EntrySource) -> RecordConstants:
    record = page_constants(keys.page)
    if record.CODED not in (0, keys.page.format.width):
        raise InvalidInput(
            f"indexer keys have one code for all channels; {keys.page.format.name} leaves "
            f"{keys.page.format.width - record.CODED} of them as bf16"
        )
    return record


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS_WITHOUT_GPU
    return processors(device) * PROGRAMS_PER_PROCESSOR


@triton.jit(do_not_specialize=["rows", "skip_visible"])
def _index_scores_kernel(
    q_ptr,
    weights_ptr,
    tokens_ptr,
    arena,
    table_ptr,
    scores_ptr,
    rows,
    columns,
    skip_visible,
    q_stride,
    q_head_stride,
    weights_stride,
    arena_stride,
    table_stride,
    scores_stride,
    data_offset,
    scale_offset,
    candidates,
    candidates_stride,
    S: tl.constexpr,
):
    begin_program()
    tokens = _Tokens(ptr=tokens_ptr, rows=rows, columns=columns, skip_visible=skip_visible)
    queries = _Queries(
        q=q_ptr,
        weights=weights_ptr,
        stride=q_stride,
        head_stride=q_head_stride,
        weights_stride=weights_stride,
    )
    keys = _Keys(
        arena=arena,
        table=table_ptr,
        block_bytes=arena_stride,
        table_stride=table_stride,
        data=data_offset,
        scale=scale_offset,
        candidates=candidates,
        candidates_stride=candidates_stride,
    )
    scores = _Scores(ptr=scores_ptr, stride=scores_stride)
    ends = _tile_ends(tokens, S)
    total = tl.max(ends, axis=0).to(tl.int64)
    # this program's share of all tiles, counted across the bands: [at, stop)
    at = (tl.program_id(0) * total // tl.num_programs(0)).to(tl.int32)
    stop = ((tl.program_id(0) + 1) * total // tl.num_programs(0)).to(tl.int32)
    while at < stop:
        # computed again from the cache rather than kept: registers are what limits the programs
        ends = _tile_ends(tokens, S)
        band = tl.sum((ends <= at).to(tl.int32), axis=0)
        band_begin = tl.max(tl.where(ends <= at, ends, 0), axis=0)
        band_end = tl.min(tl.where(ends > at, ends, 0x7FFFFFFF), axis=0)
        share_end = tl.minimum(stop, band_end)
        begin = at - band_begin
        end = share_end - band_begin
        if S.BAND == 1:
            _score_token(band, begin, end, tokens, queries, keys, scores, S)
        else:
            _score_band(band, begin, end, tokens, queries, keys, scores, S)
        at = share_end


@triton.jit
def _tile_ends(tokens, S: tl.constexpr):
    """The running total of tiles over the bands, each band included: [BANDS]."""
    BAND: tl.constexpr = S.BAND
    BANDS: tl.constexpr = S.BANDS
    _, seen = _seen_columns(tl.arange(0, BANDS * BAND), tokens, S)
    longest = tl.max(tl.reshape(seen, [BANDS, BAND]), axis=1)
    return tl.cumsum((longest + S.TILE - 1) // S.TILE, axis=0)


@triton.jit
def _seen_columns(token, tokens, S: tl.constexpr):
    """Slots of some tokens, and how many columns each has to fill."""
    live = token < tokens.rows
    slot, position, _, _ = load_token(token_at(tokens.ptr, token), live, -1)
    visible = (position + 1) // S.RATIO
    seen = tl.minimum(score_columns(tl.maximum(visible, 0), S.SPAN, S.BLOCKS), tokens.columns)
    return slot, tl.where((slot >= 0) & (visible > tokens.skip_visible), seen, 0)


@triton.jit
def _score_token(token, begin, end, tokens, queries, keys, scores, S: tl.constexpr):
    """Tiles [begin, end) of one token; its query is loaded once."""
    TILE: tl.constexpr = S.TILE
    slot, seen = _seen_columns(token, tokens, S)
    query = _load_query(token, queries, S)
    table_row = keys.table + slot.to(tl.int64) * keys.table_stride
    scores_row = scores.ptr + token.to(tl.int64) * scores.stride
    for tile in range(begin, end):
        column = tile * TILE + tl.arange(0, TILE)  # [entries]
        entry = column
        if S.BLOCKS > 0:
            listed = keys.candidates + token.to(tl.int64) * keys.candidates_stride
            block = tl.load(listed + column // S.SPAN, mask=column < seen, other=0)
            entry = block * S.SPAN + column % S.SPAN
        k = _load_keys(entry, column < seen, keys, table_row, S)
        score = _score(k, query, S)
        tl.store(scores_row + column, score, mask=column < seen)


@triton.jit
def _score_band(band, begin, end, tokens, queries, keys, scores, S: tl.constexpr):
    """Tiles [begin, end) of a band of tokens. Keys are loaded again only where the request changes
    from one token to the next."""
    BAND: tl.constexpr = S.BAND
    TILE: tl.constexpr = S.TILE
    QUARTER: tl.constexpr = S.WIDTH // 4
    slots, all_seen = _seen_columns(band * BAND + tl.arange(0, BAND), tokens, S)  # [BAND]
    for tile in range(begin, end):
        column = tile * TILE + tl.arange(0, TILE)  # [entries]
        loaded_slot = -1
        none = tl.zeros([TILE, QUARTER], dtype=tl.float32 if INTERPRETED else tl.bfloat16)
        k = (none, none, none, none)
        for token in range(band * BAND, band * BAND + BAND):
            slot, seen = _seen_columns(token, tokens, S)
            if tile * TILE < seen:
                if slot != loaded_slot:
                    most = tl.max(tl.where(slots == slot, all_seen, 0), axis=0)
                    table_row = keys.table + slot.to(tl.int64) * keys.table_stride
                    k = _load_keys(column, column < most, keys, table_row, S)
                    loaded_slot = slot
                query = _load_query(token, queries, S)
                score = _score(k, query, S)
                scores_row = scores.ptr + tl.cast(token, tl.int64) * scores.stride
                tl.store(scores_row + column, score, mask=column < seen)


@triton.jit
def _load_query(token, queries, S: tl.constexpr):
    """A token's _Query."""
    WIDTH: tl.constexpr = S.WIDTH
    QUARTER: tl.constexpr = WIDTH // 4
    HEADS: tl.constexpr = S.HEADS
    HEADS_PADDED: tl.constexpr = S.HEADS_PADDED
    RECORD: tl.constexpr = S.RECORD
    head = tl.arange(0, HEADS_PADDED)
    row = queries.q + tl.cast(token, tl.int64) * queries.stride
    row += head[:, None] * queries.head_stride
    live = head[:, None] < HEADS
    if RECORD.ELEMENT == "e2m1":
        q = load_bf16(row + tl.arange(0, WIDTH)[None, :], live)
        even, odd = tl.split(tl.reshape(q, [HEADS_PADDED, WIDTH // 2, 2]))
        q0, q2 = tl.split(tl.reshape(even, [HEADS_PADDED, QUARTER, 2]))
        q1, q3 = tl.split(tl.reshape(odd, [HEADS_PADDED, QUARTER, 2]))
    else:
        first = row + tl.arange(0, QUARTER)[None, :]
        q0 = load_bf16(first, live)
        q1 = load_bf16(first + QUARTER, live)
        q2 = load_bf16(first + 2 * QUARTER, live)
        q3 = load_bf16(first + 3 * QUARTER, live)
    weight_row = queries.weights + tl.cast(token, tl.int64) * queries.weights_stride
    weight = load_bf16(weight_row + head, head < HEADS)
    return _Query(q=(tl.trans(q0), tl.trans(q1), tl.trans(q2), tl.trans(q3)), weight=weight)


@triton.jit
def _load_keys(entry, live, keys, table_row, S: tl.constexpr):
    """Four quarters [entries, WIDTH / 4] of decoded keys: every fourth channel where 16 bits hold
    four codes, else consecutive quarters of the channels. bf16, or fp32 when interpreted. Rows that
    are not live are not read and give 0."""
    QUARTER: tl.constexpr = S.WIDTH // 4
    RECORD: tl.constexpr = S.RECORD
    block_id = tl.load(table_row + entry // S.PAGE_ROWS, mask=live, other=0).to(tl.int64)
    page = keys.arena + block_id * keys.block_bytes
    page_row = entry % S.PAGE_ROWS
    data = page + keys.data + page_row * RECORD.DATA_STRIDE
    scale_row = page + keys.scale + page_row * RECORD.SCALE_STRIDE
    mask = live[:, None]
    at = tl.arange(0, QUARTER)[None, :]
    if RECORD.ELEMENT == "e2m1":
        # [entries, WIDTH / 4] words of four codes
        words = tl.load(data.to(tl.pointer_type(tl.int16))[:, None] + at, mask=mask, other=0)
        TILES: tl.constexpr = S.WIDTH // RECORD.TILE
        nth = tl.arange(0, TILES)[None, :]
        scale = tl.load(scale_row[:, None] + nth, mask=mask, other=0)
        if RECORD.SCALE == "ue8m0" and speaks_ptx() and not INTERPRETED:
            power = bf16_power_of_two(scale.to(tl.int32))
            k0, k1, k2, k3 = _decode_mxfp4(words, _spread(power, QUARTER))
        else:
            if RECORD.SCALE == "ue8m0":
                factor = power_of_two(scale.to(tl.int32))
            else:
                factor = e4m3_or_nan(scale) * RECORD.GLOBAL_SCALE
            factor = _spread(factor, QUARTER)
            code = words.to(tl.int32)
            k0 = as_operand(e2m1_value(code & 15) * factor)
            k1 = as_operand(e2m1_value((code >> 4) & 15) * factor)
            k2 = as_operand(e2m1_value((code >> 8) & 15) * factor)
            k3 = as_operand(e2m1_value((code >> 12) & 15) * factor)
    elif RECORD.ELEMENT == "e4m3":
        tl.static_assert(RECORD.SCALE == "fp32" and RECORD.TILE == S.WIDTH, "one scale per key")
        factor = tl.load(scale_row.to(tl.pointer_type(tl.float32)), mask=live, other=0.0)[:, None]
        first = data[:, None] + at
        k0 = as_operand(e4m3_or_nan(tl.load(first, mask=mask, other=0)) * factor)
        k1 = as_operand(e4m3_or_nan(tl.load(first + QUARTER, mask=mask, other=0)) * factor)
        k2 = as_operand(e4m3_or_nan(tl.load(first + 2 * QUARTER, mask=mask, other=0)) * factor)
        k3 = as_operand(e4m3_or_nan(tl.load(first + 3 * QUARTER, mask=mask, other=0)) * factor)
    else:
        first = data.to(tl.pointer_type(tl.bfloat16))[:, None] + at
        k0 = load_bf16(first, mask)
        k1 = load_bf16(first + QUARTER, mask)
        k2 = load_bf16(first + 2 * QUARTER, mask)
        k3 = load_bf16(first + 3 * QUARTER, mask)
    return k0, k1, k2, k3


@triton.jit
def _spread(scale, QUARTER: tl.constexpr):
    """[entries, tiles] → [entries, QUARTER]: neighbouring columns share a tile."""
    SPAN: tl.constexpr = QUARTER // scale.shape[1]
    wide = tl.broadcast_to(scale[:, :, None], [scale.shape[0], scale.shape[1], SPAN])
    return tl.reshape(wide, [scale.shape[0], QUARTER])


@triton.jit
def _decode_mxfp4(words, scale):
    """16 bits of four E2M1 codes, and bf16 scales → the codes' values as bf16, two words at once.

    A code's three magnitude bits, placed where bf16 has the end of its exponent and the start of
    its mantissa, read as its value times 2^-126 (a half as a denormal); its sign goes to the front.
    """
    return tl.inline_asm_elementwise(
        bf16_products(DECODE_MXFP4),
        "=&r,=&r,=&r,=&r,r,r",
        [words, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _score(k, query, S: tl.constexpr):
    """fp32 scores [entries]; with ROUND they are bf16 numbers."""
    TILE: tl.constexpr = S.TILE
    HEADS_PADDED: tl.constexpr = S.HEADS_PADDED
    weight = query.weight
    dots = tl.zeros([TILE, HEADS_PADDED], dtype=tl.float32)  # [entries, heads]
    for quarter in tl.static_range(4):
        dots = dot(k[quarter], query.q[quarter], dots)
    if S.ROUND:
        if INTERPRETED or not speaks_ptx():
            dots = round_bf16(dots)
            product = round_bf16(tl.where(dots < 0, 0.0, dots) * weight.to(tl.float32)[None, :])
        else:
            product = _weighted_relu(dots, tl.broadcast_to(weight[None, :], dots.shape))
        total = round_bf16(_head_sum(product))
    else:
        total = _head_sum(tl.where(dots < 0, 0.0, dots) * weight.to(tl.float32)[None, :])
        total = tl.where(total != total, float("nan"), total)
    return tl.where(total == 0, 0.0, total)


@triton.jit
def _weighted_relu(dots, weight):
    """bf16(ReLU(bf16(dot)) · weight) as fp32 [entries, heads], two at once."""
    return tl.inline_asm_elementwise(
        bf16_products(WEIGHTED_RELU),
        "=&r,=&r,f,f,r",
        [dots, weight],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _head_sum(x):
    """[entries, heads] → [entries], in the order of the reference. Each step adds two numbers, so
    no layout of registers can change the sum: first neighbours, which one thread holds, then the
    halves, finally across lanes."""
    x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    if x.shape[1] >= 128:
        x = _halve(x)
    if x.shape[1] >= 64:
        x = _halve(x)
    if x.shape[1] >= 32:
        x = _halve(x)
    if x.shape[1] >= 16:
        x = _halve(x)
    x = _halve(_halve(_halve(x)))
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def _halve(x):
    return tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)

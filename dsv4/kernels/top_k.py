"""Exact selection: the k highest scores of every row, ties to the lowest entry.

A score has an image, a number with the same order: 0 is NaN, 1 is -infinity. Thresholds are images;
scores are compared directly. Entries fall into bins. At least k scores reach the k-th highest of
the bins' maxima, or any number below it: this is the bound, and mostly it is close to the k-th
highest score.

A row of up to MAX_ROW scores is held in registers by one program, which finds the bound and then,
by counting from there, the k-th highest score. A longer row takes two launches, except where the
rows keep all processors busy with one program each: that program does both in turn.

1. The maxima of BINS bins are stored. A bin takes one of each run of BINS entries and shifts from
   run to run by SKEW, so that neither neighbours nor entries at a round distance, which tend to
   have similar scores, meet in one bin.
2. Every program finds the bound and adds those scores of its slice of the row that reach it to the
   row's list, a little more than k entries. The last program to finish finds the k-th highest score
   of the list, sorts the list by entry and writes the result. The order in which slices arrive
   differs from run to run; the result does not.

If more scores reach the bound than the list holds (the highest would all have to lie in a few bins,
or be equal), the last program searches the row itself: slow, but exact too.

A bound is close if there are at least twice as many bins as k, and the list is longer than what
reaches the bound. So rows of which more than BINS // 2 scores are wanted (V4.1's 2,048 candidate
blocks) have WIDER times as many bins and a list LONGER times as long.

    workspace int32 [rows, highest of bins | list length, arrived | slices: length, start | list]
    of many rows    [rows, list]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.kernels import sizes
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import load_token, score_columns, token_at
from dsv4.kernels.sizes import (
    are_many,
    bins_and_list,
    padded_slices,
    row_words,
    tile_of_row,
    top_k_workspace_bytes,
)
from dsv4.kernels.target import LONG_ROW_REGISTERS, bounded_registers, row_warps, target_of

# A multiple of 8 (32 bytes), so that loads stay wide, times an odd number, so that two runs have
# the same shift only after 2^19 entries.
SKEW = 8 * 77
MAX_AT_ONCE = 4096  # scores that a program of the first launch loads at a time
# Where one program does all of a long row it takes this many scores at a time.
LONG_TILE = 4096
LONG_WARPS = 4
# -infinity and infinity in the order of bits, whose lowest numbers are NaN.
_LOWEST = tl.constexpr(0x007FFFFF)
_HIGHEST = tl.constexpr(0xFF800000)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKConstants:
    """A launch as compile-time constants. TILE: scores of a program; WIDTH and DEPTH: bins of a
    program of the first of two launches, and how many members of each it loads at a time. SPAN and
    BLOCKS: what columns stand for (rows.score_columns)."""

    K: int
    K_PADDED: int
    RATIO: int
    BITS: int
    BINS: int
    TILE: int
    LIST: int
    SLICES: int
    WIDTH: int
    DEPTH: int
    SKEW: int
    SPAN: int
    BLOCKS: int


# Bundles are packed inside the kernels.


class _Row(NamedTuple):
    """A row of scores, of which the first `seen` count, and where its result goes."""

    scores: Any
    out: Any
    seen: Any
    columns: Any


class _Work(NamedTuple):
    """A row's part of the workspace: for each slice the length and the start of what it listed, and
    the list itself, scores and then entries. The arrival counter follows `length`."""

    length: Any
    slices: Any
    list: Any


class _Places(NamedTuple):
    """Prefix counts of the scores that reach a bound: within each quad of scores up to each of its
    four, in all earlier quads, and in total."""

    to_0: Any
    to_1: Any
    to_2: Any
    to_3: Any
    before: Any
    total: Any


def top_k(
    scores: Tensor,
    *,
    tokens: Tensor,
    ratio: int,
    out: Tensor,
    bf16_scores: bool = True,
    workspace: Tensor | None = None,
    span: int = 1,
    blocks: int = 0,
) -> None:
    """Same result as dsv4.reference.top_k.top_k, in one launch where rows have up to MAX_ROW
    scores or are many, else in two. Allocates nothing; `workspace`, contiguous uint8, may have any
    content before. Scores that are not bf16 numbers need bf16_scores=False. With `span`, columns
    stand for blocks of that many entries; with `blocks`, for the entries of that many such blocks.
    Raises InvalidInput if the workspace is too small.
    """
    rows, columns = scores.shape
    if rows == 0 or out.shape[1] == 0:
        return
    needed = top_k_workspace_bytes(rows, columns, out.shape[1]) if columns > out.shape[1] else 0
    if needed and (workspace is None or workspace.numel() < needed):
        given = 0 if workspace is None else workspace.numel()
        raise InvalidInput(
            f"top-k of {rows:,} rows of {columns:,} scores needs a workspace of {needed:,} bytes, "
            f"got {given:,}"
        )
    work = out if not needed or workspace is None else workspace[:needed].view(torch.int32)
    for launch in top_k_launches(scores, tokens, work, out, ratio, bf16_scores, span, blocks):
        launch.run()


def top_k_launches(
    scores: Tensor,
    tokens: Tensor,
    work: Tensor,
    out: Tensor,
    ratio: int,
    bf16_scores: bool,
    span: int = 1,
    blocks: int = 0,
) -> list[Launch]:
    rows, columns = scores.shape
    k = out.shape[1]
    scored = (scores, tokens, columns, scores.stride(0))
    tile = tile_of_row(rows, columns)
    slices = -(-columns // tile)
    one_tile = columns <= k or slices == 1
    # programs of a row that share the bins, each at least 32 bytes wide
    at_once = min(tile, MAX_AT_ONCE)
    bins, listed = bins_and_list(k)
    alone = one_tile or are_many(rows, k)
    if alone and not one_tile:
        tile = at_once = LONG_TILE
    sharers = 1 if alone else min(1 << ((columns // at_once).bit_length() - 1), bins // 8)
    width = bins // sharers
    constants = {
        "T": TopKConstants(
            K=k,
            K_PADDED=triton.next_power_of_2(k),
            RATIO=ratio,
            BITS=16 if bf16_scores else 32,
            BINS=min(tile, sizes.BINS) if one_tile else bins,
            TILE=tile,
            LIST=listed,
            SLICES=1 if alone else padded_slices(slices),
            WIDTH=width,
            DEPTH=max(at_once // width, 1),
            SKEW=SKEW,
            SPAN=span,
            BLOCKS=blocks,
        )
    }
    options = {"num_warps": 4, "enable_fp_fusion": True}
    target = target_of(out.device)
    if one_tile:
        arguments = (*scored, out, out.stride(0))
        options = {**options, "num_warps": row_warps(target, tile)}
        return [Launch(_one_tile_kernel, (rows, 1), arguments, constants, options)]
    if alone:
        of_row = (*scored, work, out, out.stride(0))
        registers = bounded_registers(target, LONG_ROW_REGISTERS)
        options = {**options, "num_warps": LONG_WARPS, "maxnreg": registers}
        return [Launch(_long_row_kernel, (rows, 1), of_row, constants, options)]
    worked = (*scored, work, row_words(slices, k))
    return [
        Launch(_bin_maxima_kernel, (rows, sharers), worked, constants, options),
        Launch(
            _list_kernel,
            (rows, slices),
            (*worked, out, out.stride(0)),
            constants,
            {**options, "num_warps": 8, "maxnreg": 128},  # so two programs share a processor
        ),
    ]


@triton.jit
def _one_tile_kernel(
    scores_ptr, tokens_ptr, columns, scores_stride, out_ptr, out_stride,
    T: tl.constexpr,
):  # fmt: skip
    """A whole row."""
    begin_program()
    K: tl.constexpr = T.K
    TILE: tl.constexpr = T.TILE
    BINS: tl.constexpr = T.BINS
    nth = tl.program_id(0).to(tl.int64)
    seen = _seen(tokens_ptr, nth, columns, T)
    out_row = out_ptr + nth * out_stride
    if seen > K:
        at = tl.arange(0, TILE)
        scores_row = scores_ptr + nth * scores_stride
        row = _Row(scores=scores_row, out=out_row, seen=seen, columns=columns)
        score = _scores(row, at)  # [TILE]
        if (BINS == TILE) | (2 * K > BINS):
            threshold, higher = _boundary(score, K, tl.full([], 0, tl.uint32), T.BITS)
        else:
            members = tl.reshape(score, [BINS, TILE // BINS])
            members = tl.where(members == members, members, float("-inf"))
            bound = _bound(tl.max(members, axis=1), K, T.BITS)
            threshold, higher = _raised(score, K, bound, T.BITS)
        score, least = _ranked(score, at < seen, threshold, T.BITS)
        _emit(out_row, score, at, least, K - higher, 0, 0)
    elif seen >= 0:
        _emit_all(out_row, seen, T)


@triton.jit
def _bin_maxima_kernel(
    scores_ptr, tokens_ptr, columns, scores_stride, work_ptr, row_words,
    T: tl.constexpr,
):  # fmt: skip
    """WIDTH bins."""
    begin_program()
    BINS: tl.constexpr = T.BINS
    WIDTH: tl.constexpr = T.WIDTH
    nth = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1)
    seen = _seen(tokens_ptr, nth, columns, T)
    if seen > T.K:
        scores_row = scores_ptr + nth * scores_stride
        row = _Row(scores=scores_row, out=None, seen=seen, columns=columns)
        work = work_ptr + nth * row_words
        bins = mine * WIDTH + tl.arange(0, WIDTH)
        tl.store(work + bins, _maxima(row, bins, T).to(tl.int32, bitcast=True))
        if mine == 0:
            tl.store(work + BINS + tl.arange(0, 2), tl.zeros([2], dtype=tl.int32))


@triton.jit
def _maxima(row, bins, T: tl.constexpr):
    """The highest scores of WIDTH bins, DEPTH of their members at a time."""
    BINS: tl.constexpr = T.BINS
    DEPTH: tl.constexpr = T.DEPTH
    highest = tl.full([DEPTH, T.WIDTH], float("-inf"), tl.float32)
    for first in range(0, tl.cdiv(row.seen, BINS), DEPTH):
        run = (first + tl.arange(0, DEPTH))[:, None]
        member = (bins[None, :] + T.SKEW * run) % BINS
        member = tl.max_contiguous(tl.multiple_of(member, [1, 8]), [1, 8])
        score = _scores(row, run * BINS + member)  # [DEPTH, WIDTH]
        highest = tl.where(score > highest, score, highest)
    return tl.max(highest, axis=0)


@triton.jit
def _long_row_kernel(
    scores_ptr, tokens_ptr, columns, scores_stride, work_ptr, out_ptr, out_stride,
    T: tl.constexpr,
):  # fmt: skip
    """A whole row that registers cannot hold: its bins, its list, and the result from it."""
    begin_program()
    K: tl.constexpr = T.K
    LIST: tl.constexpr = T.LIST
    TILE: tl.constexpr = T.TILE
    nth = tl.program_id(0).to(tl.int64)
    seen = _seen(tokens_ptr, nth, columns, T)
    row = _row(scores_ptr, scores_stride, out_ptr, out_stride, nth, seen, columns)
    if seen > K:
        bound = _bound(_maxima(row, tl.arange(0, T.BINS), T), K, T.BITS)
        list_ptr = work_ptr + nth * (2 * LIST)
        listed = tl.where(bound == 0, LIST + 1, 0)  # no bound, no list
        for begin in range(0, seen, TILE):
            at = begin + tl.arange(0, TILE)
            score = _scores(row, at)
            places = _places(score, bound, T.BITS)
            if listed + places.total <= LIST:
                _list_at(list_ptr + listed, score, at, places, LIST)
            listed += places.total
        tl.debug_barrier()
        if listed <= LIST:
            place = tl.arange(0, LIST)
            live = place < listed
            score = tl.load(list_ptr + place, mask=live, other=-1).to(tl.float32, bitcast=True)
            at = tl.load(list_ptr + LIST + place, mask=live, other=0)
            threshold, higher = _boundary(score, K, bound, T.BITS)
            score, least = _ranked(score, live, threshold, T.BITS)
            _emit(row.out, score, at, least, K - higher, 0, 0)
        else:
            _emit_row(row, bound, TILE, T)
    elif seen >= 0:
        _emit_all(row.out, seen, T)


@triton.jit
def _list_kernel(
    scores_ptr, tokens_ptr, columns, scores_stride, work_ptr, row_words, out_ptr,
    out_stride, T: tl.constexpr,
):  # fmt: skip
    """Lists the scores of one slice that reach the bound; the last program of a row writes the
    result."""
    begin_program()
    K: tl.constexpr = T.K
    BINS: tl.constexpr = T.BINS
    TILE: tl.constexpr = T.TILE
    nth = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1)
    seen = _seen(tokens_ptr, nth, columns, T)
    row = _row(scores_ptr, scores_stride, out_ptr, out_stride, nth, seen, columns)
    at = mine * TILE + tl.arange(0, TILE)
    score = _scores(row, at)  # [TILE]
    if (seen > K) & (mine * TILE < seen):
        highest_ptr = work_ptr + nth * row_words
        length = highest_ptr + BINS
        slices = length + 16
        work = _Work(length=length, slices=slices, list=slices + 2 * T.SLICES)
        if K <= BINS:
            highest = tl.load(highest_ptr + tl.arange(0, BINS)).to(tl.float32, bitcast=True)
            bound = _bound(highest, K, T.BITS)
        else:
            bound = tl.full([], 0, tl.uint32)
        _list(work, mine, score, at, bound, T)
        tl.debug_barrier()
        arrived = tl.atomic_add(length + 1, 1, sem="acq_rel")
        if arrived == tl.cdiv(seen, TILE) - 1:
            listed = tl.load(length, cache_modifier=".cg")
            if listed <= T.LIST:
                _emit_list(row, work, listed, bound, T)
            else:
                _emit_row(row, bound, min(TILE, 4096), T)
    elif (seen >= 0) & (mine == 0):
        _emit_all(row.out, seen, T)


@triton.jit
def _list(work, mine, score, at, bound, T: tl.constexpr):
    """Adds the scores of a slice that reach the bound to the list, in order."""
    slice_at = work.slices + mine
    places = _places(score, bound, T.BITS)
    total = tl.where(bound == 0, T.LIST + 1, places.total)  # no bound, no list
    start = tl.atomic_add(work.length, total, sem="relaxed")
    tl.store(slice_at, total)
    tl.store(slice_at + T.SLICES, start)
    if start + total <= T.LIST:
        _list_at(work.list + start, score, at, places, T.LIST)


@triton.jit
def _places(score, bound, BITS: tl.constexpr):
    least = _score(bound, BITS)
    score_0, score_1, score_2, score_3 = _quarters(score)
    to_0 = (score_0 >= least).to(tl.int32)
    to_1 = to_0 + (score_1 >= least).to(tl.int32)
    to_2 = to_1 + (score_2 >= least).to(tl.int32)
    to_3 = to_2 + (score_3 >= least).to(tl.int32)
    before, total = _before(to_3)
    return _Places(to_0=to_0, to_1=to_1, to_2=to_2, to_3=to_3, before=before, total=total)


@triton.jit
def _list_at(place, score, at, places, LIST: tl.constexpr):
    score_0, score_1, score_2, score_3 = _quarters(score)
    at_0, at_1, at_2, at_3 = _quarters(at)
    place += places.before
    _list_quarter(place, score_0, at_0, 0, places.to_0, LIST)
    _list_quarter(place, score_1, at_1, places.to_0, places.to_1, LIST)
    _list_quarter(place, score_2, at_2, places.to_1, places.to_2, LIST)
    _list_quarter(place, score_3, at_3, places.to_2, places.to_3, LIST)


@triton.jit
def _list_quarter(place, score, at, before, to, LIST: tl.constexpr):
    tl.store(place + before, score.to(tl.int32, bitcast=True), mask=to != before)
    tl.store(place + before + LIST, at, mask=to != before)


@triton.jit
def _emit_list(row, work, listed, bound, T: tl.constexpr):
    """Writes the result from the list, which is first sorted by entry."""
    K: tl.constexpr = T.K
    LIST: tl.constexpr = T.LIST
    TILE: tl.constexpr = T.TILE
    SLICES: tl.constexpr = T.SLICES
    nth = tl.arange(0, LIST)
    live = nth < listed
    place = work.list + nth
    bits = tl.load(place, mask=live, other=-1, cache_modifier=".cg")
    at = tl.load(place + LIST, mask=live, other=0, cache_modifier=".cg")
    # slices lie in the list in the order in which they arrived
    mine = tl.arange(0, SLICES)
    exists = mine * TILE < row.seen
    length = tl.load(work.slices + mine, mask=exists, other=0, cache_modifier=".cg")
    start = tl.load(work.slices + SLICES + mine, mask=exists, other=0, cache_modifier=".cg")
    moved = nth + tl.gather(tl.cumsum(length, axis=0) - length - start, at // TILE, 0)
    tl.debug_barrier()  # every thread has read what will be overwritten
    _scatter(work.list, moved, bits, live)
    _scatter(work.list + LIST, moved, at, live)
    threshold, higher = _boundary(bits.to(tl.float32, bitcast=True), K, bound, T.BITS)
    tl.debug_barrier()
    score = tl.load(place, mask=live, other=-1).to(tl.float32, bitcast=True)
    at = tl.load(place + LIST, mask=live, other=0)
    score, least = _ranked(score, live, threshold, T.BITS)
    _emit(row.out, score, at, least, K - higher, 0, 0)


@triton.jit
def _emit_row(row, low, PART: tl.constexpr, T: tl.constexpr):
    """Searches the whole row, PART scores at a time, for the k-th highest score, whose image is
    `low` or higher."""
    K: tl.constexpr = T.K
    high = _infinity(T.BITS)
    higher = 0
    step = tl.full([], 1, tl.uint32)  # most lists overflow because many scores equal the bound
    while low < high:
        middle = low + tl.minimum(step, ((high - low) >> 1) + 1)
        reaching = _reaching(row, middle, PART, T)
        few = reaching < K
        higher = tl.where(few, reaching, higher)
        high = tl.where(few, middle - 1, high)
        low = tl.where(few, low, middle)
        step = tl.minimum(step, 1 << 28) * 4
    higher_before = tl.zeros([], dtype=tl.int32)
    equal_before = tl.zeros([], dtype=tl.int32)
    for begin in range(0, row.seen, PART):
        at = begin + tl.arange(0, PART)
        score = _scores(row, at)
        score, least = _ranked(score, at < row.seen, low, T.BITS)
        _emit(row.out, score, at, least, K - higher, higher_before, equal_before)
        higher_before += tl.sum((score > least).to(tl.int32), axis=0)
        equal_before += tl.sum((score == least).to(tl.int32), axis=0)


@triton.jit
def _reaching(row, image, PART: tl.constexpr, T: tl.constexpr):
    """How many of the row's scores have `image`, which is above 0, or a higher one."""
    reaching = tl.zeros([PART], dtype=tl.int32)
    least = _score(image, T.BITS)
    for begin in range(0, row.seen, PART):
        score = _scores(row, begin + tl.arange(0, PART))
        reaching += (score >= least).to(tl.int32)
    return tl.sum(reaching, axis=0)


@triton.jit
def _row(scores_ptr, scores_stride, out_ptr, out_stride, nth, seen, columns):
    return _Row(
        scores=scores_ptr + nth * scores_stride,
        out=out_ptr + nth * out_stride,
        seen=seen,
        columns=columns,
    )


@triton.jit
def _seen(tokens_ptr, row, columns, T: tl.constexpr):
    """How many of the row's scores its token sees; -1 for padding."""
    slot, position, _, _ = load_token(token_at(tokens_ptr, row))
    visible = score_columns(tl.maximum((position + 1) // T.RATIO, 0), T.SPAN, T.BLOCKS)
    seen = tl.minimum(visible, columns)
    return tl.where(slot < 0, -1, seen)


@triton.jit
def _scores(row, at):
    """NaN where a score is not visible."""
    # whole 16 bytes are loaded; up to three of the scores may not be visible
    loaded = (at < tl.cdiv(row.seen, 4) * 4) & (at < row.columns)
    score = tl.load(row.scores + at, mask=loaded, other=float("nan"))
    return tl.where(at < row.seen, score, float("nan"))


@triton.jit
def _image(score, BITS: tl.constexpr):
    """The lowest image that this score (not NaN) or a higher one has."""
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    # zero takes the place that -0 has in the order of bits
    order = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits + 0x7FFFFFFF)
    return (order >> (32 - BITS)) - ((_LOWEST >> (32 - BITS)) - 1)


@triton.jit
def _score(image, BITS: tl.constexpr):
    """The score that has this image; NaN for 0."""
    UNIT: tl.constexpr = 1 << (32 - BITS)
    order = (image + ((_LOWEST >> (32 - BITS)) - 1)).to(tl.uint32) << (32 - BITS)
    bits = order + UNIT
    bits = tl.where(bits >> 31 != 0, bits ^ 0x80000000, (order + (UNIT - 1)) ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _infinity(BITS: tl.constexpr):
    """The highest image."""
    return tl.full([], (_HIGHEST >> (32 - BITS)) - (_LOWEST >> (32 - BITS)), tl.uint32)


@triton.jit
def _bound(highest, wanted: tl.constexpr, BITS: tl.constexpr):
    """An image that the highest scores of at least `wanted` bins reach, and mostly few more."""
    bound, _ = _search(highest, wanted, wanted // 16, tl.full([], 0, tl.uint32), BITS)
    # a bin without a number has -infinity too
    return tl.where(bound == 1, 0, bound).to(tl.uint32)


@triton.jit
def _boundary(score, wanted, low, BITS: tl.constexpr):
    """A threshold at `low` or above it, and how many scores lie above the threshold: at most
    `wanted`, while those that equal it bring the number to at least `wanted`. Known beforehand: at
    least `wanted` scores are `low` or higher."""
    image, reaching = _search(score, wanted, 0, low, BITS)
    return tl.where(reaching == wanted, image - 1, image).to(tl.uint32), reaching


@triton.jit
def _search(score, wanted, slack, low, BITS: tl.constexpr):
    """An image that between `wanted` and wanted + slack scores reach, and their number; if there is
    none, the highest one that at least `wanted` reach, and how many lie above it."""
    number = score == score
    bottom = tl.min(tl.where(number, score, float("inf")), axis=0)
    top = tl.max(tl.where(number, score, float("-inf")), axis=0)
    high = _image(top, BITS)
    # By values first, because scores are rarely far apart. What is not finite is far from all
    # others.
    if bottom == float("-inf"):
        bottom = tl.min(tl.where(score > float("-inf"), score, float("inf")), axis=0)
    if top == float("inf"):
        top = tl.max(tl.where(score < float("inf"), score, float("-inf")), axis=0)
    bottom = tl.minimum(tl.maximum(bottom, -3e38), 3e38)
    top = tl.minimum(tl.maximum(top, -3e38), 3e38)
    reaching = 0  # how many reach bottom, once known
    above = -1  # how many reach top, once known
    tries = 0
    while (tries < 6) & ((reaching < wanted) | (reaching > wanted + slack)):
        value_1 = bottom * (2 / 3) + top * (1 / 3)
        value_2 = bottom * (1 / 3) + top * (2 / 3)
        reaching_1, reaching_2 = _two_counts(score, value_1, value_2)
        first = reaching_1 >= wanted
        second = reaching_2 >= wanted
        above = tl.where(second, above, tl.where(first, reaching_2, reaching_1))
        top = tl.where(second, top, tl.where(first, value_2, value_1))
        reaching = tl.where(second, reaching_2, tl.where(first, reaching_1, reaching))
        bottom = tl.where(second, value_2, tl.where(first, value_1, bottom))
        tries += 1
    low = tl.where(reaching > 0, tl.maximum(low, _image(bottom, BITS)), low)
    high = tl.where(above < 0, high, _image(top, BITS) - 1)
    above = tl.maximum(above, 0)
    if (reaching >= wanted) & (reaching <= wanted + slack):
        high = low
        above = reaching
    while low < high:
        middle = low + ((high - low) >> 1) + 1
        reaching = tl.sum((score >= _score(middle, BITS)).to(tl.int32), axis=0)
        few = reaching < wanted
        found = reaching <= wanted + slack  # or too few
        low = tl.where(few, low, middle)
        high = tl.where(few, middle - 1, tl.where(found, middle, high))
        above = tl.where(found, reaching, above)
    return low.to(tl.uint32), above


@triton.jit
def _two_counts(score, value_1, value_2):
    """How many of at most 2^15 scores reach a value, and a higher one."""
    both = tl.where(score >= value_2, (1 << 16) + 1, (score >= value_1).to(tl.int32))
    both = tl.sum(both, axis=0)
    return both & 0xFFFF, both >> 16


@triton.jit
def _raised(score, wanted, low, BITS: tl.constexpr):
    """_boundary, for a result that is little above `low`."""
    high = _infinity(BITS)
    above = 0
    step = tl.full([], 6, tl.uint32)
    while low < high:
        third = tl.minimum(step, (high - low + 2) // 3)
        image_1 = low + third
        image_2 = tl.minimum(image_1 + third, high)
        reaching_1, reaching_2 = _two_counts(score, _score(image_1, BITS), _score(image_2, BITS))
        first = reaching_1 >= wanted
        second = reaching_2 >= wanted
        step = tl.where(second, tl.minimum(step, 1 << 28) * 4, step)
        above = tl.where(second, above, tl.where(first, reaching_2, reaching_1))
        high = tl.where(second, high, tl.where(first, image_2 - 1, image_1 - 1))
        low = tl.where(second, image_2, tl.where(first, image_1, low))
        if (reaching_1 == wanted) | (reaching_2 == wanted):
            low = tl.where(reaching_1 == wanted, image_1, image_2) - 1
            high = low
            above = wanted
    return low, above


@triton.jit
def _ranked(score, live, threshold, BITS: tl.constexpr):
    """Scores and, for each, what scores with the image `threshold` equal."""
    least = _score(threshold, BITS)
    if threshold == 0:  # NaN
        score = tl.where(score == score, 1.0, tl.where(live, 0.0, score))
        least = 0.0
    return score, least


@triton.jit
def _quarters(x):
    """Every fourth score, starting from the first, second, third and fourth: they lie in one
    thread."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0] // 4, 2, 2]))
    x_0, x_2 = tl.split(even)
    x_1, x_3 = tl.split(odd)
    return x_0, x_1, x_2, x_3


@triton.jit
def _scatter(pointer, place, value, mask):
    """tl.store in four pieces: with one, the compiler would first convert the operands to another
    layout."""
    place_0, place_1, place_2, place_3 = _quarters(place)
    value_0, value_1, value_2, value_3 = _quarters(value)
    mask_0, mask_1, mask_2, mask_3 = _quarters(mask)
    tl.store(pointer + place_0, value_0, mask=mask_0)
    tl.store(pointer + place_1, value_1, mask=mask_1)
    tl.store(pointer + place_2, value_2, mask=mask_2)
    tl.store(pointer + place_3, value_3, mask=mask_3)


@triton.jit
def _before(count):
    """Sum of the counts before each, and of all: first along lines of 8, which one warp has."""
    lines = tl.reshape(count, [count.shape[0] // 8, 8])
    line = tl.sum(lines, axis=1)
    before = (tl.cumsum(line, axis=0) - line)[:, None] + tl.cumsum(lines, axis=1) - lines
    return tl.reshape(before, [count.shape[0]]), tl.sum(line, axis=0)


@triton.jit
def _emit(out_row, score, entry, least, wanted, higher_before, equal_before):
    """Writes the entries with scores above the threshold, and of those equal to it the row's first
    `wanted`, after what the previous tiles have written."""
    score_0, score_1, score_2, score_3 = _quarters(score)
    entry_0, entry_1, entry_2, entry_3 = _quarters(entry)
    # both counts over a tile fit into 16 bits
    to_0 = _both(score_0, least)
    to_1 = to_0 + _both(score_1, least)
    to_2 = to_1 + _both(score_2, least)
    to_3 = to_2 + _both(score_3, least)
    before, _ = _before(to_3)
    out_row += higher_before
    place = _place(before, equal_before, wanted)
    place_0 = _place(before + to_0, equal_before, wanted)
    place_1 = _place(before + to_1, equal_before, wanted)
    place_2 = _place(before + to_2, equal_before, wanted)
    place_3 = _place(before + to_3, equal_before, wanted)
    tl.store(out_row + place, entry_0, mask=place_0 != place)
    tl.store(out_row + place_0, entry_1, mask=place_1 != place_0)
    tl.store(out_row + place_1, entry_2, mask=place_2 != place_1)
    tl.store(out_row + place_2, entry_3, mask=place_3 != place_2)


@triton.jit
def _both(score, least):
    """2^16 where a score is above the threshold, 1 where it equals it."""
    return tl.where(score > least, 1 << 16, (score == least).to(tl.int32))


@triton.jit
def _place(both, equal_before, wanted):
    return (both >> 16) + tl.minimum(equal_before + (both & 0xFFFF), wanted)


@triton.jit
def _emit_all(out_row, seen, T: tl.constexpr):
    K_PADDED: tl.constexpr = T.K_PADDED
    nth = tl.arange(0, K_PADDED)
    tl.store(out_row + nth, tl.where(nth < seen, nth, -1), mask=nth < T.K)

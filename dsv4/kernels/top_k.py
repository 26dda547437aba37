"""Exact selection: the k highest scores of every row, ties to the lowest entry.

A score becomes an unsigned number, its image, that orders alike. A row that fits one program is
held in registers while the k-th highest image is found by bisection. A longer row takes three
launches:

1. Entries form GROUPS groups, one of each run of GROUPS entries in each; from run to run groups
   shift by SKEW, so that neither neighbours nor entries at a round distance, which tend to score
   alike, meet in one. The highest image of each group is stored.
2. At least k images reach the k-th highest of these maxima: a bound, mostly close to the k-th
   highest image itself. Every program finds it, counts what lies above and at it in its slice of
   the row, and adds what lies above to the row's list, a little more than k entries.
3. Every program finds the k-th highest image of the list, counts what of the list lies before its
   slice, and so knows where in `out` its own entries begin.

Where fewer than k images lie above the bound, it is the k-th highest itself and the counts alone
serve. The order in which programs add to the list differs from run to run; only counts over it are
used. A row with more images above the bound than the list holds (its highest would all have to lie
in a few groups) is searched itself instead of its list: slow, and exact too.

    workspace int32 [rows, highest of GROUPS | list length, bound | counts of slices | list]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.errors import InvalidInput

GROUPS = 2048
LIST = 2048
# A multiple of 8 (32 bytes), so that loads stay wide, and an odd one, so that it takes all runs of
# 2^19 entries until two have the same shift.
SKEW = 8 * 77
# Longest row of one program, and longest and shortest slice of longer rows: short ones where rows
# are so few that processors would stay idle.
MAX_ROW = 8192
MAX_SLICE = 4096
MIN_SLICE = 2048
ENOUGH_PROGRAMS = 256
NUM_WARPS = 8
_SMALLEST_TILE = 256


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def top_k_workspace_bytes(rows: int, columns: int) -> int:
    """What top_k needs as `workspace` for such scores."""
    slices = -(-columns // _tile(rows, columns))
    return 4 * rows * _row_words(slices) if slices > 1 else 0


def top_k(
    scores: Tensor,
    *,
    tokens: Tensor,
    ratio: int,
    first_entry: int,
    out: Tensor,
    bf16_scores: bool = True,
    workspace: Tensor | None = None,
) -> None:
    """Same result as dsv4.reference.top_k.top_k, in one launch where rows have up to MAX_ROW
    scores, else in three. No allocation; `workspace`, contiguous uint8, may hold anything before.
    Scores that are not bf16 numbers need bf16_scores=False. Raises InvalidInput when the workspace
    is too small.
    """
    rows, columns = scores.shape
    if rows == 0 or out.shape[1] == 0:
        return
    needed = top_k_workspace_bytes(rows, columns) if columns > out.shape[1] else 0
    if needed and (workspace is None or workspace.numel() < needed):
        given = 0 if workspace is None else workspace.numel()
        raise InvalidInput(
            f"top-k of {rows:,} rows of {columns:,} scores needs a workspace of {needed:,} bytes, "
            f"got {given:,}"
        )
    work = out if not needed or workspace is None else workspace[:needed].view(torch.int32)
    for launch in launches(scores, tokens, work, out, ratio, first_entry, bf16_scores):
        launch.kernel[launch.grid](*launch.arguments, **launch.constants, num_warps=NUM_WARPS)


def launches(
    scores: Tensor,
    tokens: Tensor,
    work: Tensor,
    out: Tensor,
    ratio: int,
    first_entry: int,
    bf16_scores: bool,
) -> list[Launch]:
    rows, columns = scores.shape
    k = out.shape[1]
    scored = (scores, tokens, columns, first_entry, scores.stride(0))
    shared = {"K": k, "RATIO": ratio, "BITS": 16 if bf16_scores else 32}
    tile = _tile(rows, columns)
    slices = -(-columns // tile)
    if columns <= k or slices == 1:
        constants = {
            **shared,
            "K_PADDED": triton.next_power_of_2(k),
            "TILE": tile,
            "PART": min(tile, MIN_SLICE),
        }
        return [Launch(_one_tile_kernel, (rows, 1), (*scored, out, out.stride(0)), constants)]
    row_words = _row_words(slices)
    # programs a row that share the groups, each at least 32 bytes wide
    sharers = min(1 << (slices.bit_length() - 1), GROUPS // 8)
    width = GROUPS // sharers
    shared |= {"GROUPS": GROUPS}
    listed = {"LIST": LIST, "TILE": tile}
    return [
        Launch(
            _group_maxima_kernel,
            (rows, sharers),
            (*scored, work, row_words),
            {**shared, "WIDTH": width, "DEPTH": max(tile // width, 1), "SKEW": SKEW},
        ),
        Launch(
            _list_kernel,
            (rows, slices),
            (*scored, work, row_words, slices),
            {**shared, **listed},
        ),
        Launch(
            _emit_kernel,
            (rows, slices),
            (*scored, work, row_words, slices, out, out.stride(0)),
            {
                **shared,
                **listed,
                "K_PADDED": triton.next_power_of_2(k),
                "SLICES_PADDED": triton.next_power_of_2(slices),
            },
        ),
    ]


def _tile(rows: int, columns: int) -> int:
    """Scores a program, from shapes alone; the result does not depend on it."""
    if columns <= MAX_ROW:
        return max(_SMALLEST_TILE, int(triton.next_power_of_2(columns)))
    tile = MIN_SLICE
    while tile < MAX_SLICE and rows * -(-columns // tile) > ENOUGH_PROGRAMS:
        tile *= 2
    return tile


def _row_words(slices: int) -> int:
    """int32 words of the workspace a row, in multiples of 64 bytes."""
    return GROUPS + 16 + -(-slices // 16) * 16 + 2 * LIST


@triton.jit
def _one_tile_kernel(
    scores_ptr, tokens_ptr, columns, first_entry, scores_stride, out_ptr, out_stride,
    K: tl.constexpr, K_PADDED: tl.constexpr, RATIO: tl.constexpr, BITS: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A whole row."""
    row = tl.program_id(0).to(tl.int64)
    seen = _seen(tokens_ptr, row, columns, first_entry, RATIO)
    out_row = out_ptr + row * out_stride
    if seen > K:
        scores_row = scores_ptr + row * scores_stride
        whole = _image(scores_row, tl.arange(0, TILE), seen, columns, BITS)
        highest = tl.full([], (1 << BITS) - 1, tl.uint32)
        threshold = _boundary(whole, K, 0, tl.full([], 0, tl.uint32), highest)
        wanted = K - tl.sum((whole > threshold).to(tl.int32), axis=0)
        higher_before = tl.zeros([], dtype=tl.int32)
        equal_before = tl.zeros([], dtype=tl.int32)
        # read again, from the L1, a part at a time: so two programs share a processor's registers
        for part in range(0, seen, PART):
            at = part + tl.arange(0, PART)
            image = _image(scores_row, at, seen, columns, BITS)
            _emit(out_row, image, at, seen, first_entry, threshold, wanted,
                  higher_before, equal_before)  # fmt: skip
            total = tl.sum(_both(image, at < seen, threshold), axis=0)
            higher_before += total >> 16
            equal_before += total & 0xFFFF
    elif seen >= 0:
        _emit_all(out_row, seen, first_entry, K, K_PADDED)


@triton.jit
def _group_maxima_kernel(
    scores_ptr, tokens_ptr, columns, first_entry, scores_stride, work_ptr, row_words,
    K: tl.constexpr, RATIO: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, SKEW: tl.constexpr,
):  # fmt: skip
    """WIDTH groups, DEPTH of the members of each at a time."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1)
    seen = _seen(tokens_ptr, row, columns, first_entry, RATIO)
    if seen > K:
        scores_row = scores_ptr + row * scores_stride
        work = work_ptr + row * row_words
        group = mine * WIDTH + tl.arange(0, WIDTH)
        highest = tl.zeros([DEPTH, WIDTH], dtype=tl.uint32)
        for first in range(0, tl.cdiv(seen, GROUPS), DEPTH):
            run = (first + tl.arange(0, DEPTH))[:, None]
            member = (group[None, :] + SKEW * run) % GROUPS
            member = tl.max_contiguous(tl.multiple_of(member, [1, 8]), [1, 8])
            at = run * GROUPS + member
            highest = tl.maximum(highest, _image(scores_row, at, seen, columns, BITS))
        maxima = tl.max(highest, axis=0)
        tl.store(work + group, maxima.to(tl.int32, bitcast=True))
        if mine == 0:
            tl.store(work + GROUPS, 0)


@triton.jit
def _list_kernel(
    scores_ptr, tokens_ptr, columns, first_entry, scores_stride, work_ptr, row_words, slices,
    K: tl.constexpr, RATIO: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    LIST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The bound, and what of one slice lies above it."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1)
    seen = _seen(tokens_ptr, row, columns, first_entry, RATIO)
    at = mine * TILE + tl.arange(0, TILE)
    image = _image(scores_ptr + row * scores_stride, at, seen, columns, BITS)
    if (seen > K) & (mine * TILE < seen):
        work = work_ptr + row * row_words
        if K <= GROUPS:
            maxima = tl.load(work + tl.arange(0, GROUPS)).to(tl.uint32, bitcast=True)
            # any number that k groups reach will do; nearer ones make the list shorter
            bound = _boundary(maxima, K, K // 16, tl.min(maxima, axis=0), tl.max(maxima, axis=0))
        else:
            bound = tl.full([], 0, tl.uint32)
        above = image > bound
        total = tl.sum(_both(image, at < seen, bound), axis=0)
        tl.store(_counts(work, GROUPS) + mine, total)
        if mine == 0:
            tl.store(work + GROUPS + 1, bound.to(tl.int32, bitcast=True))
        if (total >> 16) > LIST:  # the length then says that the list is of no use
            tl.atomic_add(work + GROUPS, total >> 16, sem="relaxed")
        else:
            length = work + GROUPS + tl.zeros([TILE], dtype=tl.int32)
            nth = tl.atomic_add(length, 1, mask=above, sem="relaxed")
            place = _list(work, slices, GROUPS) + nth
            fits = above & (nth < LIST)
            tl.store(place, image.to(tl.int32, bitcast=True), mask=fits)
            tl.store(place + LIST, at, mask=fits)


@triton.jit
def _emit_kernel(
    scores_ptr, tokens_ptr, columns, first_entry, scores_stride, work_ptr, row_words, slices,
    out_ptr, out_stride,
    K: tl.constexpr, K_PADDED: tl.constexpr, RATIO: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr, LIST: tl.constexpr, SLICES_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The selected entries of one slice."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1)
    seen = _seen(tokens_ptr, row, columns, first_entry, RATIO)
    scores_row = scores_ptr + row * scores_stride
    out_row = out_ptr + row * out_stride
    begin = mine * TILE
    at = begin + tl.arange(0, TILE)
    image = _image(scores_row, at, seen, columns, BITS)
    if (seen > K) & (begin < seen):
        work = work_ptr + row * row_words
        listed = tl.load(work + GROUPS)
        bound = tl.load(work + GROUPS + 1).to(tl.uint32, bitcast=True)
        if listed < K:
            threshold = bound
            wanted = K - listed
            nth = tl.arange(0, SLICES_PADDED)
            both = tl.load(_counts(work, GROUPS) + nth, mask=nth < mine, other=0)
            higher_before = tl.sum(both >> 16, axis=0)
            equal_before = tl.sum(both & 0xFFFF, axis=0)
        elif listed <= LIST:
            nth = tl.arange(0, LIST)
            place = _list(work, slices, GROUPS) + nth
            other = tl.load(place, mask=nth < listed, other=0).to(tl.uint32, bitcast=True)
            is_before = tl.load(place + LIST, mask=nth < listed, other=begin) < begin
            threshold = _boundary(other, K, 0, bound + 1, tl.max(other, axis=0))
            higher = other > threshold
            wanted = K - tl.sum(higher.to(tl.int32), axis=0)
            both = (higher.to(tl.int32) << 16) + (other == threshold).to(tl.int32)
            found = tl.sum(tl.where(is_before, both, 0), axis=0)
            higher_before = found >> 16
            equal_before = found & 0xFFFF
        else:
            threshold = _row_boundary(scores_row, seen, columns, K, bound + 1, BITS, TILE)
            wanted = K - _reaching(scores_row, seen, columns, threshold + 1, BITS, TILE)
            higher_before = _reaching(scores_row, begin, columns, threshold + 1, BITS, TILE)
            equal_before = (
                _reaching(scores_row, begin, columns, threshold, BITS, TILE) - higher_before
            )
        _emit(out_row, image, at, seen, first_entry, threshold, wanted,
              higher_before, equal_before)  # fmt: skip
    elif (seen >= 0) & (mine == 0):
        _emit_all(out_row, seen, first_entry, K, K_PADDED)


@triton.jit
def _seen(tokens_ptr, row, columns, first_entry, RATIO: tl.constexpr):
    """How many of the row's scores its token sees; -1 for padding."""
    slot = tl.load(tokens_ptr + row * 4)
    position = tl.load(tokens_ptr + row * 4 + 1)
    seen = tl.minimum(tl.maximum((position + 1) // RATIO - first_entry, 0), columns)
    return tl.where(slot < 0, -1, seen)


@triton.jit
def _counts(work, GROUPS: tl.constexpr):
    """Of every slice: (images above the bound) · 2^16 + images equal to it."""
    return work + GROUPS + 16


@triton.jit
def _list(work, slices, GROUPS: tl.constexpr):
    """Images, and LIST words behind each its column."""
    return _counts(work, GROUPS) + tl.cdiv(slices, 16) * 16


@triton.jit
def _image(scores_row, at, seen, columns, BITS: tl.constexpr):
    """Scores as unsigned numbers of BITS bits that order alike; 0 is NaN, and what is not seen."""
    # whole groups of 16 bytes are loaded, up to three scores that are not seen among them
    loaded = (at < tl.cdiv(seen, 4) * 4) & (at < columns)
    score = tl.load(scores_row + at, mask=loaded, other=float("nan"))
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    image = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    image = tl.where((at < seen) & (score == score), image, 0)
    return image >> (32 - BITS)


@triton.jit
def _boundary(image, wanted, slack, low, high):
    """The `wanted`-th highest image, known to be in [low, high]; or any number that between
    `wanted` and wanted + slack images reach, which at a slack of 0 separates the same ones."""
    while low < high:
        middle = low + ((high - low) >> 1) + 1
        reaching = tl.sum((image >= middle).to(tl.int32), axis=0)
        few = reaching < wanted
        high = tl.where(few, middle - 1, tl.where(reaching <= wanted + slack, middle, high))
        low = tl.where(few, low, middle)
    return low


@triton.jit
def _row_boundary(scores_row, seen, columns, wanted, low, BITS: tl.constexpr, TILE: tl.constexpr):
    """The `wanted`-th highest image of a row, known to be `low` or higher."""
    high = tl.full([], (1 << BITS) - 1, tl.uint32)
    while low < high:
        middle = low + ((high - low) >> 1) + 1
        few = _reaching(scores_row, seen, columns, middle, BITS, TILE) < wanted
        high = tl.where(few, middle - 1, high)
        low = tl.where(few, low, middle)
    return low


@triton.jit
def _reaching(scores_row, end, columns, image, BITS: tl.constexpr, TILE: tl.constexpr):
    """How many of the row's images before `end` are `image`, which is above 0, or higher."""
    reaching = tl.zeros([], dtype=tl.int32)
    for tile in range(0, end, TILE):
        other = _image(scores_row, tile + tl.arange(0, TILE), end, columns, BITS)
        reaching += tl.sum((other >= image).to(tl.int32), axis=0)
    return reaching


@triton.jit
def _both(image, live, threshold):
    """2^16 where an image is above the threshold, 1 where it equals it: the length of a tile, and
    so both counts over it, fit 16 bits."""
    return ((image > threshold).to(tl.int32) << 16) + (live & (image == threshold)).to(tl.int32)


@triton.jit
def _emit(
    out_row, image, at, seen, first_entry, threshold, wanted, higher_before, equal_before
):  # fmt: skip
    """Writes a tile's entries above the threshold, and of those equal to it the row's first
    `wanted`, behind what the tiles before it write."""
    both = tl.cumsum(_both(image, at < seen, threshold), axis=0)
    equal_so_far = equal_before + (both & 0xFFFF)
    place = higher_before + (both >> 16) + tl.minimum(equal_so_far, wanted) - 1
    equal = (image == threshold) & (at < seen) & (equal_so_far <= wanted)
    tl.store(out_row + place, first_entry + at, mask=(image > threshold) | equal)


@triton.jit
def _emit_all(out_row, seen, first_entry, K: tl.constexpr, K_PADDED: tl.constexpr):
    nth = tl.arange(0, K_PADDED)
    tl.store(out_row + nth, tl.where(nth < seen, first_entry + nth, -1), mask=nth < K)

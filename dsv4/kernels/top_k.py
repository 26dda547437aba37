"""Exact selection: the k highest scores of every row, ties to the lowest entry.

Radix select. A score becomes an unsigned number that orders alike; its bytes are looked at from the
highest down. Each pass counts, over the scores that agree with the threshold so far, how often
every value of the next byte occurs; the counts give the threshold's byte. A row is cut into slices,
one a program, and each slice keeps its own counts:

    workspace int32 [passes, rows, slices, 256]

So nothing is added atomically and nothing needs clearing. The last launch knows from the counts how
many entries the slices before it select, and so where in `out` its own begin.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.errors import InvalidInput

BINS = 256
TILE = 8192
NUM_WARPS = 8
# Programs of a launch beyond which rows are no longer cut; so the workspace stays below 4 MiB.
MAX_PROGRAMS = 1024
ALL_IN_ONE = -1


def top_k_workspace_bytes(rows: int, columns: int, *, bf16_scores: bool = True) -> int:
    """What top_k needs as `workspace` for such scores."""
    slices = _slices(rows, columns)
    return 4 * BINS * _passes(bf16_scores) * rows * slices if slices > 1 else 0


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
    """Same result as dsv4.reference.top_k.top_k, in one launch where rows are short or many, else
    in three (five for fp32 scores). No allocation; `workspace`, contiguous uint8, may hold anything
    before. Scores that are not bf16 numbers need bf16_scores=False. Raises InvalidInput when the
    workspace is too small.
    """
    rows, columns = scores.shape
    if rows == 0 or out.shape[1] == 0:
        return
    slices, needed = 1, 0
    if columns > out.shape[1]:
        slices = _slices(rows, columns)
        needed = top_k_workspace_bytes(rows, columns, bf16_scores=bf16_scores)
    if needed and (workspace is None or workspace.numel() < needed):
        given = 0 if workspace is None else workspace.numel()
        raise InvalidInput(
            f"top-k of {rows:,} rows of {columns:,} scores needs a workspace of {needed:,} bytes, "
            f"got {given:,}"
        )
    counts = out if not needed or workspace is None else workspace[:needed].view(torch.int32)
    for nth in range(_passes(bf16_scores) + 1) if slices > 1 else (ALL_IN_ONE,):
        arguments, constants = launch_arguments(
            scores, tokens, counts, out, ratio, first_entry, bf16_scores, slices, nth
        )
        _top_k_kernel[(rows, slices)](*arguments, **constants, num_warps=NUM_WARPS)


def launch_arguments(
    scores: Tensor,
    tokens: Tensor,
    counts: Tensor,
    out: Tensor,
    ratio: int,
    first_entry: int,
    bf16_scores: bool,
    slices: int,
    nth: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run-time arguments and compile-time constants of the nth launch, or of ALL_IN_ONE."""
    rows, columns = scores.shape
    tile = min(TILE, max(BINS, triton.next_power_of_2(columns)))
    arguments = (
        scores,
        tokens,
        counts,
        out,
        rows,
        columns,
        first_entry,
        scores.stride(0),
        out.stride(0),
    )
    constants = {
        "K": out.shape[1],
        "K_PADDED": triton.next_power_of_2(out.shape[1]),
        "RATIO": ratio,
        "PASSES": _passes(bf16_scores),
        "NTH": nth,
        "SLICES": slices,
        "SLICES_PADDED": triton.next_power_of_2(slices),
        "TILE": tile,
        "ONE_TILE": slices == 1 and columns <= tile,
    }
    return arguments, constants


def _passes(bf16_scores: bool) -> int:
    return 2 if bf16_scores else 4


def _slices(rows: int, columns: int) -> int:
    """Programs a row, from shapes alone. What a program does with its slice depends on the row."""
    return max(1, min(-(-columns // TILE), MAX_PROGRAMS // max(rows, 1)))


@triton.jit
def _top_k_kernel(
    scores_ptr,
    tokens_ptr,
    counts_ptr,
    out_ptr,
    rows,
    columns,
    first_entry,
    scores_stride,
    out_stride,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    RATIO: tl.constexpr,
    PASSES: tl.constexpr,
    NTH: tl.constexpr,
    SLICES: tl.constexpr,
    SLICES_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    """NTH in [0, PASSES) counts one byte, NTH == PASSES writes; -1 does all for a single slice."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1)
    slot = tl.load(tokens_ptr + row * 4)
    position = tl.load(tokens_ptr + row * 4 + 1)
    seen = tl.minimum(tl.maximum((position + 1) // RATIO - first_entry, 0), columns)
    scores_row = scores_ptr + row * scores_stride
    out_row = out_ptr + row * out_stride
    # all slices of a row are as long as the first needs to be; the last may be short or empty
    length = tl.cdiv(seen, SLICES * TILE) * TILE
    begin = mine * length
    end = tl.minimum(begin + length, seen)
    if slot >= 0:
        if seen <= K:
            if (mine == 0) & ((NTH == PASSES) | (NTH == -1)):
                nth = tl.arange(0, K_PADDED)
                tl.store(out_row + nth, tl.where(nth < seen, first_entry + nth, -1), mask=nth < K)
        elif begin < end:
            # threshold so far, and how many of the scores that agree with it are to be taken
            prefix = tl.zeros([], dtype=tl.uint32)
            wanted = tl.zeros([], dtype=tl.int32) + K
            higher_before = tl.zeros([], dtype=tl.int32)
            equal_before = tl.zeros([], dtype=tl.int32)
            if ONE_TILE:
                at = tl.arange(0, TILE)
                image = _image(scores_row, at, end, PASSES)
                for level in tl.static_range(PASSES):
                    counts = _count_tile(image, at < end, prefix, level, PASSES)
                    digit, wanted = _threshold_digit(counts, wanted)
                    prefix = (prefix << 8) | digit.to(tl.uint32)
                _emit_tile(out_row, at, at < end, image, first_entry, prefix, wanted, 0, 0)
            elif NTH == -1:
                for level in tl.static_range(PASSES):
                    counts = _count(scores_row, begin, end, prefix, level, PASSES, TILE)
                    digit, wanted = _threshold_digit(counts, wanted)
                    prefix = (prefix << 8) | digit.to(tl.uint32)
                _emit(scores_row, out_row, begin, end, first_entry, prefix, wanted, 0, 0,
                      PASSES, TILE)  # fmt: skip
            else:
                for level in tl.static_range(NTH):
                    nth_slice = tl.arange(0, SLICES_PADDED)[:, None]
                    table = _row_counts(counts_ptr, level, rows, row, SLICES)
                    used = (nth_slice < SLICES) & (nth_slice * length < seen)
                    by_slice = tl.load(
                        table + nth_slice * 256 + tl.arange(0, 256)[None, :], mask=used, other=0
                    )
                    digit, wanted = _threshold_digit(tl.sum(by_slice, axis=0), wanted)
                    prefix = (prefix << 8) | digit.to(tl.uint32)
                    if NTH == PASSES:
                        above = tl.arange(0, 256)[None, :] > digit
                        before = nth_slice < mine
                        higher_before += tl.sum(tl.where(above & before, by_slice, 0))
                        if level == PASSES - 1:
                            same = tl.arange(0, 256)[None, :] == digit
                            equal_before = tl.sum(tl.where(same & before, by_slice, 0))
                if NTH == PASSES:
                    _emit(scores_row, out_row, begin, end, first_entry, prefix, wanted,
                          higher_before, equal_before, PASSES, TILE)  # fmt: skip
                else:
                    counts = _count(scores_row, begin, end, prefix, NTH, PASSES, TILE)
                    table = _row_counts(counts_ptr, NTH, rows, row, SLICES)
                    tl.store(table + mine * 256 + tl.arange(0, 256), counts)


@triton.jit
def _row_counts(counts_ptr, level, rows, row, SLICES: tl.constexpr):
    return counts_ptr + (row + tl.cast(level, tl.int64) * rows) * SLICES * 256


@triton.jit
def _image(scores_row, at, end, PASSES: tl.constexpr):
    """Scores as unsigned numbers of 8 · PASSES bits that order alike; 0 is NaN."""
    score = tl.load(scores_row + at, mask=at < end, other=0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    image = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    image = tl.where(score != score, 0, image)
    return image >> (32 - 8 * PASSES)


@triton.jit
def _count(
    scores_row, begin, end, prefix, LEVEL: tl.constexpr, PASSES: tl.constexpr, TILE: tl.constexpr
):
    counts = tl.zeros([256], dtype=tl.int32)
    for tile in range(begin, end, TILE):
        at = tile + tl.arange(0, TILE)
        image = _image(scores_row, at, end, PASSES)
        counts += _count_tile(image, at < end, prefix, LEVEL, PASSES)
    return counts


@triton.jit
def _count_tile(image, live, prefix, LEVEL: tl.constexpr, PASSES: tl.constexpr):
    """How often each value of byte LEVEL occurs where the bytes before it equal `prefix`."""
    SHIFT: tl.constexpr = 8 * (PASSES - 1 - LEVEL)
    if LEVEL > 0:
        live = live & ((image >> (SHIFT + 8)) == prefix)
    return tl.histogram(((image >> SHIFT) & 255).to(tl.int32), 256, mask=live)


@triton.jit
def _threshold_digit(counts, wanted):
    """The byte at which the `wanted` highest end, and how many of that byte they include."""
    digit = tl.arange(0, 256)
    from_here = tl.cumsum(counts, axis=0, reverse=True)
    found = tl.max(tl.where(from_here >= wanted, digit, 0), axis=0)
    above = tl.sum(tl.where(digit > found, counts, 0), axis=0)
    return found, wanted - above


@triton.jit
def _emit(
    scores_row, out_row, begin, end, first_entry, threshold, wanted, higher_before, equal_before,
    PASSES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes the slice's entries above the threshold, and of those equal to it the row's first
    `wanted`, behind what the slices before it write."""
    higher_so_far = tl.zeros([], dtype=tl.int32) + higher_before
    equal_so_far = tl.zeros([], dtype=tl.int32) + equal_before
    for tile in range(begin, end, TILE):
        at = tile + tl.arange(0, TILE)
        image = _image(scores_row, at, end, PASSES)
        higher, equal = _emit_tile(
            out_row, at, at < end, image, first_entry, threshold, wanted,
            higher_so_far, equal_so_far,
        )  # fmt: skip
        higher_so_far += higher
        equal_so_far += equal


@triton.jit
def _emit_tile(
    out_row, at, live, image, first_entry, threshold, wanted, higher_before, equal_before
):
    """Returns how many scores of the tile are above the threshold, and how many equal it."""
    higher = live & (image > threshold)
    equal = live & (image == threshold)
    # two running counts in one scan: TILE fits 16 bits
    both = (higher.to(tl.int32) << 16) + equal.to(tl.int32)
    before = tl.cumsum(both, axis=0) - both
    equal_rank = equal_before + (before & 0xFFFF)
    place = higher_before + (before >> 16) + tl.minimum(equal_rank, wanted)
    take = higher | (equal & (equal_rank < wanted))
    tl.store(out_row + place, first_entry + at, mask=take)
    found = tl.sum(both, axis=0)
    return found >> 16, found & 0xFFFF

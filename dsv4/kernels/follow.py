"""Fills in where requests start that were planned after a step which is still running: one small
launch, one program per request."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import item_at, load_request, request_at, token_at
from dsv4.ops.calls import Following
from dsv4.ops.columns import FOLLOW_COLUMNS

_FOLLOW_COLUMNS = tl.constexpr(FOLLOW_COLUMNS)


@dataclass(frozen=True, slots=True)
class FollowConstants:
    """Per ratio: the ratio, 1 where groups overlap, and the offset of its items, in words after
    `batch`. BLOCK is a power of two, no less than the tokens of any request. DRAFTS steps of
    DRAFT_ROWS requests lie at the given offsets after `batch`."""

    RATIOS: tuple[int, ...]
    OVERLAPS: tuple[int, ...]
    ITEMS_AT: tuple[int, ...]
    NARROW: bool
    ACCEPTED: bool
    COLUMNS: int
    BLOCK: int
    DRAFTS: int
    DRAFT_ROWS: int
    DRAFT_BATCH_AT: int
    DRAFT_TOKENS_AT: int


def follow(call: Following) -> None:
    follow_launch(call).run()


def follow_launch(call: Following) -> Launch:
    first_word, drafts = int(call.batch.storage_offset()), call.drafts
    constants = FollowConstants(
        RATIOS=tuple(each.ratio for each in call.items),
        OVERLAPS=tuple(int(each.overlap and not call.narrow) for each in call.items),
        ITEMS_AT=tuple(int(each.items.storage_offset()) - first_word for each in call.items),
        NARROW=call.narrow,
        ACCEPTED=call.accepted is not None,
        COLUMNS=call.follows.shape[1],
        BLOCK=triton.next_power_of_2(call.most_tokens),
        DRAFTS=0 if drafts is None else drafts.steps,
        DRAFT_ROWS=0 if drafts is None else drafts.rows,
        DRAFT_BATCH_AT=0 if drafts is None else int(drafts.batch.storage_offset()) - first_word,
        DRAFT_TOKENS_AT=0 if drafts is None else int(drafts.tokens.storage_offset()) - first_word,
    )
    accepted = call.follows if call.accepted is None else call.accepted
    arguments = (call.follows, call.batch, call.tokens, call.batch_before, accepted)
    options = {"num_warps": 1, "enable_fp_fusion": False}
    return Launch(_follow_kernel, (len(call.follows),), arguments, {"FOLLOW": constants}, options)


@triton.jit
def _follow_kernel(follows, batch, tokens, batch_before, accepted, FOLLOW: tl.constexpr):
    begin_program()
    at = follows + tl.program_id(0) * FOLLOW.COLUMNS
    batch_row = tl.load(at)
    row_before = tl.load(at + 1)
    reused = tl.load(at + 2)
    before = load_request(request_at(batch_before, row_before))
    kept = before.count
    if FOLLOW.ACCEPTED:
        given = tl.load(accepted + row_before)
        kept = tl.minimum(tl.maximum(given, 0), kept).to(tl.int32)
    start = before.start + kept
    own_row = request_at(batch, batch_row)
    request = load_request(own_row)
    end = start + request.count
    tl.store(own_row + 1, start)
    nth = tl.arange(0, FOLLOW.BLOCK)
    positions = token_at(tokens, request.first_row + nth) + 1
    tl.store(positions, start + nth, mask=nth < request.count)
    if FOLLOW.DRAFTS > 0:
        has_one = (nth < FOLLOW.DRAFTS) & (nth < request.count)
        row = nth * FOLLOW.DRAFT_ROWS + batch_row
        tl.store(request_at(batch + FOLLOW.DRAFT_BATCH_AT, row) + 1, start + nth, mask=has_one)
        tl.store(token_at(batch + FOLLOW.DRAFT_TOKENS_AT, row) + 1, start + nth, mask=has_one)
    for of_ratio in tl.static_range(len(FOLLOW.RATIOS)):
        _fill_items(at, batch, request, start, end, reused, nth, of_ratio, FOLLOW)


@triton.jit
def _fill_items(
    at, batch, request, start, end, reused, nth, OF_RATIO: tl.constexpr, FOLLOW: tl.constexpr
):
    """The items of a request: it has room for the most it can have, and the unused ones become
    padding."""
    RATIO: tl.constexpr = FOLLOW.RATIOS[OF_RATIO]
    OVERLAP: tl.constexpr = FOLLOW.OVERLAPS[OF_RATIO]
    first = start // RATIO
    closed = end // RATIO - first
    own = (request.count + RATIO - 1) // RATIO
    entry = first + nth
    entries = tl.full((FOLLOW.BLOCK,), 1, tl.int32)
    writes_tails = tl.full((FOLLOW.BLOCK,), 0, tl.int32)
    live = nth < closed
    if not FOLLOW.NARROW:
        is_first = (nth == 0).to(tl.int32)
        live = (nth < tl.maximum(closed - OVERLAP, 1)) & (request.count > 0)
        writes_tails = is_first
        entry += OVERLAP * (1 - is_first)
        entries += OVERLAP * is_first
        own -= OVERLAP * (own > 1).to(tl.int32)
    skipped = tl.minimum(tl.maximum(reused // RATIO - entry, 0), entries)
    entry += skipped
    entries -= skipped
    live = live & ((entries > 0) | (writes_tails > 0))
    first_item = tl.load(at + _FOLLOW_COLUMNS + OF_RATIO)
    item = item_at(batch + FOLLOW.ITEMS_AT[OF_RATIO], first_item + nth)
    is_own = nth < own
    tl.store(item, tl.where(live, request.slot, -1), mask=is_own)
    tl.store(item + 1, tl.where(live, start, -1), mask=is_own)
    tl.store(item + 2, tl.where(live, end, -1), mask=is_own)
    tl.store(item + 3, tl.where(live, request.first_row, -1), mask=is_own)
    tl.store(item + 4, tl.where(live, entry, -1), mask=is_own)
    tl.store(item + 5, tl.where(live, entries, -1), mask=is_own)
    tl.store(item + 6, tl.where(live, writes_tails, -1), mask=is_own)

"""Entries in host memory: those that a decode step selects are found or fetched, those that a chunk
sees are staged. The results of dsv4/reference/host_entries.py, byte for byte.

A decode step makes two launches. The first has one program per request: it turns entries into
records on the device, chooses which hot records to replace, and lists what is missing. The second
copies that from host memory with plain loads, each record in one piece: a piece costs the link a
page to find, wherever it is. The link is slower with more records in flight than
it needs, so there is a fixed number of programs, which share all misses of the step evenly,
whichever requests they are of. The host knows nothing of it: a captured graph serves every pattern
of hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from dsv4.cache.pages import Page
from dsv4.errors import InvalidInput
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import load_request, load_token, request_at, token_at
from dsv4.ops.calls import Resolving, Staging

# Hot records that are looked at together for ones to replace, from the clock's hand on.
LOOK_RECORDS = 512
# What is in flight from host memory: FETCH_PROGRAMS programs with FETCH_WORDS words of 8 bytes,
# as whole records. With fewer words a thread would not load 16 bytes.
FETCH_PROGRAMS = 528
FETCH_WORDS = 512
# Whole pages are copied in pieces of this many bytes. What comes from host memory only runs next
# to other kernels: that few programs leave them most processors, and have 128 KB in flight, as 55
# GB/s with 2 µs of latency need. How well both go together is not measured yet.
STAGE_PROGRAMS, SIDE_PROGRAMS = 528, 32
PIECE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ResolveConstants:
    """K entries of a token, RECORDS hot records of a slot; BLOCK_K and LOOK are powers of two. ONE:
    no request has more than one token."""

    ONE: bool
    K: int
    BLOCK_K: int
    RECORDS: int
    LOOK: int
    PAGE_ROWS: int
    RATIO: int


@dataclass(frozen=True, slots=True)
class FetchConstants:
    """A record's BYTES, and the WORD bytes in which they can be copied. BLOCK_R is a power of two,
    no less than the requests."""

    BLOCK_R: int
    AT_ONCE: int
    RECORDS: int
    PAGE_ROWS: int
    BYTES: int
    WORD: int


@dataclass(frozen=True, slots=True)
class StageConstants:
    """A page has BYTES, copied in PIECES of PIECE bytes. FROM_HOST, FROM_DEVICE: which blocks."""

    BLOCK_R: int
    RATIO: int
    PAGE_ROWS: int
    BYTES: int
    PIECE: int
    PIECES: int
    WORD: int
    FROM_HOST: bool
    FROM_DEVICE: bool


def resolve(call: Resolving) -> None:
    """Two launches. Raises InvalidInput where a request's tokens can name more entries than a slot
    has hot records."""
    resolve_launch(call).run()
    fetch_launch(call).run()


def stage(call: Staging) -> None:
    """One launch."""
    stage_launch(call).run()


def resolve_launch(call: Resolving) -> Launch:
    """Raises as `resolve` does."""
    hot, source, k = call.hot, call.entries, call.selected.shape[1]
    if call.tokens_per_request * k > hot.records:
        raise InvalidInput(
            f"{call.tokens_per_request} tokens of a request select {k} entries each, and a slot "
            f"has {hot.records} hot records: all of them are needed at once, so keep more"
        )
    arguments = (
        call.selected,
        call.tokens,
        call.batch,
        source.block_table,
        hot.place,
        hot.entry_of,
        hot.used,
        hot.clock,
        hot.hand,
        hot.counted,
        call.rows,
        call.misses,
        call.miss_count,
        call.selected.stride(0),
        source.block_table.stride(0),
        hot.place.stride(0),
        hot.entry_of.stride(0),
        hot.used.stride(0),
        hot.clock.stride(0),
        hot.hand.stride(0),
        call.rows.stride(0),
        call.misses.stride(0),
        hot.first_row * source.page.rows,
        source.page.record_bytes,
    )
    constants = ResolveConstants(
        ONE=call.tokens_per_request == 1,
        K=k,
        BLOCK_K=triton.next_power_of_2(k),
        RECORDS=hot.records,
        LOOK=min(LOOK_RECORDS, triton.next_power_of_2(hot.records)),
        PAGE_ROWS=source.page.rows,
        RATIO=source.ratio,
    )
    options = {"num_warps": 8 if constants.BLOCK_K > 512 else 4, "enable_fp_fusion": False}
    return Launch(_resolve_kernel, (len(call.batch),), arguments, {"R": constants}, options)


def fetch_launch(call: Resolving) -> Launch:
    """Copies the misses that `resolve_launch` has listed. Raises InvalidInput for a page whose
    records are not whole."""
    hot, page, arena = call.hot, call.entries.page, call.entries.arena
    if not page.apart:
        raise InvalidInput(
            "entries that may be in host memory are kept apart from their blocks, record by "
            "record, and this page is of a schema without entries_apart=True"
        )
    requests = len(call.batch)
    at_once = max(1, FETCH_WORDS // triton.next_power_of_2(-(-page.record_bytes // 8)))
    most = -(-requests * call.tokens_per_request * call.selected.shape[1] // at_once)
    programs = min(FETCH_PROGRAMS, most)
    arguments = (
        arena,
        call.host,
        call.batch,
        call.block_table,
        call.misses,
        call.miss_count,
        requests,
        programs,
        arena.stride(0),
        call.host.stride(0),
        call.block_table.stride(0),
        call.misses.stride(0),
        hot.first_row * page.rows,
        page.offset_bytes,
    )
    constants = FetchConstants(
        BLOCK_R=triton.next_power_of_2(requests),
        AT_ONCE=at_once,
        RECORDS=hot.records,
        PAGE_ROWS=page.rows,
        BYTES=page.record_bytes,
        WORD=_word_bytes(page.record_bytes, page, page, arena, call.host),
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return Launch(_fetch_kernel, (programs,), arguments, {"F": constants}, options)


def stage_launch(call: Staging) -> Launch:
    source, target, requests = call.entries, call.staged, len(call.batch)
    page_bytes = source.page.payload_bytes
    pieces = -(-page_bytes // PIECE_BYTES)
    most = SIDE_PROGRAMS if call.which == "host" else STAGE_PROGRAMS
    programs = min(most, requests * source.block_table.shape[1] * pieces)
    arguments = (
        source.arena,
        call.host,
        call.batch,
        source.block_table,
        call.block_table,
        target.arena,
        target.block_table,
        requests,
        programs,
        source.arena.stride(0),
        call.host.stride(0),
        target.arena.stride(0),
        source.block_table.stride(0),
        call.block_table.stride(0),
        target.block_table.stride(0),
        source.page.offset_bytes,
        target.page.offset_bytes,
    )
    constants = StageConstants(
        BLOCK_R=triton.next_power_of_2(requests),
        RATIO=source.ratio,
        PAGE_ROWS=source.page.rows,
        BYTES=page_bytes,
        PIECE=PIECE_BYTES,
        PIECES=pieces,
        WORD=_word_bytes(
            page_bytes, source.page, target.page, source.arena, call.host, target.arena
        ),
        FROM_HOST=call.which != "device",
        FROM_DEVICE=call.which != "host",
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return Launch(_stage_kernel, (programs,), arguments, {"S": constants}, options)


def _word_bytes(count: int, page: Page, target: Page, *arenas: Tensor) -> int:
    """The longest word in which pieces of `count` bytes of these pages can be copied: each starts
    on one."""
    strides = (arena.stride(0) for arena in arenas)
    return gcd(8, count, page.offset_bytes, target.offset_bytes, *strides)


@triton.jit(do_not_specialize=["first_record", "record_bytes"])
def _resolve_kernel(
    selected, tokens, batch, entry_table, place, entry_of, used, clock, hand, counted,
    rows, misses, miss_count,
    selected_stride, table_stride, place_stride, entry_of_stride, used_stride, clock_stride,
    hand_stride, rows_stride, misses_stride, first_record, record_bytes,
    R: tl.constexpr,
):  # fmt: skip
    begin_program()
    batch_row = tl.program_id(0)
    request = load_request(request_at(batch, batch_row))
    if (request.slot >= 0) & (request.count > 0):
        slot = request.slot.to(tl.int64)
        table_row = entry_table + slot * table_stride
        place_row = place + slot * place_stride
        entry_of_row = entry_of + slot * entry_of_stride
        used_row = used + slot * used_stride
        missed_row = misses + batch_row.to(tl.int64) * misses_stride
        first = first_record + request.slot * R.RECORDS
        now = tl.load(clock + slot * clock_stride) + 1
        at_hand = tl.load(hand + slot * hand_stride)
        slot_rows = (place_row, entry_of_row, used_row)
        if R.ONE:
            token = _load_named(request.first_row, selected, selected_stride, tokens, table_row, R)
            record, named_away = _mark(token, now, place_row, used_row)
            tl.debug_barrier()  # every record that is named is marked before one is replaced
            at_hand, missed = _settle(
                token, record, now, at_hand, missed_row, first, slot_rows,
                rows + request.first_row.to(tl.int64) * rows_stride, R,
            )  # fmt: skip
        else:
            named_away = request.count * 0  # a tensor, when interpreted too
            for nth in range(request.count):
                row = request.first_row + nth
                token = _load_named(row, selected, selected_stride, tokens, table_row, R)
                _, count = _mark(token, now, place_row, used_row)
                named_away += count
            tl.debug_barrier()
            missed = request.count * 0
            for nth in range(request.count):
                row = request.first_row + nth
                token = _load_named(row, selected, selected_stride, tokens, table_row, R)
                record = _record_of(token, place_row)
                at_hand, count = _settle(
                    token, record, now, at_hand, missed_row + 2 * missed, first, slot_rows,
                    rows + row.to(tl.int64) * rows_stride, R,
                )  # fmt: skip
                missed += count
        tl.store(clock + slot * clock_stride, now)
        tl.store(hand + slot * hand_stride, at_hand)
        tl.store(miss_count + batch_row, missed)
        if named_away > 0:
            fetched = missed.to(tl.int64)
            tl.atomic_add(counted, named_away.to(tl.int64) - fetched, sem="relaxed")
            tl.atomic_add(counted + 1, fetched, sem="relaxed")
            tl.atomic_add(counted + 2, fetched * record_bytes, sem="relaxed")


@triton.jit
def _load_named(row, selected, selected_stride, tokens, table_row, R: tl.constexpr):
    """Of one token [BLOCK_K]: the entries that it names (0 for others), which of them are not on
    the device, which are named at all, and the numbers of the records that are on the device."""
    k = tl.arange(0, R.BLOCK_K)
    at = selected + row.to(tl.int64) * selected_stride + k
    entry = tl.load(at, mask=k < R.K, other=-1)
    visible = (load_token(token_at(tokens, row)).position + 1) // R.RATIO
    named = (entry >= 0) & (entry < visible)
    entry = tl.where(named, entry, 0)
    device_row = tl.load(table_row + entry // R.PAGE_ROWS, mask=named, other=0)
    away = named & (device_row < 0)
    return entry, away, named, device_row * R.PAGE_ROWS + entry % R.PAGE_ROWS


@triton.jit
def _record_of(token, place_row):
    """The hot record of each entry that a token names, or -1."""
    entry, away, _, _ = token
    return tl.load(place_row + entry, mask=away, other=-1).to(tl.int32)


@triton.jit
def _mark(token, now, place_row, used_row):
    """Marks the hot records that a token names as used now. Returns these records, and how many
    entries it names that are not on the device."""
    record = _record_of(token, place_row)
    tl.store(used_row + record, now, mask=record >= 0)
    return record, tl.sum(token[1].to(tl.int32), axis=0)


@triton.jit
def _settle(
    token, record, now, at_hand, list_at, first, slot_rows, out, R: tl.constexpr
):  # fmt: skip
    """Gives hot records to the entries of a token that have none, lists these at `list_at`, and
    writes to `out` where all are. Returns the hand, and how many had none."""
    entry, away, named, found = token
    place_row, entry_of_row, used_row = slot_rows
    misses_now = away & (record < 0)
    count = tl.sum(misses_now.to(tl.int32), axis=0)
    if count > 0:
        at_hand = _take_records(count, now, at_hand, list_at, place_row, entry_of_row, used_row, R)
        tl.debug_barrier()  # the list and the places are written
        own = list_at + 2 * (tl.cumsum(misses_now.to(tl.int32), axis=0) - 1)
        taken = tl.load(own + 1, mask=misses_now, other=0)
        tl.store(own, entry, mask=misses_now)
        tl.store(place_row + entry, taken.to(tl.int16), mask=misses_now)
        tl.store(entry_of_row + taken, entry, mask=misses_now)
        tl.store(used_row + taken, now, mask=misses_now)
        record = tl.where(misses_now, taken, record)
        tl.debug_barrier()  # the next token finds them
    found = tl.where(away, first + record, found)
    k = tl.arange(0, R.BLOCK_K)
    tl.store(out + k, tl.where(named, found, -1), mask=k < R.K)
    return at_hand, count


@triton.jit
def _take_records(count, now, at_hand, list_at, place_row, entry_of_row, used_row, R: tl.constexpr):
    """Lists `count` records from the hand on, without those that are used now, and takes their
    places from the entries that they held. Returns where the hand is then."""
    begin = 0
    taken = 0
    last = 0
    while (taken < count) & (begin < R.RECORDS):
        nth = begin + tl.arange(0, R.LOOK)
        inside = nth < R.RECORDS
        record = (at_hand + nth) % R.RECORDS
        free = inside & (tl.load(used_row + record, mask=inside, other=0) != now)
        order = taken + tl.cumsum(free.to(tl.int32), axis=0) - 1
        chosen = free & (order < count)
        former = tl.load(entry_of_row + record, mask=chosen, other=-1)
        had = chosen & (former >= 0)
        # a record of an entry that was named twice is not where the entry is
        had = had & (tl.load(place_row + former, mask=had, other=-1).to(tl.int32) == record)
        tl.store(place_row + former, tl.full((R.LOOK,), -1, tl.int16), mask=had)
        tl.store(list_at + 2 * order + 1, record, mask=chosen)
        last = tl.maximum(last, tl.max(tl.where(chosen, nth, 0), axis=0))
        taken += tl.sum(free.to(tl.int32), axis=0)
        begin += R.LOOK
    return (at_hand + last + 1) % R.RECORDS


@triton.jit(do_not_specialize=["requests", "programs", "first_record"])
def _fetch_kernel(
    arena, host, batch, block_table, misses, miss_count, requests, programs,
    arena_stride, host_stride, table_stride, misses_stride, first_record, page_offset,
    F: tl.constexpr,
):  # fmt: skip
    begin_program()
    row = tl.arange(0, F.BLOCK_R)
    request = load_request(request_at(batch, row), row < requests, -1)
    live = (request.slot >= 0) & (request.count > 0)
    counts = tl.load(miss_count + row, mask=live, other=0)
    ends = tl.cumsum(counts, axis=0)
    total = tl.sum(counts, axis=0)
    for first in range(tl.program_id(0) * F.AT_ONCE, total, programs * F.AT_ONCE):
        nth = first + tl.arange(0, F.AT_ONCE)
        there = nth < total
        batch_row, before = _row_of(nth, ends)
        miss = misses + batch_row.to(tl.int64) * misses_stride + 2 * (nth - before)
        entry = tl.load(miss, mask=there, other=0)
        record = tl.load(miss + 1, mask=there, other=0)
        slot = load_request(request_at(batch, batch_row), there, 0).slot
        block_at = block_table + slot.to(tl.int64) * table_stride + entry // F.PAGE_ROWS
        block = tl.load(block_at, mask=there, other=0).to(tl.int64)
        target = first_record + slot * F.RECORDS + record
        source_page = host + block * host_stride + page_offset
        target_page = arena + (target // F.PAGE_ROWS).to(tl.int64) * arena_stride + page_offset
        _copy_rows(
            source_page + entry % F.PAGE_ROWS * F.BYTES,
            target_page + target % F.PAGE_ROWS * F.BYTES,
            there, F.BYTES, F.WORD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "programs"])
def _stage_kernel(
    arena, host, batch, entry_table, block_table, staged, staged_table, requests, programs,
    arena_stride, host_stride, staged_stride, entry_table_stride, table_stride, staged_table_stride,
    page_offset, staged_offset,
    S: tl.constexpr,
):  # fmt: skip
    begin_program()
    row = tl.arange(0, S.BLOCK_R)
    request = load_request(request_at(batch, row), row < requests, -1)
    visible = tl.where(request.slot >= 0, (request.start + request.count) // S.RATIO, 0)
    blocks = (visible + S.PAGE_ROWS - 1) // S.PAGE_ROWS
    ends = tl.cumsum(blocks, axis=0)
    total = tl.sum(blocks, axis=0) * S.PIECES
    for nth in range(tl.program_id(0), total, programs):
        whole = nth // S.PIECES + tl.arange(0, 1)
        batch_row, before = _row_of(whole, ends)
        block = whole - before
        slot = load_request(request_at(batch, batch_row)).slot.to(tl.int64)
        device_row = tl.load(entry_table + slot * entry_table_stride + block).to(tl.int64)
        is_host = device_row < 0
        host_at = block_table + slot * table_stride + block
        host_row = tl.load(host_at, mask=is_host, other=0).to(tl.int64)
        staged_row = tl.load(staged_table + slot * staged_table_stride + block).to(tl.int64)
        copied = is_host & S.FROM_HOST | (is_host == 0) & S.FROM_DEVICE
        source = tl.where(is_host, host + host_row * host_stride, arena + device_row * arena_stride)
        begin = nth % S.PIECES * S.PIECE
        _copy_piece(
            source + page_offset + begin,
            staged + staged_row * staged_stride + staged_offset + begin,
            copied, S.BYTES - begin, S.PIECE, S.WORD,
        )  # fmt: skip


@triton.jit
def _row_of(nth, ends):
    """Which request the nth of all things of a step belongs to [things], and how many things the
    requests before it have; `ends` [requests] are running totals."""
    passed = ends[None, :] <= nth[:, None]
    row = tl.sum(passed.to(tl.int32), axis=1)
    return row, tl.max(tl.where(passed, ends[None, :], 0), axis=1)


@triton.jit
def _words(pointer, WORD: tl.constexpr):
    if WORD == 8:
        return pointer.to(tl.pointer_type(tl.int64))
    elif WORD == 4:
        return pointer.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        return pointer.to(tl.pointer_type(tl.int16))
    else:
        return pointer


@triton.jit
def _copy_rows(source, target, live, BYTES: tl.constexpr, WORD: tl.constexpr):
    """Rows of BYTES at pointers [rows]."""
    WORDS: tl.constexpr = BYTES // WORD
    word = tl.arange(0, triton.next_power_of_2(WORDS))[None, :]
    there = live[:, None] & (word < WORDS)
    value = tl.load(_words(source, WORD)[:, None] + word, mask=there)
    tl.store(_words(target, WORD)[:, None] + word, value, mask=there)


@triton.jit
def _copy_piece(source, target, live, left, PIECE: tl.constexpr, WORD: tl.constexpr):
    """At most PIECE of the `left` bytes at pointers [1]."""
    WORDS: tl.constexpr = PIECE // WORD
    word = tl.arange(0, WORDS)[None, :]
    there = live[:, None] & (word < left // WORD)
    value = tl.load(_words(source, WORD)[:, None] + word, mask=there)
    tl.store(_words(target, WORD)[:, None] + word, value, mask=there)

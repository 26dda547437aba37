"""Compressors in the append kernel: groups that close are pooled and stored as entries or keys.

An item is all that a step does to one group of one request; in a prefill step the first item of a
request writes the tails, after it has read what it overwrites (step/shape.py). An item with few
rows shares its program with others; one with many is split, by channels, over several programs,
and the last one to finish stores the entry. Folded groups (fold.py) have programs of their own for
the states, one per request. `C` are the CompressorConstants, `compressor` the matching Compressor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dsv4.cache.pages import Ring
from dsv4.kernels.dot import load_bf16
from dsv4.kernels.fold import fold_tokens, load_projections, load_state, write_states
from dsv4.kernels.numerics import (
    bf16_bits,
    exp_nonpositive,
    hadamard_across_lanes,
    load_rope,
    rms_norm,
    rotate,
    round_bf16,
)
from dsv4.kernels.record_store import RecordConstants, page_constants, store_records
from dsv4.kernels.rows import item_at, load_item, load_item_or_request
from dsv4.ops.calls import CompressorWrite, StepTensors
from dsv4.ops.columns import ItemColumns
from dsv4.ops.constants import PROJECTION_LANES, SUM_LANES

# Pooling more rows than this splits the channels over programs: a group of 128 tokens is 512 KB.
MAX_ROWS_IN_ONE_PROGRAM = 8
SPLIT_CHANNELS = 32
# Otherwise a program takes as many items as give each of its threads four channels of every row.
CHANNELS_IN_ONE_PROGRAM = 512
# Folding goes token by token, so a thread has one channel; a decode step folds only a few tokens.
FOLD_SPLIT_CHANNELS = 128
FOLD_AHEAD_TOKENS = 16
# A captured step has programs for every group that could close, and mostly few do. Above ten for
# each of 132 multiprocessors a program takes several in turn: even programs with no work cost time.
MOST_NARROW_PROGRAMS = 1320
# How many tiles of a projection are loaded while the same number is added. A program that runs
# alone waits for memory; in a chunk other programs fill the wait, and need the registers.
KEY_TURNS, CHUNK_KEY_TURNS = 4, 2
_SUM_LANES = tl.constexpr(SUM_LANES)


@dataclass(frozen=True, slots=True)
class KeyConstants:
    """Index keys that come from the latent: their WIDTH, 0 where none do. LANES channels are added
    at once, and TURNS times as many are loaded ahead."""

    WIDTH: int
    LANES: int
    TURNS: int
    RECORD: RecordConstants | None


@dataclass(frozen=True, slots=True)
class CompressorConstants:
    """A compressor as compile-time constants.

    SPLITS programs share an item, or one program takes ITEMS_PER_PROGRAM; with LOOP it then goes on
    to more of them. TAILS: which programs write the tails: "none", "token" (the program of each
    token), "apart" (programs of their own, one per request) or "after" (the program of an item,
    after its groups). BIAS: there is an ape. Without GATED a group is one token, stored as it is.
    KEYS: how index keys come from the latent. APART: entries have an arena of their own; those of
    blocks that are not there are not stored."""

    RATIO: int
    OVERLAP: bool
    WIDTH: int
    ROPE: int
    HADAMARD: bool
    GATED: bool
    BIAS: bool
    SKIPS_LAST: bool
    A_ROWS: int
    B_ROWS: int
    STATE_ROWS: int
    PAGE_ROWS: int
    ITEMS_PER_PROGRAM: int
    SPLITS: int
    LOOP: bool
    WIDE: bool
    PLACE_FIRST: bool
    AHEAD: int
    COMPRESS: bool
    TAILS: str
    FROM_TAILS: bool
    DENSE: bool
    RECORD: RecordConstants
    KEYS: KeyConstants
    APART: bool


class Compressor(NamedTuple):
    """One compressor's tensors, program counts and places. Offsets are in bytes, from the start of
    a block (`data`, `scale`) or of a slot; for folded groups `ka_offset` is that of the states."""

    items: Any
    c: Any
    z: Any
    ape: Any
    norm: Any
    dense: Any
    scratch: Any
    arrived: Any
    item_rows: Any
    work_programs: Any
    tail_programs: Any
    c_stride: Any
    z_stride: Any
    data_offset: Any
    scale_offset: Any
    ka_offset: Any
    za_offset: Any
    kb_offset: Any
    zb_offset: Any
    key_weight: Any
    key_norm: Any
    key_data_offset: Any
    key_scale_offset: Any


# the fields of a Compressor that only the main one has
KEY_FIELDS = 4


class CompressorLaunch(NamedTuple):
    """What a compressor adds to a launch."""

    programs: int
    arguments: Compressor
    constants: CompressorConstants | None


class Groups(NamedTuple):
    """Groups that a program closes at once; each field is [ITEMS_PER_PROGRAM]."""

    item: Any
    slot: Any
    entry: Any
    start: Any
    first_row: Any


class Stored(NamedTuple):
    """Where values or logits are: a step's projections `new` with their `stride` and, per item
    [items], the rings of the current (`ring_a`) and the previous stream (`ring_b`)."""

    new: Any
    stride: Any
    ring_a: Any
    ring_b: Any


class Place(NamedTuple):
    """What storing entries needs: pages [items], norm weights and angles [items, WIDTH], the pages
    of index keys, and which entries are stored [items]."""

    page: Any
    norm: Any
    cos: Any
    sin: Any
    key_page: Any
    stored: Any


def compressor_launch(step: StepTensors, write: CompressorWrite | None) -> CompressorLaunch:
    """An empty share, without programs, where a layer has no such compressor."""
    nothing: Tensor = step.rope
    if write is None:
        unread = (step.batch, *[nothing] * 6, step.arrived, *[0] * 11, nothing, nothing, 0, 0)
        return CompressorLaunch(0, Compressor._make(unread), None)
    layout, items, keys = write.layout, write.items.shape[0], write.layout.key_page
    items_per_program = splits = 1
    if layout.online:
        splits = 1 if step.narrow else max(1, layout.width // FOLD_SPLIT_CHANNELS)
    elif layout.tokens_pooled > MAX_ROWS_IN_ONE_PROGRAM:
        splits = max(1, layout.width // SPLIT_CHANNELS)
    elif layout.key_page is None:
        items_per_program = max(1, CHANNELS_IN_ONE_PROGRAM // layout.width)
    # The tails of a decode step overwrite nothing that its groups read, so other programs may write
    # them at the same time; the groups of a prefill chunk must be read first.
    tails = "none"
    if write.write_tails and (layout.online or layout.ka is not None or layout.kb is not None):
        tails = ("apart" if layout.online else "token") if step.narrow else "after"
    sets = -(-items // items_per_program) if write.compress or tails == "after" else 0
    # a step with online states has one program per item: there is nothing to save
    bounded = step.narrow and not layout.online
    sets_at_once = min(sets, MOST_NARROW_PROGRAMS // splits) if bounded else sets
    work_programs = sets_at_once * splits
    tail_programs = step.batch.shape[0] * splits if layout.online and tails != "none" else 0
    constants = CompressorConstants(
        RATIO=layout.ratio,
        OVERLAP=layout.overlap,
        WIDTH=layout.width,
        ROPE=layout.rope_dim,
        HADAMARD=layout.hadamard,
        GATED=layout.gated,
        BIAS=write.ape is not None,
        SKIPS_LAST=layout.skips_last,
        A_ROWS=_rows(layout.ka),
        B_ROWS=_rows(layout.kb),
        STATE_ROWS=_rows(layout.state),
        PAGE_ROWS=layout.page.rows,
        ITEMS_PER_PROGRAM=items_per_program,
        SPLITS=splits,
        LOOP=sets_at_once < sets,
        WIDE=not step.narrow,
        # What storing needs is loaded together with the rows if there are registers to spare for
        # it.
        PLACE_FIRST=layout.online or (step.narrow and splits == 1),
        AHEAD=1 if step.narrow else FOLD_AHEAD_TOKENS,
        COMPRESS=write.compress,
        TAILS=tails,
        FROM_TAILS=write.c is None,
        DENSE=write.dense is not None,
        RECORD=page_constants(layout.page),
        KEYS=KeyConstants(
            WIDTH=0 if keys is None else keys.format.width,
            LANES=PROJECTION_LANES,
            TURNS=KEY_TURNS if step.narrow else CHUNK_KEY_TURNS,
            RECORD=None if keys is None else page_constants(keys),
        ),
        APART=layout.page.apart,
    )
    arguments = Compressor(
        items=write.items,
        c=nothing if write.c is None else write.c,
        z=nothing if write.z is None else write.z,
        ape=nothing if write.ape is None else write.ape,
        norm=write.norm,
        dense=nothing if write.dense is None else write.dense,
        scratch=step.scratch,
        arrived=step.arrived,
        item_rows=items,
        work_programs=work_programs,
        tail_programs=tail_programs,
        c_stride=0 if write.c is None else write.c.stride(0),
        z_stride=0 if write.z is None else write.z.stride(0),
        data_offset=layout.page.offset_bytes,
        scale_offset=layout.page.scale_offset_bytes,
        ka_offset=_offset(layout.state or layout.ka),
        za_offset=_offset(layout.za),
        kb_offset=_offset(layout.kb),
        zb_offset=_offset(layout.zb),
        key_weight=nothing if write.keys is None else write.keys.weight,
        key_norm=nothing if write.keys is None else write.keys.norm,
        key_data_offset=0 if keys is None else keys.offset_bytes,
        key_scale_offset=0 if keys is None else keys.scale_offset_bytes,
    )
    return CompressorLaunch(work_programs + tail_programs, arguments, constants)


def _rows(ring: Ring | None) -> int:
    return 0 if ring is None else ring.rows


def _offset(ring: Ring | None) -> int:
    return 0 if ring is None else ring.offset_bytes


@triton.jit
def compress(program, step, compressor, C: tl.constexpr):
    """The nth program of one compressor; `step` is the Step of append.py."""
    if C.STATE_ROWS > 0:
        _compress_folded(program, step, compressor, C)
    else:
        _compress_rows(program, step, compressor, C)


@triton.jit
def tail_rank(position, C: tl.constexpr):
    """How many tokens before a position the tails keep; a token's row in their rings follows from
    its rank."""
    if C.SKIPS_LAST:
        return position - position // C.RATIO
    else:
        return position


@triton.jit
def is_kept(position, C: tl.constexpr):
    """Whether the tails keep a token."""
    if C.SKIPS_LAST:
        return position % C.RATIO != C.RATIO - 1
    else:
        return tl.constexpr(True)


@triton.jit
def ring_at(slot_ptr, offset):
    """A ring of fp32 rows in a slot."""
    return (slot_ptr + offset).to(tl.pointer_type(tl.float32))


@triton.jit
def _compress_rows(program, step, compressor, C: tl.constexpr):
    """ITEMS_PER_PROGRAM items. If there are fewer programs than sets of items, each program strides
    over the sets and stops at the first padding item."""
    split = program % C.SPLITS
    nth = program // C.SPLITS
    if C.LOOP:
        while _first_slot(nth, compressor, C) >= 0:
            _compress_items(nth, split, step, compressor, C)
            nth += compressor.work_programs // C.SPLITS
    else:
        _compress_items(nth, split, step, compressor, C)


@triton.jit
def _first_slot(nth, compressor, C: tl.constexpr):
    first = nth * C.ITEMS_PER_PROGRAM
    return load_item(item_at(compressor.items, first), first < compressor.item_rows, -1).slot


@triton.jit
def _load_items(nth, compressor, C: tl.constexpr):
    """ItemColumns [ITEMS_PER_PROGRAM] of the nth items; -1 past the end of the list. A single item
    is loaded as scalars, not once per layout."""
    if C.ITEMS_PER_PROGRAM == 1:
        one = tl.zeros([1], dtype=tl.int32)
        item = load_item(item_at(compressor.items, nth))
        return ItemColumns(
            item.slot + one, item.start + one, item.end + one, item.first_row + one,
            item.entry + one, item.entries + one, item.writes_tails + one,
        )  # fmt: skip
    else:
        item = nth * C.ITEMS_PER_PROGRAM + tl.arange(0, C.ITEMS_PER_PROGRAM)
        return load_item(item_at(compressor.items, item), item < compressor.item_rows, -1)


@triton.jit
def _compress_items(nth, split, step, compressor, C: tl.constexpr):
    items = _load_items(nth, compressor, C)
    # Padding is -1 in every column; testing all columns makes all loads start before the branch.
    asked = items.slot & items.start & items.end & items.first_row & items.entry & items.entries
    live = asked >= 0
    item = nth * C.ITEMS_PER_PROGRAM + tl.arange(0, C.ITEMS_PER_PROGRAM)
    slot = items.slot.to(tl.int64)
    slot_ptr = step.slot_arena + slot * step.slot_bytes
    if C.COMPRESS:
        most = tl.max(items.entries, axis=0) if C.OVERLAP and C.WIDE else 1
        for turn in range(most):
            entry = items.entry + turn
            closes = live & (turn < items.entries) & ((entry + 1) * C.RATIO <= items.end)
            if tl.max(closes.to(tl.int32), axis=0) > 0:
                groups = Groups(item, slot, entry, items.start, items.first_row)
                _close_groups(closes, groups, slot_ptr, split, step, compressor, C)
    if C.TAILS == "after":
        tl.debug_barrier()  # some of the rows read above may be overwritten below
        again = load_item(item_at(compressor.items, item), item < compressor.item_rows, 0)
        _write_tails(again.writes_tails == 1, items, slot_ptr, split, compressor, C)


@triton.jit
def _close_groups(closes, groups, slot_ptr, split, step, compressor, C: tl.constexpr):
    """Pools the groups that close and stores their entries."""
    ka = ring_at(slot_ptr, compressor.ka_offset)
    za = ring_at(slot_ptr, compressor.za_offset)
    kb = ring_at(slot_ptr, compressor.kb_offset)
    zb = ring_at(slot_ptr, compressor.zb_offset)
    place = ()
    if C.PLACE_FIRST:
        place = _place(closes, groups, step, compressor, C)
    if C.GATED:
        gates = Stored(compressor.z, compressor.z_stride, za, zb)
        ape = compressor.ape if C.BIAS else None
        logits = _load_tiles(closes, groups, split, gates, ape, C)
    rows = Stored(compressor.c, compressor.c_stride, ka, kb)
    values = _load_tiles(closes, groups, split, rows, None, C)
    if not C.WIDE:
        # Without a barrier ptxas loads the values after the exponentials, and a lone program has
        # nothing else to fill that wait. No load moves below a barrier, no barrier below a branch.
        tl.debug_barrier()
    if C.WIDE or step.slot_bytes > 0:  # always true
        if C.GATED:
            pooled = _pool(logits, values, closes, groups.entry, C)
        else:
            pooled = tl.reshape(values[0], [C.ITEMS_PER_PROGRAM, C.WIDTH // C.SPLITS])
        _finish_entries(pooled, closes, groups, split, place, step, compressor, C)


@triton.jit
def _compress_folded(program, step, compressor, C: tl.constexpr):
    """One group that closes, or the states of one request. In a prefill step nothing reads the
    states of a request that begins a group, so programs of their own write them. Otherwise the
    program of the request's first item writes them, after it has read them."""
    RATIO: tl.constexpr = C.RATIO
    if C.WIDE:
        tail = program < compressor.tail_programs
        nth = tl.where(tail, program, program - compressor.tail_programs)
    else:
        tail = program >= compressor.work_programs
        nth = tl.where(tail, program - compressor.work_programs, program)
    split = nth % C.SPLITS
    item = nth // C.SPLITS
    found = load_item_or_request(compressor.items, step.batch, item, tail)
    slot, start, end, first_row, entry, entries, writes_tails = found
    slot = slot.to(tl.int64)
    closes = (tail == 0) & (entries > 0) & ((entry + 1) * RATIO <= end) & C.COMPRESS
    states = tail & (slot >= 0)
    if C.TAILS == "after":
        begins = start % RATIO == 0
        states = tl.where(tail, states & begins, (writes_tails == 1) & (begins == 0))
    group = Groups(item, slot, entry, start, first_row)
    if C.WIDE:
        # one loop over two jobs, because its code is long and slow to compile
        for job in range(tl.where(closes, 0, 1), tl.where(states, 2, 1)):
            _fold_job(job, True, group, end, split, step, compressor, C)
    else:
        if closes:
            _fold_job(0, True, group, end, split, step, compressor, C)
        if states:
            _fold_job(1, False, group, end, split, step, compressor, C)


@triton.jit
def _fold_job(job, FOLDS: tl.constexpr, group, end, split, step, compressor, C: tl.constexpr):
    """Job 0 closes a group (scalars), job 1 writes the states of a request's newest tokens. Without
    FOLDS those come right after the stored state."""
    RATIO: tl.constexpr = C.RATIO
    slot_ptr = step.slot_arena + group.slot * step.slot_bytes
    ring = ring_at(slot_ptr, compressor.ka_offset)
    row_offset = group.first_row - group.start
    kept = tl.maximum(group.start, end - C.STATE_ROWS)
    stop = tl.where(job == 0, (group.entry + 1) * RATIO, kept)
    begin = tl.where(job == 0, group.entry * RATIO, kept - kept % RATIO)
    begin = stop if C.FROM_TAILS else tl.maximum(group.start, begin)
    one = tl.arange(0, 1)
    groups = Groups(
        group.item + one, group.slot + one, group.entry + one, group.start, group.first_row
    )
    place = ()
    if C.PLACE_FIRST:
        place = _place((one == 0) & (job == 0), groups, step, compressor, C)
    if not C.FROM_TAILS:
        newest = load_projections(kept, job == 1, row_offset, split, compressor, C)
    exists = (begin % RATIO != 0) | C.FROM_TAILS
    state = load_state(ring, begin - 1, exists, split, C)
    if FOLDS and not C.FROM_TAILS:
        state = fold_tokens(state, begin, stop, row_offset, split, compressor, C)
    if job == 0:
        pooled = tl.div_rn(state.product, state.weight)[None, :]  # [1, PART]
        _finish_entries(pooled, one == 0, groups, split, place, step, compressor, C)
    elif not C.FROM_TAILS:
        write_states(state, newest, kept, end, row_offset, split, ring, compressor, C)


@triton.jit
def _place(closes, groups, step, compressor, C: tl.constexpr):
    """Where the entries go, and what they are multiplied by."""
    WIDTH: tl.constexpr = C.WIDTH
    at = step.block_table + groups.slot * step.table_stride + groups.entry // C.PAGE_ROWS
    block_id = tl.load(at, mask=closes, other=0).to(tl.int64)
    norm = tl.load(compressor.norm + (groups.entry * 0)[:, None] + tl.arange(0, WIDTH)[None, :])
    angles = tl.where(closes, groups.entry * C.RATIO, 0).to(tl.int64) * C.ROPE
    cos, sin = load_rope(step.rope + angles[:, None], WIDTH, C.ROPE)
    page = step.block_arena + block_id * step.block_bytes
    if C.APART:
        at = step.entry_table + groups.slot * step.entry_table_stride + groups.entry // C.PAGE_ROWS
        row = tl.load(at, mask=closes, other=-1).to(tl.int64)
        entries = step.entries_arena + row * step.entries_bytes
        return Place(entries, norm, cos, sin, page, closes & (row >= 0))
    else:
        return Place(page, norm, cos, sin, page, closes)


@triton.jit
def _finish_entries(pooled, closes, groups, split, place, step, compressor, C: tl.constexpr):
    """Stores entries; `pooled` is [items, PART]. Where several programs have pooled some channels
    each, the last one to finish collects them all."""
    if C.SPLITS == 1:
        _store_entries(pooled, closes, groups, place, step, compressor, C)
    else:
        PART: tl.constexpr = C.WIDTH // C.SPLITS
        line = (compressor.scratch + groups.item.to(tl.int64) * C.WIDTH)[:, None]  # [items, 1]
        tl.store(line + (split * PART + tl.arange(0, PART))[None, :], pooled)
        tl.debug_barrier()
        mine = tl.max(groups.item, axis=0)
        arrived = tl.atomic_add(compressor.arrived + mine, 1, sem="acq_rel")
        if arrived == C.SPLITS - 1:
            tl.store(compressor.arrived + mine, 0)
            complete = tl.load(line + tl.arange(0, C.WIDTH)[None, :], cache_modifier=".cg")
            _store_entries(complete, closes, groups, place, step, compressor, C)


@triton.jit
def _store_entries(pooled, closes, groups, place, step, compressor, C: tl.constexpr):
    """Norm, RoPE, Hadamard for keys, and the records into their blocks (or dense rows). `pooled` is
    [items, WIDTH]."""
    RECORD: tl.constexpr = C.RECORD
    WIDTH: tl.constexpr = C.WIDTH
    if not C.PLACE_FIRST:
        place = _place(closes, groups, step, compressor, C)
    x = rms_norm(round_bf16(pooled), place.norm, step.eps, WIDTH)
    if C.KEYS.WIDTH > 0:
        _store_key(x, closes, groups, place, step, compressor, C)
    x = rotate(x, place.cos, place.sin, WIDTH, C.ROPE)
    if C.HADAMARD:
        x = hadamard_across_lanes(x, WIDTH**-0.5, WIDTH)
    if C.DENSE:
        dense = compressor.dense.to(tl.pointer_type(tl.uint16))
        row = (dense + groups.item.to(tl.int64) * WIDTH)[:, None]  # [items, 1]
        tl.store(row + tl.arange(0, WIDTH)[None, :], bf16_bits(x), mask=closes[:, None])
    else:
        page_row = groups.entry % C.PAGE_ROWS
        store_records(
            x, place.stored,
            place.page + compressor.data_offset + page_row * RECORD.DATA_STRIDE,
            place.page + compressor.scale_offset + page_row * RECORD.SCALE_STRIDE,
            WIDTH, RECORD,
        )  # fmt: skip


@triton.jit
def _store_key(latent, closes, groups, place, step, compressor, C: tl.constexpr):
    """The index key of one latent [1, WIDTH]: its projection, norm, RoPE and record. Channels are
    added in fp64 and in the order of the reference's `project`: first within each lane, then the
    lanes as a tree."""
    RECORD: tl.constexpr = C.KEYS.RECORD
    WIDTH: tl.constexpr = C.WIDTH
    KEY_WIDTH: tl.constexpr = C.KEYS.WIDTH
    LANES: tl.constexpr = C.KEYS.LANES
    TURNS: tl.constexpr = C.KEYS.TURNS
    # through memory, because a thread needs all channels but holds only a few
    line = compressor.scratch + tl.max(groups.item, axis=0).to(tl.int64) * WIDTH
    tl.store(line + tl.arange(0, WIDTH)[None, :], latent)
    tl.debug_barrier()
    key = tl.arange(0, KEY_WIDTH)
    weights = compressor.key_weight + key[None, :] * WIDTH
    sums = tl.zeros([LANES, KEY_WIDTH], dtype=tl.float64)
    tiles = _key_tiles(line, weights, 0, C)
    for first in range(0, WIDTH, TURNS * LANES):
        # the next tiles are already being loaded; after the last ones, the same ones again
        ahead = tl.minimum(first + TURNS * LANES, WIDTH - TURNS * LANES)
        next_tiles = _key_tiles(line, weights, ahead, C)
        for turn in tl.static_range(TURNS):
            channels, weight = tiles[2 * turn], tiles[2 * turn + 1]
            sums += channels.to(tl.float64) * weight.to(tl.float32).to(tl.float64)
        tiles = next_tiles
    x = round_bf16(_halving_sum(sums[None, :, :]).to(tl.float32))  # [1, KEY_WIDTH]
    norm = tl.load(compressor.key_norm + key)[None, :]
    x = rms_norm(x, norm, step.eps, KEY_WIDTH)
    angles = tl.where(closes, groups.entry * C.RATIO, 0).to(tl.int64) * C.ROPE
    cos, sin = load_rope(step.rope + angles[:, None], KEY_WIDTH, C.ROPE)
    x = rotate(x, cos, sin, KEY_WIDTH, C.ROPE)
    page_row = groups.entry % C.PAGE_ROWS
    store_records(
        x, closes,
        place.key_page + compressor.key_data_offset + page_row * RECORD.DATA_STRIDE,
        place.key_page + compressor.key_scale_offset + page_row * RECORD.SCALE_STRIDE,
        KEY_WIDTH, RECORD,
    )  # fmt: skip


@triton.jit
def _key_tiles(line, weights, first, C: tl.constexpr):
    """KEYS.TURNS tiles from channel `first` on: channels of the latent [LANES, 1] and weights
    [LANES, KEY_WIDTH], alternating."""
    TURNS: tl.constexpr = C.KEYS.TURNS
    tiles = ()
    for turn in tl.static_range(TURNS):
        tiles += _key_tile(line, weights, first + turn * C.KEYS.LANES, C)
    return tiles


@triton.jit
def _key_tile(line, weights, first, C: tl.constexpr):
    at = first + tl.arange(0, C.KEYS.LANES)[:, None]
    return tl.load(line + at, cache_modifier=".cg"), load_bf16(weights + at, at >= 0)


@triton.jit
def _load_tiles(closes, groups, split, stored, ape, C: tl.constexpr):
    """Logits or values of all rows of groups, as a tuple of tiles [items, ROWS, PART]. Logits of
    the step's own tokens get their bias: `ape` is None for values."""
    RATIO: tl.constexpr = C.RATIO
    ROWS: tl.constexpr = min(RATIO, _SUM_LANES)
    # only the newest rows of a group that a decode step closes can come from the step itself
    ANY: tl.constexpr = C.WIDE or C.SKIPS_LAST
    NEWEST: tl.constexpr = 2 * RATIO if ANY else max(C.A_ROWS - RATIO + 1, 1)
    entry = groups.entry
    tiles = ()
    if C.OVERLAP:
        for at in tl.static_range(0, RATIO, ROWS):
            tiles += _load_tile(
                (entry - 1) * RATIO + at, closes & (entry > 0), groups, split, stored, ape,
                True, at + ROWS + NEWEST > 2 * RATIO, C,
            )  # fmt: skip
    for at in tl.static_range(0, RATIO, ROWS):
        tiles += _load_tile(
            entry * RATIO + at, closes, groups, split, stored, ape,
            False, at + ROWS + NEWEST > RATIO, C,
        )  # fmt: skip
    return tiles


@triton.jit
def _load_tile(
    first, exists, groups, split, stored, ape,
    PREVIOUS: tl.constexpr, NEW: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The rows [items, ROWS, PART] at positions from `first` on of the PREVIOUS or the current
    stream: from its ring and, where some may be NEW, from the step's projections."""
    WIDTH: tl.constexpr = C.WIDTH
    PART: tl.constexpr = WIDTH // C.SPLITS
    ROWS: tl.constexpr = min(C.RATIO, _SUM_LANES)
    COLUMNS: tl.constexpr = WIDTH * 2 if C.OVERLAP else WIDTH
    RING_ROWS: tl.constexpr = C.B_ROWS if PREVIOUS else max(C.A_ROWS, 1)
    HALF: tl.constexpr = WIDTH if C.OVERLAP and not PREVIOUS else 0
    ring = stored.ring_b if PREVIOUS else stored.ring_a
    position = first[:, None] + tl.arange(0, ROWS)[None, :]  # [items, ROWS]
    column = (split * PART + tl.arange(0, PART))[None, None, :]
    exists = exists[:, None, None]
    start = groups.start[:, None]
    token = (groups.first_row[:, None] + position - start).to(tl.int64)
    if not C.GATED:  # of a type of its own, and always the step's own tokens
        row = stored.new + token * stored.stride
        return (load_bf16(row[:, :, None] + column, exists).to(tl.float32),)
    else:
        row = ring[:, None] + tail_rank(position, C) % RING_ROWS * WIDTH  # [items, ROWS]
        if NEW and not C.FROM_TAILS:
            is_new = position >= start
            row = tl.where(is_new, stored.new + token * stored.stride + HALF, row)
        row = tl.multiple_of(row, [16, 16])
        tile = tl.load(row[:, :, None] + column, mask=exists, other=0.0)
        if ape is not None and NEW and not C.FROM_TAILS:
            bias = ape + position % C.RATIO * COLUMNS + HALF
            tile += tl.load(bias[:, :, None] + column, mask=exists & is_new[:, :, None], other=0.0)
        return (tile,)


@triton.jit
def _pool(logits, values, closes, entry, C: tl.constexpr):
    """Gated softmax pooling of the rows of groups: fp32 [items, PART]. The first half of the tiles
    [items, ROWS, PART] is the previous stream's, where there is one; the first group has none."""
    ROWS: tl.constexpr = min(C.RATIO, _SUM_LANES)
    TILES: tl.constexpr = (2 * C.RATIO if C.OVERLAP else C.RATIO) // ROWS
    BEFORE: tl.constexpr = TILES // 2 if C.OVERLAP else 0
    before = (closes & (entry > 0))[:, None, None]  # [items, 1, 1]
    current = closes[:, None, None]
    tops = _masked(logits[0], before if BEFORE > 0 else current)
    for nth in tl.static_range(1, TILES):
        tops = tl.maximum(tops, _masked(logits[nth], before if nth < BEFORE else current))
    top = tl.max(tops, axis=1)[:, None, :]  # [items, 1, PART]
    weights, products = _weigh(logits[0], values[0], before if BEFORE > 0 else current, top)
    for nth in tl.static_range(1, TILES):
        weight, product = _weigh(logits[nth], values[nth], before if nth < BEFORE else current, top)
        weights += weight
        products += product
    if C.SPLITS == 1:
        # for groups that do not close, 0 / 0 would take the slow path of the division
        product = tl.where(closes[:, None], _halving_sum(products), 1.0)
        return tl.div_rn(product, tl.where(closes[:, None], _halving_sum(weights), 1.0))
    else:
        sums = _tree_sum(tl.join(products, weights), ROWS, C.WIDTH // C.SPLITS)
        product, weight = tl.split(sums)
        return tl.div_rn(product, weight)[None, :]


@triton.jit
def _masked(logits, exists):
    return tl.where(exists, logits, float("-inf"))


@triton.jit
def _weigh(z, k, exists, top):
    """Softmax numerators and their products with the values; rows that do not exist (their values
    are 0) have weight 0."""
    weight = tl.where(exists, exp_nonpositive(z - top), 0.0)
    return weight, weight * k


@triton.jit
def _halving_sum(x):
    """[items, rows, channels] → [items, channels]: adds the lower half of the rows to the upper
    half until one is left, as the reference does. A thread has all rows of its channels."""
    ITEMS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    PART: tl.constexpr = x.shape[2]
    if ROWS == 1:
        return tl.reshape(x, [ITEMS, PART])
    else:
        return _halving_sum(tl.sum(tl.reshape(x, [ITEMS, 2, ROWS // 2, PART]), axis=1))


@triton.jit
def _tree_sum(x, ROWS: tl.constexpr, PART: tl.constexpr):
    """[ROWS, PART, 2] → [PART, 2] in the same order, where rows are spread over threads."""
    if ROWS == 1:
        return tl.reshape(x, [PART, 2])
    else:
        halves = tl.permute(tl.reshape(x, [2, ROWS // 2, PART, 2]), (1, 2, 3, 0))
        first, second = tl.split(halves)
        return _tree_sum(first + second, ROWS // 2, PART)


@triton.jit
def _write_tails(live, items, slot_ptr, split, compressor, C: tl.constexpr):
    """The newest tokens of requests into the rings of the current and the previous stream."""
    start, end, first_row = items.start, items.end, items.first_row
    RATIO: tl.constexpr = C.RATIO
    WIDTH: tl.constexpr = C.WIDTH
    PART: tl.constexpr = WIDTH // C.SPLITS
    COLUMNS: tl.constexpr = WIDTH * 2 if C.OVERLAP else WIDTH
    # a range of tokens that includes those the rings keep
    RINGS: tl.constexpr = 2 * C.A_ROWS if C.SKIPS_LAST else max(C.A_ROWS, C.B_ROWS)
    ROWS: tl.constexpr = 1 if C.OVERLAP else min(32, 2048 // PART)
    # [items, 1]
    ka = ring_at(slot_ptr, compressor.ka_offset)[:, None]
    za = ring_at(slot_ptr, compressor.za_offset)[:, None]
    kb = ring_at(slot_ptr, compressor.kb_offset)[:, None]
    zb = ring_at(slot_ptr, compressor.zb_offset)[:, None]
    column = (split * PART + tl.arange(0, PART))[None, None, :]
    source = column + (WIDTH if C.OVERLAP else 0)
    most = tl.max(tl.where(live, tl.minimum(end - start, RINGS), 0), axis=0)
    for at in range(0, most, ROWS):
        back = at + tl.arange(0, ROWS)[None, :]
        position = end[:, None] - 1 - back  # [items, ROWS]
        inside = live[:, None] & (position >= start[:, None])
        token = (first_row[:, None] + position - start[:, None]).to(tl.int64)
        rank = tail_rank(position, C)
        newer = tail_rank(end, C)[:, None] - rank - 1  # tokens that the tails keep
        bias = (compressor.ape + position % RATIO * COLUMNS)[:, :, None]
        row_z = (compressor.z + token * compressor.z_stride)[:, :, None]
        row_k = (compressor.c + token * compressor.c_stride)[:, :, None]
        keeps = (inside & (newer < C.A_ROWS) & is_kept(position, C))[:, :, None]
        z = tl.load(row_z + source, mask=keeps)
        k = tl.load(row_k + source, mask=keeps)
        if C.BIAS:
            z += tl.load(bias + source, mask=keeps)
        if C.OVERLAP:
            keeps_b = (inside & (back < C.B_ROWS))[:, :, None]
            z_b = tl.load(row_z + column, mask=keeps_b)
            k_b = tl.load(row_k + column, mask=keeps_b)
            bias_b = tl.load(bias + column, mask=keeps_b)
            ring_row = position % C.B_ROWS * WIDTH
            tl.store((kb + ring_row)[:, :, None] + column, k_b, mask=keeps_b)
            tl.store((zb + ring_row)[:, :, None] + column, z_b + bias_b, mask=keeps_b)
        ring_row = rank % max(C.A_ROWS, 1) * WIDTH
        tl.store((ka + ring_row)[:, :, None] + column, k, mask=keeps)
        tl.store((za + ring_row)[:, :, None] + column, z, mask=keeps)

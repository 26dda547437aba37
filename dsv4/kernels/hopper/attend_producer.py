"""The producer of Hopper's attention: when each tile is fetched, decoded and handed over.

Four warps take tile after tile of 32 keys. A key's place follows from two loads, the second of
which depends on the first: its index in the list and its block's id (attend_keys.py). So for tile t
the indices are requested at tile t - 9, its block ids at t - 6 and its records at t - 3. All of
them go to shared memory: a register with a pending load cannot be carried into the next iteration.

Only records_v4.py and records_v41.py know what a record looks like: `fetch` starts loading a tile,
`hand_over` decodes it.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from dsv4.kernels.hopper import records_v4 as v4
from dsv4.kernels.hopper import records_v41 as v41
from dsv4.kernels.hopper.attend_keys import (
    AHEAD,
    HALF,
    KEY_STAGES,
    OPERAND_WORDS,
    RECORD_ROW,
    TILE,
    VECTOR,
    block_of,
    entry_of,
    extent_of,
    later_block,
    later_entry,
    next_stage,
    send_block,
    send_entry,
    source_of,
)
from dsv4.kernels.hopper.dialect import reinterpret


class Incoming(NamedTuple):
    """What is being loaded into shared memory: records of the next AHEAD tiles, the entries that
    keys of later tiles name, and the ids of the blocks that have them."""

    records: gl.tuple
    entries: gl.shared_memory_descriptor
    blocks: gl.shared_memory_descriptor


@gluon.jit
def new_incoming(A: gl.constexpr):
    return Incoming(
        records=v41.new_records() if A.V41 else v4.new_records(),
        entries=gl.allocate_shared_memory(gl.int32, [2 * AHEAD, TILE], VECTOR),
        blocks=gl.allocate_shared_memory(gl.int32, [AHEAD, TILE], VECTOR),
    )


@gluon.jit
def produce(keys, incoming, where, share, A: gl.constexpr):
    """Every buffer is written once per tile: Triton orders all writes to a buffer with barriers."""
    nth = gl.arange(0, TILE, layout=RECORD_ROW)
    extent = extent_of(share, A)
    source = source_of(where, share, extent, A)
    first = extent.first
    halves = reinterpret(keys.halves, gl.uint32, [2 * KEY_STAGES, TILE, HALF // 2], OPERAND_WORDS)
    records, entries, blocks = incoming
    entry: gl.tuple = ()
    for ahead in gl.static_range(2 * AHEAD):
        entry += (entry_of(first + ahead, nth, source, A),)
    block: gl.tuple = ()
    for ahead in gl.static_range(AHEAD):
        block += (block_of(entry[ahead], first + ahead, source, A),)
    live: gl.tuple = ()  # keys of the next AHEAD tiles
    for ahead in gl.static_range(AHEAD):
        live += (_fetch(records, ahead, first + ahead, nth, entry[ahead], block[ahead], source, A),)
        later = first + AHEAD + ahead
        send_block(blocks, ahead, entry[AHEAD + ahead], later, source, A)
        send_entry(entries, AHEAD + ahead, later, nth, source, A)
        send_entry(entries, ahead, later + AHEAD, nth, source, A)
        async_copy.commit_group()
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    near = gl.to_tensor(AHEAD)  # the place of the entries of the tile to fetch next
    far = gl.to_tensor(0)  # and of the tile whose block ids are to be requested next
    for tile in range(first, extent.last):
        async_copy.wait_group(AHEAD - 1)
        taken = () if A.V41 else v4.take(records, stage)
        near_entry = later_entry(entries, near, tile + AHEAD, nth, source, A)
        block_id = later_block(blocks, stage, near_entry, A)
        far_entry = later_entry(entries, far, tile + 2 * AHEAD, nth, source, A)
        if A.V41:
            v41.hand_over(tile, keys, halves, records, stage, phase, A)
        else:
            v4.hand_over(taken, keys, halves, stage, phase)
        keys.bias.index(stage).store(gl.where(live[0], 0.0, float("-inf")))
        fence_async_shared()
        mbarrier.arrive(keys.ready.index(stage), count=1)
        live = live[1:]
        live += (_fetch(records, stage, tile + AHEAD, nth, near_entry, block_id, source, A),)
        send_block(blocks, stage, far_entry, tile + 2 * AHEAD, source, A)
        send_entry(entries, near, tile + 3 * AHEAD, nth, source, A)
        async_copy.commit_group()
        stage, phase = next_stage(stage, phase, KEY_STAGES)
        near = gl.where(near == 2 * AHEAD - 1, 0, near + 1)
        far = gl.where(far == 2 * AHEAD - 1, 0, far + 1)


@gluon.jit
def _fetch(records, place, tile, nth, entry, block_id, source, A: gl.constexpr):
    """Starts loading the records of a tile. Rows that are not live become zeros. Returns which
    are."""
    if A.V41:
        return v41.fetch(records, place, tile, nth, entry, block_id, source, A)
    else:
        return v4.fetch(records, place, tile, nth, entry, block_id, source, A)

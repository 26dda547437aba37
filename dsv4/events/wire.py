"""The messages of vLLM's KV events, as consumers read them. Torch-free. Needs `dsv4[events]`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from dsv4.extras import needed_by

with needed_by("a publisher of events"):
    import msgspec

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
MOST_BLOCKS = 65_536  # of one event: consumers take no more
MOST_TOKENS = 1 << 20
END = (b"", (-1).to_bytes(8, "big", signed=True), b"")  # topic, number and payload after a replay


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Consecutive blocks of one prompt are in a medium. `token_ids` are those of all of them,
    `parent_block_hash` is the block before the first. The salt stands in `extra_keys`, once per
    block, and in `cache_salt`, where Dynamo looks for it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    extra_keys: list[list[str] | None] | None = None
    session_id: str | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """These blocks left a medium."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is in any medium."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_encode = msgspec.msgpack.Encoder().encode


def pack(events: Sequence[Event], rank: int | None) -> bytes:
    """One batch. `rank` is the data-parallel rank."""
    return _encode([time.time(), events, rank])


def number(seq: int) -> bytes:
    """The sequence number of a message."""
    return seq.to_bytes(8, "big")

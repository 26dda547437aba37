"""How much of each memory entries take, and which options go together."""

from __future__ import annotations

from dsv4.cache.hot_rows import HotLayout
from dsv4.cache.options import ManagerOptions, host_bytes
from dsv4.cache.residency.memory import EntrySizes
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.units import format_bytes


def needed_entry_rows(schema: CacheSchema, options: ManagerOptions, *, max_requests: int) -> int:
    """The fewest rows for entries on the device: of the blocks that the steps of all open plans
    write, and for each request of the blocks in which its tokens begin and end."""
    step_rows = -(-options["max_step_tokens"] // schema.block_tokens)
    return options["max_open_plans"] * step_rows + 2 * max_requests


def entry_sizes(
    schema: CacheSchema, options: ManagerOptions, *, num_blocks: int, max_requests: int
) -> EntrySizes | None:
    """What the device has for entries; None where they are not kept apart. Raises InvalidInput."""
    host_memory = host_bytes(options)
    if host_memory is None:
        return None
    layout = HotLayout(schema, options["hot_rows"])
    least = min(num_blocks, needed_entry_rows(schema, options, max_requests=max_requests))
    rows = least if options["entry_rows"] is None else min(num_blocks, options["entry_rows"])
    if rows < least:
        raise InvalidInput(
            f"entry_rows={options['entry_rows']}: the entries of {least} blocks must fit on the "
            f"device, for what steps of {options['max_step_tokens']} tokens write and for the "
            f"unfinished blocks of {max_requests} requests: give at least as many, or leave it out"
        )
    shared = has_host_tier(options)
    host_rows = host_memory // schema.bytes.entries if shared else num_blocks
    return EntrySizes(rows=rows, layout=layout, host_rows=host_rows, shared=shared)


def has_host_tier(options: ManagerOptions) -> bool:
    """Whether host memory is for blocks that were evicted too."""
    return any(each.__class__.__name__ == "HostTier" for each in options["tiers"])


def require_fits(schema: CacheSchema, options: ManagerOptions, *, num_blocks: int) -> None:
    """Raises InvalidInput for options that do not go with each other or with the schema."""
    host_memory = host_bytes(options)
    if host_memory is None:
        if schema.entries_apart:
            raise InvalidInput(
                "the schema keeps entries apart, so that they can be in host memory: give "
                "host_memory=..., or build the schema without entries_apart"
            )
        return
    if not schema.entries_apart:
        raise InvalidInput(
            "host_memory is for entries that are kept apart: build the schema with "
            "entries_apart=True (dsv4.Cache does)"
        )
    needed = num_blocks * schema.bytes.entries
    if needed > host_memory:
        raise InvalidInput(
            f"host_memory={format_bytes(host_memory)} holds the entries of "
            f"{host_memory // schema.bytes.entries:,} blocks, and {num_blocks:,} need "
            f"{needed:,} bytes: give more, or fewer blocks"
        )

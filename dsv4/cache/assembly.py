"""The parts of a manager: made in the order in which they need each other, and counted before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from dsv4.backends import load_backend
from dsv4.cache.absent import NoHandoff, NoTiers
from dsv4.cache.admission import Admission
from dsv4.cache.changes import Guard
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.leaving import Leaving
from dsv4.cache.memory import CacheMemory, LayerMemory
from dsv4.cache.options import ManagerOptions, complete, host_bytes, place
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.none import NoPrefix
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.snapshots import SnapshotPool
from dsv4.cache.requests import RequestTable
from dsv4.cache.residency.host_rows import HostRows, SharedHostRows
from dsv4.cache.residency.places import EntryPlaces, ResidentAllocator
from dsv4.cache.residency.sizes import entry_sizes, needed_entry_rows, require_fits
from dsv4.cache.schema import BlockBudget, CacheSchema, compute_block_budget
from dsv4.cache.state import SnapshotLayout
from dsv4.cache.step.sizes import index_bytes, plan_bytes
from dsv4.cache.steps import Steps
from dsv4.errors import InvalidInput, require_count, require_type
from dsv4.ops.backend import Backend
from dsv4.ops.device import total_bytes
from dsv4.units import format_bytes

if TYPE_CHECKING:
    from dsv4.cache.handoff.handoff import Handoff
    from dsv4.cache.handoff.options import HandoffOptions
    from dsv4.cache.manager import KVCacheManager
    from dsv4.cache.residency.residency import Residency
    from dsv4.cache.transfers.tiers import Tiers
    from dsv4.tiers.tier import Tier


BOOKS_BYTES = 128  # of a block, at least: what the host keeps of it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What a manager delegates to. Tiers and hand-off, which call the manager, are not among
    them."""

    backend: Backend
    table: RequestTable
    memory: CacheMemory
    prefix: PrefixCache | NoPrefix
    guard: Guard
    residency: Residency | None
    admission: Admission
    steps: Steps
    leaving: Leaving
    make_handle: Callable[..., LayerCacheHandle]


def make_parts(
    schema: CacheSchema, *, num_blocks: int, max_requests: int, options: ManagerOptions
) -> Parts:
    """Allocates everything. The options are complete. Raises InvalidInput."""
    max_step_tokens, device = options["max_step_tokens"], place(options)
    cut_replays = options["prefix"] is not None and options["prefix"].replay == "cut"
    if cut_replays:
        require_count("max_step_tokens", max_step_tokens, at_least=schema.model.window)
    backend = load_backend(options["backend"], device, batch_invariant=options["batch_invariant"])
    _check_backend(backend, schema)
    counts = {"num_blocks": num_blocks, "max_requests": max_requests}
    for where, needed in _needed_memory(schema, options, device, **counts).items():
        _require_memory(where, needed)
    require_fits(schema, options, num_blocks=num_blocks)
    sizes = entry_sizes(schema, options, num_blocks=num_blocks, max_requests=max_requests)
    pool = places = None
    if sizes is not None:
        from dsv4.cache.residency.pool import HostPool  # needs the extra dsv4[tiers]

        backend.check_apart()
        pool = HostPool(sizes.host_rows, schema.bytes.entries, device)
        hosts = HostRows(num_blocks)
        if sizes.shared:
            hosts = SharedHostRows(num_blocks, sizes.host_rows, pool.memory)
        places = EntryPlaces(num_blocks, sizes.rows, hosts)
    table = RequestTable(
        schema,
        num_blocks=num_blocks,
        max_requests=max_requests,
        allocator=None if places is None else ResidentAllocator(num_blocks, places),
    )
    prefix = _make_prefix(schema, table, options["prefix"], device)
    memory = CacheMemory(
        schema,
        backend,
        num_blocks=num_blocks,
        max_requests=max_requests,
        max_step_tokens=max_step_tokens,
        device=device,
        max_open_plans=options["max_open_plans"],
        entry_sizes=sizes,
        pool=pool,
        snapshot_bytes=prefix.memory_bytes(),
    )
    residency, guard = None, Guard()
    make_admission: Callable[..., Admission] = Admission
    make_steps: Callable[..., Steps] = Steps
    make_handle: Callable[..., LayerCacheHandle] = LayerCacheHandle
    if places is not None:
        from dsv4.cache.residency import parts  # needs the extra dsv4[tiers]

        assert pool is not None
        residency = parts.Residency(
            table,
            memory,
            places,
            pool,
            open_plans=lambda: steps.open,
            before_reuse=prefix.notices.before_reuse if prefix else None,
            note_left=prefix.notices.entries_left if prefix else None,
        )
        make_admission = partial(parts.ResidentAdmission, residency=residency)
        make_steps = partial(parts.ResidentSteps, residency=residency)
        make_handle = parts.ResidentHandle
    admission = make_admission(table, memory, prefix, guard)
    steps = make_steps(table, memory, backend, prefix, guard, admission, cut_replays=cut_replays)
    return Parts(
        backend=backend,
        table=table,
        memory=memory,
        prefix=prefix,
        guard=guard,
        residency=residency,
        admission=admission,
        steps=steps,
        leaving=Leaving(table, prefix, guard, steps),
        make_handle=make_handle,
    )


def _check_backend(backend: Backend, schema: CacheSchema) -> None:
    for record in (schema.entry_format, schema.window_format, schema.index_format):
        backend.check_format(record)
    for layer in schema.layers:
        backend.check_ratio(layer.spec.layer, layer.spec.ratio)


def _needed_memory(
    schema: CacheSchema,
    options: ManagerOptions,
    device: torch.device,
    *,
    num_blocks: int,
    max_requests: int,
) -> dict[torch.device, dict[str, int]]:
    """Bytes of the largest parts of a manager, each with its name, by where they are."""
    plans, tokens, prefix = options["max_open_plans"], options["max_step_tokens"], options["prefix"]
    request_bytes = schema.bytes.slot + schema.bytes.block_table_row
    step_bytes = plan_bytes(schema, max_requests=max_requests, max_tokens=tokens)
    needed = {
        f"{num_blocks:,} blocks": num_blocks * max(schema.bytes.block, BOOKS_BYTES),
        f"{max_requests:,} requests": max_requests * request_bytes,
        f"steps of {tokens:,} tokens, {plans:,} at a time": plans * step_bytes,
    }
    if prefix is None:
        return {device: needed}
    snapshots = f"{prefix.rows:,} snapshots"
    needed[snapshots] = SnapshotPool.bytes_on_device(schema, prefix, device)
    if prefix.where == "device" or device.type == "cpu":
        return {device: needed}
    in_host = {snapshots: prefix.rows * SnapshotLayout(schema).row_bytes}
    return {device: needed, torch.device("cpu"): in_host}


def _require_memory(device: torch.device, needed: dict[str, int]) -> None:
    """Raises InvalidInput for more than all memory of a device: an attempt to take it might end the
    process instead of raising."""
    total, has_bytes = sum(needed.values()), total_bytes(device)
    if has_bytes is not None and total > has_bytes:
        parts = (f"{format_bytes(size)} for {what}" for what, size in needed.items() if size)
        raise InvalidInput(
            f"this cache needs {format_bytes(total)} ({'; '.join(parts)}), and {device} has "
            f"{format_bytes(has_bytes)}: ask for less, or name a device that has more"
        )


def _make_prefix(
    schema: CacheSchema, table: RequestTable, options: PrefixOptions | None, device: torch.device
) -> PrefixCache | NoPrefix:
    prefix: PrefixCache | NoPrefix = NoPrefix(schema)
    if options is not None:
        prefix = PrefixCache(schema, table.allocator, options, device)
    table.supply.reclaimer = prefix.blocks
    return prefix


def make_handles(parts: Parts) -> tuple[tuple[tuple[LayerCacheHandle, ...], ...], ...]:
    """Of each lane, and again for `chunks_apart`, one for each layer."""
    memory = parts.memory
    layers = [LayerMemory.of(memory, layer) for layer in range(len(memory.schema.layers))]
    return tuple(
        tuple(
            tuple(parts.make_handle(layer, parts.backend, lane.workspace) for layer in layers)
            for _ in range(2)
        )
        for lane in memory.lanes
    )


def make_tiers(manager: KVCacheManager, tiers: Sequence[Tier]) -> Tiers | NoTiers:
    if not tiers:
        return NoTiers()
    from dsv4.cache.transfers.tiers import Tiers  # needs the extra dsv4[tiers]

    return Tiers(manager, tiers)


def make_handoff(manager: KVCacheManager, options: HandoffOptions | None) -> Handoff | NoHandoff:
    if options is None:
        return NoHandoff()
    from dsv4.cache.handoff.handoff import Handoff  # needs the extra dsv4[nixl]

    return Handoff(manager, options)


# ---- sizes ---------------------------------------------------------------------------------------


def other_bytes(schema: CacheSchema, *, max_requests: int, options: ManagerOptions) -> int:
    """Bytes of all that `make_parts` allocates on the device in addition to blocks, slots and block
    table."""
    require_type("schema", schema, CacheSchema)
    options = complete(options)
    device, nowhere = place(options), torch.device("meta")
    max_requests = require_count("max_requests", max_requests)
    tokens, plans = options["max_step_tokens"], options["max_open_plans"]
    host_bytes_of_plan = index_bytes(schema, max_requests=max_requests, max_tokens=tokens)
    _require_memory(
        torch.device("cpu"),
        {f"steps of {tokens:,} tokens, {plans:,} at a time": plans * host_bytes_of_plan},
    )
    memory = CacheMemory(
        schema,
        load_backend(options["backend"], device, batch_invariant=options["batch_invariant"]),
        num_blocks=0,
        max_requests=max_requests,
        max_step_tokens=tokens,
        device=nowhere,
        max_open_plans=plans,
        entry_sizes=entry_sizes(schema, options, num_blocks=0, max_requests=max_requests),
    ).memory_bytes()
    snapshots = 0
    if options["prefix"] is not None:
        snapshots = SnapshotPool.bytes_on_device(schema, options["prefix"], device)
    return memory.step_buffers + memory.workspace + snapshots + memory.entries


def budget_of(
    schema: CacheSchema,
    *,
    memory_bytes: int,
    max_requests: int,
    context: int | None,
    options: ManagerOptions,
) -> BlockBudget:
    """As many blocks as fit into this much memory with these options."""
    other = other_bytes(schema, max_requests=max_requests, options=options)
    options = complete(options)
    return compute_block_budget(
        schema,
        memory_bytes=memory_bytes,
        max_requests=max_requests,
        context=context,
        other_bytes=other,
        host_bytes=host_bytes(options),
        needed_entry_rows=needed_entry_rows(schema, options, max_requests=max_requests),
    )


def require_same(schema: CacheSchema, budget: BlockBudget, options: ManagerOptions) -> None:
    """Raises InvalidInput for a budget that was made for other options."""
    require_type("budget", budget, BlockBudget)
    other = other_bytes(schema, max_requests=budget.max_requests, options=options)
    if other != budget.other_bytes:
        raise InvalidInput(
            f"the budget leaves {budget.other_bytes:,} bytes for what is not cache, with "
            f"these options it is {other:,}: compute it for the same ones, with "
            f"other_bytes=dsv4.other_bytes(schema, …), or use manager_from_memory"
        )

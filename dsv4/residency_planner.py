"""What fits when entries may live in host memory, and what a decode step then fetches. Torch-free.

What is assumed, to the byte:

    host      each request has all blocks of its context in host memory: `entries_bytes` each
    device    each request has what stays of these blocks, its slot, its two rows of block ids, its
              hot rows with their tables, and rows for the entries of the blocks that a decode step
              may still write; each plan that may be open has the entries of one request in one
              layer, twice (those that a chunk reads and those that are brought up meanwhile), and
              rows for the entries of the blocks that a chunk of `step_tokens` may write
    a step    every layer that selects names `index_topk` entries of each request, or all that the
              context has; the share that is not hot comes over the link once

Entries that other requests share, or that the device has room for, would only make it less.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dsv4.cache.hot_rows import HotLayout
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, PoolTooSmall, require_count
from dsv4.planner import OtherBytes

HIT_RATES = (1.0, 0.95, 0.9, 0.5, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedStep:
    """What the link carries in a decode step of all requests at this hit rate, and how long that
    takes at its full rate, if it were not hidden by anything."""

    hit_rate: float
    fetched_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySizing:
    """How many requests of a context fit with their entries in host memory, and without.

    `limited_by` says which memory is full first. `pays` where more fit than without it. From
    `pays_from_tokens` on a request needs less of the device than without (None: at no context
    that the schema allows). `device_request_bytes` and `host_request_bytes` are those of one
    request, `chunk_bytes` what a manager needs for chunks, `other_bytes` what was asked
    for in addition. `steps` are decode steps of `step_requests` requests with one token each.
    """

    memory_bytes: int
    host_memory_bytes: int
    context_tokens: int
    hot_rows: int
    hot_bytes: int
    table_bytes: int
    device_request_bytes: int
    host_request_bytes: int
    request_bytes_without: int
    chunk_bytes: int
    other_bytes: int
    requests: int
    requests_without: int
    limited_by: Literal["host", "device"]
    pays: bool
    pays_from_tokens: int | None
    link_bytes_per_second: int
    step_requests: int
    steps: tuple[FetchedStep, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_residency(
    schema: CacheSchema,
    *,
    memory_bytes: int,
    host_memory_bytes: int,
    link_bytes_per_second: int,
    context_tokens: int | None = None,
    hot_rows: int | None = None,
    step_requests: int | None = None,
    step_tokens: int = 0,
    open_plans: int = 1,
    other_bytes: OtherBytes | None = None,
) -> ResidencySizing:
    """How many requests of a context (default: the schema's longest) fit into both memories with
    entries apart, and how many into the device's alone without.

    Of `schema` both layouts are made. Steps are those of `step_requests` requests, by default all
    that fit. Raises PoolTooSmall, with the minimum, where not one request fits into both, and
    InvalidInput.
    """
    memory_bytes = require_count("memory_bytes", memory_bytes)
    host_memory_bytes = require_count("host_memory_bytes", host_memory_bytes)
    link = require_count("link_bytes_per_second", link_bytes_per_second)
    tokens = schema.max_context
    if context_tokens is not None:
        tokens = require_count("context_tokens", context_tokens)
    if tokens > schema.max_context:
        raise InvalidInput(
            f"context_tokens={tokens:,} is past the {schema.max_context:,} tokens that a request "
            f"of this schema may have: ask for less context"
        )
    extra_bytes = other_bytes or (lambda requests: 0)
    apart, together = replace(schema, entries_apart=True), replace(schema, entries_apart=False)
    hot = HotLayout(apart, hot_rows)
    blocks = apart.blocks_for(tokens)
    device, host = device_request_bytes(apart, hot, blocks), blocks * apart.bytes.entries
    chunk_rows = -(-require_count("step_tokens", step_tokens, at_least=0) // apart.block_tokens)
    chunks = require_count("open_plans", open_plans) * (
        2 * hot.staged_bytes + chunk_rows * apart.bytes.entries
    )
    by_device = _fit(memory_bytes - chunks, device, extra_bytes)
    requests = min(by_device, host_memory_bytes // host)
    if not requests:
        _raise_too_small(memory_bytes, device + chunks + extra_bytes(1), host_memory_bytes, host)
    without = _fit(memory_bytes, together.bytes.of_request(tokens), extra_bytes)
    stepping = requests if step_requests is None else require_count("step_requests", step_requests)
    return ResidencySizing(
        memory_bytes=memory_bytes,
        host_memory_bytes=host_memory_bytes,
        context_tokens=tokens,
        hot_rows=hot.hot_rows,
        hot_bytes=hot.hot_bytes,
        table_bytes=hot.table_bytes,
        device_request_bytes=device,
        host_request_bytes=host,
        request_bytes_without=together.bytes.of_request(tokens),
        chunk_bytes=chunks,
        other_bytes=extra_bytes(requests),
        requests=requests,
        requests_without=without,
        limited_by="device" if requests == by_device else "host",
        pays=requests > without,
        pays_from_tokens=_pays_from(apart, together, hot),
        link_bytes_per_second=link,
        step_requests=stepping,
        steps=tuple(
            FetchedStep(hit_rate=rate, fetched_bytes=amount, seconds=amount / link)
            for rate in HIT_RATES
            for amount in (round((1 - rate) * stepping * selected_bytes(apart, tokens)),)
        ),
    )


def device_request_bytes(apart: CacheSchema, hot: HotLayout, blocks: int) -> int:
    """What a request of this many blocks has on the device, whatever else is there."""
    open_rows = min(hot.open_rows, blocks)
    stays = blocks * apart.bytes.block + open_rows * apart.bytes.entries
    return apart.bytes.per_request + stays + hot.slot_bytes


def selected_bytes(schema: CacheSchema, tokens: int) -> int:
    """Bytes of the entries that one token's selections name, at this context."""
    return sum(
        min(schema.model.index_topk, tokens // spec.ratio) * page.record_bytes
        for spec in schema.model.layers
        if spec.has_indexer and (page := schema.layout.page("entries", spec.layer)) is not None
    )


def _fit(memory_bytes: int, each: int, extra_bytes: OtherBytes) -> int:
    counts = range(1, max(0, memory_bytes) // each + 1)
    return bisect_right(counts, memory_bytes, key=lambda count: count * each + extra_bytes(count))


def _pays_from(apart: CacheSchema, together: CacheSchema, hot: HotLayout) -> int | None:
    """The shortest context of whole blocks at which a request needs less of the device. What it
    saves never decreases with its length."""
    counts = range(1, apart.max_blocks_per_request + 1)

    def pays(blocks: int) -> bool:
        tokens = min(blocks * apart.block_tokens, apart.max_context)
        return device_request_bytes(apart, hot, blocks) < together.bytes.of_request(tokens)

    first = bisect_right(counts, False, key=pays)
    return None if first == len(counts) else counts[first] * apart.block_tokens


def _raise_too_small(memory: int, device: int, host_memory: int, host: int) -> None:
    if host_memory < host:
        raise PoolTooSmall(
            f"{host_memory:,} bytes of host memory do not hold the entries of one request, "
            f"{host:,} bytes: give at least that, or ask for less context",
            minimum_bytes=host,
        )
    raise PoolTooSmall(
        f"{memory:,} bytes do not hold what one request keeps on the device with its entries in "
        f"host memory, {device:,} bytes: give at least that, or ask for less context or fewer hot "
        f"entries",
        minimum_bytes=device,
    )

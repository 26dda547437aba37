"""What a cache costs and what fits, answered before anything is allocated. Torch-free.

Two figures are kept separate throughout, because folding one into the other makes both wrong:

    bytes_per_token     what one more token of context costs (blocks)
    bytes_per_request   what a live request costs at any length (its slot, its row of block ids)

A sizing is exact. Without `other_bytes` it is about the cache alone: arenas and block table. With
them, `budget` counts all that `dsv4.manager_from_budget(schema, sizing.budget)` allocates, to the
byte: step buffers, workspace and snapshots too, which depend on the manager's options, its backend
and its GPU. `dsv4.other_bytes` computes them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsv4.cache.schema import BlockBudget, CacheSchema, bytes_by_kind, compute_block_budget
from dsv4.cache.state import SnapshotLayout, StateLayout
from dsv4.errors import InvalidInput, PoolTooSmall, require_count
from dsv4.tiers.sizes import HEADER_BYTES, padded

Question = Literal["bytes", "memory", "requests", "context", "fits"]
# bytes that a manager of n requests allocates in addition to blocks, slots and block table; they
# never decrease with n
OtherBytes = Callable[[int], int]

MOST_BYTES = 2**63 - 1  # that a file, or anything else here, can have


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The sizes of a schema and the answer to one question about it.

    `question` names what was asked for: nothing ("bytes"), the "memory", the "requests" or the
    "context" that the other two allow, or whether all three "fits" together. `memory_bytes` is what
    was given; `context_tokens` and `requests` are given or found. `request_bytes` is one request of
    that context and `needed_bytes` all of them, with `other_bytes`, which is what the manager needs
    in addition, 0 where that was not asked for. `budget` says what to allocate: all given memory
    that makes whole blocks, so it can hold more blocks than the requests need. It is None when
    nothing was asked, and when the answer is that it does not fit. `snapshot_bytes` is one snapshot
    of the prefix cache; their number is an option of the manager, and part of `other_bytes`.
    """

    model: str
    fingerprint: str
    formats: dict[str, str]
    max_context_tokens: int
    max_draft_tokens: int
    steps_ahead: int
    hca_state: str
    block_tokens: int
    bytes_per_token: float
    bytes_per_request: int
    block_bytes: int
    slot_bytes: int
    block_table_row_bytes: int
    snapshot_bytes: int
    bytes_by_kind: dict[str, dict[str, int]]

    question: Question
    memory_bytes: int | None = None
    context_tokens: int | None = None
    requests: int | None = None
    request_bytes: int | None = None
    other_bytes: int = 0
    needed_bytes: int | None = None
    fits: bool | None = None
    budget: BlockBudget | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the budget gets its total_bytes."""
        result = asdict(self)
        if self.budget is not None:
            result["budget"]["total_bytes"] = self.budget.total_bytes
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizing:
    """How many tokens a tier of a given size keeps: their blocks, and a snapshot per period (0:
    none). A record is its row and a header in whole units of 4 KiB. `times_device` is the size of a
    block there relative to its size on the device."""

    tier_bytes: int
    snapshot_period_tokens: int
    block_record_bytes: int
    snapshot_record_bytes: int
    bytes_per_token: float
    tokens: int
    times_device: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_tier(
    schema: CacheSchema, *, tier_bytes: int, snapshot_period_tokens: int = 1024
) -> TierSizing:
    """What part of a cache a tier of this many bytes keeps. Raises InvalidInput."""
    require_count("tier_bytes", tier_bytes)
    period = require_count("snapshot_period_tokens", snapshot_period_tokens, at_least=0)
    if not schema.bytes.block:
        raise InvalidInput("a model of window-only layers keeps nothing in blocks, nor in tiers")
    if period % schema.block_tokens:
        raise InvalidInput(
            f"a snapshot every {period} tokens: they are taken where blocks of "
            f"{schema.block_tokens} end"
        )
    block = padded(HEADER_BYTES + schema.bytes.block)
    snapshot = padded(HEADER_BYTES + SnapshotLayout(schema).row_bytes)
    per_token = block / schema.block_tokens + (snapshot / period if period else 0)
    if tier_bytes < block:
        raise InvalidInput(
            f"a tier of {tier_bytes:,} bytes holds no record, of which a block's takes {block:,}: "
            f"write its unit too, 4TB"
        )
    return TierSizing(
        tier_bytes=tier_bytes,
        snapshot_period_tokens=period,
        block_record_bytes=block,
        snapshot_record_bytes=snapshot,
        bytes_per_token=per_token,
        tokens=int(tier_bytes / per_token) // schema.block_tokens * schema.block_tokens,
        times_device=block / schema.bytes.block,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSizing:
    """One request that goes from machine to machine: its whole blocks and at most its state, and
    how long that takes at the full rate of the link."""

    context_tokens: int
    handoff_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSizing:
    """What a link carries of a cache. At most `state_bytes` go with every request (rows of groups
    that have not begun are left out), `bytes_per_token` with its whole blocks. `tokens_per_second`
    is how much context it carries, without states.

    With the rates of both sides: `prefill_per_decode` is how many prefill GPUs keep one decode GPU
    busy, and `link_share` how much of the link one decode GPU then uses, for requests of
    `handoffs[0].context_tokens` with answers of `answer_tokens`.
    """

    link_bits_per_second: int
    state_bytes: int
    bytes_per_token: float
    tokens_per_second: float
    handoffs: tuple[HandoffSizing, ...]
    answer_tokens: int | None = None
    prefill_per_decode: float | None = None
    link_share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_link(
    schema: CacheSchema,
    *,
    link_bits_per_second: int,
    context_tokens: int | None = None,
    answer_tokens: int = 1024,
    prefill_rate: float | None = None,
    decode_rate: float | None = None,
) -> LinkSizing:
    """What requests of a context (default: some typical ones) cost on a link of this many bits per
    second. With the rates of a prefill GPU and of a decode GPU, in tokens per second over all its
    requests, also how many of the former feed one of the latter. Raises InvalidInput."""
    rate = require_count("link_bits_per_second", link_bits_per_second) / 8
    answer = require_count("answer_tokens", answer_tokens)
    _require_context(schema, context_tokens)
    if (prefill_rate is None) != (decode_rate is None):
        raise InvalidInput("give both rates, of prefill and of decode, or none")
    state_bytes = HEADER_BYTES + StateLayout(schema).payload_bytes
    contexts: tuple[int, ...] = (1024, 8192, 32_768, 131_072, 1_048_576)
    if context_tokens is not None:
        contexts = (require_count("context_tokens", context_tokens),)
    handoffs = []
    for tokens in contexts:
        if tokens <= schema.max_context:
            total = tokens // schema.block_tokens * schema.bytes.block + state_bytes
            handoffs.append(
                HandoffSizing(context_tokens=tokens, handoff_bytes=total, seconds=total / rate)
            )
    ratio = share = None
    if prefill_rate is not None and decode_rate is not None and handoffs:
        if not (prefill_rate > 0 and decode_rate > 0):
            raise InvalidInput("rates are tokens per second, above 0")
        first = handoffs[0]
        decode_s = answer / decode_rate  # per decode GPU, for one request
        ratio = first.context_tokens / prefill_rate / decode_s
        share = first.handoff_bytes / decode_s / rate
    return LinkSizing(
        link_bits_per_second=int(link_bits_per_second),
        state_bytes=state_bytes,
        bytes_per_token=schema.bytes.per_token,
        tokens_per_second=rate / schema.bytes.per_token if schema.bytes.per_token else 0.0,
        handoffs=tuple(handoffs),
        answer_tokens=None if ratio is None else answer,
        prefill_per_decode=ratio,
        link_share=share,
    )


def plan(
    schema: CacheSchema,
    *,
    memory_bytes: int | None = None,
    context_tokens: int | None = None,
    requests: int | None = None,
    other_bytes: OtherBytes | None = None,
) -> Sizing:
    """Answers what is missing from memory, context and requests.

        nothing given               the sizes only
        memory, context             how many requests of that context fit at once
        memory, requests            the largest context that all of them may have at once
        context, requests           the memory they need
        memory, context, requests   whether they fit, and what they need

    Where it is not the question, a missing context is the schema's max_context and a missing number
    of requests is 1. `other_bytes` says what a manager of n requests needs in addition; without it
    the answer is about the cache alone. Allocates nothing. Raises PoolTooSmall, with the minimum,
    when the memory cannot hold even one request of the context (or, with the context in question,
    one block for each request), and InvalidInput for counts below 1 and contexts past
    max_context.
    """
    for name, value in (
        ("memory_bytes", memory_bytes),
        ("context_tokens", context_tokens),
        ("requests", requests),
    ):
        if value is not None and require_count(name, value) > MOST_BYTES:
            raise InvalidInput(f"{name}={value:,}: at most {MOST_BYTES:,}")
    _require_context(schema, context_tokens)
    extra_bytes = other_bytes or _nothing
    if memory_bytes is None and context_tokens is None and requests is None:
        return _sizing(schema, question="bytes")
    if memory_bytes is None:
        return _find_memory(
            schema, context_tokens or schema.max_context, requests or 1, extra_bytes
        )
    if requests is None:
        return _find_requests(
            schema, memory_bytes, context_tokens or schema.max_context, extra_bytes
        )
    if context_tokens is None:
        return _find_context(schema, memory_bytes, requests, extra_bytes)
    return _check_fit(schema, memory_bytes, context_tokens, requests, extra_bytes)


def _nothing(requests: int) -> int:
    return 0


def _find_memory(
    schema: CacheSchema, context_tokens: int, requests: int, extra_bytes: OtherBytes
) -> Sizing:
    other_bytes = extra_bytes(requests)
    needed_bytes = requests * schema.bytes.of_request(context_tokens) + other_bytes
    return _sizing(
        schema,
        question="memory",
        context_tokens=context_tokens,
        requests=requests,
        budget=compute_block_budget(
            schema,
            memory_bytes=needed_bytes,
            max_requests=requests,
            context=context_tokens,
            other_bytes=other_bytes,
        ),
    )


def _find_requests(
    schema: CacheSchema, memory_bytes: int, context_tokens: int, extra_bytes: OtherBytes
) -> Sizing:
    each = schema.bytes.of_request(context_tokens)
    counts = range(1, memory_bytes // each + 1)
    requests = bisect_right(
        counts, memory_bytes, key=lambda count: count * each + extra_bytes(count)
    )
    return _sizing(
        schema,
        question="requests",
        memory_bytes=memory_bytes,
        context_tokens=context_tokens,
        requests=requests,
        # not even one: asking for one raises PoolTooSmall with the minimum
        budget=compute_block_budget(
            schema,
            memory_bytes=memory_bytes,
            max_requests=max(requests, 1),
            context=context_tokens,
            other_bytes=extra_bytes(max(requests, 1)),
        ),
    )


def _find_context(
    schema: CacheSchema, memory_bytes: int, requests: int, extra_bytes: OtherBytes
) -> Sizing:
    other_bytes = extra_bytes(requests)
    minimum_bytes = requests * schema.bytes.of_request(1) + other_bytes
    if memory_bytes < minimum_bytes:
        raise PoolTooSmall(
            f"{memory_bytes:,} bytes cannot give each of {requests:,} requests its "
            f"{schema.bytes.per_request:,} bytes and a first block of {schema.bytes.block:,}"
            + (f" in addition to {other_bytes:,} bytes for the manager" if other_bytes else "")
            + f": give at least {minimum_bytes:,} bytes, or ask for fewer requests",
            minimum_bytes=minimum_bytes,
        )
    budget = compute_block_budget(
        schema,
        memory_bytes=memory_bytes,
        max_requests=requests,
        context=1,
        other_bytes=other_bytes,
    )
    context_tokens = schema.max_context
    if schema.bytes.block:  # a model of windows only needs no blocks, whatever the context
        tokens_each = budget.num_blocks // requests * schema.block_tokens
        context_tokens = min(context_tokens, tokens_each)
    return _sizing(
        schema,
        question="context",
        memory_bytes=memory_bytes,
        context_tokens=context_tokens,
        requests=requests,
        budget=budget,
    )


def _check_fit(
    schema: CacheSchema,
    memory_bytes: int,
    context_tokens: int,
    requests: int,
    extra_bytes: OtherBytes,
) -> Sizing:
    def budget(count: int) -> BlockBudget:
        return compute_block_budget(
            schema,
            memory_bytes=memory_bytes,
            max_requests=count,
            context=context_tokens,
            other_bytes=extra_bytes(count),
        )

    budget(1)  # raises when even one request is too many
    other_bytes = extra_bytes(requests)
    fits = requests * schema.bytes.of_request(context_tokens) + other_bytes <= memory_bytes
    return _sizing(
        schema,
        question="fits",
        memory_bytes=memory_bytes,
        context_tokens=context_tokens,
        requests=requests,
        other_bytes=other_bytes,
        fits=fits,
        budget=budget(requests) if fits else None,
    )


def _sizing(
    schema: CacheSchema,
    *,
    question: Question,
    memory_bytes: int | None = None,
    context_tokens: int | None = None,
    requests: int | None = None,
    other_bytes: int = 0,
    fits: bool | None = None,
    budget: BlockBudget | None = None,
) -> Sizing:
    if budget is not None:
        other_bytes = budget.other_bytes
    request_bytes = None if context_tokens is None else schema.bytes.of_request(context_tokens)
    needed_bytes = None
    if request_bytes is not None and requests is not None:
        needed_bytes = requests * request_bytes + other_bytes
    return Sizing(
        model=schema.model.name,
        fingerprint=schema.fingerprint,
        formats={
            "entries": schema.entry_format.name,
            "window": schema.window_format.name,
            "index_keys": schema.index_format.name,
            "pages": schema.page_form,
        },
        max_context_tokens=schema.max_context,
        max_draft_tokens=schema.max_draft_tokens,
        steps_ahead=schema.steps_ahead,
        hca_state=schema.hca_state,
        block_tokens=schema.block_tokens,
        bytes_per_token=schema.bytes.per_token,
        bytes_per_request=schema.bytes.per_request,
        block_bytes=schema.bytes.block,
        slot_bytes=schema.bytes.slot,
        block_table_row_bytes=schema.bytes.block_table_row,
        snapshot_bytes=SnapshotLayout(schema).row_bytes,
        bytes_by_kind=bytes_by_kind(schema),
        question=question,
        memory_bytes=memory_bytes,
        context_tokens=context_tokens,
        requests=requests,
        request_bytes=request_bytes,
        other_bytes=other_bytes,
        needed_bytes=needed_bytes,
        fits=fits,
        budget=budget,
    )


def _require_context(schema: CacheSchema, context_tokens: int | None) -> None:
    if context_tokens is None or context_tokens <= schema.max_context:
        return
    advice = "ask for less context"
    if schema.max_context < schema.model.max_context:
        advice += f", or build the schema with max_context up to {schema.model.max_context:,}"
    raise InvalidInput(
        f"context_tokens={context_tokens:,} is past the {schema.max_context:,} tokens that a "
        f"request of this schema may have: {advice}"
    )

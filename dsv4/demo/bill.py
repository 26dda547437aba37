"""The end of the demo: what the real V4-Flash costs. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.planner import plan
from dsv4.units import parse_bytes, parse_tokens

MODEL, V41_MODEL = "v4-flash", "v41-flash"
MEMORIES = ("80GB", "141GB")
CONTEXTS = ("128k", "1M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many requests of a context fit into memory for the cache alone."""

    memory_bytes: int
    context_tokens: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashBill:
    """`bf16_bytes_per_token` is what the same entries and keys take unquantised, as transformers
    keeps them. `v41_…` is the same for DeepSeek-V4.1."""

    bytes_per_token: float
    bf16_bytes_per_token: float
    bytes_per_request: int
    fits: list[Fit]
    v41_bytes_per_token: float
    v41_bytes_per_request: int
    v41_fits: list[Fit]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def flash_bill() -> FlashBill:
    model = ModelSpec.preset(MODEL)
    schema, v41 = CacheSchema.build(model), CacheSchema.build(ModelSpec.preset(V41_MODEL))
    unquantised = CacheSchema.build(model, entry_format="bf16", index_format="bf16")
    return FlashBill(
        bytes_per_token=schema.bytes.per_token,
        bf16_bytes_per_token=unquantised.bytes.per_token,
        bytes_per_request=schema.bytes.per_request,
        fits=_fits(schema),
        v41_bytes_per_token=v41.bytes.per_token,
        v41_bytes_per_request=v41.bytes.per_request,
        v41_fits=_fits(v41),
    )


def _fits(schema: CacheSchema) -> list[Fit]:
    fits = []
    for memory in map(parse_bytes, MEMORIES):
        for context in map(parse_tokens, CONTEXTS):
            found = plan(schema, memory_bytes=memory, context_tokens=context)
            assert found.requests is not None
            fits.append(Fit(memory_bytes=memory, context_tokens=context, requests=found.requests))
    return fits

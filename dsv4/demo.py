"""`dsv4 demo`: several requests live and end on this machine, and the real model's bill.

A tiny model with every layer kind, random projections, the reference backend: what is shown is
the cache's own bookkeeping and its own bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.request import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.writes import CompressorWeights, LayerWeights
from dsv4.model import ModelSpec
from dsv4.rope import rope_table

MAX_DRAFT_TOKENS = 3
PROMPT_TOKENS = (300, 5, 129, 128)
DECODE_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoEvent:
    """One step of the demonstration, after it was committed."""

    what: str
    lengths: dict[str, int]
    blocks_live: int
    blocks_total: int
    requests_live: int
    entries: int
    bytes_live: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class _TinyModel:
    """Random weights, and projections that depend only on a request's name and the position."""

    def __init__(self, schema: CacheSchema) -> None:
        self.schema = schema
        self._generator = torch.Generator().manual_seed(4)
        tables = {
            yarn: rope_table(schema.model, yarn=yarn, tokens=schema.max_context)
            for yarn in (False, True)
        }
        self.weights = [
            LayerWeights(
                rope=tables[layer.spec.yarn],
                compressor=self._compressor(layer.spec.layer, "tail"),
                index_compressor=self._compressor(layer.spec.layer, "index_tail"),
                kv_norm=torch.ones(schema.model.head_dim),
            )
            for layer in schema.layers
        ]

    def _compressor(self, layer: int, kind: str) -> CompressorWeights | None:
        layout = self.schema.compressor(layer, kind)  # type: ignore[arg-type]
        if layout is None:
            return None
        ape = torch.randn(layout.ratio, layout.columns, generator=self._generator)
        return CompressorWeights(ape=ape, norm=torch.ones(layout.width))

    def project(self, seed: int, layer: int, start: int, count: int) -> list[Tensor]:
        """KV, then values and gates of each compressor, for `count` tokens from `start` on."""
        widths = [self.schema.model.head_dim]
        for kind in ("tail", "index_tail"):
            layout = self.schema.compressor(layer, kind)
            widths += [layout.columns] * 2 if layout else []
        generator = torch.Generator().manual_seed(1000 * seed + layer)
        rows = torch.randn(start + count, sum(widths), generator=generator)[start:]
        kv, *projections = rows.split(widths, dim=1)
        return [kv.to(torch.bfloat16), *projections]


def run_demo(on_event: Callable[[DemoEvent], None]) -> dict[str, object]:
    """Runs the demonstration, reporting each step. Returns a summary.

    Chunked prefill, ragged decode, rejected drafts, an early end and a late arrival in reused
    memory; at the end every survivor's bytes are compared with a single prefill of the same tokens.
    """
    schema = CacheSchema.build(
        ModelSpec.preset("tiny"), max_draft_tokens=MAX_DRAFT_TOKENS, max_context=1024
    )
    model = _TinyModel(schema)
    manager = KVCacheManager(schema, num_blocks=12, max_requests=4, max_step_tokens=512)
    live: dict[str, tuple[Request, int]] = {}

    def step(what: str, counts: dict[str, int], accepted: dict[str, int] | None = None) -> None:
        names = list(counts)
        plan = manager.prepare_forward([(live[n][0], counts[n]) for n in names])
        for layer in range(len(schema.layers)):
            pieces = [model.project(live[n][1], layer, live[n][0].length, counts[n]) for n in names]
            inputs = [torch.cat(columns) for columns in zip(*pieces, strict=True)]
            manager.acquire(layer, plan).append(*inputs, weights=model.weights[layer])
        manager.commit(plan, [accepted[n] for n in names] if accepted else None)
        report(what)

    def report(what: str) -> None:
        stats = manager.stats()
        on_event(
            DemoEvent(
                what=what,
                lengths={name: request.length for name, (request, _) in live.items()},
                blocks_live=stats.blocks_live,
                blocks_total=stats.blocks_total,
                requests_live=stats.requests_live,
                entries=sum(_entries(schema, request.length) for request, _ in live.values()),
                bytes_live=stats.block_bytes_live + stats.slot_bytes_live,
            )
        )

    for seed, tokens in enumerate(PROMPT_TOKENS):
        live["ABCD"[seed]] = (manager.admit_request(tokens), seed)
    report("four prompts admitted: 300, 5, 129 and 128 tokens")
    step(
        "A prefills a chunk of 150 tokens, B and C their whole prompts",
        {"A": 150, "B": 5, "C": 129},
    )
    step("A's second chunk splits a group; D prefills", {"A": 150, "D": 128})
    for nth in range(DECODE_STEPS // 4):
        step(f"decode, one token each ({nth + 1})", dict.fromkeys(live, 1))
    drafts = dict.fromkeys(live, 1 + MAX_DRAFT_TOKENS)
    step(
        "4 tokens drafted for each; 4, 1, 2 and 0 accepted",
        drafts,
        {"A": 4, "B": 1, "C": 2, "D": 0},
    )
    manager.release_request(live.pop("C")[0])
    report("C ends: its slot and blocks are free again")
    live["E"] = (manager.admit_request(200), 9)
    step("E gets C's memory, which nobody wiped, and prefills 200 tokens", {"E": 200})
    for nth in range(DECODE_STEPS // 4):
        step(f"decode, one token each ({nth + 1})", dict.fromkeys(live, 1))
    manager.check_invariants()
    identical = {
        name: _equals_single_prefill(manager, model, request, seed)
        for name, (request, seed) in live.items()
    }
    for name in list(live):
        manager.release_request(live.pop(name)[0])
    report("all requests ended")
    manager.check_invariants()
    return {
        "identical_to_single_prefill": identical,
        "leaked_blocks": manager.stats().blocks_live,
        "leaked_slots": manager.stats().requests_live,
    }


def _entries(schema: CacheSchema, length: int) -> int:
    return sum(length // la.spec.ratio for la in schema.layers if la.spec.owns_entries)


def _equals_single_prefill(
    manager: KVCacheManager, model: _TinyModel, request: Request, seed: int
) -> bool:
    """Whether entries and keys of this life equal those of one prefill in a fresh cache."""
    schema = manager.schema
    fresh = KVCacheManager(schema, num_blocks=12, max_requests=1, max_step_tokens=512)
    twin = fresh.admit_request(request.length)
    plan = fresh.prepare_forward([(twin, request.length)])
    for layer in range(len(schema.layers)):
        inputs = model.project(seed, layer, 0, request.length)
        fresh.acquire(layer, plan).append(*inputs, weights=model.weights[layer])
    fresh.commit(plan)
    for kept in schema.layers:
        if not kept.spec.owns_entries:
            continue
        entries = request.length // kept.spec.ratio
        pools = [m.acquire(kept.spec.layer).pool.views for m in (manager, fresh)]
        for name in pools[0]:
            ours, theirs = (
                torch.cat([pool[name][i] for i in r.block_ids])[:entries].view(torch.uint8)
                for pool, r in zip(pools, (request, twin), strict=True)
            )
            if not torch.equal(ours, theirs):
                return False
    return True

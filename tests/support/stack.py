"""A stack of layers fed with projections that depend only on (stream, position): whatever the
chunking, the same token always brings the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import PageForm
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.ops.backend import BackendName
from dsv4.ops.calls import CompressorWeights, KeyProjection, LayerWeights
from dsv4.rope import rope_table
from tests.support.numbers import Numbers

if TYPE_CHECKING:
    from dsv4.cache.handoff.options import HandoffOptions
    from dsv4.tiers.tier import Tier


def batch_of(plan: ForwardPlan | Batch) -> Batch:
    """The only batch of a plan, or the batch that was given."""
    return plan if isinstance(plan, Batch) else plan.batch


POISON = 0xFF
HCA_STATES: tuple[HcaState, ...] = ("raw", "online")
PAGE_FORMS: tuple[PageForm, ...] = ("planes", "records")


@dataclass
class Stream:
    """All tokens that one request might ever see, as projections, per layer."""

    kv: dict[int, Tensor] = field(default_factory=dict)
    projections: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


class Stack:
    """A manager with poisoned arenas, weights, and a way to run steps on chosen layers."""

    def __init__(
        self,
        schema: CacheSchema,
        *,
        layers: Sequence[int],
        seed: int = 0,
        max_requests: int = 4,
        num_blocks: int = 32,
        max_step_tokens: int = 512,
        device: str = "cpu",
        backend: BackendName | None = None,
        kv_norm: bool = True,
        spread: float = 1.0,
        prefix: PrefixOptions | None = None,
        tiers: Sequence[Tier] = (),
        max_open_plans: int = 1,
        handoff: HandoffOptions | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.schema, self.layers, self.device = schema, tuple(layers), device
        self.manager = KVCacheManager(
            schema,
            num_blocks=num_blocks,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            device=device,
            backend=backend,
            prefix=prefix,
            tiers=tiers,
            max_open_plans=max_open_plans,
            handoff=handoff,
            batch_invariant=batch_invariant,
        )
        self.manager.memory.block_arena.bytes.fill_(POISON)
        self.manager.memory.slot_arena.bytes.fill_(POISON)
        self.spread = spread
        numbers = Numbers(seed)
        tables = {
            yarn: rope_table(schema.model, yarn=yarn, tokens=schema.max_context, device=device)
            for yarn in (False, True)
        }
        self.weights = {
            layer: self._weights(layer, tables, numbers, kv_norm) for layer in self.layers
        }

    def _weights(
        self, layer: int, tables: dict[bool, Tensor], numbers: Numbers, kv_norm: bool
    ) -> LayerWeights:
        def random(*shape: int) -> Tensor:
            return numbers.normal(*shape).to(self.device)

        compressors = []
        for kind in ("main", "index"):
            layout = self.schema.layout.compressor(layer, kind)  # type: ignore[arg-type]
            biased = layout is not None and layout.key_page is None
            compressors.append(
                layout
                and CompressorWeights(
                    ape=random(layout.ratio, layout.columns) if biased else None,
                    norm=random(layout.width),
                )
            )
        main, model = self.schema.layout.compressor(layer, "main"), self.schema.model
        projection = None
        if main is not None and main.key_page is not None:
            dtype = getattr(torch, self.schema.entry_format.value_dtype)
            weight = random(model.index_dim, model.head_dim) * model.head_dim**-0.5
            projection = KeyProjection(weight=weight.to(dtype), norm=random(model.index_dim))
        return LayerWeights(
            rope=tables[self.schema.model.layers[layer].yarn],
            compressor=compressors[0],
            index_compressor=compressors[1],
            index_projection=projection,
            kv_norm=random(self.schema.model.head_dim) if kv_norm else None,
        )

    def stream(self, seed: int, tokens: int) -> Stream:
        """Random projections; `spread` > 1 makes heavy tails and outliers."""
        numbers = Numbers(1_000_003 * seed + 17)

        def random(width: int) -> Tensor:
            if self.spread > 1:
                return numbers.heavy(tokens, width, spread=self.spread).to(self.device)
            return numbers.normal(tokens, width).to(self.device)

        result = Stream()
        for layer in self.layers:
            value_dtype = getattr(torch, self.schema.window_format.value_dtype)
            result.kv[layer] = random(self.schema.model.head_dim).to(value_dtype)
            forms = [
                (layout.columns, torch.float32 if layout.gated else value_dtype)
                for kind in ("main", "index")
                if (layout := self.schema.layout.compressor(layer, kind))  # type: ignore[arg-type]
                for _ in range(2 if layout.gated else 1)
            ]
            result.projections[layer] = tuple(random(width).to(dtype) for width, dtype in forms)
        return result

    def write(
        self,
        plan: ForwardPlan | Batch,
        streams: Sequence[Stream],
        layers: Sequence[int] | None = None,
    ) -> None:
        """Appends the plan's tokens on every layer; padding rows are NaN. Layers that the stack
        leaves out are as if they had appended too."""
        if layers is None:
            backbone = self.manager.schema.backbone_layers
            plan.mark_appended(set(backbone).difference(self.layers))
        for layer in self.layers if layers is None else layers:
            kv, projections = self.inputs(plan, streams, layer)
            handle = self.manager.acquire(layer, batch_of(plan))
            handle.append(kv, *projections, weights=self.weights[layer])

    def inputs(
        self, plan: ForwardPlan | Batch, streams: Sequence[Stream], layer: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        spans = list(zip(streams, plan.starts.tolist(), plan.counts.tolist(), strict=True))
        padding = batch_of(plan).padded_tokens - plan.num_tokens

        def gather(tensors: list[Tensor]) -> Tensor:
            rows = [t[a : a + n] for t, (_, a, n) in zip(tensors, spans, strict=True)]
            width, dtype = tensors[0].shape[1], tensors[0].dtype
            rows.append(torch.full((padding, width), float("nan"), dtype=dtype, device=self.device))
            return torch.cat(rows)

        kv = gather([s.kv[layer] for s in streams])
        width = len(streams[0].projections[layer])
        return kv, tuple(gather([s.projections[layer][i] for s in streams]) for i in range(width))

    def step(
        self,
        work: Sequence[tuple[Request, Stream, int]],
        accepted: Sequence[int] | None = None,
        ids: Sequence[int] | None = None,
        **padding: int,
    ) -> None:
        plan = self.manager.prepare_forward([(r, n) for r, _, n in work], **padding)
        self.write(plan, [s for _, s, _ in work])
        self.manager.commit(plan, accepted, ids=ids)


def layers_to_run(schema: CacheSchema) -> tuple[int, ...]:
    """All layers; with online state only those that have it, as the others are the same."""
    return tuple(
        layer.spec.layer for layer in schema.layers if layer.online or schema.hca_state == "raw"
    )


def logical_bytes(stack: Stack, request: Request) -> tuple[Tensor, Tensor]:
    """A request's blocks in logical order, and its slot: the same for the same life, wherever
    the allocator put it."""
    manager = stack.manager
    blocks = stack.schema.blocks_for(request.length)
    ids = torch.tensor(request.block_ids[:blocks], dtype=torch.long)
    return (
        manager.memory.block_arena.bytes.cpu()[ids].clone(),
        manager.memory.slot_arena.bytes.cpu()[request.slot].clone(),
    )


def readable_bytes(stack: Stack, request: Request) -> dict[str, Tensor]:
    """Only what a later step can read at the request's length: entries and keys below it, the
    window's rows, and the tail rows that the unfinished and the previous group need."""
    schema, length = stack.schema, request.length
    result: dict[str, Tensor] = {}
    for layer in stack.layers:
        handle = stack.manager.acquire(layer)
        spec, state = handle.schema.spec, handle.memory.state
        window = [
            p % schema.ring_rows for p in range(max(0, length - schema.model.window + 1), length)
        ]
        for name, view in state.views.items():
            if name.startswith("swa"):
                rows = window
            elif name == "tail_state":
                newest = range(max(length - length % spec.ratio, length - 1), length)
                rows = [p % handle.schema.state_rows for p in newest]
            elif name.endswith("a"):
                start = length - length % spec.ratio
                tokens = range(start, length)
                if handle.schema.tail_skips_last:
                    rows = [(p - p // spec.ratio) % handle.schema.tail_a_rows for p in tokens]
                else:
                    rows = [p % handle.schema.tail_a_rows for p in tokens]
            else:
                start = max(0, length - length % spec.ratio - spec.ratio)
                rows = [p % handle.schema.tail_b_rows for p in range(start, length)]
            result[f"{layer}.{name}"] = _as_bytes(view[request.slot][rows])
        if spec.owns_entries:
            for name, view in handle.memory.pool.views.items():
                result[f"{layer}.{name}"] = _as_bytes(
                    torch.stack(
                        [
                            view[request.block_ids[e * spec.ratio // schema.block_tokens]][
                                e % handle.schema.entries_per_block
                            ]
                            for e in range(length // spec.ratio)
                        ]
                    )
                    if length >= spec.ratio
                    else view[:0, 0]
                )
    return result


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).cpu().clone()

"""A small model in which attention matters: what a layer reads goes into what the next one writes.

Projections are sums of shifted and scaled copies of a token's own vector, so that no bit depends on
which tokens share a step; all else is the library's own append, select and attend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.model import AttentionType
from dsv4.ops.calls import CompressorWeights, KeyProjection, LayerWeights
from dsv4.rope import rope_table
from tests.support.numbers import Numbers

SHIFTS = (0, 1, 5, 17)


class Mix:
    """[tokens, width] → [tokens, out]: each channel from a few others."""

    def __init__(self, width: int, out: int, numbers: Numbers, device: str) -> None:
        copies = -(-out // width)
        self._scales = numbers.normal(len(SHIFTS), copies, width).to(device)
        self._out = out

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()[:, None]
        total = torch.zeros((), device=x.device)
        for scale, shift in zip(self._scales, SHIFTS, strict=True):
            total = total + scale * wide.roll(shift, dims=-1)
        return total.flatten(1)[:, : self._out].contiguous()


class AttendingModel:
    """Hidden states as wide as a head; one residual stream through all layers."""

    def __init__(
        self, schema: CacheSchema, *, vocabulary: int = 512, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.schema, model = schema, schema.model
        numbers = Numbers(seed)
        width = model.head_dim

        def normal(*shape: int) -> Tensor:
            return numbers.normal(*shape).to(device)

        def mix(out: int) -> Mix:
            return Mix(width, out, numbers, device)

        self.embedding = normal(vocabulary, width)
        tables = {
            yarn: rope_table(model, yarn=yarn, tokens=schema.max_context).to(device)
            for yarn in (False, True)
        }
        self.layers = []
        for layer in schema.layers:
            layouts = [schema.layout.compressor(layer.spec.layer, k) for k in ("main", "index")]
            compressors = [
                found
                and CompressorWeights(
                    ape=normal(found.ratio, found.columns) if found.key_page is None else None,
                    norm=torch.ones(found.width, device=device),
                )
                for found in layouts
            ]
            mixes = [mix(f.columns) for f in layouts if f for _ in range(1 + f.gated)]
            projection = None
            if layouts[0] is not None and layouts[0].key_page is not None:
                weight = normal(model.index_dim, width) * width**-0.5
                norm = torch.ones(model.index_dim, device=device)
                projection = KeyProjection(weight=weight.to(torch.bfloat16), norm=norm)
            self.layers.append(
                {
                    "weights": LayerWeights(
                        rope=tables[layer.spec.yarn],
                        compressor=compressors[0],
                        index_compressor=compressors[1],
                        index_projection=projection,
                        kv_norm=torch.ones(width, device=device),
                    ),
                    "kv": mix(width),
                    "projections": mixes,
                    "gated": layouts[0] is None or layouts[0].gated,
                    "q": mix(model.heads * width),
                    "index_q": mix(model.index_heads * model.index_dim),
                    "index_weights": mix(model.index_heads),
                    "out": mix(width),
                    "sink": normal(model.heads),
                }
            )

    def step(
        self, manager: KVCacheManager, work: Sequence[tuple[Request, Sequence[int]]]
    ) -> Tensor:
        """Runs new tokens of each request through all layers; hidden states of all of them."""
        plan = manager.prepare_forward([(request, len(ids)) for request, ids in work])
        ids = [token for _, row in work for token in row]
        x = self.run(manager, plan.batch, ids)
        manager.commit(plan, ids=ids)
        return x

    def run(self, manager: KVCacheManager, batch: Batch, ids: Sequence[int]) -> Tensor:
        """Hidden states of the tokens of a batch. Padding rows get those of token 0."""
        rest = [0] * (batch.padded_tokens - len(ids))
        padded = torch.tensor([*ids, *rest], dtype=torch.int64)
        return self.run_padded(manager, batch, padded.to(self.embedding.device))[: batch.num_tokens]

    def run_padded(self, manager: KVCacheManager, batch: Batch, ids: Tensor) -> Tensor:
        """The same for `ids` on the device, with rows for padding. It can be captured."""
        x, model, device = self.embedding[ids], self.schema.model, ids.device
        candidates = torch.empty(
            (len(ids), model.candidate_blocks), dtype=torch.int32, device=device
        )
        selections: dict[int | None, Tensor] = {}
        for nth, layer in enumerate(self.layers):
            handle, spec = manager.acquire(nth, batch), self.schema.layers[nth].spec
            projections = [mix(x) for mix in layer["projections"]]
            if not layer["gated"]:
                projections = [made.to(torch.bfloat16) for made in projections]
            handle.append(layer["kv"](x).to(torch.bfloat16), *projections, weights=layer["weights"])
            indices = None
            if spec.has_indexer:
                bounded = spec.candidates_of is not None or nth in model.candidate_sources
                q = layer["index_q"](x).view(len(ids), model.index_heads, model.index_dim)
                indices = handle.select(
                    q.to(torch.bfloat16),
                    layer["index_weights"](x).to(torch.bfloat16),
                    rope=layer["weights"].rope,
                    candidates=candidates if bounded else None,
                )
                selections[nth] = indices
            elif spec.attention is AttentionType.CSA:
                indices = selections[spec.selector]
            q = layer["q"](x).view(len(ids), model.heads, model.head_dim) / 8
            out, _ = handle.attend(q.to(torch.bfloat16), layer["sink"], indices)
            # a plain sum over heads, one after the other, then bounded: no bit depends on the batch
            heads = out.float().unbind(1)
            read = heads[0]
            for head in heads[1:]:
                read = read + head
            x = 0.5 * x + torch.tanh(layer["out"](read))
        return x

"""Attention of one V4 layer of transformers on our cache, with the layer's own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CacheSchema
from dsv4.integrations.transformers.ranks import Ranks
from dsv4.ops.calls import CompressorWeights, LayerWeights
from dsv4.rope import rotation_table


@dataclass(slots=True, eq=False, kw_only=True)
class RunningStep:
    """What the layers of one model share: the cache, rotation tables by transformers' name of them
    ("main", "compress"), who else computes it, and the plan of the step that runs now."""

    manager: KVCacheManager
    rope_tables: dict[str, Tensor]
    ranks: Ranks | None = None
    plan: ForwardPlan | None = None


class FastAttention:
    """Takes the place of the forward of one DeepseekV4Attention.

    Hidden states are [1, tokens, hidden], the tokens of the plan one after the other. Projections,
    norms and rotation of queries and window rows are the module's own; compressors write entries
    and keys through the cache, which also selects and attends. No dense mask, no concatenation.
    """

    def __init__(self, attention: Any, step: RunningStep) -> None:
        schema = step.manager.schema
        self.attention, self.step = attention, step
        self.replaced: Any = None
        self.rope_table = step.rope_tables[attention.rope_layer_type]
        self.value_dtype: torch.dtype = getattr(torch, schema.entry_format.value_dtype)
        self.index_dtype: torch.dtype = getattr(torch, schema.index_format.value_dtype)
        # scores are rounded where keys are quantised, as trained; transformers has them in fp32
        self.round_scores = rounds_scores(schema)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        module, tokens = self.attention, hidden_states.shape[1]
        cos, sin = position_embeddings[module.rope_layer_type]
        residual = module.q_a_norm(module.q_a_proj(hidden_states))
        q = module.q_b_norm(module.q_b_proj(residual).view(1, tokens, -1, module.head_dim))
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)[0].to(self.value_dtype)
        kv = module.kv_norm(module.kv_proj(hidden_states)).unsqueeze(2)
        kv = apply_rotary_pos_emb(kv, cos, sin, unsqueeze_dim=2)[0, :, 0].to(self.value_dtype)

        handle = self.step.manager.acquire(module.layer_idx, self.step.plan)
        compressor = module.compressor
        indexer = getattr(compressor, "indexer", None)
        projections = [
            project(hidden_states)[0].float()
            for owner in (compressor, indexer)
            if owner is not None
            for project in (owner.kv_proj, owner.gate_proj)
        ]
        weights = LayerWeights(
            rope=self.rope_table,
            compressor=_compressor_weights(compressor),
            index_compressor=_compressor_weights(indexer),
        )
        handle.append(kv, *projections, weights=weights)

        indices = None
        if indexer is not None:
            scale = indexer.scorer.softmax_scale * indexer.scorer.weights_scaling
            index_q = indexer.q_b_proj(residual)[0]
            head_weights = indexer.scorer.weights_proj(hidden_states)[0]
            if self.step.ranks is not None:
                index_q, head_weights = self.step.ranks.gather_heads(index_q, head_weights)
            indices = handle.select(
                index_q.view(tokens, -1, indexer.head_dim).to(self.index_dtype),
                (head_weights.float() * scale).to(self.index_dtype),
                rope=self.rope_table,
                round_bf16=self.round_scores,
            )
        out, _ = handle.attend(
            q.contiguous(), module.sinks.float(), indices, inverse_rope=self.rope_table
        )
        grouped = out.to(hidden_states.dtype).reshape(1, tokens, module.config.o_groups, -1)
        return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None


def rounds_scores(schema: CacheSchema) -> bool:
    """Whether scores are bf16: where index keys are coded, as the model was trained."""
    return any(part.code is not None for part in schema.index_format.parts)


def make_rope_tables(rotary: Any, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """fp32 [tokens, rope_dim] each, cos then sin, from the frequencies and the scaling of the
    model's own rotary module. Its own cos and sin are the vector maths library's of the machine."""
    tables = {}
    for name in rotary.layer_types:
        frequencies = getattr(rotary, f"{name}_inv_freq")
        scaling = getattr(rotary, f"{name}_attention_scaling")
        tables[name] = rotation_table(frequencies, tokens=tokens, device=device) * scaling
    return tables


def _compressor_weights(compressor: Any) -> CompressorWeights | None:
    if compressor is None:
        return None
    return CompressorWeights(
        ape=compressor.position_bias.float().contiguous(),
        norm=compressor.kv_norm.weight.float().contiguous(),
    )

"""Attention of one V4 layer of transformers with our cache and the layer's own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, functional
from torch.nn.modules import module as modules
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from dsv4.cache.batch import Batch
from dsv4.cache.schema import CacheSchema
from dsv4.integrations.transformers.lockstep import Manager
from dsv4.integrations.transformers.model import Ranks
from dsv4.ops.calls import CompressorWeights, LayerWeights
from dsv4.ops.device import on_device
from dsv4.rope import rotation_table


@dataclass(slots=True, eq=False, kw_only=True)
class RunningStep:
    """What the layers of one model share: the cache, rotation tables by layer and by transformers'
    name ("main", "compress"), the ranks that compute it, and the batch of the current step."""

    manager: Manager
    rope_tables: dict[int, dict[str, Tensor]]
    ranks: Ranks | None = None
    batch: Batch | None = None


Stamp = list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The parameters of a layer that are used other than in products, in fp32, and the state of the
    parameters that they were made from. These are kept with their memory, so that nothing else can
    be allocated there."""

    stamp: Stamp
    made_of: tuple[Tensor, ...]
    sinks: Tensor
    weights: LayerWeights


class FastAttention:
    """Replaces the forward of one DeepseekV4Attention.

    Hidden states are [1, tokens, hidden], the tokens of the plan in order. Projections, norms and
    rotation of queries and window rows are the module's own; compressors write entries and keys
    through the cache, which also selects and attends. It makes no dense mask and no concatenation.

    Submodules are taken from `_modules`: looking them up by name costs a Python call.
    """

    def __init__(self, attention: Any, step: RunningStep) -> None:
        schema = step.manager.schema
        self.attention, self.step = attention, step
        self.replaced: Any = None
        self.rope_table = step.rope_tables[attention.layer_idx][attention.rope_layer_type]
        self.value_dtype: torch.dtype = getattr(torch, schema.entry_format.value_dtype)
        self.index_dtype: torch.dtype = getattr(torch, schema.index_format.value_dtype)
        # scores are rounded where keys are quantised, as in training; transformers has them in fp32
        self.round_scores = rounds_scores(schema)
        self.o_groups: int = attention.config.o_groups
        ranks = step.ranks  # where this layer's index heads are divided
        self.ranks = (
            None if ranks is None or attention.layer_idx not in ranks.split_heads else ranks
        )
        self._constants: Constants | None = None

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        module, own, tokens = self.attention, self.attention._modules, hidden_states.shape[1]
        cos, sin = position_embeddings[module.rope_layer_type]
        residual = own["q_a_norm"](project(own["q_a_proj"], hidden_states))
        q = project(own["q_b_proj"], residual).view(1, tokens, -1, module.head_dim)
        q = own["q_b_norm"](q)
        kv = own["kv_norm"](project(own["kv_proj"], hidden_states)).unsqueeze(2)
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)[0].to(self.value_dtype)
        kv = apply_rotary_pos_emb(kv, cos, sin, unsqueeze_dim=2)[0, :, 0].to(self.value_dtype)

        handle = self.step.manager.acquire(module.layer_idx, self.step.batch)
        constants = self._known_constants()
        projections = []
        indexer = None
        if (compressor := own.get("compressor")) is not None:
            indexer = compressor._modules.get("indexer")
            for owner in (compressor, indexer):
                if owner is not None:
                    for name in ("kv_proj", "gate_proj"):
                        projected = project(owner._modules[name], hidden_states)
                        projections.append(projected[0].float())
        handle.append(kv, *projections, weights=constants.weights)

        indices = None
        if indexer is not None:
            scorer = indexer._modules["scorer"]
            scale = scorer.softmax_scale * scorer.weights_scaling
            index_q = project(indexer._modules["q_b_proj"], residual)[0]
            head_weights = project(scorer._modules["weights_proj"], hidden_states)[0]
            if self.ranks is not None:
                index_q, head_weights = self.ranks.gather_heads(index_q, head_weights)
            indices = handle.select(
                index_q.view(tokens, -1, indexer.head_dim).to(self.index_dtype),
                (head_weights.float() * scale).to(self.index_dtype),
                rope=self.rope_table,
                round_bf16=self.round_scores,
            )
        out, _ = handle.attend(
            q.contiguous(), constants.sinks, indices, inverse_rope=self.rope_table
        )
        grouped = out.to(hidden_states.dtype).reshape(1, tokens, self.o_groups, -1)
        return project(own["o_b_proj"], own["o_a_proj"](grouped).flatten(2)), None

    def _known_constants(self) -> Constants:
        """Made again if a parameter was replaced, written to, or moved."""
        parameters = [self.attention._parameters["sinks"]]
        compressor = self.attention._modules.get("compressor")
        while compressor is not None:
            parameters.append(compressor._parameters["position_bias"])
            parameters.append(compressor._modules["kv_norm"]._parameters["weight"])
            compressor = compressor._modules.get("indexer")
        stamp = []
        for parameter in parameters:
            version = -1 if parameter.is_inference() else parameter._version
            stamp.append((id(parameter), version, parameter.data_ptr()))
        known = self._constants
        if known is None or known.stamp != stamp:
            known = self._constants = self._make_constants(stamp, parameters)
        return known

    def _make_constants(self, stamp: Stamp, parameters: list[Tensor]) -> Constants:
        with torch.inference_mode(False), torch.no_grad():
            memory = [parameter.detach() for parameter in parameters]
            sinks, *rest = (each.float().contiguous() for each in memory)
        compressors = [
            CompressorWeights(ape=ape, norm=norm)
            for ape, norm in zip(rest[::2], rest[1::2], strict=True)
        ]
        main, index, *_ = [*compressors, None, None]
        weights = LayerWeights(rope=self.rope_table, compressor=main, index_compressor=index)
        return Constants(stamp=stamp, made_of=(*parameters, *memory), sinks=sinks, weights=weights)


class SplitAttention(FastAttention):
    """For a model on several devices: what the layer launches goes to its own device."""

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, None]:
        with on_device(self.rope_table.device):
            return super().__call__(*args, **options)


def project(module: Any, x: Tensor) -> Tensor:
    """`module(x)`. For a Linear without hooks only the product: torch makes five Python calls
    around it."""
    if (
        type(module) is Linear
        and "forward" not in module.__dict__
        and not (
            module._forward_pre_hooks
            or module._forward_hooks
            or module._compiled_call_impl
            or modules._global_forward_pre_hooks
            or modules._global_forward_hooks
        )
    ):
        own: dict[str, Any] = module._parameters
        return functional.linear(x, own["weight"], own["bias"])
    result: Tensor = module(x)
    return result


def rounds_scores(schema: CacheSchema) -> bool:
    """Whether scores are bf16: if index keys are quantised, as in training."""
    return any(part.code is not None for part in schema.index_format.parts)


def make_rope_tables(rotary: Any, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """fp32 [tokens, rope_dim] each, cos then sin, from the frequencies and the scaling of the
    model's own rotary module. That module's own cos and sin depend on the machine's vector maths
    library."""
    tables = {}
    for name in rotary.layer_types:
        frequencies = getattr(rotary, f"{name}_inv_freq")
        scaling = getattr(rotary, f"{name}_attention_scaling")
        tables[name] = rotation_table(frequencies, tokens=tokens, device=device) * scaling
    return tables

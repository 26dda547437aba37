"""The layers of a small V4: what transformers' DeepseekV4ForCausalLM computes with one residual
stream and one expert, under the same names of weights.

Everything here works on the last axis of `x` [..., hidden], so the form on the cache (cached.py)
and the form for training (parallel.py) share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dsv4.extras import needed_by

with needed_by("the demo model"):
    import torch
    from torch import Tensor
    from torch.nn.functional import linear, silu

from dsv4.errors import ConfigError
from dsv4.model import LayerSpec, ModelSpec
from dsv4.rope import rope_table

Weights = Mapping[str, Tensor]
GRID = 65536  # exact products take multiples of 1 / GRID


@dataclass(frozen=True, kw_only=True)  # no slots: tables are made once
class Network:
    """A model by its config.json (`config`) and its `weights` in fp32, or in fp64 if `is_exact`."""

    config: Mapping[str, Any]
    weights: Weights
    is_exact: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a config that this file does not compute."""
        for name, value in (("hc_mult", 1), ("n_routed_experts", 1), ("num_experts_per_tok", 1)):
            if self.config.get(name) != value:
                raise ConfigError(
                    f"the config has {name}={self.config.get(name)!r}, and this small model has "
                    f"one residual stream and one expert ({name}={value}): run other models with "
                    f"transformers"
                )

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_config(self.config)

    def exact(self) -> Network:
        """The same network with sums that are exact: what it computes of a token does not depend,
        to the last bit, on the tokens that are computed with it. That takes weights of few bits,
        none of which is very small, as they are shipped; what they multiply is rounded to GRID."""
        wide = {name: weight.double() for name, weight in self.weights.items()}
        return replace(self, weights=wide, is_exact=True)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.is_exact:
            return linear(x, weight)
        return linear(x.double().mul_(GRID).round_().div_(GRID), weight).float()

    def vector(self, name: str) -> Tensor:
        """The weight of a norm."""
        return self.weights[name].float()

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(network=self, spec=layer, name=f"model.layers.{layer.layer}.")
            for layer in self.spec.layers
        ]

    def embed(self, ids: Tensor) -> Tensor:
        return self.weights["model.embed_tokens.weight"][ids].float()

    def logits(self, x: Tensor) -> Tensor:
        x = normed(x, self.vector("model.norm.weight"), self.spec.rms_eps)
        return self.linear(x, self.weights["lm_head.weight"])


@dataclass(frozen=True, kw_only=True)  # no slots: weights are looked up once
class Block:
    """One layer. `x` of attention is what `attention_input` gives, `residual` the low-rank vector
    that queries and index queries share."""

    network: Network
    spec: LayerSpec
    name: str

    @cached_property
    def attention(self) -> dict[str, Tensor]:
        """The weights of the attention, by the names that are left after the layer's."""
        first = self.name + "self_attn."
        return {
            name.removeprefix(first).removesuffix(".weight"): _kept(name, weight)
            for name, weight in self.network.weights.items()
            if name.startswith(first)
        }

    @cached_property
    def rope(self) -> Tensor:
        """The rotation table of all positions."""
        spec = self.network.spec
        return rope_table(spec, yarn=self.spec.yarn, tokens=spec.max_context)

    def attention_input(self, hidden: Tensor) -> Tensor:
        return self._normed(hidden, "input_layernorm")

    def residual(self, x: Tensor) -> Tensor:
        weights = self.attention
        return normed(
            self.network.linear(x, weights["q_a_proj"]),
            weights["q_a_norm"],
            self.network.spec.rms_eps,
        )

    def queries(self, residual: Tensor) -> Tensor:
        """[..., heads, head_dim], after their norm and before RoPE."""
        spec = self.network.spec
        q = self.network.linear(residual, self.attention["q_b_proj"]).unflatten(
            -1, (spec.heads, spec.head_dim)
        )
        return normed(q, None, spec.rms_eps)

    def kv(self, x: Tensor) -> Tensor:
        """Raw: before norm and RoPE."""
        return self.network.linear(x, self.attention["kv_proj"])

    def pooled(self, x: Tensor, compressor: str) -> tuple[Tensor, Tensor]:
        """Values and gate logits of "compressor" or "compressor.indexer", without their bias."""
        weights = self.attention
        values, gates = weights[f"{compressor}.kv_proj"], weights[f"{compressor}.gate_proj"]
        return self.network.linear(x, values), self.network.linear(x, gates)

    def index_queries(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [..., index heads, index_dim] before RoPE, and their scaled weights."""
        spec, weights = self.network.spec, self.attention
        q = self.network.linear(residual, weights["compressor.indexer.q_b_proj"])
        scale = (spec.index_dim * spec.index_heads) ** -0.5
        per_head = self.network.linear(x, weights["compressor.indexer.scorer.weights_proj"]) * scale
        return q.unflatten(-1, (spec.index_heads, spec.index_dim)), per_head

    def output(self, attended: Tensor) -> Tensor:
        """[..., heads, head_dim] → [..., hidden]: groups of heads, then all of them."""
        weights, groups = self.attention, int(self.network.config["o_groups"])
        per_group = weights["o_a_proj"].unflatten(0, (groups, -1))
        heads = attended.flatten(-2).unflatten(-1, (groups, -1))
        low = [
            self.network.linear(heads[..., nth, :], weight) for nth, weight in enumerate(per_group)
        ]
        return self.network.linear(torch.cat(low, dim=-1), weights["o_b_proj"])

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The shared expert and the only routed one."""
        first, weights = self.name + "mlp.", self.network.weights
        x, limit = self._normed(hidden, "post_attention_layernorm"), self._limit
        shared = first + "shared_experts."
        gate, up = (
            self.network.linear(x, weights[f"{shared}{name}_proj.weight"])
            for name in ("gate", "up")
        )
        result = self.network.linear(swiglu(gate, up, limit), weights[shared + "down_proj.weight"])
        gate, up = self.network.linear(x, weights[first + "experts.gate_up_proj"][0]).chunk(
            2, dim=-1
        )
        scale = float(self.network.config["routed_scaling_factor"])
        routed = self.network.linear(
            swiglu(gate, up, limit), weights[first + "experts.down_proj"][0]
        )
        return result + routed * scale

    @property
    def _limit(self) -> float:
        return float(self.network.config["swiglu_limit"])

    def _normed(self, hidden: Tensor, name: str) -> Tensor:
        weight = self.network.vector(f"{self.name}{name}.weight")
        return normed(hidden, weight, self.network.spec.rms_eps)


def _kept(name: str, weight: Tensor) -> Tensor:
    """Projections as the network has them; what the cache itself applies is fp32."""
    return weight if "_proj" in name else weight.float()


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.float()  # under autocast it may be bf16
    result = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return result if weight is None else result * weight


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

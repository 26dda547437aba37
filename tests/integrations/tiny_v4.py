"""Small DeepSeek-V4 models of transformers with all layer kinds, and ways to run them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from dsv4.integrations.transformers import PagedCache
from tests.support.numbers import Numbers

VOCABULARY = 128
KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
POISON = 0xFF


def tiny_config(**changes: Any) -> DeepseekV4Config:
    """Top-k of 16 entries, so that selection matters from 64 tokens on; random enough weights that
    greedy tokens vary. 32 index heads: with few, scores tie at 0."""
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": len(changes.get("layer_types", KINDS)),
        "layer_types": list(KINDS),
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "moe_intermediate_size": 32,
        "index_n_heads": 32,
        "index_head_dim": 32,
        "index_topk": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return DeepseekV4Config(**options | changes)


@cache
def tiny_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, index_topk: int = 16
) -> DeepseekV4ForCausalLM:
    """Biases and sinks are random too: as zeros they would hide who adds them."""
    model = DeepseekV4ForCausalLM(tiny_config(index_topk=index_topk))
    return draw_weights(model, seed).to(dtype).eval()


@torch.no_grad()
def draw_weights(
    model: DeepseekV4ForCausalLM, seed: int, *, norms: float = 0.0
) -> DeepseekV4ForCausalLM:
    """Weights that are the same on every machine, for those that transformers draws: biases and
    sinks of size 1, norms 1 ± `norms`, hash routes, all else of the config's initializer_range."""
    numbers, config = Numbers(seed), model.config
    for name, parameter in model.named_parameters():
        drawn = numbers.normal(*parameter.shape).to(parameter)
        if name.endswith(("position_bias", "sinks")):
            parameter.copy_(drawn)
        elif "norm" in name:
            parameter.copy_(1.0 + norms * drawn)
        elif not name.endswith(("base", "scale")):
            parameter.copy_(config.initializer_range * drawn)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(numbers.integers(0, config.n_routed_experts, *buffer.shape))
    return model


def paged(
    model: DeepseekV4ForCausalLM, *, max_batch: int = 2, max_context: int = 640, **options: Any
) -> PagedCache:
    """A cache whose free memory is full of 0xFF: NaN in every float format."""
    cache = PagedCache.for_model(model, max_batch=max_batch, max_context=max_context, **options)
    cache.manager.memory.block_arena.bytes.fill_(POISON)
    cache.manager.memory.slot_arena.bytes.fill_(POISON)
    return cache


def own_cache(model: DeepseekV4ForCausalLM) -> Cache:
    return DynamicCache(config=model.config)


def prompt(tokens: int, *, rows: int = 1, seed: int = 0) -> Tensor:
    return Numbers(seed).integers(0, VOCABULARY, rows, tokens)


def generate(
    model: DeepseekV4ForCausalLM, ids: Tensor, past: Cache, *, new_tokens: int, **options: Any
) -> Any:
    """Greedy, with the logits of every step."""
    return model.generate(
        ids,
        past_key_values=past,
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


@torch.no_grad()
def run(
    model: DeepseekV4ForCausalLM, ids: Tensor, past: Cache, steps: Sequence[int]
) -> list[Tensor]:
    """The logits of `ids` [rows, n] run in steps of these many tokens, which sum to n."""
    logits = []
    for piece in ids.split(list(steps), dim=1):
        logits.append(model(input_ids=piece, past_key_values=past, use_cache=True).logits)
    return logits


def assert_same_generation(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    assert_same_logits(found.logits, expected.logits)


def assert_same_logits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit, and no NaN."""
    assert len(found) == len(expected)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.isfinite(ours).all(), f"step {step}"
        assert torch.equal(ours, theirs), f"step {step}: {(ours - theirs).abs().max()}"

"""Small models on the fast path, with poisoned arenas, and the plain model beside them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from dsv4.cache.manager import KVCacheManager
from dsv4.integrations.transformers.accelerate import accelerate, restore
from tests.integrations.tiny_v4 import POISON, draw_weights, tiny_config

KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)


@cache
def plain_model(
    seed: int = 0, index_topk: int = 16, dtype: torch.dtype = torch.float32
) -> DeepseekV4ForCausalLM:
    """A model that nothing is done to, with experts by hash and by router. Biases, sinks, norms and
    hash routes are random: as zeros and ones they would hide who applies them."""
    config = tiny_config(
        layer_types=list(KINDS),
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        index_topk=index_topk,
    )
    return draw_weights(DeepseekV4ForCausalLM(config).eval(), seed, norms=0.2).to(dtype)


@contextmanager
def fast(
    plain: DeepseekV4ForCausalLM, *, max_batch: int = 4, max_context: int = 640, **options: Any
) -> Iterator[DeepseekV4ForCausalLM]:
    """A copy of a model, accelerated; free memory of its cache is 0xFF: NaN in every float."""
    model = copy.deepcopy(plain)
    options = {"records": "bf16"} | options
    accelerate(model, max_batch=max_batch, max_context=max_context, **options)
    manager = manager_of(model)
    for part in getattr(manager, "managers", (manager,)):  # one per device
        part.memory.block_arena.bytes.fill_(POISON)
        part.memory.slot_arena.bytes.fill_(POISON)
    yield model
    manager.check_invariants()
    restore(model)


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward of the model's own code ran."""
    forward = vars(model.model)["forward"]
    own, seen = forward._forward, []

    def count(*given: Any, **options: Any) -> Any:
        seen.append(options["input_ids"].shape[1])
        return own(*given, **options)

    forward._forward = count
    yield seen
    forward._forward = own


def manager_of(model: DeepseekV4ForCausalLM) -> KVCacheManager:
    manager: KVCacheManager = vars(model.model)["forward"].step.manager
    return manager


def generate(model: DeepseekV4ForCausalLM, ids: Tensor, new_tokens: int, **options: Any) -> Any:
    """Greedy, with the logits of every step."""
    return model.generate(
        ids,
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    difference = (found - expected).abs().max().item() if found.numel() else 0.0
    assert difference <= tolerance, f"{difference} > {tolerance}"

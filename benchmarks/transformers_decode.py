"""Decoding with transformers: the fast path and transformers' own cache, token by token.

A few layers of each kind with V4-Flash's attention, random weights, few experts, one row. Contexts
are not computed: both caches are filled with random contents, as a prompt of that length leaves
them. Times are wall-clock times a token, host included, as a loop over `model(...)` sees them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from benchmarks.case import Case, Measurement
from dsv4.cache.manager import KVCacheManager
from dsv4.integrations.transformers import PagedCache, transformers_cache_bytes
from dsv4.integrations.transformers.accelerate import accelerate, restore
from dsv4.units import format_tokens

CONTEXTS = (8_192, 65_536, 524_288)
STEPS = 16
WARM_UP_STEPS = 4
COUNTED_STEPS = 1
STEP_TOKENS = 8192
FLASH: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 4096,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["moe"] * 5,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 8,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1_048_576,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """`cache_bytes`: what the cache holds for the context. `step_bytes`: what a step allocates
    besides, at its peak, `launches` its kernels, copies and fills; 0 where the device does not
    count."""

    microseconds: float
    cache_bytes: int
    step_bytes: int
    launches: int


def cases() -> Iterator[Case]:
    for context in CONTEXTS:
        yield Case(
            name=f"transformers decode at {format_tokens(context)}",
            suite="transformers",
            series=f"at {format_tokens(context)}",
            model="v4-flash",
            batch=1,
            context=context,
            measure=partial(_measure, context),
        )


def _measure(context: int) -> Measurement:
    model = make_model(device="cuda", dtype=torch.bfloat16)
    return compare(model, context, steps=STEPS)


@lru_cache(maxsize=1)
def make_model(*, device: str, dtype: torch.dtype, **changes: Any) -> Any:
    """V4-Flash's attention, or what `changes` make of it."""
    torch.manual_seed(0)
    with torch.device(device):
        return DeepseekV4ForCausalLM(DeepseekV4Config(**FLASH | changes)).to(dtype).eval()


def compare(model: Any, context: int, *, steps: int) -> Measurement:
    """The fast path, with transformers' own cache as the peer. The model is left as it was."""
    theirs = decode(model, filled_dynamic_cache(model, context), steps=steps)
    accelerate(
        model,
        max_batch=1,
        max_context=context + WARM_UP_STEPS + steps + COUNTED_STEPS,
        max_step_tokens=min(context, STEP_TOKENS),
    )
    try:
        cache = filled_paged_cache(model, context)
        moved = must_move_bytes(model, cache.manager, context)
        ours = decode(model, cache, steps=steps)
    finally:
        restore(model)
    return Measurement(
        microseconds=ours.microseconds,
        launches=ours.launches,
        must_move_bytes=moved,
        peers_us={"transformers": theirs.microseconds},
        cache_bytes={"dsv4": ours.cache_bytes, "transformers": theirs.cache_bytes},
        step_bytes={"dsv4": ours.step_bytes, "transformers": theirs.step_bytes},
        note=f"{len(model.model.layers)} layers; transformers: {theirs.launches} launches a token",
    )


@torch.no_grad()
def decode(model: Any, cache: Any, *, steps: int) -> Decoding:
    """Greedy decoding with a filled cache, after a few steps that compile and capture."""
    on_gpu = model.device.type == "cuda"
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    cache_bytes = stored_bytes(cache)
    began = before = 0.0
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            began = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
    int(token)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return Decoding(
        microseconds=1e6 * seconds / steps,
        cache_bytes=cache_bytes,
        step_bytes=int(peak),
        launches=counted_launches(lambda: model(token, past_key_values=cache)) if on_gpu else 0,
    )


def counted_launches(step: Callable[[], Any]) -> int:
    """What the device runs in a step, replayed kernels included, as the profiler counts it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def stored_bytes(cache: Any) -> int:
    if not isinstance(cache, PagedCache):
        return transformers_cache_bytes(cache)
    stats = cache.manager.stats()
    return stats.block_bytes_live + stats.slot_bytes_live


def must_move_bytes(model: Any, manager: KVCacheManager, context: int) -> int:
    """Weights that a token needs, and of the cache its window, all index keys, the chosen entries
    of CSA layers and all of HCA layers."""
    config, schema = model.config, manager.schema
    total = 0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            continue
        size = parameter.numel() * parameter.element_size()
        if ".experts." in name and ".shared_experts." not in name:
            size = size * config.num_experts_per_tok // config.n_routed_experts
        total += size
    for layer in schema.layers:
        entries = context // layer.spec.ratio if layer.spec.ratio else 0
        if layer.spec.index_keys != "none":
            total += entries * schema.index_format.record_bytes
            entries = min(entries, config.index_topk)
        total += entries * schema.entry_format.record_bytes
        total += schema.model.window * schema.window_format.record_bytes
    return total


# ---- caches as a prompt leaves them --------------------------------------------------------------


def filled_paged_cache(model: Any, context: int) -> PagedCache:
    """The cache of an accelerated model, with `context` tokens of random finite records."""
    manager: KVCacheManager = vars(model.model)["forward"].step.manager
    cache = PagedCache(manager, model)
    (request,) = cache.open_rows(1)
    for first in range(0, context, STEP_TOKENS):
        count = min(STEP_TOKENS, context - first)
        plan = manager.prepare_forward([(request, count)])
        plan.mark_appended()  # its records are made below
        manager.commit(plan)
    ids = torch.zeros((1, context), dtype=torch.int64, device=manager.device)
    cache.note_columns(ids, torch.ones((1, context), dtype=torch.bool))
    # bytes that are small numbers in every element format, and scales between 1/128 and 1
    for arena in (manager.memory.block_arena.bytes, manager.memory.slot_arena.bytes):
        arena.random_(56, 64)
    for layer in range(len(manager.schema.layers)):
        handle = manager.acquire(layer)
        for name, plane in (*handle.memory.pool.views.items(), *handle.memory.state.views.items()):
            if name in ("inv_scale", "indexer_scale", "swa_inv"):
                plane.random_(120, 128)
    return cache


def filled_dynamic_cache(model: Any, context: int) -> DynamicCache:
    """transformers' own cache filled with `context` tokens, a multiple of every ratio."""
    config = model.config

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=model.dtype, device=model.device)

    cache = DynamicCache(config=config)
    for kind, layer in zip(config.layer_types, cache.layers, strict=True):
        window = random(1, 1, config.sliding_window - 1, config.head_dim)
        layer.lazy_initialization(window, window)
        layer.keys = layer.values = window
        layer.cumulative_length = context
        if kind == "sliding_attention":
            continue
        for name in layer.compressed_kv:
            width = config.head_dim if name == "compressor" else config.index_head_dim
            columns = width * (2 if kind == "compressed_sparse_attention" else 1)
            layer.entry_count[name] = context // layer.compress_rate
            layer.compressed_kv[name] = random(1, layer.entry_count[name], width)
            layer.buffer_kv[name] = layer.buffer_gate[name] = random(1, 0, columns)
            if kind == "compressed_sparse_attention":
                layer.overlap_kv[name] = random(1, layer.compress_rate, width)
                layer.overlap_gate[name] = random(1, layer.compress_rate, width)
    return cache

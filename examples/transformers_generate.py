"""DeepSeek-V4 of transformers on this cache, in seconds on a CPU.

First only the cache is replaced and the model is unmodified: the answers are transformers' own.
Then `accelerate` replaces its attention, and prompts of different length run in one padded batch.

    python -m examples.transformers_generate
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4.integrations.transformers import PagedCache, accelerate, restore

VOCABULARY = 128
PROMPT_TOKENS = (70, 7, 33)
NEW_TOKENS = 12


def tiny_model() -> Any:
    """Random weights, one layer of each kind. Yours: DeepseekV4ForCausalLM.from_pretrained(...)"""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        index_n_heads=32,
        index_head_dim=32,
        initializer_range=0.4,  # wide enough that greedy tokens vary
        eos_token_id=None,
    )
    return DeepseekV4ForCausalLM(config).eval()


def padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask [rows, longest], padded on the left as a tokenizer for generation does."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def main() -> int:
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    model = tiny_model()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator) for n in PROMPT_TOKENS]
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = [model.generate(p[None], **greedy)[0, len(p) :].tolist() for p in prompts]

    # only the cache: one argument of generate
    cache = PagedCache.for_model(model, max_batch=1, max_context=256)
    ids = model.generate(prompts[0][None], past_key_values=cache, **greedy)
    swapped = ids[0, len(prompts[0]) :].tolist()
    print(f"PagedCache: {swapped}, {cache.memory_bytes().total:,} bytes allocated")

    # the fast path: all prompts at once; records="fp8_ds" is the default and takes fewer bytes
    accelerate(model, max_batch=len(prompts), max_context=256, records="bf16")
    ids, mask = padded(prompts)
    batch = model.generate(ids, attention_mask=mask, **greedy)[:, ids.shape[1] :].tolist()
    restore(model)
    for prompt, tokens in zip(prompts, batch, strict=True):
        print(f"accelerate, prompt of {len(prompt)} tokens: {tokens}")

    same = swapped == expected[0] and batch == expected
    print(f"as transformers generates them alone: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""The models of the demo: V4s of transformers with every layer kind, one that was trained to speak
and one of random weights."""

from __future__ import annotations

from typing import Any

from dsv4.extras import needed_by

with needed_by("dsv4.demo.model"):
    import torch
    from torch import Tensor

from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.errors import MissingExtra

VOCABULARY = 128
SEED = 0

# Records as large as the real model's (512 channels, 64 of them rotated; keys of 128), in a model
# of a million parameters. Scores of few index heads tie at 0, so there are 32. The top 16 of 64
# entries and more: selection matters.
CONFIG: dict[str, Any] = {
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.4,  # wide enough that greedy tokens vary
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_v4() -> Any:
    """A DeepseekV4ForCausalLM in fp32 with the same random weights every time. MissingExtra."""
    v4 = _transformers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return v4.DeepseekV4ForCausalLM(v4.DeepseekV4Config(**CONFIG)).eval()


def speaking_v4(checkpoint: Checkpoint) -> Any:
    """The trained demo model (dsv4/demo_model) as a DeepseekV4ForCausalLM in fp32. It does not stop
    by itself: the demo compares as many tokens of each row. Raises MissingExtra."""
    v4 = _transformers()
    network = checkpoint.network
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = v4.DeepseekV4ForCausalLM(v4.DeepseekV4Config(**{**network.config, **ends}))
    model.load_state_dict(dict(network.weights))
    return model.eval()


def _transformers() -> Any:
    try:
        import transformers.models.deepseek_v4 as v4
    except ImportError as error:
        raise MissingExtra(
            f"the demo runs a model of transformers 5.17 or newer ({error}): install it with "
            f"pip install 'dsv4[transformers]'"
        ) from error
    return v4


def random_prompt(tokens: int, *, seed: int) -> Tensor:
    """int64 [tokens]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (tokens,), generator=generator)

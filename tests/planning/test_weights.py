"""Bytes of a checkpoint from its config, against transformers' model and published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4.errors import ConfigError
from dsv4.model import PRESETS, AttentionType
from dsv4.planning.weights import (
    PRESET_WEIGHTS,
    WeightShapes,
    bytes_of,
    tensors_of,
    weight_shapes,
)
from tests.test_model import inference_config, transformers_config

TYPES = {
    AttentionType.SWA: "sliding_attention",
    AttentionType.CSA: "compressed_sparse_attention",
    AttentionType.HCA: "heavily_compressed_attention",
}
IN_CONFIG = {
    "vocab_size": 129_280,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro"])
def test_every_parameter_of_transformers_model_is_counted(name: str) -> None:
    """To the last one: routing tables too, which are buffers there, and biases of the router."""
    spec, shapes = PRESETS[name], PRESET_WEIGHTS[name]
    backbone = [layer for layer in spec.layers if not layer.draft]
    config = DeepseekV4Config(
        num_hidden_layers=len(backbone),
        layer_types=[TYPES[layer.attention] for layer in backbone],
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        index_topk=spec.index_topk,
        moe_intermediate_size=shapes.expert_width,
        n_routed_experts=shapes.experts,
        q_lora_rank=shapes.query_rank,
        o_groups=shapes.output_groups,
        o_lora_rank=shapes.output_rank,
    )
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    counted = sum(found.numel() for key, found in tensors.items() if "inv_freq" not in key)
    drafts = {layer.layer for layer in spec.layers if layer.draft}
    ours = [each for each in tensors_of(spec, shapes) if each.layer not in drafts]
    assert sum(each.parameters for each in ours) == counted


@pytest.mark.parametrize(
    ("name", "drafts", "gigabytes", "billions"),
    [
        ("v4-flash", False, 156, 284),  # docs/run_v4_flash.md; the name of the release
        ("v4-flash", True, 160, 291),
        ("v4-pro", False, 851, 1573),  # "1.6T"
    ],
)
def test_published_sizes(name: str, drafts: bool, gigabytes: int, billions: int) -> None:
    spec = PRESETS[name]
    without = {s.layer for s in spec.layers if s.draft and not drafts}
    found = [t for t in tensors_of(spec, PRESET_WEIGHTS[name]) if t.layer not in without]
    assert round(sum(each.bytes for each in found) / 1e9) == gigabytes
    parameters = sum(each.parameters for each in found if each.format != "int64")
    assert round(parameters / 1e9) == billions


@pytest.mark.parametrize("config", [transformers_config(**IN_CONFIG), {}])
def test_a_config_says_the_shapes(config: dict[str, Any]) -> None:
    if not config:
        own = {**IN_CONFIG, "moe_inter_dim": 2048, "dtype": "fp8", "n_activated_experts": 6}
        del own["moe_intermediate_size"], own["quantization_config"]
        config = inference_config(**own)
    assert weight_shapes(config) == PRESET_WEIGHTS["v4-flash"]


def test_formats_are_those_of_the_config() -> None:
    base = transformers_config(**{**IN_CONFIG, "expert_dtype": ...})
    found = weight_shapes(base)
    assert found is not None
    assert (found.expert_format, found.dense_format) == ("fp8", "fp8")
    found = weight_shapes({**base, "quantization_config": None, "torch_dtype": "bfloat16"})
    assert found is not None
    assert (found.expert_format, found.dense_format) == ("bf16", "bf16")
    sizes = [bytes_of(name, 128**2) for name in ("fp4", "fp8", "bf16", "fp32", "int64")]
    assert sizes == [8192 + 512, 16_385, 32_768, 65_536, 131_072]


def test_what_a_config_does_not_say_is_not_guessed() -> None:
    assert weight_shapes(transformers_config()) is None
    assert weight_shapes({**transformers_config(**IN_CONFIG), "kv_source_layer_ids": [2]}) is None


@pytest.mark.parametrize("key", ["vocab_size", "n_routed_experts", "hc_mult"])
@pytest.mark.parametrize("value", [-1, "many", 1.5, 2**40])
def test_nonsense_is_refused_with_the_keys_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        weight_shapes(transformers_config(**{**IN_CONFIG, key: value}))
    assert WeightShapes.__doc__

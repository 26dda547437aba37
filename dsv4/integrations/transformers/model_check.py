"""Which models the cache can serve, and the schema that fits one."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import torch
from transformers import DeepseekV4ForCausalLM

from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, SchemaMismatch
from dsv4.model import ModelSpec

# the format that keeps a model's own numbers
UNQUANTISED = {torch.bfloat16: "bf16", torch.float32: "fp32"}
BLOCK_TOKENS = 128


def require_type(model: Any) -> None:
    """Raises InvalidInput for anything but a DeepseekV4ForCausalLM of DeepSeek-V4."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if str(model_type).startswith("deepseek_v41"):
        raise InvalidInput(
            f"{type(model).__name__} is a DeepSeek-V4.1 (model_type {model_type!r}), which runs on "
            f"dsv4.KVCacheManager (docs/v41.md) and not through transformers: the integration "
            f"knows the layers of DeepSeek-V4 alone"
        )
    if not isinstance(model, DeepseekV4ForCausalLM):
        inside = getattr(model, "get_base_model", None)  # of PEFT's models
        if callable(inside) and isinstance(inside(), DeepseekV4ForCausalLM):
            raise InvalidInput(
                f"{type(model).__name__} wraps a DeepseekV4ForCausalLM: give "
                f"model.get_base_model(), and go on using the wrapper, which calls it"
            )
        raise InvalidInput(
            f"{type(model).__name__} is not a DeepseekV4ForCausalLM: this cache knows the layers "
            f"of DeepSeek-V4 alone"
        )


def require_v4(model: Any) -> None:
    """Raises InvalidInput for anything but a DeepseekV4ForCausalLM in bf16 or fp32."""
    require_type(model)
    if model.dtype not in UNQUANTISED:
        raise InvalidInput(
            f"the model is {model.dtype}, which no record format holds: convert it with "
            f"model.to(torch.bfloat16) or model.to(torch.float32)"
        )
    if model.device.type == "meta":
        raise InvalidInput(
            "the model is on the meta device and has no weights: load it with from_pretrained, or "
            "move it with model.to_empty(device=…) and load its state_dict"
        )


def _require_norms(model: Any) -> None:
    """Raises InvalidInput where transformers itself cannot run the model: from_pretrained keeps the
    weights of norms in fp32, and its norms then give fp32 to projections of bf16."""
    layer = model.model.layers[0]
    if not hasattr(layer, "input_layernorm"):
        return
    weight = layer.input_layernorm.weight
    probe = torch.zeros((1, 1, weight.shape[0]), dtype=model.dtype, device=weight.device)
    with torch.no_grad():
        given: torch.dtype = layer.input_layernorm(probe).dtype
    for name, module in layer.named_modules():
        if type(module) is torch.nn.Linear and module.weight.dtype != given:
            raise InvalidInput(
                f"the model's norms give {given}, for their weights are fp32, and {name} takes "
                f"{module.weight.dtype}, so transformers cannot run it with any cache: use "
                f"transformers 5.20 or newer, or for every DeepseekV4RMSNorm call "
                f"module.register_forward_hook(lambda module, args, out: out.to(args[0].dtype))"
            )


def model_spec(model: Any) -> ModelSpec:
    """The layers that transformers runs: the backbone without draft layers. ConfigError."""
    spec = ModelSpec.from_config(model.config.to_dict())
    return replace(spec, layers=tuple(layer for layer in spec.layers if not layer.draft))


def cache_schema(
    model: Any,
    *,
    max_context: int,
    records: str = "bf16",
    index: str | None = None,
    max_draft_tokens: int = 0,
) -> CacheSchema:
    """The layout for a model. "bf16" stands for unquantised and keeps an fp32 model in fp32; keys
    are unquantised beside unquantised records and "mxfp4" beside others unless `index` is given.
    Raises InvalidInput, ConfigError or SchemaError."""
    require_v4(model)
    _require_norms(model)
    spec = model_spec(model)
    if index is None:
        index = "bf16" if records == "bf16" else "mxfp4"
    unquantised = UNQUANTISED[model.dtype]
    group = lcm(1, *(layer.ratio for layer in spec.layers if layer.ratio))
    return CacheSchema.build(
        spec,
        block_tokens=-(-BLOCK_TOKENS // group) * group,
        max_context=max_context,
        max_draft_tokens=max_draft_tokens,
        entry_format=unquantised if records == "bf16" else records,
        index_format=unquantised if index == "bf16" else index,
    )


def require_schema(schema: CacheSchema, model: Any) -> None:
    """Raises SchemaMismatch unless the schema was made for a model of this shape, with tails that
    keep every token: transformers hands them over one by one and reads them back."""
    ours, theirs = schema.model, model_spec(model)
    for field in ("head_dim", "rope_dim", "index_dim", "window", "layers"):
        if getattr(ours, field) != getattr(theirs, field):
            raise SchemaMismatch(
                f"the cache was laid out for {ours.name} and the model differs in {field}: make "
                f"the cache with PagedCache.for_model(model, ...)"
            )
    if any(layer.online for layer in schema.layers):
        raise SchemaMismatch(
            "the cache was laid out with hca_state='online', which folds the tokens that "
            "PagedCache must hand back: lay it out with hca_state='raw'"
        )

"""Bytes of a V4 checkpoint, derived from its config, and how they divide. Torch-free.

The rule, by tensor of a layer:

    routed experts      3 × hidden × width each, in the config's `expert_dtype`: FP4 is half a byte
                        and one byte of scale per 32 numbers
    projections         of queries, keys, output, index queries and the shared expert: FP8, a byte
                        and one byte of scale per 128 × 128
    bf16                compressors (values and gates), router, weights of index heads, norms;
                        embeddings and head
    fp32                hyper-connections, positions in a group, sinks, biases of the router
    int64               experts of a token's id, in the first `hash_layers` layers

A draft (MTP) layer has all that of a layer, and two projections of hidden × hidden. For V4-Flash
the backbone comes to 156.0 GB, which is what its published files take.

Under tensor parallelism what has heads or a vocabulary is divided, and the shared expert; routed
experts are divided over all ranks of a stage; everything else is in every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsv4.errors import ConfigError, is_whole
from dsv4.model import AttentionType, LayerSpec, ModelSpec

Format = Literal["fp4", "fp8", "bf16", "fp32", "int64"]
Divided = Literal["experts", "heads", "nowhere"]
Part = Literal["routed experts", "everything else"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShapes:
    """What a config says of weights beyond what the cache must know. `streams` are those of the
    hyper-connections; `formats_from` says which keys the formats are from, or which are missing."""

    vocab: int
    experts: int
    expert_width: int
    query_rank: int
    output_groups: int
    output_rank: int
    experts_per_token: int = 6
    shared_experts: int = 1
    streams: int = 4
    hash_layers: int = 3
    expert_format: Format = "fp4"
    dense_format: Format = "fp8"
    formats_from: str = field(default="as published", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Some of a layer's tensors, of one format; `layer` is None outside of layers."""

    layer: int | None
    part: Part
    format: Format
    parameters: int
    divided: Divided = "nowhere"

    @property
    def bytes(self) -> int:
        return bytes_of(self.format, self.parameters)


_FLASH = WeightShapes(
    vocab=129_280,
    experts=256,
    expert_width=2048,
    query_rank=1024,
    output_groups=8,
    output_rank=1024,
)
_PRO = WeightShapes(
    vocab=129_280,
    experts=384,
    expert_width=3072,
    query_rank=1536,
    output_groups=16,
    output_rank=1024,
)
PRESET_WEIGHTS: dict[str, WeightShapes] = {
    "v4-flash": _FLASH,
    "v4-flash-0731": _FLASH,
    "v4-pro": _PRO,
}

# name of the field: transformers' key, DeepSeek's own
_KEYS = {
    "vocab": ("vocab_size", "vocab_size"),
    "experts": ("n_routed_experts", "n_routed_experts"),
    "expert_width": ("moe_intermediate_size", "moe_inter_dim"),
    "query_rank": ("q_lora_rank", "q_lora_rank"),
    "output_groups": ("o_groups", "o_groups"),
    "output_rank": ("o_lora_rank", "o_lora_rank"),
}
_MORE_KEYS = {
    "experts_per_token": ("num_experts_per_tok", "n_activated_experts"),
    "shared_experts": ("n_shared_experts", "n_shared_experts"),
    "streams": ("hc_mult", "hc_mult"),
    "hash_layers": ("num_hash_layers", "n_hash_layers"),
}
# as configs write them, in any case; fp16 takes what bf16 does
_FORMATS: dict[str, Format] = {
    **dict.fromkeys(("fp4", "mxfp4"), "fp4"),
    **dict.fromkeys(("fp8", "float8_e4m3fn"), "fp8"),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), "bf16"),
    **dict.fromkeys(("fp32", "float32"), "fp32"),
}


def weight_shapes(config: Mapping[str, Any]) -> WeightShapes | None:
    """Those of a V4 config; None if it lacks any of them, or is V4.1's, whose weights are of
    another kind. Weights without a quantization_config or a dtype are bf16, experts without an
    expert_dtype are like the others. Raises ConfigError for a value of the wrong kind, and for a
    format that is not known."""
    own, v41 = int("n_layers" in config), any("kv_source" in key for key in config)
    if v41 or any(config.get(keys[own]) is None for keys in _KEYS.values()):
        return None
    read: dict[str, int] = {}
    for name, keys in {**_KEYS, **_MORE_KEYS}.items():
        value = config.get(keys[own])
        if value is None:
            continue
        if not is_whole(value) or not 0 <= value < 2**31 or (name in _KEYS and not value):
            raise ConfigError(
                f"the config has {keys[own]}={value!r} where a whole number above 0 is needed"
            )
        read[name] = int(value)
    dense, dense_from = _dense_format(config)
    experts, experts_from = dense, "no expert_dtype"
    if config.get("expert_dtype") is not None:
        experts = _format("expert_dtype", config["expert_dtype"])
        experts_from = f"expert_dtype={config['expert_dtype']!r}"
    return WeightShapes(
        **read,
        expert_format=experts,
        dense_format=dense,
        formats_from=f"the config has {dense_from} and {experts_from}",
    )


def _dense_format(config: Mapping[str, Any]) -> tuple[Format, str]:
    """Of what is not a routed expert, and where the config says it."""
    quantised = config.get("quantization_config")
    if quantised is not None:
        key = "quantization_config.quant_method"
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        return _format(key, method), f"{key}={method!r}"
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None:
            return _format(key, config[key]), f"{key}={config[key]!r}"
    return "bf16", "neither quantization_config nor dtype"


def _format(key: str, value: object) -> Format:
    found = _FORMATS.get(str(value).lower().removeprefix("torch."))
    if found is None:
        raise ConfigError(
            f"the config has {key}={value!r}, a format of weights whose size is not known here: "
            f"give the size of all weights, --weights 150GB (known: {', '.join(_FORMATS)})"
        )
    return found


def bytes_of(format_name: Format, parameters: int) -> int:
    """Scales included."""
    match format_name:
        case "fp4":
            return parameters // 2 + -(-parameters // 32)
        case "fp8":
            return parameters + -(-parameters // 128**2)
        case "bf16":
            return 2 * parameters
        case "fp32":
            return 4 * parameters
        case "int64":
            return 8 * parameters


def tensors_of(model: ModelSpec, shapes: WeightShapes) -> list[Tensors]:
    """Every tensor of the checkpoint, those of a layer with the same fate taken together."""
    return list(_tensors(model, shapes))


def _tensors(model: ModelSpec, w: WeightShapes) -> Iterator[Tensors]:
    for spec in model.layers:
        yield from _of_layer(model, w, spec)

    def outside(format_name: Format, parameters: int, divided: Divided = "nowhere") -> Tensors:
        return Tensors(
            layer=None,
            part="everything else",
            format=format_name,
            parameters=parameters,
            divided=divided,
        )

    yield outside("bf16", 2 * w.vocab * model.hidden, "heads")
    yield outside("bf16", model.hidden)
    yield outside("fp32", w.streams * w.streams * model.hidden + w.streams + 1)


def _of_layer(model: ModelSpec, w: WeightShapes, spec: LayerSpec) -> Iterator[Tensors]:
    hidden, width = model.hidden, model.heads * model.head_dim

    def some(
        format_name: Format,
        parameters: int,
        divided: Divided = "nowhere",
        part: Part = "everything else",
    ) -> Tensors:
        return Tensors(
            layer=spec.layer,
            part=part,
            format=format_name,
            parameters=parameters,
            divided=divided,
        )

    each = 3 * hidden * w.expert_width
    yield some(w.expert_format, w.experts * each, "experts", "routed experts")
    yield some(w.dense_format, w.shared_experts * each, "heads")
    # of the heads: up to queries, out of them by group, and back
    with_heads = w.query_rank * width + width * w.output_rank
    with_heads += w.output_groups * w.output_rank * hidden
    yield some(w.dense_format, with_heads, "heads")
    yield some(w.dense_format, hidden * w.query_rank + hidden * model.head_dim)
    bf16 = w.experts * hidden + 2 * hidden + w.query_rank + model.head_dim
    mixed = (2 + w.streams) * w.streams
    fp32 = 2 * (mixed * w.streams * hidden + mixed + 3)
    yield some("fp32", model.heads, "heads")  # sinks
    if spec.ratio:
        doubled = 2 if spec.overlap else 1
        widths = [model.head_dim]
        if spec.attention is AttentionType.CSA:
            widths.append(model.index_dim)
            yield some(w.dense_format, w.query_rank * model.index_heads * model.index_dim)
            bf16 += hidden * model.index_heads
        for channels in widths:
            bf16 += 2 * hidden * doubled * channels + channels
            fp32 += spec.ratio * doubled * channels
    if spec.draft:
        yield some(w.dense_format, 2 * hidden * hidden)
        bf16 += 3 * hidden
        fp32 += w.streams * w.streams * hidden + w.streams + 1
    if spec.layer < w.hash_layers:
        yield some("int64", w.vocab * w.experts_per_token)
    else:
        fp32 += w.experts
    yield some("bf16", bf16)
    yield some("fp32", fp32)

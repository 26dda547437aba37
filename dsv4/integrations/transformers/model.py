"""Which models the cache can serve, and the schema that fits one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, RequestError, SchemaMismatch
from dsv4.model import ModelSpec

# the format that stores a model's numbers unchanged
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
    entries_apart: bool = False,
) -> CacheSchema:
    """The layout for a model. "bf16" means unquantised and keeps an fp32 model in fp32; unless
    `index` is given, keys are unquantised with unquantised records and "mxfp4" with others. Raises
    InvalidInput, ConfigError or SchemaError."""
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
        entries_apart=entries_apart,
    )


def require_schema(schema: CacheSchema, model: Any) -> None:
    """Raises SchemaMismatch unless the schema was made for a model of this shape, with tails that
    keep every token: transformers stores them one by one and reads them back."""
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


# modules of an attention layer whose parameters transformers' plan splits, by heads
_BY_HEADS = ("compressor.indexer.q_b_proj.", "compressor.indexer.scorer.weights_proj.")
_IN_ATTENTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.(.+)")
_KNOWN_PLANS = (
    "DistributedConfig(tp_size=n, ep_size=n), up to transformers 5.18 with "
    "DistributedConfig(tp_size=n, enable_expert_parallel=True)"
)
_NOT_OPENED = -1


class Ranks:
    """The processes that compute one model together. All make the same calls in the same order.
    `split_heads` are the layers whose index heads are divided between them."""

    def __init__(
        self, group: Any, count: int, device: torch.device, split_heads: frozenset[int]
    ) -> None:
        self._group, self.count, self._device = group, count, device
        self.split_heads = split_heads

    def gather_heads(self, q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [tokens, heads · width] and weights [tokens, heads] of all heads from those
        of each rank, in one collective."""
        mine = torch.cat((q, weights), dim=-1)
        parts = mine.new_empty((self.count, *mine.shape))
        # as bytes: not every backend knows every type
        _all_gather(parts.view(torch.uint8).flatten(0, 1), mine.view(torch.uint8), self._group)
        all_q, all_weights = parts.split((q.shape[1], weights.shape[1]), dim=-1)
        return all_q.transpose(0, 1).flatten(1), all_weights.transpose(0, 1).flatten(1)

    def open_alike(
        self, rows: int, open_rows: Callable[[bool], list[int]], close: Callable[[], None]
    ) -> None:
        """Opens rows on all ranks so that all run the same tokens.

        `open_rows(reuse)` opens them and returns their lengths; `close()` gives them back. What is
        cached may differ between ranks, because rows come back whenever a garbage collection finds
        them: where lengths differ, no rank reuses anything. Raises what `open_rows` raises, or
        RequestError if it raised on another rank; then no rank has opened any.
        """
        for reuse in (True, False):
            failure: Exception | None = None
            lengths = [_NOT_OPENED] * rows
            try:
                lengths = open_rows(reuse)
            except Exception as error:
                failure = error
            shortest, longest = self._extremes(lengths)
            if failure is not None:
                raise failure
            if shortest == longest:
                return
            close()
            if _NOT_OPENED in shortest:
                raise RequestError("another rank could not open the rows of this call: see there")
        raise RequestError("ranks disagree on the rows of a call: all must make the same calls")

    def _extremes(self, lengths: list[int]) -> tuple[list[int], list[int]]:
        """The minimum and the maximum over all ranks, row by row."""
        both = torch.tensor([*lengths, *(-length for length in lengths)], device=self._device)
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=self._group)
        found = both.tolist()
        return [-length for length in found[len(lengths) :]], found[: len(lengths)]


def _all_gather(parts: Tensor, mine: Tensor, group: Any) -> None:
    """all_gather_single is the name of all_gather_into_tensor since torch 2.13."""
    distributed = torch.distributed
    new = getattr(distributed, "all_gather_single", None)
    (new or distributed.all_gather_into_tensor)(parts, mine, group=group)


def read_ranks(model: Any) -> Ranks | None:
    """The ranks of a model that is split between processes; None for a model that is complete in
    this one.

    A model counts as split if any parameter is, because the processes then compute together and
    must do the same. Raises InvalidInput for a layer whose attention is split in any way other than
    by index heads: attention needs all of it.
    """
    if not torch.distributed.is_available():
        return None
    _check_layers(model)
    split = _split_parameters(model)
    if not split:
        return None
    first = next(iter(split.values()))
    ranks = first.device_mesh.mesh.flatten().tolist()
    heads: dict[int, set[str]] = {}
    for name, parameter in split.items():
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim != 1 or mesh.mesh.tolist() != ranks:
            raise InvalidInput(
                f"{name} is split over {mesh}, but others over ranks {ranks}: the fast path knows "
                f"one group of processes that compute all together; load the model with "
                f"{_KNOWN_PLANS}"
            )
        part = _IN_ATTENTION.fullmatch(name)
        if part is None:
            continue
        layer, name = int(part[1]), part[2]
        if not name.startswith(_BY_HEADS) or not placements[0].is_shard(0):
            raise InvalidInput(
                f"layer {layer} has {name} split as {placements}: the fast path knows plans that "
                f"leave attention whole except for its index heads; load the model with "
                f"{_KNOWN_PLANS}"
            )
        if model.config.index_n_heads % mesh.size():
            raise InvalidInput(
                f"{model.config.index_n_heads} index heads on {mesh.size()} ranks: a head "
                f"cannot be split; use a number of ranks that divides them"
            )
        heads.setdefault(layer, set()).add(name.rpartition(".")[0])
    for layer, names in heads.items():
        if len(names) != len(_BY_HEADS):
            raise InvalidInput(
                f"layer {layer} has {', '.join(names)} split by heads and the rest of its indexer "
                f"whole: load the model with {_KNOWN_PLANS}"
            )
    device = first.to_local().device
    return Ranks(first.device_mesh.get_group(), len(ranks), device, frozenset(heads))


def _check_layers(model: Any) -> None:
    for index, layer in enumerate(model.model.layers):
        if not hasattr(layer, "self_attn"):
            raise InvalidInput(
                f"layer {index} is {type(layer).__name__}: this process has only some layers of "
                f"the model, and the fast path needs all; load it with {_KNOWN_PLANS}, or with "
                f"device_map"
            )


def _split_parameters(model: Any) -> dict[str, Any]:
    """Parameters of which this process has a part, by name."""
    from torch.distributed.tensor import DTensor

    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        and not all(placement.is_replicate() for placement in parameter.placements)
    }


class _NoGradients(torch.autograd.Function):
    """Passes its input through forward, and refuses backward."""

    @staticmethod
    def forward(context: Any, values: Tensor, wanted: Tensor, instead: str) -> Tensor:
        context.instead = instead
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        raise InvalidInput(
            f"backward reached a cache, which keeps numbers and no graph, so gradients through it "
            f"would be wrong: {context.instead}"
        )


def no_gradients(values: Tensor, wanted: Tensor, instead: str) -> Tensor:
    """`values` attached to the graph of `wanted`, so that `backward` raises InvalidInput instead of
    leaving a gradient out silently. If no graph is recorded, just `values`."""
    if not torch.is_grad_enabled() or not wanted.requires_grad:
        return values
    given: Tensor = _NoGradients.apply(values, wanted, instead)  # type: ignore[no-untyped-call]
    return given

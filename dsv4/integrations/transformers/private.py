"""Every name of transformers, torch and PEFT that this integration relies on and that their
documentation does not promise: where it is, what it is for, and the versions it was seen in.

`require_names` runs when the package is imported and once per accelerated model, so that a version
that lacks a name is refused with that name. tests/integrations/test_private_names.py walks the list
on the installed versions, and finds uses in the source that are not listed here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsv4.errors import MissingExtra

# Oldest and newest version of each package that all of these names were found in.
SEEN = {
    "transformers": ("5.17.0", "5.23.0"),
    "torch": ("2.11.0", "2.13.0", "2.15.0"),
    "peft": ("0.21.2",),
}

_MODELING = "transformers.models.deepseek_v4.modeling_deepseek_v4"
# What transformers puts around DeepseekV4Model.forward: defaults of the config, recorded outputs.
_WRAPPERS = ["generic.py", "output_capturing.py"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where names are looked for: `find` returns all objects that must have them, in a model if it
    `needs_model`."""

    package: str
    find: Callable[[Any], list[Any]]
    needs_model: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """`name` is an attribute of what is at `place`, a key of PLACES. `has` tests whether an object
    has it, if `hasattr` is not enough. Without an `optional` name everything works, only slower."""

    place: str
    name: str
    purpose: str
    has: Callable[[Any], bool] | None = None
    optional: bool = False

    @property
    def package(self) -> str:
        return PLACES[self.place].package

    def is_in(self, owner: Any) -> bool:
        return hasattr(owner, self.name) if self.has is None else self.has(owner)

    def __str__(self) -> str:
        package = self.package
        return (
            f"{package} {installed(package)} has no {self.name} in {self.place}, which is needed "
            f"to {self.purpose} (seen in {package} {' and '.join(SEEN[package])})"
        )


# ---- where ---------------------------------------------------------------------------------------


def _at(path: str) -> Callable[[Any], list[Any]]:
    """A module, or its attribute named after the colon."""
    module, _, name = path.partition(":")

    def find(model: Any) -> list[Any]:
        found = import_module(module)
        return [getattr(found, name) if name else found]

    return find


def _attentions(model: Any) -> list[Any]:
    # a process that has only some layers is refused elsewhere (model.py)
    return [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]


def _inside(owners: Callable[[Any], list[Any]], name: str) -> Callable[[Any], list[Any]]:
    """Submodules of this name, where they exist."""

    def find(model: Any) -> list[Any]:
        found = [getattr(owner, name, None) for owner in owners(model)]
        return [each for each in found if each is not None]

    return find


def _indexed_compressors(model: Any) -> list[Any]:
    """The compressors of layers that select."""
    kinds = model.config.layer_types
    return [
        each.compressor
        for each in _attentions(model)
        if kinds[each.layer_idx] == "compressed_sparse_attention"
    ]


_compressors = _inside(_attentions, "compressor")
_indexers = _inside(_compressors, "indexer")


def _loaded_tuner(model: Any) -> list[Any]:
    """PEFT's base of all layers with adapters, in a process that has loaded it."""
    module = sys.modules.get("peft.tuners.tuners_utils")
    return [] if module is None else [module.BaseTunerLayer]


def _of_torch(path: str) -> Place:
    return Place(package="torch", find=_at(path))


def _of_transformers(path: str) -> Place:
    return Place(package="transformers", find=_at(path))


def _of_model(find: Callable[[Any], list[Any]]) -> Place:
    return Place(package="transformers", find=find, needs_model=True)


PLACES = {
    "torch.Tensor": _of_torch("torch:Tensor"),
    "torch.distributed": _of_torch("torch.distributed"),
    "torch.distributed.tensor.DTensor": Place(
        package="torch",
        find=lambda model: (
            _at("torch.distributed.tensor:DTensor")(model)
            if import_module("torch.distributed").is_available()
            else []
        ),
    ),
    "torch.multiprocessing.reductions": _of_torch("torch.multiprocessing.reductions"),
    "torch.nn.Module": Place(
        package="torch", find=lambda model: [import_module("torch.nn").Module()]
    ),
    "torch.nn.modules.module": _of_torch("torch.nn.modules.module"),
    "transformers.PreTrainedModel": _of_transformers("transformers:PreTrainedModel"),
    "transformers.PreTrainedConfig": _of_transformers(
        "transformers.configuration_utils:PreTrainedConfig"
    ),
    "transformers.cache_utils": _of_transformers("transformers.cache_utils"),
    "transformers.cache_utils.Cache": _of_transformers("transformers.cache_utils:Cache"),
    "transformers.modeling_outputs": _of_transformers("transformers.modeling_outputs"),
    "transformers.modeling_outputs.MoeModelOutputWithPast": _of_transformers(
        "transformers.modeling_outputs:MoeModelOutputWithPast"
    ),
    _MODELING: _of_transformers(_MODELING),
    "transformers' cache of a CSA layer": _of_transformers(f"{_MODELING}:DeepseekV4CSACache"),
    "DeepseekV4Model": _of_transformers(f"{_MODELING}:DeepseekV4Model"),
    "DeepseekV4ForCausalLM": _of_transformers(f"{_MODELING}:DeepseekV4ForCausalLM"),
    "a DeepseekV4Model": _of_model(lambda model: [model.model]),
    "a V4 rotary embedding": _of_model(lambda model: [model.model.rotary_emb]),
    "a V4 attention": _of_model(_attentions),
    "a V4 compressor": _of_model(_compressors),
    "the compressor of a V4 layer that selects": _of_model(_indexed_compressors),
    "a V4 indexer": _of_model(_indexers),
    "a V4 index scorer": _of_model(_inside(_indexers, "scorer")),
    "a layer of PEFT": Place(package="peft", find=_loaded_tuner),
}


# ---- what ----------------------------------------------------------------------------------------


def wrappers(forward: Any) -> tuple[list[str], Any]:
    """The files whose decorators wrap a function, outermost first, and the innermost function."""
    around = []
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        around.append(Path(forward.__code__.co_filename).name)
        forward = inner
    return around, forward


def has_known_wrappers(around: list[str]) -> bool:
    return around == _WRAPPERS


def _takes(owner: Any, *, names: tuple[str, ...]) -> bool:
    """Whether these are the first arguments of the forward of a class, after self."""
    return tuple(inspect.signature(owner.forward).parameters)[1 : 1 + len(names)] == names


def _is_dictionary(owner: Any) -> bool:
    return issubclass(owner, dict)


def _has_frequencies(rotary: Any) -> bool:
    return all(
        hasattr(rotary, f"{kind}_{part}")
        for kind in rotary.layer_types
        for part in ("inv_freq", "attention_scaling")
    )


# arguments that both forwards take by position
FORWARD_ARGUMENTS = (
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds"),
)


def _names(place: str, purpose: str, *names: str, **options: Any) -> Iterator[PrivateName]:
    for name in names:
        yield PrivateName(place=place, name=name, purpose=purpose, **options)


PRIVATE = (
    # ---- torch
    *_names("torch.Tensor", "see that a parameter was written to", "_version"),
    *_names(
        "torch.distributed",
        "gather the index heads of all ranks",
        "all_gather_single or all_gather_into_tensor",
        has=lambda owner: (
            not owner.is_available()
            or hasattr(owner, "all_gather_single")
            or hasattr(owner, "all_gather_into_tensor")
        ),
    ),
    *_names(
        "torch.distributed.tensor.DTensor",
        "name the weights of a model that several processes have parts of",
        "_local_tensor",
    ),
    *_names(
        "torch.multiprocessing.reductions",
        "know whether memory that weights were in is alive, without keeping it",
        "StorageWeakRef",
    ),
    *_names(
        "torch.nn.Module",
        "take submodules and parameters without a call of Python each",
        *("_modules", "_parameters", "_buffers"),
    ),
    *_names(
        "torch.nn.Module",
        "leave buffers that are computed out of the name of the weights",
        "_non_persistent_buffers_set",
    ),
    *_names(
        "torch.nn.Module",
        "see that nothing is hooked to a projection, so that its product can be taken alone",
        *("_forward_pre_hooks", "_forward_hooks", "_compiled_call_impl"),
    ),
    *_names(
        "torch.nn.modules.module",
        "see that nothing is hooked to all modules, for the same reason",
        *("_global_forward_pre_hooks", "_global_forward_hooks"),
    ),
    # ---- transformers
    *_names(
        "transformers.PreTrainedModel",
        "let generate use drafts, which it refuses for models that are marked so",
        "_is_stateful",
    ),
    *_names(
        "transformers.PreTrainedConfig",
        "know whether a decode step looks at values of the GPU and cannot be captured",
        "_experts_implementation",
    ),
    *_names("transformers.cache_utils", "be one of its cache layers", "CacheLayerMixin"),
    *_names("transformers.cache_utils", "be passed as past_key_values", "Cache"),
    *_names(
        "transformers.cache_utils.Cache",
        "make a cache of transformers' own that was passed in stand for ours",
        *("crop", "reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"),
        *("activate_past_recording", "get_seq_length"),
    ),
    *_names(
        "transformers.modeling_outputs",
        "return what DeepseekV4Model returns",
        "MoeModelOutputWithPast",
    ),
    *_names(
        "transformers.modeling_outputs.MoeModelOutputWithPast",
        "set a field without a look at all others",
        "its base OrderedDict",
        has=_is_dictionary,
    ),
    *_names(_MODELING, "rotate queries and window rows as the model does", "apply_rotary_pos_emb"),
    *_names(
        "transformers' cache of a CSA layer",
        "know that V4's modules still call these of the cache layer that a PagedCache has",
        *("update", "store_compression_weights", "update_overlap_state"),
        *("update_compressor_states", "get_seq_length", "get_mask_sizes"),
    ),
    *_names(
        "DeepseekV4Model",
        "read a call's arguments by position",
        "forward(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)",
        has=partial(_takes, names=FORWARD_ARGUMENTS),
    ),
    *_names(
        "DeepseekV4ForCausalLM",
        "read a call's arguments by position",
        "forward(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)",
        has=partial(_takes, names=FORWARD_ARGUMENTS),
    ),
    *_names(
        "DeepseekV4Model",
        "run a step without what records outputs and reads the config",
        f"__wrapped__ in {' and '.join(_WRAPPERS)}",
        has=lambda owner: has_known_wrappers(wrappers(owner.forward)[0]),
        optional=True,
    ),
    *_names(
        "a DeepseekV4Model", "find the layers and the rotation", "layers", "rotary_emb", "norm"
    ),
    *_names("a V4 rotary embedding", "make tables of all positions", "layer_types"),
    *_names(
        "a V4 rotary embedding",
        "make tables of all positions",
        "<layer type>_inv_freq and <layer type>_attention_scaling",
        has=_has_frequencies,
    ),
    *_names(
        "a V4 attention",
        "compute the projections of a layer",
        *("q_a_proj", "q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm"),
        *("o_a_proj", "o_b_proj", "sinks"),
    ),
    *_names("a V4 attention", "find the layer's cache", "layer_idx"),
    *_names("a V4 attention", "split what a projection gives", "head_dim", "config"),
    *_names("a V4 attention", "take the layer's rotation", "rope_layer_type"),
    *_names("a V4 attention", "find what the layer compresses with", "compressor"),
    *_names(
        "a V4 compressor",
        "compress with the layer's own parameters",
        *("kv_proj", "gate_proj", "kv_norm", "position_bias"),
    ),
    *_names(
        "the compressor of a V4 layer that selects", "find what the layer selects with", "indexer"
    ),
    *_names(
        "a V4 indexer",
        "compress and select with the layer's own parameters",
        *("kv_proj", "gate_proj", "kv_norm", "position_bias", "q_b_proj", "head_dim", "scorer"),
    ),
    *_names(
        "a V4 index scorer",
        "weigh the heads of a selection",
        *("weights_proj", "weights_scaling", "softmax_scale"),
    ),
    # ---- PEFT
    *_names(
        "a layer of PEFT",
        "name the weights with the adapters that are active",
        *("_disable_adapters", "_active_adapter", "merged_adapters"),
    ),
    # `scaling` of a layer and the type BufferDict are looked for by name, and may be missing
)


# ---- whether it is there -------------------------------------------------------------------------


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def missing(model: Any = None) -> list[PrivateName]:
    """Names that the installed versions lack: those of modules and classes, and with a
    DeepseekV4ForCausalLM those of its modules too."""
    lacking = []
    for each in PRIVATE:
        place = PLACES[each.place]
        if place.needs_model and model is None:
            continue
        try:
            is_there = all(map(each.is_in, place.find(model)))
        except (ImportError, AttributeError):
            is_there = False
        if not is_there:
            lacking.append(each)
    return lacking


def require_names(model: Any = None) -> None:
    """Raises MissingExtra for a version that lacks one of them, with its name and what it is for.
    One that is `optional` may be missing."""
    lacking = [each for each in missing(model) if not each.optional]
    if lacking:
        more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        package = lacking[0].package
        raise MissingExtra(
            f"{lacking[0]}{more}: install {package} {SEEN[package][-1]}, or a newer dsv4"
        )

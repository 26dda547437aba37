"""What the cache must know of a model: layers, ratios, widths. Torch-free.

`ModelSpec` comes from a preset or from a config file; everything downstream (schema, planner,
kernels) reads shapes from here and none repeats them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from dsv4.errors import ConfigError, is_number, is_whole, shown

IndexKeySource = Literal["none", "compressor", "latent"]

# What a config may ask for at most: positions and ids are kept in 32 bits, and the schema of a
# thousand layers already takes a tenth of a second.
_MOST, _MOST_LAYERS = 2**31 - 1, 4096


class AttentionType(StrEnum):
    """The three layer kinds of the V4 family."""

    CSA = "csa"  # compressed sparse: small groups, an indexer picks the top-k entries
    HCA = "hca"  # heavily compressed: large groups, all entries are read
    SWA = "swa"  # sliding window only


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One attention layer, as far as its memory is concerned.

    `ratio` tokens make one entry (0: the layer has none). With `overlap` an entry pools the
    previous group too; groups are pooled by gate logits unless they are one token each and not
    `gated`. With `tail_skips_last` the last token of a group, which closes it, is not kept.
    `index_keys` says where indexer keys come from: an own compressor (V4), the main latent (V4.1),
    or nowhere; with `index_hadamard` these keys and their queries are Hadamard-transformed (not
    keys from the latent). `owner` is the layer whose entries are read: itself, or an earlier layer
    that shares them. `selector` is the layer whose selection of entries a CSA layer reads if it
    does not select for itself. `candidates_of` is the layer whose candidate blocks bound its own
    selection, if any. `draft` marks MTP and DSpark layers.
    """

    layer: int
    attention: AttentionType
    ratio: int = 0
    overlap: bool = False
    gated: bool = True
    tail_skips_last: bool = False
    index_keys: IndexKeySource = "none"
    index_hadamard: bool = True
    owner: int
    selector: int | None = None
    candidates_of: int | None = None
    draft: bool = False

    @property
    def owns_entries(self) -> bool:
        """Whether it compresses entries of its own, and does not read those of another layer."""
        return self.ratio > 0 and self.owner == self.layer

    @property
    def has_indexer(self) -> bool:
        """Whether the layer selects for itself, with index queries of its own."""
        return self.attention is AttentionType.CSA and self.ratio > 0 and self.selector is None

    @property
    def yarn(self) -> bool:
        """Whether the layer rotates with the long-context table (everything in it, window too)."""
        return self.ratio > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The two rotation tables of a model: plain for window-only layers, YaRN for the others."""

    theta: float = 10_000.0
    compress_theta: float = 160_000.0
    yarn_factor: float = 16.0
    yarn_original_tokens: int = 65_536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ConfigError(f"rotations: {each.name}={value!r}, must be a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of a DeepSeek-V4 family model. `layers` holds the backbone, then the draft layers.

    `hidden` is the width of the model; attention has `heads` of `head_dim` channels, of which the
    last `rope_dim` are rotated, by the tables of `rope`; the indexer has `index_heads` of
    `index_dim`, and selects `index_topk` entries. A layer sees the newest `window` tokens, a
    context has up to `max_context`, norms add `rms_eps`; `name` is for people.

    A layer whose candidates others use keeps `candidate_blocks` blocks of `candidate_block_entries`
    entries per query. `draft_block` queries draft at once (DSpark; 0: one after the other).
    `cut_replays`: it is served with replays of a window that do not see what lies before it
    (`PrefixOptions.replay`). `entry_format` and `window_format` are the records that the model was
    trained with.
    """

    name: str
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    window: int
    max_context: int
    rms_eps: float
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    candidate_blocks: int = 0
    candidate_block_entries: int = 8
    draft_block: int = 0
    cut_replays: bool = False
    entry_format: str = "fp8_ds"
    window_format: str = "fp8_ds"

    def __post_init__(self) -> None:
        positive = ("hidden", "heads", "head_dim", "index_heads", "index_dim", "index_topk")
        for field in (*positive, "window", "max_context"):
            value = getattr(self, field)
            if not is_whole(value) or not 1 <= value <= _MOST:
                raise ConfigError(
                    f"{self.name}: {field}={shown(value)}, must be a positive integer of at most "
                    f"{_MOST}"
                )
            # a numpy integer would spread to every offset
            object.__setattr__(self, field, int(value))
        if not is_number(self.rms_eps) or not 0 <= self.rms_eps < math.inf:
            raise ConfigError(f"{self.name}: rms_eps={self.rms_eps!r}, must be 0 or a number above")
        even = is_whole(self.rope_dim) and not self.rope_dim % 2
        if not even or not 0 < self.rope_dim < self.head_dim:
            raise ConfigError(
                f"{self.name}: rope_dim={shown(self.rope_dim)} must be even and below "
                f"head_dim={self.head_dim}"
            )
        object.__setattr__(self, "rope_dim", int(self.rope_dim))
        self._check_layers()
        self._check_candidates()

    def _check_layers(self) -> None:
        if not isinstance(self.layers, tuple | list) or not all(
            isinstance(each, LayerSpec) for each in self.layers
        ):
            raise ConfigError(f"{self.name}: layers={shown(self.layers)}, must be LayerSpecs")
        if not self.layers:
            raise ConfigError(f"{self.name}: a model without layers keeps nothing")
        if len(self.layers) > _MOST_LAYERS:
            raise ConfigError(f"{self.name}: {len(self.layers)} layers, at most {_MOST_LAYERS}")
        if [spec.layer for spec in self.layers] != list(range(len(self.layers))):
            raise ConfigError(f"{self.name}: layers must be numbered 0..{len(self.layers) - 1}")
        for spec in self.layers:
            if not is_whole(spec.ratio) or not 0 <= spec.ratio <= _MOST:
                raise ConfigError(f"{self.name}: layer {spec.layer} has ratio {shown(spec.ratio)}")
            for role in ("owner", "selector", "candidates_of"):
                other = getattr(spec, role)
                if not is_whole(other) and (other is not None or role == "owner"):
                    raise ConfigError(
                        f"{self.name}: layer {spec.layer} has {role}={shown(other)}, must be the "
                        f"number of a layer"
                    )
            if spec.ratio > 1 and not spec.gated:
                raise ConfigError(
                    f"{self.name}: layer {spec.layer} pools {spec.ratio} tokens without gates, "
                    f"which say how much of each: only a group of one token needs none"
                )
            if spec.overlap and spec.tail_skips_last:
                raise ConfigError(
                    f"{self.name}: layer {spec.layer} leaves out the last token of each group, "
                    f"which the next one pools again: groups that overlap keep all of them"
                )
            owner = self.layers[spec.owner] if 0 <= spec.owner <= spec.layer else None
            if owner is None or owner.owner != spec.owner or owner.ratio != spec.ratio:
                raise ConfigError(
                    f"{self.name}: layer {spec.layer} (ratio {spec.ratio}) reads the entries of "
                    f"layer {shown(spec.owner)}, which is not an earlier layer of the same ratio "
                    f"that keeps its own"
                )
            self._check_selection(spec)

    def _check_selection(self, spec: LayerSpec) -> None:
        """Checks that the entries a layer selects, or reads as selected, are those of its owner."""
        for role, number in (("selection", spec.selector), ("candidates", spec.candidates_of)):
            if number is None:
                continue
            source = self.layers[number] if 0 <= number < spec.layer else None
            if source is None or source.owner != spec.owner or not source.has_indexer:
                raise ConfigError(
                    f"{self.name}: layer {spec.layer}, which reads the entries of layer "
                    f"{spec.owner}, takes the {role} of layer {shown(number)}, which is not an "
                    f"earlier layer with an indexer that reads the same entries"
                )
        if spec.candidates_of is not None and not spec.has_indexer:
            raise ConfigError(
                f"{self.name}: layer {spec.layer} takes the candidates of layer "
                f"{spec.candidates_of}: only a layer that selects for itself has a use for them"
            )

    def _check_candidates(self) -> None:
        for field, least in (
            ("candidate_blocks", 0),
            ("candidate_block_entries", 1),
            ("draft_block", 0),
        ):
            value = getattr(self, field)
            if not is_whole(value) or not least <= value <= _MOST:
                raise ConfigError(
                    f"{self.name}: {field}={shown(value)}, must be an integer from {least} to "
                    f"{_MOST}"
                )
            object.__setattr__(self, field, int(value))
        if not any(spec.candidates_of is not None for spec in self.layers):
            return
        # the newest block may have only one entry that a query sees, all others are whole
        sure = (self.candidate_blocks - 1) * self.candidate_block_entries + 1
        if sure < self.index_topk:
            raise ConfigError(
                f"{self.name}: {self.candidate_blocks} candidate blocks of "
                f"{self.candidate_block_entries} entries hold {sure} visible entries for certain, "
                f"fewer than index_topk={self.index_topk}: what the second level selects beyond "
                f"them is not defined"
            )

    @property
    def candidate_sources(self) -> frozenset[int]:
        """The layers whose candidate blocks other layers use."""
        return frozenset(s.candidates_of for s in self.layers if s.candidates_of is not None)

    def count(self, attention: AttentionType, *, draft: bool = False) -> int:
        """How many layers of that attention there are: with `draft` draft layers, else others."""
        return sum(s.attention is attention and s.draft == draft for s in self.layers)

    @classmethod
    def preset(cls, name: str) -> ModelSpec:
        """A published model by its name in PRESETS, or as its authors write it: "V4-Flash",
        "deepseek-ai/DeepSeek-V4-Flash". Raises ConfigError for any other."""
        found = preset_name(name)
        if found is None:
            raise ConfigError(
                f"unknown preset {name!r}: choose one of {', '.join(sorted(PRESETS))}, "
                f"or give the path of a config.json"
            )
        return PRESETS[found]

    @classmethod
    def load(cls, name: str | Path) -> ModelSpec:
        """A preset by its name, or the model that a config.json describes, by its path or that of
        its directory: whatever exists, ends in .json or has a directory, and is not a preset's name
        at Hugging Face. Raises ConfigError."""
        path = config_path(name)
        return cls.preset(str(name)) if path is None else cls.from_config(path)

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any]) -> ModelSpec:
        """Reads transformers' `config.json` (model_type deepseek_v4 or deepseek_v41) or DeepSeek's
        own `inference/config.json`, as a path or as the parsed dict.

        Raises ConfigError if ratios are missing or it is the config of another model.
        """
        if isinstance(config, str | Path):
            return _from_mapping(read_config(Path(config)))
        return _from_mapping(config)


def preset_name(name: str) -> str | None:
    """The key in PRESETS that a name means, however it is written."""
    if name in PRESETS:
        return name
    found = re.sub(r"[-_.\s]", "", name.lower().removeprefix("deepseek-ai/"))
    return _WRITTEN_TOGETHER.get(found.removeprefix("deepseek"))


def config_path(name: str | Path) -> Path | None:
    """The config.json that a name means; None for that of a preset. Raises ConfigError."""
    if not isinstance(name, str | Path):
        raise ConfigError(
            f"a model is {type(name).__name__}: give the name of a preset, the path of a "
            f"config.json, or a ModelSpec"
        )
    path = Path(name)
    if name in PRESETS or (preset_name(str(name)) and not path.exists()):
        return None
    if path.is_dir():
        return path / "config.json"
    return path if path.suffix == ".json" or len(path.parts) > 1 or path.exists() else None


def read_config(path: Path) -> dict[str, Any]:
    """What a config.json holds. Raises ConfigError."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. Nothing is downloaded: give the path of a "
            f"config.json, or one of {', '.join(sorted(PRESETS))}"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} holds a {type(parsed).__name__}, expected a JSON object")
    return parsed


def v4_layers(ratios: Sequence[int], *, backbone: int) -> tuple[LayerSpec, ...]:
    """Layers of a V4 model from its ratios: 0 window only, 4 CSA, anything larger HCA.

    Entries past `backbone` are draft layers (MTP, DSpark) and must be window-only.
    """
    return tuple(_v4_layers(ratios, backbone))


def _v4_layers(ratios: Sequence[int], backbone: int) -> Iterator[LayerSpec]:
    for layer, ratio in enumerate(ratios):
        draft = layer >= backbone
        _check_ratio(layer, ratio, draft)
        if ratio == 0:
            yield LayerSpec(layer=layer, owner=layer, attention=AttentionType.SWA, draft=draft)
        elif ratio == _CSA_RATIO:  # in V4 the overlap and the indexer are tied to this ratio
            yield LayerSpec(
                layer=layer,
                owner=layer,
                attention=AttentionType.CSA,
                ratio=int(ratio),
                overlap=True,
                index_keys="compressor",
            )
        else:
            yield LayerSpec(layer=layer, owner=layer, attention=AttentionType.HCA, ratio=int(ratio))


def v41_layers(
    ratios: Sequence[int],
    *,
    backbone: int,
    entry_sources: Sequence[int],
    index_sources: Sequence[int],
    candidate_source: int | None = None,
) -> tuple[LayerSpec, ...]:
    """Layers of a V4.1 model. A ratio names the entries that a layer *reads*: those of the nearest
    of `entry_sources` up to it, selected by the nearest of `index_sources` up to it. Index sources
    after `candidate_source` select among its candidates. Entries past `backbone` are draft
    layers."""
    return tuple(_v41_layers(ratios, backbone, entry_sources, index_sources, candidate_source))


def _v41_layers(
    ratios: Sequence[int],
    backbone: int,
    entry_sources: Sequence[int],
    index_sources: Sequence[int],
    candidate_source: int | None,
) -> Iterator[LayerSpec]:
    published = candidate_source is not None and candidate_source >= 0
    for layer, ratio in enumerate(ratios):
        draft = layer >= backbone
        _check_ratio(layer, ratio, draft)
        if ratio == 0:
            yield LayerSpec(layer=layer, owner=layer, attention=AttentionType.SWA, draft=draft)
            continue
        owner = _last_source(layer, entry_sources, "kv_source")
        selector = _last_source(layer, index_sources, "index_source")
        bounded = published and selector == layer and layer > int(candidate_source or 0)
        yield LayerSpec(
            layer=layer,
            owner=owner,
            attention=AttentionType.CSA,
            ratio=int(ratio),
            gated=owner != layer or ratio > 1,
            tail_skips_last=owner == layer,
            index_keys="latent" if owner == layer else "none",
            index_hadamard=owner != layer,
            selector=None if selector == layer else selector,
            candidates_of=int(candidate_source or 0) if bounded else None,
        )


def _last_source(layer: int, sources: Sequence[int], name: str) -> int:
    before = [int(source) for source in sources if source <= layer]
    if not before:
        raise ConfigError(
            f"layer {layer} reads entries, but no {name} layer comes before it (they are "
            f"{list(sources)}): the config cannot be of a DeepSeek-V4.1 model"
        )
    return max(before)


def _check_ratio(layer: int, ratio: object, draft: bool) -> None:
    if not is_whole(ratio) or not 0 <= ratio <= _MOST:
        raise ConfigError(
            f"compress ratio of layer {layer} is {_shown(ratio)} (compress_ratios[{layer}]), must "
            f"be 0 or more, and at most {_MOST}"
        )
    if draft and ratio:
        raise ConfigError(
            f"draft layer {layer} has compress ratio {ratio}: MTP and DSpark layers are "
            f"window-only, so trailing ratios must be 0"
        )


_CSA_RATIO = 4
_V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_KNOWN_TYPES = frozenset(map(repr, _LAYER_TYPES))
_TRANSFORMERS_KEYS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "index_n_heads"),
    *("index_head_dim", "index_topk", "sliding_window", "max_position_embeddings"),
)


def _from_mapping(config: Mapping[str, Any]) -> ModelSpec:
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"the config is {type(config).__name__}: give a path of a config.json or what it holds"
        )
    model_type = config.get("model_type")
    if model_type not in (None, "deepseek_v4", *_V41_TYPES):
        raise ConfigError(
            f"model_type is {shown(model_type)}, this library holds deepseek_v4 and deepseek_v41 "
            f"models"
        )
    if isinstance(config.get("text_config"), Mapping):  # next to a vision part
        return _from_mapping(config["text_config"])
    try:
        return _from_inference(config) if "n_layers" in config else _from_transformers(config)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the config has a value of the wrong kind: {error}") from error


def _from_transformers(config: Mapping[str, Any]) -> ModelSpec:
    source_names = _source_names(config, "kv_source_layer_ids", "index_source_layer_ids")
    _need(config, *_TRANSFORMERS_KEYS, *source_names, one_of=("compress_ratios", "layer_types"))
    backbone = _whole(config, "num_hidden_layers", most=_MOST_LAYERS)
    sources = _sources(config, source_names)
    if config.get("compress_ratios") is not None:
        ratios = list(_list(config, "compress_ratios"))
        if sources is not None and len(ratios) == backbone:  # copies without the draft layers'
            ratios += [0] * _draft_layers(config, "num_nextn_predict_layers", backbone)
    elif config.get("layer_types") is not None:
        ratios = _checked_length(_ratios_of_layer_types(config), backbone)
        drafts = "n_mtp_layers" if "n_mtp_layers" in config else "num_nextn_predict_layers"
        ratios += [0] * _draft_layers(config, drafts, backbone)
    else:
        raise ConfigError(
            "the config has neither compress_ratios nor layer_types: without them it is unknown "
            "which layers are CSA and HCA; take the config.json of the checkpoint"
        )
    kept_heads = config.get("num_key_value_heads", 1)
    if kept_heads != 1:
        raise ConfigError(
            f"the config has num_key_value_heads={shown(kept_heads)}: a V4 model has one key for "
            f"all heads, which is the value too"
        )
    head_dim = _whole(config, "head_dim")
    if config.get("qk_rope_head_dim") is None:
        part = _number(config, "partial_rotary_factor", None) or 64 / 512
        rope_dim = round(head_dim * part)
    else:
        rope_dim = _rope_dim(config, "qk_rope_head_dim", None, head_dim)
    return ModelSpec(
        name=str(config.get("_name_or_path") or config.get("model_type") or "deepseek_v4"),
        hidden=_whole(config, "hidden_size"),
        heads=_whole(config, "num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        index_heads=_whole(config, "index_n_heads"),
        index_dim=_whole(config, "index_head_dim"),
        index_topk=_whole(config, "index_topk"),
        window=_whole(config, "sliding_window"),
        max_context=_whole(config, "max_position_embeddings"),
        rms_eps=_number(config, "rms_norm_eps", _rms_eps(sources), or_zero=True),
        rope=_rope_of_transformers(config),
        **_layers(
            config,
            _checked_length(ratios, backbone),
            backbone,
            sources,
            "candidate_source_layer_id",
        ),
    )


def _source_names(config: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """The keys of the layers that own entries and of those that select, which a V4.1 config must
    have; none for V4."""
    v41 = config.get("model_type") in _V41_TYPES
    return names if v41 or any(config.get(name) is not None for name in names) else ()


def _sources(
    config: Mapping[str, Any], names: tuple[str, ...]
) -> tuple[list[int], list[int]] | None:
    """The layers that own entries and those that select, of a V4.1 config; None for V4's."""
    if not names:
        return None
    entries, selections = (
        [
            _as_whole(f"{name}[{nth}]", layer, least=0)
            for nth, layer in enumerate(_list(config, name))
        ]
        for name in names
    )
    return entries, selections


def _layers(
    config: Mapping[str, Any],
    ratios: Sequence[int],
    backbone: int,
    sources: tuple[list[int], list[int]] | None,
    candidate_source: str,
) -> dict[str, Any]:
    """The fields of a spec in which V4.1 differs from V4; both kinds of config use the same
    names."""
    if sources is None:
        return {"layers": v4_layers(ratios, backbone=backbone)}
    return {
        "layers": v41_layers(
            ratios,
            backbone=backbone,
            entry_sources=sources[0],
            index_sources=sources[1],
            candidate_source=_whole(config, candidate_source, -1, least=-1, null=True),
        ),
        "candidate_blocks": _whole(config, "candidate_topk_blocks", 0, least=0, null=True),
        "candidate_block_entries": _whole(config, "candidate_block_size", 8, null=True),
        "draft_block": _whole(config, "dspark_block_size", 0, least=0, null=True),
        "cut_replays": True,
        "entry_format": "v41_fp4",
        "window_format": "v41_fp8",
    }


def _need(config: Mapping[str, Any], *names: str, one_of: tuple[str, ...] = ()) -> None:
    """Raises ConfigError that names everything missing, unless only `one_of` is."""
    missing = [repr(name) for name in names if name not in config]
    if missing and one_of and not any(name in config for name in one_of):
        missing.append(" or ".join(map(repr, one_of)))
    if missing:
        raise ConfigError(
            f"the config has no {', '.join(missing)}, which the cache needs: take the config.json "
            f"of the checkpoint"
        )


def _whole(
    config: Mapping[str, Any],
    name: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = _MOST,
    null: bool = False,
) -> int:
    """A whole number of a config; 8.0 counts as one. With `null`, null gives the default too.
    Raises ConfigError."""
    value = config.get(name, default)
    return _as_whole(name, default if null and value is None else value, least=least, most=most)


def _draft_layers(config: Mapping[str, Any], name: str, backbone: int) -> int:
    return _whole(config, name, 0, least=0, most=_MOST_LAYERS - backbone)


def _rope_dim(config: Mapping[str, Any], name: str, default: int | None, head_dim: int) -> int:
    found = _whole(config, name, default)
    if found % 2 or found >= head_dim:
        raise ConfigError(
            f"the config has {name}={found} where an even number below {head_dim}, the width of a "
            f"head, is needed"
        )
    return found


def _as_whole(name: str, value: object, *, least: int, most: int = _MOST) -> int:
    # comparisons first: an int may be larger than any float, and int() knows no infinity
    if is_number(value) and least <= value <= most and int(value) == value:
        return int(value)
    raise ConfigError(
        f"the config has {name}={_shown(value)} where a whole number from {least} to {most} is "
        f"needed"
    )


def _number(
    config: Mapping[str, Any], name: str, default: float | None, *, or_zero: bool = False
) -> float:
    """A number of a config above 0 (`or_zero`: or 0), or the default. Raises ConfigError."""
    value = config.get(name)
    if name not in config or (value is None and default is None):
        return 0.0 if default is None else float(default)
    # an int may be larger than any float
    if not is_number(value) or (is_whole(value) and abs(value) > sys.float_info.max):
        raise ConfigError(f"the config has {name}={_shown(value)} where a number is needed")
    if not 0 <= value < math.inf or (value == 0 and not or_zero and default is not None):
        least = "of 0 or more" if or_zero else "above 0"
        raise ConfigError(f"the config has {name}={_shown(value)} where a number {least} is needed")
    return float(value)


def _list(config: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = config[name]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConfigError(f"the config has {name}={_shown(value)} where a list is needed")
    return value


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty if it is missing or null."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"the config has {name}={_shown(value)} where an object is needed")
    return value


def _shown(value: object) -> str:
    return "null" if value is None else shown(value)


def _rms_eps(sources: object) -> float:
    """The value of the released models where a config has none: V4.1's differs from V4's."""
    return 1e-6 if sources is None else 1e-20


def _ratios_of_layer_types(config: Mapping[str, Any]) -> list[int]:
    rates = {**_LAYER_TYPES, **_mapping(config, "compress_rates"), "sliding_attention": 0}
    unknown = sorted({shown(kind) for kind in _list(config, "layer_types")} - _KNOWN_TYPES)
    if unknown:
        raise ConfigError(
            f"unknown layer_types {', '.join(unknown)}: expected {sorted(_LAYER_TYPES)}"
        )
    ratios = [
        _as_whole(f"compress_rates[{kind!r}]", rates[kind], least=0)
        for kind in config["layer_types"]
    ]
    for kind, ratio in zip(config["layer_types"], ratios, strict=True):
        csa = kind == "compressed_sparse_attention"
        if csa != (ratio == _CSA_RATIO) or (kind == "sliding_attention") != (ratio == 0):
            raise ConfigError(
                f"compress_rates gives {kind} a rate of {ratio}: V4 ties the overlap and the "
                f"indexer to {_CSA_RATIO}, so CSA must have that rate and HCA another, above 0"
            )
    return ratios


def _rope_of_transformers(config: Mapping[str, Any]) -> RopeSpec:
    rope = _mapping(config, "rope_parameters") or _mapping(config, "rope_scaling")
    plain, compress = _mapping(rope, "main"), _mapping(rope, "compress")
    long = compress or rope
    kind = long.get("rope_type", long.get("type", "default"))
    base = RopeSpec()
    theta = _number(config, "rope_theta", base.theta)
    compress_theta = _number(config, "compress_rope_theta", base.compress_theta)
    return RopeSpec(
        theta=_number(plain, "rope_theta", theta),
        compress_theta=_number(compress, "rope_theta", None) or compress_theta,
        yarn_factor=_number(long, "factor", base.yarn_factor) if kind == "yarn" else 1.0,
        yarn_original_tokens=_whole(
            long, "original_max_position_embeddings", base.yarn_original_tokens
        ),
        yarn_beta_fast=_number(long, "beta_fast", base.yarn_beta_fast),
        yarn_beta_slow=_number(long, "beta_slow", base.yarn_beta_slow),
    )


def _from_inference(config: Mapping[str, Any]) -> ModelSpec:
    source_names = _source_names(config, "kv_source_layers", "index_source_layers")
    _need(config, "n_layers", "dim", "n_heads", *source_names, one_of=("compress_ratios",))
    backbone = _whole(config, "n_layers", most=_MOST_LAYERS)
    if config.get("compress_ratios") is None:
        raise ConfigError(
            "the config has no compress_ratios: take DeepSeek's inference/config.json"
        )
    sources = _sources(config, source_names)
    ratios = list(_list(config, "compress_ratios"))
    if len(ratios) == backbone:
        ratios += [0] * _draft_layers(config, "n_mtp_layers", backbone)
    base = RopeSpec()
    original_tokens = _whole(config, "original_seq_len", base.yarn_original_tokens, least=0)
    return ModelSpec(
        name="deepseek_v4" if sources is None else "deepseek_v41",
        hidden=_whole(config, "dim"),
        heads=_whole(config, "n_heads"),
        head_dim=_whole(config, "head_dim", 512),
        rope_dim=_rope_dim(config, "rope_head_dim", 64, _whole(config, "head_dim", 512)),
        index_heads=_whole(config, "index_n_heads", 64),
        index_dim=_whole(config, "index_head_dim", 128),
        index_topk=_whole(config, "index_topk", 512),
        window=_whole(config, "window_size", 128),
        max_context=_whole(config, "max_seq_len", 1_048_576),
        rms_eps=_number(config, "norm_eps", _rms_eps(sources), or_zero=True),
        rope=RopeSpec(
            theta=_number(config, "rope_theta", base.theta),
            compress_theta=_number(config, "compress_rope_theta", base.compress_theta),
            # DeepSeek's code switches YaRN off by original_seq_len = 0
            yarn_factor=_number(config, "rope_factor", base.yarn_factor) if original_tokens else 1,
            yarn_original_tokens=original_tokens or base.yarn_original_tokens,
            yarn_beta_fast=_number(config, "beta_fast", base.yarn_beta_fast),
            yarn_beta_slow=_number(config, "beta_slow", base.yarn_beta_slow),
        ),
        **_layers(
            config,
            _checked_length(ratios, backbone),
            backbone,
            sources,
            "candidate_source_layer",
        ),
    )


def _checked_length(ratios: list[int], backbone: int) -> list[int]:
    if len(ratios) < backbone:
        raise ConfigError(
            f"the config gives compress_ratios or layer_types of {len(ratios)} layers, but has "
            f"{backbone} (num_hidden_layers, n_layers): one a layer is needed (compress_ratios may "
            f"then hold one 0 for each draft layer)"
        )
    return ratios


_FLASH = ModelSpec(
    name="v4-flash",
    hidden=4096,
    heads=64,
    head_dim=512,
    rope_dim=64,
    index_heads=64,
    index_dim=128,
    index_topk=512,
    window=128,
    max_context=1_048_576,
    rms_eps=1e-6,
    rope=RopeSpec(),
    layers=v4_layers([0, 0] + [4, 128] * 20 + [4] + [0], backbone=43),
)

_V41 = replace(
    _FLASH,
    name="v41-flash",
    hidden=5120,
    index_heads=32,
    rms_eps=1e-20,
    layers=v41_layers(
        [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        backbone=40,
        entry_sources=(2, 8, 14, 20),
        index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
        candidate_source=20,
    ),
    candidate_blocks=2048,
    candidate_block_entries=8,
    draft_block=5,
    cut_replays=True,
    entry_format="v41_fp4",
    window_format="v41_fp8",
)

PRESETS: dict[str, ModelSpec] = {
    "v4-flash": _FLASH,
    "v4-flash-0731": replace(
        _FLASH,
        name="v4-flash-0731",
        layers=v4_layers([0, 0] + [4, 128] * 20 + [4] + [0] * 3, backbone=43),
    ),
    "v4-pro": replace(
        _FLASH,
        name="v4-pro",
        hidden=7168,
        heads=128,
        index_topk=1024,
        layers=v4_layers([128, 128] + [4, 128] * 29 + [4] + [0], backbone=61),
    ),
    # every layer kind at a size for laptops and tests: same ratios and window, narrow heads
    "tiny": replace(
        _FLASH,
        name="tiny",
        hidden=128,
        heads=4,
        head_dim=128,
        index_heads=8,
        index_topk=16,
        max_context=16_384,
        layers=v4_layers([0, 4, 128, 4, 0], backbone=4),
    ),
    "v41-flash": _V41,
    # every role of a V4.1 layer: owners of both ratios, readers, a second selection, draft layers
    "v41-tiny": replace(
        _V41,
        name="v41-tiny",
        hidden=128,
        heads=4,
        head_dim=128,
        index_heads=8,
        index_topk=16,
        max_context=16_384,
        candidate_blocks=4,
        layers=v41_layers(
            [0, 2, 2, 1, 1, 1, 0, 0],
            backbone=6,
            entry_sources=(1, 3),
            index_sources=(1, 3, 4),
            candidate_source=3,
        ),
    ),
}
_WRITTEN_TOGETHER = {name.replace("-", ""): name for name in PRESETS}

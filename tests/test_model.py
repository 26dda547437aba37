"""Models by preset and by config file, against the published shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4.cache.schema import CacheSchema
from dsv4.errors import ConfigError, InvalidInput
from dsv4.model import PRESETS, AttentionType, LayerSpec, ModelSpec, RopeSpec, v4_layers
from dsv4.planner import plan

FLASH_RATIOS = [0, 0] + [4, 128] * 20 + [4]
PRO_RATIOS = [128, 128] + [4, 128] * 29 + [4]


def transformers_config(**changes: Any) -> dict[str, Any]:
    """What the V4-Flash checkpoint's config.json says of attention."""
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "sliding_window": 128,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 1,
        "rope_theta": 10_000,
        "compress_rope_theta": 160_000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65_536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "compress_ratios": [*FLASH_RATIOS, 0],
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def inference_config(**changes: Any) -> dict[str, Any]:
    """What DeepSeek's inference/config.json says of attention."""
    config = {
        "dim": 4096,
        "n_layers": 43,
        "n_heads": 64,
        "head_dim": 512,
        "rope_head_dim": 64,
        "window_size": 128,
        "compress_ratios": [*FLASH_RATIOS, 0],
        "n_mtp_layers": 1,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "compress_rope_theta": 160_000.0,
        "rope_factor": 16,
        "original_seq_len": 65_536,
        "beta_fast": 32,
        "beta_slow": 1,
        "max_seq_len": 1_048_576,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def same_shapes(found: ModelSpec, expected: ModelSpec) -> bool:
    return replace(found, name=expected.name) == expected


# ---- presets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "topk", "ratios", "counts", "drafts"),
    [
        ("v4-flash", 4096, 64, 512, FLASH_RATIOS, (2, 21, 20), 1),
        ("v4-flash-0731", 4096, 64, 512, FLASH_RATIOS, (2, 21, 20), 3),
        ("v4-pro", 7168, 128, 1024, PRO_RATIOS, (0, 30, 31), 1),
    ],
)
def test_presets_have_the_published_shapes(
    name: str,
    hidden: int,
    heads: int,
    topk: int,
    ratios: list[int],
    counts: tuple[int, int, int],
    drafts: int,
) -> None:
    model = ModelSpec.preset(name)
    assert (model.hidden, model.heads, model.index_topk) == (hidden, heads, topk)
    assert (model.head_dim, model.rope_dim) == (512, 64)
    assert (model.index_heads, model.index_dim) == (64, 128)
    assert (model.window, model.max_context, model.rms_eps) == (128, 1_048_576, 1e-6)
    assert model.rope == RopeSpec(
        theta=10_000.0,
        compress_theta=160_000.0,
        yarn_factor=16.0,
        yarn_original_tokens=65_536,
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
    )
    assert [spec.ratio for spec in model.layers] == ratios + [0] * drafts
    kinds = (AttentionType.SWA, AttentionType.CSA, AttentionType.HCA)
    assert tuple(model.count(kind) for kind in kinds) == counts
    assert tuple(model.count(kind, draft=True) for kind in kinds) == (drafts, 0, 0)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("v41")])
def test_every_v4_layer_keeps_its_own_entries(name: str) -> None:
    for spec in ModelSpec.preset(name).layers:
        csa = spec.attention is AttentionType.CSA
        assert spec.owner == spec.layer
        assert spec.owns_entries == spec.yarn == (spec.attention is not AttentionType.SWA)
        assert spec.overlap == csa
        assert spec.index_keys == ("compressor" if csa else "none")


def test_csa_layers_are_the_even_ones_from_two() -> None:
    for name in ("v4-flash", "v4-pro"):
        model = ModelSpec.preset(name)
        csa = [spec.layer for spec in model.layers if spec.attention is AttentionType.CSA]
        assert csa == list(range(2, len(model.layers) - 1, 2))


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="v4-flash"):
        ModelSpec.preset("v4-flush")


# ---- config files ---------------------------------------------------------------------------


def test_transformers_config_gives_the_preset(tmp_path: Path) -> None:
    assert same_shapes(ModelSpec.from_config(transformers_config()), PRESETS["v4-flash"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(transformers_config()))
    for given in (path, str(path)):
        assert same_shapes(ModelSpec.from_config(given), PRESETS["v4-flash"])


def test_trailing_zeros_count_dspark_stages_whatever_num_nextn_says() -> None:
    config = transformers_config(compress_ratios=[*FLASH_RATIOS, 0, 0, 0])
    assert config["num_nextn_predict_layers"] == 1
    assert same_shapes(ModelSpec.from_config(config), PRESETS["v4-flash-0731"])


def test_layer_types_give_the_same_model_as_ratios() -> None:
    kinds = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    config = transformers_config(
        compress_ratios=...,
        layer_types=[kinds[ratio] for ratio in FLASH_RATIOS],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    )
    assert same_shapes(ModelSpec.from_config(config), PRESETS["v4-flash"])
    config["compress_rates"]["heavily_compressed_attention"] = 64
    hca = [spec for spec in ModelSpec.from_config(config).layers if spec.attention == "hca"]
    assert [spec.ratio for spec in hca] == [64] * 20


@pytest.mark.parametrize(
    "rates",
    [
        {"compressed_sparse_attention": 8},
        {"compressed_sparse_attention": 0},
        {"heavily_compressed_attention": 4},
        {"heavily_compressed_attention": 0},
    ],
)
def test_rates_that_would_turn_one_kind_into_another_are_refused(rates: dict[str, int]) -> None:
    config = transformers_config(
        compress_ratios=...,
        num_hidden_layers=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates=rates,
    )
    with pytest.raises(ConfigError, match="rate"):
        ModelSpec.from_config(config)


def test_nested_rope_parameters_are_read() -> None:
    config = transformers_config(
        rope_theta=...,
        compress_rope_theta=...,
        rope_scaling=...,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 20_000},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 320_000,
                "factor": 8,
                "original_max_position_embeddings": 32_768,
                "beta_fast": 16,
                "beta_slow": 2,
                "attention_factor": 1.0,
            },
        },
    )
    assert ModelSpec.from_config(config).rope == RopeSpec(
        theta=20_000.0,
        compress_theta=320_000.0,
        yarn_factor=8.0,
        yarn_original_tokens=32_768,
        yarn_beta_fast=16.0,
        yarn_beta_slow=2.0,
    )


def test_without_yarn_the_factor_is_one() -> None:
    assert ModelSpec.from_config(transformers_config(rope_scaling=...)).rope.yarn_factor == 1.0
    off = inference_config(original_seq_len=0)
    assert ModelSpec.from_config(off).rope.yarn_factor == 1.0


def test_rope_width_from_partial_rotary_factor() -> None:
    config = transformers_config(qk_rope_head_dim=..., partial_rotary_factor=0.25)
    assert ModelSpec.from_config(config).rope_dim == 128
    del config["partial_rotary_factor"]
    assert ModelSpec.from_config(config).rope_dim == 64


def test_inference_config_gives_the_preset() -> None:
    assert same_shapes(ModelSpec.from_config(inference_config()), PRESETS["v4-flash"])


def test_inference_config_counts_drafts_by_ratios_or_by_n_mtp_layers() -> None:
    for ratios in (FLASH_RATIOS, [*FLASH_RATIOS, 0, 0, 0]):
        config = inference_config(compress_ratios=ratios, n_mtp_layers=3)
        assert same_shapes(ModelSpec.from_config(config), PRESETS["v4-flash-0731"])


def test_every_size_of_the_inference_config_arrives() -> None:
    changed = {
        "dim": 96,
        "n_heads": 3,
        "head_dim": 80,
        "rope_head_dim": 16,
        "window_size": 24,
        "index_n_heads": 5,
        "index_head_dim": 48,
        "index_topk": 7,
        "norm_eps": 1e-5,
        "max_seq_len": 4096,
    }
    model = ModelSpec.from_config(inference_config(**changed))
    found = (
        *(model.hidden, model.heads, model.head_dim, model.rope_dim, model.window),
        *(model.index_heads, model.index_dim, model.index_topk, model.rms_eps, model.max_context),
    )
    assert found == tuple(changed.values())


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers_config(compress_ratios=...), "neither compress_ratios nor layer_types"),
        (inference_config(compress_ratios=...), "no compress_ratios"),
        (transformers_config(model_type="deepseek_v3"), "'deepseek_v3'"),
        (transformers_config(model_type="llama"), "'llama'"),
        (transformers_config(hidden_size=...), "no 'hidden_size'"),
        (transformers_config(compress_ratios=FLASH_RATIOS[:-1]), "42 layers, but has 43"),
        (
            transformers_config(
                compress_ratios=..., layer_types=["compressed_sparse_attention"] * 42
            ),
            "42 layers, but has 43",
        ),
        (transformers_config(compress_ratios=[*FLASH_RATIOS, 4]), "draft layer 43"),
        (transformers_config(compress_ratios=[-4] * 43), "-4"),
        (transformers_config(compress_ratios=[4.0] * 43), r"4\.0"),
        (transformers_config(compress_ratios=[True] * 43), "True"),
        (transformers_config(compress_ratios=7), "compress_ratios=7 where a list"),
        (transformers_config(compress_ratios=..., layer_types=["full_attention"]), "unknown"),
        (transformers_config(hidden_size="wide"), "hidden_size='wide' where a whole"),
        (transformers_config(hidden_size=None), "hidden_size=null where a whole number"),
        (transformers_config(hidden_size=float("nan")), "hidden_size=nan"),
        (transformers_config(hidden_size=float("inf")), "hidden_size=inf"),
        (
            transformers_config(rope_parameters=["yarn"]),
            r"rope_parameters=\['yarn'\] where an object",
        ),
        (transformers_config(sliding_window=0), "window=0"),
        (transformers_config(sliding_window=-128), "window=-128"),
        (transformers_config(qk_rope_head_dim=63), "qk_rope_head_dim=63"),
        (transformers_config(qk_rope_head_dim=512), "qk_rope_head_dim=512"),
        (transformers_config(num_key_value_heads=8), "num_key_value_heads=8"),
        (transformers_config(rms_norm_eps=float("nan")), "rms_norm_eps=nan"),
        (transformers_config(rms_norm_eps=-1e-6), "rms_norm_eps=-1e-06"),
        (transformers_config(rope_theta=0), "theta=0"),
        (transformers_config(compress_rope_theta=float("inf")), "compress_rope_theta=inf"),
    ],
)
def test_configs_that_cannot_be_held_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(config)


COUNTS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "index_n_heads"),
    *("index_head_dim", "index_topk", "sliding_window", "max_position_embeddings"),
)
INFERENCE_COUNTS = (
    *("n_layers", "dim", "n_heads", "head_dim", "rope_head_dim", "index_n_heads"),
    *("index_head_dim", "index_topk", "window_size", "max_seq_len"),
)


@pytest.mark.parametrize("wrong", [0, -1, None, "512", 1.5, True, [512], {}, float("nan")], ids=str)
def test_a_size_of_the_wrong_kind_is_named(wrong: Any) -> None:
    for make, names in ((transformers_config, COUNTS), (inference_config, INFERENCE_COUNTS)):
        for name in names:
            with pytest.raises(ConfigError) as caught:
                ModelSpec.from_config(make(**{name: wrong}))
            shown = "null" if wrong is None else repr(wrong)
            assert f"the config has {name}={shown} where a whole number" in str(caught.value)


@pytest.mark.parametrize("wrong", [2**31, 10**12, 10**400, 10**5000, 1e300], ids=range(5))
def test_a_size_that_nothing_can_hold_is_named(wrong: Any) -> None:
    drafts = {"layer_types": ["compressed_sparse_attention"] * 43, "compress_ratios": ...}
    cases = [(transformers_config, name, {}) for name in COUNTS]
    cases += [(inference_config, name, {}) for name in INFERENCE_COUNTS]
    cases.append((transformers_config, "num_nextn_predict_layers", drafts))
    cases.append((inference_config, "n_mtp_layers", {"compress_ratios": FLASH_RATIOS[:43]}))
    for make, name, more in cases:
        with pytest.raises(ConfigError, match=f"the config has {name}=.* where a whole number"):
            ModelSpec.from_config(make(**{**more, name: wrong}))


def test_as_many_layers_as_are_allowed() -> None:
    config = inference_config(compress_ratios=FLASH_RATIOS[:43], n_mtp_layers=4096 - 43)
    assert len(ModelSpec.from_config(config).layers) == 4096
    with pytest.raises(ConfigError, match="n_mtp_layers=4054 where a whole number from 0 to 4053"):
        ModelSpec.from_config({**config, "n_mtp_layers": 4096 - 42})
    with pytest.raises(ConfigError, match="4097 layers"):
        ModelSpec.from_config(inference_config(compress_ratios=[0] * 4097))


def test_ratios_and_numbers_that_nothing_can_hold_are_refused() -> None:
    for name in ("rms_norm_eps", "rope_theta", "compress_rope_theta"):
        with pytest.raises(ConfigError, match=f"{name}=a number of 1329 bits where a number"):
            ModelSpec.from_config(transformers_config(**{name: 10**400}))
    with pytest.raises(ConfigError, match="compress ratio of layer 2 is 1000000000000"):
        ModelSpec.from_config(transformers_config(compress_ratios=[0, 0, 10**12, *[4] * 40]))


@pytest.mark.parametrize("wrong", ["1e-6", None, [1.0], True])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "compress_rope_theta"])
def test_a_number_of_the_wrong_kind_is_named(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"the config has {name}=.* where a number is needed"):
        ModelSpec.from_config(transformers_config(**{name: wrong}))


@pytest.mark.parametrize("wrong", [-1, -(10**30), float("inf"), float("nan"), float("-inf")])
def test_a_number_that_means_nothing_is_named_as_the_config_names_it(wrong: float) -> None:
    names = [(transformers_config, "rms_norm_eps"), (transformers_config, "compress_rope_theta")]
    names += [(inference_config, "norm_eps"), (inference_config, "rope_factor")]
    for make, name in names:
        with pytest.raises(ConfigError, match=f"the config has {name}=.* where a number"):
            ModelSpec.from_config(make(**{name: wrong}))


def test_a_rotated_part_that_is_no_part_of_a_head_is_named() -> None:
    for make, name in (
        (transformers_config, "qk_rope_head_dim"),
        (inference_config, "rope_head_dim"),
    ):
        for wrong in (3, 512, 2**31 - 1):
            with pytest.raises(ConfigError, match=f"{name}={wrong} where an even number below 512"):
                ModelSpec.from_config(make(**{name: wrong}))


@pytest.mark.parametrize("name", ["model_type", "num_key_value_heads"])
def test_numbers_too_long_to_be_written_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*a number of 16610 bits"):
        ModelSpec.from_config(transformers_config(**{name: 10**5000}))


HUGE, WRONG = 10**5000, ("12", "", None, [], {}, 0.5, b"x", 1j, float("inf"))


@pytest.mark.parametrize("wrong", [HUGE, *WRONG], ids=range(1 + len(WRONG)))
def test_specs_made_by_hand_name_what_is_wrong(wrong: Any) -> None:
    spec = ModelSpec.preset("tiny")
    for field in ("hidden", "rope_dim", "window", "max_context", "candidate_blocks", "layers"):
        with pytest.raises(ConfigError, match=f"{field}=|without layers"):
            replace(spec, **{field: wrong})
    for field in ("owner", "selector", "candidates_of", "ratio"):
        if wrong is not None or field in ("owner", "ratio"):
            layer = replace(spec.layers[1], **{field: wrong})
            with pytest.raises(ConfigError, match="layer 1"):
                replace(spec, layers=(spec.layers[0], layer, *spec.layers[2:]))


@pytest.mark.parametrize("wrong", [10**41, HUGE, *WRONG], ids=range(2 + len(WRONG)))
@pytest.mark.parametrize("name", ["block_tokens", "align_bytes", "ring_rows", "max_draft_tokens"])
def test_counts_of_a_schema_that_nothing_can_hold_are_named(name: str, wrong: Any) -> None:
    if (name, wrong) != ("ring_rows", None):
        with pytest.raises(InvalidInput, match=f"{name}=.*must be a whole number"):
            CacheSchema.build(ModelSpec.preset("tiny"), **{name: wrong})


@pytest.mark.parametrize("wrong", [2**63, 10**30, HUGE], ids=range(3))
def test_a_memory_that_no_machine_has_is_refused_by_the_planner(wrong: int) -> None:
    schema = CacheSchema.build(ModelSpec.preset("tiny"))
    with pytest.raises(InvalidInput, match=r"memory_bytes=.*at most"):
        plan(schema, memory_bytes=wrong, context_tokens=1024)


def test_drafts_below_0_are_named() -> None:
    kinds = ["compressed_sparse_attention"]
    config = transformers_config(
        num_hidden_layers=1, compress_ratios=..., layer_types=kinds, num_nextn_predict_layers=-1
    )
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=-1"):
        ModelSpec.from_config(config)


def test_all_that_is_missing_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelSpec.from_config({})
    listed = ", ".join([*map(repr, COUNTS), "'compress_ratios' or 'layer_types'"])
    assert f"the config has no {listed}, which the cache needs" in str(caught.value)
    with pytest.raises(ConfigError, match="no 'head_dim', 'sliding_window', which"):
        ModelSpec.from_config(transformers_config(head_dim=..., sliding_window=...))
    with pytest.raises(ConfigError, match="no 'dim', 'n_heads', 'compress_ratios', which"):
        ModelSpec.from_config({"n_layers": 4})
    with pytest.raises(ConfigError, match="'kv_source_layer_ids', 'index_source_layer_ids'"):
        ModelSpec.from_config({"model_type": "deepseek_v41"})


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="without layers"):
        replace(PRESETS["tiny"], layers=())


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not JSON"), (b"\xff\xfe\x00", "not JSON"), (b"[1]", "list"), (b"", "not JSON")],
)
def test_files_that_are_no_config_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            ModelSpec.from_config(path)


@pytest.mark.parametrize(
    "value", [0, -1, 128.0, float("nan"), float("inf"), True, "128", 2**31, 10**12]
)
@pytest.mark.parametrize("field", ["hidden", "window", "max_context", "index_topk"])
def test_sizes_are_positive_integers(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(PRESETS["tiny"], **{field: value})


def layer(number: int, *, ratio: int, owner: int) -> LayerSpec:
    return LayerSpec(layer=number, attention=AttentionType.CSA, ratio=ratio, owner=owner)


@pytest.mark.parametrize(
    "layers",
    [
        (layer(0, ratio=4, owner=1), layer(1, ratio=4, owner=1)),  # a later layer
        (layer(0, ratio=4, owner=0), layer(1, ratio=2, owner=0)),  # another ratio
        (layer(0, ratio=4, owner=-1),),
        (layer(0, ratio=4, owner=0), layer(1, ratio=4, owner=0), layer(2, ratio=4, owner=1)),
        (layer(0, ratio=-4, owner=0),),
        (layer(0, ratio=4.0, owner=0),),
        (layer(1, ratio=4, owner=1),),  # not numbered from 0
    ],
)
def test_layers_that_share_with_nobody_are_refused(layers: tuple[LayerSpec, ...]) -> None:
    with pytest.raises(ConfigError):
        replace(PRESETS["tiny"], layers=layers)


def test_draft_layers_are_marked_by_their_place() -> None:
    layers = v4_layers([0, 4, 0, 0], backbone=2)
    assert [spec.draft for spec in layers] == [False, False, True, True]


def test_numpys_integers_become_pythons() -> None:
    """Offsets, strides and JSON are made of them."""
    tiny = PRESETS["tiny"]
    layers = v4_layers(np.array([0, 4, 128]), backbone=3)  # type: ignore[arg-type]
    spec = replace(tiny, window=np.int64(tiny.window), layers=layers)
    assert spec == replace(tiny, layers=v4_layers([0, 4, 128], backbone=3))
    sizes = (spec.window, *(layer.ratio for layer in spec.layers))
    assert {type(size) for size in sizes} == {int}

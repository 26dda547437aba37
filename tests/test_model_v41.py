"""DeepSeek-V4.1: its configs, and the roles of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsv4.errors import ConfigError
from dsv4.model import PRESETS, AttentionType, LayerSpec, ModelSpec, v41_layers

FLASH = PRESETS["v41-flash"]
RATIOS = [0, 0] + [2] * 18 + [1] * 20


def text_config(**changes: Any) -> dict[str, Any]:
    """What the checkpoint's text_config says of attention."""
    config = {
        "model_type": "deepseek_v41_text",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "sliding_window": 128,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-20,
        "num_nextn_predict_layers": 3,
        "rope_theta": 10_000,
        "compress_rope_theta": 160_000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65_536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "compress_ratios": [*RATIOS, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "dspark_block_size": 5,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41",
        "text_config": text_config(**changes),
        "vision_config": {},
    }


def inference_config() -> dict[str, Any]:
    return {
        "dim": 5120,
        "n_layers": 40,
        "n_heads": 64,
        "compress_ratios": RATIOS,
        "n_mtp_layers": 3,
        "index_n_heads": 32,
        "norm_eps": 1e-20,
        "rope_factor": 16,
        "kv_source_layers": [2, 8, 14, 20],
        "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "dspark_block_size": 5,
    }


@pytest.mark.parametrize(
    "given",
    [
        config(),
        config(compress_ratios=RATIOS),
        text_config(),
        text_config(model_type=...),
        inference_config(),
    ],
    ids=["release", "40 ratios", "text alone", "told by its sources", "inference"],
)
def test_every_form_of_the_config_is_the_preset(given: dict[str, Any]) -> None:
    assert replace(ModelSpec.from_config(given), name=FLASH.name) == FLASH


def test_roles_of_the_released_layers() -> None:
    layers = FLASH.layers
    assert len(layers) == 43
    assert [s.layer for s in layers if s.attention is AttentionType.SWA] == [0, 1, 40, 41, 42]
    assert [s.layer for s in layers if not s.yarn] == [0, 1, 40, 41, 42]
    assert [s.layer for s in layers if s.draft] == [40, 41, 42]
    assert [(s.layer, s.ratio) for s in layers if s.owns_entries] == [
        (2, 2), (8, 2), (14, 2), (20, 1)
    ]  # fmt: skip
    assert [s.layer for s in layers if s.has_indexer] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [s.layer for s in layers if s.candidates_of is not None] == [24, 28, 32, 36]
    assert FLASH.candidate_sources == {20}
    assert [s.layer for s in layers if s.index_keys == "latent"] == [2, 8, 14, 20]
    assert not any(s.overlap for s in layers)
    assert [s.layer for s in layers if not s.gated] == [20]
    assert [s.layer for s in layers if s.tail_skips_last] == [2, 8, 14, 20]
    assert [s.layer for s in layers if not s.index_hadamard] == [2, 8, 14, 20]
    assert FLASH.cut_replays
    assert not PRESETS["v4-flash"].cut_replays
    for spec in layers[2:40]:
        assert spec.owner == max(n for n in (2, 8, 14, 20) if n <= spec.layer)
        selector = max(n for n in (2, 8, 14, 20, 24, 28, 32, 36) if n <= spec.layer)
        assert (spec.layer if spec.has_indexer else spec.selector) == selector


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        ({"ratio": 2, "gated": False}, "pools 2 tokens without gates"),
        ({"ratio": 4, "overlap": True, "tail_skips_last": True}, "groups that overlap keep all"),
    ],
)
def test_facts_of_a_layer_that_cannot_be_together_are_refused(
    facts: dict[str, Any], match: str
) -> None:
    layer = LayerSpec(layer=0, owner=0, attention=AttentionType.CSA, **facts)
    with pytest.raises(ConfigError, match=match):
        replace(PRESETS["tiny"], layers=(layer,))


def test_v4_layers_select_for_themselves() -> None:
    for spec in PRESETS["v4-flash"].layers:
        csa = spec.attention is AttentionType.CSA
        assert (spec.selector, spec.has_indexer) == (None, csa)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layer_ids": [8, 14, 20]}, "layer 2 reads entries, but no kv_source"),
        ({"index_source_layer_ids": [20]}, "layer 2 reads entries, but no index_source"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "not an earlier layer of the same ratio"),
        ({"kv_source_layer_ids": ...}, "no 'kv_source_layer_ids'"),
        ({"index_source_layer_ids": [2, 8, 14, 24]}, "takes the selection of layer 14"),
        ({"candidate_source_layer_id": 21}, "takes the candidates of layer 21"),
        ({"candidate_topk_blocks": 64}, "505 visible entries for certain"),
        ({"candidate_topk_blocks": ...}, "fewer than index_topk=512"),
        ({"compress_ratios": [*RATIOS, 1]}, "draft layer 40"),
        ({"candidate_topk_blocks": -1}, "candidate_topk_blocks=-1"),
        ({"candidate_block_size": 0}, "candidate_block_size=0"),
        ({"candidate_block_size": 8.5}, "8.5 where a whole number"),
        ({"kv_source_layer_ids": [2, 8, 14.5, 20]}, "14.5 where a whole number"),
        ({"dspark_block_size": True}, "True where a whole number"),
    ],
    ids=str,
)
def test_configs_that_name_no_source_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(config(**changes))


@pytest.mark.parametrize("given", [None, 5, [], b"config.json"], ids=str)
def test_what_is_no_config_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="give a path"):
        ModelSpec.from_config(given)


def test_what_a_config_leaves_out_is_the_released_model_s() -> None:
    assert ModelSpec.from_config(config(rms_norm_eps=...)).rms_eps == FLASH.rms_eps
    assert ModelSpec.from_config(config(candidate_block_size=None)).candidate_block_entries == 8
    inference = inference_config()
    del inference["norm_eps"]
    assert ModelSpec.from_config(inference).rms_eps == FLASH.rms_eps


def test_just_enough_candidates_are_taken_and_none_need_no_source() -> None:
    assert ModelSpec.from_config(config(candidate_topk_blocks=65)).candidate_blocks == 65
    without = ModelSpec.from_config(config(candidate_source_layer_id=-1, candidate_topk_blocks=...))
    assert not any(spec.candidates_of is not None for spec in without.layers)


def test_every_role_is_in_the_tiny_one() -> None:
    tiny = PRESETS["v41-tiny"]

    def roles(model: ModelSpec) -> set[tuple[object, ...]]:
        return {
            (s.ratio, s.owns_entries, s.has_indexer, s.candidates_of is None, s.draft)
            for s in model.layers
        }

    assert roles(tiny) == roles(FLASH)


@pytest.mark.parametrize(
    "change",
    [
        {"candidates_of": 3},  # its own
        {"candidates_of": 1},  # reads other entries
        {"selector": 4},  # a later layer
        {"selector": 0},  # selects nothing
    ],
    ids=str,
)
def test_sources_of_layers_are_checked(change: dict[str, int]) -> None:
    tiny = PRESETS["v41-tiny"]
    layers = list(tiny.layers)
    layers[3] = replace(layers[3], **change)
    with pytest.raises(ConfigError, match="layer 3"):
        replace(tiny, layers=tuple(layers))


def test_a_reader_takes_no_candidates() -> None:
    reader = LayerSpec(
        layer=5, owner=3, attention=AttentionType.CSA, ratio=1, selector=4, candidates_of=3
    )
    tiny = PRESETS["v41-tiny"]
    with pytest.raises(ConfigError, match="only a layer that selects for itself"):
        replace(tiny, layers=(*tiny.layers[:5], reader, *tiny.layers[6:]))


def test_the_maps_follow_from_any_sources() -> None:
    layers = v41_layers([0, 2, 2, 2, 1], backbone=5, entry_sources=(1, 4), index_sources=(1, 3, 4))
    assert [spec.owner for spec in layers] == [0, 1, 1, 1, 4]
    assert [spec.selector for spec in layers] == [None, None, 1, None, None]
    assert {spec.candidates_of for spec in layers} == {None}

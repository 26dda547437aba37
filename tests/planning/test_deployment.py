"""What fits on some GPUs, against adding it up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.model import PRESETS
from dsv4.planning.deployment import Load, Weights, deploy
from dsv4.planning.gpus import GPUS, parse_gpus
from dsv4.planning.layouts import Layout, layout_of, stages
from dsv4.planning.peers import PEERS, peers_of
from dsv4.planning.weights import PRESET_WEIGHTS
from dsv4.planning.workspace import snapshot_pool_bytes, workspace_of

FLASH = PRESETS["v4-flash"]
WEIGHTS = Weights.derived(FLASH, PRESET_WEIGHTS["v4-flash"], drafts=False)
LOAD = Load(step_tokens=512, snapshots=8, activations_bytes=3 * 10**9)


@pytest.mark.parametrize(
    "layout", [Layout(dp=4), Layout(tp=4), Layout(tp=2, dp=2), Layout(tp=2, pp=2), Layout(pp=4)]
)
@pytest.mark.parametrize("context", [8192, 1_048_576])
def test_as_many_fit_as_the_fullest_rank_holds_and_not_one_more(
    layout: Layout, context: int
) -> None:
    gpus = parse_gpus("4x80GB")
    found = deploy(
        FLASH, gpus, WEIGHTS, layout=layout, make_schema=CacheSchema.build, contexts=[context],
        load=LOAD,
    ).chosen.fits[0]  # fmt: skip

    def fits(requests: int) -> bool:
        for layers, part in stages(FLASH, layout.pp):
            schema = CacheSchema.build(part)
            last = layers.stop == len(FLASH.layers)
            used = WEIGHTS.of_rank(layers, layout, last=last) + 3 * 10**9
            of = workspace_of(schema, gpus.gpu, max_step_tokens=512)
            used += of(requests) + snapshot_pool_bytes(schema, 8)
            if used + requests * schema.bytes.of_request(context) > 80 * 10**9:
                return False
        return True

    of_rank = found.requests // layout.dp
    assert found.requests == of_rank * layout.dp
    assert fits(of_rank)
    assert not fits(of_rank + 1)


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=4)])
def test_ranks_hold_the_whole_model(layout: Layout) -> None:
    """Experts once; what is not divided as often as it is said to be."""
    total = sum(
        WEIGHTS.of_rank(layers, layout, last=layers.stop == len(FLASH.layers))
        * layout.tp
        * layout.dp
        for layers, _ in stages(FLASH, layout.pp)
    )
    ranks = {"experts": 1, "heads": layout.dp, "nowhere": layout.dp * layout.tp}
    expected = sum(each.bytes * ranks[each.divided] for each in WEIGHTS.tensors)
    assert 0 <= total - expected < 2000 * layout.gpus  # bytes that do not divide


def test_stages_have_every_layer_once_and_every_byte_of_the_cache() -> None:
    for pp in (1, 2, 3, 8, 43):
        parts = list(stages(FLASH, pp))
        assert [layer for layers, _ in parts for layer in layers] == list(range(44))
        kept = sum(CacheSchema.build(part).bytes.per_token for _, part in parts)
        assert kept == pytest.approx(CacheSchema.build(FLASH).bytes.per_token, rel=0.02)


def test_tensor_parallel_ranks_keep_the_whole_cache() -> None:
    gpus = parse_gpus("8xH200")
    found = deploy(FLASH, gpus, WEIGHTS, layout=layout_of(8), make_schema=CacheSchema.build)
    by_layout = {each.layout: each for each in (found.chosen, *found.others)}
    tensor, data = by_layout["TP 8, EP 8"], by_layout["EP 8, DP 8"]
    assert (tensor.cache, data.cache) == ("replicated in 8 ranks", "divided by requests")
    assert tensor.rank is not None
    assert data.rank is not None
    assert tensor.rank.weights < data.rank.weights
    for one, many in zip(tensor.fits, data.fits, strict=True):
        assert 7 * one.requests < many.requests < 8 * one.requests


def test_other_caches_are_given_the_same_memory() -> None:
    gpus = parse_gpus("4xH200")
    found = deploy(FLASH, gpus, WEIGHTS, layout=Layout(dp=4), make_schema=CacheSchema.build)
    assert found.chosen.rank is not None
    left = 141 * 10**9 - found.chosen.rank.weights
    for fit in found.chosen.fits:
        each = fit.context_tokens * 3915 + 26_100_000
        assert fit.peers["vLLM"] == (4 * (left // each), 4 * (left // each))
        low, high = fit.peers["SGLang"]
        assert low < high < fit.requests
    assert peers_of(FLASH) == PEERS
    assert peers_of(PRESETS["v4-pro"]) == peers_of(replace(FLASH, head_dim=256)) == ()


def test_what_does_not_fit_says_what_would() -> None:
    def ask(gpus: str, **more: object) -> tuple[bool, int | None]:
        asked = parse_gpus(gpus)
        found = deploy(
            FLASH, asked, WEIGHTS, layout=layout_of(asked.count), make_schema=CacheSchema.build,
            **more,  # type: ignore[arg-type]
        )  # fmt: skip
        return found.fits, found.needed_gpus

    assert ask("80GB") == (False, 3)
    assert ask("3x80GB") == (True, None)
    assert ask("2x80GB")[0] is False
    assert ask("2xH200", contexts=[131_072], requests=300) == (False, 3)
    assert ask("3xH200", contexts=[131_072], requests=300) == (True, None)
    assert ask("8GB") == (False, None)  # what every rank has is more than that


@pytest.mark.parametrize(
    ("layout", "word"),
    [(Layout(tp=3), "divides both"), (Layout(pp=44), "43 layers"), (Layout(dp=300), "256 experts")],
)
def test_what_cannot_be_divided_is_refused(layout: Layout, word: str) -> None:
    gpus = parse_gpus(f"{layout.gpus}xH200")
    with pytest.raises(InvalidInput, match=word):
        deploy(FLASH, gpus, WEIGHTS, layout=layout, make_schema=CacheSchema.build)


def test_a_model_whose_layers_share_entries_has_no_stages() -> None:
    model = PRESETS["v41-flash"]
    found = deploy(
        model, parse_gpus("2xH200"), Weights.given(10**11), layout=Layout(dp=2),
        make_schema=CacheSchema.build,
    )  # fmt: skip
    assert [each.why_not != "" for each in found.others] == [False, True]
    assert found.weights_bytes == 10**11
    assert found.chosen.rank is not None
    assert found.chosen.rank.weights == 5 * 10**10


# ---- GPUs as people write them -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "name", "memory_bytes"),
    [
        ("4x80GB", 4, "80GB", 80 * 10**9),
        ("2 x 141 GB", 2, "141 GB", 141 * 10**9),
        ("8xH200", 8, "H200", 141 * 10**9),
        ("8H200", 8, "H200", 141 * 10**9),
        ("H200x8", 8, "H200", 141 * 10**9),
        ("8 rtx 4090", 8, "RTX-4090", 24 * 10**9),
        ("a100 40gb x 2", 2, "A100-40GB", 40 * 10**9),
        ("4 x 80 GB", 4, "80 GB", 80 * 10**9),
        ("8\u00d7h100", 8, "H100", 80 * 10**9),
        ("rtx 4090", 1, "RTX-4090", 24 * 10**9),
        ("80GiB", 1, "80GiB", 80 * 2**30),
        ("80G", 1, "80G", 80 * 10**9),
    ],
)
def test_gpus_are_read(text: str, count: int, name: str, memory_bytes: int) -> None:
    found = parse_gpus(text)
    assert (found.count, found.gpu.name, found.gpu.memory_bytes) == (count, name, memory_bytes)


@pytest.mark.parametrize("text", ["", "0x80GB", "4x", "x80GB", "4xB9000", "5000xH200", "4x0GB"])
def test_what_are_no_gpus_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_gpus(text)


def test_names_are_keys() -> None:
    assert all(gpu.name.lower() == key for key, gpu in GPUS.items())

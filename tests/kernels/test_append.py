"""The fused append, interpreted, against the reference: whole arenas, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.kernels import append as append_kernel
from dsv4.kernels import compress
from tests.support.both import CSA, HCA, SWA, TINY, TINY_LAYERS, Both, two_layers_of_flash
from tests.support.formats import BF16_ENTRY_FORMATS, BF16_INDEX_FORMATS
from tests.support.stack import POISON, Stack, Stream

# ---- every layer of the tiny model ---------------------------------------------------------------


def test_token_by_token_from_the_start():
    """The first groups, without and with a previous one."""
    both = Both(requests=1)
    for _ in range(9):
        both.step({0: 1})


def test_padded_decode_steps():
    both = Both(requests=4)
    both.skip({0: 3, 1: 126, 2: 255, 3: 7})
    both.step({0: 1, 2: 1}, pad_tokens=4, pad_requests=4)
    both.step({1: 1, 3: 1}, pad_tokens=3, pad_requests=3)
    both.step({1: 1}, pad_tokens=2)
    both.empty_step(pad_tokens=4, pad_requests=4)


def test_index_keys_without_a_hadamard_transform():
    """The indexer has a compressor of its own all the same."""
    layer = replace(TINY.layers[CSA], layer=0, owner=0, index_hadamard=False)
    both = Both(model=replace(TINY, layers=(layer,)), layers=(0,), requests=2)
    plain = Both(
        model=replace(TINY, layers=(replace(layer, index_hadamard=True),)), layers=(0,), requests=2
    )
    page = both.schema.layout.page("index_keys", 0)
    assert page is not None
    for each in (both, plain):
        each.skip({0: 2, 1: 3})
        each.step({0: 7, 1: 1})
        each.step({0: 1, 1: 1})
    keys = slice(page.offset_bytes, page.offset_bytes + page.payload_bytes)
    ours, usual = (each.stacks[0].manager.memory.block_arena.bytes for each in (both, plain))
    assert not torch.equal(ours[:, keys], usual[:, keys])
    ours[:, keys], usual[:, keys] = 0, 0
    assert torch.equal(ours, usual)


def test_a_step_without_tokens_launches_nothing():
    both = Both(requests=1)
    both.empty_step()
    both.step({0: 0})
    for stack in both.stacks:
        assert (stack.manager.memory.block_arena.bytes == POISON).all()
        assert (stack.manager.memory.slot_arena.bytes == POISON).all()


def test_draft_steps_and_rejections():
    both = Both(requests=3, max_draft_tokens=4)
    both.skip({0: 126, 1: 2, 2: 9})
    both.step({0: 5, 1: 5, 2: 0}, accepted=[1, 3, 0], pad_tokens=15, pad_requests=3)
    both.step({2: 3, 0: 5}, accepted=[3, 5])
    both.step({0: 5, 1: 2}, accepted=[0, 0])


def test_chunks_that_straddle_groups():
    both = Both(layers=(CSA, HCA), requests=3)
    both.step({0: 6, 1: 2, 2: 1})
    both.step({0: 3, 1: 4, 2: 0})
    both.step({0: 1, 2: 5})


def test_a_chunk_that_turns_the_rings():
    """More tokens than any ring holds, and a group of 128 that began before."""
    both = Both(layers=(HCA,), requests=1)
    both.skip({0: 5})
    both.step({0: 130})


def test_a_csa_chunk_that_turns_the_tails():
    both = Both(layers=(CSA,), requests=2)
    both.skip({0: 3})
    both.step({0: 14, 1: 13})


def test_kv_that_is_normed_already():
    both = Both(layers=(SWA, CSA), requests=2, stack={"kv_norm": False})
    both.step({0: 5, 1: 1})
    both.step({0: 1, 1: 1})


def test_reused_slots_and_blocks_out_of_order():
    both = Both(layers=(CSA, HCA), requests=2)
    both.skip({0: 200, 1: 126})
    both.replace_request(0)
    both.step({0: 1, 1: 1})
    both.step({1: 6, 0: 4})


# ---- formats and values --------------------------------------------------------------------------


@pytest.mark.parametrize("entry_format", BF16_ENTRY_FORMATS)
def test_entry_formats(entry_format: str):
    both = Both(layers=(SWA, CSA, HCA), requests=1, entry_format=entry_format)
    both.skip({0: 119})
    both.step({0: 9})
    both.step({0: 1})


@pytest.mark.parametrize("index_format", BF16_INDEX_FORMATS)
def test_index_formats(index_format: str):
    both = Both(layers=(CSA,), requests=1, index_format=index_format)
    both.step({0: 9})
    for _ in range(3):
        both.step({0: 1})


@pytest.mark.parametrize(
    ("entry_format", "index_format"),
    [("fp8_ds", "mxfp4"), ("fp8_row", "nvfp4"), ("bf16", "fp8"), ("fp8_ds", "bf16")],
)
def test_outliers(entry_format: str, index_format: str):
    both = Both(
        layers=(SWA, CSA),
        requests=1,
        stack={"spread": 3.0},
        entry_format=entry_format,
        index_format=index_format,
    )
    both.step({0: 13})
    both.step({0: 1})


def poisoned(stream: Stream, values: Sequence[float]) -> Stream:
    """Puts each value somewhere into every projection: first and last rows, spread channels."""
    for tensors in (*stream.projections.values(), *((kv,) for kv in stream.kv.values())):
        for tensor in tensors:
            for nth, value in enumerate(values):
                tensor[nth * 3 % 12, 5 + 17 * nth] = value
    return stream


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "values", [(NAN,), (INF,), (-INF,), (NAN, INF, -INF, -NAN, 3e38, -3e38)], ids=str
)
@pytest.mark.parametrize(("entry_format", "index_format"), [("fp8_ds", "mxfp4"), ("bf16", "nvfp4")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_and_infinity(values: Sequence[float], entry_format: str, index_format: str):
    """What they become is the codec's decision, and every NaN has the same bits."""
    both = Both(
        layers=(SWA, CSA),
        requests=1,
        entry_format=entry_format,
        index_format=index_format,
        tokens=16,
    )
    both.streams[0] = poisoned(both.streams[0], values)
    both.step({0: 8})
    for _ in range(4):
        both.step({0: 1})


@pytest.mark.parametrize("entry_format", BF16_ENTRY_FORMATS)
def test_nan_in_kv_that_is_normed_already(entry_format: str):
    """bf16 channels keep the bits they come with, whatever NaN it is."""
    both = Both(layers=(SWA,), requests=1, stack={"kv_norm": False}, entry_format=entry_format)
    bits = both.streams[0].kv[SWA].view(torch.int16)
    for nth, nan in enumerate((0x7FC0, 0x7F81, 0x7FFF, -1, -64, -127, 0x7F80, -128)):
        bits[0, 3 + 16 * nth], bits[1, nth] = nan, nan
    both.step({0: 3})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_in_an_hca_group():
    both = Both(layers=(HCA,), requests=1, entry_format="bf16")
    for tensor in both.streams[0].projections[HCA]:
        tensor[77, 9], tensor[127, 70] = NAN, INF
    both.skip({0: 127})
    both.step({0: 1})
    page = both.stacks[1].manager.acquire(HCA).memory.pool.views["entries_nope"]
    entry = page[both.lives[1][0].block_ids[0], 0]
    assert entry.isnan().any()
    assert set(entry.view(torch.int16)[entry.isnan()].tolist()) == {0x7FC0}


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [1, 2])
def test_programs_that_take_several_items(items: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compress, "CHANNELS_IN_ONE_PROGRAM", items * TINY.index_dim)
    both = Both(layers=(CSA,), requests=3, max_draft_tokens=3)
    both.skip({0: 126, 1: 3, 2: 127})
    both.step({0: 4, 1: 4, 2: 4}, accepted=[3, 4, 1], pad_tokens=12, pad_requests=3)
    both.step({0: 13, 1: 9})
    both.empty_step(pad_tokens=12, pad_requests=3)


def test_programs_that_take_one_item_after_the_other(monkeypatch: pytest.MonkeyPatch):
    """Of four requests three close a group in the padded step, for which two programs per split
    are launched."""
    splits = TINY.head_dim // compress.SPLIT_CHANNELS
    monkeypatch.setattr(compress, "MOST_NARROW_PROGRAMS", 2 * splits)
    both = Both(layers=(CSA, HCA), requests=4)
    both.skip({0: 127, 1: 255, 2: 3, 3: 127})
    both.step({0: 1, 1: 1, 2: 1, 3: 1}, pad_tokens=4, pad_requests=4)
    both.empty_step(pad_tokens=4, pad_requests=4)


@pytest.mark.parametrize(
    ("layer", "state"), [*((layer, "raw") for layer in TINY_LAYERS), (HCA, "online")]
)
def test_a_layer_is_one_launch_and_a_chunk_one_more(
    layer: int, state: HcaState, monkeypatch: pytest.MonkeyPatch
):
    launches: list[int] = []

    class Counting:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            launches.append(grid[0])
            return lambda *arguments, **constants: None

    monkeypatch.setattr(append_kernel, "_append_kernel", Counting())
    schema = CacheSchema.build(TINY, max_context=512, hca_state=state)
    stack = Stack(schema, layers=[layer], backend="triton", max_requests=2)
    stream = stack.stream(0, 200)
    requests = [stack.manager.admit_request() for _ in range(2)]
    for count, expected in ((1, 1), (150, 2)):
        launches.clear()
        stack.step([(request, stream, count) for request in requests])
        assert len(launches) == expected


# ---- the pieces by their own names ---------------------------------------------------------------


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
def test_window_tails_and_flush_one_by_one(layer: int):
    both = Both(layers=(layer,), requests=2)
    both.skip({0: 126, 1: 254})
    for _ in range(2):
        both.step_by_hand(layer)


@pytest.mark.parametrize("layer", [CSA, HCA])
def test_compressed_tails_as_dense_rows(layer: int):
    both = Both(layers=(layer,), requests=3)
    both.skip({0: 127, 1: 2, 2: 255})
    assert both.compressed_tails(layer).tolist().count(True) == 2


# ---- real widths ---------------------------------------------------------------------------------


def test_v4_flash_csa():
    both = Both(model=two_layers_of_flash(), layers=(0,), requests=1, tokens=16)
    both.step({0: 7})
    both.step({0: 1})
    both.step({0: 1}, pad_tokens=2)


def test_v4_flash_hca():
    both = Both(model=two_layers_of_flash(), layers=(1,), requests=1, tokens=140)
    both.step({0: 130})
    both.step({0: 1})

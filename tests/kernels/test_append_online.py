"""The fused append of groups that are kept folded, interpreted, against the reference: whole
arenas, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.model import ModelSpec, v4_layers
from dsv4.reference.pages import ring_rows
from tests.support.both import HCA, Both, two_layers_of_flash
from tests.support.formats import BF16_ENTRY_FORMATS

NAN, INF = float("nan"), float("inf")


def online(**options: Any) -> Both:
    return Both(**{"layers": (HCA,), "hca_state": "online", **options})


def test_token_by_token_from_the_start():
    both = online(requests=1)
    for _ in range(5):
        both.step({0: 1})


def test_padded_decode_steps():
    """Groups that close, that open and that do neither."""
    both = online(requests=4)
    both.skip({0: 3, 1: 126, 2: 255, 3: 128})
    both.step({0: 1, 2: 1}, pad_tokens=4, pad_requests=4)
    both.step({1: 1, 3: 1}, pad_tokens=3, pad_requests=3)
    both.step({1: 1, 2: 1}, pad_tokens=2)
    both.empty_step(pad_tokens=4, pad_requests=4)


def test_draft_steps_and_rejections():
    both = online(requests=3, max_draft_tokens=4)
    both.skip({0: 126, 1: 2, 2: 128})
    both.step({0: 5, 1: 5, 2: 0}, accepted=[1, 3, 0], pad_tokens=15, pad_requests=3)
    both.step({2: 3, 0: 5}, accepted=[3, 5])
    both.step({0: 5, 1: 2}, accepted=[0, 0])


@pytest.mark.parametrize("drafts", [0, 3])
def test_chunks_that_straddle_groups(drafts: int):
    """Those that close no group, one that was open, and one that they begin as well."""
    both = online(requests=3, max_draft_tokens=drafts)
    both.skip({0: 120, 1: 3, 2: 1})
    both.step({0: 10, 1: 11, 2: 6})
    both.skip({2: 110})
    both.step({2: 150 - both.lives[0][2].length})


def test_chunks_of_whole_groups():
    """Small groups: from a boundary to a boundary, and with a piece at both ends."""
    model = replace(ModelSpec.preset("tiny"), layers=v4_layers([16], backbone=1))
    both = online(model=model, layers=(0,), requests=2, block_tokens=16)
    both.skip({0: 16, 1: 5})
    both.step({0: 16, 1: 42})


def test_a_slot_that_held_another_request():
    both = online(requests=2)
    both.skip({0: 200, 1: 126})
    both.replace_request(0)
    both.step({0: 1, 1: 1})
    both.step({1: 6, 0: 4})


@pytest.mark.parametrize("entry_format", BF16_ENTRY_FORMATS)
def test_entry_formats_with_outliers(entry_format: str):
    both = online(requests=1, entry_format=entry_format, stack={"spread": 3.0})
    both.skip({0: 119})
    both.step({0: 9})
    both.skip({0: 127})
    both.step({0: 1})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_and_infinity():
    """-inf as a logit weighs nothing, as in a softmax over the whole group."""
    both = online(requests=1, entry_format="bf16")
    c, z = both.streams[0].projections[HCA]
    z[:3, 5], z[77, 9], c[127, 70], z[100, 80] = -INF, NAN, INF, INF
    both.skip({0: 126})
    both.step({0: 1})
    both.step({0: 1})
    page = both.stacks[1].manager.acquire(HCA).memory.pool.views["entries_nope"]
    entry = page[both.lives[1][0].block_ids[0], 0]
    assert entry.isnan().any()
    assert set(entry.view(torch.int16)[entry.isnan()].tolist()) == {0x7FC0}


def test_sums_that_are_minus_zero():
    """What a token that is not there adds is -0, so that even a sum of -0 stays. A sum is -0 where
    a negative one has shrunk to nothing; tokens come in chunks that do not fill their last load."""
    both = online(requests=1)
    c, z = both.streams[0].projections[HCA]
    z[:, :9] = -8.0 * torch.arange(len(z))[:, None]
    z[1, :9] = 60.0
    c[0, :9], c[1:, :9] = -1e-45, -0.0
    both.skip({0: 1})
    both.step({0: 18})
    both.step({0: 3})
    manager, request = both.stacks[0].manager, both.lives[0][0]
    state = manager.acquire(HCA).memory.compressor.state
    rows = ring_rows(manager.memory.slot_arena.bytes, state, 3, both.schema.model.head_dim)
    products = rows[request.slot, 21 % rows.shape[1], 2, :9]
    assert (products.view(torch.int32) == -(2**31)).all()


def test_window_state_and_flush_one_by_one():
    both = online(requests=2)
    both.skip({0: 126, 1: 254})
    for _ in range(2):
        both.step_by_hand(HCA)


def test_compressed_states_as_dense_rows():
    both = online(requests=3)
    both.skip({0: 127, 1: 2, 2: 255})
    assert both.compressed_tails(HCA).tolist().count(True) == 2


def test_v4_flash():
    """Real widths: the channels of a chunk's group are shared by several programs."""
    both = online(model=two_layers_of_flash(), layers=(1,), requests=1, tokens=140)
    both.skip({0: 97})
    both.step({0: 40})
    both.step({0: 1})

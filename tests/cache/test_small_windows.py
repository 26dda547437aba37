"""Models whose window and layers are few beside a group: a replay must still fill the last one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4.cache.prefix.options import PrefixOptions, zero
from dsv4.cache.prefix.resume import replay_start
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec, v4_layers
from tests.support.lives import Text, assert_cold, run_to
from tests.support.stack import Stack


def schema(window: int, ratios: list[int]) -> CacheSchema:
    model = replace(
        ModelSpec.preset("tiny"), window=window, layers=v4_layers(ratios, backbone=len(ratios))
    )
    return CacheSchema.build(model, max_context=1024)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_replay_fills_the_last_group(window: int):
    stack = Stack(
        schema(window, [4]),
        layers=[0],
        prefix=PrefixOptions(policy=zero()),
        num_blocks=8,
    )
    text = Text.random(stack, 0, 600)
    first = stack.manager.admit_request(text.ids[:300])
    run_to(stack, first, text, 300)
    stack.manager.memory.slot_arena.bytes.fill_(0xFF)
    second = stack.manager.admit_request(text.ids[:300])
    assert second.resume.source == "replay"
    run_to(stack, second, text, 300, chunk=2)
    assert_cold(stack, second, text.stream)


@pytest.mark.parametrize("window", [1, 2, 3, 8])
@pytest.mark.parametrize("ratios", [[4], [4, 4], [0, 4], [4, 0], [4, 4, 4]])
def test_where_a_replay_starts(window: int, ratios: list[int]):
    """Layer by layer: right from `start` on, then window - 1 tokens later than the layer below."""
    made = schema(window, ratios)
    start = replay_start(made, 512)
    for layer, ratio in enumerate(ratios):
        right_from = start + layer * (window - 1)
        assert right_from <= 512 - (window - 1)
        assert right_from <= 512 - ratio
    assert start == 512 - max(
        window * len(ratios), *(r + nth * (window - 1) for nth, r in enumerate(ratios))
    )

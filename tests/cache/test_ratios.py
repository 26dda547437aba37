"""Compression ratios that are no power of two: the reference takes them, the kernels refuse them
when the manager is built, not in the middle of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.errors import SchemaError
from dsv4.model import ModelSpec, v4_layers
from tests.support.lives import Text, assert_cold, run_to
from tests.support.stack import Stack


@pytest.mark.parametrize("ratios", [[3], [0, 4, 24], [4, 6]], ids=str)
def test_a_ratio_that_no_tile_holds_is_refused_by_the_kernels(ratios: list[int]):
    layers = v4_layers(ratios, backbone=len(ratios))
    model = replace(ModelSpec.preset("tiny"), window=32, layers=layers)
    schema = CacheSchema.build(model, max_context=960, max_draft_tokens=1, block_tokens=480)
    with pytest.raises(SchemaError, match=rf"layer .* entry of {ratios[-1]} tokens.*power of two"):
        KVCacheManager(schema, num_blocks=4, max_requests=1, backend="triton")
    stack = Stack(schema, layers=tuple(range(len(ratios))), num_blocks=8, max_requests=2)
    text = Text.random(stack, 0, 300)
    request = stack.manager.admit_request(250)
    run_to(stack, request, text, 200)
    run_to(stack, request, text, 210, chunk=1)
    assert_cold(stack, request, text.stream)

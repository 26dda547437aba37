"""`layers[i].keys`, for code that looks into a cache: transformers' own, or an error in words."""

from __future__ import annotations

import pytest
import torch

from dsv4.errors import InvalidInput
from tests.integrations.fast_v4 import fast, plain_model
from tests.integrations.tiny_v4 import own_cache, paged, prompt, run, tiny_model


@pytest.mark.parametrize("steps", [[5], [127, 1], [200, 1, 1]], ids=str)
def test_keys_are_those_of_transformers(steps: list[int]) -> None:
    model, ids = tiny_model(), prompt(sum(steps), rows=2)
    cache, own = paged(model), own_cache(model)
    assert cache.layers[0].keys is None
    assert not cache.layers[0].is_initialized
    for past in (cache, own):
        run(model, ids, past, steps)
    for ours, theirs in zip(cache.layers, own.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert cache.layers[0].is_initialized
    cache.reset()
    assert cache.layers[0].keys is None


@torch.no_grad()
def test_keys_of_the_fast_path() -> None:
    plain, ids = plain_model(), prompt(140, rows=2)
    own = plain(ids).past_key_values
    with fast(plain) as model:
        past = model(ids).past_key_values
        for ours, theirs in zip(past.layers, own.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-4)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        ragged = model(ids, attention_mask=mask).past_key_values
        with pytest.raises(InvalidInput, match="137 to 140 tokens have no keys of one shape"):
            _ = ragged.layers[0].keys


def test_a_layer_alone_does_nothing() -> None:
    cache = paged(tiny_model())
    layer = cache.layers[1]
    for call in (
        *(lambda: layer.crop(-1), layer.reset, layer.offload, layer.prefetch),
        lambda: layer.reorder_cache(torch.tensor([0])),
    ):
        with pytest.raises(InvalidInput, match="the cache, not a layer"):
            call()

"""Beams and batches: rows that change places, vanish and multiply."""

from __future__ import annotations

import copy

import pytest
import torch

from dsv4.errors import InvalidInput
from tests.integrations.quantised_layers import rounding_cache
from tests.integrations.tiny_v4 import (
    assert_same_logits,
    paged,
    prompt,
    run,
    tiny_model,
)

BEAMS = {"num_beams": 4, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}


def test_beam_search_equals_transformers():
    """transformers' cache with all of its state reordered; and no cache at all, which nothing can
    mix up. 110 to 138 tokens: groups and a block close, beams part and die on both sides."""
    model = tiny_model()
    ids = prompt(110, rows=2)
    cache = paged(model, max_batch=8)
    options = BEAMS | {"max_new_tokens": 28}
    found = model.generate(ids, past_key_values=cache, **options)
    cache.manager.check_invariants()
    expected = model.generate(ids, past_key_values=rounding_cache(model), **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert_same_logits(found.scores, expected.scores)
    beam_changes = found.beam_indices[:, 1:28] != found.beam_indices[:, :27]
    assert beam_changes.any()
    without = model.generate(ids, use_cache=False, **options)
    assert torch.equal(found.sequences, without.sequences)
    torch.testing.assert_close(found.sequences_scores, without.sequences_scores)


def test_shared_blocks_are_not_copied():
    model = tiny_model()
    cache = paged(model, max_batch=4, max_context=512)
    run(model, prompt(300), cache, [300])
    before = cache.manager.stats().blocks_live
    cache.batch_repeat_interleave(4)
    # two whole blocks are shared; each copy has its own unfinished third
    assert (before, cache.manager.stats().blocks_live) == (3, 6)
    assert len(cache.requests) == 4


@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1, 1], [0], [2, 2, 0, 0], [0, 1, 2]], ids=str)
def test_rows_go_on_as_the_rows_they_were(index: list[int]):
    model = tiny_model()
    cache = paged(model, max_batch=4)
    ids = prompt(131, rows=3)
    run(model, ids, cache, [130, 1])
    getattr(cache, "reorder_cache" if len(index) == 3 else "batch_select_indices")(
        torch.tensor(index)
    )
    follow = prompt(12, rows=len(index), seed=6)
    found = run(model, follow, cache, [1] * 12)
    own = rounding_cache(model)
    run(model, ids, own, [130, 1])
    own.reorder_cache(torch.tensor(index))
    assert_same_logits(found, run(model, follow, own, [1] * 12))
    assert torch.equal(cache.history_ids, torch.cat((ids[index], follow), dim=1))
    cache.manager.check_invariants()
    assert cache.manager.stats().requests_live == len(index)


def test_crop_after_a_fork():
    """The copies crop and grow apart although they share blocks."""
    model = tiny_model()
    cache = paged(model, max_batch=2)
    ids = prompt(258)
    run(model, ids, cache, [256, 1, 1])
    cache.batch_repeat_interleave(2)
    cache.crop(257)
    follow = prompt(140, rows=2, seed=7)
    found = run(model, follow, cache, [1, 1, 138])
    own = rounding_cache(model)
    run(model, ids[:, :257], own, [256, 1])
    own.reorder_cache(torch.tensor([0, 0]))
    assert_same_logits(found, run(model, follow, own, [1, 1, 138]))
    cache.manager.check_invariants()


def test_a_mask_chooses_rows():
    model = tiny_model()
    cache = paged(model, max_batch=3)
    ids = prompt(20, rows=3)
    run(model, ids, cache, [20])
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert torch.equal(cache.history_ids, ids[[0, 2]])


def test_too_many_rows_change_nothing():
    model = tiny_model()
    cache = paged(model, max_batch=3)
    run(model, prompt(20, rows=2), cache, [20])
    requests = list(cache.requests)
    for many in (lambda: cache.batch_repeat_interleave(2), lambda: cache.rows.take([0, 2])):
        with pytest.raises(InvalidInput, match="rows"):
            many()
    assert cache.requests == requests
    assert not any(request.released for request in requests)
    cache.manager.check_invariants()


def test_rows_of_an_empty_cache():
    cache = paged(tiny_model())
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(3)
    assert cache.requests == []
    assert copy.deepcopy(cache).columns == 0

"""Padding: right in a forward, on the left in generate; everything else is refused before anything
runs, on both caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from dsv4.errors import InvalidInput
from tests.integrations.fast_v4 import assert_close, counted, fast, manager_of, plain_model
from tests.integrations.tiny_v4 import own_cache, paged, prompt, run, tiny_model

TOLERANCE = 1e-4
LEFT, RIGHT, HOLE = [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1]
EMPTY, WHOLE = [0] * 6, [1] * 6


@pytest.mark.parametrize(
    ("row", "message"),
    [(RIGHT, "row 0 is padded on the right.*padding_side"), (EMPTY, "hides all of row 0")],
    ids=["right", "empty"],
)
@pytest.mark.parametrize("is_given", [True, False], ids=["mask", "pad tokens"])
def test_what_generate_cannot_have(row: list[int], message: str, is_given: bool) -> None:
    """Given as a mask, or as pad tokens, of which transformers makes one."""
    ids, mask = prompt(6, rows=2).clamp_min(1), torch.tensor([row, WHOLE])
    options: dict[str, Any] = {"attention_mask": mask}
    if not is_given:
        ids, options = ids * mask, {"pad_token_id": 0}
    with fast(plain_model()) as model, counted(model) as runs:
        with pytest.raises(InvalidInput, match=message):
            model.generate(ids, max_new_tokens=2, do_sample=False, **options)
        assert runs == []
        assert manager_of(model).stats().requests_live == 0


@pytest.mark.parametrize("row", [LEFT, HOLE], ids=["left", "hole"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_what_generate_can_have(row: list[int], chunk: int | None) -> None:
    """Holes too: what is hidden is not there. And chunks that are all padding in a row."""
    ids, mask = prompt(6, rows=2), torch.tensor([row, WHOLE])
    greedy: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with fast(plain_model()) as model:
        config = GenerationConfig(prefill_chunk_size=chunk, **greedy)
        found = model.generate(ids, config, attention_mask=mask)
    for nth in range(2):
        alone = ids[nth][mask[nth].bool()][None]
        expected = plain_model().generate(alone, **greedy)[0, -3:]
        assert found[nth, -3:].tolist() == expected.tolist()


@torch.no_grad()
@pytest.mark.parametrize("column", [0, 3])
def test_padding_that_has_run_stays_where_it_is(column: int) -> None:
    """A mask that hides tokens of the past, or shows padding: refused in a forward; generate with
    all ids goes back to where it begins."""
    ids, first = prompt(12, rows=2), torch.tensor([LEFT, WHOLE])
    mask = torch.cat((first, torch.ones(2, 6, dtype=torch.int64)), dim=1)
    mask[int(column > 0), column] ^= 1
    greedy: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with fast(plain_model(), max_draft_tokens=8) as model:
        past = model(ids[:, :6], attention_mask=first).past_key_values
        before = manager_state(past)
        back = "crop.3" if column else "reset"
        with pytest.raises(InvalidInput, match=f"column {column}, which was .*{back}"):
            model(ids[:, 6:], attention_mask=mask, past_key_values=past)
        assert manager_state(past) == before
        found = model.generate(ids, attention_mask=mask, past_key_values=past, **greedy)
    for nth in range(2):
        alone = plain_model().generate(ids[nth][mask[nth].bool()][None], **greedy)
        assert found[nth, -3:].tolist() == alone[0, -3:].tolist()


@torch.no_grad()
def test_an_empty_row_of_a_forward_begins_later() -> None:
    ids, more = prompt(6, rows=2), prompt(5, rows=2, seed=3)
    mask = torch.tensor([WHOLE, EMPTY])
    with fast(plain_model()) as model:
        out = model(ids, attention_mask=mask)
        assert not out.logits[1].any()
        both = torch.cat((mask, torch.ones(2, 5, dtype=torch.int64)), dim=1)
        found = model(more, attention_mask=both, past_key_values=out.past_key_values).logits
    assert_close(found[1], plain_model()(more[1:]).logits[0], TOLERANCE)
    whole = plain_model()(torch.cat((ids[:1], more[:1]), dim=1)).logits[0, 6:]
    assert_close(found[0], whole, TOLERANCE)


def wrong_calls(ids: Tensor) -> list[dict[str, Any]]:
    """A step of two columns behind six: masks and positions that say something else."""
    return [
        {"attention_mask": torch.ones(2, 1)},
        {"attention_mask": torch.ones(2, 2)},
        {"attention_mask": torch.zeros(2, 8)},
        {"attention_mask": torch.ones(1, 8)},
        {"position_ids": torch.tensor([[0, 1]])},
        {"position_ids": torch.tensor([[6, 8], [6, 7]])},
        {"position_ids": torch.arange(8)[None]},
        {"position_ids": torch.tensor([6, 7])},
    ]


@torch.no_grad()
@pytest.mark.parametrize("which", range(8))
def test_masks_and_positions_that_do_not_fit(which: int) -> None:
    ids = prompt(8, rows=2)
    model = tiny_model()
    cache = paged(model)
    run(model, ids[:, :6], cache, [6])
    before = manager_state(cache)
    with pytest.raises(InvalidInput):
        model(ids[:, 6:], past_key_values=cache, **wrong_calls(ids)[which])
    assert manager_state(cache) == before
    right = {
        "attention_mask": torch.ones(2, 8),
        "position_ids": torch.tensor([[6, 7]]),
    }
    found = model(ids[:, 6:], past_key_values=cache, **right).logits
    assert torch.equal(found, run(model, ids, own_cache(model), [6, 2])[1])
    with fast(plain_model()) as quick:
        past = quick(ids[:, :6]).past_key_values
        before = manager_state(past)
        with pytest.raises(InvalidInput):
            quick(ids[:, 6:], past_key_values=past, **wrong_calls(ids)[which])
        assert manager_state(past) == before


def manager_state(cache: Any) -> tuple[Any, ...]:
    return cache.manager.stats(), cache.columns, [r.length for r in cache.requests]

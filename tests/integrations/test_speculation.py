"""Drafts: prompt lookup and assistants give what greedy decoding gives, on both caches, and run
hardly more tokens than they keep."""

from __future__ import annotations

import copy
import logging
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

from dsv4.errors import InvalidInput
from dsv4.integrations.transformers import accelerate, restore, speculation
from tests.integrations.fast_v4 import counted, fast, manager_of, plain_model
from tests.integrations.tiny_v4 import VOCABULARY, paged, prompt, tiny_model

NEW_TOKENS = 20
DRAFTS = 4


def greedy(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def repeating(tokens: int) -> torch.Tensor:
    """A text that prompt lookup finds continuations in, right and wrong ones."""
    return prompt(17).repeat(1, -(-tokens // 17))[:, :tokens]


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            eos_token_id=None,
            pad_token_id=None,
        )
    ).eval()


@pytest.mark.parametrize("tokens", [pytest.param(120, marks=pytest.mark.nightly), 126])
def test_prompt_lookup_equals_greedy_and_runs_little(tokens: int) -> None:
    """120 and 126 tokens: drafts are taken back over the end of a block and of groups."""
    plain, ids = plain_model(), repeating(tokens)
    expected = greedy(plain, ids, use_cache=False)
    with fast(plain, max_draft_tokens=DRAFTS) as model, counted(model) as runs:
        found = greedy(model, ids, prompt_lookup_num_tokens=DRAFTS)
        assert found.tolist() == expected.tolist()
        assert all(count <= 1 + DRAFTS for count in runs[1:])
        assert NEW_TOKENS < sum(runs[1:]) <= NEW_TOKENS * (1 + DRAFTS), "some drafts are wrong"
        assert len(runs) <= NEW_TOKENS + 1
        # the next turn goes on behind what was kept
        del runs[:]
        ids = torch.cat((found, prompt(3, seed=4)), dim=1)
        found = greedy(model, ids, prompt_lookup_num_tokens=DRAFTS)
        assert runs[0] <= 4 + DRAFTS
        assert found.tolist() == greedy(plain, ids, use_cache=False).tolist()


def test_more_drafts_than_asked_for_are_right_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Tokens run again from the last snapshot, not from the beginning, and the log says how to
    avoid it."""
    plain, ids = plain_model(), repeating(300)
    with fast(plain) as model, counted(model) as runs, caplog.at_level(logging.WARNING, "dsv4"):
        found = greedy(model, ids, prompt_lookup_num_tokens=DRAFTS)
        assert max(runs[1:]) < 300 - 256 + NEW_TOKENS
    assert found.tolist() == greedy(plain, ids, use_cache=False).tolist()
    assert "max_draft_tokens=" in caplog.text


@pytest.mark.parametrize("of", ["llama", "v4"])
def test_assistants_equal_greedy(of: str) -> None:
    """Another model drafts, of another kind, or V4 itself, accelerated, which is always right."""
    plain, ids = plain_model(), prompt(60)
    expected = greedy(plain, ids, use_cache=False)
    assistant = llama() if of == "llama" else copy.deepcopy(plain)
    if of == "v4":
        accelerate(assistant, max_batch=1, max_context=640, records="bf16", max_draft_tokens=8)
    assistant.generation_config.num_assistant_tokens = DRAFTS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    with fast(plain, max_draft_tokens=DRAFTS) as model, counted(model) as runs:
        found = greedy(model, ids, assistant_model=assistant)
        assert found.tolist() == expected.tolist()
        if of == "v4":
            assert sum(runs[1:]) <= NEW_TOKENS + 3
            assert max(runs[1:]) == 1 + DRAFTS
    if of == "v4":
        restore(assistant)


def test_an_assistant_whose_cache_takes_nothing_back_is_refused() -> None:
    plain, ids = plain_model(), prompt(60)
    with fast(plain, max_draft_tokens=DRAFTS) as model:
        with pytest.raises(InvalidInput, match=r"accelerate\(assistant_model"):
            greedy(model, ids, assistant_model=copy.deepcopy(plain))
        assert manager_of(model).stats().requests_live == 0


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.nightly), DRAFTS])
def test_prompt_lookup_with_an_unmodified_model(drafts: int) -> None:
    model, ids = tiny_model(), repeating(120)
    expected = greedy(model, ids, use_cache=False)
    options = {"prompt_lookup_num_tokens": DRAFTS, "past_key_values": paged(model)}
    with pytest.raises(ValueError, match="stateful"):
        greedy(model, ids, **options)
    calls = []
    with speculation(model):
        hook = model.register_forward_pre_hook(
            lambda module, args, given: calls.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        cache = paged(model, max_draft_tokens=drafts)
        found = greedy(model, ids, **options | {"past_key_values": cache})
        hook.remove()
        with pytest.raises(InvalidInput, match=r"DynamicCache cannot take drafts back.*PagedCache"):
            greedy(model, ids, prompt_lookup_num_tokens=DRAFTS)
        with pytest.raises(InvalidInput, match=r"reset\(\) the cache"):
            greedy(model, found, **options | {"past_key_values": cache})
        with pytest.raises(InvalidInput, match="DynamicCache cannot take drafts back"):
            greedy(model, ids, past_key_values=paged(model), assistant_early_exit=2)
    assert found.tolist() == expected.tolist()
    if drafts:
        assert all(count <= 1 + DRAFTS for count in calls[1:])
    assert model.config.num_hidden_layers == 3
    with pytest.raises(ValueError, match="stateful"):
        greedy(model, ids, **options)


def with_positions(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.22 calls a model: no mask where it would hide nothing, but positions."""
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)  # whose arguments transformers looks at
    def prepared(ids: Tensor, **options: Any) -> dict[str, Any]:
        given: dict[str, Any] = prepare(ids, **options)
        mask = given.pop("attention_mask", None)
        if mask is None:  # this is such a version
            return given
        columns, new = mask.shape[1], given["input_ids"].shape[1]
        return given | {"position_ids": torch.arange(columns)[None, columns - new :]}

    monkeypatch.setattr(model, "prepare_inputs_for_generation", prepared)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("DynamicCache", marks=pytest.mark.nightly),
        "DynamicCache, positions",
        pytest.param("ours", marks=pytest.mark.nightly),
    ],
)
def test_one_cache_passed_each_turn_with_drafts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gives all ids then, whatever the cache has; what is new runs."""
    plain, text = plain_model(), repeating(40)
    past = None if kind == "ours" else DynamicCache(config=plain.config)
    if kind == "DynamicCache, positions":
        with_positions(plain, monkeypatch)
    with fast(plain, max_batch=1, max_draft_tokens=DRAFTS) as model, counted(model) as runs:
        for turn in range(3):
            del runs[:]
            given = {"past_key_values": past, "return_dict_in_generate": True}
            found = greedy(model, text, prompt_lookup_num_tokens=DRAFTS, **given)
            past = found.past_key_values if kind == "ours" else past
            said, text = text.shape[1], found.sequences
            with torch.no_grad():
                likeliest = plain(text, use_cache=False).logits.argmax(dim=-1)
            assert torch.equal(text[:, said:], likeliest[:, said - 1 : -1])
            if turn:
                assert runs[0] <= 1 + 3 + DRAFTS
            text = torch.cat((text, prompt(3, seed=turn)), dim=1)


def test_an_early_exit_is_refused() -> None:
    with fast(plain_model()) as model:
        with pytest.raises(InvalidInput, match="assistant_early_exit"):
            greedy(model, prompt(20), assistant_early_exit=2)
        with pytest.raises(InvalidInput, match="assistant_early_exit"):
            model.generate(prompt(20), GenerationConfig(assistant_early_exit=2))
        assert model.config.num_hidden_layers == len(model.model.layers)


def test_an_assistant_with_an_unmodified_model() -> None:
    model, ids = tiny_model(), prompt(60)
    expected = greedy(model, ids, use_cache=False)
    with speculation(model):
        cache = paged(model, max_draft_tokens=20)
        found = greedy(model, ids, past_key_values=cache, assistant_model=llama())
    assert found.tolist() == expected.tolist()


def test_the_mark_is_off_only_where_drafts_are_right() -> None:
    with fast(plain_model()) as model:
        assert not model._is_stateful
        with pytest.raises(InvalidInput, match="already"), speculation(model):
            pass
    assert model._is_stateful
    with pytest.raises(InvalidInput, match="DeepseekV4"), speculation(llama()):
        pass


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.tensor, np.int64, int])
def test_crop_takes_what_transformers_passes(kind: Any) -> None:
    model, ids = tiny_model(), prompt(30)
    cache = paged(model, max_draft_tokens=3)
    model(ids, past_key_values=cache)
    cache.crop(-kind(0))
    assert cache.columns == 30
    cache.crop(-kind(2))
    assert cache.columns == 28
    for wrong in (torch.tensor(1.5), torch.tensor([1, 2]), torch.tensor(True), True, None):
        with pytest.raises(InvalidInput, match="whole number"):
            cache.crop(wrong)  # type: ignore[arg-type]
    assert cache.columns == 28

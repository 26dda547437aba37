"""Interruptions, copies and odd calls: nothing wrong is served, and the model stays usable."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from dsv4.errors import Dsv4Error, InvalidInput
from dsv4.integrations.transformers.accelerate import accelerate, restore
from tests.integrations.fast_v4 import fast, generate, manager_of, plain_model
from tests.integrations.tiny_v4 import tiny_config
from tests.support.numbers import Numbers

NEW_TOKENS = 3


def ids(count: int, seed: int = 1) -> Tensor:
    return Numbers(seed).integers(3, plain_model().config.vocab_size, 1, count)


def check_like_plain(model: DeepseekV4ForCausalLM, prompt: Tensor) -> None:
    found, expected = (generate(m, prompt, NEW_TOKENS) for m in (model, plain_model()))
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("max_step_tokens", [512, 128])
def test_a_prompt_that_broke_off_is_not_reused(max_step_tokens: int) -> None:
    prompt, seen = ids(300), []

    def break_off(*_: object) -> None:
        seen.append(1)
        if len(seen) * max_step_tokens > 200:
            raise KeyboardInterrupt

    with fast(plain_model(), max_step_tokens=max_step_tokens) as model:
        hook = model.model.layers[2].mlp.register_forward_pre_hook(break_off)
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompt, NEW_TOKENS)
        hook.remove()
        check_like_plain(model, prompt)


def test_only_a_call_for_the_last_column_skips_columns() -> None:
    prompt = ids(300)
    with fast(plain_model()) as model, torch.no_grad():
        generate(model, prompt, NEW_TOKENS)  # cached from here on
        for keep in (torch.tensor([1]), torch.tensor([0, 5]), 2, 0):
            found = model(prompt, logits_to_keep=keep).logits
            expected = plain_model()(prompt, logits_to_keep=keep).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        model.train()
        with pytest.raises(InvalidInput, match="training"):
            model(prompt, logits_to_keep=1)
        model.eval()
        found = model.model(prompt).last_hidden_state
        expected = plain_model().model(prompt).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_crop_into_a_cached_block_when_the_pool_is_full() -> None:
    prompt = ids(256)
    with fast(plain_model(), max_batch=1, max_context=256) as model, torch.no_grad():
        output = model(prompt, logits_to_keep=1)
        output.past_key_values.crop(-1)
        found = model(prompt[:, -1:], past_key_values=output.past_key_values).logits
        expected = plain_model()(prompt).logits[:, -1:]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_crop_replays_behind_more_padding_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4.integrations.transformers.cache.REPLAY_COLUMNS", 4)
    prompt = torch.cat((torch.zeros((1, 10), dtype=torch.int64), ids(20)), dim=1)
    mask = (torch.arange(30) >= 10).long()[None]
    with fast(plain_model()) as model, torch.no_grad():
        cache = model(prompt, attention_mask=mask).past_key_values
        cache.crop(25)
        found = model(prompt[:, 25:], attention_mask=mask, past_key_values=cache).logits
        expected = plain_model()(prompt[:, 10:]).logits[:, 15:]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    with pytest.raises(InvalidInput, match="restored"):
        cache.crop(12)
    assert cache.columns == 30


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention"] * 4},
        {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 96}},
    ],
)
def test_the_default_fits_every_model(changes: dict[str, object]) -> None:
    model = DeepseekV4ForCausalLM(tiny_config(**changes)).eval()
    accelerate(model, max_batch=1, max_context=384, records="bf16")
    assert model.generate(ids(5), max_new_tokens=2, do_sample=False).shape == (1, 7)
    restore(model)


def test_a_model_that_changed_its_type_can_be_restored() -> None:
    model = copy.deepcopy(plain_model())
    accelerate(model, max_batch=1, max_context=384, records="bf16")
    restore(model.half())
    assert "forward" not in vars(model.model)


def test_accelerated_models_are_not_copied() -> None:
    with fast(plain_model()) as model:
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(InvalidInput, match="restore"):
                attempt(model)


def test_a_copied_cache_goes_its_own_way() -> None:
    prompt, ways = ids(150), (ids(3, 7), ids(3, 8))
    with fast(plain_model(), max_batch=2) as model, torch.no_grad():
        cache = model(prompt).past_key_values
        caches = (cache, copy.deepcopy(cache))
        for kept, way in zip(caches, ways, strict=True):
            found = model(way, past_key_values=kept).logits
            expected = plain_model()(torch.cat((prompt, way), dim=1)).logits[:, 150:]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        before = manager_of(model).stats()
        with pytest.raises(Dsv4Error, match="slots"):
            copy.deepcopy(cache)
        assert manager_of(model).stats() == before


def test_two_threads_take_turns() -> None:
    prompts = [ids(40, seed) for seed in (1, 2)]
    alone = [generate(plain_model(), prompt, 8).sequences.tolist() for prompt in prompts]
    with fast(plain_model()) as model, ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda prompt: generate(model, prompt, 8).sequences.tolist(), prompts)
        assert list(found) == alone

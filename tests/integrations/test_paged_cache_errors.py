"""Bad input: a typed error that says what to do, and cache and model are as before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV4ForCausalLM, LlamaConfig, LlamaForCausalLM

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.errors import (
    ContextOverflow,
    InvalidInput,
    OutOfSlots,
    RequestError,
    SchemaError,
    SchemaMismatch,
)
from dsv4.integrations.transformers import PagedCache, accelerate
from tests.integrations.tiny_v4 import (
    assert_same_logits,
    generate,
    own_cache,
    paged,
    prompt,
    run,
    tiny_config,
    tiny_model,
)


@contextmanager
def unchanged(model: DeepseekV4ForCausalLM, cache: PagedCache) -> Iterator[None]:
    """Bytes, lengths, blocks and history; and the model's hooks."""
    manager = cache.manager
    before = manager.memory.block_arena.bytes.clone(), manager.memory.slot_arena.bytes.clone()
    state = manager.stats(), cache.columns, cache.history_ids.clone(), list(cache.requests)
    hooks = dict(model.model._forward_pre_hooks)
    yield
    assert torch.equal(before[0], manager.memory.block_arena.bytes)
    assert torch.equal(before[1], manager.memory.slot_arena.bytes)
    assert state[:2] == (manager.stats(), cache.columns)
    assert torch.equal(state[2], cache.history_ids)
    assert state[3] == cache.requests
    assert hooks == dict(model.model._forward_pre_hooks)
    manager.check_invariants()


def test_models_that_are_not_v4():
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    for model in (llama, tiny_model().model, "v4"):
        with pytest.raises(InvalidInput, match="is not a DeepseekV4ForCausalLM"):
            PagedCache.for_model(model, max_batch=1, max_context=64)


def test_v41_is_refused_by_its_name():
    """By its own class, which transformers may come to have, and under V4's."""
    other = LlamaForCausalLM.__new__(LlamaForCausalLM)
    torch.nn.Module.__init__(other)
    own = DeepseekV4ForCausalLM(tiny_config())  # tiny_model() is others' too
    for model, model_type in ((other, "deepseek_v41"), (own, "deepseek_v41_text")):
        model.config = SimpleNamespace(model_type=model_type)
        with pytest.raises(InvalidInput, match=r"V4\.1 \(model_type 'deepseek_v41.*KVCacheManager"):
            PagedCache.for_model(model, max_batch=1, max_context=64)
        with pytest.raises(InvalidInput, match="not through transformers"):
            accelerate(model, max_batch=1, max_context=64)


def test_models_and_formats_that_do_not_fit():
    half = DeepseekV4ForCausalLM(tiny_config()).to(torch.float16)
    with pytest.raises(InvalidInput, match="float16, which no record format holds"):
        PagedCache.for_model(half, max_batch=1, max_context=64)
    model = tiny_model()
    hooks = len(model.model._forward_pre_hooks)
    with pytest.raises(SchemaError, match="past the 2048 positions"):
        PagedCache.for_model(model, max_batch=1, max_context=2049)
    with pytest.raises(SchemaError, match="unknown record format 'int8'"):
        PagedCache.for_model(model, max_batch=1, max_context=64, records="int8")
    with pytest.raises(SchemaError, match="unknown index format 'fp8_ds'"):
        PagedCache.for_model(model, max_batch=1, max_context=64, index="fp8_ds")
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(InvalidInput, match="max_batch"):
            PagedCache.for_model(model, max_batch=wrong, max_context=64)
    assert len(model.model._forward_pre_hooks) == hooks


@torch.no_grad()
@pytest.mark.parametrize("started", [False, True], ids=["new", "started"])
def test_the_cache_of_another_model(started: bool):
    """Of another shape, and of the same: its biases and replays would be the wrong model's."""
    model = tiny_model()
    others = [
        DeepseekV4ForCausalLM(tiny_config(layer_types=["sliding_attention"] * 3)).eval(),
        DeepseekV4ForCausalLM(tiny_config(head_dim=128)).eval(),
        DeepseekV4ForCausalLM(tiny_config()).eval(),
    ]
    cache = paged(model)
    if started:
        run(model, prompt(9), cache, [9])
    for other in others:
        with pytest.raises(InvalidInput, match="made for another model"), unchanged(model, cache):
            other(input_ids=prompt(5), past_key_values=cache)
    with pytest.raises(SchemaMismatch, match="differs in layers"):
        PagedCache(cache.manager, others[0])


def test_a_cache_that_folds_its_groups():
    model = tiny_model()
    schema = CacheSchema.build(
        paged(model).manager.schema.model,
        max_context=256,
        entry_format="fp32",
        index_format="fp32",
        hca_state="online",
    )
    manager = KVCacheManager(schema, num_blocks=4, max_requests=1)
    with pytest.raises(SchemaMismatch, match="lay it out with hca_state='raw'"):
        PagedCache(manager, model)


@torch.no_grad()
def test_batches_that_do_not_fit():
    model = tiny_model()
    cache = paged(model, max_batch=2)
    with (
        pytest.raises(InvalidInput, match=r"batch of 3 rows.*max_batch=2"),
        unchanged(model, cache),
    ):
        model(input_ids=prompt(5, rows=3), past_key_values=cache)
    run(model, prompt(5, rows=2), cache, [5])
    with pytest.raises(InvalidInput, match="continues a cache of 2"), unchanged(model, cache):
        model(input_ids=prompt(1), past_key_values=cache)


@torch.no_grad()
def test_a_shared_manager_without_free_slots():
    model = tiny_model()
    first = paged(model, max_batch=3)
    run(model, prompt(5, rows=2), first, [5])
    second = PagedCache(first.manager, model)
    with pytest.raises(OutOfSlots), unchanged(model, second):
        model(input_ids=prompt(5, rows=2), past_key_values=second)


@torch.no_grad()
def test_a_context_overrun():
    """Refused before the first layer has written; what fits goes on."""
    model = tiny_model()
    cache, own = paged(model, max_context=140), own_cache(model)
    with pytest.raises(ContextOverflow, match="141 tokens asked"), unchanged(model, cache):
        model(input_ids=prompt(141, rows=2), past_key_values=cache)
    ids = prompt(140, rows=2)
    run(model, ids[:, :135], cache, [135])
    with pytest.raises(ContextOverflow), unchanged(model, cache):
        model(input_ids=prompt(6, rows=2), past_key_values=cache)
    run(model, ids[:, :135], own, [135])
    found = run(model, ids[:, 135:], cache, [5])
    assert_same_logits(found, run(model, ids[:, 135:], own, [5]))
    with pytest.raises(ContextOverflow), unchanged(model, cache):
        model(input_ids=prompt(1, rows=2), past_key_values=cache)


@torch.no_grad()
def test_padding_points_to_accelerate():
    model = tiny_model()
    cache = paged(model)
    ids = prompt(6, rows=2)
    for padded in ([0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]):
        mask = torch.tensor([padded, [1] * 6])
        with pytest.raises(InvalidInput, match="accelerate"), unchanged(model, cache):
            model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(InvalidInput, match="accelerate"), unchanged(model, cache):
            model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
    found = model(input_ids=ids, attention_mask=torch.ones(2, 6), past_key_values=cache).logits
    assert_same_logits([found], run(model, ids, own_cache(model), [6]))


@torch.no_grad()
def test_a_cache_of_the_fast_path_is_not_continued_here():
    """Its tails hold biased gates, those of the modules unbiased ones."""
    model = tiny_model()
    cache = paged(model)
    cache.open_rows(2)
    cache.note_columns(prompt(3, rows=2), torch.ones(2, 3))
    with pytest.raises(InvalidInput, match="holds what accelerate wrote"), unchanged(model, cache):
        model(input_ids=prompt(1, rows=2), past_key_values=cache)
    cache.reset()
    run(model, prompt(3, rows=2), cache, [3])
    with pytest.raises(InvalidInput, match="holds what transformers wrote"):
        cache.open_rows(2)


@torch.no_grad()
def test_positional_arguments_and_the_base_model():
    """The hook sees a call however its arguments are given."""
    model = tiny_model()
    cache, own, ids = paged(model), own_cache(model), prompt(8, rows=2)
    for past in (cache, own):
        model.model(ids[:, :5], None, None, past)
    found = model(ids[:, 5:], None, None, cache).logits
    assert_same_logits([found], [model(ids[:, 5:], None, None, own).logits])
    assert torch.equal(cache.history_ids, ids)


def test_generate_after_an_interrupt_says_what_to_do() -> None:
    """The cache has columns of an answer that nobody got."""
    model, ids, calls = tiny_model(), prompt(20, rows=2), []
    cache = paged(model)

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    hook = model.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, cache, new_tokens=9)
    hook.remove()
    for text in (ids, torch.cat((ids, prompt(2, rows=2)), dim=1)):
        with pytest.raises(InvalidInput, match=r"reset\(\) the cache"):
            generate(model, text, cache, new_tokens=3)
    cache.reset()
    assert generate(model, ids, cache, new_tokens=3).sequences.shape == (2, 23)


def test_models_without_weights_and_wrapped_ones_are_told_of() -> None:
    with torch.device("meta"):
        empty = DeepseekV4ForCausalLM(tiny_config())
    wrapped = torch.nn.Module()
    wrapped.get_base_model = tiny_model  # type: ignore[assignment]  # as a PeftModel has
    for attempt in (PagedCache.for_model, accelerate):
        with pytest.raises(InvalidInput, match="meta device"):
            attempt(empty, max_batch=1, max_context=64)  # type: ignore[operator]
        with pytest.raises(InvalidInput, match=r"give model.get_base_model\(\)"):
            attempt(wrapped, max_batch=1, max_context=64)  # type: ignore[operator]


@pytest.mark.parametrize("missing", ["transformers", "transformers.models.deepseek_v4"])
def test_without_transformers_or_with_one_that_has_no_v4_the_extra_is_named(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from dsv4 import MissingExtra\n"
        "try:\n    import dsv4.integrations.transformers.engine\n"
        "except MissingExtra as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "transformers 5.17 or newer" in ran.stdout, ran.stderr
    assert "pip install 'dsv4[transformers]'" in ran.stdout


def test_a_step_that_is_interrupted_while_it_takes_blocks_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tiny_model(), prompt(20)
    expected = run(model, ids, paged(model), (10, 10))
    cache = paged(model)
    run(model, ids[:, :10], cache, (10,))

    def interrupt(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.manager, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, ids[:, 10:], cache, (10,))
    monkeypatch.undo()
    assert not cache.manager.room.open_plans
    assert cache.columns == 10
    with pytest.raises(RequestError, match="failed"):
        run(model, ids[:, 10:], cache, (10,))
    cache.reset()
    assert_same_logits(run(model, ids, cache, (10, 10)), expected)

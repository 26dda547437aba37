"""Which cache a call works on, who pays for rows, and what is left after a failure."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from dsv4.errors import ContextOverflow, InvalidInput, RequestError
from dsv4.integrations.transformers import Engine, PagedCache
from dsv4.integrations.transformers.accelerate import accelerate, restore
from dsv4.reference.backend import ReferenceBackend
from tests.integrations.fast_v4 import assert_close, fast, manager_of, plain_model
from tests.integrations.tiny_v4 import own_cache, prompt

TOLERANCE = 1e-4


@torch.no_grad()
def test_an_empty_cache_of_transformers_stands_for_ours() -> None:
    """As generate makes it; also when the same object is passed again by hand."""
    plain, ids = plain_model(), prompt(30)
    expected = plain(ids).logits
    with fast(plain) as model:
        given = DynamicCache(config=plain.config)
        first = model(ids[:, :20], past_key_values=given)
        assert isinstance(first.past_key_values, PagedCache)
        second = model(ids[:, 20:], past_key_values=given)
        assert second.past_key_values is first.past_key_values
    assert_close(second.logits, expected[:, 20:], TOLERANCE)


@torch.no_grad()
def test_caches_do_not_disturb_each_other() -> None:
    plain, ids = plain_model(), prompt(30, rows=2)
    expected = plain(ids).logits
    with fast(plain) as model:
        pasts = [model(ids[row : row + 1, :20]).past_key_values for row in (0, 1)]
        for row in (1, 0):
            found = model(ids[row : row + 1, 20:], past_key_values=pasts[row]).logits
            assert_close(found[0], expected[row, 20:], TOLERANCE)


@torch.no_grad()
def test_a_forgotten_cache_gives_its_rows_back() -> None:
    with fast(plain_model()) as model:
        past = model(prompt(130, rows=2)).past_key_values
        stats = manager_of(model).stats()
        assert (stats.requests_live, stats.blocks_live) == (2, 4)
        del past
        gc.collect()
        stats = manager_of(model).stats()
        assert stats.requests_live == 0
        assert stats.blocks_free == stats.blocks_total


@torch.no_grad()
def test_a_new_batch_takes_the_rows_that_were_not_used_for_longest() -> None:
    """As in a loop that still holds the last output: it must not fail. Who uses a cache that was
    given up is told so."""
    plain, ids = plain_model(), prompt(12)
    with fast(plain, max_batch=2) as model:
        first, second = model(ids), model(ids)
        model(ids[:, :1], past_key_values=first.past_key_values)  # now the second is older
        third = model(ids)
        with pytest.raises(RequestError, match=r"a newer batch needed its rows.*max_batch=2"):
            model(ids[:, :1], past_key_values=second.past_key_values)
        for kept in (first, third):
            model(ids[:, :1], past_key_values=kept.past_key_values)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 4, 100, 129])
def test_crop_then_continue_equals_a_fresh_run(length: int) -> None:
    plain, ids = plain_model(), prompt(130)
    other = prompt(9, seed=5)
    with fast(plain) as model:
        past = model(ids).past_key_values
        past.crop(length)
        found = model(other, past_key_values=past).logits
    expected = plain(torch.cat((ids[:, :length], other), dim=1)).logits[:, length:]
    assert_close(found, expected, TOLERANCE)


# ---- failures ------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def break_layer(model: Any, layer: int) -> Any:
    """The experts of a layer fail, after its attention has written. Returns what mends it."""

    def fail(*_: Any) -> None:
        raise Broken

    return model.model.layers[layer].mlp.register_forward_pre_hook(fail).remove


@torch.no_grad()
def test_a_failed_decode_step_did_not_happen() -> None:
    plain, ids = plain_model(), prompt(31)
    expected = plain(ids).logits
    with fast(plain) as model:
        past = model(ids[:, :30]).past_key_values
        mend = break_layer(model, 2)
        with pytest.raises(Broken):
            model(prompt(1, seed=8), past_key_values=past)
        mend()
        assert (past.columns, past.requests[0].length) == (30, 30)
        found = model(ids[:, 30:], past_key_values=past).logits
    assert_close(found, expected[:, 30:], TOLERANCE)


@torch.no_grad()
def test_a_failed_prompt_closes_its_cache_and_no_other() -> None:
    plain, ids = plain_model(), prompt(31)
    expected = plain(ids).logits
    with fast(plain) as model:
        kept = model(ids[:, :30]).past_key_values
        begun = model(ids[:, :30]).past_key_values
        mend = break_layer(model, 2)
        with pytest.raises(Broken):
            model(ids)
        with pytest.raises(Broken):
            model(ids[:, :5], past_key_values=begun)
        mend()
        assert manager_of(model).stats().requests_live == 1
        with pytest.raises(RequestError, match=r"failed halfway.*run the prompt again"):
            model(ids[:, 30:], past_key_values=begun)
        assert_close(model(ids[:, 30:], past_key_values=kept).logits, expected[:, 30:], TOLERANCE)
        assert_close(model(ids).logits, expected, TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_an_error_inside_an_append_of_a_prompt_comes_out_as_itself(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, layer: int
) -> None:
    """When a layer has begun to write, and before it is noted as appended."""
    plain, ids = plain_model(), prompt(31)
    expected = plain(ids).logits
    with fast(plain, max_batch=2) as model:
        own, calls, engine = ReferenceBackend.append, [0], Engine(model=model)
        begun = model(ids[:, :20]).past_key_values
        job = engine.submit(ids[0], 3)

        def fail(*given: Any, **options: Any) -> None:
            calls[0] += 1
            if calls[0] > layer:
                raise error
            own(*given, **options)

        monkeypatch.setattr(ReferenceBackend, "append", staticmethod(fail))
        for attempt in (
            lambda: model(ids),
            lambda: model(ids[:, 20:], past_key_values=begun),
            engine.step,
        ):
            calls[0] = 0
            with pytest.raises(type(error)) as caught:
                attempt()
            assert caught.value is error
            assert not manager_of(model).room.open_plans
        calls[0] = -1000
        with pytest.raises(RequestError, match="failed halfway"):
            model(ids[:, 20:], past_key_values=begun)
        engine.run()  # the next step goes on
        alone = plain.generate(ids, max_new_tokens=3, do_sample=False)
        assert job.generated == alone[0, 31:].tolist()
        assert_close(model(ids).logits, expected, TOLERANCE)


@torch.no_grad()
def test_bad_calls_change_nothing() -> None:
    plain, ids = plain_model(), prompt(40, rows=2)
    expected = plain(ids).logits
    ones = torch.ones_like(ids)
    own = plain(ids[:, :5]).past_key_values
    pair = EncoderDecoderCache(own_cache(plain), own_cache(plain))
    foreign = PagedCache.for_model(plain, max_batch=2, max_context=64)
    with fast(plain, max_batch=2, max_context=40) as model:
        past = model(ids[:, :30]).past_key_values
        cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (InvalidInput, "3 rows.*max_batch=2", {"input_ids": prompt(2, rows=3)}),
            (InvalidInput, "1 rows continues a cache of 2", {"input_ids": ids[:1, 30:]}),
            (ContextOverflow, "41 tokens.*max_context=40", {"input_ids": prompt(11, rows=2)}),
            (InvalidInput, "output_attentions", {"output_attentions": True}),
            (InvalidInput, r"\[2, 40\]", {"attention_mask": ones[:, :10]}),
            (InvalidInput, "4 dimensions", {"attention_mask": torch.ones(2, 1, 10, 40)}),
            (InvalidInput, "dict", {"attention_mask": {"sliding_attention": None}}),
            (
                InvalidInput,
                "no token",
                {"attention_mask": torch.cat((ones[:, :30], 0 * ones[:, 30:]), 1)},
            ),
            (InvalidInput, "row 1, column 3 is 0, not 33", {"position_ids": wrong_positions()}),
            (InvalidInput, r"position_ids is \[2, 3\]", {"position_ids": ids[:, :3]}),
            (InvalidInput, "exactly one", {"inputs_embeds": torch.zeros(2, 10, 64)}),
            (InvalidInput, "exactly one", {"input_ids": None}),
            (InvalidInput, "DynamicCache with 5 columns", {"past_key_values": own}),
            (InvalidInput, "memory of its own", {"past_key_values": foreign}),
            (InvalidInput, "tuple", {"past_key_values": ((), ())}),
            (InvalidInput, "EncoderDecoderCache", {"past_key_values": pair}),
        ]
        for error, message, change in cases:
            call = {"input_ids": ids[:, 30:], "past_key_values": past} | change
            with pytest.raises(error, match=message):
                model(**call)
            assert manager_of(model).stats().requests_live == 2, message
        model.train()
        with pytest.raises(InvalidInput, match=r"training mode.*model.eval\(\)"):
            model(ids[:, 30:], past_key_values=past)
        model.eval()
        found = model(ids[:, 30:], past_key_values=past).logits
    assert_close(found, expected[:, 30:], TOLERANCE)


@torch.no_grad()
def test_a_call_that_is_refused_takes_no_rows_from_others() -> None:
    plain, ids = plain_model(), prompt(12)
    with fast(plain, max_batch=1, max_context=20) as model:
        past = model(ids).past_key_values
        with pytest.raises(ContextOverflow):
            model(prompt(21))
        with pytest.raises(InvalidInput):
            model(ids, attention_mask=torch.ones(1, 5))
        assert_close(
            model(ids[:, :1], past_key_values=past).logits,
            plain(torch.cat((ids, ids[:, :1]), dim=1)).logits[:, 12:],
            TOLERANCE,
        )


@torch.no_grad()
def test_a_failed_first_call_can_be_made_again_with_the_same_cache() -> None:
    plain, ids = plain_model(), prompt(12)
    with fast(plain) as model:
        given = DynamicCache(config=plain.config)
        mend = break_layer(model, 1)
        with pytest.raises(Broken):
            model(ids, past_key_values=given)
        mend()
        assert manager_of(model).stats().requests_live == 0
        found = model(ids, past_key_values=given).logits
    assert_close(found, plain(ids).logits, TOLERANCE)


@torch.no_grad()
def test_a_reset_cache_starts_over() -> None:
    plain, ids = plain_model(), prompt(12)
    with fast(plain, max_batch=1) as model:
        past = model(prompt(30, seed=3)).past_key_values
        past.reset()
        found = model(ids, past_key_values=past)
        assert found.past_key_values is past
        assert_close(found.logits, plain(ids).logits, TOLERANCE)
        model(prompt(9, seed=4))
        with pytest.raises(RequestError, match="closed"):
            model(ids[:, :1], past_key_values=past)
        past.reset()
        for wrong in (ids[0], ids[:, :0], ids[:0]):
            with pytest.raises(InvalidInput, match=r"input_ids is .*give \[batch, columns\]"):
                model(wrong, past_key_values=past)
        with pytest.raises(InvalidInput, match="position_ids is list"):
            model(ids, position_ids=[0])
        found = model(ids, past_key_values=past)
        assert_close(found.logits, plain(ids).logits, TOLERANCE)


def wrong_positions() -> torch.Tensor:
    positions = torch.arange(30, 40).repeat(2, 1)
    positions[1, 3] = 0
    return positions


def test_models_that_cannot_be_accelerated_stay_as_they_are() -> None:
    plain = plain_model(seed=2)
    own = dict(vars(plain.model))

    def refused(message: str, model: Any = plain, **options: Any) -> None:
        options = {"max_batch": 1, "max_context": 64} | options
        with pytest.raises(Exception, match=message) as caught:
            accelerate(model, **options)
        assert isinstance(caught.value, ValueError)  # SchemaError, ConfigError, InvalidInput
        assert type(caught.value).__module__ == "dsv4.errors"
        assert dict(vars(plain.model)) == own

    refused("Linear is not a DeepseekV4ForCausalLM", torch.nn.Linear(2, 2))
    refused("unknown record format 'fp7'", records="fp7")
    refused("entry_format is 8", records=8)
    refused("index_format is 4", index=4)
    refused("unknown index format 'fp7'", index="fp7")
    refused("max_batch=0", max_batch=0)
    refused("max_batch=True", max_batch=True)
    refused("max_step_tokens=0.5", max_step_tokens=0.5)
    refused("max_context", max_context=10_000_000)
    with pytest.raises(InvalidInput, match="not accelerated"):
        restore(plain)
    with pytest.raises(InvalidInput, match="not a DeepseekV4ForCausalLM"):
        restore(torch.nn.Linear(2, 2))
    with fast(plain) as model, pytest.raises(InvalidInput, match=r"already: restore\(model\)"):
        accelerate(model, max_batch=1, max_context=64)


@torch.no_grad()
def test_a_cache_of_the_fast_path_is_refused_by_the_restored_model() -> None:
    with fast(plain_model()) as model:
        past = model(prompt(9)).past_key_values
    with pytest.raises(InvalidInput, match="what accelerate wrote"):
        model(prompt(1), past_key_values=past)


def test_inference_mode_at_any_time() -> None:
    plain, ids = plain_model(), prompt(9)
    with torch.inference_mode(), fast(plain) as model:
        past = model(ids[:, :8]).past_key_values
        with torch.inference_mode(False), torch.no_grad():
            found = model(ids[:, 8:].clone(), past_key_values=past).logits
    with torch.no_grad():
        assert_close(found, plain(ids).logits[:, 8:], TOLERANCE)


@torch.no_grad()
def test_generate_past_the_context_is_refused_before_it_starts() -> None:
    """And what just fits is not: the last token that comes out never runs."""
    plain = plain_model()
    with fast(plain, max_context=64) as model:
        ids, mask = prompt(40, rows=2), torch.ones((2, 40), dtype=torch.int64)
        mask[:, :10] = 0
        config = GenerationConfig(max_new_tokens=26)
        for options in (
            {"max_new_tokens": 26},
            {"max_length": 66},
            {"generation_config": config},
            {"max_new_tokens": 36, "attention_mask": mask},
        ):
            with pytest.raises(ContextOverflow, match=r"65 tokens.*64.*accelerate\(max_") as told:
                model.generate(ids, **options)
            assert told.value.asked_tokens == 65
        embeds = model.get_input_embeddings()(ids)
        with pytest.raises(ContextOverflow, match="accelerate"):
            model.generate(inputs_embeds=embeds, max_new_tokens=26)
        assert manager_of(model).stats().prefix.tokens_asked == 0  # nothing has run
        fits = {"max_new_tokens": 35, "attention_mask": mask}
        assert model.generate(ids, do_sample=False, **fits).shape == (2, 75)
        model.generation_config.pad_token_id = 0
        padded = torch.cat((torch.zeros((2, 10), dtype=torch.int64), 1 + ids[:, :30] % 127), dim=1)
        assert model.generate(padded, do_sample=False, max_new_tokens=35).shape == (2, 75)
        with pytest.raises(ContextOverflow, match=r"accelerate\(max_context="):
            model(prompt(65))


@torch.no_grad()
def test_room_for_drafts_and_for_limits_that_nobody_gave() -> None:
    """Drafts that are looked up may reach past the end; an assistant may have less room."""
    plain = plain_model()
    sizes: dict[str, Any] = {"max_draft_tokens": 5}
    with (
        fast(plain, max_context=64, **sizes) as model,
        fast(plain, max_context=40, **sizes) as assistant,
    ):
        text = prompt(30).repeat(1, 2)[:, :50]
        for ids, options in (
            (text, {"max_new_tokens": 15, "prompt_lookup_num_tokens": 5}),
            (prompt(20), {"max_new_tokens": 40, "assistant_model": assistant}),
            (prompt(60), {}),
        ):
            with pytest.raises(ContextOverflow):
                model.generate(ids, do_sample=False, **options)
        assert manager_of(model).stats().prefix.tokens_asked == 0  # nothing has run
        drafts = {"max_new_tokens": 10, "prompt_lookup_num_tokens": 5}
        assert model.generate(text, do_sample=False, **drafts).shape == (1, 60)
        assert model.generate(prompt(40), do_sample=False).shape == (1, 60)


@torch.no_grad()
def test_room_for_negative_prompts() -> None:
    """They have rows of their own, to which the new tokens are appended too."""
    with fast(plain_model(), max_context=64) as model:
        ids, against = prompt(10), prompt(50, seed=4)
        mask = (torch.arange(50) >= 20).long()[None]
        options: dict[str, Any] = {"guidance_scale": 2.0, "do_sample": False}
        options |= {"negative_prompt_ids": against}
        for limit in ({"max_new_tokens": 16}, {"max_length": 26}):
            with pytest.raises(ContextOverflow, match=r"ids are 50.*16 new") as told:
                model.generate(ids, **limit, **options)
            assert (told.value.asked_tokens, told.value.max_context_tokens) == (65, 64)
        assert manager_of(model).stats().prefix.tokens_asked == 0  # nothing has run
        assert model.generate(ids, max_new_tokens=15, **options).shape == (1, 25)
        options |= {"negative_prompt_attention_mask": mask}
        assert model.generate(ids, max_new_tokens=16, **options).shape == (1, 26)
        del options["guidance_scale"]
        assert model.generate(ids, max_new_tokens=16, **options).shape == (1, 26)

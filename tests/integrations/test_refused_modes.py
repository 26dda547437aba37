"""Training, gradients, torch.compile, fp16 and pickling: refused in words, or right."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from dsv4.errors import InvalidInput
from dsv4.integrations.transformers import Engine, PagedCache, accelerate
from tests.integrations.fast_v4 import assert_close, fast, plain_model
from tests.integrations.tiny_v4 import paged, prompt, tiny_model

PICKLED = r"cannot be pickled or copied shallowly.*copy.deepcopy.*history_ids"
KINDS = ("paged", "fast")


def test_gradients_through_an_accelerated_model_are_refused() -> None:
    """Before, backward gave lm_head a gradient and all other parameters none."""
    ids = prompt(12)
    with fast(plain_model()) as model:
        output = model(ids, labels=ids)
        with pytest.raises(InvalidInput, match=r"backward reached a cache.*restore"):
            output.loss.backward()
        assert model.model.norm.weight.grad is None
        (hidden, *_) = model.model(ids, return_dict=False)
        with pytest.raises(InvalidInput, match=r"backward reached a cache"):
            hidden.sum().backward()
        with torch.no_grad():
            assert not model(ids).logits.requires_grad
        model.requires_grad_(False)
        assert not model(ids).logits.requires_grad


def test_gradients_through_a_paged_cache_are_refused() -> None:
    model, ids = tiny_model(), prompt(12)
    output = model(ids, labels=ids, past_key_values=paged(model))
    with pytest.raises(InvalidInput, match=r"backward reached a cache.*without past_key_values"):
        output.loss.backward()
    model.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_training_mode_is_refused(kind: str) -> None:
    plain = copy.deepcopy(plain_model())
    with fast(plain) as accelerated:
        model, past = (plain, paged(plain)) if kind == "paged" else (accelerated, None)
        model.train()
        with pytest.raises(InvalidInput, match=r"training mode.*eval"):
            model(prompt(5), past_key_values=past)
        model.eval()
        assert model(prompt(5), past_key_values=past).logits.isfinite().all()


def test_fp16_is_refused() -> None:
    model = copy.deepcopy(plain_model()).half()
    for attempt in (accelerate, PagedCache.for_model):
        with pytest.raises(InvalidInput, match=r"float16.*model\.to\(torch\.bfloat16\)"):
            attempt(model, max_batch=1, max_context=256)  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_caches_are_not_pickled(kind: str) -> None:
    def check(cache: Any) -> None:
        for attempt in (pickle.dumps, copy.copy):
            with pytest.raises(InvalidInput, match=PICKLED):
                attempt(cache)
        assert copy.deepcopy(cache).columns == cache.columns == 9

    if kind == "paged":
        cache = paged(tiny_model())
        tiny_model()(prompt(9), past_key_values=cache)
        check(cache)
    else:
        with fast(plain_model()) as model:
            check(model(prompt(9)).past_key_values)


@torch.no_grad()
def test_steps_know_no_autocast() -> None:
    """The reference's sums would be rounded, or fail."""
    plain, ids = plain_model(), prompt(80)
    expected = plain.model(ids).last_hidden_state
    with fast(plain) as model:
        engine = Engine(model=model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model.model(ids[:, :79])
            past = output.past_key_values
            last = model.model(ids[:, 79:], past_key_values=past).last_hidden_state
            past.crop(20)
            again = model.model(ids[:, 20:], past_key_values=past).last_hidden_state
            job = engine.submit(ids[0], 2)
            engine.run()
        assert_close(torch.cat((output.last_hidden_state, last), dim=1), expected, 1e-4)
        assert_close(again, expected[:, 20:], 1e-4)
    alone = plain.generate(ids, max_new_tokens=2, do_sample=False)
    assert job.tokens == alone[0].tolist()


def test_a_compiled_model_runs_its_steps_uncompiled() -> None:
    plain, ids = plain_model(), prompt(30)
    with fast(plain) as model, torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        output = compiled(ids)
        assert_close(output.logits, plain(ids).logits, 1e-4)
        torch._dynamo.reset()
        whole = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"dsv4: the steps of an accelerated model"):
            whole(ids)
    torch._dynamo.reset()

"""crop to any length, then go on: the same as if the later tokens had never been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from dsv4.errors import InvalidInput, RequestError
from dsv4.integrations.transformers import PagedCache
from tests.integrations.tiny_v4 import (
    assert_same_logits,
    draw_weights,
    own_cache,
    paged,
    prompt,
    run,
    tiny_config,
    tiny_model,
)

PREFILL, DECODED = 250, 10
LENGTH = PREFILL + DECODED


@contextmanager
def calls_of(model: DeepseekV4ForCausalLM) -> Iterator[list[int]]:
    """How many columns each forward of the model gets."""
    calls: list[int] = []

    def note(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        calls.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield calls
    hook.remove()


def filled(model: DeepseekV4ForCausalLM, **options: int) -> tuple[PagedCache, torch.Tensor]:
    cache, ids = paged(model, **options), prompt(LENGTH, rows=2)
    run(model, ids, cache, [PREFILL] + [1] * DECODED)
    return cache, ids


def check_goes_on(
    model: DeepseekV4ForCausalLM, cache: PagedCache, kept: torch.Tensor, steps: list[int]
) -> None:
    """Other tokens behind the kept ones, beside transformers' own cache fed in the same steps."""
    assert cache.get_seq_length() == kept.shape[1]
    assert torch.equal(cache.history_ids, kept)
    more, own = prompt(12, rows=2, seed=5), own_cache(model)
    run(model, kept, own, steps)
    for pieces in ([1, 1, 1, 1, 1], [7]):
        part, more = more[:, : sum(pieces)], more[:, sum(pieces) :]
        assert_same_logits(run(model, part, cache, pieces), run(model, part, own, pieces))
    cache.manager.check_invariants()


@pytest.mark.parametrize("target", [259, 258, 257, 256, 255, 250, 200, 129, 128, 127, 5, 4, 3, 1])
def test_crop_to_any_length(target: int):
    """One token back is arithmetic; further back the kept ids run again as one prompt."""
    model = tiny_model()
    cache, ids = filled(model)
    with calls_of(model) as calls:
        if target % 2:
            cache.crop(target)
        else:
            cache.crop(target - LENGTH)
    assert calls == ([] if target == LENGTH - 1 else [target])
    steps = [PREFILL] + [1] * (target - PREFILL) if target == LENGTH - 1 else [target]
    check_goes_on(model, cache, ids[:, :target], steps)


@pytest.mark.parametrize("removed", [1, 3, 4])
@pytest.mark.parametrize("length", [257, 259])
def test_crop_within_the_slack_runs_nothing(length: int, removed: int):
    """Group boundaries, a block boundary and an HCA boundary are crossed backwards."""
    model = tiny_model()
    cache, ids = paged(model, max_draft_tokens=3), prompt(length, rows=2)
    run(model, ids, cache, [PREFILL] + [1] * (length - PREFILL))
    with calls_of(model) as calls:
        cache.crop(-removed)
    assert calls == []
    kept = length - removed
    check_goes_on(model, cache, ids[:, :kept], [PREFILL] + [1] * (kept - PREFILL))


def test_rejected_drafts_are_cropped():
    """Tokens of one step; beside a step without them only the shapes of matrix products differ."""
    model = tiny_model()
    cache, own = paged(model, max_draft_tokens=3), own_cache(model)
    ids, drafts = prompt(260, rows=2), prompt(260, rows=2, seed=9)
    run(model, torch.cat((ids[:, :254], drafts[:, 254:258]), dim=1), cache, [254, 4])
    cache.crop(-3)
    run(model, torch.cat((ids[:, :254], drafts[:, 254:255]), dim=1), own, [254, 1])
    for column in range(255, 260):
        found, expected = (run(model, ids[:, [column]], past, [1])[0] for past in (cache, own))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_cache_made_under_inference_mode():
    model = tiny_model()
    with torch.inference_mode():
        cache = paged(model)
        model(input_ids=prompt(9), past_key_values=cache)
    logits = model(input_ids=prompt(3), past_key_values=cache).logits  # gradients enabled
    own = own_cache(model)
    run(model, prompt(9), own, [9])
    assert_same_logits([logits.detach()], run(model, prompt(3), own, [3]))
    with pytest.raises(InvalidInput, match="backward reached a cache"):
        logits.sum().backward()
    model.zero_grad()


def test_crops_add_up():
    """Two crops of one token reach further back than the rings: the second one replays."""
    model = tiny_model()
    cache, ids = filled(model)
    with calls_of(model) as calls:
        cache.crop(-1)
        assert calls == []
        cache.crop(-1)
        assert calls == [LENGTH - 2]
    check_goes_on(model, cache, ids[:, : LENGTH - 2], [LENGTH - 2])


def test_crop_that_removes_nothing_or_everything():
    model = tiny_model()
    cache, ids = filled(model)
    for nothing in (0, LENGTH, LENGTH + 7):
        cache.crop(nothing)
        assert cache.get_seq_length() == LENGTH
    for everything in (-LENGTH, -LENGTH - 3):
        cache.crop(everything)
        assert cache.get_seq_length() == 0
        assert cache.requests == []
    run(model, ids[:, :9], cache, [9])
    check_goes_on(model, cache, ids[:, :9], [9])


def test_reset_starts_over():
    """With another batch size too; what the former rows left is not seen."""
    model = tiny_model()
    cache, _ = filled(model)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.manager.stats().requests_live == 0
    ids = prompt(150, seed=3)
    steps = [130] + [1] * 20
    assert_same_logits(run(model, ids, cache, steps), run(model, ids, own_cache(model), steps))


@torch.no_grad()
def test_tokens_that_came_as_embeddings_cannot_be_replayed():
    # hash routers would need the ids
    model = DeepseekV4ForCausalLM(tiny_config(mlp_layer_types=["moe"] * 3)).eval()
    draw_weights(model, 0)
    cache, ids = paged(model), prompt(40)
    model(inputs_embeds=model.get_input_embeddings()(ids[:, :30]), past_key_values=cache)
    run(model, ids[:, 30:], cache, [1] * 10)
    with pytest.raises(InvalidInput, match="came as embeddings"):
        cache.crop(20)
    cache.crop(-1)
    own = own_cache(model)
    run(model, ids[:, :39], own, [30] + [1] * 9)
    assert_same_logits(run(model, ids[:, 39:], cache, [1]), run(model, ids[:, 39:], own, [1]))


@torch.no_grad()
@pytest.mark.parametrize("where", ["layers.2.self_attn", "layers.1.self_attn.compressor.kv_norm"])
def test_a_forward_that_breaks_off_can_be_cropped_away(where: str):
    """Between two layers, and inside a compressor; cropped to what was, and to nothing."""
    model = tiny_model()
    cache, ids = filled(model)

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    for target in (LENGTH, 0):
        hook = model.model.get_submodule(where).register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            model(input_ids=ids[:, :5], past_key_values=cache)
        hook.remove()
        with pytest.raises(RequestError, match=r"broke off after 2 layers.*crop\(\d+\)"):
            model(input_ids=ids[:, :5], past_key_values=cache)
        if target:
            cache.crop(target)
            check_goes_on(model, cache, ids, [LENGTH])
        else:
            cache.reset()
            run(model, ids[:, :9], cache, [9])
            check_goes_on(model, cache, ids[:, :9], [9])


def test_crop_takes_whole_numbers():
    cache = paged(tiny_model())
    for wrong in (2.5, True, None):
        with pytest.raises(InvalidInput, match="whole number"):
            cache.crop(wrong)  # type: ignore[arg-type]

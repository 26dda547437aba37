"""The fast path gives what the unmodified model gives with transformers' own cache.

Models are fp32 and records unquantised (fp32), so only the order of fp32 sums differs: 1e-4 on
logits of up to ±10."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from dsv4.cache.manager import KVCacheManager
from dsv4.integrations.transformers.accelerate import accelerate, restore
from tests.integrations.fast_v4 import (
    KINDS,
    assert_close,
    fast,
    generate,
    manager_of,
    plain_model,
)
from tests.integrations.tiny_v4 import draw_weights, prompt, tiny_config
from tests.support.numbers import Numbers

PROMPTS = (1, 3, 4, 5, 127, 128, 129, 300)
ALL_ENTRIES = 512  # more than any prompt here has
TOLERANCE = 1e-4


@torch.no_grad()
def check_parity(*, tokens: int, new_tokens: int, seed: int, topk: int) -> None:
    """Every logit of the prompt, then every greedy step."""
    plain = plain_model(seed, topk)
    ids = prompt(tokens, seed=seed)
    with fast(plain, max_context=tokens + new_tokens) as model:
        theirs = generate(plain, ids, new_tokens)
        answer, expected, row = theirs.sequences, torch.cat(theirs.logits), 0
        while row < new_tokens:  # where one parts from the other, it goes on with the other's token
            ours = generate(model, answer[:, : tokens + row], new_tokens - row)
            parted = (ours.sequences != answer).nonzero()
            end = int(parted[0, 1]) - tokens + 1 if len(parted) else new_tokens
            found = torch.cat(ours.logits)[: end - row]
            assert_same_where_decided(plain, answer, tokens + row, found, expected[row:end])
            row = end
        found, expected = model(ids).logits[0], plain(ids).logits[0]
        assert_same_where_decided(plain, ids, 1, found, expected)


def assert_same_where_decided(
    plain: DeepseekV4ForCausalLM, ids: Tensor, first: int, found: Tensor, expected: Tensor
) -> None:
    """Logits [n, vocabulary], row i behind the first `first` + i ids. A row may be another where
    rounding decides: between two entries or experts of almost one score, where the model itself
    jumps by as much when its embeddings move by some ulps, or between two tokens of one logit."""
    assert torch.isfinite(found).all()
    for row, apart in enumerate((found - expected).abs().amax(dim=-1).tolist()):
        seen = first + row
        if apart > TOLERANCE:
            least = max(apart / 2, 10 * TOLERANCE)
            assert jump(plain, ids[:, :seen]) > least, f"{apart} behind {seen} tokens"
        elif found[row].argmax() != expected[row].argmax():
            highest = expected[row].topk(2).values
            assert highest[0] - highest[1] <= 2 * TOLERANCE


def jump(plain: DeepseekV4ForCausalLM, ids: Tensor) -> float:
    """How far the last logits move at most when embeddings do, each by 5e-6 of itself."""
    embeddings = plain.get_input_embeddings().weight
    kept, last = embeddings.clone(), plain(ids).logits[:, -1]
    moves = []
    for seed in range(8):
        embeddings.copy_(kept * (1 + 5e-6 * Numbers(seed).normal(*kept.shape)))
        moves.append((plain(ids).logits[:, -1] - last).abs().max().item())
    embeddings.copy_(kept)
    return max(moves)


@pytest.mark.parametrize(
    ("tokens", "topk"), [*((n, 16) for n in PROMPTS), (5, ALL_ENTRIES), (300, ALL_ENTRIES)]
)
def test_prompts_and_greedy_steps_equal_transformers(tokens: int, topk: int) -> None:
    check_parity(tokens=tokens, new_tokens=10, seed=tokens % 3, topk=topk)


def test_long_answers_equal_transformers() -> None:
    """Past two ends of blocks and rings."""
    check_parity(tokens=5, new_tokens=500, seed=1, topk=16)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tokens", "topk", "seed"), list(itertools.product(PROMPTS, (16, ALL_ENTRIES), range(3)))
)
def test_500_tokens_equal_transformers_for_all(tokens: int, topk: int, seed: int) -> None:
    check_parity(tokens=tokens, new_tokens=500, seed=seed, topk=topk)


@torch.no_grad()
def test_a_bf16_model_is_as_far_from_fp32_as_transformers() -> None:
    """Both round to bf16 along the way, in different places. The median token, because one near
    the border of two experts may jump."""
    plain, exact = plain_model(0, ALL_ENTRIES, torch.bfloat16), plain_model(0, ALL_ENTRIES)
    ids = prompt(140)
    truth = exact(ids).logits
    with fast(plain) as model:
        ours, theirs = (
            (m(ids).logits - truth).square().mean(dim=-1).sqrt().median() for m in (model, plain)
        )
    assert 0 < ours <= 1.3 * theirs


@torch.no_grad()
def test_steps_of_several_tokens_continue_a_cache() -> None:
    plain, ids = plain_model(), prompt(150, rows=2)
    expected = plain(ids).logits
    with fast(plain) as model:
        past, found = None, []
        for piece in ids.split([1, 6, 122, 2, 19], dim=1):
            output = model(piece, past_key_values=past)
            past = output.past_key_values
            found.append(output.logits)
        assert past.get_seq_length() == 150
        assert torch.equal(past.history_ids, ids)
    assert_close(torch.cat(found, dim=1), expected, TOLERANCE)


@torch.no_grad()
def test_a_long_prompt_runs_in_pieces() -> None:
    plain, ids = plain_model(), prompt(140, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :77] = 0
    with fast(plain) as model:
        whole = model(ids, attention_mask=mask, output_hidden_states=True)
    with fast(plain, max_step_tokens=37) as model:
        pieces = model(ids, attention_mask=mask, output_hidden_states=True)
        again = model(ids[:, :1], past_key_values=pieces.past_key_values)
    assert_close(pieces.logits, whole.logits, 1e-5)
    for ours, theirs in zip(pieces.hidden_states, whole.hidden_states, strict=True):
        assert_close(ours, theirs, 1e-4)
    assert torch.isfinite(again.logits).all()


@torch.no_grad()
def test_without_a_cache_nothing_is_kept() -> None:
    plain, ids = plain_model(), prompt(70, rows=2)
    with fast(plain) as model:
        output = model(ids, use_cache=False)
        assert output.past_key_values is None
        assert manager_of(model).stats().requests_live == 0
        tokens = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)
    assert_close(output.logits, plain(ids).logits, TOLERANCE)
    assert torch.equal(tokens, plain.generate(ids, max_new_tokens=3, do_sample=False))


@torch.no_grad()
def test_embeddings_as_input() -> None:
    """Hash layers route by token id, so the model has none here."""
    plain, ids = moe_only_model(), prompt(9)
    embeddings = plain.model.embed_tokens(ids)
    with fast(plain) as model:
        found = model(inputs_embeds=embeddings).logits
    assert_close(found, plain(inputs_embeds=embeddings).logits, TOLERANCE)


def moe_only_model() -> DeepseekV4ForCausalLM:
    config = tiny_config(layer_types=list(KINDS), mlp_layer_types=["moe"] * len(KINDS))
    return draw_weights(DeepseekV4ForCausalLM(config).eval(), 0)


@torch.no_grad()
def test_recorded_outputs_and_tuples() -> None:
    plain, ids = plain_model(), prompt(20, rows=2)
    options = {"output_hidden_states": True, "output_router_logits": True}
    theirs = plain(ids, **options)
    with fast(plain) as model:
        ours = model(ids, **options)
        as_tuple = model.model(ids, return_dict=False)
    for name in ("hidden_states", "router_logits"):
        for found, expected in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert_close(found, expected, TOLERANCE)
    assert_close(ours.aux_loss, theirs.aux_loss, TOLERANCE)
    assert isinstance(as_tuple, tuple)
    assert_close(as_tuple[0], theirs.hidden_states[-1], TOLERANCE)


def test_beam_search_equals_transformers_without_a_cache() -> None:
    """Not its own cache: that one leaves compressed entries behind when beams change places."""
    plain, ids = plain_model(), prompt(40)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    with fast(plain) as model:
        found = model.generate(ids, **options)
    assert torch.equal(found, plain.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_restore_gives_the_same_model_back() -> None:
    model, ids = plain_model(seed=2), prompt(33)
    before = model(ids).logits
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}

    def unchanged() -> bool:
        return (
            dict(model.named_modules()) == modules
            and dict(model.named_parameters()) == parameters
            and {k: t.data_ptr() for k, t in model.state_dict().items()} == state
        )

    accelerate(model, max_batch=1, max_context=64)
    assert unchanged()
    assert not torch.equal(model(ids).logits, before)  # FP8
    restore(model)
    assert unchanged()
    assert torch.equal(model(ids).logits, before)
    accelerate(model, max_batch=1, max_context=64)
    restore(model)


@torch.no_grad()
def test_a_forward_that_others_put_on_the_instance_survives() -> None:
    """As device hooks do: the fast path runs through the model's, and restore puts both back."""
    model, ids = copy.deepcopy(plain_model()), prompt(9)
    calls = []

    def hooked(own: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(own)
            return own(*args, **kwargs)

        return forward

    modules = (model.model, model.model.layers[1].self_attn)
    for module in modules:
        vars(module)["forward"] = hooked(module.forward)
    own = [vars(module)["forward"] for module in modules]
    accelerate(model, max_batch=1, max_context=64, records="bf16")
    found = model(ids).logits
    assert len(calls) == 1
    restore(model)
    assert [vars(module)["forward"] for module in modules] == own
    assert_close(found, model(ids).logits, TOLERANCE)
    assert len(calls) == 3


def test_new_weights_are_used_at_once() -> None:
    """Parameters are read where they are, at each step: nothing was copied."""

    def enlarged(model: Any) -> Tensor:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "self_attn" in name:
                    parameter.mul_(1.5)
            return model(prompt(140)).logits

    plain = plain_model(seed=1)
    with fast(plain) as model:
        found = enlarged(model)
    assert_close(found, enlarged(copy.deepcopy(plain)), TOLERANCE)


def test_kernels_are_compiled_before_the_model_runs_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    warmup = KVCacheManager.warmup

    def told(self: KVCacheManager, **options: Any) -> int:
        asked.append(options)
        return warmup(self, **options)

    monkeypatch.setattr(KVCacheManager, "warmup", told)
    plain = plain_model(0, 16)
    with fast(plain, max_context=32):
        assert not asked
    with fast(plain, max_context=32, warmup=True) as model:
        # raw scores where records are fp32; KV comes normed
        assert asked == [{"kv_norm": False, "round_bf16": False}]
        model(prompt(5, seed=0))

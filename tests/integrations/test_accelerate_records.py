"""Quantised records on the fast path, against transformers with a KV that is fake-quantised alike.

Where ours differs: queries, probabilities and outputs are bf16 there, as in DeepSeek's kernels, and
an entry is rounded to bf16 three times before it is coded, so that some FP8 codes fall on the other
side. Top-k takes all entries, so keys do not matter."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from tests.integrations.fast_v4 import KINDS, fast, generate, manager_of, plain_model
from tests.integrations.quantised_layers import rounding_cache
from tests.integrations.tiny_v4 import draw_weights, prompt, tiny_config

ALL_ENTRIES = 512
BF16_STEP = 2.0**-8


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def one_layer(kind: str) -> DeepseekV4ForCausalLM:
    config = tiny_config(layer_types=[kind], num_hidden_layers=1, index_topk=ALL_ENTRIES)
    return draw_weights(DeepseekV4ForCausalLM(config).eval(), 3)


@torch.no_grad()
def attention_output(model: DeepseekV4ForCausalLM, ids: Tensor, past: Any = None) -> Tensor:
    seen = []
    attention = model.model.layers[0].self_attn
    hook = attention.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    model(ids, past_key_values=past)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_fp8_attention_of_a_layer_equals_attention_over_rounded_kv(kind: str) -> None:
    plain, ids = one_layer(kind), prompt(300)
    exact = attention_output(plain, ids)
    rounded = attention_output(plain, ids, rounding_cache(plain, "fp8_ds", "mxfp4"))
    with fast(plain, records="fp8_ds") as model:
        found = attention_output(model, ids)
    assert rms(found - rounded) <= 2 * BF16_STEP * rms(rounded)
    assert rms(found - rounded) <= rms(rounded - exact) / 3  # what FP8 itself changes


@torch.no_grad()
def test_fp8_logits_stay_with_those_over_rounded_kv() -> None:
    """The median token, because one near the border of two experts may jump: 2 % of the logits."""
    plain, ids = plain_model(1, ALL_ENTRIES), prompt(140)
    exact = plain(ids).logits
    rounded = plain(ids, past_key_values=rounding_cache(plain, "fp8_ds", "mxfp4")).logits
    with fast(plain, records="fp8_ds") as model:
        found = model(ids).logits

    def median(difference: Tensor) -> float:
        return difference.square().mean(dim=-1).sqrt().median().item()

    assert median(found - rounded) <= 0.02 * rms(exact)
    assert median(found - rounded) <= median(rounded - exact) / 2


@torch.no_grad()
def test_window_rows_of_the_first_layer_are_the_rounded_ones() -> None:
    """Its input is the same in both models, so are its bytes."""
    plain, ids = plain_model(1, ALL_ENTRIES), prompt(100)
    cache = rounding_cache(plain, "fp8_ds", "mxfp4")
    plain(ids, past_key_values=cache)
    with fast(plain, records="fp8_ds") as model:
        past = model(ids).past_key_values
        manager = manager_of(model)
        plan = manager.prepare_forward([(past.requests[0], 1)])
        handle = manager.acquire(0, plan.batch)
        plan.batch.written.note(0)  # rows of former steps are read, and this one is not written
        rows, lengths = handle.gather_swa_kv()
        manager.abandon(plan)
    assert lengths.tolist() == [101]
    assert torch.equal(rows[0, :100].float(), cache.layers[0].keys[0, 0])


@pytest.mark.parametrize(
    ("records", "index"),
    [("fp8_ds", None), ("fp8_ds", "nvfp4"), ("fp8_row", "fp8"), ("bf16", "mxfp4")],
)
def test_formats_are_chosen_apart(records: str, index: str | None) -> None:
    plain, prompts = plain_model(), [prompt(80, seed=seed) for seed in range(7)]
    with fast(plain, records=records, index=index) as model:
        schema = manager_of(model).schema
        assert schema.entry_format.name == {"bf16": "fp32"}.get(records, records)
        assert schema.index_format.name == (index or "mxfp4")
        found = [generate(model, ids, 1).logits[0] for ids in prompts]
    exact = [generate(plain, ids, 1).logits[0] for ids in prompts]
    moved = [rms(f - e) / rms(e) for f, e in zip(found, exact, strict=True)]
    assert min(moved) > 0
    # rounding moves logits a little, and a lot where a token changes its expert: not for most
    assert statistics.median(moved) < 0.2, moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantised_means_the_models_own_type(dtype: torch.dtype) -> None:
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    with fast(plain_model(0, 16, dtype)) as model:
        schema = manager_of(model).schema
        assert schema.entry_format.name == schema.index_format.name == name
        generate(model, prompt(70), 2)

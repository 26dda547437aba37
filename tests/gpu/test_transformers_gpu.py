"""accelerate on a GPU: V4-Flash's attention shapes, captured decode, against transformers' own."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.numbers import Numbers

with suppress(ImportError):  # then every test is skipped
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    from dsv4.integrations.transformers.accelerate import accelerate
    from dsv4.integrations.transformers.forward import DecodeGraphs
    from tests.integrations.tiny_v4 import draw_weights

pytestmark = [pytest.mark.gpu, pytest.mark.extra("transformers")]

DEVICE = "cuda"
VOCABULARY = 512
STEPS = 12


@cache
def plain_model(experts: str = "grouped_mm") -> DeepseekV4ForCausalLM:
    """bf16, one layer of each kind and a second CSA one; narrow but for the attention."""
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        num_hidden_layers=4,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_groups=8,
        o_lora_rank=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        max_position_embeddings=16_384,
        initializer_range=0.05,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = draw_weights(DeepseekV4ForCausalLM(config), 0)
    model = model.to(DEVICE, torch.bfloat16).eval()
    model.set_experts_implementation(experts)
    return model


def accelerated(
    plain: DeepseekV4ForCausalLM, *, capture: bool, records: str = "fp8_ds", **options: Any
) -> DeepseekV4ForCausalLM:
    model = copy.deepcopy(plain)
    accelerate(
        model,
        max_batch=4,
        max_context=4096,
        records=records,
        max_step_tokens=1024,
        capture=capture,
        **options,
    )
    manager = vars(model.model)["forward"].step.manager
    manager.memory.block_arena.bytes.fill_(0xFF)
    manager.memory.slot_arena.bytes.fill_(0xFF)
    return model


def graphs_of(model: DeepseekV4ForCausalLM) -> DecodeGraphs | None:
    graphs: DecodeGraphs | None = vars(model.model)["forward"].graphs
    return graphs


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts of 2,300, 129, 40 and 1 tokens padded on the left, and the tokens that follow."""
    ids = Numbers(1).integers(0, VOCABULARY, rows, 2300 + STEPS).to(DEVICE)
    mask = torch.zeros((rows, 2300), dtype=torch.int64, device=DEVICE)
    for row, tokens in enumerate((2300, 129, 40, 1)[:rows]):
        mask[row, 2300 - tokens :] = 1
    return ids[:, :2300], mask, ids[:, 2300:]


@torch.no_grad()
def run(model: DeepseekV4ForCausalLM, rows: int) -> Tensor:
    """Logits [steps + 1, rows, vocabulary]: of the prompts' last tokens, then of each step."""
    ids, mask, following = inputs(rows)
    output = model(ids, attention_mask=mask, logits_to_keep=1)
    logits = [output.logits[:, -1]]
    for step in range(STEPS):
        mask = torch.cat((mask, mask.new_ones((rows, 1))), dim=1)
        output = model(
            following[:, step : step + 1],
            attention_mask=mask,
            past_key_values=output.past_key_values,
        )
        logits.append(output.logits[:, -1])
    return torch.stack(logits).float()


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_replayed_decode_equals_decode_that_runs(experts: str) -> None:
    plain = plain_model(experts)
    captured, eager = (accelerated(plain, capture=capture) for capture in (True, False))
    found, expected = run(captured, 4), run(eager, 4)
    assert torch.isfinite(found).all()
    assert torch.equal(found, expected)
    assert graphs_of(eager) is None
    graphs = graphs_of(captured)
    assert graphs is not None
    assert graphs.sizes == [4]


def test_three_rows_run_in_the_graph_of_four() -> None:
    """Padding changes the shapes of matrix products and how attention is split, so the last bits of
    bf16 may differ: logits by 1.8 % if a tenth of attention's outputs moves by an ulp. The median
    token, because one near the border of two experts may jump."""
    captured, eager = (accelerated(plain_model(), capture=capture) for capture in (True, False))
    found, expected = run(captured, 3), run(eager, 3)
    off = (found - expected).square().mean(dim=-1).sqrt()
    assert (off / expected.square().mean(dim=-1).sqrt()).median() <= 0.04
    graphs = graphs_of(captured)
    assert graphs is not None
    assert graphs.sizes == [4]


def test_experts_that_look_at_values_run_uncaptured() -> None:
    model = accelerated(plain_model("eager"), capture=True)
    assert graphs_of(model) is None
    assert torch.isfinite(run(model, 1)).all()


@pytest.mark.parametrize(("records", "allowed"), [("bf16", 1.3), ("fp8_ds", 4.0)])
@torch.no_grad()
def test_logits_stay_with_transformers(records: str, allowed: float) -> None:
    """In bf16 both are off the fp32 truth by about as much; FP8 adds its share. The median token,
    because one near the border of two experts may jump."""
    plain, (ids, _, _) = plain_model(), inputs(1)

    def logits(model: DeepseekV4ForCausalLM) -> Tensor:
        return model(ids, logits_to_keep=512).logits.float()

    exact = copy.deepcopy(plain).float()
    exact.set_experts_implementation("eager")
    truth = logits(exact)
    ours, theirs = (
        (logits(model) - truth).square().mean(dim=-1).sqrt().median()
        for model in (accelerated(plain, capture=True, records=records), plain)
    )
    assert 0 < ours <= allowed * theirs


def test_generate_on_the_fast_path_is_repeatable() -> None:
    """Without reuse of prompts, which changes the shapes of matrix products."""
    ids, mask, _ = inputs(4)
    model = accelerated(plain_model(), capture=True, prefix=None)
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options))

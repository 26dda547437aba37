"""Models as from_pretrained loads the real checkpoint: FP8 projections, FP4 experts, fp32 norms."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8GroupedLinear, FP8Linear
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

from dsv4.errors import InvalidInput
from dsv4.integrations.transformers import PagedCache, accelerate
from tests.integrations.fast_v4 import assert_close, fast, generate, plain_model
from tests.integrations.fp8_layers import KERNELS, fp8_model
from tests.integrations.tiny_v4 import own_cache, paged, prompt


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", lambda: KERNELS)
    monkeypatch.setattr(finegrained_fp8, "is_deepgemm_loadable", lambda: False)


def test_fp8_and_fp4_layers_run_on_both_caches() -> None:
    plain, ids = fp8_model(), prompt(150)
    attention, mlp = plain.model.layers[1].self_attn, plain.model.layers[1].mlp
    assert type(attention.q_b_proj) is FP8Linear
    assert type(attention.o_a_proj) is FP8GroupedLinear
    assert type(attention.compressor.indexer.q_b_proj) is FP8Linear
    assert type(attention.compressor.kv_proj) is torch.nn.Linear
    assert isinstance(mlp.experts, FP8Experts)
    assert attention.q_b_proj.weight.dtype == torch.float8_e4m3fn
    assert mlp.experts.down_proj.dtype == torch.int8
    expected = generate(plain, ids, 4, past_key_values=own_cache(plain))
    found = generate(plain, ids, 4, past_key_values=paged(plain))
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    with fast(plain, max_batch=1) as model:
        found = generate(model, ids, 4)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(torch.stack(found.logits), torch.stack(expected.logits), 1e-3)


def as_loaded() -> torch.nn.Module:
    """bf16, but for what from_pretrained keeps in fp32 (model._keep_in_fp32_modules_strict)."""
    model = copy.deepcopy(plain_model()).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def runs(model: torch.nn.Module) -> bool:
    """Whether transformers casts what its norms give, as it does since 5.20."""
    try:
        model(prompt(5))
    except RuntimeError as error:
        assert "same dtype" in str(error)  # noqa: PT017
        return False
    return True


def test_fp32_norms_in_front_of_bf16_projections_are_told_of() -> None:
    """Where transformers itself cannot run them."""
    model = as_loaded()
    told = (
        nullcontext()
        if runs(model)
        else pytest.raises(
            InvalidInput, match=r"norms give torch.float32.*5.20 or newer.*register_forward"
        )
    )
    for attempt in (PagedCache.for_model, accelerate):
        with told:
            attempt(model, max_batch=1, max_context=256)  # type: ignore[operator]


@torch.no_grad()
def test_fp32_norms_run_where_needed_with_what_the_error_says() -> None:
    plain, ids = as_loaded(), prompt(150)
    for module in () if runs(plain) else plain.modules():
        if isinstance(module, DeepseekV4RMSNorm):
            module.register_forward_hook(lambda module, args, out: out.to(args[0].dtype))
    truth = plain_model()(ids).logits
    theirs = plain(ids).logits
    assert torch.equal(plain(ids, past_key_values=paged(plain)).logits, theirs)
    with fast(plain, max_batch=1) as model:
        ours = model(ids).logits
    assert ours.dtype == theirs.dtype == torch.bfloat16
    off = [(each.float() - truth).square().mean().sqrt().item() for each in (ours, theirs)]
    assert 0 < off[0] < 1.3 * off[1], off  # both round to bf16, here and there

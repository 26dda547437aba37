"""Models with FP8 projections and FP4 experts, as from_pretrained leaves the real checkpoint, and
plain PyTorch in the place of the kernels that transformers fetches for them. Unlike those it does
not round activations: what is compared here is who calls what, with which tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM
from transformers.integrations.finegrained_fp8 import (
    FP8Experts,
    FP8Linear,
    replace_with_fp8_linear,
)
from transformers.utils.quantization_config import FineGrainedFP8Config

from tests.integrations.fast_v4 import KINDS
from tests.integrations.tiny_v4 import draw_weights, tiny_config
from tests.support.numbers import Numbers

BLOCK = (16, 16)  # of weights that share a scale; the checkpoint has (128, 128)
FP4_GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_model(seed: int = 0) -> DeepseekV4ForCausalLM:
    """What is not quantised is fp32. The modules that stay are those that the checkpoint leaves."""
    config = tiny_config(
        layer_types=list(KINDS),
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        expert_dtype="fp4",
    )
    model = draw_weights(DeepseekV4ForCausalLM(config).eval(), seed, norms=0.2)
    kept = [name.removeprefix("self_attn.") for name in model._keep_in_fp32_modules]
    replace_with_fp8_linear(
        model,
        modules_to_not_convert=["lm_head", "mlp.gate", *kept],
        # newer transformers move expert_dtype there when they read a checkpoint's config
        quantization_config=FineGrainedFP8Config(
            weight_block_size=BLOCK, scale_fmt="ue8m0", expert_dtype="fp4"
        ),
    )
    numbers = Numbers(seed + 1)
    for module in model.modules():
        if isinstance(module, FP8Linear | FP8Experts):
            _draw(module, numbers)
    return model.requires_grad_(False)


def _draw(module: Any, numbers: Numbers) -> None:
    """Codes of all sizes, and scales that bring them to about 0.1."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name.endswith("_scale_inv"):
            power = torch.full(parameter.shape, 2.0**-4 if "weight" in name else 2.0**-5)
            value = power.to(parameter.dtype)
        elif parameter.dtype == torch.int8:
            value = numbers.integers(-128, 128, *parameter.shape).to(torch.int8)
        else:
            value = numbers.normal(*parameter.shape).to(parameter.dtype)
        setattr(module, name, torch.nn.Parameter(value, requires_grad=False))


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    if weight.dtype == torch.int8:
        bits = weight.view(torch.uint8)
        grid = torch.tensor([*E2M1, *(-value for value in E2M1)])
        codes = torch.stack((bits & 0xF, bits >> 4), dim=-1).flatten(-2).long()
        return grid[codes] * scale.float().repeat_interleave(FP4_GROUP, dim=-1)
    assert block is not None
    rows, columns = weight.shape[-2:]
    wide = scale.float().repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return weight.float() * wide[..., :rows, :columns]


def _matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    block_size: tuple[int, int],
    dtype: torch.dtype,
    **options: Any,
) -> Tensor:
    return (x.float() @ dequantised(weight, scale, block_size).T).to(dtype)


def _grouped_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: tuple[int, int],
) -> Tensor:
    out, first = x.new_zeros((len(x), weight.shape[1])), 0
    whole = dequantised(weight, scale, block_size)
    for nth, end in enumerate(offsets.tolist()):
        out[first:end] = (x[first:end].float() @ whole[nth].T).to(x.dtype)
        first = end
    return out


KERNELS = SimpleNamespace(matmul=_matmul, grouped_matmul=_grouped_matmul)

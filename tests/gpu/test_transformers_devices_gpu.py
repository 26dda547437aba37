"""accelerate with layers on the GPU and on the CPU: Triton's cache on the one, the reference's on
the other. The package accelerate would run layers that it leaves on the CPU on the GPU, so the
model is taken apart by hand here, with hooks that move what crosses the border."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.gpu.test_transformers_gpu import DEVICE, VOCABULARY, plain_model
from tests.support.numbers import Numbers

with suppress(ImportError):  # then every test is skipped
    from transformers import DeepseekV4ForCausalLM

    from dsv4.integrations.transformers.accelerate import accelerate
    from dsv4.integrations.transformers.lockstep import Lockstep

pytestmark = [pytest.mark.gpu, pytest.mark.extra("transformers")]

BORDER, OTHER = 2, "cpu"


def split_model(plain: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    """A copy whose layers from BORDER on, and what is behind them, are on the other device."""
    model = copy.deepcopy(plain)
    layers = model.model.layers[BORDER:]
    for module in (*layers, model.model.norm, model.model.hc_head, model.lm_head):
        module.to(OTHER)

    def cross(module: Any, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(OTHER), (args, kwargs))

    for layer in layers:
        layer.register_forward_pre_hook(cross, with_kwargs=True)
    return model


def accelerated(model: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    accelerate(model, max_batch=2, max_context=1024, max_step_tokens=256)
    return model


@torch.no_grad()
def test_layers_on_two_devices() -> None:
    plain = plain_model()
    ids = Numbers(5).integers(0, VOCABULARY, 2, 300).to(DEVICE)
    whole, split = (accelerated(each) for each in (copy.deepcopy(plain), split_model(plain)))
    manager = vars(split.model)["forward"].step.manager
    assert isinstance(manager, Lockstep)
    parts = manager.managers
    assert [part.device.type for part in parts] == [DEVICE, OTHER]
    assert [part._parts.backend.name for part in parts] == ["triton", "reference"]

    exact = copy.deepcopy(plain).float()
    exact.set_experts_implementation("eager")
    truth = exact(ids).logits.cpu()

    def off(model: DeepseekV4ForCausalLM) -> Tensor:
        """Of a prompt in chunks, then tokens one by one; the median token, for one near the border
        of two experts may jump."""
        output = model(ids[:, :280])
        logits = [output.logits.cpu()]
        for column in range(280, 300):
            output = model(ids[:, column : column + 1], past_key_values=output.past_key_values)
            logits.append(output.logits.cpu())
        found = torch.cat(logits, dim=1).float()
        assert torch.isfinite(found).all()
        return (found - truth).square().mean(dim=-1).sqrt().median()

    assert 0 < off(split) <= 1.3 * off(whole)
    options = {"max_new_tokens": 8, "do_sample": False}
    first, second = (split.generate(ids[:1], **options) for _ in range(2))
    assert torch.equal(first, second)  # the second goes on from what the first has left
    manager.check_invariants()

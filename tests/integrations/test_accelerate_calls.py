"""What a decode step of an accelerated model costs the host: no more calls of Python than
transformers' own, and as many for one row as for eight.

On the reference, where kernels are Python too, and with those of a GPU that starts nothing
(tests/support/no_gpu): all that Python does before a launch is counted.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import nullcontext
from functools import cache
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from tests.integrations.fast_v4 import KINDS, fast, plain_model
from tests.integrations.tiny_v4 import draw_weights, prompt, tiny_config
from tests.support.no_gpu import NoGpu, no_gpu

PROMPT, WARM, STEPS = 140, 8, 4  # one of four steps closes a group
DRIVER = NoGpu.get_current_device.__code__.co_filename


@cache
def model() -> DeepseekV4ForCausalLM:
    """bf16, for the kernels, which want index keys of 64 channels."""
    config = tiny_config(
        layer_types=list(KINDS),
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        index_head_dim=64,
    )
    return draw_weights(DeepseekV4ForCausalLM(config).eval(), 0).bfloat16()


@torch.no_grad()
def calls_of_steps(model: Any, rows: int, steps: int = STEPS) -> Counter[str]:
    """The calls of Python in decode steps that come again, by name."""
    ids = prompt(PROMPT + WARM + steps, rows=rows)
    past = model(ids[:, :PROMPT], logits_to_keep=1).past_key_values
    for column in range(PROMPT, PROMPT + WARM):
        model(ids[:, column : column + 1], past_key_values=past)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, what: object) -> None:
        if event == "call" and frame.f_code.co_filename not in (DRIVER, __file__):
            calls[frame.f_code.co_qualname] += 1

    gc.disable()  # it calls finalisers whenever it likes
    sys.setprofile(count)
    try:
        for column in range(PROMPT + WARM, ids.shape[1]):
            model(ids[:, column : column + 1], past_key_values=past)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize(
    ("kernels", "rows"),
    [(no_gpu, 1), (no_gpu, 8), (nullcontext, 1)],
    ids=["triton", "triton-8", "reference"],
)
def test_a_step_makes_no_more_calls_than_transformers(kernels: Any, rows: int) -> None:
    plain = model()
    own = calls_of_steps(plain, rows)
    with kernels(), fast(plain, max_batch=8, records="fp8_ds") as accelerated:
        ours = calls_of_steps(accelerated, rows)
    assert ours["FastAttention.__call__"] == STEPS * len(KINDS)
    assert ours["Repetition.run"] == STEPS * (2 * len(KINDS) + KINDS.count(KINDS[1]))
    assert ours.total() <= own.total(), ours - own


@pytest.mark.parametrize("kernels", [no_gpu, nullcontext], ids=["triton", "reference"])
def test_rows_cost_no_calls(kernels: Any) -> None:
    with kernels(), fast(model(), max_batch=8, records="fp8_ds") as accelerated:
        one, eight = (calls_of_steps(accelerated, rows) for rows in (1, 8))
    assert eight == one


def test_caches_that_are_kept_cost_no_calls() -> None:
    with no_gpu(), fast(model(), max_batch=8, records="fp8_ds") as accelerated:
        one = calls_of_steps(accelerated, 1)
        kept = [accelerated(prompt(5, seed=seed)).past_key_values for seed in range(4)]
        assert calls_of_steps(accelerated, 1) == one
    assert len(kept) == 4


def test_constants_follow_parameters_that_change() -> None:
    """They are made once, and again when somebody writes to a parameter."""
    plain, ids = plain_model(dtype=torch.bfloat16), prompt(40)
    with fast(plain) as accelerated, torch.no_grad():
        before = accelerated(ids).logits
        attention = accelerated.model.layers[1].self_attn
        known = vars(attention)["forward"]._known_constants()
        accelerated(ids)
        assert vars(attention)["forward"]._known_constants() is known
        attention.compressor.position_bias.add_(1.0 + ids[0, :4, None] % 3)
        attention.sinks.mul_(-1)
        changed = accelerated(ids).logits
        with fast(plain) as other:
            theirs = other.model.layers[1].self_attn
            theirs.compressor.position_bias.copy_(attention.compressor.position_bias)
            theirs.sinks.copy_(attention.sinks)
            assert torch.equal(changed, other(ids).logits)
        assert not torch.equal(changed, before)


class Scaled(torch.nn.Linear):
    """What adapters put in the place of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_layers_that_are_hooked_or_replaced_are_called() -> None:
    """Of other linear layers only the product is made."""
    ids, seen = prompt(12), []

    def note(*given: Any) -> None:
        seen.append(given)

    with fast(plain_model()) as accelerated, torch.no_grad():
        before = accelerated(ids, use_cache=False).logits
        layer = accelerated.model.layers[1].self_attn.q_a_proj
        for hook in (layer.register_forward_hook, layer.register_forward_pre_hook):
            handle = hook(note)
            assert torch.equal(accelerated(ids, use_cache=False).logits, before)
            handle.remove()
            assert len(seen) == 1
            seen.clear()
        for hook in (
            torch.nn.modules.module.register_module_forward_hook,
            torch.nn.modules.module.register_module_forward_pre_hook,
        ):
            handle = hook(note)
            accelerated(ids, use_cache=False)
            handle.remove()
            assert sum(given[0] is layer for given in seen) == 1
            seen.clear()
        layer.forward = lambda x: 2 * torch.nn.functional.linear(x, layer.weight)
        wrapped = accelerated(ids, use_cache=False).logits
        del layer.forward
        layer.__class__ = Scaled
        replaced = accelerated(ids, use_cache=False).logits
        layer.__class__ = torch.nn.Linear
    assert torch.equal(wrapped, replaced)
    assert not torch.equal(wrapped, before)

"""A model on a GPU that there are no kernels for: accelerate says so, and what it says helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4.backends import load_backend
from dsv4.cache import assembly
from dsv4.errors import UnsupportedGpu
from dsv4.integrations.transformers import accelerate
from dsv4.kernels import target
from dsv4.ops.backend import Backend
from tests.integrations.fast_v4 import fast, plain_model
from tests.integrations.tiny_v4 import prompt


@pytest.fixture
def _on_a_v100(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_gpu(name: Any, device: torch.device, **options: Any) -> Backend:
        if name != "reference":
            target.named_target("sm_70", gpu="Tesla V100")
        return load_backend(name, device, **options)

    monkeypatch.setattr(assembly, "load_backend", on_a_gpu)


@pytest.mark.usefixtures("_on_a_v100")
def test_the_reference_runs_where_there_are_no_kernels() -> None:
    model, ids = plain_model(), prompt(20)
    with pytest.raises(UnsupportedGpu, match="Tesla V100 is sm_70: use backend='reference'"):
        accelerate(model, max_batch=1, max_context=64)
    assert "forward" not in vars(model.model)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    with fast(model, backend="reference") as accelerated:
        assert torch.equal(accelerated.generate(ids, max_new_tokens=3, do_sample=False), expected)

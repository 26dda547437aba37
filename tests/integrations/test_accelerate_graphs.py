"""Captured decode, with a stand-in for the capture: it keeps the step and runs it again, so what a
step reads must be in the static tensors, as in a real graph. tests/gpu has the real ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.integrations.transformers.forward import CudaCapture, DecodeGraphs, can_capture
from tests.integrations.fast_v4 import assert_close, fast, generate, manager_of, plain_model
from tests.integrations.tiny_v4 import prompt


class Recording:
    """Counts captures and replays. Replays see nothing but memory that the capture saw."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        hidden = step()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            hidden.copy_(step())

        return hidden, replay


def record_graphs(model: Any) -> Recording:
    forward, recording = vars(model.model)["forward"], Recording()
    manager = manager_of(model)
    forward.graphs = DecodeGraphs(
        forward.decode,
        max_rows=manager.memory.max_requests,
        device=manager.device,
        capture=recording,
    )
    return recording


@pytest.mark.parametrize("rows", [1, 3])
def test_replayed_steps_equal_steps_that_run(rows: int) -> None:
    """3 rows run padded to 4; the prompts leave blocks and groups to be closed on the way."""
    plain, ids = plain_model(), prompt(126, rows=rows)
    with fast(plain) as model:
        recording = record_graphs(model)
        found = generate(model, ids, 9)
        assert (recording.captures, recording.replays) == (1, 8)
    expected = generate(plain, ids, 9)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits), 1e-4)


@torch.no_grad()
def test_one_capture_a_size_serves_all_caches_and_batches() -> None:
    plain, ids = plain_model(), prompt(30, rows=4)
    expected = plain(ids).logits
    with fast(plain, max_batch=7) as model:
        recording = record_graphs(model)
        pasts = {rows: model(ids[:rows, :20]).past_key_values for rows in (3, 4)}
        for column in range(20, 30):
            for rows, past in pasts.items():
                step = model(ids[:rows, column : column + 1], past_key_values=past)
                assert_close(step.logits, expected[:rows, column : column + 1], 1e-4)
        assert (recording.captures, recording.replays) == (1, 20)
        step = model(ids[:, 29:], past_key_values=pasts[4], output_hidden_states=True)
        assert len(step.hidden_states) == 1 + plain.config.num_hidden_layers  # not replayed
        assert recording.replays == 20


def test_sizes_are_powers_of_two_up_to_the_batch() -> None:
    graphs = DecodeGraphs(
        lambda ids, plan: ids, max_rows=6, device=torch.device("cpu"), capture=Recording()
    )
    assert [graphs.padded(rows) for rows in range(1, 7)] == [1, 2, 4, 4, 6, 6]


def test_a_capture_is_on_a_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model has captured on another GPU before: torch would take its stream again."""
    current = [0]
    captured: list[tuple[Any, Any]] = []

    class Stream:
        def __init__(self) -> None:
            self.device = current[0]

        def wait_stream(self, other: Any) -> None:
            assert other.device == self.device

    def graph(found: Any, *, pool: Any, stream: Any = None) -> Any:
        captured.append((pool, stream))
        return nullcontext()

    graphs = SimpleNamespace(pool=lambda: f"pool of {current[0]}", replay=None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    for device in (0, 1):
        current[0] = device
        captured.clear()
        capture = CudaCapture()
        for _ in range(2):
            capture(lambda: torch.zeros(1))
        (first, stream), (second, again) = captured
        assert (first, second) == (None, f"pool of {device}")
        assert stream is again  # what memory of a pool is shared by
        assert stream.device == device


def test_only_experts_that_look_at_no_value_are_captured() -> None:
    def model(experts: str, dtype: torch.dtype, device: str = "cuda") -> Any:
        config = SimpleNamespace(_experts_implementation=experts)
        return SimpleNamespace(config=config, dtype=dtype, device=torch.device(device))

    assert can_capture(model("grouped_mm", torch.bfloat16))
    assert can_capture(model("batched_mm", torch.bfloat16))
    assert can_capture(model("batched_mm", torch.float32))
    assert not can_capture(model("grouped_mm", torch.float32))
    assert not can_capture(model("eager", torch.bfloat16))
    assert not can_capture(model("grouped_mm", torch.bfloat16, "cpu"))


def test_the_reference_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at values of the device, wherever that is."""
    monkeypatch.setattr("dsv4.integrations.transformers.forward.can_capture", lambda model: True)
    for backend in (None, "reference"):  # of a CPU that is the same
        with fast(plain_model(), backend=backend) as model:
            assert vars(model.model)["forward"].graphs is None
    with fast(plain_model(), backend="triton", records="fp8_ds") as model:  # interpreted
        assert vars(model.model)["forward"].graphs is not None

"""Tensors on one GPU while another is current: what is launched goes where the tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.cache.options import place
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.transfers.copies import Mark
from dsv4.kernels import launch, warmup
from dsv4.kernels.launch import Launch
from dsv4.model import ModelSpec
from dsv4.ops import device as places
from tests.support.no_gpu import NoGpu, no_gpu

HOME = torch.device("cuda:1")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoGpu]:
    """Two of them. Whatever asks for the device of a tensor is told the second; the first is
    current."""

    @contextmanager
    def switched(device: torch.device | int) -> Iterator[None]:
        before, found.device = found.device, device if isinstance(device, int) else device.index
        yield
        found.device = before

    with no_gpu() as found:
        monkeypatch.setattr(torch.cuda, "device", switched)
        for module in (launch, warmup):
            monkeypatch.setattr(module, "on_device", lambda _: places.on_device(HOME))
        yield found


def a_launch(*tensors: torch.Tensor) -> Launch:
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="kernel"), arg_names=["x"] * len(tensors))
    return Launch(kernel, (1,), tensors, {}, {})


def test_a_launch_goes_to_the_device_of_its_tensors(
    gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def compiled(given: Launch) -> Any:
        asked.append(gpu.device)
        return gpu.compiled(given)

    with monkeypatch.context() as patch:  # undone before what `gpu` has patched
        patch.setattr(launch, "compiled", compiled)
        a_launch(torch.zeros(4)).run()
    assert (asked, gpu.device) == ([1], 0)
    assert [each.stream for each in gpu.started] == [gpu.get_current_stream(1)]


def test_what_is_repeated_later_is_of_the_device_of_its_tensors(gpu: NoGpu) -> None:
    given, fixed = torch.zeros(4), torch.zeros(4)
    found = launch.repeatable(a_launch(given, fixed).run, [given], [fixed])
    assert found is not None
    for current in (0, 1):
        gpu.device = current
        places = found.places([given])
        assert places is not None
        found.run(places, [given])
        assert gpu.device == current
    assert [each.stream for each in gpu.started] == [gpu.get_current_stream(1)] * 3


def test_warming_up_compiles_for_its_device(gpu: NoGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    monkeypatch.setattr(warmup, "load", lambda _: loaded.append(gpu.device))
    one = a_launch(torch.zeros(4))
    assert warmup.warm_up(one.run, HOME, workers=1, progress=lambda *_: None) == 1
    assert (loaded, gpu.device) == ([1], 0)


class Stream:
    def __init__(self, device: torch.device | None) -> None:
        self.device, self.awaited = device, []

    def wait_event(self, event: Any) -> None:
        self.awaited.append(event)


def test_events_are_of_the_stream_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on another device's stream has passed before the copy that it stands for is over."""
    streams: list[Stream] = []

    def current_stream(device: torch.device | None = None) -> Stream:
        streams.append(Stream(device))
        return streams[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    schema = CacheSchema.build(ModelSpec.preset("tiny"), max_context=512)
    buffers = StepBuffers(schema, max_requests=1, max_tokens=1, device=torch.device("cpu"))
    recorded: list[Stream] = []
    buffers._copied = SimpleNamespace(record=recorded.append)  # type: ignore[assignment]
    buffers.send(torch.empty(0, dtype=torch.int32))
    assert [stream.device for stream in recorded] == [buffers.device_buffer.device]
    event = SimpleNamespace(query=lambda: False, device=HOME)
    Mark(event).hold_back()
    assert streams[-1].device == HOME
    assert streams[-1].awaited == [event]


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the target of whichever was current first would be remembered for all."""
    monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(device=HOME))
    assert place({"device": "cuda"}) == HOME

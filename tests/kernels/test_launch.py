"""Which launches share a binary: those that Triton would give the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.errors import TritonError

from dsv4.kernels import attend, backend, index_scores, launch
from dsv4.kernels.attend import AttendArguments
from dsv4.kernels.hopper import attend as hopper_attend
from dsv4.kernels.hopper import attend_whole as hopper_whole
from dsv4.kernels.hopper import index_scores as hopper_scores
from dsv4.kernels.index_scores import ScoreArguments
from dsv4.kernels.launch import Launch
from dsv4.kernels.target import TARGETS, compiling_for


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def kind(*arguments: object, constant: int = 3, warps: int = 4, kernel: object = None) -> object:
    return Launch(kernel, (1,), arguments, {"A": constant}, {"num_warps": warps}).specialization()


def test_what_changes_no_instruction_changes_no_binary() -> None:
    x, y = torch.zeros(64), torch.ones(32)
    assert kind(x, 32, 7) == kind(y, 48, 9)
    assert kind(0.5) == kind(1.0)
    assert kind(np.int64(32)) == kind(48)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), (2,)),  # Triton folds a 1 into the code
        ((16,), (17,)),
        ((np.int64(16),), (np.int64(17),)),
        ((np.int64(1),), (np.int64(2),)),
        ((2**31,), (2**20,)),
        ((2**31,), (2**31 + 1,)),
        ((torch.zeros(8),), (torch.zeros(8)[1:],)),
        ((torch.zeros(8),), (torch.zeros(8, dtype=torch.int32),)),
        ((1,), (1.0,)),
    ],
    ids=str,
)
def test_what_triton_tells_apart_is_told_apart(one: tuple[object], other: tuple[object]) -> None:
    assert kind(*one) != kind(*other)


def test_constants_options_and_kernels_are_told_apart() -> None:
    assert kind(2) != kind(2, constant=4)
    assert kind(2) != kind(2, warps=8)
    assert kind(2) != kind(2, kernel="another")


def test_devices_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    first = kind(2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert kind(2) != first


def test_portable_and_hopper_kernels_begin_with_the_same_arguments() -> None:
    """Triton reads a signature from the kernel's own source: it stands in each, under one list."""
    for arguments, kernels in (
        (
            AttendArguments,
            (
                attend._attend_kernel,
                hopper_attend._attend_hopper_kernel,
                hopper_whole._weigh_kernel,
            ),
        ),
        (
            ScoreArguments,
            (index_scores._index_scores_kernel, hopper_scores._index_scores_hopper_kernel),
        ),
    ):
        for kernel in kernels:
            assert tuple(kernel.arg_names)[: len(arguments._fields)] == arguments._fields


class Uncompilable:
    """Stands for a kernel that Triton's compiler, or the device, refuses."""

    def __init__(self, error: Exception) -> None:
        self.fn, self.error = Uncompilable, error

    def warmup(self, *_: object, **__: object) -> None:
        raise self.error


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Exception], Launch]]:
    monkeypatch.setattr(launch, "cache_key", lambda kernel: "")
    with compiling_for(TARGETS["sm_90"]):
        yield lambda error: Launch(Uncompilable(error), (1,), (), {}, {"enable_fp_fusion": False})


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("PassManager::run failed"),
        IndexError("map::at"),
        ValueError("invalid layout"),
        AssertionError("no such layout"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failed_pass_of_the_compiler_is_an_error_of_triton(
    error: Exception, told: Callable[[Exception], Launch]
) -> None:
    with pytest.raises(TritonError, match=rf"Uncompilable cannot be compiled .* {error}"):
        launch.compiled(told(error))


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        RuntimeError("Triton Error [HIP]:  Code: 209, Messsage: no kernel image is available"),
    ],
    ids=["torch", "driver", "amd's driver"],
)
def test_what_a_device_raises_is_no_error_of_the_compiler(
    error: RuntimeError, told: Callable[[Exception], Launch]
) -> None:
    with pytest.raises(RuntimeError) as found:
        launch.compiled(told(error))
    assert found.value is error


def test_another_kernel_runs_where_hoppers_cannot_be_compiled(
    told: Callable[[Exception], Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = told(RuntimeError("PassManager::run failed"))
    own = backend._SpecialKernel("attend")
    assert own.module is not None
    module = SimpleNamespace(supports=lambda call: True, attend=lambda call: launch.compiled(call))
    monkeypatch.setattr(own, "module", module)
    calls: list[Launch] = []
    with pytest.warns(RuntimeWarning, match="the portable one runs instead"):
        backend._run(failed, own, calls.append)
    assert calls == [failed]

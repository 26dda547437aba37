"""The digests of tests/known_answers on a GPU: compiled kernels, and the reference there."""

from __future__ import annotations

import pytest
from triton import knobs

from dsv4.kernels import launch
from tests.known_answers.cases import CASES, known_digests, run_case

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "triton" in case.backends])
def test_compiled_kernels(name: str):
    assert run_case(name, backend="triton", device=DEVICE) == known_digests()[name]


@pytest.mark.parametrize("fusion", [False, True])
def test_whatever_triton_s_default_is(fusion: bool, monkeypatch: pytest.MonkeyPatch):
    """Every launch says whether it may fuse; what was compiled in this process is forgotten."""
    monkeypatch.setattr(launch, "_binaries", {})
    monkeypatch.setattr(knobs.language, "default_fp_fusion", fusion)
    for name in ("small fp8_ds mxfp4", "small online", "v41 small"):
        assert run_case(name, backend="triton", device=DEVICE) == known_digests()[name]


@pytest.mark.parametrize("name", CASES)
def test_the_reference_on_a_gpu(name: str):
    assert run_case(name, backend="reference", device=DEVICE) == known_digests()[name]

"""Which life the Triton kernels lead in this process, and which tests that leaves out.

Triton reads TRITON_INTERPRET when a kernel is decorated, so one process has interpreted kernels or
compiled ones, never both. Without a GPU every test process interprets; with one, kernels are
compiled unless the flag was given. Tests that compile for sm_90 start a process of their own.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)  # xdist fills the cores; threads that wait for each other waste them

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device and TRITON_INTERPRET unset")
    thinned_out = pytest.mark.skip(reason="exhaustive: run with -m nightly")
    for item in items:
        if item.get_closest_marker("gpu") and (INTERPRETED or not torch.cuda.is_available()):
            item.add_marker(no_gpu)
        if item.get_closest_marker("nightly") and "nightly" not in config.getoption("-m"):
            item.add_marker(thinned_out)

"""Interpreted kernels against the reference, on the CPU: see tests/conftest.py for the flag."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support.needs import interpreted

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _walls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted kernel that leaves the memory of its tensors ends the process."""
    if sys.platform == "linux":
        from tests.support.walled import wall_launches  # kernels are decorated by the flag above

        wall_launches(monkeypatch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a GPU is present kernels are compiled, and only TRITON_INTERPRET=1 brings these back;
    tests named *_sm90 and *_every_target compile in a process of their own and always run."""
    if interpreted():
        return
    compiled = pytest.mark.skip(reason="kernels are compiled here: set TRITON_INTERPRET=1")
    apart = ("_sm90", "_every_target")
    for item in items:
        if item.path.is_relative_to(HERE) and not item.path.stem.endswith(apart):
            item.add_marker(compiled)

"""What tests need of a machine, by marker, and why they cannot run on this one.

The one place that decides it. Nothing of dsv4 is imported before it is asked: tests/conftest.py
reads this before the first kernel is decorated, and where Triton is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module

import pytest
import torch


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def why_not(marks: Iterable[pytest.Mark]) -> str | None:
    """Why a test with these marks cannot run here; None if it can."""
    given = list(marks)
    names = {mark.name for mark in given}
    if "gpu" in names and (interpreted() or not torch.cuda.is_available()):
        return "needs a CUDA device and TRITON_INTERPRET unset"
    if "hopper" in names and (reason := _why_not_hopper()):
        return reason
    extras = (str(mark.args[0]) for mark in given if mark.name == "extra")
    return next((reason for extra in extras if (reason := _why_not_extra(extra))), None)


def _why_not_hopper() -> str | None:
    from dsv4.errors import UnsupportedGpu
    from dsv4.kernels.target import target_of

    try:
        target = target_of(torch.device("cuda"))
    except UnsupportedGpu as error:
        return str(error)
    if target.is_hopper:
        return None
    return f"Hopper's own kernels do not run on {target.name} ({target.gpus})"


def _load_nixl() -> None:
    import_module("dsv4.cache.handoff.agent").load_nixl()
    _load_tiers()


def _load_tiers() -> None:
    import_module("dsv4.tiers.record")


def _load_transformers() -> None:
    import_module("transformers")


LOADERS: dict[str, Callable[[], None]] = {
    "nixl": _load_nixl,
    "tiers": _load_tiers,
    "transformers": _load_transformers,
}


@cache
def _why_not_extra(extra: str) -> str | None:
    try:
        LOADERS[extra]()
    except ImportError as error:
        return f"{error}; nothing is installed on this machine"
    return None

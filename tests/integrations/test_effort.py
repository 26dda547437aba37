"""How many files of the package one decode forward runs through: a ratchet against sprawl.

Where a number here grows, somebody who follows a token has more to open. What a file gains may be
worth it; then say so and raise the number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dsv4
from tests.integrations.fast_v4 import fast, plain_model
from tests.integrations.tiny_v4 import paged, prompt, tiny_model

PACKAGE = str(Path(dsv4.__file__).parent)
OURS = "integrations/transformers/"


def files_of(call: Callable[[], Any]) -> set[str]:
    """Files of the package in which a function runs during the call."""
    found = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE) and frame.f_code.co_name[0] != "<":
            found.add(path[len(PACKAGE) + 1 :])

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def decode_files(model: Any, past: Any) -> tuple[set[str], set[str]]:
    """All files of a decode forward, and those on the host's side of a step: on a GPU kernels
    compute what `reference/` does here. The steps before have met what happens once."""
    ids = prompt(24)
    with torch.no_grad():
        past = model(ids[:, :20], past_key_values=past, use_cache=True).past_key_values
        for column in (20, 21):
            model(ids[:, column : column + 1], past_key_values=past)
        found = files_of(lambda: model(ids[:, 22:23], past_key_values=past))
    return found, {path for path in found if not path.startswith("reference/")}


def test_a_decode_forward_of_an_accelerated_model() -> None:
    with fast(plain_model()) as model:
        found, host = decode_files(model, None)
    assert len(host) <= 26, sorted(host)
    assert len(found) <= 38, sorted(found)
    ours = {path.removeprefix(OURS) for path in host if path.startswith(OURS)}
    assert ours == {
        *("forward.py", "caches.py", "rows.py", "packing.py", "attention.py", "weights.py"),
    }


def test_a_decode_forward_of_a_paged_cache() -> None:
    model = tiny_model()
    found, host = decode_files(model, paged(model))
    assert len(found) <= 19, sorted(found)
    ours = {path.removeprefix(OURS) for path in host if path.startswith(OURS)}
    assert ours == {"layers.py", "rows.py", "cache.py", "model.py"}

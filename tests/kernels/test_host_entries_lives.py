"""Every resolve and stage of a random life with entries in host memory, made by the interpreted
kernels with the tensors of the manager, and compared with the reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.kernels import host_entries as kernels
from dsv4.ops.calls import Resolving, Staging
from dsv4.reference import host_entries as reference
from dsv4.reference.backend import ReferenceBackend
from tests.scenarios.test_residency_random import Worlds


def apart(value: Any) -> Any:
    """The same with memory of its own, except for what is only read."""
    own = {
        field.name: getattr(value, field.name).clone()
        for field in fields(value)
        if isinstance(getattr(value, field.name), Tensor) and field.name not in ("host", "tokens")
    }
    return replace(value, **own)


def check(found: Any, expected: Any) -> None:
    for field in fields(expected):
        value = getattr(expected, field.name)
        if isinstance(value, Tensor):
            assert torch.equal(getattr(found, field.name), value), field.name


class Checked:
    def __init__(self) -> None:
        self.seen = Counter[str]()

    def resolve(self, call: Resolving) -> None:
        other = apart(call)
        other = replace(other, entries=apart(call.entries), hot=apart(call.hot))
        before = call.hot.counted.clone()
        reference.resolve(other)
        kernels.resolve(call)
        for part in ("entries", "hot"):
            check(getattr(call, part), getattr(other, part))
        check(call, other)
        hits, misses, _ = (call.hot.counted - before).tolist()
        self.seen.update(hits=hits, misses=misses)

    def stage(self, call: Staging) -> None:
        other = replace(call, staged=apart(call.staged))
        reference.stage(other)
        kernels.stage(call)
        check(call.staged, other.staged)
        self.seen["staged"] += 1


@pytest.mark.parametrize(
    ("model", "drafts", "calls"),
    [
        ("tiny", 1, 10),
        pytest.param("v41-tiny", 0, 40, marks=pytest.mark.nightly),
        pytest.param("tiny", 3, 30, marks=pytest.mark.nightly),
    ],
)
def test_lives_of_a_manager_equal_the_reference(
    model: str, drafts: int, calls: int, monkeypatch: pytest.MonkeyPatch
):
    checked = Checked()
    monkeypatch.setattr(ReferenceBackend, "resolve", staticmethod(checked.resolve))
    monkeypatch.setattr(ReferenceBackend, "stage", staticmethod(checked.stage))
    Worlds(model, 1, drafts=drafts).live(calls, two=False)
    assert min(checked.seen[what] for what in ("hits", "misses", "staged")) > 0, checked.seen

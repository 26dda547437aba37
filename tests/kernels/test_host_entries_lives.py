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
from tests.scenarios.test_residency_random import Pair, Worlds


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


class Repeated(Checked):
    """Launches are made for the first call of each size and run again for others, as a captured
    graph does, whatever requests have how many tokens by then."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, tuple[Resolving, int]] = {}

    def resolve(self, call: Resolving) -> None:
        other = apart(call)
        other = replace(other, entries=apart(call.entries), hot=apart(call.hot))
        reference.resolve(other)
        most = max(call.batch[:, 2].tolist(), default=0)
        size = tuple(call.selected.shape), len(call.batch), call.hot.place.data_ptr()
        first, most_of_first = self.made.setdefault(size, (call, most))
        first.selected.copy_(call.selected)
        for launch in (kernels.resolve_launch(first), kernels.fetch_launch(first)):
            launch.run()
        call.rows.copy_(first.rows)
        for part in ("entries", "hot"):
            check(getattr(call, part), getattr(other, part))
        assert torch.equal(call.rows, other.rows)
        self.seen["more tokens than the first"] += most > most_of_first
        assert (call.hot.counted[1] > 0).all(), "nothing was fetched"


def test_what_was_made_for_one_token_per_request_serves_several(monkeypatch: pytest.MonkeyPatch):
    worlds, repeated = Worlds("tiny", 4, drafts=1), Repeated()

    def step(works: list[tuple[Pair, list[int]]], **padding: int) -> None:
        plans = worlds.both(
            lambda manager, nth: manager.prepare_forward(
                [(pair.requests[nth], len(ids)) for pair, ids in works], **padding
            )
        )
        assert plans
        worlds.run(plans, works)
        worlds.both(lambda manager, nth: manager.commit(plans[nth]))

    pairs = []
    for text in worlds.texts[:2]:
        found = worlds.both(lambda manager, _, ids=text: manager.admit_request(ids[:900]))
        assert found
        pairs.append(Pair(found))
        for first in range(0, 900, 225):
            step([(pairs[-1], text[first : first + 225])])
    monkeypatch.setattr(ReferenceBackend, "resolve", staticmethod(repeated.resolve))
    for counts in ((1, 1), (2,), (1, 2), (2, 2)):
        works = [(pair, [7, 8][:count]) for pair, count in zip(pairs, counts, strict=False)]
        step(works, pad_tokens=8, pad_requests=3)
    assert repeated.seen["more tokens than the first"] == 3 * 2  # steps, layers

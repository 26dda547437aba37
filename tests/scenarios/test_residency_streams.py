"""Random lives of requests whose entries may be in host memory, while copies run as late as their
streams allow: whoever reads or writes what a copy has to do with waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4.cache.residency.chunks import SideStream
from dsv4.cache.residency.host_copies import HostCopies
from tests.scenarios.test_residency_random import Worlds, assert_both_were_needed
from tests.support.late_streams import LateGpu


def live(model: str, seed: int, *, drafts: int, plans: int, early: float, calls: int) -> Worlds:
    worlds, gpu = Worlds(model, seed, drafts=drafts, plans=plans), LateGpu(seed, early)
    with gpu.installed():
        gpu.make_late(worlds.managers[1])
        worlds.live(calls, two=plans > 1)
    assert gpu.put_off > 10
    return worlds


@pytest.mark.parametrize(("early", "plans"), [(0.0, 1), (0.3, 2)])
def test_outputs_do_not_depend_on_when_copies_happen(early: float, plans: int):
    assert_both_were_needed(live("tiny", 5, drafts=1, plans=plans, early=early, calls=45))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("early", "plans"), [(0.0, 1), (0.0, 2), (0.3, 1), (0.3, 2)])
@pytest.mark.parametrize(("model", "drafts"), [("tiny", 0), ("tiny", 1), ("v41-tiny", 2)])
def test_many_outputs_do_not_depend_on_when_copies_happen(
    model: str, drafts: int, early: float, plans: int, seed: int
):
    live(model, seed, drafts=drafts, plans=plans, early=early, calls=300)


def nothing(*_: Any) -> None:
    pass


# waits that a life cannot do without
WAITS: dict[str, tuple[type, str, Callable[..., None]]] = {
    "of a layer for its entries": (SideStream, "hold_back", nothing),
    "of rows that blocks leave for their copies": (HostCopies, "hold_back", nothing),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_missing_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*WAITS[name])
    with pytest.raises(AssertionError, match="tokens"):
        live("tiny", 5, drafts=1, plans=1, early=0.0, calls=45)

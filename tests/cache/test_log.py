"""What `logging.getLogger("dsv4")` tells of a manager's day."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import ContextOverflow, OutOfBlocks, OutOfSlots, PlanError
from tests.support.faults import DeviceFault, Faults, Interrupts
from tests.support.lives import TINY

SCHEMA = CacheSchema.build(TINY, max_context=2048, max_draft_tokens=3)


def build(prefix: PrefixOptions | None = None) -> KVCacheManager:
    return KVCacheManager(
        SCHEMA, num_blocks=6, max_requests=2, max_step_tokens=512, prefix=prefix or PrefixOptions()
    )


def run(manager: KVCacheManager, first: int, tokens: int) -> Request:
    """A request of ids from `first` on, as if all layers had stored it."""
    ids = np.arange(first, first + tokens)
    request = manager.admit_request(ids)
    plan = manager.prepare_forward([(request, tokens - request.length)])
    plan.mark_appended()
    if plan.prefill is not None and plan.prefill.captures is not None:
        plan.prefill.captures.layers.update(range(len(manager.schema.layers)))
    manager.commit(plan, ids=ids[request.length :])
    return request


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.name == "dsv4" and r.levelno == level]
    caplog.clear()
    return found


def test_refusals_and_evictions_are_told(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "dsv4")
    manager = build(PrefixOptions(policy=full(), snapshots=2))
    manager.release_request(run(manager, 0, 400))
    assert lines(caplog, logging.DEBUG) == []
    busy = run(manager, 5000, 500)
    assert lines(caplog, logging.DEBUG) == [
        "1 cached blocks evicted",
        "a snapshot evicted, of the block 1",
    ]
    with pytest.raises(OutOfBlocks):
        manager.room.extend(busy, 2 * 384)
    with pytest.raises(ContextOverflow):
        manager.room.extend(busy, 2000)
    other = manager.admit_request(10)
    with pytest.raises(OutOfSlots):
        manager.admit_request(10)
    plan = manager.prepare_forward([(other, 1)])
    with pytest.raises(PlanError):
        manager.prepare_forward([(other, 1)])
    told = lines(caplog, logging.DEBUG)
    refused = [line.split(":")[:2] for line in told if "refused" in line]
    assert refused == [
        ["extend refused", " OutOfBlocks"],
        ["extend refused", " ContextOverflow"],
        ["admit_request refused", " OutOfSlots"],
        ["prepare_forward refused", " PlanError"],
    ]
    manager.fail(plan)
    assert lines(caplog, logging.INFO) == ["a step of 1 requests failed, 0 are torn"]


def test_fallbacks_are_told(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "dsv4")
    manager = build(PrefixOptions(policy=zero()))
    manager.release_request(run(manager, 0, 400))
    manager.admit_request(np.arange(390))
    assert lines(caplog, logging.DEBUG) == [
        "384 tokens are cached, but no snapshot near their end: 384 of 384 run again"
    ]


def test_errors_of_the_device_and_recoveries_are_warnings(caplog: pytest.LogCaptureFixture):
    manager = build()
    request = run(manager, 0, 300)
    with pytest.raises(DeviceFault), Faults(0).injected():
        manager.fork(request, 1)
    assert lines(caplog, logging.WARNING) == ["fork failed: DeviceFault: CUDA error: out of memory"]
    with pytest.raises(KeyboardInterrupt), Interrupts(20).injected():
        manager.rewind(request, 100)
    manager.recover()
    (told,) = lines(caplog, logging.WARNING)
    assert told.startswith("recovered from an interrupted rewind: 1 requests live, ")
    manager.recover()  # not needed
    assert lines(caplog, logging.WARNING) == []


def test_nothing_is_written_where_nobody_listens(monkeypatch: pytest.MonkeyPatch):
    """Off, a line costs a look at the level: nothing is put together."""
    made: list[object] = []
    monkeypatch.setattr(logging.Logger, "makeRecord", lambda *given, **more: made.append(given))
    manager = build(PrefixOptions(policy=full(), snapshots=2))
    manager.release_request(run(manager, 0, 400))
    busy = run(manager, 5000, 500)
    with pytest.raises(OutOfBlocks):
        manager.room.extend(busy, 700)
    assert made == []

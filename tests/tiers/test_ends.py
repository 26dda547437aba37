"""A manager that is dropped or closed lets go of its thread and of the host memory it holds."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.transfers.copies import Mark
from dsv4.cache.transfers.worker import CopyBatch, Outgoing
from dsv4.errors import RequestError
from dsv4.tiers.host import HostTier
from tests.support.lives import Text
from tests.support.tiered import TIMEOUT_S, assert_like_cold, disk, empty, keep, run, stack_with
from tests.support.tiers import chain, until


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("dsv4-")}


def used_manager(tiers: list[Any], tokens: int = 300) -> KVCacheManager:
    stack = stack_with(tiers)
    keep(stack, Text.random(stack, 1, 400), tokens)
    empty(stack)
    run(stack, Text.random(stack, 1, 400), tokens)  # a fetch, which has rows checked
    return stack.manager


def test_a_manager_that_is_dropped_ends_its_thread_and_lets_its_tiers_go(tmp_path: Path):
    before = threads()
    host, below = HostTier(8 << 20), disk(tmp_path)
    manager = used_manager([host, below])
    gone = [weakref.ref(manager), weakref.ref(host), weakref.ref(below)]
    assert {each.name for each in threads() - before} >= {"dsv4-offload"}
    del manager, host, below
    until(lambda: gc.collect() >= 0 and not any(each() for each in gone))
    until(lambda: gc.collect() >= 0 and threads() <= before)


def test_staged_rows_go_with_the_manager(tmp_path: Path):
    """Without a host tier the manager has host memory of its own."""
    below = disk(tmp_path)
    manager = used_manager([below])
    assert manager.tiers
    staging = weakref.ref(manager.tiers.host)
    del manager
    until(lambda: gc.collect() >= 0 and staging() is None)
    below.close(TIMEOUT_S)


class Late(Mark):
    """A copy that is on its way until it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there = False

    @property
    def passed(self) -> bool:
        return self.is_there

    def wait(self) -> None:
        self.is_there = True


def test_copies_on_their_way_are_kept_when_their_manager_is_dropped():
    """Their rows lie in a host tier that other managers have too."""
    before = threads()
    host = HostTier(8 << 20)
    manager = stack_with([host]).manager
    assert manager.tiers
    offload = manager.tiers.offload
    record = manager.tiers.labels.make(chain("a", 1)[0].kind, b"a" * 32, bytes(32), 128)
    row = host.take(record)
    assert row is not None
    row.parts.payload[0][:] = bytes(row.parts.payload[0].nbytes)
    offload._note_copying(CopyBatch(Late(), [Outgoing(row)]), 0)
    gone = weakref.ref(manager)
    del manager, offload
    until(lambda: gc.collect() >= 0 and gone() is None)
    until(lambda: host.holds(record.key) and row.holds == 0)
    until(lambda: not any(each.name == "dsv4-offload" for each in threads() - before))
    host.close(TIMEOUT_S)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_manager_closes_its_tiers_way_and_goes_on_without(kind: str, tmp_path: Path):
    before = threads()
    tier: Any = HostTier(8 << 20) if kind == "host" else disk(tmp_path)
    stack = stack_with([tier])
    manager, text = stack.manager, Text.random(stack, 1, 600)
    keep(stack, text, 300)
    empty(stack)
    fetch = manager.tiers.fetch(text.ids[:300])
    assert manager.tiers
    manager.tiers.close(TIMEOUT_S)
    assert fetch.done
    assert not any(each.name == "dsv4-offload" for each in threads() - before)
    request = run(stack, text, 400)
    assert request.resume.start == 0  # nothing comes any more
    assert_like_cold(stack, request, text)
    with pytest.raises(RequestError, match="is closed"):  # nothing would be kept
        manager.tiers.suspend(request)
    manager.release_request(request)
    assert manager.tiers.drain(TIMEOUT_S)
    manager.check_invariants()
    manager.prefix.evict()
    assert manager.stats().blocks_free == manager.stats().blocks_total
    held = tier.stats().held_records
    other = stack_with([tier])  # the tier itself is the caller's
    assert run(other, text, 300).resume.start == 256
    assert tier.stats().held_records == held
    other.manager.tiers.drain(TIMEOUT_S)
    tier.close(TIMEOUT_S)

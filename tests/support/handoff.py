"""Two managers, one of which hands requests over to the other, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from dsv4.cache.changes import release_now
from dsv4.cache.handoff.handoff import Handoff
from dsv4.cache.handoff.options import HandoffOptions
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import PageForm
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.model import ModelSpec
from tests.support.lives import TINY, Text, run_to
from tests.support.stack import Stack, readable_bytes
from tests.support.tiered import options

MODEL = "tiny 1"
PATIENT_S = 240.0  # where nothing is to be late, on the slowest machine


def side(
    name: str,
    *,
    drafts: int = 0,
    ahead: int = 0,
    state: HcaState = "raw",
    model: ModelSpec = TINY,
    form: PageForm = "planes",
    handoff: dict[str, Any] | None = None,
    **more: Any,
) -> Stack:
    """A manager that hands over, with poisoned memory."""
    more.setdefault("prefix", options())
    more.setdefault("num_blocks", 12)
    given = {"model_id": MODEL, "lease_s": PATIENT_S, "deadline_s": PATIENT_S, **(handoff or {})}
    schema = CacheSchema.build(
        model,
        max_context=2048,
        max_draft_tokens=drafts,
        steps_ahead=ahead,
        hca_state=state,
        page_form=form,
    )
    layers = range(len(model.layers))
    return Stack(schema, layers=layers, handoff=HandoffOptions(name=name, **given), **more)


def handing(stack: Stack) -> Handoff:
    assert stack.manager.handoff
    return stack.manager.handoff


def close(*stacks: Stack) -> None:
    for stack in stacks:
        handing(stack).close()


def grown(stack: Stack, text: Text, length: int, *, chunk: int = 64) -> Request:
    """A request of so many tokens, all of whose ids are known."""
    request = stack.manager.admit_request(text.ids[: max(1, length - 70)])
    run_to(stack, request, text, length, chunk=chunk)
    return request


def tidy(manager: KVCacheManager) -> None:
    """Any call that changes the manager lets go what is over; this one does nothing else."""
    release_now(manager)


def until(manager: KVCacheManager, condition: Callable[[], bool]) -> None:
    """Waits for a condition, while the manager is being called."""
    end = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)
        tidy(manager)


def assert_nothing_left(*stacks: Stack) -> None:
    """No request, no offer, no arrival: every block, slot, row and cell is free."""
    for stack in stacks:
        manager, handoff = stack.manager, handing(stack)
        for request in manager.requests:
            manager.release_request(request)
        for lease in tuple(handoff.leases.standing.values()):
            handoff.leases.withdraw(lease.name)

        def is_empty(manager: KVCacheManager = manager, handoff: Handoff = handoff) -> bool:
            return not (handoff.arrivals.open or handoff.leases.held)

        until(manager, is_empty)
        manager.check_invariants()
        if manager.prefix:
            manager.prefix.evict()
        stats = manager.stats()
        assert stats.blocks_free == stats.blocks_total
        assert stats.slots_free == stats.slots_total
        table = manager._parts.table
        assert table.holdings == {}
        assert handoff.side.pledges.free == handoff.side.options.offers
        assert handoff.side.rows.free == handoff.side.options.states


def assert_equal(one: Stack, request: Request, other: Stack, copy: Request) -> None:
    """Both requests show the same bytes, in caches of whatever ring sizes."""
    expected, found = readable_bytes(one, request), readable_bytes(other, copy)
    assert expected.keys() == found.keys()
    for name, rows in expected.items():
        assert torch.equal(rows, found[name]), name

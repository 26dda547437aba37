"""What a manager was not given refuses its calls, and says what to build."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from tests.support.lives import TINY

MANAGER = KVCacheManager(CacheSchema.build(TINY, max_context=256), num_blocks=2, max_requests=1)
CALLS = [
    *((MANAGER.tiers, call) for call in ("fetch", "admit", "suspend", "resume", "drain", "close")),
    *((MANAGER.handoff, call) for call in ("offer", "withdraw", "accept", "close")),
]


@pytest.mark.parametrize(("part", "call"), CALLS, ids=lambda each: str(each))
def test_a_call_of_what_is_not_there_says_how_to_have_it(part: Any, call: str):
    needed = r"tiers=\[HostTier" if part is MANAGER.tiers else r"handoff=HandoffOptions\("
    with pytest.raises(InvalidInput, match=needed):
        getattr(part, call)([1, 2, 3], timeout_s=1.0)
    assert not part


def test_of_no_tiers_there_are_none():
    assert MANAGER.tiers.all == ()


def test_the_manager_goes_on_without():
    request = MANAGER.admit_request(100)
    MANAGER.room.release_later(request, suspend=True)
    MANAGER.recover()
    stats = MANAGER.stats()
    assert (stats.requests_live, stats.transfers, stats.tiers, stats.handoff) == (0, None, (), None)
    MANAGER.check_invariants()

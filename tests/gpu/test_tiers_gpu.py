"""Tiers below a GPU: copies on streams of their own, while blocks and slots are used again."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from dsv4.cache.prefix.options import full
from dsv4.errors import MissingExtra
from tests.support.lives import ColdRun, Text, run_to

with suppress(MissingExtra):  # then every test is skipped
    from dsv4.tiers.disk import DiskTier
    from dsv4.tiers.host import HostTier
    from dsv4.tiers.tier import Tier
    from tests.support.tiered import BLOCK, TIMEOUT_S, options, stack_with

pytestmark = [pytest.mark.gpu, pytest.mark.extra("tiers")]
DEVICE = "cuda"


@pytest.mark.parametrize("kind", ["host", "disk", "host and disk"])
def test_prompts_that_push_each_other_out_come_back(kind: str, tmp_path: Path):
    """The pool holds one prompt and a half: blocks are taken again while they are still copied."""
    tiers: list[Tier] = [HostTier(64 << 20)] if "host" in kind else []
    if "disk" in kind:
        tiers.append(DiskTier(tmp_path / "tier", 1 << 30))
    stack = stack_with(tiers, drafts=3, num_blocks=9, device=DEVICE, prefix=options(full()))
    texts = [Text.random(stack, seed, 900) for seed in range(4)]
    for turn in range(3):
        for text in texts:
            request = stack.manager.tiers.admit(text.ids[:700], timeout_s=TIMEOUT_S)
            run_to(stack, request, text, 720, chunk=300)
            ColdRun(stack, text.stream, 720).assert_same(stack, request)
            stack.manager.release_request(request)
            stack.manager.check_invariants()
        assert stack.manager.tiers.drain(TIMEOUT_S)
        if turn:
            assert request.resume.start == 5 * BLOCK
    transfers = stack.manager.stats().transfers
    assert transfers is not None
    assert transfers.records_refused == 0
    assert transfers.tokens_fetched > 0
    for tier in tiers:
        tier.close(TIMEOUT_S)


@pytest.mark.parametrize("length", [130, 300])
def test_a_request_comes_back_while_its_slot_is_used_again(length: int):
    tier = HostTier(64 << 20)
    stack = stack_with([tier], drafts=3, max_requests=1, device=DEVICE)
    text, other = Text.random(stack, 1, 900), Text.random(stack, 2, 900)
    request = stack.manager.admit_request(text.ids[:100])
    run_to(stack, request, text, length, chunk=50)
    stack.manager.tiers.suspend(request)
    busy = stack.manager.admit_request(other.ids[:400])  # the same slot, at once
    run_to(stack, busy, other, 400)
    stack.manager.release_request(busy)
    assert stack.manager.tiers.drain(TIMEOUT_S)
    stack.manager.prefix.evict()
    again = stack.manager.tiers.resume(text.ids[:length], timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.length) == ("state", length)
    run_to(stack, again, text, length + 100, chunk=4)
    ColdRun(stack, text.stream, length + 100).assert_same(stack, again)
    tier.close(TIMEOUT_S)

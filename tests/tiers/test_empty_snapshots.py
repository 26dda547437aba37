"""A model whose snapshots have no bytes: a window of one token and groups that end with the block.
Tiers keep its blocks and states, and have no snapshots to keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import SnapshotLayout
from dsv4.model import ModelSpec, v4_layers
from dsv4.tiers.host import HostTier
from tests.support.lives import Text, assert_cold, run_to
from tests.support.stack import Stack
from tests.support.tiered import TIMEOUT_S, disk, empty, options

MODEL = replace(ModelSpec.preset("tiny"), window=1, layers=v4_layers([128, 128], backbone=2))


@pytest.mark.parametrize("chunk", [1, 200])
def test_commits_go_on_and_what_is_cached_comes_back(tmp_path: Path, chunk: int):
    schema = CacheSchema.build(MODEL, max_context=2048, max_draft_tokens=1)
    assert SnapshotLayout(schema).row_bytes == 0
    tiers = [HostTier(8 << 20), disk(tmp_path)]
    stack = Stack(
        schema, layers=(0, 1), num_blocks=12, max_requests=2, prefix=options(), tiers=tiers
    )
    manager, text = stack.manager, Text.random(stack, 0, 600)
    request = manager.admit_request(text.ids[:400])
    run_to(stack, request, text, 400, chunk=chunk)
    manager.release_request(request)
    request = manager.admit_request(text.ids[:400])
    assert request.resume.source == "snapshot"
    manager.release_request(request)
    assert manager.tiers.drain(TIMEOUT_S)
    empty(stack)
    request = manager.tiers.admit(text.ids[:400], timeout_s=TIMEOUT_S)
    assert request.resume.reused_tokens == 384
    assert request.resume.start >= 380  # a replay of a token for each layer
    run_to(stack, request, text, 420, chunk=chunk)
    assert_cold(stack, request, text.stream)
    manager.tiers.suspend(request)
    assert manager.tiers.drain(TIMEOUT_S)
    again = manager.tiers.resume(text.ids[:420], timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.length) == ("state", 420)
    run_to(stack, again, text, 520)
    assert_cold(stack, again, text.stream)
    manager.check_invariants()
    for tier in tiers:
        tier.close(TIMEOUT_S)

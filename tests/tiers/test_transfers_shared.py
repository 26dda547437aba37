"""A manager above stores that many machines share: their faults are misses, never wrong bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from dsv4.tiers.mooncake import MooncakeTier
from dsv4.tiers.object import ObjectTier
from dsv4.tiers.tier import Limits
from tests.support.lives import Text, run_to
from tests.support.tiered import (
    BLOCK,
    SCHEMA,
    TIMEOUT_S,
    assert_like_cold,
    empty,
    keep,
    stack_with,
)
from tests.support.tiers import (
    PATIENT,
    found,
    free_port,
    label,
    mooncake_master,
    python,
    s3_config,
    stop,
    until,
)

QUICK = Limits(threads=2, deadline_s=2.0, back_off_s=0.2)  # where a deadline is to pass
TOKENS = 400
BLOCKS = (TOKENS - 1) // BLOCK
# a peer: another manager, whose blocks lie in the memory that it gives; waits to be killed
PEER = """
import sys, time
from dsv4.tiers.mooncake import MooncakeTier
from tests.support.lives import Text
from tests.support.tiered import keep, stack_with
from tests.support.tiers import PATIENT
tier = MooncakeTier(f"127.0.0.1:{sys.argv[1]}", segment_bytes=32 << 20, limits=PATIENT)
stack = stack_with([tier])
keep(stack, Text.random(stack, 1, 900), int(sys.argv[2]))
assert tier.stats().stored >= 4
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def port(mooncake: None) -> Iterator[int]:
    port = free_port()
    with mooncake_master(port):
        yield port


def met(tier: MooncakeTier) -> MooncakeTier:
    """It has met the master: whoever is still on the way to one that hangs waits with Mooncake."""

    def has_met() -> bool:
        found(tier, [label("any")])
        return tier._client is not None and not tier.stats().backing_off

    until(has_met)
    return tier


def check_miss(tier: MooncakeTier) -> None:
    """Whatever the store does, a prompt is computed in time, and right."""
    stack = stack_with([tier])
    text = Text.random(stack, 1, 900)
    begin = time.monotonic()
    request = stack.manager.tiers.admit(text.ids[:TOKENS], timeout_s=TIMEOUT_S)
    assert time.monotonic() - begin < TIMEOUT_S - 10  # the tier's deadline ended it
    assert (request.resume.start, stack.manager.stats().blocks_in_flight) == (0, 0)
    run_to(stack, request, text, TOKENS)
    assert_like_cold(stack, request, text)
    stack.manager.check_invariants()


def test_another_machine_goes_on_where_one_was(port: int):
    with python(PEER, port, TOKENS, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline().strip() == "ready"
        address = f"127.0.0.1:{port}"
        tier, quick = (met(MooncakeTier(address, limits=each)) for each in (PATIENT, QUICK))
        stack = stack_with([tier], drafts=2)
        text = Text.random(stack, 1, 900)
        request = stack.manager.tiers.admit(text.ids[:TOKENS], timeout_s=TIMEOUT_S)
        assert (request.resume.source, request.resume.start) == ("snapshot", BLOCKS * BLOCK)
        assert tier.stats().loaded_bytes > BLOCKS * SCHEMA.bytes.block
        run_to(stack, request, text, TOKENS + 50)
        assert_like_cold(stack, request, text)
        stop(peer)  # who has the bytes does not answer any more
        check_miss(quick)
        peer.kill()
        check_miss(quick)
        for each in (tier, quick):
            each.close(TIMEOUT_S)


def test_a_master_that_is_stopped_or_killed_is_a_miss(mooncake: None):
    port = free_port()
    with mooncake_master(port) as master:
        address = f"127.0.0.1:{port}"
        tier = MooncakeTier(address, segment_bytes=32 << 20, limits=PATIENT)
        quick = met(MooncakeTier(address, limits=QUICK))
        stack = stack_with([tier])
        keep(stack, Text.random(stack, 1, 900), TOKENS)
        assert tier.stats().stored >= BLOCKS
        stop(master)
        check_miss(quick)
        os.kill(master.pid, signal.SIGCONT)
        master.kill()
        master.wait()
        check_miss(quick)
    for each in (tier, quick):
        each.close(TIMEOUT_S)


def test_object_storage_brings_a_prompt_back(s3_port: int):
    tier = ObjectTier(
        "s3://bucket/manager", config=s3_config(s3_port), allow_http=True, limits=PATIENT
    )
    stack = stack_with([tier])
    text = Text.random(stack, 2, 900)
    keep(stack, text, TOKENS)
    empty(stack)
    request = stack.manager.tiers.admit(text.ids[:TOKENS], timeout_s=TIMEOUT_S)
    assert request.resume.start == BLOCKS * BLOCK
    run_to(stack, request, text, TOKENS + 50)
    assert_like_cold(stack, request, text)
    assert tier.stats().loaded_bytes > BLOCKS * SCHEMA.bytes.block
    tier.close(TIMEOUT_S)

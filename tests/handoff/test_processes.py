"""Two and three real processes over TCP on loopback: owners that are killed, stopped, started again
or rewrite what they offered. Never wrong bytes, and nothing is left on either side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dsv4.cache.handoff.arrival import Arrival
from dsv4.errors import OfferError, OutOfBlocks
from tests.handoff.owner import TOKENS
from tests.support.faults import everything
from tests.support.handoff import PATIENT_S, assert_nothing_left, close, handing, side, until
from tests.support.lives import ColdRun, Text, assert_cold, run_to
from tests.support.stack import Stack
from tests.support.tiered import BLOCK, disk
from tests.support.tiers import PROJECT, process, stop


class Remote:
    """An owner in a process of its own."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        assert self.answer() == "ready"

    def answer(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"the owner is gone: {self.child.wait()}"
        return json.loads(line)

    def ask(self, call: str, **arguments: Any) -> Any:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps([call, arguments]) + "\n")
        self.child.stdin.flush()
        return self.answer()

    def offer(self, seed: int, length: int, **options: Any) -> bytes:
        answer = self.ask("offer", seed=seed, length=length, **options)
        if isinstance(answer, dict):  # what it has offered before fills its pool
            assert "OutOfBlocks" in answer["error"], answer
            self.ask("rewrite")
            return self.offer(seed, length, **options)
        return bytes.fromhex(answer)

    def signal(self, number: int) -> None:
        os.kill(self.child.pid, number)

    def stop(self) -> None:
        stop(self.child)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.child.wait()


@contextmanager
def remote(
    name: str = "prefill", *, transports: str | None = "tcp", **options: Any
) -> Iterator[Remote]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    if transports is not None:
        environment["UCX_TLS"] = transports
    with process(
        *(sys.executable, "-m", "tests.handoff.owner", json.dumps([name, options])),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=PROJECT,
    ) as child:
        yield Remote(child)


@pytest.fixture(scope="module")
def owner(taker: Stack) -> Iterator[Remote]:
    """They have met: a probe needs an owner that does not stand still."""
    with remote() as started:
        assert outcome(taker, taker.manager.handoff.accept(started.offer(0, 60)), 0) == "here"
        taker.manager.prefix.evict()
        yield started


@pytest.fixture(scope="module")
def taker() -> Iterator[Stack]:
    stack = side("decode", drafts=2, num_blocks=14)
    yield stack
    close(stack)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, taker: Stack) -> Iterator[None]:
    yield
    assert_nothing_left(taker)
    if "owner" in request.fixturenames:
        assert request.getfixturevalue("owner").ask("check")


def assert_computed(taker: Stack, seed: int, length: int) -> None:
    """Nothing of what did not come is found, and the request is computed."""
    text = Text.random(taker, seed, TOKENS)
    request = taker.manager.admit_request(text.ids[:length])
    assert request.resume.start == 0
    run_to(taker, request, text, length + 5)
    assert_cold(taker, request, text.stream)
    taker.manager.release_request(request)


def begun(taker: Stack, arrival: Arrival) -> Arrival:
    """Waits until NIXL has been told to read."""
    read = arrival.read
    assert read is not None
    until(taker.manager, lambda: read.stage >= 1)
    return arrival


def outcome(taker: Stack, arrival: Arrival, seed: int) -> str:
    """Right bytes, or none, and why. The owner may have gone on from a snapshot, which leaves out
    draft layers."""
    try:
        request = arrival.wait()
    except OfferError as error:
        taker.manager.check_invariants()
        return error.reason
    text = Text.random(taker, seed, TOKENS)
    cold = ColdRun(taker, text.stream, request.length + 4)
    cold.assert_same(taker, request, with_drafts=False)
    run_to(taker, request, text, request.length + 4, chunk=2)
    cold.assert_same(taker, request, with_drafts=False)
    taker.manager.release_request(request)
    return "here"


def test_a_request_comes_from_another_process(owner: Remote, taker: Stack):
    offer = owner.offer(1, 433)
    assert outcome(taker, taker.manager.handoff.accept(offer), 1) == "here"
    until(taker.manager, lambda: owner.ask("held") == 0)  # it was told, long before the lease ends
    arrival = taker.manager.handoff.accept(offer)  # once more: cached here, and the offer is over
    assert arrival.skipped_blocks == 3
    assert outcome(taker, arrival, 1) == "gone"


def test_an_owner_that_stands_still_costs_the_deadline_and_no_byte(owner: Remote, taker: Stack):
    offer = owner.offer(2, 433, takers=2)
    with owner.stopped():
        arrival = begun(taker, taker.manager.handoff.accept(offer))
        assert not arrival.poll()
        arrival.deadline = time.monotonic()
        assert outcome(taker, arrival, 2) == "late"
        in_flight = taker.manager.stats().blocks_in_flight
        assert in_flight == 4  # nobody gets them: NIXL may still write there
        assert_computed(taker, 2, 433)
        assert taker.manager.stats().blocks_in_flight == in_flight
        taker.manager.prefix.evict()
    until(taker.manager, lambda: not handing(taker).arrivals.open)
    assert taker.manager.stats().blocks_in_flight == 0
    assert outcome(taker, taker.manager.handoff.accept(offer), 2) == "here"


def test_a_cancelled_read_keeps_its_memory_until_it_is_over(owner: Remote, taker: Stack):
    offer = owner.offer(3, 300)
    with owner.stopped():
        arrival = begun(taker, taker.manager.handoff.accept(offer))
        arrival.cancel()
        assert arrival.error is not None
        for _ in range(20):
            assert not taker.manager.requests
            taker.manager.check_invariants()
            assert taker.manager.stats().blocks_in_flight == 3
            time.sleep(0.005)
    until(taker.manager, lambda: not handing(taker).arrivals.open)
    assert_computed(taker, 3, 300)


def test_a_lease_that_ends_during_the_read(owner: Remote, taker: Stack):
    offer = owner.offer(4, 300, lease_s=0.1)
    with owner.stopped():
        arrival = begun(taker, taker.manager.handoff.accept(offer))
        time.sleep(0.15)
    # its clock goes on with the process: the pledge is wiped at once, or was read before
    assert outcome(taker, arrival, 4) in ("gone", "here")
    until(taker.manager, lambda: owner.ask("held") == 0)
    taker.manager.prefix.evict()
    assert outcome(taker, taker.manager.handoff.accept(offer), 4) == "gone"


@pytest.mark.parametrize("sums", [True, False])
def test_rows_that_are_rewritten_during_the_read(
    owner: Remote, taker: Stack, sums: bool, monkeypatch: pytest.MonkeyPatch
):
    """Half of the blocks have come, then the owner writes something else there."""
    link, half = handing(taker).side.link, []
    transfer = link._transfer

    def torn(read: Any, spans: Any, note: bytes) -> None:
        if spans is read.spans[0]:
            half.append(owner.ask("rewrite"))
        transfer(read, spans, note)

    offer = owner.offer(5, 433)
    if not sums:
        arrivals = handing(taker).arrivals  # as on a GPU, whose blocks nobody sums
        monkeypatch.setattr(arrivals, "_side", replace(arrivals._side, can_sum=False))
    monkeypatch.setattr(link, "_transfer", torn)
    arrival = taker.manager.handoff.accept(offer)
    assert outcome(taker, arrival, 5) == "gone"
    assert half
    monkeypatch.undo()
    assert_computed(taker, 5, 433)


def test_an_owner_that_is_killed_and_started_again(taker: Stack, tmp_path: Path):
    with remote("phoenix", disk=str(tmp_path / "tier")) as first:
        offer = first.offer(6, 433, takers=9)
        assert first.ask("drain")
        assert outcome(taker, taker.manager.handoff.accept(offer), 6) == "here"
        taker.manager.prefix.evict()
        first.stop()  # so that the read is under way
        arrival = begun(taker, taker.manager.handoff.accept(offer))
        first.kill()
        assert outcome(taker, arrival, 6) == "failed"
        until(taker.manager, lambda: not handing(taker).arrivals.open)
        assert_computed(taker, 6, 433)
        taker.manager.prefix.evict()
        assert outcome(taker, taker.manager.handoff.accept(offer), 6) == "failed"
    resume_from_disk(tmp_path, offer)
    with remote("phoenix") as second:
        fresh = second.offer(7, 300)
        # of another epoch: whatever lies at those addresses now is not believed
        assert outcome(taker, taker.manager.handoff.accept(offer, deadline_s=5.0), 6) in (
            "failed",
            "late",
        )
        assert outcome(taker, taker.manager.handoff.accept(fresh), 7) == "here"
        assert second.ask("check")


def resume_from_disk(root: Path, offer: bytes) -> None:
    """The dead owner's disk is there: nothing runs but what is behind its last snapshot."""
    tier = disk(root)
    stack = side("decode 2", tiers=[tier])
    text = Text.random(stack, 6, TOKENS)
    assert outcome(stack, stack.manager.handoff.accept(offer), 6) == "failed"
    request = stack.manager.tiers.admit(text.ids[:433], timeout_s=PATIENT_S)
    assert (request.resume.start, request.resume.source) == (2 * BLOCK, "snapshot")
    assert request.resume.reused_tokens == 3 * BLOCK
    run_to(stack, request, text, 440)
    assert_cold(stack, request, text.stream)
    assert_nothing_left(stack)
    close(stack)
    tier.close(PATIENT_S)


def test_what_does_not_fit_is_refused_before_anything_is_read(owner: Remote, taker: Stack):
    offer = owner.offer(10, 433)
    others = {
        "schema": side("decode", state="online"),
        "model": side("decode", prefix=None, handoff={"model_id": "other weights"}),
        "blocks": side("decode", num_blocks=3),
    }
    for reason, stack in others.items():
        before = everything(stack.manager)
        with pytest.raises(OutOfBlocks if reason == "blocks" else OfferError) as error:
            stack.manager.handoff.accept(offer)
        assert reason == "blocks" or error.value.reason == reason
        assert everything(stack.manager) == before
        close(stack)
    assert outcome(taker, taker.manager.handoff.accept(offer), 10) == "here"


def test_a_taker_that_is_killed_costs_the_owner_its_lease(owner: Remote, taker: Stack):
    """Three processes: what the dead one did not take is there for the next."""
    offer = owner.offer(8, 433, takers=2)
    with remote("decode 2") as second:
        second.ask("accept", offer=offer.hex())
        second.kill()
    assert outcome(taker, taker.manager.handoff.accept(offer), 8) == "here"


def test_the_owner_decodes_on_and_two_take_at_once(owner: Remote, taker: Stack):
    offer = owner.offer(9, 300, keep=True, takers=1)
    arrivals = [taker.manager.handoff.accept(offer) for _ in range(2)]
    found = [outcome(taker, arrival, 9) for arrival in arrivals]
    assert "here" in found
    assert set(found) <= {"here", "gone"}


# ---- at random -----------------------------------------------------------------------------------


def churn(taker: Stack, random: Random, rounds: int, until_then: Callable[[], bool]) -> list[str]:
    """Offers with leases of milliseconds by an owner that reuses its memory at once; now and then
    it is stopped for a moment, or arrivals are cancelled."""
    found: list[str] = []
    with remote("churn", num_blocks=9) as owner:
        for nth in range(rounds):
            if not until_then():
                break
            seed, length = random.randrange(6), random.choice((60, 128, 300, 433, 600))
            offer = owner.offer(
                seed,
                length,
                lease_s=random.choice((0.001, 0.01, 5.0)),
                takers=random.choice((1, 2)),
            )
            if random.random() < 0.3:
                owner.ask("rewrite")
            count = random.choice((1, 1, 2))
            arrivals = [
                taker.manager.handoff.accept(offer, deadline_s=random.choice((0.002, 30.0)))
                for _ in range(count)
            ]
            if random.random() < 0.2:
                with owner.stopped():
                    time.sleep(random.random() * 0.02)
            if random.random() < 0.2:
                arrivals[0].cancel()
            found += [outcome(taker, arrival, seed) for arrival in arrivals]
            if random.random() < 0.5:
                taker.manager.prefix.evict()
            until(taker.manager, lambda: len(handing(taker).arrivals.open) < 2)
            if nth % 25 == 24:
                owner.stop()
                late = taker.manager.handoff.accept(offer)
                owner.kill()
                found.append(outcome(taker, late, seed))
                return found + churn(taker, random, rounds - nth - 1, until_then)
        assert owner.ask("check")
    return found


def test_random_faults(taker: Stack):
    found = churn(taker, Random(1), 7, lambda: True)
    assert len(found) >= 7


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(1200)
def test_random_faults_for_long(taker: Stack, seed: int):
    end = time.monotonic() + 180.0
    found = churn(taker, Random(100 + seed), 1000, lambda: time.monotonic() < end)
    assert {"here", "gone"} <= set(found)

"""Mooncake's own faults, with its real master and real peers: all of them are misses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dsv4.errors import InvalidInput
from dsv4.tiers.mooncake import MooncakeTier
from dsv4.tiers.record import Label, Reason
from dsv4.tiers.tier import Limits, State
from tests.support.tiers import (
    PATIENT,
    Memory,
    assert_never_wrong,
    chain,
    digest,
    file_bytes,
    found,
    free_port,
    label,
    load,
    mooncake_master,
    python,
    states,
    stop,
    store,
    until,
    wait,
)

pytestmark = pytest.mark.usefixtures("mooncake")
QUICK = Limits(threads=2, deadline_s=1.0, back_off_s=0.2)  # where a deadline is to pass

# a peer: gives memory, stores a chain of blocks in it, says so, and waits to be killed
PEER = """
import sys, time
from dsv4.tiers.mooncake import MooncakeTier
from dsv4.tiers.tier import State
from tests.support.tiers import PATIENT, Memory, chain, store
port, name, blocks = sys.argv[1], sys.argv[2], int(sys.argv[3])
memory = Memory(8 << 20)
tier = MooncakeTier(f"127.0.0.1:{port}", segment_bytes=32 << 20, limits=PATIENT)
tier.register(memory.region)
for each in chain(name, blocks, payload_bytes=100_000):
    assert store(tier, [memory.filled(each)]) == [State.DONE]
    print("stored", flush=True)
print("ready", flush=True)
time.sleep(600)
"""
# a writer that reserves an object and dies before it has written it
DEAD_WRITER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
port, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = MooncakeDistributedStore()
assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", f"127.0.0.1:{port}") == 0
assert client.batch_put_session_start([key], [size]) == [0]
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A master of the test's own: where records lie is known."""
    port = free_port()
    with mooncake_master(port):
        yield port


@contextmanager
def connected(port: int, memory: Memory, **options: object) -> Iterator[MooncakeTier]:
    tier = MooncakeTier(f"127.0.0.1:{port}", **{"limits": PATIENT, **options})  # type: ignore[arg-type]
    tier.register(memory.region)
    try:
        yield tier
    finally:
        tier.close(5.0)


@contextmanager
def peer(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    with python(code, *arguments, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        while (line := child.stdout.readline()) != "ready\n":
            assert line, "the peer has died"
        yield child


def rested(tier: MooncakeTier) -> None:
    until(lambda: not tier.stats().backing_off)


def stored(tier: MooncakeTier, memory: Memory, labels: Sequence[Label]) -> bool:
    rested(tier)
    return set(store(tier, [memory.filled(each) for each in labels])) == {State.DONE}


def test_a_master_that_is_not_there_yet_is_an_outage(memory: Memory) -> None:
    port, labels = free_port(), chain("a", 3)
    with connected(port, memory, segment_bytes=16 << 20) as tier:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DROPPED] * 3
        rested(tier)
        assert load(tier, [memory.blank(each) for each in labels]) == [State.MISSING] * 3
        assert tier.stats().outages == 2
        assert tier.stats().late == 0  # Mooncake itself would wait longer than any deadline
        with mooncake_master(port):
            rested(tier)
            assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 3
            assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 3


def test_a_master_that_is_killed_and_comes_back(memory: Memory) -> None:
    port, labels = free_port(), chain("a", 4)
    with connected(port, memory, segment_bytes=16 << 20) as tier:
        with mooncake_master(port) as master:
            assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 4
            assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 4
            os.kill(master.pid, signal.SIGKILL)
            master.wait()
            assert assert_never_wrong(tier, memory, labels) == [State.MISSING] * 4
            rested(tier)
            assert found(tier, labels) == [False] * 4
        with mooncake_master(port):
            until(lambda: stored(tier, memory, labels))
            assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 4


def test_a_master_that_is_stopped_meets_the_deadline(memory: Memory) -> None:
    """The ticket is over when its time is; the memory is free when the call has returned."""
    port, labels = free_port(), chain("a", 2)
    with (
        mooncake_master(port) as master,
        connected(port, memory, segment_bytes=16 << 20, limits=QUICK) as tier,
    ):
        until(lambda: stored(tier, memory, labels))
        late = tier.stats().late
        stop(master)
        try:
            ticket = tier.load([memory.blank(each) for each in labels])
            progress = wait(tier, ticket, settled=False)
            assert states(progress) == [State.MISSING] * 2
            assert not progress.settled
            assert tier.stats().late == late + 1
        finally:
            os.kill(master.pid, signal.SIGCONT)
        until(lambda: tier.poll(ticket).settled)
        rested(tier)
        assert set(assert_never_wrong(tier, memory, labels)) <= {State.DONE, State.MISSING}


def test_a_peer_that_is_killed_takes_its_records_with_it(memory: Memory, port: int) -> None:
    labels = chain("killed peer", 6, payload_bytes=100_000)
    with connected(port, memory) as tier, peer(PEER, port, "killed peer", 6) as child:
        assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 6
        assert tier.stats().loaded_bytes == 6 * labels[0].record_bytes
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        for _ in range(3):
            rested(tier)
            assert set(assert_never_wrong(tier, memory, labels)) <= {State.MISSING}


def test_a_peer_that_is_stopped_meets_the_deadline(memory: Memory, port: int) -> None:
    labels = chain("stopped peer", 2, payload_bytes=100_000)
    with (
        connected(port, memory, limits=QUICK) as tier,
        peer(PEER, port, "stopped peer", 2) as child,
    ):

        def is_found() -> bool:
            rested(tier)
            return found(tier, labels) == [True] * 2

        until(is_found)
        stop(child)
        ticket = tier.load([memory.blank(each) for each in labels])
        progress = wait(tier, ticket, settled=False)
        assert states(progress) == [State.MISSING] * 2
        assert not progress.settled
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: tier.poll(ticket).settled)
        rested(tier)
        assert set(assert_never_wrong(tier, memory, labels)) <= {State.DONE, State.MISSING}


def test_a_peer_that_is_killed_while_it_stores(memory: Memory, port: int) -> None:
    random = Random(3)
    with connected(port, memory) as tier:
        for nth in range(2):
            name = f"writer {nth}"
            with python(PEER, port, name, 60, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                child.stdout.readline()
                time.sleep(random.uniform(0, 0.02))
                os.kill(child.pid, signal.SIGKILL)
            labels = chain(name, 60, payload_bytes=100_000)
            rested(tier)
            assert State.REFUSED not in assert_never_wrong(tier, memory, labels)


def test_a_put_that_says_0_is_not_believed(memory: Memory) -> None:
    """A dead writer's put is pending: Mooncake says 0 to the next writer and stores nothing."""
    port, wanted = free_port(), label("dead writer")
    with mooncake_master(port), connected(port, memory, segment_bytes=16 << 20) as tier:
        assert store(tier, [memory.filled(label("first"))]) == [State.DONE]
        with peer(DEAD_WRITER, port, str(wanted.key), wanted.record_bytes) as child:
            os.kill(child.pid, signal.SIGKILL)
        records = [memory.filled(wanted), memory.filled(label("other"))]
        assert store(tier, records) == [State.DROPPED, State.DONE]
        assert load(tier, [memory.blank(wanted)]) == [State.MISSING]
        until(lambda: store(tier, [memory.filled(wanted)]) == [State.DONE])
        assert assert_never_wrong(tier, memory, [wanted]) == [State.DONE]


def test_our_sum_decides(memory: Memory, port: int) -> None:
    """Bytes that Mooncake hands out as good: flipped ones, zeros, another record's, half of one."""
    good = label("damaged", payload_bytes=20_000)
    whole = bytes(file_bytes(good)[: good.record_bytes])
    flipped, other = bytearray(whole), file_bytes(label("b", payload_bytes=20_000))
    flipped[9_000] ^= 8
    with connected(port, memory, segment_bytes=16 << 20) as tier:
        assert store(tier, [memory.filled(label("connects"))]) == [State.DONE]
        client = tier._client
        assert client is not None
        for data, reason in (
            (bytes(flipped), Reason.PAYLOAD_SUM),
            (bytes(len(whole)), Reason.MAGIC),
            (bytes(other[: len(whole)]), Reason.DIGEST),
            (whole[:9_000], Reason.SHORT),
            (whole + b"\0", Reason.PAYLOAD_BYTES),
        ):
            assert client.put(str(good.key), data) == 0
            progress = wait(tier, tier.load([memory.blank(good)]))
            assert states(progress) == [State.REFUSED]
            refusal = progress.outcomes[0].refusal
            assert refusal is not None
            assert refusal.reason is reason
            assert found(tier, [good]) == [False]
        assert store(tier, [memory.filled(good)]) == [State.DONE]
        assert assert_never_wrong(tier, memory, [good]) == [State.DONE]


def test_a_store_that_is_full_drops_or_makes_room() -> None:
    port, labels, memory = free_port(), chain("full", 60, payload_bytes=500_000), Memory(64 << 20)
    with mooncake_master(port), connected(port, memory, segment_bytes=16 << 20) as tier:
        for each in labels:
            assert store(tier, [memory.filled(each)])[0] in (State.DONE, State.DROPPED)
        answered = assert_never_wrong(tier, memory, labels)
        assert 5 <= answered.count(State.DONE) < 60
        assert State.REFUSED not in answered


def test_memory_that_is_not_registered_is_refused_before_anything_moves(
    memory: Memory, port: int
) -> None:
    """Mooncake would write there, or die of it."""
    other = Memory(1 << 20)
    with connected(port, memory) as tier:
        with pytest.raises(InvalidInput, match="lie in no region that tier mooncake knows"):
            tier.load([other.blank(label("a"))])
        with pytest.raises(InvalidInput, match="register the memory first"):
            tier.store([memory.filled(label("a")), other.filled(label("b"))])
        tier.register(other.region)
        assert load(tier, [other.blank(label(digest("none")))]) == [State.MISSING]


def test_it_says_that_it_listens_everywhere(
    memory: Memory, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Mooncake has no option for it. Where this fails because it has learnt to bind to an address,
    the warning and docs/tiers.md can go."""
    before = listening()
    with connected(port, memory, segment_bytes=16 << 20, host="127.0.0.1") as tier:
        assert "listens on every interface" not in caplog.text
        assert store(tier, [memory.filled(label("a"))]) == [State.DONE]
        assert caplog.text.count("Mooncake listens on every interface") == 1
        assert {address for address, _ in listening() - before} == {"0.0.0.0", "::"}


def listening() -> set[tuple[str, str]]:
    """Addresses that this process listens on, and of which socket."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            address, state, inode = (line.split()[n] for n in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in mine:
                words = bytes.fromhex(address.partition(":")[0])
                data = b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4))
                found.add((socket.inet_ntop(family, data), inode))
    return found


@pytest.mark.parametrize(
    "options",
    [
        *({"segment_bytes": each} for each in (-1, "1", 1.5, None)),
        *({"host": 3}, {"protocol": None}, {"devices": 1}, {"metadata": b""}),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        MooncakeTier("127.0.0.1:50051", **options)


@pytest.mark.parametrize("master", ["localhost", "localhost:", ":5", "a:65536", "a:0", None, 3])
def test_an_address_without_a_port_is_refused(master: Any) -> None:
    with pytest.raises(InvalidInput, match="host:port"):
        MooncakeTier(master)

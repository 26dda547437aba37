"""Records of known bytes, memory to put them in, and the processes that tests of tiers start."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NoReturn
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from dsv4.tiers.record import Kind, Label, Parts, Record, Region, seal
from dsv4.tiers.sizes import HEADER_BYTES, UNIT_BYTES, padded
from dsv4.tiers.tier import Limits, Progress, State, Ticket, Tier, TierStats

BLOCK_TOKENS = 128
FINGERPRINT = hashlib.sha256(b"a schema").digest()
ROOT = hashlib.sha256(b"root").digest()
BIN = Path(sys.executable).parent
PROJECT = Path(__file__).parents[2]
# where nothing is to be late, on the slowest machine
PATIENT = Limits(threads=4, deadline_s=120.0, back_off_s=0.2)


def unavailable(reason: str) -> NoReturn:
    """Skips; where every component has to be there (DSV4_REQUIRE_TIERS=1), fails."""
    if os.environ.get("DSV4_REQUIRE_TIERS", "0") not in ("", "0"):
        pytest.fail(f"DSV4_REQUIRE_TIERS is set, and {reason}", pytrace=False)
    pytest.skip(reason)


# ---- records -------------------------------------------------------------------------------------


def digest(*words: object) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()


def label(
    name: object = 0,
    *,
    kind: Kind = Kind.BLOCK,
    parent: bytes = ROOT,
    tokens: int = BLOCK_TOKENS,
    payload_bytes: int = 5000,
) -> Label:
    return Label(
        kind=kind,
        digest=digest(name),
        parent=parent,
        fingerprint=FINGERPRINT,
        tokens=tokens,
        payload_bytes=payload_bytes,
    )


def chain(name: object, blocks: int, *, payload_bytes: int = 5000) -> list[Label]:
    """The labels of one prompt's blocks."""
    labels: list[Label] = []
    for nth in range(blocks):
        parent = labels[-1].digest if labels else ROOT
        tokens = (nth + 1) * BLOCK_TOKENS
        labels.append(label((name, nth), parent=parent, tokens=tokens, payload_bytes=payload_bytes))
    return labels


def payload_of(wanted: Label) -> bytes:
    """What the record with this label holds: every process knows it."""
    seed = int.from_bytes(wanted.digest[:8], "little") + wanted.kind
    return Random(seed).randbytes(wanted.payload_bytes)


def payload_in(record: Record) -> bytes:
    return b"".join(map(bytes, record.parts.payload))


class Memory:
    """Memory that records are cut from, the way an arena or a host tier's rows are."""

    def __init__(self, size_bytes: int = 8 << 20) -> None:
        self.region = Region(name="tests", memory=memoryview(mmap.mmap(-1, size_bytes)))
        self._used = 0

    def _cut(self, size_bytes: int, align: int) -> memoryview:
        start = -(-self._used // align) * align
        self._used = start + size_bytes
        if self._used > self.region.memory.nbytes:  # old records are not looked at any more
            self._used = 0
            return self._cut(size_bytes, align)
        piece = self.region.memory[start : self._used]
        piece[:] = b"\xff" * size_bytes
        return piece

    def blank(self, wanted: Label, *, pieces: int = 0) -> Record:
        """A record to load into: whole units, or a header here and so many odd pieces there."""
        if not pieces:
            whole = self._cut(wanted.padded_bytes, UNIT_BYTES)
            parts = Parts.of_units([whole], wanted.payload_bytes)
            return Record(label=wanted, parts=parts)
        cuts = np.linspace(0, wanted.payload_bytes, pieces + 1).astype(int).tolist()
        payload = [self._cut(b - a, 256) for a, b in itertools.pairwise(cuts)]
        return Record(
            label=wanted, parts=Parts(header=self._cut(HEADER_BYTES, 256), payload=tuple(payload))
        )

    def filled(self, wanted: Label, *, pieces: int = 0) -> Record:
        """A record to store."""
        record, data, at = self.blank(wanted, pieces=pieces), payload_of(wanted), 0
        for piece in record.parts.payload:
            piece[:] = data[at : at + piece.nbytes]
            at += piece.nbytes
        return record


def file_bytes(wanted: Label, payload: bytes | None = None) -> bytearray:
    """A record as a file has it."""
    record = Record(label=wanted, parts=Parts.alone(wanted))
    record.parts.payload[0][:] = payload_of(wanted) if payload is None else payload
    seal(record)
    assert padded(wanted.record_bytes) == record.parts.whole[0].nbytes
    return bytearray(record.parts.whole[0])


def file_of(root: Path, wanted: Label) -> Path:
    name = wanted.digest.hex()
    return root / "1" / wanted.kind.letter / name[:2] / name


def put_file(root: Path, wanted: Label, data: bytes | bytearray) -> Path:
    path = file_of(root, wanted)
    for each in (root, root / "1", path.parent.parent, path.parent):
        each.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(data)
    return path


def open_below(root: Path) -> list[str]:
    """What this process has open in a directory, the directory itself too. Their number alone says
    nothing: what other tests left is closed at any time."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [each for each in found if Path(each).is_relative_to(root)]


def record_files(root: Path) -> list[Path]:
    """What lies in a disk tier's directory, but for its index."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return [path for path in files if not path.name.startswith("index-")]


# ---- tickets -------------------------------------------------------------------------------------


def wait(tier: Tier, ticket: Ticket, *, timeout_s: float = 180.0, settled: bool = True) -> Progress:
    """Polls until every outcome is known, and the memory is free again."""
    until = time.monotonic() + timeout_s
    while True:
        progress = tier.poll(ticket)
        if progress.finished and (progress.settled or not settled):
            return progress
        assert time.monotonic() < until, f"{tier.name}: {progress}"
        time.sleep(0.001)


def stop(child: subprocess.Popen[Any]) -> None:
    """It stands still, all its threads, when this returns."""
    os.kill(child.pid, signal.SIGSTOP)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def until(condition: Callable[[], bool], *, timeout_s: float = 180.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


def states(progress: Progress) -> list[State]:
    return [outcome.state for outcome in progress.outcomes]


def store(tier: Tier, records: Sequence[Record]) -> list[State]:
    return states(wait(tier, tier.store(records)))


def load(tier: Tier, records: Sequence[Record]) -> list[State]:
    return states(wait(tier, tier.load(records)))


def found(tier: Tier, labels: Sequence[Label]) -> list[bool]:
    return [state is State.DONE for state in states(wait(tier, tier.lookup(labels)))]


def assert_never_wrong(tier: Tier, memory: Memory, labels: Sequence[Label]) -> list[State]:
    """Loads everything: what is done has the right bytes; the rest is missing or refused."""
    records = [memory.blank(wanted) for wanted in labels]
    answered = load(tier, records)
    for record, state in zip(records, answered, strict=True):
        assert state in (State.DONE, State.MISSING, State.REFUSED)
        assert state is not State.DONE or payload_in(record) == payload_of(record.label)
    return answered


def loaded_bytes(before: TierStats, after: TierStats) -> int:
    return after.loaded_bytes - before.loaded_bytes


# ---- processes -----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
        return port


@contextmanager
def process(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which is gone at the end, stopped or not."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(
        [*map(str, command)], start_new_session=True, text=True, **{**quiet, **options}
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextmanager
def python(code: str, *arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs a piece of code with this project on its path."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "MC_LOG_LEVEL": "ERROR"}
    with process(
        sys.executable, "-c", code, *map(str, arguments), env=environment, **options
    ) as child:
        yield child


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextmanager
def mooncake_master(port: int) -> Iterator[subprocess.Popen[str]]:
    """The master of the wheel, which serves when this yields."""
    with process(
        BIN / "mooncake_master",
        *("-rpc_address=127.0.0.1", f"-rpc_port={port}"),
        *("-metrics_host=127.0.0.1", f"-metrics_port={free_port()}"),
        *("-enable_metric_reporting=false", "-default_kv_lease_ttl=500"),
        "-client_ttl=20",  # a peer that a busy machine holds up is not gone
        "-put_start_discard_timeout_sec=8",  # a put that was begun is pending for so long
    ) as child:
        until(lambda: answers(port))
        yield child


@contextmanager
def s3_server(port: int) -> Iterator[subprocess.Popen[str]]:
    """moto's S3 server with a bucket named `bucket`."""
    with process(BIN / "moto_server", "-H", "127.0.0.1", "-p", str(port)) as child:
        until(lambda: put_bucket(port))
        yield child


def put_bucket(port: int) -> bool:
    with suppress(URLError, OSError):
        urlopen(Request(f"http://127.0.0.1:{port}/bucket", method="PUT"), timeout=10).close()
        return True
    return False


def s3_config(port: int) -> dict[str, Any]:
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": "none",
        "secret_access_key": "none",
        "virtual_hosted_style_request": False,
    }

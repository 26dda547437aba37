"""What a full directory costs a disk tier: start, calls, stores and memory, over a million records
and more. No GPU. The files are made first (a header and a unit each), in chains of 64.

    python -m benchmarks.disk_tier --records 1000000 --root /var/tmp/disk_tier
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsv4.tiers.disk import DiskTier
from dsv4.tiers.record import Kind, Label, Parts, Record, pack_header
from dsv4.tiers.sizes import HEADER_BYTES, UNIT_BYTES
from dsv4.tiers.tier import Limits, State

BLOCKS, BLOCK_TOKENS = 64, 128  # of a prompt
SLOW_S = 1e-3
PAYLOAD_BYTES = UNIT_BYTES - HEADER_BYTES
FINGERPRINT = hashlib.sha256(b"a schema").digest()
ROOT = hashlib.sha256(b"root").digest()


def labels(records: int) -> Iterator[Label]:
    for nth in range(records):
        parent = _digest(nth - 1) if nth % BLOCKS else ROOT
        yield Label(
            kind=Kind.BLOCK,
            digest=_digest(nth),
            parent=parent,
            fingerprint=FINGERPRINT,
            tokens=(nth % BLOCKS + 1) * BLOCK_TOKENS,
            payload_bytes=PAYLOAD_BYTES,
        )


def _digest(nth: int) -> bytes:
    return hashlib.sha256(nth.to_bytes(8, "little")).digest()


def fill(root: Path, records: int) -> None:
    """The files, without an index. Those of an earlier run with as many records are kept."""
    done = root / f"filled-{records}"
    if done.exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    shelves = []
    for byte in range(256):
        shelf = root / "1" / "b" / f"{byte:02x}"
        shelf.mkdir(parents=True)
        shelves.append(os.open(shelf, os.O_RDONLY))
    for path in (root, root / "1"):
        path.chmod(0o700)
    for label in labels(records):
        shelf_fd = shelves[label.digest[0]]
        fd = os.open(label.digest.hex(), os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=shelf_fd)
        os.write(fd, pack_header(label, bytes(16)))
        os.ftruncate(fd, UNIT_BYTES)
        os.close(fd)
    for each in shelves:
        os.close(each)
    done.touch()


def memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _switches() -> int:
    """How often the kernel took this thread off its processor though it could go on. A thread that
    waits for a lock, a file or the interpreter goes of itself, which is not counted here."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _nothing() -> None:
    """As long as a call takes at the median."""
    sum(range(60))


class Calls:
    """The calls of an engine's thread, each of them timed."""

    def __init__(self, tier: DiskTier, records: int) -> None:
        self.tier, self.records, self.nth = tier, records, 0
        self.waits_s = array("d")
        self.nothing_s = array("d")  # the same clock around nothing: what the machine adds
        self.taken_off_s: list[float] = []  # of the slow ones: while the kernel ran somebody else
        self.waited_s: list[float] = []  # of the slow ones: the others
        self.stores_s: list[float] = []
        self.dropped = 0

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        before = _switches()
        begin = time.perf_counter()
        answer = call(*arguments)
        between = time.perf_counter()
        self.waits_s.append(between - begin)
        if between - begin > SLOW_S:
            taken_off = _switches() > before
            (self.taken_off_s if taken_off else self.waited_s).append(between - begin)
        between = time.perf_counter()
        _nothing()
        self.nothing_s.append(time.perf_counter() - between)
        return answer

    def round(self) -> None:
        """A prompt is looked up, one block is stored; polled until both are over."""
        tier, first = self.tier, self.nth * BLOCKS % self.records
        prompt = [
            Label(
                kind=Kind.BLOCK,
                digest=_digest(first + at),
                parent=_digest(first + at - 1) if at else ROOT,
                fingerprint=FINGERPRINT,
                tokens=(at + 1) * BLOCK_TOKENS,
                payload_bytes=PAYLOAD_BYTES,
            )
            for at in range(8)
        ]
        new = Label(
            kind=Kind.BLOCK,
            digest=hashlib.sha256(b"new %d %d" % (self.nth, os.getpid())).digest(),
            parent=ROOT,
            fingerprint=FINGERPRINT,
            tokens=BLOCK_TOKENS,
            payload_bytes=PAYLOAD_BYTES,
        )
        record = Record(label=new, parts=Parts.alone(new))
        begin = time.perf_counter()
        tickets = [self.timed(tier.lookup, prompt), self.timed(tier.store, [record])]
        while not all(self.timed(tier.poll, ticket).settled for ticket in tickets):
            time.sleep(0.0005)
        self.stores_s.append(time.perf_counter() - begin)
        outcome = tier.poll(tickets[1]).outcomes[0]
        self.dropped += outcome.state is State.DROPPED
        self.timed(tier.stats)
        self.nth += 1

    def report(self) -> dict[str, float]:
        waits, stores = sorted(self.waits_s), sorted(self.stores_s)
        nothing = sorted(self.nothing_s)
        return {
            "rounds": self.nth,
            "call_median_us": round(waits[len(waits) // 2] * 1e6, 1),
            "call_p999_us": round(waits[len(waits) * 999 // 1000] * 1e6, 1),
            "call_worst_ms": round(waits[-1] * 1e3, 2),
            "calls": len(waits),
            "calls_over_1_ms": len(self.taken_off_s) + len(self.waited_s),
            "of_these_taken_off_the_processor": len(self.taken_off_s),
            "others_worst_ms": round(max(self.waited_s, default=0.0) * 1e3, 2),
            "nothing_worst_ms": round(nothing[-1] * 1e3, 2),
            "nothing_over_1_ms": sum(each > SLOW_S for each in nothing),
            "store_and_lookup_median_ms": round(stores[len(stores) // 2] * 1e3, 2),
            "store_and_lookup_worst_ms": round(stores[-1] * 1e3, 2),
            "dropped": self.dropped,
        }


def measure(root: Path, records: int, capacity_bytes: int, least_rounds: int) -> dict[str, Any]:
    """From the making of a tier until its index is complete, and some rounds at least."""
    before = memory_mib()
    begin = time.perf_counter()
    tier = DiskTier(root, capacity_bytes, limits=Limits(threads=4, deadline_s=60.0))
    made_s = time.perf_counter() - begin
    calls, complete_s = Calls(tier, records), 0.0
    while calls.nth < least_rounds or not complete_s:
        calls.round()
        if tier._index.complete and not complete_s:
            complete_s = time.perf_counter() - begin
    held = tier.stats().held_records
    own = (len(calls.waits_s) + len(calls.nothing_s)) * calls.waits_s.itemsize / 2**20
    after = memory_mib() - own
    tier.close(60.0)
    index = sum(path.stat().st_size for path in (root / "1").glob("index-*"))
    return {
        "made_ms": round(made_s * 1e3, 1),
        "index_complete_s": round(complete_s, 2),
        "held_records": held,
        "memory_mib": round(after - before, 1),
        "index_mib": round(index / 2**20, 1),
        **calls.report(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--keep", action="store_true", help="keep the files")
    given = parser.parse_args()
    begin = time.perf_counter()
    fill(given.root, given.records)
    print(json.dumps({"files_made_s": round(time.perf_counter() - begin, 1)}), flush=True)
    for path in (given.root / "1").glob("index-*"):
        path.unlink()
    roomy = 2 * given.records * UNIT_BYTES
    for name, capacity_bytes in (
        ("first start, no index", roomy),
        ("start with an index", roomy),
        ("full: each store makes its room", given.records * UNIT_BYTES),
    ):
        found = measure(given.root, given.records, capacity_bytes, given.rounds)
        print(json.dumps({"case": name, "records": given.records, **found}), flush=True)
    if not given.keep:
        shutil.rmtree(given.root)


if __name__ == "__main__":
    main()

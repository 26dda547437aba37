"""kill -9 of a writer at any moment: what was said to be stored is there, nothing is wrong, what is
left behind goes away."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from random import Random

import pytest

from dsv4.tiers.disk import DiskTier
from dsv4.tiers.record import Label
from dsv4.tiers.sizes import UNIT_BYTES
from dsv4.tiers.tier import Limits, State
from tests.support.tiers import (
    Memory,
    assert_never_wrong,
    chain,
    python,
    record_files,
    store,
    until,
)

CHAINS, BLOCKS, PAYLOAD_BYTES = 8, 4, 120_000
WHERE = ("created", "half written", "written", "renamed")
# A process that has everything loaded forks the writers: each stores chain after chain and says
# which were reported as stored. At one place of its nth record it says so and stays there; its
# other threads go on.
NURSERY = f"""
import os, sys, threading, time
from pathlib import Path
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.shelves import Calls
from dsv4.tiers.tier import Limits, State
from tests.support.tiers import Memory, chain, store

class Stopping(Calls):
    def __init__(self, where, nth):
        self.where, self.left, self.lock = where, nth, threading.Lock()

    def reaches(self, where):
        with self.lock:
            self.left -= where == self.where
            return where == self.where and not self.left

    def stop(self):
        os.write(1, b"there\\n")
        time.sleep(3600)

    def create(self, name, **more):
        fd = super().create(name, **more)
        if self.reaches("created"):
            self.stop()
        return fd

    def writev(self, fd, pieces):
        if self.reaches("half written"):
            super().writev(fd, [pieces[0][: {PAYLOAD_BYTES // 2 // UNIT_BYTES * UNIT_BYTES}]])
            self.stop()
        return super().writev(fd, pieces)

    def rename(self, name, new, **more):
        if self.reaches("written"):
            self.stop()
        super().rename(name, new, **more)
        if self.reaches("renamed"):
            self.stop()

def write(run, nth, where):
    memory = Memory(5 << 20)
    work = [
        [memory.filled(each) for each in chain((run, go), {BLOCKS}, payload_bytes={PAYLOAD_BYTES})]
        for go in range({CHAINS})
    ]
    limits = Limits(threads=4, deadline_s=3600.0)
    tier = DiskTier(Path(sys.argv[1]), 1 << 30, calls=Stopping(where, nth), limits=limits)
    os.write(1, b"ready %d\\n" % os.getpid())
    for go, records in enumerate(work):
        assert store(tier, records) == [State.DONE] * {BLOCKS}
        os.write(1, b"%d\\n" % go)

for line in sys.stdin:
    writer = os.fork()
    if not writer:
        run, nth, where = line.rstrip().split(maxsplit=2)
        write(int(run), int(nth), where)
    os.waitpid(writer, 0)
    os.write(1, b"gone\\n")
"""
CI, NIGHTLY = pytest.param(30, id="ci"), pytest.param(1000, id="all", marks=pytest.mark.nightly)


def blocks(run: int, go: int) -> list[Label]:
    return chain((run, go), BLOCKS, payload_bytes=PAYLOAD_BYTES)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [CI, NIGHTLY])
def test_a_killed_writer_leaves_whole_records(tmp_path: Path, memory: Memory, kills: int) -> None:
    root, random = tmp_path / "store", Random(5)
    reader = DiskTier(root, 1 << 30, limits=Limits(threads=1, deadline_s=120.0))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 1}
    with python(NURSERY, root, **pipes) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for run in range(kills):
            where = WHERE[run % len(WHERE)]
            nursery.stdin.write(f"{run} {random.randint(1, CHAINS * BLOCKS)} {where}\n")
            nursery.stdin.flush()
            word, pid = nursery.stdout.readline().split()
            assert word == "ready"
            through = 0
            while (line := nursery.stdout.readline().strip()).isdigit():
                through += 1
            assert line == "there"
            os.kill(int(pid), signal.SIGKILL)
            assert nursery.stdout.readline() == "gone\n"
            said = [each for go in range(through) for each in blocks(run, go)]
            unsaid = blocks(run, through)
            assert assert_never_wrong(reader, memory, said) == [State.DONE] * len(said)
            assert State.REFUSED not in assert_never_wrong(reader, memory, unsaid)
            assert where == "renamed" or any(root.rglob("*.tmp"))
            reader.drop([each.key for each in (*said, *unsaid)])
            for path in root.rglob("*.tmp"):  # as if a minute had passed
                os.utime(path, (0, 0))
            assert reader._shelves.sweep() >= 0
            assert not list(root.rglob("*.tmp"))
    assert reader.stats().refused == {}
    until(lambda: not record_files(root))
    assert store(reader, [memory.filled(blocks(0, 0)[0])]) == [State.DONE]
    reader.close(5.0)

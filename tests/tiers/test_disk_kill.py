"""kill -9 of a writer at any moment: what was said to be stored is there, nothing is wrong, what is
left behind goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from random import Random

import pytest

from dsv4.tiers.disk import DiskTier
from dsv4.tiers.record import Label
from dsv4.tiers.tier import Limits, State
from tests.support.tiers import Memory, assert_never_wrong, chain, python, store, until

CHAINS, BLOCKS, PAYLOAD_BYTES = 8, 4, 120_000
# A process that has everything loaded forks the writers: each stores chain after chain and says
# which were reported as stored. One that is through waits for its end.
NURSERY = f"""
import os, signal, sys
from pathlib import Path
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.tier import Limits, State
from tests.support.tiers import Memory, chain, store

def write(run):
    memory = Memory(5 << 20)
    work = [
        [memory.filled(each) for each in chain((run, go), {BLOCKS}, payload_bytes={PAYLOAD_BYTES})]
        for go in range({CHAINS})
    ]
    tier = DiskTier(Path(sys.argv[1]), 1 << 30, limits=Limits(threads=4))
    os.write(1, b"ready %d\\n" % os.getpid())
    for go, records in enumerate(work):
        assert store(tier, records) == [State.DONE] * {BLOCKS}
        os.write(1, b"%d\\n" % go)
    signal.pause()

for line in sys.stdin:
    writer = os.fork()
    if not writer:
        write(int(line))
    os.waitpid(writer, 0)
    os.write(1, b"gone\\n")
"""
CI, NIGHTLY = pytest.param(30, id="ci"), pytest.param(1000, id="all", marks=pytest.mark.nightly)


def blocks(run: int, go: int) -> list[Label]:
    return chain((run, go), BLOCKS, payload_bytes=PAYLOAD_BYTES)


@pytest.mark.nightly  # timing: red once under load
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [CI, NIGHTLY])
def test_a_killed_writer_leaves_whole_records(tmp_path: Path, memory: Memory, kills: int) -> None:
    root, random = tmp_path / "store", Random(5)
    reader = DiskTier(root, 1 << 30, limits=Limits(threads=1))
    left_behind = cut_short = 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 1}
    with python(NURSERY, root, **pipes) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for run in range(kills):
            nursery.stdin.write(f"{run}\n")
            nursery.stdin.flush()
            word, pid = nursery.stdout.readline().split()
            assert word == "ready"
            time.sleep(random.uniform(0.0, 0.03))
            os.kill(int(pid), signal.SIGKILL)
            through = 0
            while nursery.stdout.readline() != "gone\n":
                through += 1
            said = [each for go in range(through) for each in blocks(run, go)]
            unsaid = blocks(run, through)
            assert assert_never_wrong(reader, memory, said) == [State.DONE] * len(said)
            assert State.REFUSED not in assert_never_wrong(reader, memory, unsaid)
            left_behind += sum(1 for _ in root.rglob("*.tmp"))
            cut_short += through < CHAINS
            reader.drop([each.key for each in (*said, *unsaid)])
            for path in root.rglob("*.tmp"):  # as if a minute had passed
                os.utime(path, (0, 0))
            assert reader._shelves.sweep() >= 0
            assert not list(root.rglob("*.tmp"))
    assert cut_short >= kills // 2
    assert left_behind, "no writer was killed while it wrote: the test shows nothing"
    assert reader.stats().refused == {}
    until(lambda: not any(path.is_file() for path in root.rglob("*")))
    assert store(reader, [memory.filled(blocks(0, 0)[0])]) == [State.DONE]
    reader.close(5.0)

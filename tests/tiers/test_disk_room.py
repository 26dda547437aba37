"""What a disk tier keeps and what it lets go: order, room that processes share, full disks, an
index that is lost, and what all of that costs."""

from __future__ import annotations

import errno
import gc
import os
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dsv4.errors import InvalidInput
from dsv4.tiers import disk as disk_module
from dsv4.tiers import index as index_module
from dsv4.tiers import rest as rest_module
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.record import Key, Kind, Label, Record
from dsv4.tiers.shelves import Shelves
from dsv4.tiers.tier import Limits, State
from tests.support.tiers import (
    BLOCK_TOKENS,
    PATIENT,
    ROOT,
    Memory,
    assert_never_wrong,
    chain,
    digest,
    file_bytes,
    file_of,
    found,
    label,
    load,
    open_below,
    put_file,
    python,
    record_files,
    states,
    store,
    until,
    wait,
)
from tests.tiers.test_disk import ROOMY, ROW, UNIT, idle, opened, small_disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def index_of(root: Path) -> Path:
    (path,) = (root / "1").glob("index-*.sqlite")
    return path


def rows(name: object, count: int) -> list[Label]:
    """Blocks that lean on nothing, of one unit each."""
    return [label((name, nth), payload_bytes=ROW) for nth in range(count)]


def held(root: Path, labels: list[Label]) -> set[Label]:
    """Those whose files are there, by looking."""
    return {each for each in labels if file_of(root, each).exists()}


def bytes_of(root: Path) -> int:
    return sum(path.stat().st_size for path in record_files(root))


# ---- what is held can be reached -----------------------------------------------------------------


def unreachable(root: Path, labels: list[Label]) -> set[Label]:
    there = held(root, labels)
    keys = {each.key for each in there}
    firsts = {each for each in there if each.parent == ROOT and each.kind is not Kind.SNAPSHOT}
    return {each for each in there - firsts if each.leans_on not in keys}


def prompts(random: Random) -> list[list[Label]]:
    """A tree of prompts: some go on from the middle of others. Some have snapshots and states."""
    made: list[list[Label]] = []
    for nth in range(random.randint(4, 12)):
        blocks: list[Label] = []
        if made and random.random() < 0.6:
            blocks = [each for each in random.choice(made) if each.kind is Kind.BLOCK]
            blocks = blocks[: random.randint(0, len(blocks))]
        for _ in range(random.randint(1, 9)):
            parent = blocks[-1].digest if blocks else ROOT
            tokens = (len(blocks) + 1) * BLOCK_TOKENS
            name = (nth, tokens)
            blocks.append(label(name, parent=parent, tokens=tokens, payload_bytes=ROW))
        records = list(blocks)
        if random.random() < 0.5:
            at = random.randrange(len(blocks))
            block = blocks[at]
            snapshot = Label(
                kind=Kind.SNAPSHOT, digest=block.digest, parent=block.parent,
                fingerprint=block.fingerprint, tokens=block.tokens,
                payload_bytes=ROW + block.digest[0] % 2 * UNIT,
            )  # fmt: skip
            records.insert(at + 1, snapshot)
        if random.random() < 0.5:
            last = blocks[-1]
            records.append(
                label(
                    ("state", nth),
                    kind=Kind.STATE,
                    parent=last.digest,
                    tokens=last.tokens + 5,
                    payload_bytes=ROW,
                )
            )
        made.append(records)
    return made


SOME = [pytest.param(seed, id=str(seed)) for seed in range(6)]
MANY = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(6, 66)]


@pytest.mark.parametrize("seed", [*SOME, *MANY])
def test_what_is_held_can_be_reached(root: Path, seed: int) -> None:
    """Prompts are stored side by side by two tiers over one directory, loaded, and stored again;
    tiers are closed and opened, and the index is lost. No record is ever without the block that it
    leans on, and no byte too many is there."""
    random, memory = Random(seed), Memory(2 << 20)
    made = prompts(random)
    labels = list({each.key: each for records in made for each in records}.values())
    # from hopelessly small to all but one
    capacity_bytes = random.randint(6, max(8, len(labels) - 1)) * UNIT
    tiers = [DiskTier(root, capacity_bytes, limits=PATIENT) for _ in range(2)]
    stored = loaded = 0
    for _ in range(40):
        match random.choice(("store", "store", "store", "load", "reopen", "lose")):
            case "store":
                pair = [(tier, random.choice(made)) for tier in tiers]
                tickets = [(tier, tier.store([memory.filled(e) for e in w])) for tier, w in pair]
                for tier, ticket in tickets:
                    stored += states(wait(tier, ticket)).count(State.DONE)
            case "load":
                wanted = random.choice(made)[: random.randint(1, 9)]
                there = held(root, wanted)
                answered = assert_never_wrong(random.choice(tiers), memory, wanted)
                loaded += answered.count(State.DONE)
                assert {
                    each for each, state in zip(wanted, answered, strict=True)
                    if state is State.DONE
                } == there  # fmt: skip
            case "reopen":
                nth = random.randrange(2)
                tiers[nth].close(10.0)
                tiers[nth] = DiskTier(root, capacity_bytes, limits=PATIENT)
            case "lose" if random.random() < 0.3:
                for path in (root / "1").glob("index-*"):
                    path.unlink()
        for tier in tiers:
            idle(tier)
        assert not unreachable(root, labels)
        assert bytes_of(root) <= capacity_bytes
    assert stored
    assert loaded or seed > 5
    for tier in tiers:
        tier.close(10.0)


@pytest.mark.parametrize("owner", [b"", ROOT])
def test_the_middle_of_a_prompt_is_not_taken_for_a_beginning(root: Path, owner: bytes) -> None:
    """As an index that was lost does not know yet how long a block is."""
    memory, tier = Memory(1 << 20), DiskTier(root, 8 * UNIT, limits=PATIENT)
    idle(tier)
    full = rows("others", 8)
    assert states(wait(tier, tier.store([memory.filled(e) for e in full]))) == [State.DONE] * 8
    blocks = chain("a prompt", 4, payload_bytes=ROW)
    blocks = [replace(each, fingerprint=digest("unknown"), owner=owner) for each in blocks]
    late = blocks[2:] if not owner else blocks[3:]
    found = states(wait(tier, tier.store([memory.filled(each) for each in late])))
    assert found == [State.DROPPED] * len(late)
    assert len(held(root, full)) == 8
    idle(tier)
    assert store(tier, [memory.filled(blocks[0])]) == [State.DONE]
    tier.close(10.0)


def test_what_leans_on_a_block_waits_until_that_is_stored_or_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, tier = Memory(1 << 20), DiskTier(root, 320 * UNIT, limits=PATIENT)
    idle(tier)
    blocks = chain("a prompt", 3, payload_bytes=ROW)
    write = tier._write

    def fails(record: Record) -> bool:
        if record.label == blocks[0]:
            time.sleep(0.3)  # the others begin meanwhile
            raise OSError(errno.EFBIG, "too large")
        return write(record)

    monkeypatch.setattr(tier, "_write", fails)
    assert store(tier, [memory.filled(each) for each in blocks]) == [State.DROPPED] * 3
    assert not held(root, blocks)
    monkeypatch.undo()
    assert store(tier, [memory.filled(each) for each in blocks]) == [State.DONE] * 3
    tier.close(10.0)


def test_a_prompt_that_is_longer_than_the_room_keeps_its_beginning(
    root: Path, memory: Memory
) -> None:
    """Now as one that is stored step by step, and after others."""
    with opened(root, 12 * UNIT) as tier:
        assert store(tier, [memory.filled(each) for each in rows("old", 12)]) == [State.DONE] * 12
        prompt = chain("a", 15, payload_bytes=ROW)
        answered = [store(tier, [memory.filled(each)]) for each in prompt]
        assert answered == [[State.DONE]] * 12 + [[State.DROPPED]] * 3
        assert held(root, prompt) == set(prompt[:12])
        other = chain("b", 2, payload_bytes=ROW)
        assert store(tier, [memory.filled(each) for each in other]) == [State.DONE] * 2
        assert held(root, prompt) == set(prompt[:10])


@pytest.mark.parametrize("kept", [3, 8, 11, 12])
def test_a_use_of_more_than_is_held_is_one_of_what_is_held(
    root: Path, memory: Memory, kept: int
) -> None:
    """A prompt that is used on the device, and of which the tier has a beginning."""
    prompt = chain("prompt", 12, payload_bytes=ROW)
    with opened(root, 20 * UNIT) as tier:
        assert store(tier, [memory.filled(each) for each in prompt[:kept]]) == [State.DONE] * kept
        for nth in range(12):
            tier.use(prompt)
            idle(tier)
            other = chain(nth, 3, payload_bytes=ROW)
            assert store(tier, [memory.filled(each) for each in other]) == [State.DONE] * 3
        assert len(held(root, prompt)) >= kept - min(12 - kept, kept // 2)


def test_what_many_prompts_begin_with_stays(root: Path, memory: Memory) -> None:
    """A use of an end is one of all before it, however many other prompts come and go."""
    system = chain("system", 4, payload_bytes=ROW)
    with opened(root, 20 * UNIT) as tier:
        assert store(tier, [memory.filled(each) for each in system]) == [State.DONE] * 4
        for nth in range(30):
            last = system[-1]
            for at in range(3):
                tokens = (5 + at) * BLOCK_TOKENS
                last = label((nth, at), parent=last.digest, tokens=tokens, payload_bytes=ROW)
                assert store(tier, [memory.filled(last)]) == [State.DONE]
        other = [chain(("other", nth), 4, payload_bytes=ROW) for nth in range(4)]
        for nth in range(40):
            assert load(tier, [memory.blank(system[-1])]) == [State.DONE]
            idle(tier)
            assert store(tier, [memory.filled(e) for e in other[nth % 4]]) == [State.DONE] * 4
        assert held(root, system) == set(system)


def test_a_block_costs_the_same_at_the_end_of_a_long_prompt(
    root: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls to the system, counted: what was stored before is not touched again."""
    counted = {"open": 0, "utime": 0, "stat": 0}

    def counting(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def counter(*arguments: Any, **more: Any) -> Any:
            counted[name] += 1
            return call(*arguments, **more)

        return counter

    prompt = chain("a", 130, payload_bytes=ROW)
    costs = []
    with opened(root, limits=Limits(threads=1, deadline_s=60.0)) as tier:
        idle(tier)
        for name in counted:
            monkeypatch.setattr(os, name, counting(name))
        for nth, each in enumerate(prompt):
            counted.update(dict.fromkeys(counted, 0))
            assert store(tier, [memory.filled(each)]) == [State.DONE]
            idle(tier)
            if nth in (10, 120):
                costs.append(sum(counted.values()))
    assert costs[1] <= costs[0] + 20  # a step of the round through the directory, more or less
    assert costs[1] < 60


# ---- room that is shared -------------------------------------------------------------------------


def test_of_two_capacities_the_larger_counts(root: Path, memory: Memory) -> None:
    """As long as it is there. Alone, the smaller one gets down to its own."""
    labels = rows("a", 100)
    with opened(root, 100 * UNIT) as large:
        assert store(large, [memory.filled(each) for each in labels]) == [State.DONE] * 100
        with opened(root, 8 * UNIT) as small:
            assert store(small, [memory.filled(each) for each in rows("b", 4)]) == [State.DONE] * 4
            assert len(held(root, labels)) == 96
            assert small.stats().capacity_bytes == 100 * UNIT
    with opened(root, 8 * UNIT) as small:
        for each in rows("c", 8):
            assert store(small, [memory.filled(each)]) == [State.DONE]
        assert bytes_of(root) <= 8 * UNIT
        assert small.stats().capacity_bytes == 8 * UNIT


WRITER = """
import sys
from pathlib import Path
from random import Random
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.tier import Limits
from tests.support.tiers import Memory, chain, store
root, capacity_bytes, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
memory, random = Memory(4 << 20), Random(seed)
tier = DiskTier(root, capacity_bytes, limits=Limits(threads=4, deadline_s=60.0))
print("ready", flush=True)
for go in range(int(sys.argv[4])):
    prompt = chain(random.randrange(40), 8, payload_bytes=3840)
    store(tier, [memory.filled(each) for each in prompt])
tier.close(10.0)
"""


def test_processes_count_their_bytes_together(root: Path) -> None:
    capacity_bytes, labels = 60 * UNIT, [e for nth in range(40) for e in chain(nth, 8)]
    arguments = [(root, capacity_bytes, seed, 30) for seed in range(3)]
    with (
        python(WRITER, *arguments[0]) as one,
        python(WRITER, *arguments[1]) as two,
        python(WRITER, *arguments[2]) as three,
    ):
        most = 0
        while any(each.poll() is None for each in (one, two, three)):
            if root.exists():
                sizes = 0
                for path in root.rglob("*"):
                    if len(path.name) == 64 and path.exists():
                        sizes += UNIT
                most = max(most, sizes)
            time.sleep(0.01)
        assert [each.returncode for each in (one, two, three)] == [0, 0, 0]
    assert bytes_of(root) <= capacity_bytes
    assert most > capacity_bytes // 2
    assert not unreachable(root, labels)
    with opened(root, capacity_bytes) as tier:
        idle(tier)
        stats = tier.stats()
        assert (stats.held_records, stats.held_bytes) == (len(record_files(root)), bytes_of(root))


def test_killed_writers_leave_an_index_that_heals(root: Path, memory: Memory) -> None:
    """kill -9 while room is made and records are written: nothing wrong is loaded, and what was
    counted and is not there, or the other way round, is put right by and by."""
    capacity_bytes, random = 40 * UNIT, Random(3)
    labels = [e for nth in range(40) for e in chain(nth, 8, payload_bytes=ROW)]
    for run in range(6):
        with python(WRITER, root, capacity_bytes, run, 10_000, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(random.uniform(0.05, 0.4))
            writer.kill()
            writer.wait()
    old = time.time() - 100  # as if a minute had passed
    for path in root.rglob("*.tmp"):
        os.utime(path, (old, old))
    with sqlite3.connect(index_of(root)) as db:
        db.execute("UPDATE records SET used=used-100000000000")
    with opened(root, capacity_bytes) as tier:
        answered = assert_never_wrong(tier, memory, labels)
        assert State.REFUSED not in answered
        for each in rows("new", 300):
            assert store(tier, [memory.filled(each)]) == [State.DONE]
            assert bytes_of(root) <= capacity_bytes + UNIT * 8
        idle(tier)
        stats = tier.stats()
        assert (stats.held_records, stats.held_bytes) == (len(record_files(root)), bytes_of(root))
        assert bytes_of(root) <= capacity_bytes
        assert not list(root.rglob("*.tmp"))


def test_records_of_other_versions_take_room_and_go_first(root: Path, memory: Memory) -> None:
    old = [root / name / "b" / each.digest.hex()[:2] / each.digest.hex()
           for name in ("0", "2") for each in rows("old", 10)]  # fmt: skip
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(UNIT))
    (root / "2" / "notes.txt").write_text("mine")
    (root / "notes").mkdir()
    root.chmod(0o700)
    own = rows("own", 25)
    with opened(root, 25 * UNIT) as tier:
        idle(tier)
        assert tier.stats().held_bytes == 20 * UNIT
        for each in own:
            assert store(tier, [memory.filled(each)]) == [State.DONE]
            assert sum(path.exists() for path in old) * UNIT + bytes_of(root / "1") <= 25 * UNIT
        assert held(root, own) == set(own)
        assert not any(path.exists() for path in old)
    assert (root / "2" / "notes.txt").read_text() == "mine"


# ---- the index is not what counts ----------------------------------------------------------------


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def _holes(path: Path) -> None:
    with path.open("r+b") as file:
        for at in range(UNIT, path.stat().st_size, UNIT):
            file.seek(at)
            file.write(os.urandom(64))


def _directory(path: Path) -> None:
    path.unlink()
    (path / "in it").mkdir(parents=True)


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _other_tables(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE records (a)")


def _nonsense(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO records VALUES (x'07', NULL, 4096, 0, 0, NULL)")


LOSSES = {
    "nonsense": _nonsense,
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, UNIT),
    "garbage": _garbage,
    "holes": _holes,
    "directory": _directory,
    "link": _link,
    "open to all": lambda path: path.chmod(0o666),
    "other tables": _other_tables,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("running", [False, True])
def test_an_index_that_is_lost_costs_time(
    root: Path, memory: Memory, loss: str, running: bool
) -> None:
    """What was stored is found and loaded, room is made within the capacity, leaves first."""
    prompts_ = [chain(nth, 5, payload_bytes=ROW) for nth in range(4)]
    labels = [each for prompt in prompts_ for each in prompt]
    tier = DiskTier(root, 20 * UNIT, limits=PATIENT)
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 20
    idle(tier)
    if not running:
        tier.close(10.0)
    LOSSES[loss](index_of(root))
    if not running:
        tier = DiskTier(root, 20 * UNIT, limits=PATIENT)
    assert found(tier, labels) == [True] * 20
    assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 20
    idle(tier)
    until(lambda: not tier.stats().backing_off)
    new = rows("new", 6)
    for each in new:
        until(lambda: not tier.stats().backing_off)
        assert store(tier, [memory.filled(each)])
        assert not unreachable(root, labels)
    until(lambda: store(tier, [memory.filled(each) for each in new]) == [State.DONE] * 6)
    idle(tier)  # what came before all files were counted has made room by now
    assert held(root, new) == set(new)
    assert bytes_of(root) <= 20 * UNIT
    tier.close(10.0)
    assert Path("/etc/passwd").stat().st_uid == 0
    assert not unreachable(root, labels)


def test_while_an_index_is_made_again_the_capacity_holds(
    root: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stores meanwhile, and after a restart: a sixteenth more at most, all of them
    together, since nobody knows yet what there is to evict."""
    labels, more = rows("a", 160), iter(rows("more", 400))
    with opened(root, 160 * UNIT) as tier:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 160
    for path in (root / "1").glob("index-*"):
        path.unlink()
    monkeypatch.setattr(DiskTier, "_look_around", lambda *_, **__: False)  # it takes its time
    monkeypatch.setattr(disk_module, "WAIT_S", 0.01)
    for _ in range(2):
        with opened(root, 160 * UNIT) as one, opened(root, 160 * UNIT) as two:
            for nth in range(40):
                store((one, two)[nth % 2], [memory.filled(next(more))])
                assert bytes_of(root) <= (160 + 10) * UNIT
    assert bytes_of(root) == (160 + 10) * UNIT
    monkeypatch.undo()
    with opened(root, 160 * UNIT) as tier:
        until(lambda: store(tier, [memory.filled(next(more))]) == [State.DONE])
        idle(tier)
        assert bytes_of(root) == tier.stats().held_bytes <= 160 * UNIT


def test_an_index_that_was_kept_in_memory_gets_its_file_again(
    root: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("no locks here")

    labels = rows("a", 30)
    with opened(root, 40 * UNIT) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(index_module, "_connected", refused)
            for each in labels[:20]:
                tier._index._retry_at = 0.0
                assert store(tier, [memory.filled(each)]) == [State.DONE]
            idle(tier)
            assert not list((root / "1").glob("index-*.sqlite"))
            assert tier.stats().held_records == 20
            assert caplog.text.count("it is kept in memory") == 1
        assert store(tier, [memory.filled(labels[20])]) == [State.DONE]
        assert not list((root / "1").glob("index-*.sqlite"))  # tried again after a while
        tier._index._retry_at = 0.0
        for each in labels[21:]:
            assert store(tier, [memory.filled(each)]) == [State.DONE]
        idle(tier)
        assert index_of(root).exists()
        assert tier.stats().held_records == 30
        assert "can be kept in there again" in caplog.text
        for each in rows("b", 30):
            assert store(tier, [memory.filled(each)]) == [State.DONE]
            assert bytes_of(root) <= 40 * UNIT
        with opened(root, 40 * UNIT) as other:
            idle(other)
            assert other.stats().held_bytes == bytes_of(root)


def test_a_complete_index_learns_files_of_whatever_time(root: Path, memory: Memory) -> None:
    """A clock that was set back, or another machine's."""
    strangers = rows("stranger", 12)
    with opened(root) as tier:
        assert store(tier, [memory.filled(each) for each in rows("a", 8)]) == [State.DONE] * 8
        idle(tier)
        for nth, each in enumerate(strangers):
            moved = time.time() + (-1, 1)[nth % 2] * 10.0 ** (nth // 2 + 3)
            os.utime(put_file(root, each, file_bytes(each)), (moved,) * 2)
        more = iter(rows("b", 400))

        def learns() -> bool:
            assert store(tier, [memory.filled(next(more))]) == [State.DONE]
            idle(tier)
            return tier.stats().held_records == len(record_files(root))

        until(learns)
        assert tier.stats().held_bytes == bytes_of(root)
        assert held(root, strangers) == set(strangers)


def test_an_index_that_is_stale_learns(root: Path, memory: Memory) -> None:
    """Files that came and went without it, a few with every store."""
    labels, strangers = rows("a", 20), rows("stranger", 20)
    with opened(root) as tier:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 20
    for each in labels[:15]:
        file_of(root, each).unlink()
    for each in strangers:
        os.utime(put_file(root, each, file_bytes(each)), (time.time() - 100,) * 2)
    left = file_of(root, labels[0]).parent / f".1-{'a' * 16}.tmp"
    ahead = file_of(root, labels[1]).parent / f".1-{'b' * 16}.tmp"
    left.write_bytes(bytes(UNIT))
    ahead.write_bytes(bytes(UNIT))
    os.utime(left, (0, 0))
    os.utime(ahead, (time.time() + 10**8,) * 2)  # before the clock was set back
    with sqlite3.connect(index_of(root)) as db:
        db.execute("UPDATE records SET used=used-100000000000")
    with opened(root) as tier:
        assert found(tier, [*labels, *strangers]) == [False] * 15 + [True] * 25
        assert store(tier, [memory.filled(each) for each in rows("b", 100)]) == [State.DONE] * 100
        more = iter(rows("c", 400))

        def learns() -> bool:
            assert store(tier, [memory.filled(next(more))]) == [State.DONE]
            idle(tier)
            return tier.stats().held_records == len(record_files(root))

        until(learns)  # stores side by side look around once
        assert len(record_files(root)) > 125
        assert tier.stats().held_bytes == bytes_of(root)
    assert not left.exists()
    assert not ahead.exists()


def test_an_index_that_another_process_keeps_holds_up_stores_alone(
    root: Path, memory: Memory
) -> None:
    """A stopped process with the index open: loads and lookups go on, and no call waits."""
    labels = rows("a", 4)
    with opened(root) as tier:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 4
        idle(tier)
        db = sqlite3.connect(index_of(root), isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        records, tickets = [memory.filled(each) for each in rows("b", 3)], []

        def timed() -> float:
            begin = time.perf_counter()
            tickets.extend(tier.store([record]) for record in records)
            tier.drop([labels[3].key])
            return time.perf_counter() - begin

        # a busy machine may hold up a thread once, not every time
        assert any(timed() < 0.2 for _ in range(3))
        assert found(tier, labels[:3]) == [True] * 3
        assert assert_never_wrong(tier, memory, labels[:3]) == [State.DONE] * 3
        for ticket in tickets:
            assert states(wait(tier, ticket)) == [State.DROPPED]
        db.execute("ROLLBACK")
        db.close()
        until(lambda: not tier.stats().backing_off)
        assert store(tier, [memory.filled(each) for each in rows("b", 3)]) == [State.DONE] * 3


def test_no_call_waits_for_a_directory_that_is_full_of_files(root: Path) -> None:
    """A start without an index over 40,000 files: the calls of a step meanwhile."""
    wanted = label("a")
    put_file(root, wanted, file_bytes(wanted))
    for nth in range(40_000):
        name = digest(nth).hex()
        shelf = root / "1" / "b" / name[:2]
        if nth < 4096:
            shelf.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(shelf / name, os.O_CREAT | os.O_WRONLY, 0o600))
    # a busy machine may hold up a thread now and then, not every time
    assert any(worst_call(root, wanted, nth) < 0.015 for nth in range(8))


def worst_call(root: Path, wanted: Label, run: int) -> float:
    """Seconds that the longest call of a tier took while its index was made."""
    worst, rounds, stored, memory = 0.0, 0, 0, Memory()

    def timed(call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal worst
        begin = time.perf_counter()
        answer = call(*arguments)
        worst = max(worst, time.perf_counter() - begin)
        return answer

    for path in (root / "1").glob("index-*"):
        path.unlink()
    with opened(root, 1 << 40) as tier:
        end = time.monotonic() + 60.0
        while rounds < 100 or (timed(tier.stats).held_records or 0) < 40_001:
            assert time.monotonic() < end
            new = memory.filled(label((run, rounds), payload_bytes=ROW))
            tickets = [
                timed(tier.lookup, [wanted]),
                timed(tier.load, [memory.blank(wanted)]),
                timed(tier.store, [new]),
            ]
            while not all(timed(tier.poll, ticket).settled for ticket in tickets):
                time.sleep(0.0005)
            stored += all(states(tier.poll(each)) == [State.DONE] for each in tickets)
            rounds += 1
    assert stored == rounds
    return worst


# ---- one bad record ------------------------------------------------------------------------------


def broken_files(monkeypatch: pytest.MonkeyPatch, code: int) -> set[Label]:
    """Files that cannot be read: those of the labels that are put into the set."""
    bad: set[Label] = set()
    read = disk_module.read_at

    def reading(fd: int, pieces: Any) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name in {each.digest.hex() for each in bad}:
            raise OSError(code, os.strerror(code))
        return read(fd, pieces)

    monkeypatch.setattr(disk_module, "read_at", reading)
    return bad


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_record_that_cannot_be_read_is_refused_alone(
    root: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    bad, labels = broken_files(monkeypatch, code), rows("a", 40)
    limits = Limits(threads=4, deadline_s=60.0, back_off_s=600.0)
    with opened(root, limits=limits) as tier:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 40
        bad.add(labels[7])
        for nth in range(100):
            expected = State.DONE
            if nth % 40 == 7:
                expected = State.REFUSED if nth == 7 else State.MISSING
            assert load(tier, [memory.blank(labels[nth % 40])]) == [expected], nth
        stats = tier.stats()
        assert stats.refused == {"unreadable": 1}
        assert (stats.outages, stats.backing_off) == (0, False)
        assert not file_of(root, labels[7]).exists()
        bad.clear()
        assert store(tier, [memory.filled(labels[7])]) == [State.DONE]
        assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 40


def test_many_records_that_cannot_be_read_are_a_broken_disk(
    root: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, labels = broken_files(monkeypatch, errno.EIO), rows("a", 40)
    with opened(root, limits=Limits(threads=4, deadline_s=60.0, back_off_s=600.0)) as tier:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 40
        bad.update(labels)
        answered = load(tier, [memory.blank(each) for each in labels])
        assert answered.count(State.REFUSED) <= 30  # a good record among them is not lost for it
        assert State.DONE not in answered
        assert tier.stats().backing_off
        assert tier.stats().outages >= 1


# ---- full ----------------------------------------------------------------------------------------


def fill(path: Path) -> None:
    """Takes all the room that a disk has."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(UNIT))


def test_a_capacity_above_what_the_disk_has_freezes_nothing(tmp_path: Path, memory: Memory) -> None:
    """What was used longest ago goes, and a little stays free."""
    payload_bytes = 40_000
    labels = [label(nth, payload_bytes=payload_bytes) for nth in range(80)]
    with small_disk(tmp_path / "disk", 2 << 20) as disk, opened(disk / "store") as tier:
        for each in labels:
            assert store(tier, [memory.filled(each)]) == [State.DONE]
        assert assert_never_wrong(tier, memory, labels[-20:]) == [State.DONE] * 20
        assert len(held(disk / "store", labels)) > 25
        stats = os.statvfs(disk)
        assert stats.f_bavail * stats.f_frsize >= (2 << 20) // 100 - UNIT * 8  # index, log
        assert not list(disk.rglob("*.tmp"))
        assert (tier.stats().outages, tier.stats().backing_off) == (0, False)


def test_a_disk_without_inodes_gets_some(tmp_path: Path, memory: Memory) -> None:
    labels = rows("a", 300)
    with (
        small_disk(tmp_path / "disk", 16 << 20, "nr_inodes=200") as disk,
        opened(disk / "store") as tier,
    ):
        for each in labels:
            until(lambda: not tier.stats().backing_off)
            store(tier, [memory.filled(each)])
        # some shelves cannot be made: the inodes of records are given back for them
        answered = [store(tier, [memory.filled(each)]) for each in labels[-20:]]
        assert answered.count([State.DONE]) == 20
        assert assert_never_wrong(tier, memory, labels[-5:]) == [State.DONE] * 5


def test_a_disk_that_others_fill_takes_the_tier_along_and_gives_it_back(
    tmp_path: Path, memory: Memory
) -> None:
    """Nothing is left to go: stores rest, and go on when there is room."""
    labels = rows("a", 20)
    limits = Limits(deadline_s=60.0, back_off_s=0.05)
    with (
        small_disk(tmp_path / "disk", 2 << 20) as disk,
        opened(disk / "store", limits=limits) as tier,
    ):
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 20
        idle(tier)
        fill(disk / "other")
        big = label("big", payload_bytes=500_000)
        assert store(tier, [memory.filled(big)]) == [State.DROPPED]
        (disk / "other").unlink()
        until(lambda: not tier.stats().backing_off)
        assert store(tier, [memory.filled(big)]) == [State.DONE]
        assert assert_never_wrong(tier, memory, [big]) == [State.DONE]
        idle(tier)
        assert tier.stats().held_bytes == bytes_of(disk / "store")


def test_a_disk_that_is_full_at_the_start_gets_direct_later(tmp_path: Path, memory: Memory) -> None:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        trial = Shelves(disk / "trial")
        if not trial.takes_direct():
            trial.close()
            pytest.skip("this kernel's tmpfs takes no O_DIRECT")
        trial.close()
        filler = disk / "other"
        fill(filler)
        with opened(disk / "trial", direct=True) as tier:
            filler.unlink()
            wanted = label("a")
            until(lambda: store(tier, [memory.filled(wanted)]) == [State.DONE])
            assert tier._flags == os.O_DIRECT
            assert assert_never_wrong(tier, memory, [wanted]) == [State.DONE]


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, "", 7, b""])
def test_a_root_that_is_no_path_is_refused(
    wrong: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="root="):
        DiskTier(wrong, ROOMY)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("odd", ["", 1.5, [], np.array([1, 2]), np.zeros(0)], ids=repr)
@pytest.mark.parametrize("option", ["sync", "direct", "limits"])
def test_options_of_the_wrong_kind_are_refused(root: Path, option: str, odd: Any) -> None:
    with pytest.raises(InvalidInput, match=option):
        DiskTier(root, ROOMY, **{option: odd})


def test_a_tier_that_raises_keeps_nothing_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shelves, "takes_direct", lambda self: False)
    threads = set(threading.enumerate())
    for _ in range(3):
        with pytest.raises(InvalidInput, match="takes no O_DIRECT"):
            DiskTier(root, ROOMY, direct=True)
    assert open_below(root) == []
    assert set(threading.enumerate()) <= threads


def test_the_index_is_private_and_closed_with_the_tier(root: Path, memory: Memory) -> None:
    old = os.umask(0)
    try:
        with opened(root) as tier:
            assert store(tier, [memory.filled(label("a"))]) == [State.DONE]
            modes = {path.stat().st_mode & 0o777 for path in (root / "1").glob("index-*")}
            assert modes == {0o600}
            assert open_below(root)
    finally:
        os.umask(old)
    assert open_below(root) == []
    assert {path.name for path in (root / "1").glob("index-*")} == {
        "index-lock", index_of(root).name,
    }  # fmt: skip


@pytest.mark.parametrize("works", [False, True])
def test_a_tier_that_is_dropped_keeps_nothing_open(root: Path, memory: Memory, works: bool) -> None:
    """Without `close`: its files, its index and its threads go when it is collected."""
    threads = set(threading.enumerate())
    labels = rows("a", 12)
    for _ in range(3):
        tier: DiskTier | None = DiskTier(root, 8 * UNIT, limits=PATIENT)
        assert tier is not None
        if works:
            assert store(tier, [memory.filled(each) for each in labels])
            load(tier, [memory.blank(each) for each in labels])
        tier = None
    until(
        lambda: (
            gc.collect() >= 0 and open_below(root) == [] and set(threading.enumerate()) <= threads
        )
    )
    with opened(root, 8 * UNIT) as tier:
        assert store(tier, [memory.filled(each) for each in rows("b", 8)]) == [State.DONE] * 8


def test_keys_of_a_shelf_are_gone_through_in_pieces(root: Path, memory: Memory) -> None:
    """More names in one shelf than a step looks at."""
    wanted = rows("a", 200)
    byte = wanted[0].digest[0]
    same = [
        Label(
            kind=Kind.BLOCK, digest=bytes([byte]) + each.digest[1:], parent=ROOT,
            fingerprint=each.fingerprint, tokens=BLOCK_TOKENS, payload_bytes=ROW,
        )
        for each in wanted
    ]  # fmt: skip
    assert len({Key(each.kind, each.digest) for each in same}) == 200
    with opened(root) as tier:
        assert store(tier, [memory.filled(each) for each in same]) == [State.DONE] * 200
    for each in same[::2]:
        file_of(root, each).unlink()
    with sqlite3.connect(index_of(root)) as db:
        db.execute("UPDATE records SET used=used-100000000000")
    with opened(root) as tier:
        assert store(tier, [memory.filled(each) for each in rows("b", 40)]) == [State.DONE] * 40
        idle(tier)
        assert tier.stats().held_records == len(record_files(root)) == 140


# ---- for other threads ---------------------------------------------------------------------------


class Rests:
    """In place of `time`: a clock that each look moves on, and what was slept."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s, self.slept = 100.0, step_s, 0

    def perf_counter(self) -> float:
        self.now += self.step_s
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += 1


def test_a_thread_rests_after_some_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Rests(0.3 * rest_module.BUSY_S)
    monkeypatch.setattr(rest_module, "time", clock)
    monkeypatch.setattr(rest_module, "_began", threading.local())
    for _ in range(25):
        rest_module.rest()
    assert clock.slept == 7  # the first time, and after each fourth look


def test_a_survey_lets_other_threads_run_between_any_two_records(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, tier = Memory(1 << 20), DiskTier(root, 320 * UNIT, limits=PATIENT)
    store(tier, [memory.filled(each) for each in rows("many", 150)])
    idle(tier)
    tier.close(10.0)
    index_of(root).unlink()
    clock = Rests(1.0)
    monkeypatch.setattr(rest_module, "time", clock)
    again = DiskTier(root, 320 * UNIT, limits=PATIENT)
    idle(again)
    assert clock.slept >= 5 * 150  # named, looked up, read, entered, and its owner found
    again.close(10.0)
    before = clock.slept
    smaller = DiskTier(root, 10 * UNIT, limits=PATIENT)
    idle(smaller)
    until(lambda: len(record_files(root)) <= 10)
    assert clock.slept >= before + 140  # one after the other goes
    smaller.close(10.0)

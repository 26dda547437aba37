"""A directory as a tier: what is in it after a restart, who may look, and every way it fails."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsv4.errors import InvalidInput
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.record import Kind, Label, Reason
from dsv4.tiers.shelves import Calls, Shelves
from dsv4.tiers.sizes import HEADER_BYTES
from dsv4.tiers.tier import Limits, State
from tests.support.tiers import (
    PATIENT,
    Memory,
    assert_never_wrong,
    chain,
    file_bytes,
    file_of,
    found,
    label,
    load,
    open_below,
    payload_in,
    payload_of,
    put_file,
    python,
    record_files,
    states,
    store,
    until,
    wait,
)

UNIT = 4096
ROW = UNIT - HEADER_BYTES
ROOMY = 64 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextmanager
def opened(root: Path, capacity_bytes: int = ROOMY, **options: object) -> Iterator[DiskTier]:
    tier = DiskTier(root, capacity_bytes, **{"limits": PATIENT, **options})  # type: ignore[arg-type]
    try:
        yield tier
    finally:
        tier.close(10.0)


def idle(tier: DiskTier) -> None:
    def is_idle() -> bool:
        with tier._lock:  # a job leaves the queue and runs under it
            return not tier._later and not tier._running

    until(is_idle)


def reason(tier: DiskTier, memory: Memory, wanted: Label) -> Reason:
    progress = wait(tier, tier.load([memory.blank(wanted)]))
    (outcome,) = progress.outcomes
    assert outcome.state is State.REFUSED
    assert outcome.refusal is not None
    return outcome.refusal.reason


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [None, False])
def test_a_file_is_a_record_in_whole_units(root: Path, memory: Memory, direct: bool | None) -> None:
    wanted = label("a")
    with opened(root, direct=direct) as tier:
        assert store(tier, [memory.filled(wanted, pieces=2)]) == [State.DONE]
    data = file_of(root, wanted).read_bytes()
    assert data == file_bytes(wanted)
    assert len(data) == 2 * UNIT


def test_records_survive_the_process(root: Path, memory: Memory) -> None:
    labels = chain("a", 5)
    with opened(root) as tier:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 5
    with opened(root) as tier:
        assert found(tier, labels) == [True] * 5
        assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 5
        idle(tier)
        stats = tier.stats()
        assert (stats.held_records, stats.held_bytes) == (5, 5 * 2 * UNIT)
        assert stats.loaded_bytes > 0


def test_everything_is_private(root: Path, memory: Memory) -> None:
    old = os.umask(0)
    try:
        with opened(root) as tier:
            assert store(tier, [memory.filled(label("a"))]) == [State.DONE]
    finally:
        os.umask(old)
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_read_is_refused(root: Path, mode: int) -> None:
    """The root as well as what is in it; nothing of either is opened for good."""
    (root / "1").mkdir(parents=True)
    for open_, private in ((root / "1", root), (root, root / "1")):
        private.chmod(0o700)
        open_.chmod(mode)
        with pytest.raises(InvalidInput, match=f"mode {mode:o}: records are private"):
            DiskTier(root, ROOMY)
    assert open_below(root) == []


def test_a_place_that_is_no_directory_is_refused(root: Path, tmp_path: Path) -> None:
    root.write_text("a file")
    with pytest.raises(InvalidInput, match="cannot be a disk tier's directory"):
        DiskTier(root, ROOMY)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be a disk tier's directory"):
        DiskTier(link, ROOMY)
    with pytest.raises(InvalidInput, match="sync='always'"):
        DiskTier(tmp_path / "other", ROOMY, sync="always")  # type: ignore[arg-type]


def test_no_link_is_followed(root: Path, memory: Memory, tmp_path: Path) -> None:
    """Not to read a record, not to write one, not to find one."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    a, b, c = label("a"), label("b"), label("c")
    with opened(root) as tier:
        assert store(tier, [memory.filled(label("first"))]) == [State.DONE]
        kept = put_file(outside, a, file_bytes(a))
        file_of(root, a).parent.mkdir(exist_ok=True, mode=0o700)
        file_of(root, a).symlink_to(kept)
        assert reason(tier, memory, a) is Reason.FOREIGN
        assert not file_of(root, a).is_symlink()
        assert kept.read_bytes() == file_bytes(a)

        shutil.rmtree(file_of(root, b).parent, ignore_errors=True)
        file_of(root, b).parent.symlink_to(outside)
        assert store(tier, [memory.filled(b)]) == [State.DROPPED]
        assert not list(outside.glob(b.digest.hex()))
    with opened(root) as tier:
        idle(tier)
        file_of(root, c).parent.mkdir(exist_ok=True, mode=0o700)
        file_of(root, c).symlink_to(tmp_path / "nowhere")
        assert reason(tier, memory, c) is Reason.FOREIGN
        file_of(root, c).symlink_to(tmp_path / "nowhere")
        assert store(tier, [memory.filled(c)]) == [State.DONE]  # a name that is taken
        assert not (tmp_path / "nowhere").exists()
        assert assert_never_wrong(tier, memory, [c]) == [State.DONE]


def test_something_else_under_a_records_name_is_foreign(root: Path, memory: Memory) -> None:
    """Refused and taken away; the next store heals it. A directory with something in it is kept,
    under another name."""
    a, b, c = label("a"), label("b"), label("c")
    for each in (a, b, c):
        put_file(root, each, b"").unlink()
    os.mkfifo(file_of(root, a))
    file_of(root, b).mkdir()
    file_of(root, c).mkdir()
    (file_of(root, c) / "notes.txt").write_text("mine")
    with opened(root) as tier:
        for each in (a, b, c):
            assert reason(tier, memory, each) is Reason.FOREIGN
            assert not file_of(root, each).exists()
        file_of(root, b).mkdir()  # and where nobody asked for it before it is stored
        assert store(tier, [memory.filled(each) for each in (a, b, c)]) == [State.DONE] * 3
        assert assert_never_wrong(tier, memory, [a, b, c]) == [State.DONE] * 3
    (notes,) = root.rglob("notes.txt")
    assert notes.parent.parent == file_of(root, c).parent


def test_files_with_other_names_are_left_alone(root: Path, memory: Memory) -> None:
    wanted = label("a", payload_bytes=ROW)
    notes = put_file(root, wanted, file_bytes(wanted)).parent / "notes.txt"
    notes.write_text("mine")
    os.utime(notes, (0, 0))
    with opened(root, 2 * UNIT) as tier:
        for nth in range(4):  # one after the other: each makes its room
            each = label(("b", nth), payload_bytes=ROW)
            assert store(tier, [memory.filled(each)]) == [State.DONE]
        idle(tier)
        assert not file_of(root, wanted).exists()
        assert tier.stats().held_records == len(record_files(root)) - 1
        assert tier.stats().held_bytes <= 2 * UNIT
    assert notes.read_text() == "mine"


def test_temporary_files_without_writers_go(root: Path, memory: Memory) -> None:
    shelf = put_file(root, label("a"), file_bytes(label("a"))).parent
    old, young = shelf / f".1-{'a' * 16}.tmp", shelf / f".1-{'b' * 16}.tmp"
    for path in (old, young):
        path.write_bytes(b"half a record")
    os.utime(old, (time.time() - 61,) * 2)
    with opened(root) as tier:
        idle(tier)
        assert tier.stats().held_records == 1
    assert not old.exists()
    assert young.exists()


# ---- room ----------------------------------------------------------------------------------------


def test_the_directory_stays_within_its_capacity(root: Path, memory: Memory) -> None:
    labels = [label(nth, payload_bytes=ROW) for nth in range(60)]
    with opened(root, 20 * UNIT) as tier:
        for each in labels:
            assert store(tier, [memory.filled(each)]) == [State.DONE]
            assert sum(path.stat().st_size for path in record_files(root)) <= 20 * UNIT
        assert found(tier, labels[-10:]) == [True] * 10
        assert not any(found(tier, labels[:30]))
        assert store(tier, [memory.filled(label("big", payload_bytes=21 * UNIT))]) == [
            State.DROPPED
        ]


def test_room_is_made_by_order_of_use_and_survives_a_restart(root: Path, memory: Memory) -> None:
    prompt = chain("a", 6, payload_bytes=ROW)
    others = [label(nth, payload_bytes=ROW) for nth in range(6)]
    with opened(root) as tier:
        assert store(tier, [memory.filled(each) for each in [*prompt, *others]])
        idle(tier)
        assert load(tier, [memory.blank(prompt[-1])]) == [State.DONE]  # keeps the five before it
    with opened(root, 12 * UNIT) as tier:
        new = [label(("new", nth), payload_bytes=ROW) for nth in range(5)]
        assert store(tier, [memory.filled(each) for each in new]) == [State.DONE] * 5
        assert found(tier, prompt) == [True] * 6
        assert sum(found(tier, others)) <= 1


def test_two_tiers_of_one_directory_share_records_and_capacity(root: Path, memory: Memory) -> None:
    labels = [label(nth, payload_bytes=ROW) for nth in range(64)]
    with opened(root, 32 * UNIT) as one, opened(root, 32 * UNIT) as two:
        for nth, each in enumerate(labels):
            assert store((one, two)[nth % 2], [memory.filled(each)]) == [State.DONE]
            assert load((two, one)[nth % 2], [memory.blank(each)]) == [State.DONE]
            assert sum(path.stat().st_size for path in record_files(root)) <= 32 * UNIT


def test_two_writers_of_one_key(root: Path, memory: Memory) -> None:
    """In threads of two tiers, over and over: always whole, and nothing is left behind."""
    wanted = label("a", payload_bytes=200_000)
    failures: list[object] = []
    with opened(root) as one, opened(root) as two, opened(root) as reader:

        def write(tier: DiskTier) -> None:
            own = Memory(1 << 20)
            for _ in range(20):
                if store(tier, [own.filled(wanted)]) != [State.DONE]:
                    failures.append("not stored")
                tier.drop([wanted.key])

        writers = [threading.Thread(target=write, args=(tier,)) for tier in (one, two)]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            assert_never_wrong(reader, memory, [wanted])
        assert not failures
        assert reader.stats().refused == {}
        assert store(one, [memory.filled(wanted)]) == [State.DONE]
    names = [path.name for path in record_files(root)]
    assert names in ([wanted.digest.hex()], [])  # a drop may have come last


# ---- damage --------------------------------------------------------------------------------------


def test_damaged_files_are_refused_and_removed(root: Path, memory: Memory) -> None:
    wanted = label("a", payload_bytes=20_000)
    good = file_bytes(wanted)
    half, longer, empty = good[: UNIT * 2], good + bytes(UNIT), b""
    sector = bytearray(good)
    sector[1024:1536] = bytes(512)
    version = bytearray(good)
    version[8] = 0
    other = file_bytes(label("b", payload_bytes=20_000))
    with opened(root) as tier:
        for data, expected in (
            (half, Reason.SHORT),
            (empty, Reason.SHORT),
            (longer, Reason.PAYLOAD_BYTES),
            (sector, Reason.PAYLOAD_SUM),
            (bytes(len(good)), Reason.MAGIC),
            (version, Reason.VERSION),
            (other, Reason.DIGEST),  # renamed
        ):
            path = put_file(root, wanted, data)
            assert reason(tier, memory, wanted) is expected
            assert not path.exists()
        assert tier.stats().refused == {
            "short": 2, "payload_bytes": 1, "payload_sum": 1, "magic": 1, "version": 1, "digest": 1,
        }  # fmt: skip
        assert store(tier, [memory.filled(wanted)]) == [State.DONE]
        assert assert_never_wrong(tier, memory, [wanted]) == [State.DONE]


SOME, ALL = pytest.param(64, id="some"), pytest.param(2048, id="all", marks=pytest.mark.nightly)


@pytest.mark.parametrize("flips", [SOME, ALL])
def test_bits_that_flip_in_a_file_are_seen(root: Path, memory: Memory, flips: int) -> None:
    """Header bits, evenly spread, and as many payload bits. Padding is nobody's."""
    wanted = label("a", payload_bytes=20_000)
    good = file_bytes(wanted)
    bits = [nth * 2048 // flips for nth in range(flips)]
    bits += [2048 + nth * 8 * 20_000 // flips for nth in range(flips)]
    with opened(root) as tier:
        for bit in bits:
            data = bytearray(good)
            data[bit // 8] ^= 1 << bit % 8
            put_file(root, wanted, data)
            assert load(tier, [memory.blank(wanted)]) == [State.REFUSED]
        assert sum(tier.stats().refused.values()) == 2 * flips


# ---- the system says no --------------------------------------------------------------------------


class Broken(Calls):
    """Fails where it is told to."""

    def __init__(self) -> None:
        self.where, self.code = "", 0

    def _say(self, where: str) -> None:
        if self.where == where:
            raise OSError(self.code, os.strerror(self.code))

    def create(self, name: str, *, flags: int, dir_fd: int) -> int:
        self._say("create")
        return super().create(name, flags=flags, dir_fd=dir_fd)

    def writev(self, fd: int, pieces: object) -> int:
        if self.where == "writev":  # half of it fits
            super().writev(fd, [memoryview(bytes(UNIT))])
        self._say("writev")
        return super().writev(fd, pieces)  # type: ignore[arg-type]

    def sync(self, fd: int) -> None:
        self._say("sync")
        super().sync(fd)

    def rename(self, name: str, new: str, *, dir_fd: int) -> None:
        self._say("rename")
        super().rename(name, new, dir_fd=dir_fd)


@pytest.mark.parametrize("where", ["create", "writev", "sync", "rename"])
@pytest.mark.parametrize(
    ("code", "rests"),
    [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EIO, False), (errno.EMFILE, False)],
)
def test_a_store_that_fails_leaves_nothing_and_loads_go_on(
    root: Path, memory: Memory, where: str, code: int, rests: bool
) -> None:
    """An error of one file is that record's. A full disk gets room: what is used least goes."""
    calls, lost = Broken(), label("lost")
    old, kept = [label(("old", nth)) for nth in range(6)], label("kept")
    limits = Limits(deadline_s=60.0, back_off_s=0.05)
    with opened(root, sync="each", direct=False, calls=calls, limits=limits) as tier:
        assert store(tier, [memory.filled(each) for each in [*old, kept]]) == [State.DONE] * 7
        idle(tier)
        calls.where, calls.code = where, code
        assert store(tier, [memory.filled(lost)]) == [State.DROPPED]
        assert tier.stats().outages == rests
        assert assert_never_wrong(tier, memory, [kept, lost]) == [State.DONE, State.MISSING]
        full = code == errno.ENOSPC
        assert assert_never_wrong(tier, memory, old) == [[State.DONE], [State.MISSING]][full] * 6
        assert len(record_files(root)) == (1 if full else 7)
        calls.where = ""
        until(lambda: not tier.stats().backing_off)
        assert store(tier, [memory.filled(lost)]) == [State.DONE]
        assert assert_never_wrong(tier, memory, [kept, lost]) == [State.DONE] * 2
        idle(tier)
        assert tier.stats().held_records == len(record_files(root))


@contextmanager
def small_disk(path: Path, size_bytes: int, *more: str) -> Iterator[Path]:
    """A file system of its own; needs root, else the test is left out."""
    path.mkdir()
    mounted = subprocess.run(
        [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            ",".join((f"size={size_bytes},mode=700", *more)),
            "tmpfs",
            path,
        ],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root; RLIMIT_FSIZE is tested beside it")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_disk_drops_and_serves(tmp_path: Path, memory: Memory) -> None:
    labels = chain("a", 40, payload_bytes=100_000 - HEADER_BYTES)
    with small_disk(tmp_path / "disk", 1 << 20) as root:
        with opened(
            root, ROOMY, limits=Limits(threads=1, deadline_s=60.0, back_off_s=600.0)
        ) as tier:
            answered = store(tier, [memory.filled(each) for each in labels])
            assert 5 <= answered.count(State.DONE) <= 10
            assert answered.count(State.DROPPED) == 40 - answered.count(State.DONE)
            assert tier.stats().backing_off
            assert assert_never_wrong(tier, memory, labels) == [
                State.DONE if state is State.DONE else State.MISSING for state in answered
            ]
        assert not list(root.rglob("*.tmp"))


def test_a_read_only_disk_serves_and_drops(tmp_path: Path, memory: Memory) -> None:
    there, lost = label("a"), label("b")
    with small_disk(tmp_path / "disk", 1 << 20) as root:
        with opened(root) as tier:
            assert store(tier, [memory.filled(there)]) == [State.DONE]
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        with opened(root) as tier:
            assert assert_never_wrong(tier, memory, [there, lost]) == [State.DONE, State.MISSING]
            assert store(tier, [memory.filled(lost)]) == [State.DROPPED]
            assert assert_never_wrong(tier, memory, [there]) == [State.DONE]
            damaged = tier.stats().refused
            assert damaged == {}


LIMITED = """
import resource, sys
from pathlib import Path
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.tier import Limits
from tests.support.tiers import Memory, assert_never_wrong, chain, store
root, limit = Path(sys.argv[1]), sys.argv[2]
memory, labels = Memory(), chain("a", 6, payload_bytes=50_000)
tier = DiskTier(root, 64 << 20, limits=Limits(threads=1, deadline_s=60.0, back_off_s=0.01))
print(*store(tier, [memory.filled(each) for each in labels[:2]]))
soft, hard = resource.getrlimit(getattr(resource, limit))
if limit == "RLIMIT_FSIZE":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
else:
    import os
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
print(*store(tier, [memory.filled(each) for each in labels[2:4]]))
print(*assert_never_wrong(tier, memory, labels[:4]))
if limit == "RLIMIT_FSIZE":
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
else:
    for fd in opened:
        os.close(fd)
print(*store(tier, [memory.filled(each) for each in labels[2:]]))
print(*assert_never_wrong(tier, memory, labels))
tier.close(5.0)
"""


@pytest.mark.parametrize(
    ("limit", "meanwhile"),
    [
        ("RLIMIT_FSIZE", "done done missing missing"),
        ("RLIMIT_NOFILE", "missing missing missing missing"),
    ],
)
def test_limits_of_the_process_cost_records_and_nothing_else(
    root: Path, limit: str, meanwhile: str
) -> None:
    with python(LIMITED, root, limit, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        out, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert out.splitlines() == [
        "done done",
        "dropped dropped",
        meanwhile,
        "done done done done",
        "done done done done done done",
    ]
    assert not list(root.rglob("*.tmp"))


def test_a_directory_that_vanishes_is_made_anew(
    root: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, other = label("a"), label("b")
    with opened(root) as tier, opened(root) as reader:
        for _ in range(2):
            assert store(tier, [memory.filled(wanted)]) == [State.DONE]
            assert load(reader, [memory.blank(wanted)]) == [State.DONE]
            idle(tier)
            idle(reader)  # or the other one's index has files that come and go meanwhile
            shutil.rmtree(root)
            assert load(tier, [memory.blank(wanted)]) == [State.MISSING]
            assert "the directory was taken away" in caplog.text
            assert store(tier, [memory.filled(other)]) == [State.DONE]
            # one that only reads finds what another one made anew
            assert assert_never_wrong(reader, memory, [wanted, other]) == [
                State.MISSING, State.DONE,
            ]  # fmt: skip
            assert found(reader, [wanted, other]) == [False, True]
            idle(tier)
            assert tier.stats().held_records == 1
            assert stat.S_IMODE(root.stat().st_mode) == 0o700
            tier.drop([other.key])
            until(lambda: not file_of(root, other).exists())


def test_a_file_system_that_is_gone_is_an_outage(tmp_path: Path, memory: Memory) -> None:
    """The directory is not made anew on whatever lies below."""
    wanted = label("a")
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        root = disk / "store"
        with opened(root) as tier:
            assert store(tier, [memory.filled(wanted)]) == [State.DONE]
            subprocess.run(["umount", "-l", disk], check=True)
            assert store(tier, [memory.filled(label("b"))]) == [State.DROPPED]
            assert tier.stats().outages == 1
            assert tier.stats().backing_off
            assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)


def test_shelves_that_are_only_read_make_nothing(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path, create=False)
    assert list(shelves.scan()) == []
    assert not shelves.exists(label("a").key)
    assert shelves.sweep() == 0
    shelves.close()
    assert list(tmp_path.iterdir()) == []


def test_states_of_one_digest_do_not_touch_blocks(root: Path, memory: Memory) -> None:
    block, state = label("a"), label("a", kind=Kind.STATE)
    with opened(root) as tier:
        assert store(tier, [memory.filled(each) for each in (block, state)]) == [State.DONE] * 2
        tier.drop([state.key])
        until(lambda: not file_of(root, state).exists())
        record = memory.blank(block)
        assert load(tier, [record]) == [State.DONE]
        assert payload_in(record) == payload_of(block)
        assert states(wait(tier, tier.load([memory.blank(state)]))) == [State.MISSING]

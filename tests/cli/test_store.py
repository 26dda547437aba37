"""`dsv4 store` as users and scripts see it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsv4.cli import app
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.record import Kind, pack_header
from dsv4.tiers.secret import Secret
from tests.support.tiers import chain, digest, file_bytes, file_of, label, put_file, until

BLOCKS = chain("a", 3)
OTHER = replace(label("x", kind=Kind.SNAPSHOT, payload_bytes=9000), fingerprint=digest("other"))
UNIT = 4096


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, arguments)])


def answer(*arguments: str | Path, code: int = 0) -> dict:  # type: ignore[type-arg]
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three blocks of one schema, the first the longest unused, and a snapshot of another."""
    root = tmp_path / "store"
    for nth, each in enumerate([*BLOCKS, OTHER]):
        path = put_file(root, each, file_bytes(each))
        os.utime(path, (time.time() - 3600 * (4 - nth),) * 2)
    return root


def test_ls_counts_by_schema_and_kind(root: Path) -> None:
    found = answer("ls", root)
    assert (found["records"], found["bytes"]) == (4, (3 * 2 + 3) * UNIT)
    groups = {(row["fingerprint"], row["kind"]): row for row in found["groups"]}
    blocks = groups[BLOCKS[0].fingerprint.hex(), "block"]
    assert (blocks["records"], blocks["bytes"], blocks["tokens"]) == (3, 6 * UNIT, 384)
    snapshot = groups[OTHER.fingerprint.hex(), "snapshot"]
    assert (snapshot["records"], snapshot["bytes"]) == (1, 3 * UNIT)
    table = run("ls", root).stdout
    assert BLOCKS[0].fingerprint.hex()[:12] in table
    assert "snapshot" in table


def test_ls_names_what_is_no_record(root: Path) -> None:
    put_file(root, BLOCKS[0], b"no record")
    kinds = {row["kind"]: row["records"] for row in answer("ls", root)["groups"]}
    assert kinds == {"no record": 1, "block": 2, "snapshot": 1}


def test_check_finds_nothing_wrong(root: Path) -> None:
    assert answer("check", root) == {
        "directory": str(root), "good": 4, "refused": [], "removed": 0,
        "not_removed": [], "unreadable": [], "other_versions": 0,
    }  # fmt: skip
    result = run("check", root)
    assert result.exit_code == 0
    assert result.stdout == "4 good, 0 refused\n"


def test_check_finds_each_kind_of_damage_and_removes_it_when_asked(root: Path) -> None:
    flipped = file_bytes(BLOCKS[0])
    flipped[3000] ^= 1
    put_file(root, BLOCKS[0], flipped)
    put_file(root, BLOCKS[1], file_bytes(BLOCKS[1])[:UNIT])
    put_file(root, BLOCKS[2], file_bytes(BLOCKS[0]))
    file_of(root, OTHER).unlink()
    file_of(root, OTHER).symlink_to("/etc/passwd")
    found = answer("check", root, code=1)
    reasons = {each["key"]: each["reason"] for each in found["refused"]}
    assert reasons == {
        str(BLOCKS[0].key): "payload_sum",
        str(BLOCKS[1].key): "short",
        str(BLOCKS[2].key): "digest",
        str(OTHER.key): "foreign",
    }
    assert (found["good"], found["removed"]) == (0, 0)
    result = run("check", root, "--remove")
    assert result.exit_code == 1
    assert (
        "0 good, 4 refused (1 digest, 1 foreign, 1 payload_sum, 1 short), removed" in result.stdout
    )
    assert answer("check", root)["good"] == 0
    assert Path("/etc/passwd").exists()


def test_prune_to_a_size_takes_the_ends_of_what_is_longest_unused(root: Path) -> None:
    tried = answer("prune", root, "--to", str(5 * UNIT), "--dry-run")
    assert tried["removed"] == {"records": 2, "bytes": 4 * UNIT, "temporary": 0}
    assert answer("ls", root)["records"] == 4
    assert answer("prune", root, "--to", str(5 * UNIT)) == {**tried, "dry_run": False}
    assert tried["left"] == {"records": 2, "bytes": 5 * UNIT}
    assert [file_of(root, each).exists() for each in [*BLOCKS, OTHER]] == [True, False, False, True]


def test_prune_by_age_and_schema(root: Path) -> None:
    """A use of the last block, two hours ago, is one of all before it."""
    assert answer("prune", root, "--unused-for", "150m")["removed"]["records"] == 0
    os.utime(file_of(root, BLOCKS[2]), (time.time() - 4 * 3600,) * 2)
    assert answer("prune", root, "--unused-for", "210m")["removed"]["records"] == 1
    result = run("prune", root, "--fingerprint", OTHER.fingerprint.hex()[:8])
    assert result.stdout == "1 records, 12 KiB removed; 2 records, 16 KiB left\n"
    assert [file_of(root, each).exists() for each in [*BLOCKS, OTHER]] == [True, True, False, False]
    assert answer("prune", root, "--unused-for", "30m")["left"]["records"] == 0


def test_prune_takes_temporary_files_without_writers(root: Path) -> None:
    left = file_of(root, BLOCKS[0]).parent / f".77-{'0' * 16}.tmp"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert answer("prune", root, "--to", "1GiB")["removed"] == {
        "records": 0, "bytes": 0, "temporary": 1,
    }  # fmt: skip
    assert not left.exists()


def _failing(open_: Any, name: str) -> Any:
    def opening(path: object, *arguments: object, **more: object) -> int:
        if path == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_(path, *arguments, **more)  # type: ignore[no-any-return]

    return opening


def test_what_cannot_be_read_is_said_and_stops_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", _failing(os.open, BLOCKS[1].digest.hex()))
    kinds = {row["kind"]: row["records"] for row in answer("ls", root)["groups"]}
    assert kinds == {"block": 2, "snapshot": 1, "unreadable": 1}
    assert "unreadable" in run("ls", root).stdout
    found = answer("check", root, code=1)
    assert (found["good"], found["removed"]) == (3, 0)
    assert found["refused"] == [
        {
            "key": str(BLOCKS[1].key), "reason": "unreadable", "asked": "a record",
            "found": "EIO: Input/output error",
        }
    ]  # fmt: skip
    assert answer("prune", root, "--to", "1GiB")["removed"]["records"] == 0
    assert answer("check", root, "--remove", code=1)["removed"] == 1
    assert answer("check", root)["good"] == 3


def test_a_shelf_that_cannot_be_read_is_said_and_hides_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = BLOCKS[2].digest.hex()[:2]
    monkeypatch.setattr(os, "open", _failing(os.open, shelf))
    for arguments, code in ((["ls"], 0), (["check"], 1), (["prune", "--to", "1GiB"], 1)):
        command, *more = arguments
        found = answer(command, root, *more, code=code)
        assert {"name": f"b/{shelf}", "error": "EIO: Input/output error"} in found["unreadable"]
        result = run(command, root, *more)
        assert result.exit_code == code
        assert f"cannot read b/{shelf}: EIO" in result.stderr
    assert answer("ls", root)["records"] == 3


def test_what_cannot_be_removed_is_said_and_stops_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file(root, BLOCKS[0], b"no record")
    put_file(root, BLOCKS[1], b"no record")
    unlink = os.unlink

    def unlinking(path: object, **more: object) -> None:
        if path == BLOCKS[0].digest.hex():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", unlinking)
    found = answer("check", root, "--remove", code=1)
    assert found["removed"] == 1
    assert found["not_removed"] == [
        {"name": str(BLOCKS[0].key), "error": "EPERM: Operation not permitted"}
    ]
    result = run("check", root, "--remove")
    assert f"cannot remove {BLOCKS[0].key}: EPERM" in result.stderr
    left = answer("prune", root, "--to", "1", code=1)
    assert (left["removed"]["records"], left["left"]["records"]) == (2, 1)


def test_a_directory_in_a_records_place_is_taken_away(root: Path) -> None:
    for each in BLOCKS[:2]:
        file_of(root, each).unlink()
        file_of(root, each).mkdir()
    (file_of(root, BLOCKS[1]) / "notes.txt").write_text("mine")
    found = answer("check", root, "--remove", code=1)
    assert (found["good"], found["removed"], found["not_removed"]) == (2, 2, [])
    assert {each["reason"] for each in found["refused"]} == {"foreign"}
    assert answer("check", root)["good"] == 2
    assert [path.read_text() for path in root.rglob("notes.txt")] == ["mine"]


def test_records_of_other_versions_are_counted_and_pruned(root: Path) -> None:
    name = BLOCKS[0].digest.hex()
    old = root / "7" / "b" / name[:2] / name
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(5 * UNIT))
    os.utime(old, (0, 0))
    found = answer("ls", root)
    assert (found["records"], found["bytes"]) == (5, (3 * 2 + 3 + 5) * UNIT)
    assert {row["kind"]: row["bytes"] for row in found["groups"]}["version 7"] == 5 * UNIT
    assert "version 7" in run("ls", root).stdout
    assert answer("check", root)["other_versions"] == 1
    assert "1 of other record versions not looked at" in run("check", root).stdout
    tried = answer("prune", root, "--other-versions", "--dry-run")
    assert tried["removed"] == {"records": 1, "bytes": 5 * UNIT, "temporary": 0}
    # by size they are the first to go
    assert answer("prune", root, "--to", str(9 * UNIT), "--dry-run")["removed"] == tried["removed"]
    assert answer("prune", root, "--other-versions")["left"] == {"records": 4, "bytes": 9 * UNIT}
    assert not old.exists()


def test_a_directory_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for command in ("ls", "check"):
        for place in (tmp_path, Path("/etc")):
            result = run(command, place)
            assert result.exit_code == 2
            assert "is not a disk tier's directory" in result.stderr
            assert "other files or directories and no records" in result.stderr


def test_check_takes_no_more_memory_than_it_reads_at_a_time(root: Path) -> None:
    """Whatever a header says."""
    huge = label("huge", payload_bytes=3 << 30)
    with put_file(root, huge, b"").open("wb") as file:
        file.write(pack_header(huge, bytes(16)))
        file.truncate(huge.padded_bytes)
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from dsv4.cli import app\n"
        f"app(['store', 'check', {str(root)!r}, '--json'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["good"], [each["reason"] for each in found["refused"]]) == (4, ["payload_sum"])


def test_what_is_pruned_is_told_to_the_index(root: Path) -> None:
    """A tier that opens the directory afterwards knows what is there, without a look."""

    def held() -> int | None:
        tier = DiskTier(root, 1 << 30)
        until(lambda: not tier._later and not tier._running)
        tier.close(10.0)
        return tier.stats().held_records

    assert held() == 4
    answer("prune", root, "--to", str(5 * UNIT))
    assert held() == 2


def test_an_empty_directory_is_fine_and_stays_empty(tmp_path: Path) -> None:
    assert answer("ls", tmp_path)["records"] == 0
    assert answer("check", tmp_path)["good"] == 0
    assert list(tmp_path.iterdir()) == []


def test_errors_are_one_line(root: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("ls", tmp_path / "none"), "cannot be a disk tier's directory"),
        (("prune", root), "say what to remove"),
        (("prune", root, "--unused-for", "soon"), "give a number and s, m, h or d"),
        (("prune", root, "--to", "80X"), "80X"),
        (("prune", root, "--fingerprint", "xyz"), "4 to 64 hexadecimal digits"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("InvalidInput: ")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert message in answer(*arguments, code=2)["error"]


def test_store_runs_without_torch(root: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dsv4.cli import app\n"
        f"app(['store', 'check', {str(root)!r}, '--json'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["good"] == 4


def test_without_xxhash_plan_works_and_store_names_the_extra(root: Path) -> None:
    code = "import sys; sys.modules['xxhash'] = None\nfrom dsv4.cli import app\napp(sys.argv[1:])"
    for arguments, status in ((["plan", "tiny"], 0), (["store", "ls", str(root)], 2)):
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
        )
        assert ran.returncode == status, ran.stderr
    assert "dsv4[tiers]" in ran.stderr


def test_check_with_the_key_finds_what_sums_do_not(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of another key, with right sums. Records without a key are as they were."""
    mine, theirs = bytes(range(32)), bytes(range(1, 33))
    keyed = [replace(each, secret=Secret(mine)) for each in chain("k", 2)]
    for each in keyed:
        put_file(root, each, file_bytes(each))
    key = tmp_path / "key"
    key.write_text(mine.hex())
    key.chmod(0o600)
    assert answer("check", root)["good"] == 6
    assert answer("check", root, "--key-file", key)["good"] == 6
    foreign = replace(keyed[1], secret=Secret(theirs))
    put_file(root, foreign, file_bytes(foreign))
    assert answer("check", root)["good"] == 6
    found = answer("check", root, "--key-file", key, code=1)
    assert (found["good"], [each["reason"] for each in found["refused"]]) == (5, ["mac"])
    assert found["refused"][0]["key"] == str(foreign.key)
    key.write_text(theirs.hex())
    assert answer("check", root, "--key-file", key, code=1)["good"] == 5
    monkeypatch.setenv("DSV4_KEY", mine.hex())
    assert answer("check", root, "--remove", code=1)["removed"] == 1
    assert answer("check", root)["good"] == 5
    monkeypatch.setenv("DSV4_KEY", "not a key")
    result = run("check", root)
    assert result.exit_code == 2
    assert "hexadecimal digits" in result.output
    assert "not a key" not in result.output.replace("that are not a key", "")

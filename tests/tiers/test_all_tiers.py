"""What every tier promises, asked of each with its real component."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from dsv4.tiers.mooncake import MooncakeTier
from dsv4.tiers.object import ObjectTier
from dsv4.tiers.record import Kind, Reason
from dsv4.tiers.secret import Secret
from dsv4.tiers.tier import State, Tier
from tests.support.tiers import (
    PATIENT,
    Memory,
    chain,
    digest,
    found,
    label,
    load,
    payload_in,
    payload_of,
    s3_config,
    states,
    store,
    until,
    wait,
)

TIERS = ("host", "disk", "disk_direct", "disk_synced", "object", "mooncake")


@pytest.fixture(scope="session")
def shared_memory() -> Memory:
    return Memory(32 << 20)


@pytest.fixture
def memory(shared_memory: Memory) -> Memory:
    return shared_memory


@pytest.fixture(scope="session")
def mooncake_tier(master_port: int, shared_memory: Memory) -> Iterator[MooncakeTier]:
    tier = MooncakeTier(f"127.0.0.1:{master_port}", segment_bytes=64 << 20, limits=PATIENT)
    tier.register(shared_memory.region)
    yield tier
    tier.close(10.0)


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier
    if request.param == "mooncake":
        yield request.getfixturevalue("mooncake_tier")
        return
    if request.param == "host":
        made = HostTier(16 << 20)
    elif request.param == "object":
        port = request.getfixturevalue("s3_port")
        made = ObjectTier(
            "s3://bucket/some/place", config=s3_config(port), allow_http=True, limits=PATIENT
        )
    else:
        direct = None if request.param == "disk_direct" else False
        sync = "each" if request.param == "disk_synced" else "off"
        made = DiskTier(tmp_path / "store", 64 << 20, direct=direct, sync=sync, limits=PATIENT)  # type: ignore[arg-type]
    yield made
    made.close(10.0)


@pytest.fixture
def name() -> str:
    """Servers live longer than a test: no two tests use the same keys."""
    return secrets.token_hex(8)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_written_is_read_back_byte_for_byte(
    tier: Tier, memory: Memory, name: str, pieces: int
) -> None:
    """Written and never read back is the oldest fault of them all: bytes have to come."""
    labels = chain(name, 4, payload_bytes=70_000)
    before = tier.stats()
    written = [memory.filled(each, pieces=pieces) for each in labels]
    assert store(tier, written) == [State.DONE] * 4
    records = [memory.blank(each, pieces=(pieces + 1) % 4) for each in labels]
    assert load(tier, records) == [State.DONE] * 4
    assert [payload_in(record) for record in records] == [payload_of(each) for each in labels]
    assert [payload_in(record) for record in written] == [payload_of(each) for each in labels]
    after = tier.stats()
    assert after.loaded_bytes - before.loaded_bytes == 4 * labels[0].record_bytes
    assert after.stored_bytes - before.stored_bytes == 4 * labels[0].record_bytes
    assert after.hits - before.hits == 4
    assert after.load.count - before.load.count == 4


def test_kinds_of_one_digest_are_kept_apart(tier: Tier, memory: Memory, name: str) -> None:
    labels = [label(name, kind=kind, payload_bytes=1000 * kind) for kind in Kind]
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 3
    records = [memory.blank(each) for each in labels]
    assert load(tier, records) == [State.DONE] * 3
    assert [payload_in(record) for record in records] == [payload_of(each) for each in labels]


def test_what_was_never_stored_is_missing(tier: Tier, memory: Memory, name: str) -> None:
    there, *others = chain(name, 4)
    before = tier.stats().misses
    assert store(tier, [memory.filled(there)]) == [State.DONE]
    assert found(tier, [there, *others]) == [True, False, False, False]
    records = [memory.blank(each) for each in [*others, there]]
    assert load(tier, records) == [State.MISSING] * 3 + [State.DONE]
    assert tier.stats().misses - before == 3


def test_stored_twice_is_done_and_the_first_bytes_stay(
    tier: Tier, memory: Memory, name: str
) -> None:
    wanted = label(name)
    assert store(tier, [memory.filled(wanted)]) == [State.DONE]
    other = memory.filled(wanted)
    other.parts.payload[0][:4] = b"\0\1\2\3"
    assert store(tier, [other]) == [State.DONE]
    record = memory.blank(wanted)
    assert load(tier, [record]) == [State.DONE]
    assert payload_in(record) == payload_of(wanted)


def test_dropped_is_missing(tier: Tier, memory: Memory, name: str) -> None:
    kept, gone = chain(name, 2)
    assert store(tier, [memory.filled(each) for each in (kept, gone)]) == [State.DONE] * 2
    tier.drop([gone.key])
    until(lambda: found(tier, [gone]) == [False])
    assert load(tier, [memory.blank(gone), memory.blank(kept)]) == [State.MISSING, State.DONE]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parent": digest("other")}, Reason.PARENT),
        ({"fingerprint": digest("other")}, Reason.FINGERPRINT),
        ({"tokens": 256}, Reason.TOKENS),
        ({"payload_bytes": 5001}, Reason.PAYLOAD_BYTES),
        ({"payload_bytes": 4999}, Reason.PAYLOAD_BYTES),
        ({"payload_bytes": 50_000}, Reason.SHORT),
        ({"payload_bytes": 500}, Reason.PAYLOAD_BYTES),
    ],
)
def test_a_record_that_is_not_what_was_asked_for_is_refused_and_gone(
    tier: Tier, memory: Memory, name: str, change: dict[str, object], reason: Reason
) -> None:
    """The same digest with another label: a forged record, or another cache's."""
    stored = label(name)
    asked = replace(stored, **change)  # type: ignore[arg-type]
    before = tier.stats()
    assert store(tier, [memory.filled(stored)]) == [State.DONE]
    progress = wait(tier, tier.load([memory.blank(asked)]))
    assert states(progress) == [State.REFUSED]
    refusal = progress.outcomes[0].refusal
    assert refusal is not None
    # who sees the size of what is stored before its header says which way it is wrong
    allowed = {reason, Reason.SHORT} if "payload_bytes" in change else {reason}
    if "payload_bytes" in change and reason is Reason.SHORT:
        allowed |= {Reason.PAYLOAD_BYTES}
    assert refusal.reason in allowed
    after = tier.stats()
    assert sum(after.refused.values()) - sum(before.refused.values()) == 1
    assert after.hits == before.hits
    assert load(tier, [memory.blank(stored)]) == [State.MISSING]
    assert store(tier, [memory.filled(stored)]) == [State.DONE]
    assert load(tier, [memory.blank(stored)]) == [State.DONE]


def test_a_record_that_broke_before_it_was_stored_is_not_stored(
    tier: Tier, memory: Memory, name: str
) -> None:
    from dsv4.tiers.record import seal

    record = memory.filled(label(name))
    seal(record)
    record.parts.payload[0][99] ^= 32
    assert store(tier, [replace(record, sealed=True)]) == [State.REFUSED]
    assert found(tier, [record.label]) == [False]


def test_many_records_in_one_call(tier: Tier, memory: Memory, name: str) -> None:
    """More than a batch of Mooncake's tier; of the others more than their threads."""
    count = 60 if tier.name == "object" else 300
    labels = chain(name, count, payload_bytes=300)
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * count
    assert all(found(tier, labels))
    records = [memory.blank(each) for each in labels]
    assert load(tier, records) == [State.DONE] * count
    assert [payload_in(record) for record in records] == [payload_of(each) for each in labels]


def test_a_thread_that_an_interrupt_kept_from_starting_starts_with_the_next_call(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (memory.filled(each) for each in chain("interrupted", 2))
    tier = HostTier(1 << 16)

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.store([first])
    assert store(tier, [second]) == [State.DONE]
    tier.close(30.0)


@pytest.mark.parametrize("asked", ["another key", "no key"])
def test_a_record_of_a_key_is_refused_without_it(
    tier: Tier, memory: Memory, name: str, asked: str
) -> None:
    """By whoever asks for its name: he has it from a listing."""
    mine = replace(label(name), secret=Secret(b"m" * 32))
    theirs = replace(mine, secret=Secret(b"t" * 32) if asked == "another key" else None)
    before = tier.stats().refused.get(Reason.MAC, 0)
    assert store(tier, [memory.filled(mine)]) == [State.DONE]
    record = memory.blank(mine)
    assert load(tier, [record]) == [State.DONE]
    assert payload_in(record) == payload_of(mine)
    assert load(tier, [memory.blank(theirs)]) == [State.REFUSED]
    assert tier.stats().refused[Reason.MAC] == before + 1


def test_a_record_that_another_writer_put_under_a_name_is_refused_with_a_key(
    tier: Tier, memory: Memory, name: str
) -> None:
    """All its sums are right."""
    mine = replace(label(name), secret=Secret(b"m" * 32))
    forged = memory.filled(replace(mine, secret=None))
    forged.parts.payload[0][:4] = b"\0\1\2\3"
    assert store(tier, [forged]) == [State.DONE]
    assert load(tier, [memory.blank(mine)]) == [State.REFUSED]
    until(lambda: found(tier, [mine]) == [False])
    assert store(tier, [memory.filled(mine)]) == [State.DONE]
    assert load(tier, [memory.blank(mine)]) == [State.DONE]

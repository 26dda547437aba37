"""Records: what is packed is read back, and every damage is refused with its reason."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import xxhash

from dsv4.errors import InvalidInput
from dsv4.tiers.record import (
    MAGIC,
    Key,
    Kind,
    Label,
    Parts,
    Reason,
    Record,
    Refusal,
    Region,
    check,
    read_header,
    seal,
)
from dsv4.tiers.sizes import HEADER_BYTES
from tests.support.tiers import Memory, label, payload_in, payload_of

RNG = Random(7)
SUMMED = HEADER_BYTES - 8


def sealed(memory: Memory, wanted: Label, *, pieces: int = 0) -> Record:
    record = memory.filled(wanted, pieces=pieces)
    seal(record)
    assert check(record) is None
    return record


def reason(record: Record) -> Reason:
    refusal = check(record)
    assert refusal is not None
    return refusal.reason


def with_field(record: Record, at: int, value: bytes) -> None:
    """A header that says something else and has the right sum: foreign, not damaged."""
    header = record.parts.header
    header[at : at + len(value)] = value
    header[SUMMED:] = xxhash.xxh3_64_intdigest(header[:SUMMED]).to_bytes(8, "little")


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_sealed_record_says_its_label(memory: Memory, kind: Kind, pieces: int) -> None:
    wanted = label("a", kind=kind, tokens=1 << 40)
    record = sealed(memory, wanted, pieces=pieces)
    found = read_header(bytes(record.parts.header))
    assert not isinstance(found, Refusal)
    assert found == (wanted, xxhash.xxh3_128_digest(payload_of(wanted)))


def test_the_bytes_of_a_header_are_these(memory: Memory) -> None:
    """The format, field by field: another version of this library has to read it."""
    wanted = label("a", kind=Kind.SNAPSHOT, tokens=640, payload_bytes=5000)
    header = bytes(sealed(memory, wanted).parts.header)
    assert header[:8] == MAGIC == b"\x89DSV4\r\n\x00"
    assert header[8:16] == b"\x01\x00\x02\x00\x00\x01\x00\x00"
    assert header[16:24] == (5000).to_bytes(8, "little")
    assert header[24:32] == (640).to_bytes(8, "little")
    assert header[32:128] == wanted.digest + wanted.parent + wanted.fingerprint
    assert header[128:144] == xxhash.xxh3_128_digest(payload_of(wanted))
    assert header[144:248] == bytes(104)
    assert header[248:] == xxhash.xxh3_64_intdigest(header[:248]).to_bytes(8, "little")


def test_equal_records_have_equal_bytes_however_their_memory_is_cut(memory: Memory) -> None:
    a, b = (sealed(memory, label("a"), pieces=pieces) for pieces in (1, 4))
    assert bytes(a.parts.header) == bytes(b.parts.header)
    assert payload_in(a) == payload_in(b)


def test_every_bit_of_a_header_counts(memory: Memory) -> None:
    record = sealed(memory, label("a"))
    header = record.parts.header
    reasons = set()
    for bit in range(8 * HEADER_BYTES):
        header[bit // 8] ^= 1 << bit % 8
        reasons.add(reason(record))
        header[bit // 8] ^= 1 << bit % 8
    assert reasons == {Reason.MAGIC, Reason.VERSION, Reason.HEADER_SUM}
    assert check(record) is None


@pytest.mark.parametrize("pieces", [0, 3])
def test_bits_of_a_payload_count(memory: Memory, pieces: int) -> None:
    """10,000 flips over two ways to cut the memory."""
    wanted = label("a", payload_bytes=450_304)
    record = sealed(memory, wanted, pieces=pieces)
    cuts = np.cumsum([piece.nbytes for piece in record.parts.payload])
    for bit in (RNG.randrange(8 * wanted.payload_bytes) for _ in range(5000)):
        nth = int(np.searchsorted(cuts, bit // 8, side="right"))
        piece, at = record.parts.payload[nth], bit // 8 - int(cuts[nth])
        piece[at] ^= 1 << bit % 8
        assert reason(record) is Reason.PAYLOAD_SUM
        piece[at] ^= 1 << bit % 8
    assert check(record) is None


def test_lost_sectors_and_swapped_ones_count(memory: Memory) -> None:
    wanted = label("a", payload_bytes=450_304)
    record = sealed(memory, wanted)
    (payload,) = record.parts.payload
    for at in (RNG.randrange(wanted.payload_bytes // 512) for _ in range(100)):
        sector = payload[512 * at : 512 * (at + 1)]
        kept = bytes(sector)
        sector[:] = bytes(sector.nbytes)
        assert reason(record) is Reason.PAYLOAD_SUM
        sector[:] = kept
    first, second = bytes(payload[:512]), bytes(payload[512:1024])
    payload[:1024] = second + first
    assert reason(record) is Reason.PAYLOAD_SUM


OTHER = bytes(range(32))


@pytest.mark.parametrize(
    ("at", "value", "expected"),
    [
        (0, b"\x89DSV5\r\n\x00", Reason.MAGIC),
        (8, b"\x00\x00", Reason.VERSION),
        (8, b"\x02\x00", Reason.VERSION),
        (10, b"\x02\x00", Reason.KIND),
        (10, b"\x09\x00", Reason.KIND),
        (12, b"\x00\x02\x00\x00", Reason.HEADER_BYTES),
        (16, (4999).to_bytes(8, "little"), Reason.PAYLOAD_BYTES),
        (16, bytes(8), Reason.KIND),
        (24, (256).to_bytes(8, "little"), Reason.TOKENS),
        (32, OTHER, Reason.DIGEST),
        (64, OTHER, Reason.PARENT),
        (96, OTHER, Reason.FINGERPRINT),
        (128, OTHER[:16], Reason.PAYLOAD_SUM),
        (200, b"\x01", Reason.ZEROS),
    ],
)
def test_a_foreign_field_is_named(memory: Memory, at: int, value: bytes, expected: Reason) -> None:
    record = sealed(memory, label("a"))
    with_field(record, at, value)
    refusal = check(record)
    assert refusal is not None
    assert refusal.reason is expected
    assert str(refusal).startswith(f"{expected}: found ")


def test_a_record_under_anothers_name_is_refused(memory: Memory) -> None:
    record = sealed(memory, label("a"))
    assert reason(replace(record, label=label("b"))) is Reason.DIGEST
    assert reason(replace(record, label=label("a", kind=Kind.STATE))) is Reason.KIND


def test_a_short_header_is_refused() -> None:
    found = read_header(bytes(255))
    assert isinstance(found, Refusal)
    assert found.reason is Reason.SHORT


def test_zeros_are_no_record(memory: Memory) -> None:
    record = memory.blank(label("a"))
    record.parts.header[:] = bytes(HEADER_BYTES)
    assert reason(record) is Reason.MAGIC


def test_keys_name_version_kind_and_digest_and_nothing_else() -> None:
    for kind, letter in ((Kind.BLOCK, "b"), (Kind.SNAPSHOT, "s"), (Kind.STATE, "t")):
        key = label("a", kind=kind).key
        assert str(key) == f"dsv4/1/{letter}/{key.digest.hex()}"
        assert Key.parse(str(key)) == key
    for text in ("", "dsv4/1/b/", "dsv4/2/b/" + "0" * 64, "dsv4/1/x/" + "0" * 64,
                 "dsv4/1/b/" + "0" * 63 + "G", "dsv4/1/b/" + "A" * 64, "../1/b/" + "0" * 64,
                 "dsv4/1/b/" + "0" * 64 + "\n"):  # fmt: skip
        assert Key.parse(text) is None


def test_records_lean_on_blocks() -> None:
    block, snapshot, state = (label("a", kind=kind) for kind in Kind)
    assert block.leans_on == Key(Kind.BLOCK, block.parent) == state.leans_on
    assert snapshot.leans_on == block.key


@pytest.mark.parametrize("payload_bytes", [1, 3839, 3840, 3841, 450_304])
def test_units_hold_header_payload_and_zeros(payload_bytes: int) -> None:
    wanted = label("a", payload_bytes=payload_bytes)
    memory = memoryview(bytearray(b"\xff" * wanted.padded_bytes))
    parts = Parts.of_units([memory], payload_bytes)
    assert parts.header.nbytes == HEADER_BYTES
    assert parts.payload_bytes == payload_bytes
    assert memory[: wanted.record_bytes] == b"\xff" * wanted.record_bytes
    assert not any(memory[wanted.record_bytes :])
    assert wanted.padded_bytes % 4096 == 0
    assert wanted.padded_bytes - wanted.record_bytes < 4096


def test_a_flash_block_fills_its_units() -> None:
    """450,304 bytes and a header are 110 units: nothing is lost to padding."""
    wanted = label("a", payload_bytes=450_304)
    assert wanted.padded_bytes == wanted.record_bytes == 110 * 4096


def test_misuse_is_refused_with_what_was_found(memory: Memory) -> None:
    with pytest.raises(InvalidInput, match="digest is 32 bytes"):
        replace(label("a"), parent=b"short")
    with pytest.raises(InvalidInput, match="payload_bytes=0"):
        label("a", payload_bytes=0)
    with pytest.raises(InvalidInput, match="tokens=0"):
        label("a", tokens=0)
    with pytest.raises(InvalidInput, match="pieces have 5000 bytes, the label says 5001"):
        Record(label=label("a", payload_bytes=5001), parts=memory.blank(label("a")).parts)
    with pytest.raises(InvalidInput, match="256 bytes, not 255"):
        Parts(header=memoryview(bytearray(255)), payload=(memoryview(bytearray(1)),))
    with pytest.raises(InvalidInput, match="not the units"):
        Parts.of_units([memoryview(bytearray(4096))], 3841)
    words = memoryview(np.zeros(64, np.int32))
    with pytest.raises(InvalidInput, match="one row of bytes"):
        Parts(header=words, payload=(memoryview(bytearray(1)),))


def test_a_region_knows_its_memory() -> None:
    memory = memoryview(bytearray(1000))
    region = Region(name="a", memory=memory[100:900])
    assert region.holds(memory[100:900])
    assert region.holds(memory[500:501])
    assert not region.holds(memory[99:200])
    assert not region.holds(memory[800:901])


def test_tiers_load_no_torch() -> None:
    """Not with the commands either."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import dsv4.tiers.record, dsv4.tiers.tier, dsv4.tiers.host, dsv4.tiers.disk\n"
        "import dsv4.tiers.mooncake, dsv4.tiers.object, dsv4.cli\n"
        "from dsv4.tiers.host import HostTier\n"
        "HostTier(1 << 20).close(1.0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_without_xxhash_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from dsv4.errors import MissingExtra\n"
        "try:\n    import dsv4.tiers.record\n"
        "except MissingExtra as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "dsv4[tiers]" in ran.stdout, ran.stderr

"""What a tier keeps: one row of an arena after a header of 256 bytes. Torch-free.

    offset  bytes  field                     offset  bytes  field
         0      8  magic                         32     32  digest
         8      2  version                       64     32  parent
        10      2  kind                          96     32  content fingerprint
        12      4  bytes of the header          128     16  xxh3-128 of the payload
        16      8  bytes of the payload         144    104  zeros; with a key 32 of a MAC first
        24      8  tokens                       248      8  xxh3-64 of the 248 bytes before

Numbers are little-endian. The payload follows. On disk and in host memory a record fills whole
units of 4 KiB, the last one with zeros.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from dsv4.errors import InvalidInput, require_count
from dsv4.extras import needed_by
from dsv4.tiers.key import RECORD_VERSION as RECORD_VERSION
from dsv4.tiers.key import Key as Key
from dsv4.tiers.key import Kind as Kind
from dsv4.tiers.secret import BOX_BYTES, MAC_BYTES, Secret, same
from dsv4.tiers.sizes import HEADER_BYTES, UNIT_BYTES, padded

with needed_by("a tier"):
    import xxhash

KEYED_VERSION = 0x8001  # of records with a MAC: the top bit
ENCRYPTED_VERSION = 0xC001  # of those that are encrypted: the next bit too
DIGEST_BYTES = 32
MAGIC = b"\x89DSV4\r\n\0"  # a text-mode copy, a lost high bit or a lost zero breaks it
_FIELDS = struct.Struct("<8sHHIQQ32s32s32s16s")
_HEADER_SUM = struct.Struct("<Q")
_SUMMED = HEADER_BYTES - _HEADER_SUM.size
_ZEROS = bytes(_SUMMED - _FIELDS.size)
_MAC = slice(_FIELDS.size, _FIELDS.size + MAC_BYTES)
_BOX = slice(_MAC.stop, _MAC.stop + BOX_BYTES)
# how many bytes come after the fields, by version
_EXTRA = {RECORD_VERSION: 0, KEYED_VERSION: MAC_BYTES, ENCRYPTED_VERSION: MAC_BYTES + BOX_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a record says of itself: written when it is stored, compared when it is loaded.

    `tokens` counts from the start of the prompt to the end of the record. `parent` is the chain
    digest of the block before it (the chain's root before the first); that of a state is the last
    whole block's. `fingerprint` is the schema's content fingerprint. With a `secret` the record is
    sealed with it, and refused if what is loaded is not. `owner`, whose quota the record counts
    for, is the chain's root: it is not written, because it follows from the parents.
    """

    kind: Kind
    digest: bytes
    parent: bytes
    fingerprint: bytes
    tokens: int
    payload_bytes: int
    secret: Secret | None = field(default=None, compare=False, repr=False)
    owner: bytes = field(default=b"", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("digest", "parent", "fingerprint"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
                raise InvalidInput(f"{name}={value!r}: a digest is {DIGEST_BYTES} bytes")
        require_count("tokens", self.tokens)
        require_count("payload_bytes", self.payload_bytes)

    @property
    def key(self) -> Key:
        return Key(self.kind, self.digest)

    @property
    def leans_on(self) -> Key:
        """The block without which this record is useless."""
        own = self.kind is Kind.SNAPSHOT
        return Key(Kind.BLOCK, self.digest if own else self.parent)

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    @property
    def padded_bytes(self) -> int:
        """The record in whole units of 4 KiB."""
        return padded(self.record_bytes)


# ---- memory --------------------------------------------------------------------------------------


def address(memory: memoryview) -> int:
    """Where a piece of memory lies."""
    where: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return where


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory that parts point into: an arena, or staging rows. Tiers that move bytes by address
    must know it in advance."""

    name: str
    memory: memoryview

    def holds(self, piece: memoryview) -> bool:
        start, own = address(piece), address(self.memory)
        return own <= start and start + piece.nbytes <= own + self.memory.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The memory of a record: its header, then its payload in one or more pieces.

    `whole` is set if all of it, padding included, lies in pieces that start and end at units of
    4 KiB: a disk then needs no copy.
    """

    header: memoryview
    payload: tuple[memoryview, ...]
    whole: tuple[memoryview, ...] = ()

    def __post_init__(self) -> None:
        for piece in (self.header, *self.payload, *self.whole):
            if piece.itemsize != 1 or piece.ndim != 1 or not piece.c_contiguous:
                raise InvalidInput("the pieces of a record are one row of bytes each")
        if self.header.nbytes != HEADER_BYTES:
            raise InvalidInput(f"a header has {HEADER_BYTES} bytes, not {self.header.nbytes}")

    @property
    def payload_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.payload)

    @property
    def pieces(self) -> tuple[memoryview, ...]:
        return (self.header, *self.payload)

    @staticmethod
    def of_units(whole: Sequence[memoryview], payload_bytes: int) -> Parts:
        """A record over memory in units of 4 KiB: header first, padding last. The padding is zeroed
        here, the rest is left unchanged."""
        sizes = [piece.nbytes for piece in whole]
        if sum(sizes) != padded(HEADER_BYTES + payload_bytes) or any(n % UNIT_BYTES for n in sizes):
            raise InvalidInput(
                f"pieces of {sizes} bytes are not the units of a record of {HEADER_BYTES} + "
                f"{payload_bytes} bytes"
            )
        payload, left, skip = [], payload_bytes, HEADER_BYTES
        for piece in whole:
            payload.append(piece[skip : skip + left])
            left, skip = left - payload[-1].nbytes, 0
        unused = sum(sizes) - HEADER_BYTES - payload_bytes
        if unused:
            whole[-1][-unused:] = bytes(unused)
        return Parts(header=whole[0][:HEADER_BYTES], payload=tuple(payload), whole=tuple(whole))

    @staticmethod
    def alone(label: Label) -> Parts:
        """A record in memory of its own, zeroed and in whole units."""
        memory = memoryview(mmap.mmap(-1, label.padded_bytes))
        return Parts.of_units([memory], label.payload_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A label and the memory that goes with it. `sealed`: the header is already in place."""

    label: Label
    parts: Parts
    sealed: bool = False

    def __post_init__(self) -> None:
        if self.parts.payload_bytes != self.label.payload_bytes:
            raise InvalidInput(
                f"the pieces have {self.parts.payload_bytes} bytes, the label says "
                f"{self.label.payload_bytes}"
            )

    @property
    def key(self) -> Key:
        return self.label.key


# ---- header --------------------------------------------------------------------------------------


class Reason(StrEnum):
    """Why a record is refused: the field that is not what was asked for."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    HEADER_SUM = "header_sum"
    HEADER_BYTES = "header_bytes"
    ZEROS = "zeros"
    KIND = "kind"
    DIGEST = "digest"
    PARENT = "parent"
    FINGERPRINT = "fingerprint"
    TOKENS = "tokens"
    PAYLOAD_BYTES = "payload_bytes"
    PAYLOAD_SUM = "payload_sum"
    MAC = "mac"  # of another key, or changed, or with a key where there should be none
    FOREIGN = "foreign"  # something else is where a record should be
    UNREADABLE = "unreadable"  # the system reports an error for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What was found where something else was asked for."""

    reason: Reason
    found: str
    asked: str

    def __str__(self) -> str:
        return f"{self.reason}: found {self.found}, asked for {self.asked}"


def payload_sum(pieces: Sequence[memoryview]) -> bytes:
    """xxh3-128 of the payload, wherever its pieces lie."""
    return xxhash.xxh3_128_digest(pieces[0]) if len(pieces) == 1 else sum_of(pieces)


def sum_of(pieces: Iterable[memoryview | bytes]) -> bytes:
    """The same for pieces that come one after another."""
    running = xxhash.xxh3_128()
    for piece in pieces:
        running.update(piece)
    return running.digest()


def pack_header(
    label: Label, payload_digest: bytes, payload: Sequence[memoryview] = (), *, box: bytes = b""
) -> bytes:
    """The 256 bytes before a payload with this sum. With a key either the payload is needed, or the
    `box` of an encrypted one, which has a tag of it."""
    keyed_version = ENCRYPTED_VERSION if box else KEYED_VERSION
    fields = _FIELDS.pack(
        MAGIC,
        RECORD_VERSION if label.secret is None else keyed_version,
        label.kind,
        HEADER_BYTES,
        label.payload_bytes,
        label.tokens,
        label.digest,
        label.parent,
        label.fingerprint,
        payload_digest,
    )
    rest = _ZEROS
    if label.secret is not None:
        rest = (label.secret.record_mac([fields, box, *payload]) + box).ljust(len(_ZEROS), b"\0")
    summed = fields + rest
    return summed + _HEADER_SUM.pack(xxhash.xxh3_64_intdigest(summed))


def seal(record: Record) -> None:
    """Sums the payload and writes the header into the record's memory."""
    parts = record.parts
    parts.header[:] = pack_header(record.label, payload_sum(parts.payload), parts.payload)


def read_header(header: bytes | memoryview) -> tuple[Label, bytes] | Refusal:
    """A header's label and payload sum, if the header is whole and of this version."""
    if len(header) != HEADER_BYTES:
        return Refusal(
            reason=Reason.SHORT, found=f"{len(header)} bytes", asked=f"{HEADER_BYTES} of a header"
        )
    magic, version, kind, header_bytes, *rest = _FIELDS.unpack_from(header)
    payload_bytes, tokens, digest, parent, fingerprint, total = rest
    own_sum = xxhash.xxh3_64_intdigest(header[:_SUMMED])
    zeros = bytes(header[_FIELDS.size + _EXTRA.get(version, 0) : _SUMMED])
    for reason, found, asked in (
        (Reason.MAGIC, magic, MAGIC),
        (Reason.VERSION, version, version if version in _EXTRA else RECORD_VERSION),
        (Reason.HEADER_SUM, _HEADER_SUM.unpack_from(header, _SUMMED)[0], own_sum),
        (Reason.HEADER_BYTES, header_bytes, HEADER_BYTES),
        (Reason.ZEROS, zeros, bytes(len(zeros))),
    ):
        if found != asked:
            return _refusal(reason, found, asked)
    if kind not in {*Kind} or not tokens or not payload_bytes:
        found = f"kind {kind}, {tokens} tokens, {payload_bytes} bytes"
        return Refusal(reason=Reason.KIND, found=found, asked="a block, a snapshot or a state")
    label = Label(
        kind=Kind(kind),
        digest=digest,
        parent=parent,
        fingerprint=fingerprint,
        tokens=tokens,
        payload_bytes=payload_bytes,
    )
    return label, total


def check(record: Record) -> Refusal | None:
    """Returns None if the record's memory holds what its label says, header and payload; otherwise
    what was found instead."""
    found = read_header(record.parts.header)
    if isinstance(found, Refusal):
        return found
    label, total = found
    refusal = label_refusal(label, record.label)
    refusal = refusal or payload_refusal(payload_sum(record.parts.payload), total)
    if refusal is None and box_of(record.parts.header):
        refusal = Refusal(reason=Reason.MAC, found="an encrypted record", asked="a plain one")
    return refusal or mac_refusal(record.parts.header, record.parts.payload, record.label.secret)


def mac_refusal(
    header: bytes | memoryview, payload: Iterable[memoryview | bytes], secret: Secret | None
) -> Refusal | None:
    """Why a whole record is refused if it is asked for with this key, or without one. For an
    encrypted one no payload is needed: then its tag must be checked too. The refusal shows no
    MAC: a reader could use the right one."""
    keyed = is_keyed(header)
    if secret is None:
        if not keyed:
            return None
        found, asked = "a record with a key", "one without"
    elif not keyed:
        found, asked = "a record without a key", "one with it"
    else:
        found, asked = "another MAC", "that of this key"
        mac = secret.record_mac([bytes(header[: _FIELDS.size]), box_of(header), *payload])
        if same(mac, bytes(header[_MAC])):
            return None
    return Refusal(reason=Reason.MAC, found=found, asked=asked)


def is_keyed(header: bytes | memoryview) -> bool:
    """Whether a header that `read_header` accepts has a MAC."""
    version: int = _FIELDS.unpack_from(header)[1]
    return version != RECORD_VERSION


def box_of(header: bytes | memoryview) -> bytes:
    """What decrypts the payload after such a header, with the key; empty if it is not encrypted."""
    return bytes(header[_BOX]) if _FIELDS.unpack_from(header)[1] == ENCRYPTED_VERSION else b""


def label_refusal(got: Label, asked: Label) -> Refusal | None:
    """Why a record with this label is refused where another one is asked for."""
    for difference in _differences(got, asked):
        return _refusal(*difference)
    return None


def payload_refusal(actual: bytes, total: bytes) -> Refusal | None:
    """Why a payload with this sum is refused if its header has another sum."""
    return None if actual == total else _refusal(Reason.PAYLOAD_SUM, actual, total)


def _differences(got: Label, asked: Label) -> Iterator[tuple[Reason, object, object]]:
    for reason in (
        *(Reason.KIND, Reason.DIGEST, Reason.FINGERPRINT, Reason.PARENT),
        *(Reason.TOKENS, Reason.PAYLOAD_BYTES),
    ):
        a, b = getattr(got, reason.value), getattr(asked, reason.value)
        if a != b:
            yield reason, a, b


def _refusal(reason: Reason, found: object, asked: object) -> Refusal:
    return Refusal(reason=reason, found=_shown(found), asked=_shown(asked))


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex() if len(value) <= DIGEST_BYTES else f"{len(value)} bytes"
    return str(value)

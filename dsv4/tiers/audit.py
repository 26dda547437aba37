"""What is in a disk tier's directory, seen from outside: for commands. Torch-free."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv4.tiers.encryption import file_refusal
from dsv4.tiers.index import forget
from dsv4.tiers.record import (
    Kind,
    Label,
    Reason,
    Refusal,
    is_keyed,
    payload_refusal,
    read_header,
    sum_of,
)
from dsv4.tiers.secret import Secret
from dsv4.tiers.shelves import Found, Other, Shelves
from dsv4.tiers.sizes import HEADER_BYTES

_PIECE_BYTES = 1 << 20  # read at a time, whatever a header says


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A record's file and what it says of itself, or why it is not a record."""

    file: Found
    label: Label | None = None
    refusal: Refusal | None = None


class Audit:
    """A directory that is only looked at, except by `remove` and `sweep`. Safe while processes use
    it: what they remove meanwhile is left out. Raises InvalidInput if there is none.

    `others` are files of other record versions, `unreadable` the shelves that cannot be opened or
    read, and why. With a secret, records with a key are checked with it: those of another one are
    refused. Without, only their sums are."""

    def __init__(self, root: Path, secret: Secret | None = None) -> None:
        self._secret = secret
        self._shelves = Shelves(root, create=False)
        self.files = sorted(self._shelves.scan(), key=lambda file: file.used_ns)
        self.others = sorted(self._shelves.others(), key=lambda file: file.used_ns)
        self.unreadable = [(shelf, said(error)) for shelf, error in self._shelves.unreadable]

    @property
    def total_bytes(self) -> int:
        files: list[Found | Other] = [*self.files, *self.others]
        return sum(file.size_bytes for file in files)

    def headers(self) -> Iterator[Audited]:
        """Every record by its header alone, the longest unused first."""
        return self._each(whole=False)

    def checked(self) -> Iterator[Audited]:
        """Every record with all sums checked, the longest unused first."""
        return self._each(whole=True)

    def by_use(self, headers: Iterable[Audited]) -> list[Found]:
        """Files in the order in which a tier would remove them: the longest unused first, where
        using a record also uses all that it leans on, and none before what leans on it."""
        labels = {each.file.key: each.label for each in headers if each.label is not None}
        used_ns = {file.key: file.used_ns for file in self.files}

        def depth(file: Found) -> tuple[int, bool]:
            label = labels.get(file.key)
            return (0 if label is None else label.tokens), file.key.kind is not Kind.BLOCK

        deepest_first = sorted(self.files, key=depth, reverse=True)
        for file in deepest_first:
            label = labels.get(file.key)
            if label is not None and label.leans_on in used_ns:
                used_ns[label.leans_on] = max(used_ns[label.leans_on], used_ns[file.key])
        return [
            Found(file.key, file.size_bytes, used_ns[file.key])
            for file in sorted(deepest_first, key=lambda file: used_ns[file.key])
        ]

    def remove(self, files: Iterable[Found | Other]) -> list[tuple[str, str]]:
        """Removes files. Returns those that stay, and why."""
        gone: list[Found | Other] = []
        stay = []
        for file in files:
            try:
                if isinstance(file, Other):
                    self._shelves.remove_other(file.path)
                else:
                    self._shelves.remove(file.key)
                gone.append(file)
            except OSError as error:
                name = file.path if isinstance(file, Other) else str(file.key)
                stay.append((name, said(error)))
        keys = [file.key for file in gone if isinstance(file, Found)]
        forget(self._shelves, keys, [file.path for file in gone if isinstance(file, Other)])
        return stay

    def sweep(self) -> int:
        """Removes temporary files that have lost their writers; returns their number."""
        return self._shelves.sweep()

    def close(self) -> None:
        self._shelves.close()

    def _each(self, *, whole: bool) -> Iterator[Audited]:
        for file in self.files:
            try:
                if self._shelves.is_foreign(file.key):
                    refusal = Refusal(reason=Reason.FOREIGN, found="no file", asked="a record")
                    yield Audited(file=file, refusal=refusal)
                    continue
                fd = self._shelves.open(file.key)
                try:
                    audited = _audited(fd, file, whole, self._secret)
                finally:
                    os.close(fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                refusal = Refusal(reason=Reason.UNREADABLE, found=said(error), asked="a record")
                audited = Audited(file=file, refusal=refusal)
            yield audited


def said(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"


def _audited(fd: int, file: Found, whole: bool, secret: Secret | None) -> Audited:
    header = os.pread(fd, HEADER_BYTES, 0)
    found = read_header(header)
    if isinstance(found, Refusal):
        return Audited(file=file, refusal=found)
    label, total = found
    refusal = None
    if label.key != file.key:
        name = file.key.digest.hex()
        refusal = Refusal(reason=Reason.DIGEST, found=str(label.key), asked=f"{name} by its name")
    elif file.size_bytes != label.padded_bytes:
        short = file.size_bytes < label.padded_bytes
        refusal = Refusal(
            reason=Reason.SHORT if short else Reason.PAYLOAD_BYTES,
            found=f"{file.size_bytes} bytes",
            asked=f"{label.padded_bytes}",
        )
    elif whole:
        refusal = payload_refusal(sum_of(_payload(fd, label)), total)
        if refusal is None and secret is not None and is_keyed(header):
            refusal = file_refusal(header, label.digest, _payload(fd, label), secret)
    return Audited(file=file, label=label, refusal=refusal)


def _payload(fd: int, label: Label) -> Iterator[bytes]:
    at, end = HEADER_BYTES, label.record_bytes
    while at < end and (piece := os.pread(fd, min(_PIECE_BYTES, end - at), at)):
        yield piece
        at += len(piece)

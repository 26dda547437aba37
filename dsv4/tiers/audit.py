"""What is in a disk tier's directory, looked at from outside: for commands. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv4.tiers.record import Key, Label, Parts, Reason, Record, Refusal, check, read_header
from dsv4.tiers.shelves import Found, Shelves, read_at
from dsv4.tiers.sizes import HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A record's file and what it says of itself, or why it is none."""

    file: Found
    label: Label | None = None
    refusal: Refusal | None = None


class Audit:
    """A directory that is only looked at, but for `remove` and `sweep`. Safe beside processes that
    use it: what they remove meanwhile is left out. Raises InvalidInput if there is none."""

    def __init__(self, root: Path) -> None:
        self._shelves = Shelves(root, create=False)
        self.files = sorted(self._shelves.scan(), key=lambda file: file.used_ns)

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def headers(self) -> Iterator[Audited]:
        """Every record by its header alone, the longest unused first."""
        return self._each(whole=False)

    def checked(self) -> Iterator[Audited]:
        """Every record with all sums checked, the longest unused first."""
        return self._each(whole=True)

    def remove(self, keys: Iterable[Key]) -> None:
        """Takes records away. Raises OSError."""
        for key in keys:
            self._shelves.remove(key)

    def sweep(self) -> int:
        """Removes temporary files that have lost their writers, and counts them."""
        return self._shelves.sweep()

    def close(self) -> None:
        self._shelves.close()

    def _each(self, *, whole: bool) -> Iterator[Audited]:
        for file in self.files:
            if self._shelves.is_foreign(file.key):
                refusal = Refusal(reason=Reason.FOREIGN, found="no file", asked="a record")
                yield Audited(file=file, refusal=refusal)
                continue
            try:
                fd = self._shelves.open(file.key)
            except FileNotFoundError:
                continue
            try:
                yield _audited(fd, file, whole)
            finally:
                os.close(fd)


def _audited(fd: int, file: Found, whole: bool) -> Audited:
    found = read_header(os.pread(fd, HEADER_BYTES, 0))
    if isinstance(found, Refusal):
        return Audited(file=file, refusal=found)
    label, _ = found
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
        record = Record(label=label, parts=Parts.alone(label))
        read_at(fd, record.parts.whole)
        refusal = check(record)
    return Audited(file=file, label=label, refusal=refusal)

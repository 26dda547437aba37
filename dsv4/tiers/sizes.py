"""How large a record is where it is kept. Needs nothing, not even the extra of tiers."""

from __future__ import annotations

HEADER_BYTES = 256
UNIT_BYTES = 4096  # the unit of O_DIRECT, mmap and cudaHostRegister


def padded(count_bytes: int) -> int:
    """A number of bytes rounded up to whole units of 4 KiB."""
    return -(-count_bytes // UNIT_BYTES) * UNIT_BYTES

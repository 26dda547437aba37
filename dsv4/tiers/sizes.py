"""How large a record is where it is kept. Needs nothing, not even the extra of tiers."""

from __future__ import annotations

HEADER_BYTES = 256
UNIT_BYTES = 4096  # what O_DIRECT, mmap and cudaHostRegister count in


def padded(count_bytes: int) -> int:
    """So many bytes in whole units of 4 KiB."""
    return -(-count_bytes // UNIT_BYTES) * UNIT_BYTES

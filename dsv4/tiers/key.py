"""The names of records. Needs nothing, not even the extra of tiers."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

RECORD_VERSION = 1  # of names, and of records without a key


class Kind(IntEnum):
    """What the payload is."""

    BLOCK = 1  # a row of the block arena
    SNAPSHOT = 2  # a row of the snapshot pool
    STATE = 3  # a live request's slot at any length, independent of ring sizes

    @property
    def letter(self) -> str:
        return "?bst"[self]


_KINDS = {kind.letter: kind for kind in Kind}
_KEY = re.compile(r"dsv4/([0-9]{1,5})/([bst])/([0-9a-f]{64})", re.ASCII)


class Key(NamedTuple):
    """The name of a record in every tier. It has no rank: the cache is the same on all of them."""

    kind: Kind
    digest: bytes

    def __str__(self) -> str:
        return f"dsv4/{RECORD_VERSION}/{self.kind.letter}/{self.digest.hex()}"

    @staticmethod
    def parse(text: str) -> Key | None:
        """The inverse of str(); None for a key of another version, and for anything else."""
        found = _KEY.fullmatch(text)
        if found is None or found[1] != str(RECORD_VERSION):
            return None
        return Key(_KINDS[found[2]], bytes.fromhex(found[3]))

"""One cached block in the tree of prefixes. Torch-free."""

from __future__ import annotations


class PrefixNode:
    """`depth` says which block of its prompts it is, from 0. `children` counts the cached blocks
    that come right after it, `pins` what keeps it whatever the pressure. `snapshot` is the row of
    the state at its end, if that is kept; `stored` says that a tier has its bytes, or had them when
    it was asked last. `last_use` and `queued` are the eviction policy's."""

    __slots__ = (
        "block_id",
        "children",
        "depth",
        "digest",
        "last_use",
        "parent",
        "pins",
        "queued",
        "snapshot",
        "stored",
    )

    def __init__(self, digest: bytes, block_id: int, parent: PrefixNode | None) -> None:
        self.digest, self.block_id, self.parent = digest, block_id, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children = self.pins = self.last_use = 0
        self.snapshot: int | None = None
        self.queued = self.stored = False

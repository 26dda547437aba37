"""A live request, as the manager's caller sees it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Request:
    """What one request holds. The manager changes it; callers read it.

    Token positions, as the last commit left them:
      [0, length)              computed: entries in blocks, the rest in the slot
      [length, end of blocks)  paid for: blocks are there, nothing is written
    """

    slot: int
    serial: int
    length: int = 0
    block_ids: list[int] = field(default_factory=list)
    published_blocks: int = 0
    released: bool = False
    manager_key: object = field(default=None, repr=False)

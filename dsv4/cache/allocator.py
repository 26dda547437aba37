"""Who owns which block: a free list with reference counts.

Blocks are taken and given back only between captured graphs. The order is deterministic: the block
that was freed last is taken first (of one release: in its order), and a fresh pool hands out
0, 1, 2, …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dsv4.errors import Dsv4Error, InvalidInput, OutOfBlocks


class BlockAllocator:
    """A fixed set of block ids. A block is free (0 references) or held by one or more owners."""

    def __init__(self, total: int) -> None:
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise InvalidInput(f"a pool of {total!r} blocks: must be a whole number, 0 or more")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    def references(self, block_id: int) -> int:
        return self._references[self._known(block_id)]

    def can_take(self, count: int) -> bool:
        return 0 <= count <= self.free

    def take(self, count: int, *, asker_blocks: int | None = None) -> list[int]:
        """`count` free blocks, each with one reference, or OutOfBlocks and nothing taken.

        `asker_blocks` is what the asker would hold in all (default: just these), so that the error
        can tell "wait" from "never".
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidInput(f"cannot take {count!r} blocks: give a whole number, 0 or more")
        if count > self.free:
            raise OutOfBlocks(
                needed=count,
                free=self.free,
                total=self.total,
                asker_blocks=count if asker_blocks is None else asker_blocks,
            )
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """One more owner for each of these blocks, which must be held."""
        for block_id in block_ids:
            if not self._references[self._known(block_id)]:
                raise InvalidInput(f"block {block_id} is free: only a held block can be shared")
        for block_id in block_ids:
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """One owner less for each; the ids that became free are returned, in the given order.

        Raises InvalidInput, with nothing released, if any would drop below zero.
        """
        if len(set(block_ids)) == len(block_ids):
            short = [b for b in block_ids if not self._references[self._known(b)]]
        else:
            counts = Counter(block_ids)
            short = [b for b, n in counts.items() if self._references[self._known(b)] < n]
        if short:
            raise InvalidInput(f"blocks {short[:8]} are released more often than they are held")
        freed = []
        for block_id in block_ids:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                freed.append(block_id)
        self._free.extend(reversed(freed))
        return freed

    def check_invariants(self) -> None:
        """Every block is either free once or referenced. Raises Dsv4Error otherwise."""
        listed = Counter(self._free)
        for block_id, references in enumerate(self._references):
            if references < 0 or listed[block_id] != (references == 0):
                raise Dsv4Error(
                    f"block {block_id} has {references} references and stands {listed[block_id]} "
                    f"times in the free list: the allocator's own state is broken"
                )
        unknown = [block_id for block_id in listed if not 0 <= block_id < self.total]
        if unknown:
            raise Dsv4Error(f"ids {unknown[:8]} in the free list of a pool of {self.total} blocks")

    def _known(self, block_id: int) -> int:
        if not 0 <= block_id < self.total:
            raise InvalidInput(f"block id {block_id} is not in this pool of {self.total}")
        return block_id

"""Ownership of blocks: a free list with reference counts, and what the prefix index keeps.

Blocks are taken and given back only between captured graphs. The order is deterministic: the block
that was freed last is taken first (of one release: in its order), and a fresh pool hands out
0, 1, 2, …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dsv4.errors import Dsv4Error, InvalidInput, OutOfBlocks, require_count


class BlockAllocator:
    """A fixed set of block ids. A block is held by one or more requests, or cached and idle (the
    prefix index keeps it, no request holds it), or in flight (it is being filled, and nothing reads
    it), or free."""

    def __init__(self, total: int) -> None:
        self.total = total = require_count("blocks", total, at_least=0)
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._cached = bytearray(total)
        self.cached = 0  # blocks the index keeps, idle or held
        self.idle = 0  # those of them that no request holds
        self._in_flight: set[int] = set()
        self._generations = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Blocks that requests hold."""
        return self.total - self.free - self.idle - self.in_flight

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def references(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._references[self._known(block_id)]

    def generation(self, block_id: int) -> int:
        """How often the block has become free: its content at another generation is gone."""
        return self._generations[self._known(block_id)]

    def is_taken(self, block_id: int) -> bool:
        """Whether the block is not free."""
        held = self._references[block_id] > 0 or bool(self._cached[block_id])
        return held or block_id in self._in_flight

    def is_shared(self, block_id: int) -> bool:
        """Whether anything besides one request relies on its bytes: another request or the
        index."""
        return self._references[block_id] > 1 or bool(self._cached[block_id])

    def take(self, count: int, *, asker_blocks: int | None = None) -> list[int]:
        """`count` free blocks, each with one reference, or OutOfBlocks and nothing taken.

        `asker_blocks` is what the asker would hold in all (default: just these), so that the error
        can distinguish "wait" from "never".
        """
        if require_count("blocks", count, at_least=0) > self.free:
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

    def next_ids(self, count: int, freed: Sequence[int] = ()) -> list[int]:
        """What `take(count)` would return, had these blocks been freed before it. Takes nothing."""
        listed = [*self._free[max(0, len(self._free) - count) :], *freed]
        return listed[: -count - 1 : -1] if count else []

    def share(self, block_ids: Sequence[int]) -> None:
        """One more owner for each of these blocks, which must be held or cached."""
        if not block_ids:
            return
        references, cached = self._references, self._cached
        self._known(min(block_ids))
        self._known(max(block_ids))
        for block_id in block_ids:
            if not references[block_id] and not cached[block_id]:
                raise InvalidInput(f"block {block_id} is free: only a held block can be shared")
        for block_id in block_ids:
            if not references[block_id]:
                self.idle -= 1
            references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """Removes one owner of each; returns the ids that became free, in the given order.
        Cached blocks become idle instead.

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
            if self._references[block_id]:
                continue
            if self._cached[block_id]:
                self.idle += 1
            else:
                freed.append(block_id)
        self._free_again(freed)
        return freed

    def left_by(self, holders: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The blocks that would become free, and those that would become idle, if these holders
        released what they hold."""
        counts = Counter(block_id for block_ids in holders for block_id in block_ids)
        left = [b for b, count in counts.items() if self._references[b] == count]
        return [b for b in left if not self._cached[b]], [b for b in left if self._cached[b]]

    def keep(self, block_id: int) -> None:
        """The index keeps a held block: it outlives the requests that hold it."""
        known = 0 <= block_id < self.total
        if not known or not self._references[block_id] or self._cached[block_id]:
            raise InvalidInput(f"block {block_id} is free or cached already: it cannot be cached")
        self._cached[block_id] = True
        self.cached += 1

    def drop(self, block_id: int) -> None:
        """The index gives up a block, which is free as soon as no request holds it."""
        if not self._cached[self._known(block_id)]:
            raise InvalidInput(f"block {block_id} is not cached")
        self._cached[block_id] = False
        self.cached -= 1
        if not self._references[block_id]:
            self.idle -= 1
            self._free_again([block_id])

    def take_in_flight(self, count: int) -> list[int]:
        """`count` free blocks, which must exist, for bytes that will arrive."""
        taken = self.take(count)
        self._in_flight.update(taken)
        for block_id in taken:
            self._references[block_id] = 0
        return taken

    def land(self, block_id: int) -> None:
        """The bytes of a block in flight have arrived: the index keeps it, idle."""
        self._in_flight.remove(block_id)
        self._cached[block_id] = True
        self.cached += 1
        self.idle += 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Blocks in flight are free again."""
        if not self._in_flight.issuperset(block_ids):
            raise InvalidInput(f"blocks {list(block_ids)[:8]} are not all in flight")
        self._in_flight.difference_update(block_ids)
        self._free_again(block_ids)

    def arrive(self, block_ids: Sequence[int]) -> None:
        """The bytes of blocks in flight have arrived: a request holds them."""
        if not self._in_flight.issuperset(block_ids):
            raise InvalidInput(f"blocks {list(block_ids)[:8]} are not all in flight")
        for block_id in block_ids:
            self._references[block_id] = 1
        self._in_flight.difference_update(block_ids)

    def _free_again(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._generations[block_id] += 1
        self._free.extend(reversed(block_ids))

    def check_invariants(self) -> None:
        """Every block is free once, or held, or cached, or in flight. Raises Dsv4Error
        otherwise."""
        listed = Counter(self._free)
        for block_id, references in enumerate(self._references):
            in_flight = block_id in self._in_flight
            if in_flight and (references or self._cached[block_id]):
                raise Dsv4Error(f"block {block_id} is in flight, but a request reads it")
            free = references == 0 and not self._cached[block_id] and not in_flight
            if references < 0 or listed[block_id] != free:
                raise Dsv4Error(
                    f"block {block_id} has {references} references and is {listed[block_id]} "
                    f"times in the free list: the allocator's own state is broken"
                )
        idle = sum(not r and bool(c) for r, c in zip(self._references, self._cached, strict=True))
        if (idle, sum(self._cached)) != (self.idle, self.cached):
            raise Dsv4Error(
                f"{idle} of {sum(self._cached)} cached blocks are idle, but {self.idle} of "
                f"{self.cached} were counted: the allocator's own state is broken"
            )
        unknown = [block_id for block_id in listed if not 0 <= block_id < self.total]
        if unknown:
            raise Dsv4Error(f"ids {unknown[:8]} in the free list of a pool of {self.total} blocks")

    def _known(self, block_id: int) -> int:
        if not 0 <= block_id < self.total:
            raise InvalidInput(f"block id {block_id} is not in this pool of {self.total}")
        return block_id

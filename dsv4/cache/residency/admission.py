"""How requests begin and go back where entries may be in host memory: their blocks get rows on the
device, and what a slot has fetched is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from dsv4.cache.admission import Admission, Fill
from dsv4.cache.changes import LOGGER, Guard
from dsv4.cache.memory import CacheMemory
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.none import NoPrefix
from dsv4.cache.prefix.resume import PrefixMatch, Resume
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import Request, RequestTable
from dsv4.cache.residency.residency import Residency

if TYPE_CHECKING:
    from dsv4.cache.handoff.arrival import Arrival


class ResidentAdmission(Admission):
    """An unfinished block always has a row; a block that comes from the prefix cache needs none."""

    def __init__(
        self,
        table: RequestTable,
        memory: CacheMemory,
        prefix: PrefixCache | NoPrefix,
        guard: Guard,
        residency: Residency,
    ) -> None:
        super().__init__(table, memory, prefix, guard)
        self._residency = residency
        self._lent: Sequence[int] = ()  # rows for the state that is being restored

    def begin(self, count: int) -> Request:
        self._residency.forget_hot(self._table.free_slots[-1])
        return super().begin(count)

    def _after(self, match: PrefixMatch, trail: TokenTrail, fill: Fill) -> Request:
        residency, resume = self._residency, match.resume
        shared = [node.block_id for node in match.nodes]
        is_inside = resume.source == "state" and resume.start % self._schema.block_tokens > 0

        def fill_both(slot: int, begun: Sequence[int]) -> None:
            residency.forget_hot(slot)
            if match.nodes or begun:
                residency.tables.publish(slot, 0, [*shared, *begun], rows)
            self._lent = rows
            fill(slot, begun)

        with residency.lending(int(is_inside), keep=shared) as rows:
            request = super()._after(match, trail, fill_both)
        residency.settle(request.block_ids[len(shared) :][: len(rows)], rows, len(shared))
        residency.places.touch(shared)
        return request

    def arrived(self, arrival: Arrival, slot_bytes: Tensor, block_bytes: Tensor) -> Request:
        residency, table, landing = self._residency, self._table, arrival.landing
        slot, block_ids = table.holdings[arrival].slot, [*landing.shared, *landing.block_ids]
        assert slot is not None
        is_inside = arrival.tokens % self._schema.block_tokens > 0
        with residency.lending(int(is_inside), keep=block_ids) as rows:
            residency.forget_hot(slot)
            if block_ids:
                residency.tables.publish(slot, 0, block_ids, rows)
            self._lent = rows
            request = super().arrived(arrival, slot_bytes, block_bytes)
        residency.begin(request)
        residency.settle(block_ids[len(block_ids) - len(rows) :], rows, len(block_ids) - 1)
        residency.places.touch(landing.shared)
        return request

    def _enter(self, request: Request) -> Request:
        self._residency.begin(request)
        return super()._enter(request)

    def _put_state(
        self, slot: int, begun: Sequence[int], slot_bytes: Tensor, block_bytes: Tensor
    ) -> None:
        """`block_bytes` are first the bytes of the block that stay on the device, then its
        entries."""
        stays = self._schema.bytes.block
        super()._put_state(slot, begun, slot_bytes, block_bytes[:stays])
        for row in self._lent:
            self._residency.put_block(row, block_bytes[stays:])

    def _fork(self, request: Request, count: int) -> list[Request]:
        residency, table = self._residency, self._table
        whole = max(request.length, request.reused_tokens) // self._schema.block_tokens
        has_more = self._schema.blocks_for(request.length) > whole
        for slot in table.free_slots[: -count - 1 : -1] if count else ():
            residency.forget_hot(slot)
        with residency.lending(count * has_more) as rows:
            forks = super()._fork(request, count)
            try:
                for nth, fork in enumerate(forks):
                    residency.begin(fork)
                    if fork.block_ids:
                        own = rows[nth : nth + 1]
                        residency.tables.publish(fork.slot, 0, fork.block_ids, own)
                if rows:
                    residency.copy_block(request.block_ids[whole], rows)
            except BaseException:
                for fork in forks:
                    table.close(fork)
                raise
        for fork, row in zip(forks, rows, strict=False):
            residency.settle([fork.block_ids[whole]], [row], whole)
        return forks

    def _rewind(self, request: Request, length: int) -> Resume:
        self._residency.forget_hot(request.slot)
        resume = super()._rewind(request, length)
        self._residency.go_back(request)
        return resume

    def reset(self, request: Request) -> None:
        self._residency.forget_hot(request.slot)
        super().reset(request)
        self._residency.start_over(request)

    def exchange(self, request: Request, first: int, block_ids: Sequence[int]) -> None:
        if self._residency.must_stay(request, block_ids):
            return  # the next commit tries again
        try:
            self._residency.tables.publish(request.slot, first, block_ids)
        except RuntimeError as error:
            LOGGER.warning("%d equal blocks are kept twice: %s", len(block_ids), error)
        else:
            super().exchange(request, first, block_ids)
        if request.block_ids[first : first + len(block_ids)] != [*block_ids]:
            self._residency.restore(request, first, len(block_ids))

    def _own_unfinished_block(self, request: Request, length: int) -> None:
        block, inside = divmod(length, self._schema.block_tokens)
        if not inside or not self._table.allocator.is_shared(request.block_ids[block]):
            return
        with self._residency.lending(1) as rows:
            self._residency.copy_block(request.block_ids[block], rows)
            super()._own_unfinished_block(request, length)
        self._residency.settle([request.block_ids[block]], rows, block)

"""What a manager owns, and how blocks, slots and the device's table change hands."""

from __future__ import annotations

import numpy as np
import torch

from dsv4.backends import load_backend
from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.arena import Arena
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.paged_cache import PagedKVPool
from dsv4.cache.prefix.cache import PrefixCache, PrefixMatch
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.resume import ResumePlan
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import REQUEST_NUMBERS, Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state_cache import StateCachePool
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.step.checks import StepReader
from dsv4.cache.workspace import Workspace
from dsv4.errors import InvalidInput, require_count
from dsv4.ops.backend import BackendName


class ManagerBase:
    """Arenas, block table, slots, requests and the open plan."""

    def __init__(
        self,
        schema: CacheSchema,
        *,
        num_blocks: int,
        max_requests: int,
        max_step_tokens: int = 8192,
        device: torch.device | str = "cpu",
        backend: BackendName | None = None,
        prefix: PrefixOptions | None = None,
    ) -> None:
        for name, value in (
            ("num_blocks", num_blocks),
            ("max_requests", max_requests),
            ("max_step_tokens", max_step_tokens),
        ):
            least = 0 if name == "num_blocks" and not schema.block_bytes else 1
            require_count(name, value, at_least=least)
        self.schema = schema
        self.device = torch.device(device)
        self.max_requests = max_requests
        self.backend = load_backend(backend, self.device)
        for record in (schema.entry_format, schema.window_format, schema.index_format):
            self.backend.check_format(record)
        self.allocator = BlockAllocator(num_blocks)
        self.block_arena = Arena(schema, "block", num_blocks, self.device)
        self.slot_arena = Arena(schema, "slot", max_requests, self.device)
        self.block_table = torch.full(
            (max_requests, schema.max_blocks_per_request),
            -1,
            dtype=torch.int32,
            device=self.device,
        )
        self.buffers = StepBuffers(
            schema, max_requests=max_requests, max_tokens=max_step_tokens, device=self.device
        )
        self.workspace = Workspace(
            schema,
            self.backend,
            self.block_table,
            max_tokens=max_step_tokens,
            device=self.device,
        )
        self.prefix = (
            None if prefix is None else PrefixCache(schema, self.allocator, prefix, self.device)
        )
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._requests: dict[int, Request] = {}
        self._rows = np.zeros((REQUEST_NUMBERS, max_requests), dtype=np.int64)
        self._next_serial = 0
        self._step_reader = StepReader(schema, self._requests, self)
        self._open_plan: ForwardPlan | None = None
        self._handles = tuple(
            LayerCacheHandle(
                schema=schema,
                layer=layer,
                pool=PagedKVPool(schema, self.block_arena, layer),
                state=StateCachePool(schema, self.slot_arena, layer),
                block_arena=self.block_arena.bytes,
                slot_arena=self.slot_arena.bytes,
                block_table=self.block_table,
                buffers=self.buffers,
                workspace=self.workspace,
                backend=self.backend,
            )
            for layer in range(len(schema.layers))
        )

    # ---- blocks and slots ----------------------------------------------------------------------

    def _new_request(self, block_ids: list[int], resume: ResumePlan) -> Request:
        slot = self._free_slots.pop()
        request = Request(
            slot=slot,
            serial=self._next_serial,
            block_ids=block_ids,
            row=self._rows[:, slot],
            manager_key=self,
            resume=resume,
        )
        self._next_serial += 1
        self._requests[slot] = request
        return request

    def _take(self, count: int, *, asker_blocks: int | None = None) -> list[int]:
        """Free blocks; where they are too few, cached ones are evicted. Raises OutOfBlocks."""
        short = count - self.allocator.free
        if short > 0 and self.prefix is not None:
            self.prefix.evict(short)
        return self.allocator.take(count, asker_blocks=asker_blocks)

    def _resume(self, request: Request, match: PrefixMatch) -> None:
        """Puts a request where a match says it goes on, with the state it needs there."""
        assert self.prefix is not None
        self._restart(request, match.resume)
        self.prefix.put_state(match, self.slot_arena.bytes[request.slot])

    def _restart(self, request: Request, resume: ResumePlan) -> None:
        request.length = request.written_tokens = resume.start
        request.reused_tokens = resume.reused_tokens
        request.exact_from = resume.reused_tokens if resume.source == "replay" else resume.start
        request.resume = resume

    def _prefix_cache(self) -> PrefixCache:
        if self.prefix is None:
            raise InvalidInput(
                "this manager has no prefix cache: build it with prefix=PrefixOptions()"
            )
        return self.prefix

    def _own_unfinished_block(self, request: Request, length: int) -> None:
        """Makes sure that what the request writes from `length` on is in blocks of its own."""
        block, inside = divmod(length, self.schema.block_tokens)
        if not self.schema.block_bytes:
            return
        if inside and self.allocator.is_shared(old := request.block_ids[block]):
            (copy,) = self._take(1, asker_blocks=block + 1)
            self._copy_block(old, copy)
            self.allocator.release([old])
            request.block_ids[block] = copy
            self._publish(request, block, block + 1)
        behind = block + bool(inside)
        if any(map(self.allocator.is_shared, request.block_ids[behind:])):
            self._cut_blocks(request, behind)

    def _cut_blocks(self, request: Request, kept: int) -> None:
        self.allocator.release(request.block_ids[kept:])
        request.block_ids = request.block_ids[:kept]
        request.published_blocks = min(request.published_blocks, kept)

    def _copy_block(self, source: int, target: int) -> None:
        self.block_arena.bytes[target].copy_(self.block_arena.bytes[source])

    def _publish(self, request: Request, first: int, last: int | None = None) -> None:
        """Block ids straight into the device's table, where a step could have too many to list."""
        ids = request.block_ids[first:last]
        if ids:
            host = torch.tensor(ids, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            row = self.block_table[request.slot, first : first + len(ids)]
            row.copy_(host, non_blocking=True)
            request.published_blocks = max(request.published_blocks, first + len(ids))

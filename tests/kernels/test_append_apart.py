"""Entries that are kept apart from their blocks, appended by the interpreted kernel: whole arenas
as the reference leaves them, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.schema import CacheSchema
from dsv4.kernels.append import append as kernel
from dsv4.model import ModelSpec
from dsv4.ops.calls import CompressorWrite, StepTensors, WindowWrite
from dsv4.reference.append import append as reference
from dsv4.reference.backend import ReferenceBackend
from tests.support.numbers import Numbers
from tests.support.stack import POISON, Stack

MODELS = {"v4": ModelSpec.preset("tiny"), "v41": ModelSpec.preset("v41-tiny")}


class Apart:
    """Makes every append of a stack again, twice, on poisoned arenas of a schema with entries
    apart. Blocks of one slot have no rows for their entries, in turn."""

    def __init__(self, schema: CacheSchema) -> None:
        self.schema, self.numbers = replace(schema, entries_apart=True), Numbers(3)
        self.stored = self.dropped = self.calls = 0
        self.active = True

    def append(
        self, step: StepTensors, window: WindowWrite | None, compressors: Sequence[CompressorWrite]
    ) -> None:
        if not self.active:
            reference(step, window, compressors)
            return
        blocks, slots = step.block_arena.shape[0], step.block_table.shape[0]
        rows = blocks + 2
        table = self.numbers.permutation(rows)[: step.block_table.numel()]
        assert step.block_table.numel() <= rows
        table = table.view(slots, -1).int()
        self.calls += 1
        table[self.calls % 2] = -1
        here = [replace(write, layout=self.layout(write)) for write in compressors]
        results = []
        for append in (reference, kernel):
            arenas = (
                torch.full((blocks, self.schema.bytes.block), POISON, dtype=torch.uint8),
                torch.full((rows, self.schema.bytes.entries), POISON, dtype=torch.uint8),
                step.slot_arena.clone(),
                *([] if window is None or window.staging is None else [window.staging.clone()]),
            )
            own = replace(
                step,
                block_arena=arenas[0],
                entries_arena=arenas[1],
                slot_arena=arenas[2],
                entry_table=table,
                scratch=step.scratch.clone(),
            )
            own_window = window
            if window is not None and window.staging is not None:
                own_window = replace(window, staging=arenas[3])
            append(own, own_window, here)
            results.append(arenas)
        for name, expected, found in zip(
            ("blocks", "entries", "slots", "staging"), *results, strict=False
        ):
            assert torch.equal(expected, found), name
        reference(step, window, compressors)
        self.count(step, table, here, results[0][1])

    def layout(self, write: CompressorWrite) -> Any:
        layout = self.schema.layout.compressor(write.layout.page.layer, write.layout.kind)
        assert layout is not None
        return layout

    def count(
        self,
        step: StepTensors,
        table: Tensor,
        compressors: Sequence[CompressorWrite],
        entries: Tensor,
    ) -> None:
        """How many entries had a row, and that those without one went nowhere."""
        for write in compressors:
            if not write.layout.page.apart:
                continue
            for slot, _, end, _, entry, count, _, _ in write.items.tolist():
                for each in range(entry, min(entry + max(count, 0), end // write.layout.ratio)):
                    row = int(table[slot, each // write.layout.page.rows])
                    self.stored += row >= 0
                    self.dropped += row < 0
        wrote = int((entries != POISON).any(dim=1).sum())
        assert wrote <= int((table >= 0).sum())


@pytest.mark.parametrize("model", MODELS)
def test_decodes_and_chunks_store_entries_in_their_own_arena(
    model: str, monkeypatch: pytest.MonkeyPatch
):
    schema = CacheSchema.build(MODELS[model], max_context=512, max_draft_tokens=1)
    apart = Apart(schema)
    layer = next(spec.layer for spec in MODELS[model].layers if spec.has_indexer)
    monkeypatch.setattr(ReferenceBackend, "append", staticmethod(apart.append))
    stack = Stack(schema, layers=[layer], max_requests=3, num_blocks=12, backend="reference")
    requests = [stack.manager.admit_request() for _ in range(2)]
    streams = [stack.stream(seed, 300) for seed in range(2)]
    pairs = list(zip(requests, streams, strict=True))
    apart.active = False
    stack.step([(*pairs[0], 10), (*pairs[1], 126)])
    apart.active = True
    stack.step([(*each, 2) for each in pairs], pad_tokens=5, pad_requests=3)
    stack.step([(*pairs[1], 4), (*pairs[0], 4)])
    assert apart.stored > 1
    assert apart.dropped > 1

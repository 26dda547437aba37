"""Work items of a replay: entries that exist are not written, everything else is, once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.step.shape import StepShape, StepTokens
from dsv4.model import ModelSpec

TINY = ModelSpec.preset("tiny")
CPU = torch.device("cpu")
MAX_TOKENS, REQUESTS = 600, 4


@pytest.mark.parametrize("drafts", [0, 3])
def test_exactly_the_missing_entries_are_written(drafts: int):
    schema = CacheSchema.build(TINY, max_context=2048, max_draft_tokens=drafts)
    buffers = StepBuffers(schema, max_requests=REQUESTS, max_tokens=MAX_TOKENS, device=CPU)
    rng = random.Random(drafts)
    left_out = 0
    for _ in range(400):
        rows = rng.randrange(1, REQUESTS + 1)
        widths = rng.choice(([0, 1, 1 + drafts], [1, 3, 5, 130, 140]))
        counts = np.array([rng.choice(widths) for _ in range(rows)])
        starts = np.array([rng.randrange(700) for _ in range(rows)])
        # in front of the step, inside it, at its ends, far behind it
        reused = np.array(
            [
                max(0, rng.choice((0, start, start + count, start + count // 2, start + 500)))
                // 128
                * 128
                for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
            ]
        )
        slots = np.array(rng.sample(range(9), rows))
        shape = StepShape.build(slots.tolist(), counts.tolist())
        step = StepTokens(shape=shape, starts=starts, ends=starts + counts, reused=reused)
        found = buffers.fill(step)
        narrow = counts.max() <= 1 + drafts
        for ratio in buffers.ratios:
            listed = buffers.host[f"items_{ratio}"].tolist()
            items = listed[: found[ratio]]
            assert all(item[0] == -1 for item in listed[found[ratio] :])
            for row in range(rows):
                start, count = int(starts[row]), int(counts[row])
                mine = [item for item in items if item[0] == slots[row]]
                written = [
                    entry
                    for item in mine
                    for entry in range(item[4], item[4] + item[5])
                    if (entry + 1) * ratio <= item[2]
                ]
                closing = [p // ratio for p in range(start, start + count) if (p + 1) % ratio == 0]
                wanted = [e for e in closing if e * ratio >= reused[row]]
                left_out += len(closing) - len(wanted)
                assert written == wanted
                with_tails = [item for item in mine if item[6] == 1]
                assert len(with_tails) == (0 if narrow or not count else 1)
                # whoever reads tails that the step overwrites must be the one who writes them
                overlap = ratio in buffers.overlapping_ratios
                for item in [] if narrow else mine:
                    for entry in range(item[4], item[4] + item[5]):
                        if (entry - overlap) * ratio < start and entry in wanted:
                            assert item[6] == 1
    assert left_out > 500

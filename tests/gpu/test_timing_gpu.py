"""What the benchmarks rest on: replayed graphs, counted launches, a captured decode step."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.decode_step import PARTS, DecodeStep
from benchmarks.timing import measure_ceilings, time_graph
from dsv4.model import ModelSpec

pytestmark = pytest.mark.gpu


def test_launches_are_counted_per_call() -> None:
    x = torch.zeros(1024, device="cuda")

    def three() -> None:
        x.add_(1)
        x.mul_(2)
        x.zero_()

    timed = time_graph([three, three])
    assert timed.launches == 3
    assert timed.microseconds > 0


def test_a_copy_is_slower_than_nothing() -> None:
    ceilings = measure_ceilings()
    assert ceilings.floor_us(1 << 30) > 10 * ceilings.empty_launch_us


def test_the_parts_of_a_step_make_up_its_launches() -> None:
    step = DecodeStep(
        ModelSpec.preset("tiny"), batch=16, context=1024, device="cuda", block_arena_bytes=1 << 20
    )
    step.run(PARTS)
    parts = [time_graph([partial(step.run, (part,))], calls_a_graph=1).launches for part in PARTS]
    whole = time_graph([partial(step.run, PARTS)], calls_a_graph=1)
    assert whole.launches == sum(parts)
    assert parts[0] == len(step.layers), "one launch a layer writes the step"
    assert torch.isfinite(step.out.float()).all()

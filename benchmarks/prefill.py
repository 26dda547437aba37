"""One chunk of a prompt: append → select → attend of every backbone layer, launched one by one.

Queries and projections are preset, so the time is the cache's alone, host time included: a chunk is
not captured. `parts_us` has one layer of each kind by itself. Beside it stand the kernels
of others, composed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.case import Case, Measurement
from benchmarks.decode_step import PARTS, DecodeStep
from benchmarks.peers import COMPOSED_CHUNK_US
from benchmarks.timing import count_launches
from dsv4.model import ModelSpec
from dsv4.units import format_tokens

# (model, requests, tokens of each, start) -> first step, target, in ms
CASES: dict[tuple[str, int, int, int], tuple[float, float] | None] = {
    ("v4-flash", 1, 512, 0): None,
    ("v4-flash", 1, 512, 130_560): None,
    ("v4-flash", 1, 2_048, 0): None,
    ("v4-flash", 1, 2_048, 129_024): None,
    ("v4-flash", 1, 8_192, 0): (55, 45),
    ("v4-flash", 1, 8_192, 122_880): (170, 135),
    ("v4-flash", 1, 8_192, 1_040_384): (1_060, 850),
    ("v4-flash", 4, 2_048, 129_024): None,
    ("v4-pro", 1, 8_192, 0): None,
    ("v4-pro", 1, 8_192, 122_880): None,
}
V41_CASES: dict[tuple[str, int, int, int], tuple[float, float] | None] = {
    ("v41-flash", 1, 8_192, 0): None,
    ("v41-flash", 1, 8_192, 122_880): None,
}
# decodes and one chunk in a step at 128k
MIXED_DECODES, MIXED_CHUNK, MIXED_CONTEXT = 64, 2_048, 131_072
REPEATS = 3


def cases() -> Iterator[Case]:
    yield from _cases(CASES, "prefill")
    yield Case(
        name=f"chunk v4-flash {MIXED_CHUNK} beside {MIXED_DECODES} decodes",
        suite="prefill",
        series="beside decodes",
        model="v4-flash",
        batch=MIXED_CHUNK + MIXED_DECODES,
        context=MIXED_CONTEXT,
        measure=_measure_mixed,
    )


def v41_cases() -> Iterator[Case]:
    return _cases(V41_CASES, "v41")


def _cases(
    listed: dict[tuple[str, int, int, int], tuple[float, float] | None], suite: str
) -> Iterator[Case]:
    for (model, requests, chunk, start), goals in listed.items():
        several = f"{requests} x " if requests > 1 else ""
        first_step, target = goals or (None, None)
        composed = COMPOSED_CHUNK_US.get((chunk, start)) if goals else None
        yield Case(
            name=f"chunk {model} {several}{chunk} from {format_tokens(start)}",
            suite=suite,
            series=f"{several}from {format_tokens(start)}",
            model=model,
            batch=requests * chunk,
            context=start + chunk,
            first_step_us=first_step and 1e3 * first_step,
            target_us=target and 1e3 * target,
            anchors_us={"peers composed": composed} if composed else {},
            measure=partial(_measure, ModelSpec.preset(model), requests, chunk, start + chunk),
        )


def _measure(model: ModelSpec, requests: int, chunk: int, context: int) -> Measurement:
    step = DecodeStep(model, batch=requests, chunk=chunk, context=context, device="cuda")
    step.compile()
    step.run(PARTS)
    whole, launches = timed(partial(step.run, PARTS))
    parts: dict[str, tuple[float, int]] = {}
    layers = step.layers
    for kind, layer in step.named_layers.items():
        step.layers = [layer]
        for part in PARTS:
            if part != "select" or layer in step.selecting_layers:
                parts[f"{part}, one {kind} layer"] = timed(partial(step.run, (part,)))
    step.layers = layers
    return Measurement(
        microseconds=whole,
        launches=launches,
        must_move_bytes=step.must_move_bytes(),
        parts_us={part: found[0] for part, found in parts.items()},
        parts_launches={part: found[1] for part, found in parts.items()},
        note=step.note(),
    )


def _measure_mixed() -> Measurement:
    """A step that holds both, with each of them by itself as its peer."""
    step = DecodeStep(
        ModelSpec.preset("v4-flash"),
        batch=MIXED_DECODES + 1,
        decodes=MIXED_DECODES,
        chunk=MIXED_CHUNK,
        context=MIXED_CONTEXT,
        device="cuda",
    )
    step.compile()
    step.run(PARTS)
    whole, launches = timed(partial(step.run, PARTS))
    decodes, chunk = (timed(partial(step.run, PARTS, (half,))) for half in (0, 1))
    return Measurement(
        microseconds=whole,
        launches=launches,
        must_move_bytes=step.must_move_bytes(),
        peers_us={"both apart": decodes[0] + chunk[0]},
        parts_us={"decodes": decodes[0], "chunk": chunk[0]},
        parts_launches={"decodes": decodes[1], "chunk": chunk[1]},
        note=step.note(),
    )


def timed(call: Callable[[], Any]) -> tuple[float, int]:
    """The median of REPEATS calls from an idle GPU until it is idle again, in µs, and launches."""
    launches = count_launches(call)
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return sorted(found)[REPEATS // 2], launches

"""Lives of requests whose every stored byte is known: fixed inputs, digests of what they leave.

`python -m tests.known_answers.cases reference 1 2` prints the digests of all cases with one and
with two threads, as JSON; `triton` those of the cases that the interpreter has time for. With
`--write` the reference's digests become the known ones (digests.json).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec, v4_layers
from dsv4.ops.backend import BackendName
from dsv4.ops.calls import CompressorWeights, KeyProjection, LayerWeights
from dsv4.rope import rope_table
from tests.support.numbers import Numbers
from tests.support.stack import POISON, Stack, Stream

KNOWN_PATH = Path(__file__).with_name("digests.json")
FLASH, TINY = ModelSpec.preset("v4-flash"), ModelSpec.preset("tiny")
FLASH_V41 = ModelSpec.preset("v41-flash")
SMALL_V41 = replace(ModelSpec.preset("v41-tiny"), name="small v41", window=8)
# all layer kinds with rings and groups so short that they turn and close while kernels are
# interpreted
SMALL = replace(TINY, name="small", window=8, layers=v4_layers((0, 4, 16), backbone=3))
DRAFTS, REQUESTS = 3, 2
ROPE_TOKENS = 1 << 16
INF, NAN = float("inf"), float("nan")

# (tokens of request 0, of request 1, tokens that each keeps); None keeps all
Step = tuple[int, int, tuple[int, int] | None]
LONG: tuple[Step, ...] = (
    (300, 130, None),  # wide: rings turn, groups straddle
    (1, 1, None),
    (4, 4, (1, 3)),  # drafts, some rejected
    (2, 1, None),
    (0, 130, None),  # wide again, behind a rollback
    (4, 3, (0, 3)),
    (1, 1, None),
)
SHORT: tuple[Step, ...] = ((3, 18, None), (4, 3, (2, 0)), (1, 2, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model laid out, the layers that run, and the steps of two requests."""

    model: ModelSpec
    layers: tuple[int, ...]
    steps: tuple[Step, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    backends: tuple[BackendName, ...] = ("reference", "triton")
    # small enough for Triton's interpreter
    interpreted: bool = False
    # a read too: what the indexer of this layer selects in the first decode step
    select: int | None = None


CASES: dict[str, Case] = {
    "flash fp8_ds mxfp4": Case(model=FLASH, layers=(0, 2, 3), steps=LONG, select=2),
    "flash online": Case(model=FLASH, layers=(3,), steps=LONG, layout={"hca_state": "online"}),
    "small fp8_ds mxfp4": Case(model=SMALL, layers=(1, 2), steps=SHORT, interpreted=True),
    "small bf16 bf16": Case(
        model=SMALL,
        layers=(1,),
        steps=SHORT,
        layout={"entry_format": "bf16", "index_format": "bf16"},
    ),
    "small fp8_row nvfp4": Case(
        model=SMALL,
        layers=(1,),
        steps=SHORT,
        layout={"entry_format": "fp8_row", "index_format": "nvfp4"},
        interpreted=True,
    ),
    "small fp8_ds fp8, eps 1e-20": Case(
        model=replace(SMALL, rms_eps=1e-20),
        layers=(1,),
        steps=SHORT,
        layout={"index_format": "fp8"},
    ),
    "small online": Case(
        model=SMALL,
        layers=(2,),
        steps=SHORT,
        layout={"hca_state": "online"},
        interpreted=True,
    ),
    "v41 flash": Case(model=FLASH_V41, layers=(0, 2, 20, 40), steps=LONG, select=20),
    "v41 flash, whole records": Case(
        model=FLASH_V41,
        layers=(0, 2, 20),
        steps=LONG,
        layout={"page_form": "records"},
    ),
    "v41 small": Case(model=SMALL_V41, layers=(1, 3), steps=SHORT, interpreted=True),
    "tiny fp32 fp32": Case(
        model=TINY,
        layers=(0, 1, 2),
        steps=LONG,
        layout={"entry_format": "fp32", "index_format": "fp32"},
        backends=("reference",),
    ),
}


def run_case(name: str, *, backend: BackendName, device: str = "cpu") -> dict[str, str]:
    """Runs a case in poisoned arenas; the digests of what it left."""
    case = CASES[name]
    schema = CacheSchema.build(case.model, max_context=512, max_draft_tokens=DRAFTS, **case.layout)
    stack = Stack(
        schema,
        layers=case.layers,
        max_requests=REQUESTS,
        num_blocks=8,
        device=device,
        backend=backend,
    )
    numbers = Numbers(1, shift=0)
    stack.weights = {layer: _weights(stack, layer, numbers) for layer in case.layers}
    streams = [_stream(stack, case, numbers) for _ in range(REQUESTS)]
    requests = [stack.manager.admit_request() for _ in range(REQUESTS)]
    for *counts, accepted in case.steps:
        work = [(r, s, n) for r, s, n in zip(requests, streams, counts, strict=True) if n]
        kept = None if accepted is None else list(accepted)
        if case.select is not None and (counts, accepted) == ([1, 1], None):
            selected = _select(stack, case.select, work, numbers)
        stack.step(work, kept)
    digests = _arena_digests(stack, requests)
    if case.select is not None:
        digests["selection"] = digest(selected)
    return digests


def rope_digests() -> dict[str, str]:
    return {
        f"{model.name} {'yarn' if yarn else 'plain'}": digest(
            rope_table(model, yarn=yarn, tokens=ROPE_TOKENS)
        )
        for model in (FLASH,)
        for yarn in (False, True)
    }


def digest(*tensors: Tensor) -> str:
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _arena_digests(stack: Stack, requests: Sequence[Request]) -> dict[str, str]:
    """Of all bytes of both arenas, a request's rows in its own order: wherever the allocator puts
    them, they are the same. What belongs to nobody must be as it was."""
    manager = stack.manager
    blocks, slots = manager.memory.block_arena.bytes.cpu(), manager.memory.slot_arena.bytes.cpu()
    owned = [block for request in requests for block in request.block_ids]
    used = [request.slot for request in requests]
    for arena, rows in ((blocks, owned), (slots, used)):
        free = torch.ones(arena.shape[0], dtype=torch.bool)
        free[rows] = False
        assert bool((arena[free] == POISON).all()), "a row that nobody owns was written"
    return {"blocks": digest(blocks[owned]), "slots": digest(slots[used])}


def _select(
    stack: Stack, layer: int, work: Sequence[tuple[Request, Stream, int]], numbers: Numbers
) -> Tensor:
    """What the layer's indexer selects for the newest token of each request, in a step that is
    abandoned."""
    model = stack.schema.model
    plan = stack.manager.prepare_forward([(request, count) for request, _, count in work])
    stack.write(plan, [stream for _, stream, _ in work])
    q = numbers.heavy(len(work), model.index_heads, model.index_dim).to(torch.bfloat16)
    weights = numbers.normal(len(work), model.index_heads).to(torch.bfloat16)
    handle = stack.manager.acquire(layer, plan.batch)
    found = handle.select(
        q.to(stack.device), weights.to(stack.device), rope=stack.weights[layer].rope
    ).clone()
    stack.manager.abandon(plan)
    return found


def _weights(stack: Stack, layer: int, numbers: Numbers) -> LayerWeights:
    schema = stack.schema

    def compressor(kind: Any) -> CompressorWeights | None:
        layout = schema.layout.compressor(layer, kind)
        if layout is None:
            return None
        ape = None
        if layout.key_page is None:
            ape = numbers.normal(layout.ratio, layout.columns).to(stack.device)
        norm = numbers.normal(layout.width)
        return CompressorWeights(ape=ape, norm=norm.to(stack.device))

    def projection() -> KeyProjection | None:
        layout = schema.layout.compressor(layer, "main")
        if layout is None or layout.key_page is None:
            return None
        weight = numbers.normal(schema.model.index_dim, layout.width).to(torch.bfloat16)
        norm = numbers.normal(schema.model.index_dim)
        return KeyProjection(weight=weight.to(stack.device), norm=norm.to(stack.device))

    yarn = schema.model.layers[layer].yarn
    return LayerWeights(
        rope=rope_table(schema.model, yarn=yarn, tokens=schema.max_context, device=stack.device),
        compressor=compressor("main"),
        index_compressor=compressor("index"),
        index_projection=projection(),
        kv_norm=numbers.normal(schema.model.head_dim).to(stack.device),
    )


def _stream(stack: Stack, case: Case, numbers: Numbers) -> Stream:
    """Numbers of the usual size, and rows that rounding finds hard."""
    result, schema = Stream(), stack.schema
    tokens = sum(max(step[:2]) for step in case.steps)
    value_dtype = getattr(torch, schema.window_format.value_dtype)
    for layer in stack.layers:
        kv = _hard_rows(numbers.normal(tokens, schema.model.head_dim), numbers)
        kv[7, 5], kv[7, 70] = INF, -INF  # these become NaN, of which there is one in bf16
        kv[8, 100] = NAN
        result.kv[layer] = kv.to(value_dtype).to(stack.device)
        forms = [
            (layout.columns, torch.float32 if layout.gated else value_dtype)
            for kind in ("main", "index")
            if (layout := schema.layout.compressor(layer, kind))  # type: ignore[arg-type]
            for _ in range(1 + layout.gated)
        ]
        made = []
        for width, dtype in forms:
            rows = _hard_rows(numbers.normal(tokens, width), numbers)
            made.append(rows.to(dtype).to(stack.device))
        result.projections[layer] = tuple(made)
    return result


def _hard_rows(x: Tensor, numbers: Numbers) -> Tensor:
    """In place, and again every 40 rows: outliers, both zeros, ties of bf16 and of E4M3 and E2M1 at
    power-of-two scales, subnormal numbers, sizes whose squares fall out of fp32."""
    width = x.shape[1]
    for first in range(0, len(x) - 9, 40):
        row = x[first : first + 10]
        row[1] = numbers.heavy(width, spread=3.0)
        row[2] = 0.0
        row[2, ::2] = -0.0
        # eighths of a power of two: half of them lie between two codes of 3 bits, or of 1
        row[3] = numbers.integers(-64, 65, width) / 8.0
        row[4] = (numbers.bits(width) & -0x8000).view(torch.float32).clamp(-4.0, 4.0).nan_to_num()
        row[5] = numbers.normal(width) * 2.0**-130
        row[6] = numbers.normal(width) * 2.0**70
        row[9] = row[3] * (1.0 + 2.0**-8)
    return x


def all_digests(backend: BackendName, device: str = "cpu") -> dict[str, dict[str, str]]:
    """Of every case that the backend has, and of the rotation tables."""
    interpreted = backend == "triton" and device == "cpu"
    found = {
        name: run_case(name, backend=backend, device=device)
        for name, case in CASES.items()
        if backend in case.backends and (case.interpreted or not interpreted)
    }
    if not interpreted:
        found["rope"] = rope_digests()
    return found


def known_digests() -> dict[str, dict[str, str]]:
    known: dict[str, dict[str, str]] = json.loads(KNOWN_PATH.read_text())
    return known


def main(arguments: list[str]) -> None:
    if arguments == ["--write"]:
        KNOWN_PATH.write_text(json.dumps(all_digests("reference"), indent=2) + "\n")
        return
    backend, *threads = arguments
    found = {}
    for count in threads:
        torch.set_num_threads(int(count))
        found[count] = all_digests(backend)  # type: ignore[arg-type]
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "found": found}))


if __name__ == "__main__":
    main(sys.argv[1:])

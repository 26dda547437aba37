"""Exact top-k of index scores. Targets: the project's for one H200. V4-Flash and V4-Pro differ in
k."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.case import Case, Measurement, Work
from benchmarks.installed import top_k_peers
from benchmarks.peers import TOP_K_US
from benchmarks.step_tokens import step_tokens
from benchmarks.timing import measure
from dsv4.kernels.top_k import top_k, top_k_workspace_bytes
from dsv4.model import ModelSpec

RATIO = 4
# (rows, scores) -> target, µs; k = 512
TARGETS_US = {(1, 262_144): 12.0, (8, 262_144): 13.0, (32, 32_768): 10.0, (256, 8_192): 9.0}


def cases() -> Iterator[Case]:
    for model in ("v4-flash", "v4-pro"):
        count = ModelSpec.preset(model).index_topk
        for (rows, columns), target in TARGETS_US.items():
            yield Case(
                name=f"top-k {count} of {rows} x {columns}",
                suite="indexer",
                series=f"top-k {count} of {columns}",
                model=model,
                batch=rows,
                context=columns * RATIO,
                measure=partial(_measure, rows, columns, count),
                target_us=target if model == "v4-flash" else None,
                anchors_us=TOP_K_US[rows, columns] if model == "v4-flash" else {},
            )


def _measure(rows: int, columns: int, count: int) -> Measurement:
    """Scores come from the launch before, so they may be in the L2 here too."""
    tokens = step_tokens(requests=rows, position=columns * RATIO - 1)
    out = torch.empty(rows, count, dtype=torch.int32, device="cuda")
    needed = top_k_workspace_bytes(rows, columns, count)
    workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device="cuda")
    scores = torch.randn(rows, columns, device="cuda").bfloat16().float()

    def call() -> None:
        top_k(scores, tokens=tokens, ratio=RATIO, out=out, workspace=workspace)

    return measure(
        Work(
            calls=[call],
            must_move_bytes=scores.numel() * scores.element_size() + out.numel() * 4,
            peers=top_k_peers(scores, count),
        )
    )

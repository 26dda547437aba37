"""Steps of attention at V4's shapes on a GPU, for the tests of all kernels that run there.

`make_step` brings blocks in random order, block ids of 2**30 behind the used ones, wild indices and
a ring longer than the window; every row that no query may read is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.kernels import attend as portable
from dsv4.reference import attend as reference
from tests.reference.test_attend import Step, check, make_step, with_nan

DEVICE = torch.device("cuda")
# 521 indices: not a multiple of a tile, of 16 or of 4
SHAPES: dict[str, dict[str, int]] = {
    "swa": {},
    "csa": {"ratio": 4, "page_rows": 32, "top_k": 521, "max_entries": 2_560},
    "hca": {"ratio": 128, "page_rows": 1, "max_entries": 2_112},
}
# DeepSeek-V4.1: windows of FP8, entries of FP4; two tokens to an entry, or one
V41: dict[str, Any] = {"record": "v41_fp4", "window_record": "v41_fp8"}
V41_SHAPES: dict[str, dict[str, Any]] = {
    "window": {"kind": "swa", "record": "v41_fp8"},
    "pairs": {"kind": "csa", "ratio": 2, "page_rows": 64, "max_entries": 4_608, **V41},
    "singles": {"kind": "csa", "ratio": 1, "page_rows": 128, "max_entries": 9_216, **V41},
    "all": {"kind": "hca", "ratio": 2, "page_rows": 64, "max_entries": 4_608, **V41},
}
# (start, tokens): around one key, the window, and 127, 128 and 129 entries; up to thousands
RAGGED: dict[str, list[tuple[int, int]]] = {
    "swa": [(0, 1), (1, 2), (126, 3), (500, 4), (9_001, 4)],
    "csa": [(0, 1), (2, 2), (126, 3), (506, 2), (511, 1), (515, 1), (2_083, 2), (9_001, 4)],
    "hca": [(0, 1), (126, 2), (16_255, 1), (16_382, 2), (16_511, 1), (268_805, 3)],
}


def make(requests: Sequence[tuple[int, int]], kind: str, *, heads: int = 64, **more: Any) -> Step:
    """A step at V4's shapes on the device."""
    shape = {**SHAPES[kind], **more}
    step = make_step(requests, kind=kind, heads=heads, width=512, window=128, **shape)
    entries = step.entries and replace(
        step.entries,
        arena=step.entries.arena.to(DEVICE),
        block_table=step.entries.block_table.to(DEVICE),
    )
    return Step(
        q=step.q.to(DEVICE),
        sink=step.sink.to(DEVICE),
        tokens=step.tokens.to(DEVICE),
        batch=step.batch.to(DEVICE),
        window=replace(step.window, arena=step.window.arena.to(DEVICE)),
        entries=entries,
        indices=None if step.indices is None else step.indices.to(DEVICE),
        keys=[None if keys is None else keys.to(DEVICE) for keys in step.keys],
        rope=step.rope.to(DEVICE),
    )


def max_entries(step: Step) -> int:
    if step.entries is None:
        return 0
    if step.indices is not None:
        return step.indices.shape[1]
    return step.entries.block_table.shape[1] * step.entries.page.rows


def run_portable(step: Step, *, turn: bool = True) -> tuple[Tensor, Tensor]:
    """Parts of an earlier launch are NaN."""
    splits = portable.split_count(step.window.window, max_entries(step))
    elements = portable.workspace_elements(*step.q.shape, splits)
    workspace = torch.full((elements,), torch.nan, device=DEVICE)
    workspace[: portable.PLACES] = 0
    found = step.run(portable.attend, turn=turn, workspace=workspace)
    assert (workspace[: portable.PLACES].view(torch.int32) == 0).all(), "counters"
    return found


def assert_near(step: Step, found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    live = step.tokens[:, 0] >= 0
    out, out_wanted = found[0][live].double(), wanted[0][live].double()
    error = (out - out_wanted).norm(dim=(1, 2)) / out_wanted.norm(dim=(1, 2))
    assert error.max() <= 4e-3, error
    assert (found[1][live] - wanted[1][live]).abs().max() <= 1e-3


def assert_right(step: Step, found: tuple[Tensor, Tensor], *, turn: bool = True) -> None:
    check(step, found, turn=turn)
    assert_near(step, found, step.run(reference.attend, turn=turn))


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(
        torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True)
    )


def assert_nan_is_read(
    step: Step, run: Callable[[Step], tuple[Tensor, Tensor]], token: int, *, entry: bool
) -> None:
    """A NaN in a key makes every output of the queries that read it NaN, and changes no other."""
    before = run(step)
    hurt = torch.tensor(with_nan(step, token, entry=entry), device=DEVICE)
    assert hurt.any()
    out, lse = run(step)
    assert out[hurt].isnan().all()
    assert lse[hurt].isnan().all()
    assert same((out[~hurt], lse[~hurt]), (before[0][~hurt], before[1][~hurt]))


def assert_minus_infinity_is_no_key(
    step: Step, run: Callable[[Step], tuple[Tensor, Tensor]]
) -> None:
    """The first token sees one key; where its logit is -inf its output is 0."""
    _set_sinks_at_the_ends(step)
    _make_only_logits_minus_infinity(step)
    out, lse = run(step)
    assert (out[0, 1:4] == 0).all()
    assert (lse[0, 1:4] == -torch.inf).all()
    live = step.tokens[:, 0] >= 0
    assert (out[live, 0] == 0).all()  # such a sink leaves nothing to any key
    assert not out[live].isnan().any()
    for found, wanted in zip((out, lse), step.run(reference.attend, turn=True), strict=True):
        assert torch.equal(found[live].isfinite(), wanted[live].isfinite())


def assert_an_infinite_query_gives_its_limit_or_nan(
    step: Step, run: Callable[[Step], tuple[Tensor, Tensor]]
) -> None:
    """Heads whose query has an infinity give 0, as in the test above, or NaN: no other number.
    Every other bit is what it is without the infinities."""
    _set_sinks_at_the_ends(step)
    before = run(step)
    live = step.tokens[:, 0] >= 0
    assert (before[0][live, 0] == 0).all()  # such a sink leaves nothing to any key
    assert not before[0][live].isnan().any()
    assert before[1][live].isfinite().all()
    _make_only_logits_minus_infinity(step)
    out, lse = run(step)
    hurt_out, hurt_lse = out[0, 1:4], lse[0, 1:4]
    assert (hurt_out.isnan() | (hurt_out == 0)).all()
    assert (hurt_lse.isnan() | (hurt_lse == -torch.inf)).all()
    others = torch.ones_like(lse, dtype=torch.bool)
    others[0, 1:4] = False
    assert same((out[others], lse[others]), (before[0][others], before[1][others]))


def _set_sinks_at_the_ends(step: Step) -> None:
    step.sink[:4] = torch.tensor([3e38, 3e38, 0.0, -torch.inf])


def _make_only_logits_minus_infinity(step: Step) -> None:
    """Three heads of the first token, by a channel that is infinite."""
    key = step.keys[0]
    assert key is not None
    assert len(key) == 1
    step.q[0, 1:4, 5] = -torch.inf * torch.sign(key[0, 5]).float()

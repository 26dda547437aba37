"""Hopper's attention of wide steps against the float64 formula, the reference and the other Hopper
kernel, on arenas where every row that no query may read is NaN, and in memory full of NaNs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.kernels.hopper import attend_wide as wide
from dsv4.ops.calls import Attention
from tests.gpu.test_attend_hopper_gpu import run
from tests.reference.test_attend import Step
from tests.support.gpu_steps import assert_nan_is_read, assert_near, assert_right, make, same

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

DEVICE = torch.device("cuda")
GUARD = 0x5A
MEMORY_BYTES = 64 << 20
# (start, tokens): from nothing, within the first window, across edges of tiles and groups, and one
# token of a request beside the chunks of others
REQUESTS = {
    "swa": [(0, 70), (1, 3), (126, 66), (500, 64), (9_001, 1)],
    "csa": [(0, 70), (2, 2), (126, 66), (506, 64), (2_083, 65), (9_001, 1)],
    "hca": [(0, 70), (126, 66), (8_100, 130), (16_255, 1), (24_570, 64)],
}


def attend(call: Attention, requests: Sequence[tuple[int, int]]) -> None:
    """What lies behind the decoded rows must stay."""
    ratio = 1 if call.entries is None else call.entries.ratio
    memory = torch.full((MEMORY_BYTES,), 0xFF, dtype=torch.uint8, device=DEVICE)  # NaNs
    call = replace(
        call,
        tokens_per_request=max(count for _, count in requests),
        max_visible=max(start + count for start, count in requests) // ratio,
        decoded=memory[: MEMORY_BYTES // 2],
    )
    memory[MEMORY_BYTES // 2 :] = GUARD
    assert wide.supports(call)
    wide.attend(call)
    assert (memory[MEMORY_BYTES // 2 :] == GUARD).all()


def run_wide(
    step: Step, requests: Sequence[tuple[int, int]], *, turn: bool = True
) -> tuple[Tensor, Tensor]:
    return step.run(lambda call: attend(call, requests), turn=turn)


@pytest.mark.parametrize(
    ("kind", "heads", "more"),
    [
        ("swa", 64, {}),
        ("csa", 64, {}),
        ("csa", 128, {"top_k": 1_024}),
        ("hca", 64, {}),
        ("hca", 16, {}),
        ("hca", 96, {}),
    ],
)
def test_chunks_of_many_requests(kind: str, heads: int, more: dict[str, Any]) -> None:
    requests = REQUESTS[kind]
    step = make(requests, kind, heads=heads, chunk=True, **more)
    turn = kind != "swa"
    found = run_wide(step, requests, turn=turn)
    assert_right(step, found, turn=turn)
    assert_near(step, found, run(step, turn=turn))
    assert same(found, run_wide(step, requests, turn=turn))


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_a_token_does_not_depend_on_the_step(kind: str) -> None:
    """The same tokens at other places, and some of them padding."""
    requests = REQUESTS[kind]
    step = make(requests, kind, chunk=True)
    found = run_wide(step, requests)
    order = torch.arange(len(step.tokens)).flip(0)
    other = step.take(order.tolist())
    other.tokens[5:9, 0] = -1
    again = run_wide(other, requests)
    live = other.tokens[:, 0] >= 0
    for a, b in zip(again, found, strict=True):
        assert torch.equal(a[live].view(torch.int16), b[order][live].view(torch.int16))
        assert a[~live].isnan().all()


def test_a_request_full_of_nans_harms_nobody_else() -> None:
    requests = REQUESTS["hca"]
    step = make(requests, "hca", chunk=True)
    clean = run_wide(step, requests)
    assert step.entries is not None
    victim = 2
    slot = int(step.batch[victim, 0])
    page = step.entries.page
    blocks = -(-((requests[victim][0] + requests[victim][1]) // step.entries.ratio) // page.rows)
    step.entries.arena[step.entries.block_table[slot, :blocks].long()] = 0xFF
    found = run_wide(step, requests)
    others = step.tokens[:, 2] != victim
    assert same((found[0][others], found[1][others]), (clean[0][others], clean[1][others]))
    assert found[0][~others].isnan().any()


@pytest.mark.parametrize("entry", [False, True], ids=["window", "entry"])
def test_a_nan_in_a_key_makes_its_queries_nan_and_no_others(entry: bool) -> None:
    requests = REQUESTS["csa"]
    step = make(requests, "csa", chunk=True)
    assert_nan_is_read(step, lambda given: run_wide(given, requests), 100, entry=entry)


def test_few_tokens_or_many_entries_are_left_to_the_other_kernel() -> None:
    step = make(REQUESTS["csa"], "csa", chunk=True)
    memory = torch.empty(MEMORY_BYTES, dtype=torch.uint8, device=DEVICE)
    call = replace(
        step.call(out=step.q, lse=step.q), tokens_per_request=64, max_visible=2_300, decoded=memory
    )
    assert wide.supports(call)
    assert not wide.supports(replace(call, tokens_per_request=63))
    assert not wide.supports(replace(call, max_visible=3_000))  # of six requests
    assert not wide.supports(replace(call, max_visible=None))
    assert not wide.supports(replace(call, decoded=memory[:1_000_000]))

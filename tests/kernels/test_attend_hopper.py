"""What of the Hopper attention kernel runs without a GPU: how it shares out work, its workspaces,
and what it accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.kernels.hopper import attend as kernel
from dsv4.kernels.hopper import attend_parts
from dsv4.kernels.hopper import attend_wide as wide
from dsv4.ops.calls import Attention
from tests.reference.test_attend import Step, make_step

PROCESSORS = 132


def v4_step(tokens: int = 1, *, heads: int = 64, kind: str = "csa", **more: Any) -> Step:
    shape = {"width": 512, "window": 128, "page_rows": 2, "top_k": 512, **more}
    step = make_step([(8, 1)], kind=kind, heads=heads, **shape)
    return step.take([0] * tokens)


def launch(step: Step, workspace: Tensor, programs: int = PROCESSORS) -> tuple[int, ...]:
    """The grid of a launch: blocks of heads of all queries, splits, slices."""
    found: list[tuple[int, ...]] = []

    def keep(call: Attention) -> None:
        found.append(kernel.attend_launch(call, programs=programs).grid)

    step.run(keep, workspace=workspace)
    return found[0]


@pytest.mark.parametrize(
    ("tokens", "heads", "entries", "shares"),
    [
        (1, 64, 512, (20, 4)),  # as many as there are tiles: 4 of the window, 16 of entries
        (1, 64, 513, (21, 4)),
        (1, 64, 0, (4, 4)),
        (1, 64, 1_024, (33, 4)),
        (1, 64, 8_192, (66, 2)),
        (1, 128, 8_192, (66, 1)),
        (2, 64, 512, (16, 4)),
        (8, 64, 512, (8, 2)),
        (16, 64, 512, (8, 1)),
        (66, 64, 512, (2, 1)),
        (67, 64, 512, (1, 1)),
        (33, 128, 512, (2, 1)),
        (34, 128, 512, (1, 1)),
        (8_192, 128, 512, (1, 1)),
        (0, 64, 512, (20, 4)),
        (100, 64, 0, (1, 1)),
        (1, 8, 512, (20, 4)),
        (16, 16, 512, (8, 1)),
        (67, 32, 512, (1, 1)),
        (33, 96, 512, (2, 1)),
    ],
)
def test_shares_fill_the_processors(
    tokens: int, heads: int, entries: int, shares: tuple[int, int]
) -> None:
    assert kernel.shares(tokens, heads, 128, entries, PROCESSORS) == shares


@pytest.mark.parametrize("heads", [8, 64, 96, 128])
@pytest.mark.parametrize("processors", [1, 78, 132])
def test_programs_that_wait_for_each_other_run_at_once(
    heads: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one workspace serves every launch: parts, and counters in front of them."""
    monkeypatch.setattr(kernel, "processors", lambda _: processors)
    workspace = torch.empty(kernel.workspace_elements(torch.device("cpu")), device="meta")
    step = v4_step(heads=heads)
    for tokens in range(1, 150):
        items, splits, slices = launch(step.take([0] * tokens), workspace, processors)
        assert items == tokens * -(-heads // 64)
        if splits == 1:
            assert slices == 1
            continue
        assert items * splits * slices <= processors
        assert kernel.PARTS_START + items * splits * kernel.PART_ELEMENTS <= workspace.numel()
        assert items * slices * attend_parts._COUNTER_STRIDE.value <= kernel.PARTS_START


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("splits", [2, 3, 4, 8, 16, 20, 33, 66])
def test_threads_add_as_many_parts_as_they_have_registers_for(splits: int, slices: int) -> None:
    parts, heads = kernel.combine_shape(splits, slices)
    assert parts % slices == 0
    assert heads * parts // slices <= 16
    assert 64 % (4 * heads) == 0


def test_a_part_holds_sums_and_their_logarithm() -> None:
    fp16_sums, fp32_logarithms, fp32_powers = 64 * 512 * 2, 64 * 4, 2 * 4 * 64 * 4
    assert fp16_sums + fp32_logarithms + fp32_powers == 4 * kernel.PART_ELEMENTS


def test_workspaces_that_are_too_small_are_refused() -> None:
    step = v4_step(4)
    needed = kernel.PARTS_START + 4 * 8 * kernel.PART_ELEMENTS
    assert launch(step, torch.empty(needed, device="meta")) == (4, 8, 4)
    with pytest.raises(InvalidInput, match=f"8 splits needs a workspace of {needed} fp32"):
        launch(step, torch.empty(needed - 1, device="meta"))
    assert launch(v4_step(133), torch.empty(0, device="meta")) == (133, 1, 1)


V41 = {"record": "v41_fp4", "window_record": "v41_fp8"}


def test_it_takes_v4_and_v41_and_leaves_the_rest_to_the_portable_kernel() -> None:
    def accepted(step: Step) -> bool:
        return kernel.supports(step.call(out=step.q, lse=step.sink))

    for records in ({}, V41):
        for kind in ("csa", "hca", "swa"):
            for heads in (1, 8, 16, 32, 64, 72, 96, 128):
                assert accepted(v4_step(heads=heads, kind=kind, **records))
                assert accepted(v4_step(heads=heads, kind=kind, chunk=True, **records))
    assert not accepted(v4_step(width=256))
    assert not accepted(v4_step(window=100))
    assert not accepted(v4_step(rope_dim=128))
    assert not accepted(v4_step(record="bf16"))
    assert not accepted(v4_step(record="fp8_row"))
    assert not accepted(v4_step(record="bf16", window_record="fp8_ds"))
    assert not accepted(v4_step(record="fp8_ds", window_record="bf16"))
    assert not accepted(v4_step(record="v41_fp8"))
    assert not accepted(v4_step(record="v41_fp4"))
    assert not accepted(v4_step(record="v41_fp8", window_record="v41_fp4"))
    assert not accepted(v4_step(record="v41_fp4", window_record="fp8_ds"))
    assert not accepted(v4_step(window=100, **V41))


def test_outputs_are_turned_back_by_kernels_that_turn_all_of_their_channels() -> None:
    """V4.1's records, and those that are decoded before, do not tell how wide RoPE is."""
    for rope_dim, turned in ((64, True), (32, False), (128, False)):
        step = v4_step(64, rope_dim=rope_dim, chunk=True, max_entries=64, **V41)
        call = step.call(out=step.q, lse=step.sink)
        decoded = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
        chunk = replace(call, tokens_per_request=64, max_visible=2, decoded=decoded)
        assert kernel.supports(call)
        assert wide.supports(chunk)
        assert kernel.supports(replace(call, inverse_rope=step.rope)) == turned
        assert wide.supports(replace(chunk, inverse_rope=step.rope)) == turned


def test_whole_queries_are_not_cut() -> None:
    """So no bit depends on how many there are."""
    long = {"kind": "hca", "ratio": 128, "page_rows": 1, "max_entries": 8_192}
    for tokens, shape in ((1, {}), (16, {}), (64, {}), (1, long), (64, long)):
        step = v4_step(tokens, **shape)
        call = replace(step.call(out=step.q, lse=step.q), batch_invariant=True)
        assert kernel.supports(call)
        assert kernel.attend_launch(call, programs=PROCESSORS).grid == (tokens, 1, 1)
        assert not wide.supports(replace(call, tokens_per_request=64))


def test_windows_of_cut_replays_are_the_portable_kernel_s() -> None:
    step = v4_step(chunk=True, **V41)
    call = step.call(out=step.q, lse=step.sink)
    assert kernel.supports(call)
    assert not kernel.supports(replace(call, window_cut=True))

"""What of the Hopper attention kernel runs without a GPU: its arithmetic of splits and workspaces,
what it accepts, and, interpreted, the sum of the parts of a query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.kernels import attend_hopper as kernel
from tests.reference.test_attend import Step, make_step

PROCESSORS = 132
WIDTH, ROPE = 64, 16


def v4_step(tokens: int = 1, *, heads: int = 64, kind: str = "csa", **more: Any) -> Step:
    shape = {"width": 512, "window": 128, "page_rows": 2, "top_k": 512, **more}
    step = make_step([(8, 1)], kind=kind, heads=heads, **shape)
    return step.take([0] * tokens)


def launch(step: Step, workspace: Tensor, programs: int = PROCESSORS) -> tuple[int, int]:
    """Programs and splits of a launch."""
    found: list[tuple[int, int]] = []

    def keep(*arguments: Any, **more: Any) -> None:
        made = kernel.launch_arguments(*arguments, **more, programs=programs)
        found.append((made[0], made[1]))

    step.run(keep, workspace=workspace)
    return found[0]


@pytest.mark.parametrize(
    ("tokens", "heads", "entries", "splits"),
    [
        (1, 64, 512, 20),  # as many as there are tiles: 4 of the window, 16 of entries
        (1, 64, 513, 21),
        (1, 64, 0, 4),
        (1, 64, 896, 32),
        (1, 64, 1_024, 32),  # of 36 tiles: beyond twice the rows of the combining loop, whole loops
        (3, 64, 8_192, 32),  # 44 would be at hand
        (1, 64, 8_192, kernel.MAX_SPLITS),
        (1, 128, 8_192, kernel.MAX_SPLITS),
        (6, 64, 512, 20),
        (7, 64, 512, 18),
        (66, 64, 512, 2),
        (67, 64, 512, 1),
        (33, 128, 512, 2),
        (34, 128, 512, 1),
        (8_192, 128, 512, 1),
        (0, 64, 512, 20),
    ],
)
def test_splits_fill_the_processors(tokens: int, heads: int, entries: int, splits: int) -> None:
    assert kernel.split_count(tokens, heads, 128, entries, PROCESSORS) == splits


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("processors", [1, 78, 132])
def test_one_workspace_serves_every_launch(
    heads: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "processors", lambda _: processors)
    workspace = torch.empty(kernel.workspace_elements(torch.device("cpu")), device="meta")
    step = v4_step(heads=heads)
    blocks = heads // 64
    for tokens in range(1, 150):
        programs, splits = launch(step.take([0] * tokens), workspace, processors)
        assert programs == tokens * blocks * splits
        parts_end = programs * kernel.PART_ELEMENTS if splits > 1 else 0
        assert kernel.PARTS_START + parts_end <= workspace.numel()


def test_a_part_holds_sums_and_their_logarithm() -> None:
    bf16_sums, fp32_logarithms = 64 * 512 * 2, 64 * 4
    assert bf16_sums + fp32_logarithms == 4 * kernel.PART_ELEMENTS


def test_workspaces_that_are_too_small_are_refused() -> None:
    step = v4_step(4)
    needed = kernel.PARTS_START + 4 * 20 * kernel.PART_ELEMENTS
    assert launch(step, torch.empty(needed, device="meta")) == (80, 20)
    with pytest.raises(InvalidInput, match=f"20 splits needs a workspace of {needed} fp32"):
        launch(step, torch.empty(needed - 1, device="meta"))
    assert launch(v4_step(133), torch.empty(0, device="meta")) == (133, 1)


def test_it_takes_v4_and_leaves_the_rest_to_the_portable_kernel() -> None:
    def accepted(step: Step) -> bool:
        return kernel.supports(step.q, step.window, step.entries)

    for kind in ("csa", "hca", "swa"):
        for heads in (64, 128):
            assert accepted(v4_step(heads=heads, kind=kind))
            assert accepted(v4_step(heads=heads, kind=kind, chunk=True))
    assert not accepted(v4_step(heads=32))
    assert not accepted(v4_step(heads=96))
    assert not accepted(v4_step(width=256))
    assert not accepted(v4_step(window=100))
    assert not accepted(v4_step(rope_dim=128))
    assert not accepted(v4_step(record="bf16"))
    assert not accepted(v4_step(record="fp8_row"))
    assert not accepted(v4_step(record="bf16", window_record="fp8_ds"))
    assert not accepted(v4_step(record="fp8_ds", window_record="bf16"))


def combine(parts: Tensor, lse: Tensor, sink: Tensor, tokens: Tensor, rope: Tensor | None) -> Any:
    """Output and lse of parts [tokens, splits, heads, width] with natural `lse` of each."""
    count, splits, heads = lse.shape
    blocks = heads // kernel.HEADS_PER_PROGRAM
    packed = torch.full((count, splits, blocks, 64 * (1 + WIDTH // 2)), torch.nan)
    packed[..., :64] = (lse / torch.log(torch.tensor(2.0))).reshape(count, splits, blocks, 64)
    sums = parts.bfloat16().reshape(count, splits, blocks, 64 * WIDTH)
    packed[..., 64:] = sums.view(torch.float32)
    out = torch.full((count, heads, WIDTH), torch.nan, dtype=torch.bfloat16)
    out_lse = torch.full((count, heads), torch.nan)
    kernel._combine_kernel[(count * heads,)](
        packed, sink, tokens, out, out_lse, sink if rope is None else rope,
        out.stride(0), out_lse.stride(0), splits,
        HEADS=heads, WIDTH=WIDTH, ROPE=0 if rope is None else ROPE, ROWS=4,
    )  # fmt: skip
    return out, out_lse


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")
@pytest.mark.parametrize(("splits", "heads", "turn"), [(2, 64, False), (5, 128, True)])
def test_parts_are_added_as_one_softmax(splits: int, heads: int, turn: bool) -> None:
    """Parts without keys, sinks at the ends, padding: against the formula in float64, near as
    an interpreter is that cuts bf16 off instead of rounding."""
    rng = torch.Generator().manual_seed(splits)
    parts = torch.randn(2, splits, heads, WIDTH, generator=rng).bfloat16()
    lse = torch.randn(2, splits, heads, generator=rng) * 4
    lse[1, 0, :20], parts[1, 0, :20] = -torch.inf, 0
    lse[1, -1, 20:40], parts[1, -1, 20:40] = -torch.inf, 0
    lse[1, :, 45], parts[1, :, 45] = -torch.inf, 0  # no key at all
    sink = torch.randn(heads, generator=rng)
    sink[:5] = torch.tensor([-torch.inf, 40.0, -80.0, 300.0, torch.inf])
    tokens = torch.tensor([(-1, -1, -1, -1), (4, 2, 0, 0)], dtype=torch.int32)
    angles = torch.rand(3, ROPE // 2, generator=rng) * 6
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1)
    out, out_lse = combine(parts, lse, sink, tokens, rope if turn else None)

    assert torch.isnan(out[0]).all()
    assert torch.isnan(out_lse[0]).all()
    weight = lse[1].double().exp()
    total = weight.sum(dim=0)
    wanted = (weight[..., None] * parts[1].double()).sum(dim=0)
    wanted /= (total + sink.double().exp())[:, None]
    if turn:
        pairs = torch.view_as_complex(wanted[:, -ROPE:].reshape(heads, -1, 2).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angles[2]), -angles[2]).to(pairs.dtype)
        wanted[:, -ROPE:] = torch.view_as_real(turned).flatten(1)
    lives = total > 0
    error = (out[1].double() - wanted)[lives].norm(dim=-1)
    assert (error <= 2**-7 * wanted[lives].norm(dim=-1) + 1e-37).all()  # bf16 ends there
    assert torch.allclose(out_lse[1].double()[lives], total[lives].log(), atol=1e-5)
    assert (out[1][~lives] == 0).all()
    assert (out_lse[1][~lives] == -torch.inf).all()

"""Top-k compiled on a GPU against the reference, index for index, at real lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.kernels import top_k
from dsv4.kernels.sizes import MANY_ROWS
from dsv4.reference import top_k as reference_top_k
from tests.oracles.indexer import make_tokens
from tests.support.numbers import Numbers

pytestmark = pytest.mark.gpu

# rows x scores: the row in registers, its list, slices of 2,048 and of 8,192, a program per row
SHAPES = ((3, 2048), (9, 8192), (2, 32_768), (9, 262_144), (MANY_ROWS + 3, 32_768))
UNTOUCHED = -7


def some_scores(kind: str, rows: int, columns: int) -> Tensor:
    x = Numbers(columns).normal(rows, columns)
    if kind == "ties":
        x = torch.round(x * 2)
    elif kind == "equal":
        x = torch.full_like(x, -2.5)
    elif kind == "one place":  # more of the highest than the list holds, in few bins
        x[:, 1000:1900] += 20
    elif kind == "newest":  # as of blocks of entries
        x[:, -40] = torch.inf
    elif kind == "not finite":
        for nth, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0)):
            x[:, nth::6] = value
    return x.to(torch.bfloat16).float()


@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "one place", "newest", "not finite"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_top_k(rows: int, columns: int, kind: str, k: int) -> None:
    scores = some_scores(kind, rows, columns).cuda()
    seen = [columns - 37 * row for row in range(rows)]
    tokens = make_tokens([(0, 4 * n + 2) for n in seen]).cuda()
    expected = torch.full((rows, k), UNTOUCHED, dtype=torch.int32, device="cuda")
    reference_top_k.top_k(scores, tokens=tokens, ratio=4, out=expected)
    size = top_k.top_k_workspace_bytes(rows, columns, k)
    for bf16_scores in (True, True, False):
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        found = torch.full_like(expected, UNTOUCHED)
        top_k.top_k(
            scores, tokens=tokens, ratio=4, out=found, bf16_scores=bf16_scores,
            workspace=workspace,
        )  # fmt: skip
        assert torch.equal(found, expected)

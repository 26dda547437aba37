"""How much each query wants each entry: I = Σ_h w_h · ReLU(q_h · k)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import EntrySource, Scoring
from dsv4.ops.constants import MIN_HEADS
from dsv4.reference.numerics import to_bf16
from dsv4.reference.pages import read_records
from dsv4.reference.runs import runs

# Tokens of a run, and dots that are taken on at once.
RUN_TOKENS = 64
MAX_DOTS = 1 << 18


def index_scores(call: Scoring) -> None:
    """Tokens of one request share the keys they read; dots are each token's own, so no bit of a
    score depends on the neighbours. Dots of bf16 numbers are exact while their products, of 16
    bits, differ by at most 2^30 in size: fp64 has room to add 128 of them."""
    heads = call.q.shape[1]
    for run in runs(call.tokens, RUN_TOKENS):
        scored = [
            (row, min(visible, call.scores.shape[1]))
            for row, position in zip(run.rows, run.positions, strict=True)
            if (visible := (position + 1) // call.keys.ratio) > call.skip_visible
        ]
        most = max((count for _, count in scored), default=0)
        if not most:
            continue
        entry = torch.arange(most, device=call.q.device)
        keys = load_entries(call.keys, run.slot, entry).double()
        at_once = max(1, MAX_DOTS // (most * heads))
        for nth in range(0, len(scored), at_once):
            part = scored[nth : nth + at_once]
            for (row, count), total in zip(part, _scores(call, keys, part), strict=True):
                call.scores[row, :count] = total[:count]


def _scores(call: Scoring, keys: Tensor, scored: list[tuple[int, int]]) -> Tensor:
    """fp32 [tokens, keys] of some rows of tokens, each over the first of the fp64 keys
    [keys, width]; anything behind them."""
    rows = [row for row, _ in scored]
    q = call.q[rows].double()  # [tokens, heads, width]
    dots = q.new_zeros(len(rows), len(keys), q.shape[1])
    for of_token, dot, (_, count) in zip(q, dots, scored, strict=True):
        torch.mm(keys[:count], of_token.T, out=dot[:count])
    weight = call.weights[rows].float().unsqueeze(1)
    if call.round_bf16:
        product = to_bf16(relu(to_bf16(dots.float()).float()) * weight).float()
        total = to_bf16(head_sum(product)).float()
    else:
        total = head_sum(relu(dots.float()) * weight)
    # one zero and one NaN, whatever the order of a backend's sum gave
    total = torch.where(total == 0, 0.0, total)
    return torch.where(torch.isnan(total), torch.nan, total)


def relu(x: Tensor) -> Tensor:
    return torch.where(x < 0, 0.0, x)


def head_sum(x: Tensor) -> Tensor:
    """Sum over the last axis in fp32, in a fixed order: neighbours first, then the upper half is
    added to the lower half until one is left. Padded with zeros to a power of two, at least 16."""
    count = MIN_HEADS
    while count < x.shape[-1]:
        count *= 2
    x = torch.nn.functional.pad(x, (0, count - x.shape[-1]))
    x = x[..., 0::2] + x[..., 1::2]
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)


def load_entries(source: EntrySource, slot: int, entry: Tensor) -> Tensor:
    """The decoded records of some entries of a slot, [entries, width]."""
    block_id = source.block_table[slot, entry // source.page.rows].long()
    return read_records(source.arena, source.page, block_id, entry % source.page.rows)

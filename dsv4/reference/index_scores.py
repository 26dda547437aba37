"""How much each query wants each entry: I = Σ_h w_h · ReLU(q_h · k)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import EntrySource, Scoring
from dsv4.ops.constants import MIN_HEADS
from dsv4.reference.numerics import to_bf16
from dsv4.reference.pages import read_records
from dsv4.reference.runs import runs

# Tokens of a run, and dots of the tokens that are multiplied at once.
RUN_TOKENS = 64
MAX_DOTS = 1 << 21


def index_scores(call: Scoring) -> None:
    """Tokens of one request share the keys they read. Dots of bf16 numbers are exact: products
    have 16 bits, and fp64 has room to add them."""
    heads = call.q.shape[1]
    for run in runs(call.tokens, RUN_TOKENS):
        visible = [(position + 1) // call.keys.ratio for position in run.positions]
        scored = [
            (row, min(count, call.scores.shape[1]))
            for row, count in zip(run.rows, visible, strict=True)
            if count > call.skip_visible
        ]
        most = max((count for _, count in scored), default=0)
        if not most:
            continue
        entry = torch.arange(most, device=call.q.device)
        keys = load_entries(call.keys, run.slot, entry).double()
        at_once = max(1, MAX_DOTS // (most * heads))
        for nth in range(0, len(scored), at_once):
            part = scored[nth : nth + at_once]
            rows = [row for row, _ in part]
            for (row, count), total in zip(part, _scores(call, keys, rows), strict=True):
                call.scores[row, :count] = total[:count]


def _scores(call: Scoring, keys: Tensor, rows: list[int]) -> Tensor:
    """fp32 [tokens, keys] of some tokens and fp64 keys [keys, width]."""
    q = call.q[rows].double()  # [tokens, heads, width]
    dot = (keys @ q.flatten(0, 1).T).float().unflatten(1, q.shape[:2])  # [keys, tokens, heads]
    weight = call.weights[rows].float()
    if call.round_bf16:
        product = to_bf16(relu(to_bf16(dot).float()) * weight).float()
        total = to_bf16(head_sum(product)).float()
    else:
        total = head_sum(relu(dot) * weight)
    # one zero and one NaN, whatever the order of a backend's sum gave
    total = torch.where(total == 0, torch.zeros_like(total), total)
    total = torch.where(torch.isnan(total), torch.full_like(total, torch.nan), total)
    return total.T


def relu(x: Tensor) -> Tensor:
    return torch.where(x < 0, torch.zeros_like(x), x)


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

"""The score of each entry for each query: I = Σ_h w_h · ReLU(q_h · k)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.calls import Scoring
from dsv4.ops.constants import MIN_HEADS
from dsv4.reference.numerics import to_bf16
from dsv4.reference.pages import read_entries
from dsv4.reference.runs import runs

# Tokens of a run, keys that are read and dots that are computed at a time.
RUN_TOKENS = 64
MAX_KEYS = 1 << 14
MAX_DOTS = 1 << 18

Scored = tuple[int, int, int]  # a token's row, where its keys begin, how many there are


def index_scores(call: Scoring) -> None:
    """Tokens of one request share the keys they read; dots are each token's own, so no bit of a
    score depends on the neighbours. Dots of bf16 numbers are exact while their products, of 16
    bits, differ by at most 2^30 in size: fp64 has room to add 128 of them."""
    found, columns = runs(call.tokens, RUN_TOKENS), call.scores.shape[1]
    scored: list[Scored] = []
    slots: list[int] = []
    counts: list[int] = []
    keys = 0
    for first, end, slot in zip(found.firsts, found.ends, found.slots, strict=True):
        most = 0
        for row in range(first, end):
            visible = (found.positions[row] + 1) // call.keys.ratio
            if visible > call.skip_visible:
                count = min(visible, columns)
                most = max(most, count)
                scored.append((row, keys, count))
        if not most:
            continue
        slots.append(slot)
        counts.append(most)
        keys += most
        if keys >= MAX_KEYS:
            _score(call, slots, counts, scored)
            scored, slots, counts, keys = [], [], [], 0
    if keys:
        _score(call, slots, counts, scored)


def _score(call: Scoring, slots: list[int], counts: list[int], scored: list[Scored]) -> None:
    """Scores tokens over the first entries, `counts` of them, of some slots."""
    device, heads = call.q.device, call.q.shape[1]
    many = np.array(counts)
    ends = np.add.accumulate(many)
    entry = torch.from_numpy(np.arange(ends[-1]) - (ends - many).repeat(many)).to(device)
    slot = torch.from_numpy(np.array(slots).repeat(many)).to(device)
    keys = read_entries(call.keys, slot, entry).double()
    part: list[Scored] = []
    most = 0
    for each in scored:
        if part and (len(part) + 1) * max(most, each[2]) * heads > MAX_DOTS:
            _scores(call, keys, part, most)
            part, most = [], 0
        part.append(each)
        most = max(most, each[2])
    if part:
        _scores(call, keys, part, most)


def _scores(call: Scoring, keys: Tensor, scored: list[Scored], most: int) -> None:
    """Scores tokens that see at most as many entries as there are fp64 `keys`."""
    first, end = scored[0][0], scored[-1][0] + 1
    rows = slice(first, end) if end - first == len(scored) else [row for row, _, _ in scored]
    q = call.q[rows].double()  # [tokens, heads, width]
    dots = q.new_zeros(len(scored), most, q.shape[1])
    for nth, (_, begin, count) in enumerate(scored):
        torch.mm(keys[begin : begin + count], q[nth].T, out=dots[nth, :count])
    weight = call.weights[rows].float().unsqueeze(1)
    if call.round_bf16:
        product = to_bf16(relu(to_bf16(dots.float()).float()) * weight).float()
        total = to_bf16(head_sum(product)).float()
    else:
        total = head_sum(relu(dots.float()) * weight)
    # one zero and one NaN, whatever the order of a backend's sum gave
    total = torch.where(total == 0, 0.0, total)
    total = torch.where(torch.isnan(total), torch.nan, total)
    for nth, (row, _, count) in enumerate(scored):
        call.scores[row, :count] = total[nth, :count]


def relu(x: Tensor) -> Tensor:
    return torch.where(x < 0, 0.0, x)


def head_sum(x: Tensor) -> Tensor:
    """Sum over the last axis in fp32, in a fixed order: neighbours first, then the upper half is
    added to the lower half until one is left. Padded with zeros to a power of two, at least 16."""
    count, heads = MIN_HEADS, x.shape[-1]
    while count < heads:
        count *= 2
    if count > heads:
        x = torch.nn.functional.pad(x, (0, count - heads))
    x = x[..., 0::2] + x[..., 1::2]
    while (half := x.shape[-1] // 2) >= 1:
        lower, upper = x.split_with_sizes((half, half), dim=-1)
        x = lower + upper
    return x.squeeze(-1)

"""How much each query wants each entry: I = Σ_h w_h · ReLU(q_h · k)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import EntrySource, Scoring
from dsv4.ops.columns import token_columns
from dsv4.ops.constants import MIN_HEADS
from dsv4.reference.numerics import to_bf16
from dsv4.reference.pages import read_records


def index_scores(call: Scoring) -> None:
    """Token after token. Dots of bf16 numbers are exact while their products, of 16 bits, differ by
    at most 2^30 in size: fp64 has room to add 128 of them."""
    slots, positions = (c.tolist() for c in token_columns(call.tokens)[:2])
    for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        visible = (position + 1) // call.keys.ratio
        if slot < 0 or visible <= call.skip_visible:
            continue
        entry = torch.arange(min(visible, call.scores.shape[1]), device=call.q.device)
        k = load_entries(call.keys, slot, entry)
        dot = (k.double() @ call.q[token].double().T).float()
        weight = call.weights[token].float()
        if call.round_bf16:
            product = to_bf16(relu(to_bf16(dot).float()) * weight).float()
            total = to_bf16(head_sum(product)).float()
        else:
            total = head_sum(relu(dot) * weight)
        # one zero and one NaN, whatever the order of a backend's sum gave
        total = torch.where(total == 0, torch.zeros_like(total), total)
        total = torch.where(torch.isnan(total), torch.full_like(total, torch.nan), total)
        call.scores[token, : len(entry)] = total


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

"""The same model without a cache, all tokens at once and differentiable: for training, and to
compare the form on the cache with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.demo_model.network import Block, Network, normed
from dsv4.model import AttentionType
from dsv4.reference.numerics import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`logits` [batch, tokens, vocabulary]. `index_loss` is the mean divergence of the indexer's
    scores from where attention looks, over all layers that select; None unless asked for."""

    logits: Tensor
    index_loss: Tensor | None


def run(
    network: Network,
    ids: Tensor,
    *,
    index_loss: bool = False,
    select: bool = True,
    rows: Tensor | None = None,
) -> Result:
    """All tokens of `ids` int64 [batch, tokens], from position 0. Without `select` every query
    reads all entries that it sees, whatever the indexer scores. With `rows` int64 the last layer
    asks only at these positions, and there are logits for no others."""
    hidden = network.embed(ids)
    losses = []
    for nth, block in enumerate(network.blocks):
        asked = rows if nth + 1 == len(network.blocks) else None
        attended, loss = _attention(
            block, block.attention_input(hidden), asked, index_loss=index_loss, select=select
        )
        hidden = (hidden if asked is None else hidden[:, asked]) + attended
        hidden = hidden + block.feed_forward(hidden)
        if loss is not None:
            losses.append(loss)
    mean = torch.stack(losses).mean() if losses else None
    return Result(logits=network.logits(hidden), index_loss=mean)


def _attention(
    block: Block, x: Tensor, rows: Tensor | None, *, index_loss: bool, select: bool
) -> tuple[Tensor, Tensor | None]:
    spec, layer, weights = block.network.spec, block.spec, block.attention
    count = x.shape[1]
    position = torch.arange(count) if rows is None else rows
    asking = x if rows is None else x[:, rows]
    cos, sin = block.rope[:count].chunk(2, dim=-1)
    q_cos, q_sin = cos[position, None], sin[position, None]
    residual = block.residual(asking)
    q = rotate(block.queries(residual).float(), q_cos, q_sin)
    keys = rotate(normed(block.kv(x).float(), weights["kv_norm"], spec.rms_eps), cos, sin)
    near = pad(keys, (0, 0, spec.window - 1, 0)).unfold(1, spec.window, 1)  # […, width, window]
    near = near if rows is None else near[:, rows]
    logits = torch.einsum("bthc,btcw->bthw", q, near)
    seen = position[:, None] > torch.arange(spec.window - 2, -2, -1)  # not before the text
    seen = seen[:, None].expand(*q.shape[:3], spec.window)
    loss, entries, most = None, None, count // layer.ratio if layer.ratio else 0
    if most:
        entries = _entries(block, x, "compressor")
        visible = (position[:, None] + 1) // layer.ratio > torch.arange(most)
        chosen = visible.expand(x.shape[0], len(position), most)
        scores = None
        if layer.attention is AttentionType.CSA and (index_loss or most > spec.index_topk):
            scores = _index_scores(block, x, residual, position)
            if select:
                chosen = _chosen(scores, visible, spec.index_topk)
        if scores is not None and index_loss:
            loss = _divergence(scores, q, entries, visible)
        logits = torch.cat((logits, torch.einsum("bthc,bsc->bths", q, entries)), dim=-1)
        chosen = chosen[:, :, None].expand(*q.shape[:3], most)
        seen = torch.cat((seen, chosen), dim=-1)
    logits = (logits * spec.head_dim**-0.5).masked_fill(~seen, -torch.inf)
    sinks = weights["sinks"].expand(*logits.shape[:-1])[..., None]
    weight = torch.cat((logits.float(), sinks), dim=-1).softmax(dim=-1)[..., :-1]
    attended = torch.einsum("bthw,btcw->bthc", weight[..., : spec.window], near)
    if entries is not None:
        attended = attended + torch.einsum("bths,bsc->bthc", weight[..., spec.window :], entries)
    return block.output(rotate(attended.float(), q_cos, -q_sin)), loss


def _entries(block: Block, x: Tensor, compressor: str) -> Tensor:
    """What the groups of `x` [batch, tokens, hidden] close into: [batch, groups, width]."""
    ratio, weights = block.spec.ratio, block.attention
    groups = x.shape[1] // ratio
    whole = x[:, : groups * ratio]
    values, gates = (each.unflatten(1, (groups, ratio)) for each in block.pooled(whole, compressor))
    gates = gates + weights[f"{compressor}.position_bias"]
    if block.spec.overlap:
        values, gates = _with_previous(values, 0.0), _with_previous(gates, -torch.inf)
    latent = (values.float() * gates.float().softmax(dim=2)).sum(dim=2)
    latent = normed(latent, weights[f"{compressor}.kv_norm"], block.network.spec.rms_eps)
    cos, sin = block.rope[: groups * ratio : ratio].chunk(2, dim=-1)
    return rotate(latent, cos, sin)


def _with_previous(x: Tensor, nothing: float) -> Tensor:
    """[batch, groups, ratio, 2 · width], columns [previous | current], as
    [batch, groups, 2 · ratio, width]: the tokens of the group before, then its own."""
    before, own = x.chunk(2, dim=-1)
    before = pad(before[:, :-1], (0, 0, 0, 0, 1, 0), value=nothing)
    return torch.cat((before, own), dim=2)


def _index_scores(block: Block, x: Tensor, residual: Tensor, position: Tensor) -> Tensor:
    """[batch, rows, entries], of queries at these positions. The Hadamard transform of the cache
    changes no product of two vectors, so there is none here. What the indexer learns does not
    change what it reads."""
    x, residual = x.detach(), residual.detach()
    keys = _entries(block, x, "compressor.indexer")
    q, per_head = block.index_queries(x[:, position], residual)
    cos, sin = block.rope[position, None].chunk(2, dim=-1)
    dots = torch.einsum("bthc,bsc->bths", rotate(q.float(), cos, sin), keys)
    return torch.einsum("bths,bth->bts", dots.relu(), per_head)


def _chosen(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Which entries each query reads: the visible ones with the highest scores."""
    if scores.shape[-1] <= top_k:
        return visible.expand_as(scores)
    ranked = scores.detach().masked_fill(~visible, -torch.inf).topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ranked, True)
    return chosen & visible


def _divergence(scores: Tensor, q: Tensor, entries: Tensor, visible: Tensor) -> Tensor:
    """Of the softmax of the scores from where attention looks among all visible entries."""
    with torch.no_grad():
        logits = torch.einsum("bthc,bsc->bths", q, entries) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~visible[:, None], -1e9)
        wanted = logits.softmax(dim=-1).mean(dim=2)
        sees = visible.any(dim=-1)
    found = scores.masked_fill(~visible, -1e9).log_softmax(dim=-1)
    each = (wanted * (wanted.clamp_min(1e-9).log() - found)).sum(dim=-1)
    mean: Tensor = each[:, sees].mean()
    return mean

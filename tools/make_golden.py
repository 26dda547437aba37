"""Makes a golden file in the format of `dsv4 verify`, from the specification alone.

    python tools/make_golden.py OUT.npz [--seed 1] [--tokens 140] [--head-dim 128] ...

Imports nothing of dsv4: softmax, norm, rotation and quantisation are written here a second time,
the plain way, so that the file is evidence and not an echo.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch

ROPE_DIM = 64


def rope_angles(positions: torch.Tensor, theta: float, yarn: bool) -> torch.Tensor:
    exponent = torch.arange(0, ROPE_DIM, 2, dtype=torch.float32) / ROPE_DIM
    frequency = 1.0 / theta**exponent
    if yarn:
        bounds = [
            ROPE_DIM * math.log(65536 / (beta * 2 * math.pi)) / (2 * math.log(theta))
            for beta in (32, 1)
        ]
        low, high = math.floor(bounds[0]), math.ceil(bounds[1])
        ramp = ((torch.arange(ROPE_DIM // 2) - low) / (high - low)).clamp(0, 1)
        frequency = frequency / 16 * ramp + frequency * (1 - ramp)
    return positions.float()[:, None] * frequency


def rope(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    plain, turned = x[..., :-ROPE_DIM], x[..., -ROPE_DIM:].float()
    pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
    while angles.dim() < pairs.dim():
        angles = angles.unsqueeze(1)
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat((plain, turned.bfloat16()), dim=-1)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))).bfloat16()


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def fp8(x: torch.Tensor) -> torch.Tensor:
    nope = x[..., :-ROPE_DIM].float().unflatten(-1, (-1, 64))
    amax = nope.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = power_of_two_above(amax * torch.tensor(1 / 448))
    codes = (nope / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return torch.cat(((codes * scale).flatten(-2).bfloat16(), x[..., -ROPE_DIM:]), dim=-1)


def fp4(x: torch.Tensor) -> torch.Tensor:
    tiles = x.float().unflatten(-1, (-1, 32))
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = power_of_two_above(amax * torch.tensor(1 / 6))
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = ((tiles / scale).abs().unsqueeze(-1) - grid).abs()
    # a tie has two nearest codes, neighbours: the even one wins
    near = distance == distance.amin(-1, keepdim=True)
    first = near.int().argmax(-1)
    code = torch.where((near.sum(-1) > 1) & (first % 2 == 1), first + 1, first)
    return (grid[code] * torch.sign(tiles) * scale).flatten(-2).bfloat16()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return (x.float() @ matrix * x.shape[-1] ** -0.5).bfloat16()


def compress(c, z, ape, norm, ratio, overlap):  # type: ignore[no-untyped-def]
    groups = c.shape[0] // ratio
    width = norm.shape[0]
    entries = []
    for g in range(groups):
        rows = slice(g * ratio, (g + 1) * ratio)
        values, logits = [c[rows, -width:]], [(z[rows] + ape)[:, -width:]]
        if overlap and g:
            before = slice((g - 1) * ratio, g * ratio)
            values.append(c[before, :width])
            logits.append((z[before] + ape)[:, :width])
        weight = torch.softmax(torch.cat(logits), dim=0)
        entries.append((torch.cat(values) * weight).sum(0).bfloat16())
    stacked = torch.stack(entries) if entries else torch.zeros(0, width).bfloat16()
    positions = torch.arange(groups) * ratio
    return rope(rms(stacked, norm), rope_angles(positions, 160000.0, True))


def attention(q, sink, keys, indices):  # type: ignore[no-untyped-def]
    out = torch.zeros_like(q)
    for t in range(q.shape[0]):
        k = keys[indices[t][indices[t] >= 0].long()].float()
        logits = q[t].float() @ k.T * q.shape[-1] ** -0.5
        top = logits.amax(-1, keepdim=True)
        p = torch.exp(logits - top)
        denominator = p.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top)
        out[t] = (p.bfloat16().float() @ k / denominator).bfloat16()
    return out


def make(args: argparse.Namespace) -> dict[str, np.ndarray]:
    torch.manual_seed(args.seed)
    n, width = args.tokens, args.head_dim
    arrays: dict[str, torch.Tensor] = {}
    positions = torch.arange(n)

    def short(*shape: int) -> torch.Tensor:  # few mantissa bits: the file compresses better
        return torch.randn(*shape).bfloat16().float()

    for kind, ratio in (("swa", 0), ("csa", 4), ("hca", 128)):
        angles = rope_angles(positions, 160000.0 if ratio else 10000.0, ratio > 0)
        kv = rope((short(n, width) * 2).bfloat16(), angles)
        arrays[f"{kind}/kv"] = kv
        quantised = fp8(kv)
        arrays[f"{kind}/kv_quant"] = quantised
        q = rope(torch.randn(n, args.heads, width).bfloat16(), angles)
        sink = torch.randn(args.heads)
        arrays[f"{kind}/q"], arrays[f"{kind}/sink"] = q, sink
        window = positions[:, None] - torch.arange(args.window - 1, -1, -1)
        indices = torch.where(window >= 0, window, -1)
        keys = quantised
        if ratio:
            columns = width * (2 if ratio == 4 else 1)
            c, z, ape = short(n, columns), short(n, columns), short(ratio, columns)
            norm = 1 + 0.1 * short(width)
            entries = fp8(compress(c, z, ape, norm, ratio, ratio == 4))
            for name, value in (("C", c), ("Z", z), ("ape", ape), ("norm", norm)):
                arrays[f"{kind}/{name}"] = value
            arrays[f"{kind}/entries"] = entries
            keys = torch.cat((quantised, entries))
            visible = (positions + 1) // ratio
            chosen = torch.arange(len(entries)).expand(n, -1)
            if ratio == 4:
                chosen = index(arrays, short, n, args, angles, visible)
            chosen = torch.where(chosen < visible[:, None], chosen, -1)
            indices = torch.cat((indices, torch.where(chosen >= 0, chosen + n, -1)), dim=1)
        arrays[f"{kind}/indices"] = indices.int()
        arrays[f"{kind}/out"] = attention(q, sink, keys, indices)
    meta = [args.seed, n, args.heads, args.index_heads, args.top_k, args.window]
    result = {
        name: (
            v.view(torch.int16).numpy().view(np.uint16) if v.dtype == torch.bfloat16 else v.numpy()
        )
        for name, v in arrays.items()
    }
    return {**result, "meta": np.array(meta, dtype=np.int64)}


def index(arrays, short, n, args, angles, visible):  # type: ignore[no-untyped-def]
    c, z, ape = short(n, 256), short(n, 256), short(4, 256)
    norm = 1 + 0.1 * short(128)
    keys = fp4(hadamard(compress(c, z, ape, norm, 4, True)))
    q = fp4(hadamard(rope(torch.randn(n, args.index_heads, 128).bfloat16(), angles)))
    weights = (
        torch.randn(n, args.index_heads).bfloat16() * (128 * args.index_heads) ** -0.5
    ).bfloat16()
    dots = torch.einsum("thd,sd->ths", q.float(), keys.float()).bfloat16().relu()
    scores = (dots * weights[..., None]).float().sum(1).bfloat16()
    names = ("index_C", "index_Z", "index_ape", "index_norm", "index_keys", "index_q")
    for name, value in zip(names, (c, z, ape, norm, keys, q), strict=True):
        arrays[f"csa/{name}"] = value
    arrays["csa/index_weights"], arrays["csa/index_scores"] = weights, scores
    hidden = torch.arange(keys.shape[0]) >= visible[:, None]
    masked = scores.float().masked_fill(hidden, -torch.inf)
    return masked.topk(min(args.top_k, keys.shape[0]), dim=-1).indices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    for name, default in (
        ("seed", 1), ("tokens", 140), ("heads", 2), ("index-heads", 4), ("top-k", 8),
        ("window", 128), ("head-dim", 128),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    np.savez_compressed(args.out, **make(args))


if __name__ == "__main__":
    main()

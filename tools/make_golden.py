"""Makes a golden file in the format of `dsv4 verify`, from the specification alone.

    python tools/make_golden.py OUT.npz [--seed 1] [--tokens 140] [--head-dim 128] ...
    python tools/make_golden.py OUT.npz --v41 [--candidate-blocks 4] ...        DeepSeek-V4.1

Imports nothing of dsv4: softmax, norm, rotation and quantisation are written here a second time,
the plain way, so that the file is evidence and not an echo.
"""

from __future__ import annotations

import argparse
import math
from itertools import count

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


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).bfloat16()


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def fp8(x: torch.Tensor) -> torch.Tensor:
    nope = x[..., :-ROPE_DIM].float().unflatten(-1, (-1, 64))
    amax = nope.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = power_of_two_above(amax * torch.tensor(1 / 448))
    codes = (nope / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return torch.cat(((codes * scale).flatten(-2).bfloat16(), x[..., -ROPE_DIM:]), dim=-1)


GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7 of the nearest magnitudes. A tie has two, neighbours: the even one wins."""
    distance = (x.abs().clamp_max(6.0).unsqueeze(-1) - GRID).abs()
    near = distance == distance.amin(-1, keepdim=True)
    first = near.int().argmax(-1)
    return torch.where((near.sum(-1) > 1) & (first % 2 == 1), first + 1, first)


def fp4(x: torch.Tensor) -> torch.Tensor:
    tiles = x.float().unflatten(-1, (-1, 32))
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = power_of_two_above(amax * torch.tensor(1 / 6))
    return (GRID[e2m1(tiles / scale)] * torch.sign(tiles) * scale).flatten(-2).bfloat16()


# ---- DeepSeek-V4.1: records as values and as bytes --------------------------------------------


def window_record(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 in tiles of 32: values, and 512 codes followed by 16 exponents."""
    tiles = x.float().unflatten(-1, (-1, 32))
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = power_of_two_above(amax * torch.tensor(1 / 448))
    codes = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    exponent = (torch.frexp(scale)[1] - 1 + 127).to(torch.uint8)
    stored = torch.cat((codes.view(torch.uint8).flatten(-2), exponent.flatten(-2)), dim=-1)
    return (codes.float() * scale).flatten(-2).bfloat16(), stored


def entry_record(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP4 in groups of 16 with E4M3 scales: values, and nibbles followed by the scales."""
    tiles = x.float().unflatten(-1, (-1, 16))
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (amax / torch.tensor(6.0)).clamp_max(448).to(torch.float8_e4m3fn)
    code = e2m1(tiles / scale.float())
    values = (GRID[code] * scale.float()).copysign(tiles)
    stored = torch.cat((nibbles(code, tiles), scale.view(torch.uint8).flatten(-2)), dim=-1)
    return values.flatten(-2).bfloat16(), stored


def key_record(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = x.float().unflatten(-1, (-1, 32))
    amax = tiles.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = power_of_two_above(amax * torch.tensor(1 / 6))
    exponent = (torch.frexp(scale)[1] - 1 + 127).to(torch.uint8)
    stored = torch.cat((nibbles(e2m1(tiles / scale), tiles), exponent.flatten(-2)), dim=-1)
    return fp4(x), stored


def nibbles(code: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    code = (code + 8 * torch.signbit(signed).int()).flatten(-2).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


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
    return plain(arrays, [args.seed, n, args.heads, args.index_heads, args.top_k, args.window])


def plain(arrays: dict[str, torch.Tensor], meta: list[int]) -> dict[str, np.ndarray]:
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


LAYERS_V41 = {  # kind: ratio, whose entries, whose selection
    "swa": (0, "", ""),
    "full2a": (2, "full2a", "full2a"),
    "reuse2a": (2, "full2a", "full2a"),
    "full2b": (2, "full2b", "full2b"),
    "full1": (1, "full1", "full1"),
    "reindex1": (1, "full1", "reindex1"),
    "reuse1": (1, "full1", "reindex1"),
}


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending columns of the highest scores of each row; of equal ones the first."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return torch.sort(order[:, : min(count, scores.shape[1])], dim=-1).values


def make_v41(args: argparse.Namespace) -> dict[str, np.ndarray]:
    torch.manual_seed(args.seed)
    n, width, heads = args.tokens, args.head_dim, args.heads
    arrays: dict[str, torch.Tensor] = {}
    positions = torch.arange(n)
    selections: dict[str, torch.Tensor] = {}
    candidates = torch.zeros(0)

    def short(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).bfloat16().float()

    for kind, (ratio, owner, selector) in LAYERS_V41.items():
        angles = rope_angles(positions, 160000.0 if ratio else 10000.0, ratio > 0)
        kv = rope((short(n, width) * 2).bfloat16(), angles)
        quantised, stored = window_record(kv)
        for name, value in (("kv", kv), ("kv_quant", quantised), ("kv_bytes", stored)):
            arrays[f"{kind}/{name}"] = value
        q, sink = rope(torch.randn(n, heads, width).bfloat16(), angles), torch.randn(heads)
        arrays[f"{kind}/q"], arrays[f"{kind}/sink"] = q, sink
        window = positions[:, None] - torch.arange(args.window - 1, -1, -1)
        indices = torch.where(window >= 0, window, -1)
        keys = quantised
        if owner == kind:
            compress_v41(arrays, kind, short, n, width, ratio)
        if ratio:
            visible = (positions + 1) // ratio
            keys = torch.cat((quantised, arrays[f"{owner}/entries"]))
        if selector == kind:
            masked = score_v41(arrays, kind, owner, n, args.index_heads, angles, visible)
            if kind == "full1":
                blocks = torch.nn.functional.pad(masked, (0, -n % 8), value=-torch.inf)
                blocks = blocks.unflatten(-1, (-1, 8)).amax(-1)
                blocks[positions, (visible - 1) // 8] = torch.inf
                kept = best(blocks, args.candidate_blocks)
                candidates = torch.zeros(blocks.shape, dtype=torch.bool)
                candidates[positions[:, None], kept] = True
                candidates &= blocks > -torch.inf
                packed = np.packbits(candidates.numpy(), axis=1)
                arrays[f"{kind}/candidate_blocks"] = torch.from_numpy(packed)
            elif kind == "reindex1":
                inside = candidates.repeat_interleave(8, dim=1)[:, :n]
                masked = masked.masked_fill(~inside, -torch.inf)
            chosen = best(masked, args.top_k)
            selections[kind] = torch.where(chosen < visible[:, None], chosen, -1)
        if ratio:
            chosen = selections[selector]
            indices = torch.cat((indices, torch.where(chosen >= 0, chosen + n, -1)), dim=1)
        arrays[f"{kind}/indices"] = indices.int()
        arrays[f"{kind}/out"] = attention(q, sink, keys, indices)
    draft_v41(arrays, n, args.window, heads, width)
    meta = [args.seed, n, heads, args.index_heads, args.top_k, args.window, n]
    return plain(arrays, [*meta, args.candidate_blocks, 8])


def draft_v41(arrays, n, window, heads, width):  # type: ignore[no-untyped-def]
    """A draft layer: five queries over the newest window and five keys that are not stored."""
    kv = (torch.randn(n, width) * 2).bfloat16()
    draft, q = torch.randn(5, width).bfloat16(), torch.randn(5, heads, width).bfloat16()
    quantised, sink = window_record(kv)[0], torch.randn(heads)
    keys = torch.cat((quantised[-window:], window_record(draft)[0]))
    out = attention(q, sink, keys, torch.arange(len(keys)).expand(5, -1))
    for name, value in (
        ("kv", kv), ("kv_quant", quantised), ("draft_kv", draft), ("draft_q", q), ("sink", sink),
        ("draft_out", out),
    ):  # fmt: skip
        arrays[f"dspark/{name}"] = value


def undecided(x, margin):  # type: ignore[no-untyped-def]
    """Whether numbers lie so near the middle of two bf16 numbers, `margin` of their distance, that
    the last bits of fp32 arithmetic decide which one they are rounded to."""
    fraction = torch.frexp(x.double().abs()).mantissa * 256
    return (fraction.frac() - 0.5).abs() < margin


def exact_rms(x, weight):  # type: ignore[no-untyped-def]
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()


def settle_v41(c, z, norm, wk, key_norm, groups, ratio):  # type: ignore[no-untyped-def]
    """Sets to 0 what of `c` leads to a latent that fp32 cannot decide, and where it cannot decide
    an index key, one channel after the other until it can."""
    for turn in count():
        pairs = c[: ratio * groups].unflatten(0, (groups, ratio)).double()
        gates = torch.zeros_like(pairs) if z is None else z[: ratio * groups].view_as(pairs)
        pooled = (torch.softmax(gates.double(), dim=1) * pairs).sum(1)
        latent = exact_rms(pooled.float().bfloat16(), norm)
        near = undecided(latent, 2**-10) & (latent != 0)
        if ratio > 1:
            near |= undecided(pooled, 2**-10) & (pooled != 0)
        if not near.any():
            key = (latent.float().bfloat16().double() @ wk.double().T).float().bfloat16()
            key = exact_rms(key, key_norm)
            near[:, turn % near.shape[1]] = (undecided(key, 2**-12) & (key != 0)).any(-1)
        if not near.any():
            return
        c[: ratio * groups][near.repeat_interleave(ratio, 0)] = 0


def compress_v41(arrays, kind, short, n, width, ratio):  # type: ignore[no-untyped-def]
    """Entries of pairs or of single tokens, and index keys of their latents."""
    groups = n // ratio
    c, norm, z = short(n, width), 1 + 0.1 * short(width), None
    wk, key_norm = (short(128, width) * width**-0.5).bfloat16(), 1 + 0.1 * short(128)
    if ratio == 2:
        z = short(n, width)
    else:
        c = c.bfloat16()
    settle_v41(c, z, norm, wk, key_norm, groups, ratio)
    if ratio == 2:
        arrays[f"{kind}/Z"] = z
        pairs, gates = (x[: 2 * groups].unflatten(0, (groups, 2)) for x in (c, z))
        pooled = (torch.softmax(gates, dim=1) * pairs).sum(1).bfloat16()
    else:
        pooled = c
    latent = rms(pooled, norm, 1e-20)
    angles = rope_angles(torch.arange(groups) * ratio, 160000.0, True)
    key = (latent.double() @ wk.double().T).float().bfloat16()
    entries, entry_bytes = entry_record(rope(latent, angles))
    keys, key_bytes = key_record(rope(rms(key, key_norm, 1e-20), angles))
    for name, value in (
        ("C", c), ("norm", norm), ("entries", entries), ("entries_bytes", entry_bytes),
        ("index_wk", wk), ("index_norm", key_norm), ("index_keys", keys),
        ("index_bytes", key_bytes),
    ):  # fmt: skip
        arrays[f"{kind}/{name}"] = value


def score_v41(arrays, kind, owner, n, heads, angles, visible):  # type: ignore[no-untyped-def]
    keys = arrays[f"{owner}/index_keys"]
    q = fp4(rope(torch.randn(n, heads, 128).bfloat16(), angles))
    weights = (torch.randn(n, heads).bfloat16() * (128 * heads) ** -0.5).bfloat16()
    dots = torch.einsum("thd,sd->ths", q.float(), keys.float()).bfloat16().relu()
    scores = (dots * weights[..., None]).double().sum(1).float().bfloat16()
    for name, value in (("index_q", q), ("index_weights", weights), ("index_scores", scores)):
        arrays[f"{kind}/{name}"] = value
    return scores.float().masked_fill(torch.arange(keys.shape[0]) >= visible[:, None], -torch.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    for name, default in (
        ("seed", 1), ("tokens", 140), ("heads", 2), ("index-heads", 4), ("top-k", 8),
        ("window", 128), ("head-dim", 128), ("candidate-blocks", 4),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--v41", action="store_true", help="of DeepSeek-V4.1")
    args = parser.parse_args()
    np.savez_compressed(args.out, **(make_v41 if args.v41 else make)(args))


if __name__ == "__main__":
    main()

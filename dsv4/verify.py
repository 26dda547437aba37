"""`dsv4 verify`: a golden file (inputs and outputs of an official run) through the cache.

Format: arrays `swa/…`, `csa/…`, `hca/…` and `meta` (seed, tokens, heads, index heads, top-k,
window); uint16 arrays are bf16 bits. Only what a file holds is compared.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import Page
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.records import ELEMENT_MAX, Part, RecordFormat
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec, RopeSpec, v4_layers
from dsv4.ops.backend import BackendName
from dsv4.ops.calls import CompressorWeights, LayerWeights, Scoring
from dsv4.reference.codec import E2M1_GRID, encode
from dsv4.reference.pages import read_records
from dsv4.rope import rope_table

KINDS = ("swa", "csa", "hca")
RATIOS = (0, 4, 128)
ROPE_DIM = 64
LEAST_IDENTICAL = 0.999
# Official sums run in fp32 in an order of their own: about one pooled value in 10,000 lies so near
# to the middle of two bf16 numbers that it goes the other way. Through the rotation that shows in
# both channels of a pair, also in an array so small that two elements are more than 0.1 %.
ONE_MOVED_ROUNDING = 2
LEAST_IDENTICAL_SCORES = 0.995
INTERPRETED_QUERIES = 12
RELATIVE_ERROR: dict[BackendName, float] = {"reference": 2e-3, "triton": 4e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayReport:
    """How one array compares. `worst` is the largest difference, in `unit`."""

    array: str
    elements: int
    differing: int
    worst: float
    unit: str
    passed: bool


@dataclass(slots=True)
class _Outputs:
    """What the read path gave, chunk after chunk."""

    scores: list[Tensor]
    selected: list[Tensor]
    attended: dict[str, list[tuple[Tensor, Tensor]]]


def verify(
    golden: str | Path | None = None,
    *,
    backend: BackendName | None = None,
    device: str = "cpu",
) -> list[ArrayReport]:
    """Runs a golden file (default: the small one shipped with the package) through the cache and
    compares array by array. Raises InvalidInput for a file that is not one."""
    arrays = _load(golden)
    schema, manager, request, outputs = _run(arrays, backend, device)
    reports = []
    for layer, kind in enumerate(KINDS):
        if f"{kind}/kv_quant" in arrays:
            page = _page(schema, "window", layer)
            stored = _read(manager.slot_arena.bytes[request.slot], page, request.length)
            reports.append(_compare(f"{kind}/kv_quant", stored, arrays, page.format, exact=True))
        for name, page_kind in (("entries", "entries"), ("index_keys", "index_keys")):
            if f"{kind}/{name}" in arrays:
                page = _page(schema, page_kind, layer)
                rows = arrays[f"{kind}/{name}"].shape[0]
                blocks = [
                    _read(manager.block_arena.bytes[i], page, page.rows) for i in request.block_ids
                ]
                stored = torch.cat(blocks)[:rows]
                reports.append(_compare(f"{kind}/{name}", stored, arrays, page.format))
    if outputs.scores:
        reports.append(_compare_scores(torch.cat(outputs.scores), arrays["csa/index_scores"]))
    if outputs.selected:
        reports.append(_compare_selection(torch.cat(outputs.selected), arrays))
    limit = RELATIVE_ERROR[manager.backend.name]
    for kind, pieces in outputs.attended.items():
        queries = torch.cat([positions for positions, _ in pieces])
        found = torch.cat([out for _, out in pieces])
        reports.append(_compare_attention(kind, found, arrays[f"{kind}/out"][queries], limit))
    return reports


def _load(golden: str | Path | None) -> dict[str, Tensor]:
    path = (
        Path(str(files("dsv4") / "data" / "golden_small.npz")) if golden is None else Path(golden)
    )
    try:
        with np.load(path, allow_pickle=False) as file:
            raw = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{path} is not a golden file (.npz): {error}") from error
    missing = [n for n in ("meta", *(f"{k}/kv" for k in KINDS)) if n not in raw]
    if missing:
        raise InvalidInput(f"{path} has no {missing}: not a golden file of `dsv4 verify`")
    arrays = {}
    for name, value in raw.items():
        tensor = torch.from_numpy(value.view(np.int16) if value.dtype == np.uint16 else value)
        arrays[name] = tensor.view(torch.bfloat16) if value.dtype == np.uint16 else tensor
    return arrays


def _run(
    arrays: dict[str, Tensor], backend: BackendName | None, device: str
) -> tuple[CacheSchema, KVCacheManager, Request, _Outputs]:
    """One request, prefilled in two chunks that split a group, on the three layers of the file."""
    _, tokens, heads, index_heads, top_k, window = (int(v) for v in arrays["meta"])
    index_norm = arrays.get("csa/index_norm")
    model = ModelSpec(
        name="golden",
        hidden=heads * arrays["swa/kv"].shape[1],
        heads=heads,
        head_dim=arrays["swa/kv"].shape[1],
        rope_dim=ROPE_DIM,
        index_heads=index_heads,
        index_dim=128 if index_norm is None else index_norm.shape[0],
        index_topk=top_k,
        window=window,
        max_context=max(tokens, 128),
        rms_eps=1e-6,
        rope=RopeSpec(),
        layers=v4_layers(RATIOS, backbone=3),
    )
    # a ring that holds every token, so that all of the window KV can be compared at the end
    schema = CacheSchema.build(model, ring_rows=max(window, tokens))
    manager = KVCacheManager(
        schema,
        num_blocks=schema.max_blocks_per_request,
        max_requests=1,
        max_step_tokens=tokens,
        device=device,
        backend=backend,
    )
    request = manager.admit_request(tokens)
    outputs = _Outputs(scores=[], selected=[], attended={})
    first = min(tokens, 2 * tokens // 3 + 1)
    for start, end in ((0, first), (first, tokens)):
        plan = manager.prepare_forward([(request, end - start)])
        for layer, kind in enumerate(KINDS):
            weights = _weights(arrays, model, layer, kind, device)
            inputs = [arrays.get(f"{kind}/{n}") for n in ("kv", "C", "Z", "index_C", "index_Z")]
            rows = [None if x is None else x[start:end].clone().to(device) for x in inputs]
            assert rows[0] is not None
            handle = manager.acquire(layer, plan)
            handle.append(rows[0], *rows[1:], weights=weights)
            _read_step(arrays, handle, plan, kind, slice(start, end), weights.rope, outputs)
        manager.commit(plan)
    return schema, manager, request, outputs


def _read_step(
    arrays: dict[str, Tensor],
    handle: LayerCacheHandle,
    plan: ForwardPlan,
    kind: str,
    span: slice,
    rope: Tensor,
    outputs: _Outputs,
) -> None:
    """Scores, selection and attention of one chunk on one layer, as far as the file has them."""

    def rows(name: str) -> Tensor:
        return arrays[f"{kind}/{name}"][span].contiguous().to(rope.device)

    if f"{kind}/index_q" in arrays:
        q, weights = rows("index_q"), rows("index_weights")
        entries = arrays[f"{kind}/index_scores"].shape[1]
        scores = torch.zeros((q.shape[0], entries), device=rope.device)
        view = handle.read_indexer_view()
        handle.backend.index_scores(
            Scoring(
                q=q,
                weights=weights,
                tokens=plan.tokens,
                keys=view.source,
                scores=scores,
            )
        )
        seen = (plan.positions[:, None] + 1) // view.ratio
        hidden = torch.arange(entries, device=rope.device) >= seen
        outputs.scores.append(scores.masked_fill(hidden, float("nan")).cpu())
        outputs.selected.append(handle.select(q, weights, rope=rope, prepared=True).cpu())
    if f"{kind}/q" in arrays:
        indices = None
        if kind == "csa":
            tokens, window = int(arrays["meta"][1]), int(arrays["meta"][5])
            named = rows("indices")[:, window:]
            indices = torch.where(named >= 0, named - tokens, named).contiguous()
        sink = arrays[f"{kind}/sink"].to(rope.device)
        stride = _attended_stride(handle, plan.padded_tokens)
        named_rows = torch.arange(plan.padded_tokens, device=rope.device)
        padding = (named_rows % stride != 0)[:, None]
        handle.plan = replace(plan, tokens=plan.tokens.masked_fill(padding, -1))
        out, _ = handle.attend(rows("q"), sink, indices)
        positions = plan.positions[::stride].long().cpu()
        outputs.attended.setdefault(kind, []).append((positions, out[::stride].cpu()))


def _attended_stride(handle: LayerCacheHandle, tokens: int) -> int:
    """Triton's interpreter takes a second a query, so there only some queries attend."""
    interpreted = handle.backend.name == "triton" and handle.block_table.device.type == "cpu"
    return max(1, tokens // INTERPRETED_QUERIES) if interpreted else 1


def _weights(
    arrays: dict[str, Tensor], model: ModelSpec, layer: int, kind: str, device: str
) -> LayerWeights:
    def compressor(prefix: str) -> CompressorWeights | None:
        if f"{kind}/{prefix}ape" not in arrays:
            return None
        ape, norm = arrays[f"{kind}/{prefix}ape"], arrays[f"{kind}/{prefix}norm"]
        return CompressorWeights(ape=ape.to(device), norm=norm.to(device))

    return LayerWeights(
        rope=rope_table(
            model, yarn=model.layers[layer].yarn, tokens=model.max_context, device=device
        ),
        compressor=compressor(""),
        index_compressor=compressor("index_"),
    )


def _page(schema: CacheSchema, kind: Any, layer: int) -> Page:
    page = schema.page(kind, layer)
    assert page is not None
    return page


def _read(row: Tensor, page: Page, count: int) -> Tensor:
    """The first `count` records of a page, decoded, from one arena row."""
    rows = torch.arange(count, device=row.device)
    return read_records(row[None], page, torch.zeros_like(rows), rows).cpu()


def _compare(
    name: str,
    stored: Tensor,
    arrays: dict[str, Tensor],
    record: RecordFormat,
    *,
    exact: bool = False,
) -> ArrayReport:
    expected = arrays[name]
    differs = stored.view(torch.int16) != expected.view(torch.int16)
    differing = int(differs.sum())
    worst = max(
        (_worst_steps(part, record, stored, expected) for part in record.parts), default=0.0
    )
    passed = differing == 0
    if not exact:
        allowed = max((1 - LEAST_IDENTICAL) * expected.numel(), ONE_MOVED_ROUNDING)
        passed = differing <= allowed and worst <= 1
    return ArrayReport(
        array=name,
        elements=expected.numel(),
        differing=differing,
        worst=worst,
        unit="codes / bf16 ulp",
        passed=passed,
    )


def _compare_scores(scores: Tensor, expected: Tensor) -> ArrayReport:
    """Visible scores only; the file's are bf16."""
    visible = ~torch.isnan(scores)
    ours, theirs = scores[visible].to(torch.bfloat16), expected[visible]
    apart = (_ordered_bits(ours) - _ordered_bits(theirs)).abs()
    differing = int((apart > 0).sum())
    worst = float(apart.max()) if apart.numel() else 0.0
    return ArrayReport(
        array="csa/index_scores",
        elements=apart.numel(),
        differing=differing,
        worst=worst,
        unit="bf16 ulp",
        passed=differing <= (1 - LEAST_IDENTICAL_SCORES) * apart.numel() and worst <= 2,
    )


def _compare_selection(selected: Tensor, arrays: dict[str, Tensor]) -> ArrayReport:
    """As sets. Entries may be exchanged only for others of exactly the same official score."""
    tokens, window = int(arrays["meta"][1]), int(arrays["meta"][5])
    official, scores = arrays["csa/indices"][:, window:], arrays["csa/index_scores"].float()
    differing = wrong = 0
    for t in range(tokens):
        ours = {e for e in selected[t].tolist() if e >= 0}
        theirs = {e - tokens for e in official[t].tolist() if e >= 0}
        differing += len(ours - theirs)
        exchanged = [sorted(scores[t, list(s)].tolist()) for s in (ours - theirs, theirs - ours)]
        wrong += exchanged[0] != exchanged[1]
    return ArrayReport(
        array="csa/indices (as sets)",
        elements=int((official >= 0).sum()),
        differing=differing,
        worst=float(wrong),
        unit="tokens, ties apart",
        passed=wrong == 0,
    )


def _compare_attention(kind: str, out: Tensor, expected: Tensor, limit: float) -> ArrayReport:
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    return ArrayReport(
        array=f"{kind}/out",
        elements=expected.numel(),
        differing=int((out.view(torch.int16) != expected.view(torch.int16)).sum()),
        worst=float(error),
        unit=f"relative error (limit {limit:g})",
        passed=bool(error <= limit),
    )


def _worst_steps(part: Part, record: RecordFormat, stored: Tensor, expected: Tensor) -> float:
    """The largest difference in one part: in bf16 neighbours, or in steps of the element's grid at
    the scale that the expected value was stored with."""
    span = slice(part.start, part.start + part.width)
    a, b = stored[:, span], expected[:, span]
    if a.numel() == 0:
        return 0.0
    if part.code is None:
        # a rotation mixes the two channels of a pair: one ulp is that of the larger of them
        pairs = torch.stack((a, b)).float().abs().unflatten(-1, (-1, 2)).amax(dim=(0, -1))
        ulp = _power(torch.frexp(pairs)[1] - 8).repeat_interleave(2, dim=-1)
        return float(((a.float() - b.float()).abs() / ulp).max())
    _, scales = encode(record, expected)
    factor = _power(scales[:, : part.tiles].int() - 127)
    tiles = torch.stack((a, b)).float().unflatten(-1, (part.tiles, part.code.tile))
    units = tiles / factor.unsqueeze(-1)
    largest = units.abs().amax(0).clamp_max(ELEMENT_MAX[part.code.element])
    if part.code.element == "e4m3":
        step = _power(torch.frexp(largest)[1].clamp_min(-5) - 4)
    else:
        grid = torch.tensor(E2M1_GRID)
        above = torch.bucketize(largest, grid).clamp(1, len(E2M1_GRID) - 1)
        step = grid[above] - grid[above - 1]
    return float(((units[0] - units[1]).abs() / step).max())


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def _ordered_bits(x: Tensor) -> Tensor:
    """bf16 as integers in the order of their values."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)

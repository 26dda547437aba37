"""`dsv4 verify`: a golden file (inputs and outputs of an official run) through the cache.

For DeepSeek-V4: arrays `swa/…`, `csa/…`, `hca/…` and `meta` (seed, tokens, heads, index heads,
top-k, window). For DeepSeek-V4.1: arrays of the layers of `V41_LAYERS`, and `meta` also has the
tokens of the first chunk, candidate blocks and their entries. uint16 arrays are bf16 bits, `rows`
the tokens that `q` and `out` have (default: all). Only what a file holds is compared.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.extras import needed_by

with needed_by("dsv4.verify"):
    import torch
    from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import Page
from dsv4.cache.records import ELEMENT_MAX, Part, RecordFormat
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.model import PRESETS, AttentionType, LayerSpec, ModelSpec, RopeSpec, v4_layers
from dsv4.ops.backend import BackendName
from dsv4.ops.calls import CompressorWeights, KeyProjection, LayerWeights, Scoring
from dsv4.reference.codec import E2M1_GRID, encode
from dsv4.reference.pages import page_rows, read_records
from dsv4.rope import rope_table

KINDS = ("swa", "csa", "hca")
RATIOS = (0, 4, 128)
# kind: ratio, whose entries it reads, whose selection, whose candidates. A file may leave some out.
V41_LAYERS: dict[str, tuple[int, str | None, str | None, str | None]] = {
    "swa": (0, None, None, None),
    "full2a": (2, "full2a", "full2a", None),
    "reuse2a": (2, "full2a", "full2a", None),
    "full2b": (2, "full2b", "full2b", None),
    "full1": (1, "full1", "full1", None),
    "reindex1": (1, "full1", "reindex1", "full1"),
    "reuse1": (1, "full1", "reindex1", None),
}
ROPE_DIM = 64
LEAST_IDENTICAL = 0.999
# Official sums run in fp32 in a different order: about one pooled value in 10,000 is so close to
# the midpoint of two bf16 numbers that it is rounded the other way. After the rotation both
# channels of a pair differ, even in an array so small that two elements are more than 0.1 %.
ONE_MOVED_ROUNDING = 2
LEAST_IDENTICAL_SCORES = 0.995
INTERPRETED_QUERIES = 12
RELATIVE_ERROR: dict[BackendName, float] = {"reference": 2e-3, "triton": 4e-3}
# the official softmax runs over 64 keys at a time, with weights relative to the maximum so far
V41_RELATIVE_ERROR = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayReport:
    """How one array compares. `worst` is the largest difference, in `unit`."""

    array: str
    elements: int
    differing: int
    worst: float
    unit: str
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Golden:
    """A file: its arrays, its layers by name, and the model they make up. `exact`: every stored
    byte, score and selection must be the file's."""

    arrays: dict[str, Tensor]
    kinds: tuple[str, ...]
    model: ModelSpec
    exact: bool

    @property
    def tokens(self) -> int:
        return int(self.arrays["meta"][1])

    @property
    def rows(self) -> Tensor:
        """The positions that `q` and `out` have."""
        return self.arrays.get("rows", torch.arange(self.tokens)).long()

    def has(self, kind: str, name: str) -> bool:
        return f"{kind}/{name}" in self.arrays

    def selected(self, kind: str) -> Tensor:
        """The official selection, int32 [tokens, k], entries and -1."""
        named = self.arrays[f"{kind}/indices"][:, self.model.window :]
        return torch.where(named >= 0, named - self.tokens, named)


@dataclass(slots=True)
class _Outputs:
    """What the read path gave, chunk after chunk, by kind."""

    scores: dict[str, list[Tensor]]
    selected: dict[str, list[Tensor]]
    candidates: dict[str, list[Tensor]]
    attended: dict[str, list[tuple[Tensor, Tensor]]]


def verify(
    golden: str | Path | None = None,
    *,
    backend: BackendName | None = None,
    device: str = "cpu",
) -> list[ArrayReport]:
    """Runs a golden file (default: the small one shipped with the package) through the cache and
    compares array by array. Raises InvalidInput for a file that is not a golden file."""
    file = _load(golden)
    arrays = file.arrays
    schema, manager, request, outputs = _run(file, backend, device)
    reports = []
    for layer, kind in enumerate(file.kinds):
        page = _page(schema, "window", layer)
        slot = manager.memory.slot_arena.bytes[request.slot]
        reports += _compare_page(file, kind, "kv_quant", "kv_bytes", page, slot[None], exact=True)
        for name, stored, page_kind in (
            ("entries", "entries_bytes", "entries"),
            ("index_keys", "index_bytes", "index_keys"),
        ):
            if file.has(kind, name) or file.has(kind, stored):
                page = _page(schema, page_kind, layer)
                blocks = manager.memory.block_arena.bytes[request.block_ids]
                reports += _compare_page(file, kind, name, stored, page, blocks, exact=file.exact)
    for kind, pieces in outputs.scores.items():
        reports.append(_compare_scores(file, kind, torch.cat(pieces)))
    for kind, pieces in outputs.selected.items():
        reports.append(_compare_selection(file, kind, torch.cat(pieces)))
    for kind, pieces in outputs.candidates.items():
        if file.has(kind, "candidate_blocks"):
            reports.append(_compare_candidates(file, kind, torch.cat(pieces)))
    limit = V41_RELATIVE_ERROR if file.exact else RELATIVE_ERROR[manager._parts.backend.name]
    if "dspark/draft_q" in arrays:
        reports += _draft_reports(file, backend, device, limit)
    for kind, attended in outputs.attended.items():
        rows = torch.cat([rows for rows, _ in attended])
        found = torch.cat([out for _, out in attended])
        name = f"{kind}/out"
        reports.append(_compare_attention(name, found, arrays[name][rows], limit))
    return reports


def _load(golden: str | Path | None) -> _Golden:
    path = (
        Path(str(files("dsv4") / "data" / "golden_small.npz")) if golden is None else Path(golden)
    )
    try:
        with np.load(path, allow_pickle=False) as file:
            raw = {name: file[name] for name in file.files}
    except OSError as error:
        why = error.strerror or "its bytes are of no known kind"
        raise InvalidInput(f"cannot read {path} as a golden file (.npz): {why}") from error
    except (EOFError, ValueError, zipfile.BadZipFile) as error:
        # what numpy says of such a file is advice to load it unsafely
        raise InvalidInput(
            f"{path} is not a golden file: those are .npz files of numbers, which "
            f"tools/make_golden.py writes"
        ) from error
    kinds = tuple(k for k in V41_LAYERS if f"{k}/kv" in raw) if "full1/kv" in raw else KINDS
    needed = ["meta", *(f"{kind}/kv" for kind in kinds)]
    if kinds != KINDS:
        owned = ("C", "norm", "index_wk", "index_norm")
        owners = [k for k in kinds if k in V41_LAYERS and V41_LAYERS[k][1] == k]
        needed += ["swa/kv", *(f"{kind}/{name}" for kind in owners for name in owned)]
    for kind in kinds:
        for name, others in _BESIDE.items():
            if f"{kind}/{name}" in raw:
                needed += [f"{kind}/{other}" for other in others]
    if "dspark/draft_q" in raw:
        needed += [f"dspark/{name}" for name in ("kv", "draft_kv", "draft_out", "sink")]
    missing = [name for name in needed if name not in raw]
    if missing:
        raise InvalidInput(f"{path} has no {missing}: not a golden file of `dsv4 verify`")
    wrong = [
        name for name, value in raw.items() if value.dtype.kind not in "biuf" or not value.ndim
    ]
    if wrong:
        raise InvalidInput(f"{path} has {wrong} that are not arrays of numbers")
    arrays = {}
    for name, value in raw.items():
        tensor = torch.from_numpy(value.view(np.int16) if value.dtype == np.uint16 else value)
        arrays[name] = tensor.view(torch.bfloat16) if value.dtype == np.uint16 else tensor
    v41 = kinds != KINDS
    if len(arrays["meta"]) != (9 if v41 else 6):
        raise InvalidInput(f"{path} has {len(arrays['meta'])} numbers in meta")
    model = _v41_model(arrays, kinds) if v41 else _v4_model(arrays)
    found = _Golden(arrays=arrays, kinds=kinds, model=model, exact=v41)
    _check_lengths(path, found)
    return found


def _check_lengths(path: Path, file: _Golden) -> None:
    """InvalidInput unless inputs have a row per token, and queries one per position in `rows`."""
    rows = file.rows
    if bool(((rows < 0) | (rows >= file.tokens)).any()):
        raise InvalidInput(f"{path} has rows that are not positions of {file.tokens} tokens")
    for kind in file.kinds:
        for name in (*_PER_TOKEN, "q", "out"):
            array = file.arrays.get(f"{kind}/{name}")
            count = file.tokens if name in _PER_TOKEN else len(rows)
            if array is not None and (array.dim() < 2 or array.shape[0] != count):
                raise InvalidInput(
                    f"{path}: {kind}/{name} has shape {list(array.shape)}, must have {count} rows"
                )


_BESIDE = {"q": ("out", "sink"), "index_q": ("index_weights", "index_scores", "indices")}
_PER_TOKEN = ("kv", "C", "Z", "index_C", "index_Z", "index_q", "index_weights", "indices")


def _v4_model(arrays: dict[str, Tensor]) -> ModelSpec:
    _, tokens, heads, index_heads, top_k, window = (int(v) for v in arrays["meta"])
    index_norm = arrays.get("csa/index_norm")
    return ModelSpec(
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


def _v41_model(arrays: dict[str, Tensor], kinds: tuple[str, ...]) -> ModelSpec:
    _, tokens, heads, index_heads, top_k, window, _, blocks, block_entries = (
        int(v) for v in arrays["meta"]
    )

    def layer(kind: str, number: int) -> LayerSpec:
        ratio, *sources = V41_LAYERS[kind]
        owner, selector, candidates = (None if s is None else kinds.index(s) for s in sources)
        return LayerSpec(
            layer=number,
            attention=AttentionType.CSA if ratio else AttentionType.SWA,
            ratio=ratio,
            gated=owner != number or ratio > 1,
            tail_skips_last=owner == number,
            index_keys="latent" if owner == number else "none",
            index_hadamard=owner != number,
            owner=number if owner is None else owner,
            selector=None if selector == number else selector,
            candidates_of=candidates,
        )

    return replace(
        PRESETS["v41-flash"],
        name="golden",
        hidden=heads * arrays["swa/kv"].shape[1],
        heads=heads,
        head_dim=arrays["swa/kv"].shape[1],
        rope_dim=ROPE_DIM,
        index_heads=index_heads,
        index_dim=arrays["full1/index_norm"].shape[0],
        index_topk=top_k,
        window=window,
        max_context=max(tokens, 128),
        candidate_blocks=blocks,
        candidate_block_entries=block_entries,
        layers=tuple(layer(kind, number) for number, kind in enumerate(kinds)),
    )


def _run(
    file: _Golden, backend: BackendName | None, device: str
) -> tuple[CacheSchema, KVCacheManager, Request, _Outputs]:
    """One request, prefilled in two chunks that split a group, on the layers of the file."""
    arrays, model, tokens = file.arrays, file.model, file.tokens
    # a ring that holds every token, so that all of the window KV can be compared at the end
    schema = CacheSchema.build(model, ring_rows=max(model.window, tokens))
    manager = KVCacheManager(
        schema,
        num_blocks=schema.max_blocks_per_request,
        max_requests=1,
        max_step_tokens=tokens,
        device=device,
        backend=backend,
    )
    request = manager.admit_request(tokens)
    outputs = _Outputs(scores={}, selected={}, candidates={}, attended={})
    first = min(tokens, 2 * tokens // 3 + 1)
    for start, end in ((0, first), (first, tokens)):
        plan = manager.prepare_forward([(request, end - start)])
        shape = (end - start, model.candidate_blocks)
        candidates = torch.zeros(shape, dtype=torch.int32, device=device)
        for layer, kind in enumerate(file.kinds):
            weights = _weights(arrays, model, layer, kind, device)
            inputs = [arrays.get(f"{kind}/{n}") for n in ("kv", "C", "Z", "index_C", "index_Z")]
            rows = [None if x is None else x[start:end].clone().to(device) for x in inputs]
            assert rows[0] is not None
            handle = manager.acquire(layer, plan.batch)
            handle.append(rows[0], *rows[1:], weights=weights)
            span = slice(start, end)
            _read_step(file, handle, plan.batch, kind, span, weights.rope, candidates, outputs)
        manager.commit(plan)
    return schema, manager, request, outputs


def _draft_reports(
    file: _Golden, backend: BackendName | None, device: str, limit: float
) -> list[ArrayReport]:
    """One DSpark layer: the ring of the accepted tokens, and a draft step after them."""
    arrays = file.arrays
    tokens = arrays["dspark/kv"].shape[0]
    layer = LayerSpec(layer=0, owner=0, attention=AttentionType.SWA, draft=True)
    model = replace(
        file.model,
        layers=(layer,),
        draft_block=arrays["dspark/draft_q"].shape[0],
        max_context=max(tokens + 128, file.model.max_context),
    )
    schema = CacheSchema.build(model, max_draft_tokens=model.draft_block)
    manager = KVCacheManager(
        schema,
        num_blocks=1,
        max_requests=1,
        max_step_tokens=max(tokens, model.draft_block),
        device=device,
        backend=backend,
    )
    rope = rope_table(model, yarn=False, tokens=model.max_context, device=device)
    weights = LayerWeights(rope=rope)
    request = manager.admit_request()
    plan = manager.prepare_forward([(request, tokens)])
    manager.acquire(0, plan.batch).append(arrays["dspark/kv"].to(device), weights=weights)
    manager.commit(plan)
    page = _page(schema, "window", 0)
    ring = _read(manager.memory.slot_arena.bytes[request.slot][None], page, page.rows)[0]
    newest = torch.arange(max(0, tokens - model.window), tokens)
    plan = manager.prepare_forward([(request, model.draft_block)])
    out, _ = manager.acquire(0, plan.batch).attend_draft(
        *(arrays[f"dspark/{name}"].to(device) for name in ("draft_kv", "draft_q", "sink")),
        weights=weights,
    )
    manager.abandon(plan)
    name, reports = "dspark/kv_quant", []
    if name in arrays:
        stored, expected = ring[newest % page.rows], {name: arrays[name][newest]}
        reports.append(_compare(name, stored, expected, page.format, exact=True))
    return [
        *reports,
        _compare_attention("dspark/draft_out", out.cpu(), arrays["dspark/draft_out"], limit),
    ]


def _read_step(
    file: _Golden,
    handle: LayerCacheHandle,
    batch: Batch,
    kind: str,
    span: slice,
    rope: Tensor,
    candidates: Tensor,
    outputs: _Outputs,
) -> None:
    """Scores, selection and attention of one chunk on one layer, as far as the file has them."""
    arrays, model = file.arrays, file.model

    def rows(name: str) -> Tensor:
        return arrays[f"{kind}/{name}"][span].contiguous().to(rope.device)

    if file.has(kind, "index_q"):
        q, weights = rows("index_q"), rows("index_weights")
        entries = arrays[f"{kind}/index_scores"].shape[1]
        scores = torch.zeros((q.shape[0], entries), device=rope.device)
        view = handle.read_indexer_view()
        handle.backend.index_scores(
            Scoring(
                q=q,
                weights=weights,
                tokens=batch.tokens,
                keys=view.source,
                scores=scores,
            )
        )
        seen = (batch.positions[:, None] + 1) // view.ratio
        hidden = torch.arange(entries, device=rope.device) >= seen
        outputs.scores.setdefault(kind, []).append(scores.masked_fill(hidden, float("nan")).cpu())
        publishes = handle.layer in model.candidate_sources
        bounded = publishes or handle.schema.spec.candidates_of is not None
        selected = handle.select(
            q, weights, rope=rope, prepared=True, candidates=candidates if bounded else None
        )
        outputs.selected.setdefault(kind, []).append(selected.cpu())
        if publishes:
            outputs.candidates.setdefault(kind, []).append(candidates.cpu())
    if file.has(kind, "q"):
        indices = None
        if handle.schema.spec.attention is AttentionType.CSA:
            indices = file.selected(kind)[span].contiguous().to(rope.device)
        sink = arrays[f"{kind}/sink"].to(rope.device)
        here = (file.rows >= span.start) & (file.rows < span.stop)
        nth = torch.nonzero(here).flatten()
        nth = nth[:: _attended_stride(handle, len(nth))]
        chosen = (file.rows[nth] - span.start).to(rope.device)
        q = torch.zeros((batch.padded_tokens, *arrays[f"{kind}/q"].shape[1:]), dtype=torch.bfloat16)
        q[chosen.cpu()] = arrays[f"{kind}/q"][nth]
        padding = torch.ones((batch.padded_tokens, 1), dtype=torch.bool, device=rope.device)
        padding[chosen] = False
        handle.batch = replace(batch, tokens=batch.tokens.masked_fill(padding, -1))
        out, _ = handle.attend(q.to(rope.device), sink, indices)
        outputs.attended.setdefault(kind, []).append((nth, out[chosen].cpu()))


def _attended_stride(handle: LayerCacheHandle, tokens: int) -> int:
    """Triton's interpreter takes a second per query, so there only some queries attend."""
    interpreted = (
        handle.backend.name == "triton" and handle.memory.shared.block_table.device.type == "cpu"
    )
    return max(1, tokens // INTERPRETED_QUERIES) if interpreted else 1


def _weights(
    arrays: dict[str, Tensor], model: ModelSpec, layer: int, kind: str, device: str
) -> LayerWeights:
    def compressor(prefix: str) -> CompressorWeights | None:
        if f"{kind}/{prefix}norm" not in arrays:
            return None
        ape, norm = arrays.get(f"{kind}/{prefix}ape"), arrays[f"{kind}/{prefix}norm"]
        return CompressorWeights(ape=None if ape is None else ape.to(device), norm=norm.to(device))

    wk = arrays.get(f"{kind}/index_wk")
    projection = None
    if wk is not None:
        norm = arrays[f"{kind}/index_norm"]
        projection = KeyProjection(weight=wk.to(device), norm=norm.to(device))

    return LayerWeights(
        rope=rope_table(
            model, yarn=model.layers[layer].yarn, tokens=model.max_context, device=device
        ),
        compressor=compressor(""),
        index_compressor=compressor("index_"),
        index_projection=projection,
    )


def _page(schema: CacheSchema, kind: Any, layer: int) -> Page:
    page = schema.layout.page(kind, layer)
    assert page is not None
    return page


def _read(arena: Tensor, page: Page, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` records of a page in some arena rows: decoded, and as bytes."""
    nth = torch.arange(count, device=arena.device)
    at = nth // page.rows, nth % page.rows
    stored = torch.cat([rows[at] for rows in page_rows(arena, page)], dim=-1)
    return read_records(arena, page, *at).cpu(), stored.cpu()


def _compare_page(
    file: _Golden,
    kind: str,
    name: str,
    bytes_name: str,
    page: Page,
    arena: Tensor,
    *,
    exact: bool,
) -> list[ArrayReport]:
    """The values and the bytes of one page, as far as the file has them."""
    reports = []
    for array, nth in ((name, 0), (bytes_name, 1)):
        expected = file.arrays.get(f"{kind}/{array}")
        if expected is None:
            continue
        stored = _read(arena, page, expected.shape[0])[nth]
        if nth == 0:
            label = f"{kind}/{array}"
            reports.append(_compare(label, stored, file.arrays, page.format, exact=exact))
        else:
            reports.append(_compare_bytes(f"{kind}/{array}", stored, expected))
    return reports


def _compare_bytes(name: str, stored: Tensor, expected: Tensor) -> ArrayReport:
    differing = int((stored != expected).sum())
    return ArrayReport(
        array=name,
        elements=expected.numel(),
        differing=differing,
        worst=float(differing),
        unit="bytes",
        passed=differing == 0,
    )


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


def _compare_scores(file: _Golden, kind: str, scores: Tensor) -> ArrayReport:
    """Visible scores only; the file's are bf16."""
    expected = file.arrays[f"{kind}/index_scores"]
    visible = ~torch.isnan(scores)
    ours, theirs = scores[visible].to(torch.bfloat16), expected[visible]
    apart = (_ordered_bits(ours) - _ordered_bits(theirs)).abs()
    differing = int((apart > 0).sum())
    worst = float(apart.max()) if apart.numel() else 0.0
    allowed = 0 if file.exact else (1 - LEAST_IDENTICAL_SCORES) * apart.numel()
    return ArrayReport(
        array=f"{kind}/index_scores",
        elements=apart.numel(),
        differing=differing,
        worst=worst,
        unit="bf16 ulp",
        passed=differing <= allowed and worst <= 2,
    )


def _compare_selection(file: _Golden, kind: str, selected: Tensor) -> ArrayReport:
    """Compared as sets. Where the file leaves ties open, entries may be replaced by others of
    exactly the same official score."""
    official, scores = file.selected(kind), file.arrays[f"{kind}/index_scores"].float()
    differing = wrong = 0
    for t in range(file.tokens):
        ours = {e for e in selected[t].tolist() if e >= 0}
        theirs = {e for e in official[t].tolist() if e >= 0}
        differing += len(ours ^ theirs) if file.exact else len(ours - theirs)
        exchanged = [sorted(scores[t, list(s)].tolist()) for s in (ours - theirs, theirs - ours)]
        wrong += ours != theirs if file.exact else exchanged[0] != exchanged[1]
    return ArrayReport(
        array=f"{kind}/indices (as sets)",
        elements=int((official >= 0).sum()),
        differing=differing,
        worst=float(wrong),
        unit="tokens" if file.exact else "tokens, without ties",
        passed=wrong == 0,
    )


def _compare_candidates(file: _Golden, kind: str, candidates: Tensor) -> ArrayReport:
    """The file has them as bits, packed as numpy packs them."""
    bits = file.arrays[f"{kind}/candidate_blocks"].numpy()
    official = torch.from_numpy(np.unpackbits(bits, axis=1)).bool()
    ours = torch.zeros_like(official)
    row, nth = torch.nonzero(candidates >= 0, as_tuple=True)
    ours[row, candidates[row, nth].long()] = True
    differing = int((ours != official).sum())
    return ArrayReport(
        array=f"{kind}/candidate_blocks",
        elements=int(official.sum()),
        differing=differing,
        worst=float((ours != official).any(dim=-1).sum()),
        unit="tokens",
        passed=differing == 0,
    )


def _compare_attention(name: str, out: Tensor, expected: Tensor, limit: float) -> ArrayReport:
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    return ArrayReport(
        array=name,
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

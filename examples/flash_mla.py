"""Our pages through FlashMLA's sparse decode for V4, without copying a byte.

FlashMLA takes two paged caches in one call, and one softmax goes over both. The window rings are
the first, the compressed entries the second; both are views of the arenas. Where `flash_mla` is
installed and there is a GPU it runs; elsewhere a stand-in in plain PyTorch reads what the call
passes, and nothing else. Either way the result is compared with `handle.attend`. Pages of V4.1 are
handed over in the same way: docs/v41.md says which FlashMLA reads which.

    python -m examples.flash_mla
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4 import (
    Batch,
    CacheSchema,
    CompressorWeights,
    InvalidInput,
    KVCacheManager,
    LayerCacheHandle,
    LayerWeights,
    ModelSpec,
    PlanError,
    SchemaMismatch,
    rope_table,
)
from dsv4.cache.pages import CompressorLayout
from dsv4.model import v4_layers
from dsv4.ops.columns import token_columns

HEAD_DIM = 512
HEADS = (64, 128)
# a record: 448 E4M3 channels and 64 bf16 ones, then 7 scales and a pad byte after the page's data
FP8_BYTES, DATA_BYTES, SCALE_BYTES, SCALES = 448, 576, 8, 7
RECORD_BYTES = DATA_BYTES + SCALE_BYTES
INDEX_STEP = 64  # FlashMLA reads index lists in pieces of this many
SM100_STRIDE_BYTES = 576
TOLERANCE = 4e-3


# ---- what FlashMLA is handed ---------------------------------------------------------------------


def flash_mla_arguments(
    handle: LayerCacheHandle, q: Tensor, sink: Tensor, chosen: Tensor | None = None
) -> dict[str, Any]:
    """The keyword arguments of `flash_mla_with_kvcache` for one layer of a decode step.

    `q` bf16 [tokens, heads, 512] after RoPE, `sink` fp32 [heads], `chosen` the result of `select`
    on a CSA layer. The caches are views of the arenas; only the index lists are new. Raises
    SchemaMismatch or InvalidInput where FlashMLA has no kernel for the shapes, and PlanError in a
    prefill step, whose window rows are staged outside the ring.
    """
    batch = handle.open_batch()
    if not batch.is_decode:
        raise PlanError(
            f"a step with {batch.counts.max()} tokens of one request is not a decode step: its "
            f"window is staged outside the ring; use handle.attend for chunks"
        )
    check_queries(q)
    window = handle.read_swa_view()
    check_pages("window", window.pages)
    arguments: dict[str, Any] = {
        "q": q[:, None],
        "k_cache": window.pages,
        "indices": window_indices(handle, batch.tokens)[:, None],
        "head_dim_v": HEAD_DIM,
        "softmax_scale": HEAD_DIM**-0.5,
        "attn_sink": sink,
        "is_fp8_kvcache": True,
        "block_table": None,
        "cache_seqlens": None,
    }
    if handle.schema.spec.ratio:
        view = handle.read_classical_view()
        check_pages("entry", view.pages)
        if chosen is None:
            chosen = all_entries(batch, view.ratio)
        arguments["extra_k_cache"] = view.pages
        arguments["extra_indices_in_kvcache"] = entry_indices(handle, batch.tokens, chosen)[:, None]
    return arguments


def window_indices(handle: LayerCacheHandle, tokens: Tensor) -> Tensor:
    """int32 [tokens, window]: slot · ring_rows + ring row of each token's window, newest first."""
    view = handle.read_swa_view()
    slot, position, *_ = token_columns(tokens[:, None])
    seen = position - torch.arange(view.window, device=tokens.device, dtype=torch.int32)
    index = slot * view.ring_rows + seen % view.ring_rows
    return _padded(torch.where((slot >= 0) & (seen >= 0), index, -1))


def entry_indices(handle: LayerCacheHandle, tokens: Tensor, chosen: Tensor) -> Tensor:
    """int32 [tokens, k]: block_id · entries a block + row, for the entries in `chosen`."""
    view = handle.read_classical_view()
    slot, position, *_ = token_columns(tokens[:, None])
    valid = (slot >= 0) & (chosen >= 0) & (chosen < (position + 1) // view.ratio)
    entry = torch.where(valid, chosen, 0).long()
    block_id = view.block_table[slot.clamp_min(0).long(), entry // view.entries_per_block]
    index = block_id * view.entries_per_block + entry % view.entries_per_block
    return _padded(torch.where(valid, index.int(), -1))


def all_entries(batch: Batch, ratio: int) -> Tensor:
    """Every entry that the longest request of the step has, for each token: what HCA reads."""
    longest = int((batch.starts + batch.counts).max(initial=0)) // ratio
    entries = torch.arange(longest, dtype=torch.int32, device=batch.tokens.device)
    return entries.expand(batch.padded_tokens, longest)


def check_queries(q: Tensor) -> None:
    """Raises InvalidInput unless FlashMLA has a V4 kernel for these queries."""
    if q.dim() != 3 or q.shape[2] != HEAD_DIM or q.shape[1] not in HEADS:
        raise InvalidInput(
            f"q has shape {list(q.shape)}: FlashMLA's V4 decode takes [tokens, heads, {HEAD_DIM}] "
            f"with {HEADS[0]} or {HEADS[1]} heads; use handle.attend, or pad the heads"
        )


def check_pages(name: str, pages: Tensor) -> None:
    """Raises SchemaMismatch unless these are pages of FlashMLA's V4 records."""
    if pages.dim() != 4 or pages.shape[2:] != (1, RECORD_BYTES) or pages.dtype != torch.uint8:
        raise SchemaMismatch(
            f"{name} pages have shape {list(pages.shape)}: FlashMLA reads V4 records of "
            f"{RECORD_BYTES} bytes (head_dim {HEAD_DIM}, 64 of them rotated), so build the schema "
            f"with entry_format='fp8_ds' for such a model, or use handle.attend"
        )
    if _is_sm100(pages.device) and pages.stride(0) % SM100_STRIDE_BYTES:
        raise SchemaMismatch(
            f"{name} pages are {pages.stride(0)} bytes apart, and on SM100 FlashMLA asks for a "
            f"multiple of {SM100_STRIDE_BYTES}: build the schema with align_bytes=576"
        )


def _is_sm100(device: torch.device) -> bool:
    """Of the GPUs that FlashMLA has kernels for, those with tensor memory."""
    if device.type != "cuda":
        return False
    from dsv4.kernels.target import target_of  # needs Triton

    return target_of(device).products == "tcgen05"


def _padded(indices: Tensor) -> Tensor:
    """-1 up to a whole number of pieces, at least one."""
    width = max(INDEX_STEP, -(-indices.shape[1] // INDEX_STEP) * INDEX_STEP)
    return torch.nn.functional.pad(indices, (0, width - indices.shape[1]), value=-1).contiguous()


# ---- the kernel that computes it -----------------------------------------------------------------


def run(arguments: dict[str, Any]) -> tuple[str, Tensor, Tensor]:
    """Who computed it, out bf16 [tokens, heads, 512], log-sum-exp fp32 [tokens, heads]."""
    tokens, _, heads, _ = arguments["q"].shape
    name, flash_mla = find_flash_mla(arguments["q"].device)
    if flash_mla is None:
        out, lse = stand_in(**arguments)
    else:
        schedule, _ = flash_mla.get_mla_metadata()
        out, lse = flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=schedule)
    return name, out[:, 0], lse.reshape(tokens, heads)


def find_flash_mla(device: torch.device) -> tuple[str, Any]:
    """FlashMLA's module, or None with the name of the stand-in and why it runs."""
    try:
        module = import_module("flash_mla.flash_mla_interface")
    except ImportError as error:
        return f"stand-in in plain PyTorch, for FlashMLA is not installed ({error})", None
    if device.type != "cuda":
        return f"stand-in (FlashMLA does not run on {device.type})", None
    return "FlashMLA", module


def stand_in(
    *,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    head_dim_v: int,
    softmax_scale: float,
    attn_sink: Tensor,
    is_fp8_kvcache: bool,
    block_table: None = None,
    cache_seqlens: None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The arithmetic of FlashMLA's sparse decode in fp32: out [batch, 1, heads, head_dim_v] and
    log-sum-exp [batch, heads, 1] without the sink."""
    scopes = [(k_cache, indices)]
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        scopes.append((extra_k_cache, extra_indices_in_kvcache))
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[0], q.shape[2], 1), torch.inf, device=q.device)
    for row in range(q.shape[0]):
        keys = torch.cat([_decode(cache, lists[row, 0]) for cache, lists in scopes])
        if not len(keys):
            continue
        logits = (q[row, 0].float() @ keys.T) * softmax_scale
        total = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - torch.logaddexp(total, attn_sink)[:, None])
        out[row, 0] = (weights @ keys[:, :head_dim_v]).to(out.dtype)
        lse[row, :, 0] = total
    return out, lse


def _decode(cache: Tensor, indices: Tensor) -> Tensor:
    """Records by index as fp32 [n, 512], from the tensor's memory, page stride and page size."""
    rows = cache.shape[1]
    index = indices[indices >= 0].long()
    page = (index // rows) * cache.stride(0)
    slot = index % rows
    first = cache.storage_offset()
    memory = cache.as_strided((cache.untyped_storage().nbytes() - first,), (1,), first)

    def read(start: Tensor, count: int) -> Tensor:
        return memory[start[:, None] + torch.arange(count, device=start.device)]

    data = read(page + slot * DATA_BYTES, DATA_BYTES)
    scales = read(page + rows * DATA_BYTES + slot * SCALE_BYTES, SCALES)
    coded = data[:, :FP8_BYTES].contiguous().view(torch.float8_e4m3fn).float()
    factor = torch.exp2(scales.float() - 127).repeat_interleave(FP8_BYTES // SCALES, dim=1)
    rotated = data[:, FP8_BYTES:].contiguous().view(torch.bfloat16).float()
    return torch.cat((coded * factor, rotated), dim=1)


# ---- the example ---------------------------------------------------------------------------------


def main(device: str | None = None) -> int:
    """One layer of each kind, three requests of different length, one decode step."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    flash = ModelSpec.preset("v4-flash")
    model = replace(flash, name="three layers", layers=v4_layers([0, 4, 128], backbone=3))
    schema = CacheSchema.build(model, max_context=1024)
    manager = KVCacheManager(
        schema, num_blocks=16, max_requests=4, max_step_tokens=512, device=device
    )
    manager.memory.block_arena.bytes.fill_(0xFF)  # NaN everywhere that nothing has been written
    manager.memory.slot_arena.bytes.fill_(0xFF)
    random = torch.Generator(device).manual_seed(0)
    requests = [manager.admit_request(tokens) for tokens in (3, 140, 300)]
    prompts = list(zip(requests, (2, 139, 299), strict=True))
    worst = 0.0
    for steps in ([prompts[0]], [prompts[1]], [prompts[2]], [(r, 1) for r in requests]):
        plan = manager.prepare_forward(steps)
        for layer in range(len(model.layers)):
            handle = manager.acquire(layer, plan.batch)
            append_random(handle, schema, random)
            if plan.batch.is_decode:
                worst = max(worst, compare(handle, model, random))
        manager.commit(plan)
    print(f"largest difference to handle.attend: {worst:.1e} of the result's norm")
    return 0 if worst <= TOLERANCE else 1


def append_random(handle: LayerCacheHandle, schema: CacheSchema, random: torch.Generator) -> None:
    """Random projections of the plan's tokens into one layer, in place of a model's."""
    model, tokens = schema.model, handle.open_batch().padded_tokens
    device = handle.memory.shared.block_table.device
    yarn = model.layers[handle.layer].yarn

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=device)

    def compressor(layout: CompressorLayout | None) -> CompressorWeights | None:
        if layout is None:
            return None
        ape, norm = values(layout.ratio, layout.columns), values(layout.width)
        return CompressorWeights(ape=ape, norm=norm)

    weights = LayerWeights(
        rope=rope_table(model, yarn=yarn, tokens=schema.max_context, device=device),
        compressor=compressor(handle.memory.compressor),
        index_compressor=compressor(handle.memory.index_compressor),
    )
    columns = [
        layout.columns
        for layout in (handle.memory.compressor, handle.memory.index_compressor)
        if layout
        for _ in "cz"
    ]
    kv = values(tokens, model.head_dim).to(torch.bfloat16)
    handle.append(kv, *(values(tokens, count) for count in columns), weights=weights)


def compare(handle: LayerCacheHandle, model: ModelSpec, random: torch.Generator) -> float:
    """Prints who computed one layer, and returns how far it is from `handle.attend`."""
    tokens, device = handle.open_batch().padded_tokens, handle.memory.shared.block_table.device
    q = torch.randn(tokens, model.heads, model.head_dim, generator=random, device=device)
    q, sink = q.to(torch.bfloat16), torch.linspace(-1, 2, model.heads, device=device)
    chosen = None
    if (
        handle.memory.index_compressor is not None
    ):  # any entries will do: every second one, as if select chose them
        chosen = torch.arange(0, 2 * model.index_topk, 2, dtype=torch.int32, device=device)
        chosen = chosen.expand(tokens, -1).contiguous()
    expected, expected_lse = handle.attend(q, sink, chosen)
    arguments = flash_mla_arguments(handle, q, sink, chosen)
    name, out, lse = run(arguments)
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    error = max(float(error), float((lse - expected_lse).abs().max()))
    lists = [t.shape[-1] for key, t in arguments.items() if "indices" in key]
    print(
        f"layer {handle.layer} {handle.schema.spec.attention}: {name}, lists of {lists}, "
        f"difference {error:.1e}"
    )
    return error


if __name__ == "__main__":
    sys.exit(main())

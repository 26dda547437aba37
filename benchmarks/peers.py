"""Other libraries that do the same work: what was measured of them in separate runs, each figure
with its source. `installed.py` has their calls, for the same run."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.planning.peers import PEERS

# ---- measured separately ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where figures of `names` come from. `version` says so if it was not written down."""

    names: tuple[str, ...]
    of: str
    version: str
    date: str
    measured: str


_BY_US = "by us on one H200 (torch 2.11, triton 3.6), CUDA graph replayed, median"
_UNKNOWN = "not written down"
SOURCES = {
    "writes": Source(
        names=("SGLang", "vLLM"),
        of="cache writes of one layer, and of a chunk (vLLM)",
        version=_UNKNOWN,
        date="2026-11-15",
        measured=f"{_BY_US}; SGLang's CUDA kernels with PDL, vLLM's in Triton",
    ),
    "gather": Source(
        names=("vLLM",),
        of="dequantising gather",
        version=_UNKNOWN,
        date="2026-11-15",
        measured=f"{_BY_US}; only rates were kept: 0.05 and 0.77 TB/s",
    ),
    "top_k": Source(
        names=("SGLang", "torch.topk"),
        of="top-k, k = 512",
        version=f"SGLang: {_UNKNOWN}; torch 2.11",
        date="2026-11-15",
        measured=f"{_BY_US}; SGLang's is inexact at ties",
    ),
    "attention": Source(
        names=("FlashMLA",),
        of="decode attention",
        version="9241ae3 (April 2026, its last with Hopper), built from source",
        date="2026-11-17",
        measured=_BY_US,
    ),
    "index_scores": Source(
        names=("DeepGEMM fp8",),
        of="index scores of a decode step, keys of 132 bytes in FP8",
        version="54e2261 (June 2026), built from source",
        date="2026-11-17",
        measured=_BY_US,
    ),
    "chunks": Source(
        names=("peers composed",),
        of="a chunk of 8,192 tokens",
        version=f"FlashMLA of April 2026; DeepGEMM and vLLM: {_UNKNOWN}",
        date="2026-11-15",
        measured="composed, not run: vLLM's writes, DeepGEMM's logits and FlashMLA's sparse "
        "prefill (without its gather), each measured by us on one H200, times the layers of "
        "V4-Flash; the top-k in between is assumed to take 0.1, 1 and 5 ms a layer",
    ),
    "chunk_attention": Source(
        names=("FlashMLA sparse prefill",),
        of="attention of a chunk of 8,192 tokens, bf16 keys, without its gather",
        version="9241ae3 (April 2026), built from source",
        date="2026-11-17",
        measured=_BY_US,
    ),
    "memory": Source(
        names=("vLLM", "SGLang"),
        of="bytes a token and a request, launches of cache writes in a decode step",
        version=_UNKNOWN,
        date="2026-11-15",
        measured="by us, how was not written down; SGLang's bytes have its pool of windows in them",
    ),
    "paper": Source(
        names=("DeepSeek's papers",),
        of="bytes a token and a request",
        version="the papers of V4",
        date="2026",
        measured="published by DeepSeek; index keys in FP4",
    ),
    "ours before": Source(
        names=("all heads", "V4-Flash"),
        of="our own attention with all heads, from before ranks and V4.1 had kernels: limits",
        version="dsv4, before 5c6409e",
        date="2026-11-15",
        measured=_BY_US,
    ),
}

# All times in µs, of one layer at V4-Flash's shapes unless said otherwise.
# (layer kind, mode) -> batch -> (SGLang, vLLM)
WRITES_US: dict[tuple[str, str], dict[int, tuple[float, float]]] = {
    ("csa", "flush"): {1: (6.7, 16.6), 8: (7.3, 17.2), 64: (7.7, 17.7), 256: (8.4, 19.2)},
    ("csa", "idle"): {1: (4.6, 10.5), 64: (5.3, 11.3), 256: (5.9, 11.9)},
    ("hca", "flush"): {1: (4.4, 12.4), 8: (5.0, 13.4), 64: (10.5, 23.9), 256: (38.7, 55.0)},
    ("hca", "idle"): {1: (3.1, 8.8), 64: (4.1, 10.0), 256: (7.7, 12.3)},
}
# layer kind -> vLLM, a chunk of 8,192 tokens
CHUNK_WRITES_US = {"csa": 118.0, "hca": 145.0}
# (requests, entries) -> vLLM's rate
GATHER_TB_PER_S = {(1, 262_144): 0.05, (16, 16_384): 0.77}
# (rows, scores) -> SGLang, torch.topk; k = 512
TOP_K_US: dict[tuple[int, int], dict[str, float]] = {
    (1, 262_144): {"SGLang": 14.7, "torch.topk": 80.0},
    (8, 262_144): {"SGLang": 14.9},
    (32, 32_768): {"SGLang": 12.2, "torch.topk": 78.0},
    (256, 8_192): {"SGLang": 9.3, "torch.topk": 88.0},
}
# (requests, entries) -> DeepGEMM with 132-byte FP8 keys
INDEX_SCORES_US = {
    (1, 2_048): 3.3,
    (1, 32_768): 3.6,
    (1, 262_144): 12.9,
    (8, 262_144): 73.6,
    (16, 32_768): 22.3,
    (64, 32_768): 73.9,
    (256, 2_048): 22.5,
    (256, 8_192): 74.3,
}
# row of benchmarks/attend.py -> batch -> FlashMLA
ATTENTION_US: dict[str, dict[int, float]] = {
    "flash csa 128+512": {
        1: 12.2, 4: 14.0, 16: 18.3, 32: 25.5, 64: 45.2, 128: 44.9, 256: 86.6,
    },
    "pro csa 128+1024": {
        1: 14.4, 4: 16.6, 16: 27.8, 32: 46.5, 64: 53.9, 128: 102.8, 256: 202.5,
    },
    "flash hca 128k 128+1024": {
        1: 14.3, 4: 16.5, 16: 23.3, 32: 34.7, 64: 62.5, 128: 73.1, 256: 143.0,
    },
    "flash hca 1M 128+8192": {
        1: 30.2, 4: 34.4, 16: 81.9, 32: 131.0, 64: 245.0, 128: 458.0, 256: 917.0,
    },
    "pro hca 128k 128+1024": {1: 14.0, 16: 27.5, 64: 52.3, 256: 197.9},
}  # fmt: skip
# (heads, entries that a token reads) -> FlashMLA, 8,192 tokens
CHUNK_ATTENTION_US = {
    (64, 640): 1_290.0,
    (128, 1_152): 4_088.0,
    (64, 1_152): 2_013.0,
    (64, 8_320): 14_859.0,
}
# (tokens, start) -> vLLM's writes, DeepGEMM, a top-k and FlashMLA, all layers of V4-Flash
COMPOSED_CHUNK_US = {(8_192, 0): 60e3, (8_192, 122_880): 174e3, (8_192, 1_040_384): 1_076e3}
# launches of cache writes in a decode step of V4-Flash
WRITE_LAUNCHES = {"vLLM": "187", "SGLang": "about 230"}
# V4-Flash: what -> (DeepSeek's papers, vLLM, SGLang)
_VLLM, _SGLANG = PEERS
MEMORY = {
    "bytes a token": (
        "3,514.25",
        f"{_VLLM.token_bytes[0]:,}",
        " to ".join(f"{size:,}" for size in _SGLANG.token_bytes),
    ),
    "bytes a request, at any length": (
        "15.4 MB",
        f"{_VLLM.request_bytes / 1e6} MB",
        f"+ {_SGLANG.request_bytes >> 20} MiB of HCA ring",
    ),
    "the same, online HCA state, without the draft layer's window": ("4.6 MB", "", ""),
}
# ours with all heads, by batch
ALL_HEADS_US = {
    "flash csa 128+512": {1: 8.5, 4: 12.0, 16: 15.6, 32: 19.7, 64: 28.3, 128: 38.6, 256: 73.3},
    "flash hca 128k 128+1024": {1: 10.4, 16: 18.6, 64: 39.2, 256: 119.5},
}

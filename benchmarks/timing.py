"""How cases are timed: CUDA-graph replay, medians, beside ceilings measured in the same run."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

RESULTS = Path(__file__).parent / "results"
REPLAYS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What this GPU reached in this run: a copying kernel (bytes read + written) and an empty
    kernel inside a graph."""

    copy_bytes_per_us: float
    empty_launch_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One timed case. `must_move_bytes` counts each byte once that has to move."""

    case: str
    microseconds: float
    launches: int
    must_move_bytes: int
    target_us: float | None = None
    peers_us: dict[str, float] | None = None


def graph_time_us(calls: list[Callable[[], None]], *, repeats: int = 1) -> float:
    """Median time of one call; `calls` are rotated over, so that their buffers outgrow the L2."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (repeats * len(calls)))
    return statistics.median(times)


@triton.jit
def _copy_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def _empty_kernel(source):
    pass


def measure_ceilings() -> Ceilings:
    words = 1 << 28
    source = torch.zeros(words, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy = graph_time_us([lambda: _copy_kernel[(words // 4096,)](source, target, 4096)])
    empty = graph_time_us([lambda: _empty_kernel[(1,)](source)], repeats=50)
    return Ceilings(copy_bytes_per_us=2 * 4 * words / copy, empty_launch_us=empty)


def report(results: list[Result], ceilings: Ceilings, name: str, commit: str) -> Path:
    """Prints the table and writes one JSON line a case under benchmarks/results/."""
    print(
        f"\n{torch.cuda.get_device_name()}: copy {ceilings.copy_bytes_per_us / 1e6:.2f} TB/s, "
        f"empty kernel {ceilings.empty_launch_us:.2f} µs"
    )
    print(f"{'case':44} {'µs':>8} {'floor':>7} {'GB/s':>7} {'%copy':>6} {'target':>7}  peers")
    lines = []
    for r in results:
        floor = r.must_move_bytes / ceilings.copy_bytes_per_us + ceilings.empty_launch_us
        rate = r.must_move_bytes / r.microseconds
        peers = ", ".join(f"{k} {v}" for k, v in (r.peers_us or {}).items())
        print(
            f"{r.case:44} {r.microseconds:8.2f} {floor:7.2f} {rate / 1e3:7.0f} "
            f"{100 * rate / ceilings.copy_bytes_per_us:6.1f} {r.target_us or float('nan'):7.1f}  "
            f"{peers}"
        )
        lines.append(json.dumps({**asdict(r), "floor_us": floor, **_environment(ceilings, commit)}))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def current_commit() -> str:
    """The checkout's commit; `unknown` where the tree travelled without its history."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def _environment(ceilings: Ceilings, commit: str) -> dict[str, object]:
    return {
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "copy_bytes_per_us": ceilings.copy_bytes_per_us,
        "empty_launch_us": ceilings.empty_launch_us,
    }

"""How cases are timed: CUDA-graph replay, medians, and ceilings measured in the same run."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.case import Call, Measurement, Work
from dsv4.kernels.launch import Collection

MAX_REPLAYS, MIN_REPLAYS = 40, 5
REPLAY_SECONDS = 0.25  # long graphs are replayed less often
CALLS_A_GRAPH = 20
# kernels, copies and fills among CUgraphNodeType
LAUNCHING_NODES = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What this GPU reached in this run: a copying kernel (bytes read + written) and an empty
    kernel inside a graph."""

    copy_bytes_per_us: float
    empty_launch_us: float

    def floor_us(self, must_move_bytes: int) -> float:
        return must_move_bytes / self.copy_bytes_per_us + self.empty_launch_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Median time of one call, and how many nodes of the graph it is."""

    microseconds: float
    launches: int


_compiling = False


@contextmanager
def compiling() -> Iterator[Collection]:
    """Inside nothing is timed or launched: a case makes its calls once, and they are collected."""
    global _compiling
    found = Collection()
    _compiling = True
    try:
        with found.collecting():
            yield found
    finally:
        _compiling = False


def is_compiling() -> bool:
    return _compiling


def measure(work: Work) -> Measurement:
    """Times a case and its peers."""
    timed = time_graph(work.calls)
    peers_us = dict[str, float]()
    for name, calls in work.peers.items():
        try:
            peers_us[name] = time_graph(calls).microseconds
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # one that cannot be captured must not cost our own time
            print(f"left out: {name} ({type(error).__name__}: {error})", flush=True)
    return Measurement(
        microseconds=timed.microseconds,
        launches=timed.launches,
        must_move_bytes=work.must_move_bytes,
        peers_us=peers_us,
    )


def time_graph(calls: Sequence[Call], *, calls_a_graph: int = CALLS_A_GRAPH) -> Timed:
    """`calls` are rotated over inside one graph, which holds each at least once."""
    if _compiling:
        calls[0]()
        return Timed(microseconds=0.0, launches=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    repeats = max(1, calls_a_graph // len(calls))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.instantiate()
    count = repeats * len(calls)
    first_us = _replay_us(graph)
    replays = int(REPLAY_SECONDS * 1e6 / max(first_us, 1.0))
    times = [_replay_us(graph) for _ in range(min(MAX_REPLAYS, max(MIN_REPLAYS, replays)))]
    return Timed(microseconds=statistics.median(times) / count, launches=launches(graph) // count)


def count_launches(call: Call) -> int:
    """How many launches a call makes, once it has been made before."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return launches(graph)


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000


def launches(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels, copies and fills in a kept graph, as the driver counts them."""
    get_nodes, get_type = _graph_calls()
    handle, count, kind = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(), ctypes.c_int()
    _ask(get_nodes, handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _ask(get_nodes, handle, nodes, ctypes.byref(count))
    total = 0
    for node in nodes:
        _ask(get_type, ctypes.c_void_p(node), ctypes.byref(kind))
        total += kind.value in LAUNCHING_NODES
    return total


def _graph_calls() -> tuple[Any, Any]:
    """The driver's. AMD's have the arguments and the kinds of nodes of NVIDIA's; their library is
    the one that torch has loaded, wherever it lies."""
    loaded = Path("/proc/self/maps").read_text().split()
    if amd := next((path for path in loaded if "/libamdhip64.so" in path), None):
        driver = ctypes.CDLL(amd)
        return driver.hipGraphGetNodes, driver.hipGraphNodeGetType
    driver = ctypes.CDLL("libcuda.so.1")
    return driver.cuGraphGetNodes, driver.cuGraphNodeGetType


def _ask(function: Any, *arguments: object) -> None:
    if error := function(*arguments):
        raise RuntimeError(f"the GPU's driver answered {function.__name__} with error {error}")


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
    copy = time_graph(
        [lambda: _copy_kernel[(words // 4096,)](source, target, 4096)], calls_a_graph=1
    )
    empty = time_graph([lambda: _empty_kernel[(1,)](source)], calls_a_graph=50)
    return Ceilings(
        copy_bytes_per_us=2 * 4 * words / copy.microseconds, empty_launch_us=empty.microseconds
    )

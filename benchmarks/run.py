"""`python -m benchmarks.run [name] [--only writes,attention,…]`: GPU benchmarks; results are
written under benchmarks/results/, case by case. Lines of suites that do not run stay there. Without
--only, suites whose packages are not installed are left out. So are cases that need more memory
than the GPU has. A case that fails is reported, and those after it still run. With --seconds no
case begins later than that, and the file keeps what it has of the others. --compile-only compiles
what the suites need, beside whatever else the GPU does, and times nothing. --peers runs the suites
in which other libraries do the same work, and refuses to where none of them can be imported; those
that can be are timed by every run (benchmarks/peers.md)."""

from __future__ import annotations

import argparse
import gc
import platform
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import triton

from benchmarks import installed
from benchmarks.case import ANCHORS_ARE_OF, Case, Measurement
from benchmarks.machine import current_commit
from benchmarks.registry import SUITES
from benchmarks.timing import Ceilings, compiling, measure_ceilings
from dsv4.bench import BenchResult, Run, read_results, write_results
from dsv4.cache.warmup import available_processors, progress_bar
from dsv4.errors import Dsv4Error, InvalidInput
from dsv4.kernels.target import target_of
from dsv4.kernels.warmup import compile_jobs, missing_jobs

RESULTS = Path(__file__).parent / "results"
MAKERS = ("nvidia", "amd")
KERNEL_SUITES = ("writes", "gather", "indexer", "attention", "ranks", "v41")
COMPILED_SUITES = (*KERNEL_SUITES, "residency")  # with --compile-only
HEADER = (
    f"{'case':44} {'µs':>9} {'launches':>8} {'MB':>9} {'GB/s':>6} {'%floor':>6} {'target':>8}"
    "  peers, this run | apart"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="name of the results file; default: the GPU's")
    parser.add_argument("--only", help=f"suites, separated by commas: {', '.join(SUITES)}")
    parser.add_argument("--commit", default=current_commit(), help="what the results are of")
    parser.add_argument("--seconds", type=float, help="begin no case later than this")
    parser.add_argument("--compile-only", action="store_true", help="compile, and time nothing")
    parser.add_argument("--peers", action="store_true", help="suites with calls of other libraries")
    arguments = parser.parse_args()
    until = time.monotonic() + (arguments.seconds or float("inf"))
    offered = installed.SUITES if arguments.peers else tuple(SUITES)
    suites = arguments.only.split(",") if arguments.only else list(offered)
    if unknown := [suite for suite in suites if suite not in offered]:
        parser.error(f"no suite {unknown[0]!r}: choose of {', '.join(offered)}")
    if not arguments.only:
        suites = [suite for suite in suites if can_run(suite)]
    if not torch.cuda.is_available():
        print("no CUDA device here: benchmarks need one", file=sys.stderr)
        return 1
    environment = _environment(arguments.commit)
    gpu = environment["gpu"]
    path = RESULTS / f"{arguments.name or file_name(gpu)}.jsonl"
    try:
        target_of(torch.device("cuda", torch.cuda.current_device()))
        check_gpu(path, gpu)
    except Dsv4Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if arguments.peers and not any_peer(suites):
        return 1
    if arguments.compile_only:
        compile_kernels((c for suite in suites for c in SUITES[suite]()), COMPILED_SUITES)
        return 0
    ceilings = measure_ceilings()
    print(
        f"{gpu}: copy {ceilings.copy_bytes_per_us / 1e6:.2f} TB/s, "
        f"empty kernel {ceilings.empty_launch_us:.2f} µs\n{HEADER}"
    )
    failed: list[str] = []
    compile_kernels(case for suite in suites for case in SUITES[suite]())
    RESULTS.mkdir(exist_ok=True)
    for suite in suites:
        results: list[BenchResult] = []
        listed = list(SUITES[suite]())
        begun = list[Case]()
        for case, found in measured(in_time(listed, until, begun), failed):
            results.append(make_result(case, found, ceilings, environment))
            print(line(results[-1]), flush=True)
            # a run that ends early leaves what it has measured
            write_results(path, merged(path, results, suite, whole=False))
        if results and len(begun) == len(listed):
            write_results(path, merged(path, results, suite))
        elif len(begun) < len(listed):
            print(f"no time for {len(listed) - len(begun)} cases of suite {suite}")
    if failed:
        print(f"\n{len(failed)} cases failed: {', '.join(failed)}", file=sys.stderr)
    print(f"\nwritten to {path}" if path.exists() else "\nnothing was measured")
    return 1 if failed or not path.exists() else 0


def any_peer(suites: Sequence[str]) -> bool:
    """Prints which other libraries are timed in these suites, and why the others are not; whether
    there is any."""
    peers = [peer.name for peer in installed.PEERS if not set(suites).isdisjoint(peer.suites)]
    for name in peers:
        if name in installed.modules():
            print(f"in the same run: {name} {installed.version_of(name)}")
        else:
            print(f"not here: {name} ({installed.missing()[name]})")
    if any(name in installed.modules() for name in peers):
        return True
    print("no other library to time: benchmarks/peers.md says how to get them", file=sys.stderr)
    return False


def file_name(gpu: str) -> str:
    """Of a GPU's results: all of its name but the maker's. NVIDIA H200 → h200."""
    words = re.sub(r"[^a-z0-9]+", " ", gpu.lower()).split()
    return "-".join(word for word in words if word not in MAKERS) or "gpu"


def check_gpu(path: Path, gpu: str) -> None:
    """Raises InvalidInput where a file has results of another GPU, which would stay there."""
    if path.exists() and (others := {r.run.gpu for r in read_results(path)} - {gpu}):
        raise InvalidInput(
            f"{path} has results of {', '.join(sorted(others))}, and this is {gpu}: give another "
            f"name for the file"
        )


def in_time(cases: Iterable[Case], until: float, begun: list[Case]) -> Iterator[Case]:
    """Cases until that time, by the monotonic clock; they are noted in `begun`."""
    for case in cases:
        if time.monotonic() >= until:
            return
        begun.append(case)
        yield case


def measured(cases: Iterable[Case], failed: list[str]) -> Iterator[tuple[Case, Measurement]]:
    """Cases and what they took. Leaves out those that do not fit into the GPU's memory, and those
    that fail, whose names go to `failed`. Behind an error of the device nothing can run: it is
    raised."""
    for case in cases:
        try:
            found = case.measure()
        except torch.OutOfMemoryError:
            print(f"left out: {case.name} (the GPU has not enough memory)", flush=True)
        except torch.AcceleratorError:
            raise
        except Exception:
            failed.append(case.name)
            print(f"FAILED: {case.name}\n{traceback.format_exc()}", flush=True)
        else:
            yield case, found
        _free_memory()


def can_run(suite: str) -> bool:
    """Whether what the suite needs is installed; prints what is not."""
    try:
        SUITES[suite]()
    except ImportError as error:
        print(f"left out: suite {suite} ({error})", flush=True)
        return False
    return True


def compile_kernels(cases: Iterable[Case], suites: Sequence[str] = KERNEL_SUITES) -> None:
    """The kernels of all cases that time single calls, in as many processes as there are
    processors: one after the other they take longer than what is timed. Whole steps see to their
    own."""
    device, jobs = torch.device("cuda", torch.cuda.current_device()), {}
    for case in cases:
        if case.suite in suites and not case.name.startswith(("step ", "chunk ")):
            with compiling() as found, suppress(Exception):  # reported where it is measured
                case.measure()
            jobs.update(missing_jobs(found.launches.values(), device))
            del found
            _free_memory()
    with progress_bar(None) as progress:
        compile_jobs(jobs, available_processors(), progress)


def _free_memory() -> None:
    gc.collect()  # managers and their requests refer to each other
    torch.cuda.empty_cache()


def make_result(
    case: Case, found: Measurement, ceilings: Ceilings, environment: dict[str, str]
) -> BenchResult:
    anchored = environment["gpu"] == ANCHORS_ARE_OF
    return BenchResult(
        case=case.name,
        suite=case.suite,
        series=case.series,
        model=case.model,
        batch=case.batch,
        context=case.context,
        microseconds=found.microseconds,
        launches=found.launches,
        must_move_bytes=found.must_move_bytes,
        floor_us=ceilings.floor_us(found.must_move_bytes),
        run=Run(
            copy_bytes_per_us=ceilings.copy_bytes_per_us,
            empty_launch_us=ceilings.empty_launch_us,
            **environment,
        ),
        target_us=case.target_us if anchored else None,
        first_step_us=case.first_step_us if anchored else None,
        peers_us=found.peers_us,
        anchors_us=case.anchors_us if anchored else {},
        parts_us=found.parts_us,
        parts_launches=found.parts_launches,
        cache_bytes=found.cache_bytes,
        step_bytes=found.step_bytes,
        note="; ".join(filter(None, (found.note, installed.versions([*found.peers_us])))),
    )


def merged(
    path: Path, results: list[BenchResult], suite: str, *, whole: bool = True
) -> list[BenchResult]:
    """The new results of a suite, and what the file has of the others, in the order of suites; of a
    suite that is not yet measured as a whole also what the file has of its other cases."""
    order = list(SUITES)
    kept = [r for r in read_results(path) if r.suite in order] if path.exists() else []
    again = {result.case for result in results}
    others = (r for r in kept if r.suite != suite or (not whole and r.case not in again))
    return sorted([*results, *others], key=lambda r: order.index(r.suite))


def line(result: BenchResult) -> str:
    target = f"{result.target_us:8.1f}" if result.target_us else f"{'':8}"
    others = " | ".join(
        ", ".join(f"{name} {time_us:.1f}" for name, time_us in times.items())
        for times in (result.peers_us, result.anchors_us)
    )
    text = (
        f"{result.case:44} {result.microseconds:9.2f} {result.launches:8} "
        f"{result.must_move_bytes / 1e6:9.2f} {result.gigabytes_per_second:6.0f} "
        f"{result.percent_of_floor:6.1f} {target}  {others}"
    )
    for name, time_us in result.parts_us.items():
        text += f"\n{'':6}{name:38} {time_us:9.2f} {result.parts_launches[name]:8}"
    return text + (f"\n{'':6}{result.note}" if result.note else "")


def _environment(commit: str) -> dict[str, str]:
    return {
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())

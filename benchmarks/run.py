"""`python -m benchmarks.run [name] [--only writes,attention,…]`: GPU benchmarks; results are
written under benchmarks/results/, case by case. Lines of suites that do not run stay there. Without
--only, suites whose packages are not installed are left out."""

from __future__ import annotations

import argparse
import gc
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

from benchmarks.case import Case, Measurement
from benchmarks.registry import SUITES
from benchmarks.timing import Ceilings, compiling, measure_ceilings
from dsv4.bench import BenchResult, read_results, write_results
from dsv4.cache.warmup import available_processors, progress_bar
from dsv4.kernels.warmup import compile_jobs, missing_jobs

RESULTS = Path(__file__).parent / "results"
KERNEL_SUITES = ("writes", "gather", "indexer", "attention", "ranks", "v41")
HEADER = (
    f"{'case':44} {'µs':>9} {'launches':>8} {'MB':>9} {'GB/s':>6} {'%floor':>6} {'target':>8}"
    "  peers, measured | published"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="name of the results file; default: the GPU's")
    parser.add_argument("--only", help=f"suites, separated by commas: {', '.join(SUITES)}")
    parser.add_argument("--commit", default=current_commit(), help="what the results are of")
    arguments = parser.parse_args()
    suites = arguments.only.split(",") if arguments.only else list(SUITES)
    if unknown := [suite for suite in suites if suite not in SUITES]:
        parser.error(f"no suite {unknown[0]!r}: choose of {', '.join(SUITES)}")
    if not arguments.only:
        suites = [suite for suite in suites if can_run(suite)]
    if not torch.cuda.is_available():
        print("no CUDA device here: benchmarks need one", file=sys.stderr)
        return 1
    ceilings = measure_ceilings()
    print(
        f"{torch.cuda.get_device_name()}: copy {ceilings.copy_bytes_per_us / 1e6:.2f} TB/s, "
        f"empty kernel {ceilings.empty_launch_us:.2f} µs\n{HEADER}"
    )
    environment = _environment(arguments.commit)
    device = torch.cuda.get_device_name().split()[-1].lower()
    compile_kernels(case for suite in suites for case in SUITES[suite]())
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{arguments.name or device}.jsonl"
    for suite in suites:
        results = []
        for case in SUITES[suite]():
            results.append(make_result(case, case.measure(), ceilings, environment))
            print(line(results[-1]), flush=True)
            # a run that ends early leaves what it has measured
            write_results(path, merged(path, results, suite, whole=False))
            _free_memory()
        write_results(path, merged(path, results, suite))
    print(f"\nwritten to {path}")
    return 0


def can_run(suite: str) -> bool:
    """Whether what the suite needs is installed; prints what is not."""
    try:
        SUITES[suite]()
    except ImportError as error:
        print(f"left out: suite {suite} ({error})", flush=True)
        return False
    return True


def compile_kernels(cases: Iterable[Case]) -> None:
    """The kernels of all cases that time single calls, in as many processes as there are
    processors: one after the other they take longer than what is timed. Whole steps see to their
    own."""
    device, jobs = torch.device("cuda", torch.cuda.current_device()), {}
    for case in cases:
        if case.suite in KERNEL_SUITES and not case.name.startswith(("step ", "chunk ")):
            with compiling() as found:
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
        copy_bytes_per_us=ceilings.copy_bytes_per_us,
        empty_launch_us=ceilings.empty_launch_us,
        target_us=case.target_us,
        first_step_us=case.first_step_us,
        peers_us=found.peers_us,
        anchors_us=case.anchors_us,
        parts_us=found.parts_us,
        parts_launches=found.parts_launches,
        cache_bytes=found.cache_bytes,
        step_bytes=found.step_bytes,
        note=found.note,
        **environment,
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


def current_commit() -> str:
    """The checkout's commit; `unknown` where the tree travelled without its history."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


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

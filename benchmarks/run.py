"""`python -m benchmarks.run [name] [--only writes,gather,…]`: GPU benchmarks; results are written
under benchmarks/results/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable

import torch

from benchmarks import attention, gather, host, indexer, writes
from benchmarks.timing import Result, current_commit, measure_ceilings, report

SUITES: dict[str, Callable[[], Iterable[Result]]] = {
    "host": host.cases,
    "writes": writes.cases,
    "gather": gather.cases,
    "indexer": indexer.cases,
    "attention": attention.cases,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="name of the results file; default: the GPU's")
    parser.add_argument("--only", default=",".join(SUITES), help="suites, separated by commas")
    parser.add_argument("--commit", default=current_commit(), help="what the results are of")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: benchmarks need one", file=sys.stderr)
        return 1
    ceilings = measure_ceilings()
    results: list[Result] = []
    for suite in arguments.only.split(","):
        for result in SUITES[suite]():
            print(f"  {result.case}: {result.microseconds:.2f} µs", flush=True)
            results.append(result)
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name().split()[-1].lower()
    path = report(results, ceilings, arguments.name or device, arguments.commit)
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

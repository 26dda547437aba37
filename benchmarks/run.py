"""`python -m benchmarks.run [name]`: all GPU benchmarks; results under benchmarks/results/."""

from __future__ import annotations

import sys

import torch

from benchmarks import writes
from benchmarks.timing import measure_ceilings, report


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: benchmarks need one", file=sys.stderr)
        return 1
    ceilings = measure_ceilings()
    results = list(writes.cases())
    device = torch.cuda.get_device_name().split()[-1].lower()
    path = report(results, ceilings, sys.argv[1] if len(sys.argv) > 1 else device)
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

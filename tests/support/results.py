"""Benchmark results that nobody measured, for tests of what reads them."""

from __future__ import annotations

from dataclasses import replace

from dsv4.bench import BenchResult, Run

BASE = BenchResult(
    case="append flash csa flush batch 1",
    suite="writes",
    series="csa flush",
    model="v4-flash",
    batch=1,
    microseconds=4.0,
    launches=1,
    must_move_bytes=8_000_000,
    floor_us=3.0,
    run=Run(
        copy_bytes_per_us=4e6,
        empty_launch_us=1.0,
        commit="abc1234",
        gpu="NVIDIA H200",
        torch="2.11.0",
        triton="3.6.0",
        python="3.12.3",
    ),
    anchors_us={"SGLang": 6.7},
)


def results(**times_us: float) -> list[BenchResult]:
    return [replace(BASE, case=name, microseconds=time_us) for name, time_us in times_us.items()]


def points(suite: str, model: str, batches: tuple[int, ...]) -> list[BenchResult]:
    return [
        replace(BASE, case=f"{suite} {model} {n}", suite=suite, model=model, batch=n,
                microseconds=3.0 * n, peers_us={"FlashMLA": 2.0 * n})
        for n in batches
    ]  # fmt: skip

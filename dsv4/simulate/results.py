"""What a simulation answers. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """In seconds; 0 where nothing was counted."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float], counts: Sequence[int] | None = None) -> Percentiles:
        """Of values that were each counted this many times: the smallest value that at least this
        part of all does not exceed."""
        if not len(values):
            return cls(p50=0.0, p90=0.0, p99=0.0)
        order: NDArray[np.intp] = np.argsort(values, kind="stable")
        weights = np.ones(len(values)) if counts is None else np.asarray(counts, dtype=np.float64)
        passed = np.cumsum(weights[order])
        at = np.searchsorted(passed, [p / 100 * passed[-1] for p in PERCENTS])
        p50, p90, p99 = np.asarray(values)[order[at]].tolist()
        return cls(p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A trace on a number of replicas. `tokens_hit` are those of prompts that were cached somewhere
    when the request was first admitted, by where: on the device, in host memory, on the disk.
    `tokens_run` are "all" that ran, of which "replayed" ones were cached without a state, and those
    that "answers" have. `bytes_moved` are those of records, "down" to tiers or host memory and "up"
    from them, `peaks` the most bytes that any replica had at a time."""

    replicas: int
    memory_bytes: int | None
    host_bytes: int
    disk_bytes: int
    routing: str
    policy: str
    residency: bool
    blocks: int
    requests: int
    refused: int
    tokens_asked: int
    tokens_hit: dict[str, int]
    tokens_run: dict[str, int]
    evictions: int
    preemptions: int
    steps: int
    bytes_moved: dict[str, int]
    peaks: dict[str, int]
    ttft: Percentiles
    step: Percentiles
    span_s: float  # from the first request to the end of the last
    has_weights: bool
    wall_s: float

    @property
    def hit_rate(self) -> float:
        return sum(self.tokens_hit.values()) / self.tokens_asked if self.tokens_asked else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the hit rate."""
        return {**asdict(self), "hit_rate": self.hit_rate}

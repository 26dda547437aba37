"""What a benchmark is: a named case, and what measuring it gives. Needs no GPU to be listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Call = Callable[[], None]
L2_BYTES = 60 << 20
# Targets and separately measured times of others are of this GPU: results of other GPUs have none.
ANCHORS_ARE_OF = "NVIDIA H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One timed case; dsv4.bench.BenchResult documents the fields."""

    microseconds: float
    launches: int
    must_move_bytes: int
    peers_us: dict[str, float] = field(default_factory=dict)
    parts_us: dict[str, float] = field(default_factory=dict)
    parts_launches: dict[str, int] = field(default_factory=dict)
    cache_bytes: dict[str, int] = field(default_factory=dict)
    step_bytes: dict[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The same work on different buffers, one call each: rotated over, so that together they
    outgrow the L2 where a real step would not find its data there. `peers` are calls of other
    libraries that do as much."""

    calls: list[Call]
    must_move_bytes: int
    peers: dict[str, list[Call]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`series` names the line that this case is a point of, against `batch`. `target_us` is where
    the project wants to be on one H200, `first_step_us` what it accepts on the way, `anchors_us`
    what others were measured at there."""

    name: str
    suite: str
    series: str
    model: str
    batch: int
    measure: Callable[[], Measurement]
    context: int | None = None
    target_us: float | None = None
    first_step_us: float | None = None
    anchors_us: dict[str, float] = field(default_factory=dict)


def sets_to_outgrow_l2(touched_bytes: int, most: int) -> int:
    """How many buffers of that size to rotate over, at most `most`."""
    return max(1, min(most, -(-2 * L2_BYTES // max(touched_bytes, 1))))

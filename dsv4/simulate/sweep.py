"""Many setups on one trace, and the smallest one that is fast enough. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from dsv4.errors import InvalidInput, is_number, require_count
from dsv4.simulate.cluster import Setup, simulate
from dsv4.simulate.results import Simulated
from dsv4.simulate.trace import TraceRequest

MOST_REPLICAS = 1024
# a setup that runs next, and then how many of its requests have come
Progress = Callable[[Setup, int], None]


def setups(base: Setup, choices: Mapping[str, Sequence[Any]]) -> Iterator[Setup]:
    """The base with every combination of these values. Residency is only combined with what it
    needs: without host memory it is left out. Raises InvalidInput."""
    for values in product(*choices.values()):
        given = dict(zip(choices, values, strict=True))
        if given.get("residency") and not given.get("host_bytes", base.host_bytes):
            if len(choices["residency"]) == 1:
                replace(base, **given)  # raises, and says what is missing
            continue
        yield replace(base, **given)


def run_all(
    trace: Sequence[TraceRequest], asked: Sequence[Setup], progress: Progress | None = None
) -> list[Simulated]:
    """Simulates each of them, one after the other."""
    return [_run(trace, setup, progress) for setup in asked]


def fewest_replicas(
    trace: Sequence[TraceRequest],
    setup: Setup,
    *,
    ttft_p99_s: float,
    most: int = MOST_REPLICAS,
    progress: Progress | None = None,
) -> tuple[int | None, list[Simulated]]:
    """The fewest replicas whose requests wait no longer for their first token, 99 of 100, and that
    refuse no request; None if `most` are too few, or twice as many make no difference: then a
    request on an idle replica is too slow. Counts double until they are enough, then the gap is
    halved: that more replicas are never slower is assumed. Also returns what was simulated, by
    replicas. Raises InvalidInput."""
    require_count("most", most)
    if not is_number(ttft_p99_s) or ttft_p99_s <= 0:
        raise InvalidInput(f"ttft_p99_s={ttft_p99_s!r}: must be a number of seconds above 0")
    found: dict[int, Simulated] = {}

    def is_enough(count: int) -> bool:
        result = found[count] = _run(trace, replace(setup, replicas=count), progress)
        return result.ttft.p99 <= ttft_p99_s and not result.refused

    low, high = 0, 1  # `low` are too few
    while not is_enough(high):
        low, high, before = high, min(2 * high, most), found.get(low)
        is_same = before is not None and before.ttft == found[low].ttft
        if low == most or (is_same and not found[low].refused):
            return None, _by_replicas(found)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high, _by_replicas(found)


def _by_replicas(found: Mapping[int, Simulated]) -> list[Simulated]:
    return [found[count] for count in sorted(found)]


def _run(trace: Sequence[TraceRequest], setup: Setup, progress: Progress | None) -> Simulated:
    if progress is None:
        return simulate(trace, setup)
    progress(setup, 0)
    return simulate(trace, setup, lambda count: progress(setup, count))

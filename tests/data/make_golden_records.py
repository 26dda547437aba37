"""Writes golden_records.json from the oracle: `python -m tests.data.make_golden_records`.

The file pins the bytes of every record format. Rows are hex in memory order, so bf16 numbers read
little-endian. Nothing of `dsv4` takes part.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
from pathlib import Path

from tests.oracles import records as oracle

GOLDEN_PATH = Path(__file__).with_name("golden_records.json")


def _normal(layout: oracle.Layout, rng: random.Random) -> list[float]:
    return [rng.gauss(0.0, 1.0) for _ in range(layout.width)]


def _outliers(layout: oracle.Layout, rng: random.Random) -> list[float]:
    """Heavy tails, and every 37th channel a thousand times larger."""
    return [
        rng.gauss(0.0, 1.0) / (1e-3 + rng.random()) * (1e3 if channel % 37 == 5 else 1.0)
        for channel in range(layout.width)
    ]


def _tiny(layout: oracle.Layout, rng: random.Random) -> list[float]:
    """From 1e-3 down into bf16's denormals, and both zeros."""
    return [
        rng.choice((-1.0, 1.0)) * rng.choice((0.0, 10.0 ** rng.uniform(-40.0, -3.0)))
        for _ in range(layout.width)
    ]


def _specials(layout: oracle.Layout, rng: random.Random) -> list[float]:
    """Infinities and NaNs of both signs in some tiles, none in others."""
    values = _normal(layout, rng)
    values[3], values[20], values[37] = float("inf"), float("-inf"), float("nan")
    values[layout.width // 2 + 1] = float("nan")
    return values


def _ties(layout: oracle.Layout, rng: random.Random) -> list[float]:
    """Midpoints of the format's grid under a scale of 1: every 16th channel is its largest."""
    coded = oracle.coded(layout)
    grid = oracle.GRIDS[coded[0].element] if coded else [1.0, 2.0]
    middle = [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    values = [rng.choice((-1.0, 1.0)) * rng.choice(middle) for _ in range(layout.width)]
    values[::16] = [grid[-1]] * len(values[::16])
    return values


CASES = {
    "normal": _normal,
    "outliers": _outliers,
    "tiny": _tiny,
    "specials": _specials,
    "ties": _ties,
}


def build() -> dict[str, dict[str, dict[str, str]]]:
    """format → case → input, data, scales and decoded rows in hex."""
    golden: dict[str, dict[str, dict[str, str]]] = {}
    for name, layout in oracle.LAYOUTS.items():
        golden[name] = {}
        for case, make in CASES.items():
            values = make(layout, random.Random(f"{name} {case}"))
            bits = [oracle.bf16_bits(oracle.fp32(value)) for value in values]
            data, scales = oracle.encode(layout, bits)
            decoded = oracle.decode(layout, data, scales)
            golden[name][case] = {
                "input": struct.pack(f"<{len(bits)}H", *bits).hex(),
                "data": data.hex(),
                "scales": scales.hex(),
                "decoded": struct.pack(f"<{len(decoded)}H", *decoded).hex(),
            }
    return golden


def main() -> None:
    GOLDEN_PATH.write_text(json.dumps(build(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

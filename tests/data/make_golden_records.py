"""Writes golden_records.json from the oracle: `python -m tests.data.make_golden_records`.

The file pins the bytes of every record format. Rows are hex in memory order, so bf16 numbers read
little-endian. Nothing of `dsv4` takes part.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path

from tests.oracles import records as oracle
from tests.support.numbers import Numbers

GOLDEN_PATH = Path(__file__).with_name("golden_records.json")


def _normal(layout: oracle.Layout, numbers: Numbers) -> list[float]:
    return numbers.normal(layout.width).tolist()


def _outliers(layout: oracle.Layout, numbers: Numbers) -> list[float]:
    """Heavy tails, and every 37th channel a thousand times larger."""
    values = numbers.heavy(layout.width, spread=1.5).tolist()
    return [v * 1024 if channel % 37 == 5 else v for channel, v in enumerate(values)]


def _tiny(layout: oracle.Layout, numbers: Numbers) -> list[float]:
    """From 1e-3 down into bf16's denormals, and both zeros."""
    powers = numbers.integers(-134, -9, layout.width).tolist()
    values = numbers.normal(layout.width).tolist()
    zeros = numbers.integers(0, 2, layout.width).tolist()
    return [
        math.copysign(0.0, v) if zero else math.ldexp(v, power)
        for v, power, zero in zip(values, powers, zeros, strict=True)
    ]


def _specials(layout: oracle.Layout, numbers: Numbers) -> list[float]:
    """Infinities and NaNs of both signs in some tiles, none in others."""
    values = _normal(layout, numbers)
    values[3], values[20], values[37] = float("inf"), float("-inf"), float("nan")
    values[layout.width // 2 + 1] = float("nan")
    return values


def _ties(layout: oracle.Layout, numbers: Numbers) -> list[float]:
    """Midpoints of the format's grid under a scale of 1: every 16th channel is its largest."""
    coded = oracle.coded(layout)
    grid = oracle.GRIDS[coded[0].element] if coded else [1.0, 2.0]
    middle = [sign * (a + b) / 2 for a, b in itertools.pairwise(grid) for sign in (1, -1)]
    values = [middle[i] for i in numbers.integers(0, len(middle), layout.width).tolist()]
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
    for nth, (name, layout) in enumerate(oracle.LAYOUTS.items()):
        golden[name] = {}
        for seed, (case, make) in enumerate(CASES.items(), start=100 * nth):
            values = make(layout, Numbers(seed, shift=0))
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

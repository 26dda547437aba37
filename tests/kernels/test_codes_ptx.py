"""What decodes records on Hopper, executed here from its PTX: every code with every scale, and
whole tiles from memory to shared memory. Triton's interpreter cannot run Gluon."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsv4.cache.records import entry_format
from dsv4.kernels.codes import e2m1_pairs_times_bf16, e4m3_times_bf16
from dsv4.kernels.launch import Launch
from dsv4.reference.codec import decode, encode
from tests.kernels.sm90 import compiled, empty, run_apart
from tests.support.numbers import Numbers
from tests.support.ptx import Program

WIDTH, TILE, LIVE, THREADS = 512, 32, 30, 128


def executed(ptx: str, **operands: NDArray[np.uint32]) -> dict[str, NDArray[np.uint64]]:
    """Registers after an inline assembly; `operands` are named o2 for $2."""
    program = Program(len(next(iter(operands.values()))))
    for name, value in operands.items():
        program.registers[f"${name[1:]}"] = value.astype(np.uint64)
    program.run(ptx)
    return program.registers


def numbers_of(*words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """bf16 numbers of words, the lower half first."""
    pairs = np.stack([word.astype(np.uint32) for word in words], axis=1)
    return torch.from_numpy(pairs.view(np.int16).copy()).view(torch.bfloat16).double().numpy()


def test_every_entry_code_of_v41() -> None:
    from dsv4.kernels.hopper import records_v41 as kernel

    grid = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(1, 128, dtype=np.uint8))
    byte, scale = (axis.ravel() for axis in grid)
    other = np.roll(scale, 1)
    pair = scale.astype(np.uint32) | other.astype(np.uint32) << np.uint32(8)
    both = executed(kernel._SCALES_OF.value, o2=pair)
    ones = np.arange(len(byte), dtype=np.uint8)
    stored = np.stack((byte, ones, byte[::-1], byte ^ ones), axis=1)
    codes = np.ascontiguousarray(stored).view(np.uint32)[:, 0]
    form = entry_format("v41_fp4", head_dim=WIDTH, rope_dim=64)
    for nth, scales in ((0, scale), (1, other)):
        scaled = both[f"${nth}"].astype(np.uint32)
        out = executed(e2m1_pairs_times_bf16(), o4=codes, o5=scaled)
        found = numbers_of(*(out[f"${word}"] for word in range(4))) * kernel.KEY_UNIT
        data = torch.zeros(len(byte), 256, dtype=torch.uint8)
        data[:, :4] = torch.from_numpy(stored)
        rows = torch.zeros(len(byte), 32, dtype=torch.uint8)
        rows[:, 0] = torch.from_numpy(scales)
        wanted = decode(form, data, rows)[:, :8].double().numpy()
        assert np.array_equal(found, wanted, equal_nan=True)
        assert np.isnan(found[scales == 127]).all()
        number = ~np.isnan(wanted)
        assert np.array_equal(np.signbit(found[number]), np.signbit(wanted[number]))


@pytest.mark.parametrize(("unit", "factor"), [(120, 1.0), (112, 256.0)])
def test_every_window_code(unit: int, factor: float) -> None:
    """E4M3 codes with the exponents of numbers from 1e-4 on up to 2^100."""
    grid = np.meshgrid(
        np.array([c for c in range(256) if c & 0x7F != 0x7F], dtype=np.uint8),
        np.arange(0x69, 227, dtype=np.uint8),
    )
    codes, exponent = (axis.ravel() for axis in grid)
    stored = np.stack((codes, codes[::-1], np.roll(codes, 3), codes ^ 0x80), axis=1)
    power = (exponent.astype(np.uint32) << np.uint32(7)) * np.uint32(0x10001)
    words = np.ascontiguousarray(stored).view(np.uint32)[:, 0]
    out = executed(e4m3_times_bf16("$3", "$3", unit=unit), o2=words, o3=power)
    found = numbers_of(out["$0"], out["$1"]) * factor
    form = entry_format("v41_fp8", head_dim=WIDTH, rope_dim=64)
    data = torch.zeros(len(codes), WIDTH, dtype=torch.uint8)
    data[:, :4] = torch.from_numpy(stored)
    scales = torch.full((len(codes), 16), 127, dtype=torch.uint8)
    scales[:, 0] = torch.from_numpy(exponent)
    assert np.array_equal(found, decode(form, data, scales)[:, :4].double().numpy())


@pytest.mark.parametrize("unit", [120, 112])
def test_a_window_tile_with_a_nan(unit: int) -> None:
    """Its scale is 255, whose bits bf16_power_bits makes those of a NaN; whatever the codes are."""
    codes = np.arange(256, dtype=np.uint8)
    stored = np.stack((codes, codes[::-1], np.roll(codes, 3), codes ^ 0x80), axis=1)
    words = np.ascontiguousarray(stored).view(np.uint32)[:, 0]
    power = np.full(256, 0x7FC07FC0, np.uint32)
    out = executed(e4m3_times_bf16("$3", "$3", unit=unit), o2=words, o3=power)
    assert np.isnan(numbers_of(out["$0"], out["$1"])).all()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["v41_fp4", "v41_fp8"])
def test_a_tile_of_v41_from_memory_to_shared_memory(name: str) -> None:
    """The producer's own copies, loads, decoder and stores; the last two rows do not live."""
    numbers, form = Numbers(7), entry_format(name, head_dim=WIDTH, rope_dim=64)
    sizes = torch.exp2(numbers.integers(-3, 4, TILE, WIDTH).float())
    rows = (numbers.normal(TILE, WIDTH) * sizes).to(torch.bfloat16)
    rows[3, 40], rows[4, 500], rows[LIVE, 7] = torch.nan, torch.nan, torch.nan
    data, scales = encode(form, rows)
    wanted = decode(form, data, scales).double().numpy()
    wanted[LIVE:] = 0
    out = np.zeros(2 * TILE * WIDTH, np.uint8)
    program = Program(THREADS, [data.flatten().numpy(), scales.flatten().numpy(), out])
    program.run(run_apart("tests.kernels.test_codes_ptx", name))
    found = torch.from_numpy(out.view(np.int16).copy()).view(torch.bfloat16).double().numpy()
    assert np.array_equal(256.0 * found.reshape(TILE, WIDTH), wanted, equal_nan=True)


def probe(name: str) -> Launch:
    """A program that brings one tile into the second of the stages, and writes it out."""
    from tests.kernels.attend_keys_probe import attend_keys_probe

    arguments = (
        empty(1 << 20, dtype=torch.uint8),
        empty(1 << 20, dtype=torch.uint8),
        empty(TILE, WIDTH, dtype=torch.bfloat16),
    )
    constants = {"WINDOW": name == "v41_fp8", "STAGE": 1, "LIVE": LIVE}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return Launch(attend_keys_probe, (1,), arguments, constants, options)


if __name__ == "__main__":
    print(json.dumps(compiled(probe(sys.argv[1])).ptx))

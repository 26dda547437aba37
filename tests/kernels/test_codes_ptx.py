"""The PTX that decodes records, executed here instruction by instruction: every code with every
scale gives the number that the codec reads."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsv4.cache.records import entry_format
from dsv4.kernels.codes import e2m1_pairs_times_bf16, e4m3_times_bf16
from dsv4.reference.codec import decode

Words = NDArray[np.uint32]


def bf16_products(a: Words, b: Words) -> Words:
    """mul.rn.bf16x2: fp64 holds the product of two bf16 numbers, fp32 rounds it again only where
    it is subnormal there, so exact results stay exact."""

    def numbers(word: Words, upper: bool) -> NDArray[np.float64]:
        bits = word & np.uint32(0xFFFF0000) if upper else word << np.uint32(16)
        return bits.view(np.float32).astype(np.float64)

    halves = []
    for upper in (False, True):
        exact = numbers(a, upper) * numbers(b, upper)
        found = torch.from_numpy(exact.astype(np.float32)).to(torch.bfloat16)
        assert np.array_equal(found.double().numpy(), exact), "a product was rounded"
        halves.append(found.view(torch.int16).numpy().view(np.uint16).astype(np.uint32))
    return halves[0] | halves[1] << np.uint32(16)


def prmt(a: Words, b: Words, selector: Words) -> Words:
    both = np.concatenate((a[:, None].view(np.uint8), b[:, None].view(np.uint8)), axis=1)
    out = np.empty((len(a), 4), np.uint8)
    for byte in range(4):
        chosen = selector >> np.uint32(4 * byte) & np.uint32(15)
        assert (chosen < 8).all()
        out[:, byte] = np.take_along_axis(both, chosen[:, None].astype(np.int64), axis=1)[:, 0]
    return out.view(np.uint32)[:, 0]


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert (table == 0xEA).all()
    return (a & b) | c


RUN = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "mul.rn.bf16x2": bf16_products,
}


def execute(ptx: str, **operands: Words) -> dict[str, Words]:
    """Registers after straight-line PTX; `operands` are those of the assembly, named o2 for $2."""
    registers = {f"${name[1:]}": value for name, value in operands.items()}
    count = len(next(iter(registers.values())))

    def read(name: str) -> Words:
        if re.fullmatch(r"0x[0-9A-Fa-f]+|\d+", name):
            return np.full(count, int(name, 0), np.uint32)
        return registers[name]

    for line in re.findall(r"^\s*([a-z][\w.]*)\s+(.*);$", ptx, re.MULTILINE):
        target, *sources = (part.strip() for part in line[1].split(","))
        registers[target] = RUN[line[0]](*map(read, sources))
    return registers


def halves(*words: Words) -> NDArray[np.float64]:
    """bf16 numbers of words, the lower half first."""
    pairs = np.stack(words, axis=1)
    return torch.from_numpy(pairs.view(np.int16).copy()).view(torch.bfloat16).double().numpy()


@pytest.fixture(scope="module")
def fp4() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Rows of every byte of two codes with every scale that a record can have."""
    byte, scale = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(1, 127, dtype=np.uint8))
    return byte.ravel(), scale.ravel()


def test_entries_of_v41(fp4: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> None:
    from dsv4.kernels.hopper import attend_keys_v41 as kernel

    byte, scale = fp4
    other = np.roll(scale, 1)
    pair = scale.astype(np.uint32) | other.astype(np.uint32) << np.uint32(8)
    both = execute(kernel._SCALES_OF.value, o2=pair)
    ones = np.arange(len(byte), dtype=np.uint8)
    stored = np.stack((byte, ones, byte[::-1], byte ^ ones), axis=1)
    codes = np.ascontiguousarray(stored).view(np.uint32)[:, 0]
    form = entry_format("v41_fp4", head_dim=512, rope_dim=64)
    for nth, scales in ((0, scale), (1, other)):
        out = execute(e2m1_pairs_times_bf16(), o4=codes, o5=both[f"${nth}"])
        found = halves(*(out[f"${word}"] for word in range(4))) * kernel.KEY_UNIT
        data = torch.zeros(len(byte), 256, dtype=torch.uint8)
        data[:, :4] = torch.from_numpy(stored)
        rows = torch.zeros(len(byte), 32, dtype=torch.uint8)
        rows[:, 0] = torch.from_numpy(scales)
        wanted = decode(form, data, rows)[:, :8].double().numpy()
        assert np.array_equal(found, wanted)
        assert np.array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize(("unit", "factor"), [(120, 1.0), (112, 256.0)])
def test_windows(unit: int, factor: float) -> None:
    """E4M3 codes with the exponents of numbers from 1e-4 on up to 2^100."""
    codes, exponent = np.meshgrid(
        np.array([c for c in range(256) if c & 0x7F != 0x7F], dtype=np.uint8),
        np.arange(0x69, 227, dtype=np.uint8),
    )
    codes, exponent = codes.ravel(), exponent.ravel()
    stored = np.stack((codes, codes[::-1], np.roll(codes, 3), codes ^ 0x80), axis=1)
    power = exponent.astype(np.uint32) << np.uint32(7)
    words = np.ascontiguousarray(stored).view(np.uint32)[:, 0]
    out = execute(e4m3_times_bf16("$3", "$3", unit=unit), o2=words, o3=power * np.uint32(0x10001))
    found = halves(out["$0"], out["$1"]) * factor
    form = entry_format("v41_fp8", head_dim=512, rope_dim=64)
    data = torch.zeros(len(codes), 512, dtype=torch.uint8)
    data[:, :4] = torch.from_numpy(stored)
    scales = torch.full((len(codes), 16), 127, dtype=torch.uint8)
    scales[:, 0] = torch.from_numpy(exponent)
    wanted = decode(form, data, scales)[:, :4].double().numpy()
    assert np.array_equal(found, wanted)

"""Rotation tables: which frequencies YaRN touches, and positions without rounding of their own."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.model import ModelSpec
from dsv4.rope import rope_frequencies, rope_table

FLASH = ModelSpec.preset("v4-flash")


def exact_frequency(theta: float, pair: int) -> float:
    return theta ** (-2 * pair / 64)


def test_the_plain_table_is_theta_10000():
    frequencies = rope_frequencies(FLASH, yarn=False)
    assert frequencies.dtype == torch.float32
    expected = [exact_frequency(10_000, pair) for pair in range(32)]
    assert torch.allclose(frequencies.double(), torch.tensor(expected).double(), rtol=2e-7, atol=0)


def test_yarn_leaves_fast_pairs_and_divides_slow_ones_by_16():
    frequencies = rope_frequencies(FLASH, yarn=True)
    plain = 1.0 / (160_000 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    assert torch.equal(frequencies[:16], plain[:16])
    assert torch.equal(frequencies[25:], plain[25:] / 16)


def test_yarn_ramps_between_them():
    frequencies = rope_frequencies(FLASH, yarn=True)
    for pair in range(16, 25):
        ramp = (pair - 15) / 10
        whole = exact_frequency(160_000, pair)
        expected = whole * (1 - ramp) + whole / 16 * ramp
        assert frequencies[pair].item() == pytest.approx(expected, rel=1e-6)


def test_a_table_row_holds_all_cosines_then_all_sines():
    table = rope_table(FLASH, yarn=True, tokens=5)
    assert table.shape == (5, 64)
    assert table.dtype == torch.float32
    assert table.is_contiguous()
    assert torch.equal(table[0], torch.cat((torch.ones(32), torch.zeros(32))))
    assert table[3, 0].item() == pytest.approx(math.cos(3), abs=1e-7)
    assert table[3, 32].item() == pytest.approx(math.sin(3), abs=1e-7)


@pytest.mark.parametrize("yarn", [False, True])
def test_angles_are_exact_positions_times_fp32_frequencies(yarn: bool):
    """At the end of the context too: 1,048,575 is an exact fp32 number, and one product follows."""
    last = FLASH.max_context - 1
    frequencies = rope_frequencies(FLASH, yarn=yarn)
    table = rope_table(FLASH, yarn=yarn, tokens=FLASH.max_context)
    for position in (1, 127, 65_537, last - 1, last):
        angles = torch.tensor(position, dtype=torch.float32) * frequencies
        assert torch.equal(table[position], torch.cat((angles.cos(), angles.sin())))


def test_short_tables_are_prefixes_of_long_ones():
    long = rope_table(FLASH, yarn=True, tokens=1000)
    for tokens in (1, 7, 128, 999):
        assert torch.equal(rope_table(FLASH, yarn=True, tokens=tokens), long[:tokens])


def test_both_tables_of_a_schema_differ_from_position_one_on():
    plain, yarn = (rope_table(FLASH, yarn=flag, tokens=3) for flag in (False, True))
    assert torch.equal(plain[0], yarn[0])
    assert not torch.equal(plain[1], yarn[1])

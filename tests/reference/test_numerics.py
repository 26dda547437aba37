"""The arithmetic that every machine must repeat: roots, quotients, sums over channels."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dsv4.reference.numerics import channel_sum, divide, hadamard, project, square_root
from tests.support.numbers import Numbers


def power_of_two(exponent: Tensor) -> Tensor:
    """fp64, from the bits: torch.ldexp goes through the library's pow."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def assert_nearest_roots(mantissa: Tensor, exponent: int) -> None:
    """square_root(mantissa · 2^exponent) by integers: 2s-1 ≤ 2·root ≤ 2s+1 for a root that is s
    times its last place. A root is never in the middle, so nothing is left to choose."""
    x = (mantissa.double() * 2.0**exponent).float()
    root = square_root(x).double()
    last = torch.frexp(root)[1] - 24
    s = (root * power_of_two(-last)).long()
    # x in units of the square of the root's last place, an integer below 2^48
    scaled = (x.double() * power_of_two(-2 * last)).long()
    assert bool(((2 * s - 1) ** 2 < 4 * scaled).all())
    assert bool((4 * scaled < (2 * s + 1) ** 2).all())


@pytest.mark.parametrize("exponent", [-24, -23])
def test_the_root_of_every_mantissa_is_the_nearest(exponent: int):
    for first in range(1 << 23, 1 << 24, 1 << 21):
        assert_nearest_roots(torch.arange(first, first + (1 << 21)), exponent)


def test_roots_of_subnormal_numbers():
    assert_nearest_roots(torch.arange(1, 1 << 16), -149)


def test_roots_of_what_is_no_positive_number():
    x = torch.tensor([0.0, -0.0, math.inf, math.nan, -1.0])
    found = square_root(x)
    assert found[:3].tolist() == [0.0, 0.0, math.inf]
    assert torch.signbit(found[1])
    assert found[3:].isnan().all()


@pytest.mark.parametrize("divisor", [6.0, 448.0, 3.0, 24.0, 6 * 0.0371])
def test_quotients_are_rounded_once(divisor: float):
    x = torch.arange(1, 4000, dtype=torch.float32) * 1.1
    wide = torch.tensor(divisor, dtype=torch.float32).item()
    for found, value in zip(divide(x, divisor).tolist(), x.tolist(), strict=True):
        exact = Fraction(value) / Fraction(wide)
        above = torch.nextafter(torch.tensor(found), torch.tensor(math.inf)).item()
        below = torch.nextafter(torch.tensor(found), torch.tensor(0.0)).item()
        assert Fraction(below) + Fraction(found) <= 2 * exact <= Fraction(found) + Fraction(above)


@pytest.mark.parametrize("width", [1, 2, 3, 96, 128, 512])
def test_sums_of_squares_do_not_depend_on_the_order(width: int):
    """bf16 numbers of up to 2^14 times each other's size, the largest ratio that fp64 has room
    for, in ascending, descending and mixed order."""
    nth = torch.arange(width)
    numbers = ((128 + nth * 37 % 128) * power_of_two(nth * 5 % 14 - 20)).to(torch.bfloat16)
    squares = numbers.float() * numbers.float()
    exact = sum((Fraction(s) for s in squares.tolist()), Fraction())
    expected = torch.tensor(float(exact), dtype=torch.float64).float()
    assert Fraction(float(exact)) == exact
    orders = (squares, squares.sort().values, squares.sort(descending=True).values)
    for order in orders:
        assert channel_sum(order).item() == expected.item()


def test_a_sum_keeps_its_axis_and_is_rounded_once():
    x = torch.tensor([[1.0, 2.0**-24, 2.0**-40], [2.0**-24, 1.0, 0.0]])
    found = channel_sum(x)
    assert found.shape == (2, 1)
    assert found.flatten().tolist() == [1.0 + 2.0**-23, 1.0]


@pytest.mark.parametrize("width", [2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_the_scale_of_hadamard_is_far_from_the_middle_of_two_numbers(width: int):
    """It is a power of Python's, whose last place may differ between machines."""
    power = width**-0.5
    near = [torch.tensor(power * (1 + k * 2.0**-52), dtype=torch.float32) for k in (-64, 0, 64)]
    assert near[0] == near[1] == near[2]
    one = torch.zeros(1, width)
    one[0, 0] = 1.0
    assert hadamard(one)[0, -1] == near[1]


@pytest.mark.parametrize("width", [128, 512])
def test_a_projection_is_the_exact_sum_rounded_once(width: int):
    numbers = Numbers(31)
    x = numbers.heavy(12, width).to(torch.bfloat16)
    weight = (numbers.normal(40, width) * width**-0.5).to(torch.bfloat16)
    exact = torch.tensor(
        [[math.fsum((row * line).tolist()) for line in weight.double()] for row in x.double()],
        dtype=torch.float64,
    )
    assert torch.equal(project(x, weight), exact.float())
    assert not torch.equal(x.float() @ weight.float().T, exact.float())

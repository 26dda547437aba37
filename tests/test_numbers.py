"""The source of test numbers: fixed values, and what the distributions promise."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.numbers import Numbers


def test_the_first_numbers_of_seed_0_are_these():
    numbers = Numbers(0, shift=0)
    assert [hex(word) for word in numbers.words(3).tolist()] == [
        "0x4a042d1dc9e67966",
        "0x18a33082d6b0d44f",
        "0x675d3d57f92e2d0c",
    ]
    assert Numbers(0, shift=0).normal(3).view(torch.int32).tolist() == [
        -1091503057,
        -1113311146,
        -1095249829,
    ]


def test_draws_go_on_where_the_last_one_ended():
    one, two = Numbers(3), Numbers(3)
    assert torch.equal(torch.cat((one.bits(5), one.bits(7))), two.bits(12))


def test_seeds_and_shifts_give_other_numbers():
    draws = [Numbers(seed, shift=shift).bits(4).tolist() for seed in range(5) for shift in range(3)]
    assert len({tuple(draw) for draw in draws}) == 15


def test_the_environment_shifts_all_seeds():
    script = "from tests.support.numbers import Numbers; print(Numbers(1).bits(4).tolist())"
    environment = {**os.environ, "DSV4_TEST_SEED": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(Numbers(1, shift=2).bits(4).tolist())


def test_normal_numbers():
    x = Numbers(1).normal(1000, 200).double()
    assert x.shape == (1000, 200)
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02
    assert 3.0 < x.abs().max() < 3.5


def test_heavy_numbers_have_outliers_of_both_signs():
    x = Numbers(1).heavy(100_000, spread=3.0)
    assert torch.isfinite(x).all()
    assert x.max() > 1000 < -x.min()
    assert (x.abs() < 1e-3).sum() > 100


def test_uniform_numbers():
    x = Numbers(1).uniform(100_000)
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.mean() - 0.5) < 0.01


def test_integers_reach_both_ends():
    x = Numbers(1).integers(-3, 4, 1000)
    assert x.dtype == torch.int64
    assert sorted(set(x.tolist())) == list(range(-3, 4))


def test_a_permutation():
    x = Numbers(1).permutation(300)
    assert x.sort().values.tolist() == list(range(300))
    assert x.tolist() != list(range(300))


# their numbers are the CPU's, or a library's
OTHER_SOURCES = {
    *("randn", "randn_like", "rand", "rand_like", "normal_", "uniform_", "exponential_"),
    *("default_rng", "standard_normal", "gauss", "normalvariate"),
}


def called(node: ast.AST) -> str | None:
    """`randn` of `torch.randn(…)` and of `randn(…)`."""
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def test_no_test_draws_from_another_source():
    found = [
        f"{path.name}: {ast.unparse(node)}"
        for path in sorted(Path(__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if called(node) in OTHER_SOURCES
    ]
    assert found == []

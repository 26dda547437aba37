"""Rotation tables: which frequencies YaRN touches, and that every number is rounded once."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from dsv4 import rope
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec
from dsv4.ops.calls import LayerWeights
from dsv4.reference.numerics import rms_norm
from dsv4.rope import apply_rope, rope_frequencies, rope_table, rotation_table
from tests.support.numbers import Numbers

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
    plain = rope_frequencies(replace(FLASH, rope=replace(FLASH.rope, yarn_factor=1.0)), yarn=True)
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


# ---- every number is the nearest -----------------------------------------------------------------

TABLES = [pytest.param(False, id="plain"), pytest.param(True, id="yarn")]


@cache
def whole_table(yarn: bool) -> Tensor:
    return rope_table(FLASH, yarn=yarn, tokens=FLASH.max_context)


def angles_at(positions: Tensor, yarn: bool) -> Tensor:
    """fp32 position × fp32 frequency, rounded: in fp64 the product of 20 and 24 bits is exact."""
    frequencies = rope_frequencies(FLASH, yarn=yarn).double()
    return (positions.double()[:, None] * frequencies).float()


def nearest_fp32(function: str, angle: float) -> float:
    """mpmath's value, rounded once."""
    with mpmath.workprec(120):
        value = getattr(mpmath, function)(mpmath.mpf(angle))
    with mpmath.workprec(24):
        return float(+value)


def assert_nearest(yarn: bool, positions: Tensor, pairs: Tensor) -> None:
    """cos and sin of pair pairs[i] at positions[i]."""
    at = torch.arange(len(positions))
    angles = angles_at(positions, yarn)[at, pairs].tolist()
    rows = whole_table(yarn)[positions]
    for function, column in (("cos", pairs), ("sin", pairs + 32)):
        found = rows[at, column].tolist()
        expected = [nearest_fp32(function, angle) for angle in angles]
        wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
        assert not wrong, f"{len(wrong)} {function}, first at position {positions[wrong[0]]}"


@pytest.mark.parametrize("yarn", TABLES)
def test_at_50_000_positions_a_pair_each(yarn: bool):
    """Both tables together see 10^5 positions: every 30th, in turn through the pairs."""
    positions = torch.arange(0, FLASH.max_context, 30)[:-1] + int(yarn) * 15
    positions = torch.cat((positions, torch.arange(FLASH.max_context - 15_048, FLASH.max_context)))
    assert len(positions) == 50_000
    assert_nearest(yarn, positions, torch.arange(len(positions)) % 32)


@pytest.mark.parametrize("yarn", TABLES)
def test_all_pairs_of_the_first_and_the_last_positions(yarn: bool):
    ends = (*range(32), *range(FLASH.max_context - 32, FLASH.max_context))
    positions = torch.tensor(ends).repeat_interleave(32)
    assert_nearest(yarn, positions, torch.arange(32).repeat(len(ends)))


@pytest.mark.parametrize("yarn", TABLES)
def test_numbers_that_lie_between_two_fp32_numbers(yarn: bool):
    """The hard ones: within 2^-40 of the middle, where fp64 alone might choose the wrong side."""
    first = FLASH.max_context - (1 << 17)
    angles = angles_at(torch.arange(first, FLASH.max_context), yarn).double()
    hard = 0
    for function, column in (("cos", 0), ("sin", 32)):
        values = getattr(torch, function)(angles)
        above, below = values * (1 + 2.0**-40), values * (1 - 2.0**-40)
        for row, pair in torch.nonzero(above.float() != below.float()).tolist():
            found = whole_table(yarn)[first + row, pair + column].item()
            assert found == nearest_fp32(function, angles[row, pair].item())
            hard += 1
    assert hard > 30


def test_integers_decide_where_the_library_cannot(monkeypatch: pytest.MonkeyPatch):
    """With a library of no use at all the table stays what it is."""
    expected = rope_table(FLASH, yarn=True, tokens=40)
    monkeypatch.setattr(rope, "LIBRARY_ERROR_ULPS", 1 << 28)
    assert torch.equal(rope_table(FLASH, yarn=True, tokens=40), expected)


@pytest.mark.parametrize("yarn", TABLES)
def test_frequencies_are_deepseeks_steps_each_rounded_once(yarn: bool):
    theta = FLASH.rope.compress_theta if yarn else FLASH.rope.theta

    def fp32(x: Any) -> Any:
        with mpmath.workprec(24):
            return +x

    expected = []
    for pair in range(32):
        with mpmath.workprec(200):
            power = fp32(mpmath.mpf(theta) ** mpmath.mpf(2 * pair / 64))
            whole = fp32(1 / power)
            if yarn:
                ramp = min(max(fp32(mpmath.mpf(pair - 15) / 10), 0), 1)
                keep = fp32(1 - ramp)
                slow = fp32(fp32(whole / 16) * fp32(1 - keep))
                whole = fp32(slow + fp32(whole * keep))
        expected.append(float(whole))
    assert rope_frequencies(FLASH, yarn=yarn).tolist() == expected


def test_a_table_from_frequencies_is_the_models():
    frequencies = rope_frequencies(FLASH, yarn=True)
    found = rotation_table(frequencies, tokens=200)
    assert torch.equal(found, rope_table(FLASH, yarn=True, tokens=200))


@pytest.mark.parametrize("yarn", TABLES)
def test_the_default_device_of_torch_does_not_matter(yarn: bool):
    expected = rope_table(FLASH, yarn=yarn, tokens=40)
    with torch.device("meta"):
        found = rope_table(FLASH, yarn=yarn, tokens=40)
    assert torch.equal(found, expected)


# ---- shapes --------------------------------------------------------------------------------------


def test_short_tables_are_prefixes_of_long_ones():
    long = rope_table(FLASH, yarn=True, tokens=1000)
    for tokens in (1, 7, 128, 999):
        assert torch.equal(rope_table(FLASH, yarn=True, tokens=tokens), long[:tokens])


def test_both_tables_of_a_schema_differ_from_position_one_on():
    plain, yarn = (rope_table(FLASH, yarn=flag, tokens=3) for flag in (False, True))
    assert torch.equal(plain[0], yarn[0])
    assert not torch.equal(plain[1], yarn[1])


# ---- queries are rotated as the cache rotates keys -----------------------------------------------


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def turned_by_hand(x: Tensor, table: Tensor, positions: list[int], *, inverse: bool) -> Tensor:
    """Channel by channel, each product and sum rounded to fp32 by numpy."""
    wide, width = x.float().numpy().copy(), table.shape[1]
    found, first = wide.copy(), x.shape[-1] - width
    for row, position in enumerate(positions):
        for pair in range(width // 2):
            even, odd = first + 2 * pair, first + 2 * pair + 1
            c = table[position, pair].numpy()
            s = table[position, width // 2 + pair].numpy()
            s = -s if inverse else s
            a, b = wide[row, ..., even], wide[row, ..., odd]
            found[row, ..., even] = a * c - b * s
            found[row, ..., odd] = a * s + b * c
    return torch.from_numpy(found).to(x.dtype)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 3, 96), (5, 64), (5, 1, 2, 512), (0, 3, 96)])
def test_the_last_channels_turn_in_interleaved_pairs(
    shape: tuple[int, ...], dtype: torch.dtype, inverse: bool
):
    table = rope_table(FLASH, yarn=True, tokens=2000)
    x = Numbers(1).heavy(*shape).to(dtype)
    before, positions = x.clone(), [0, 7, 1999, 3, 7][: shape[0]]
    given = torch.tensor(positions, dtype=torch.int32)
    found = apply_rope(x, table, given, inverse=inverse)
    expected = turned_by_hand(x, table, positions, inverse=inverse)
    assert found.dtype == dtype
    assert torch.equal(bits_of(found), bits_of(expected))
    assert torch.equal(bits_of(found)[..., :-64], bits_of(x)[..., :-64])
    assert torch.equal(bits_of(x), bits_of(before))
    assert found.is_contiguous()
    assert torch.equal(apply_rope(x, table, given.long(), inverse=inverse), found)


def test_a_pair_turns_by_the_angle_of_its_frequency_and_back():
    table = rope_table(FLASH, yarn=False, tokens=100)
    x = torch.zeros(1, 64)
    x[0, 2 * 20] = 1  # pair 20
    angle = 99 * exact_frequency(10_000, 20)
    found = apply_rope(x, table, torch.tensor([99]))
    assert found[0, 40].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert found[0, 41].item() == pytest.approx(math.sin(angle), abs=1e-6)
    back = apply_rope(found, table, torch.tensor([99]), inverse=True)
    assert torch.allclose(back, x, atol=1e-6)


def test_padding_is_turned_as_position_0():
    x = Numbers(2).normal(2, 64)
    table = rope_table(FLASH, yarn=False, tokens=3)
    found = apply_rope(x, table, torch.tensor([-1, 2]))
    assert torch.equal(found[0], x[0])
    assert not torch.equal(found[1], x[1])


@pytest.mark.parametrize("record", ["fp32", "fp8_ds"])
def test_the_cache_rotates_the_same_bits(record: str):
    """KV handed over raw, and normalised and rotated by the caller: the same bytes are stored. The
    output that `attend` rotates back is the one that the caller rotates back."""
    model = ModelSpec.preset("tiny")
    schema = CacheSchema.build(model, max_context=512, entry_format=record)
    table = rope_table(model, yarn=False, tokens=512)
    norm = Numbers(3).normal(model.head_dim)
    dtype = torch.float32 if record == "fp32" else torch.bfloat16
    raw = Numbers(4).heavy(70, model.head_dim).to(dtype)
    arenas, outputs = [], []
    for own in (False, True):
        manager = KVCacheManager(schema, num_blocks=2, max_requests=1)
        request = manager.admit_request(70)
        for first, count in ((0, 69), (69, 1)):
            plan = manager.prepare_forward([(request, count)])
            handle, kv = manager.acquire(0, plan.batch), raw[first : first + count]
            if own:
                kv = apply_rope(rms_norm(kv, norm, model.rms_eps), table, plan.batch.positions)
            handle.append(kv, weights=LayerWeights(rope=table, kv_norm=None if own else norm))
            q = Numbers(5).normal(count, model.heads, model.head_dim).to(dtype)
            q = apply_rope(q, table, plan.batch.positions)
            plain, _ = handle.attend(q, torch.zeros(model.heads))
            back, _ = handle.attend(q, torch.zeros(model.heads), inverse_rope=table)
            turned = apply_rope(plain, table, plan.batch.positions, inverse=True)
            assert not torch.equal(bits_of(plain), bits_of(back))
            assert torch.equal(bits_of(turned), bits_of(back))
            outputs.append(back)
            manager.commit(plan, partial=True)
        arenas.append(manager.memory.slot_arena.bytes.clone())
    assert torch.equal(*arenas)
    assert torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 96, dtype=torch.float64)}, "x is torch.float64: give bf16 or fp32"),
        ({"x": torch.zeros(2, 32)}, "at least the 64 channels"),
        ({"x": torch.zeros(64)}, "give .tokens, …, channels."),
        ({"x": [1.0]}, "x is list: give a tensor"),
        ({"table": torch.zeros(9, 64).bfloat16()}, "as rope_table makes it"),
        ({"table": torch.zeros(9, 2, 64)}, "as rope_table makes it"),
        ({"positions": torch.tensor([1, 2, 3])}, "the 2 tokens of x need"),
        ({"positions": torch.tensor([1.0, 2.0])}, "positions are torch.float32"),
        ({"positions": torch.tensor([1, 9])}, "position 9 of a table for 9 positions"),
        ({"positions": torch.zeros(2, dtype=torch.int32, device="meta")}, "bring them to one"),
    ],
)
def test_what_cannot_be_rotated_is_refused(change: dict[str, Any], message: str):
    good = {
        "x": torch.zeros(2, 96),
        "table": rope_table(FLASH, yarn=True, tokens=9),
        "positions": torch.tensor([0, 8]),
    }
    apply_rope(**good)
    with pytest.raises(InvalidInput, match=message):
        apply_rope(**{**good, **change})

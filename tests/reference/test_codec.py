"""Records and numerics against the slow oracle, golden bytes and formulas in float64."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.cache.records import Part, RecordFormat, TileCode
from dsv4.errors import InvalidInput
from dsv4.reference import numerics
from dsv4.reference.codec import decode, encode
from tests.data.make_golden_records import CASES, GOLDEN_PATH, build
from tests.oracles import records as oracle
from tests.support.numbers import Numbers

FORMATS: dict[str, RecordFormat] = {
    "fp8_ds": records.fp8_ds(512, 64),
    "fp8_row": records.fp8_row(512, 64),
    "bf16": records.bf16(512, 64),
    "mxfp4": records.mxfp4(128),
    "nvfp4": records.nvfp4(128),
    "index_fp8": records.index_fp8(128),
    "index_bf16": records.index_bf16(128),
    # V4.1's records are data, not code: 528 and 288 bytes
    "v41_window": RecordFormat(
        name="v41_window",
        width=512,
        parts=(
            Part(
                name="fp8",
                start=0,
                width=512,
                code=TileCode(element="e4m3", tile=32, scale="ue8m0", amax_floor=1e-4),
            ),
        ),
    ),
    "v41_entry": RecordFormat(
        name="v41_entry",
        width=512,
        parts=(
            Part(
                name="fp4",
                start=0,
                width=512,
                code=TileCode(element="e2m1", tile=16, scale="e4m3", amax_floor=6 * 2.0**-9),
            ),
        ),
    ),
}
CODED = [name for name, layout in oracle.LAYOUTS.items() if oracle.coded(layout)]
POWER_OF_TWO = [name for name in CODED if oracle.coded(oracle.LAYOUTS[name])[0].scale == "ue8m0"]
FINITE = np.array([b for b in range(1 << 16) if b & 0x7F80 != 0x7F80], dtype=np.uint16)


def tensor_of(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def bits_of(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def bf16(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)


def random_bits(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """bf16 patterns of one kind of trouble, [rows, width]."""
    numbers = Numbers(1000 * seed + sum(kind.encode()))

    def power_of_two(low: int, high: int, *shape: int) -> Tensor:
        """fp64, so that it is not subnormal."""
        return ((numbers.integers(low, high, *shape) + 1023) << 52).view(torch.float64)

    x = numbers.normal(rows, width).double()
    if kind == "heavy tails":
        x = numbers.heavy(rows, width, spread=2.0) * power_of_two(-10, 11, rows, 1)
    elif kind == "outlier channels":
        x[:, numbers.permutation(width)[: width // 64]] *= 1e3
    elif kind == "tiny":
        x = x * power_of_two(-30, -9, rows, width)
    elif kind == "denormal":
        x = x * power_of_two(-134, -119, rows, width)
    elif kind == "huge":
        x = x * power_of_two(110, 127, rows, width)
    elif kind == "any bits":
        return numbers.integers(0, 1 << 16, rows, width).numpy().astype(np.uint16)
    elif kind == "zeros":
        return numbers.integers(0, 2, rows, width).numpy().astype(np.uint16) << np.uint16(15)
    elif kind == "inf and nan":
        bits = bits_of(x.to(torch.bfloat16)).copy()
        special = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF], dtype=np.uint16)
        at = (numbers.uniform(rows, width) < 0.01).numpy()
        bits[at] = special[numbers.integers(0, len(special), at.sum())]
        return bits
    return bits_of(x.float().to(torch.bfloat16))


KINDS = [
    "normal",
    "heavy tails",
    "outlier channels",
    "tiny",
    "denormal",
    "huge",
    "zeros",
    "inf and nan",
    "any bits",
]


# ---- the oracle and the golden file -------------------------------------------------------------


def test_oracle_agrees_with_the_specification_by_hand():
    assert [oracle.code_value("e4m3", c) for c in (0x00, 0x01, 0x08, 0x38, 0x7E)] == [
        0.0,
        2.0**-9,
        2.0**-6,
        1.0,
        448.0,
    ]
    # spec §3.1: midpoints .25->0, .75->1, 1.25->1, 1.75->2, 2.5->2, 3.5->4, 5->4
    rounded = [
        oracle.code_value("e2m1", oracle.nearest_code("e2m1", x))
        for x in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    ]
    assert rounded == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    # spec §4.3: amax floored at 1e-4 gives a smallest scale of 2^-22
    assert oracle.power_of_two_byte(oracle.fp32(1e-4), 448.0) == 127 - 22
    assert oracle.power_of_two_byte(448.0, 448.0) == 127
    assert oracle.power_of_two_byte(450.0, 448.0) == 128
    assert oracle.power_of_two_byte(6 * 2.0**-126, 6.0) == 1


def test_golden_file_is_what_the_oracle_makes():
    assert json.loads(GOLDEN_PATH.read_text(encoding="utf-8")) == build()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORMATS)
def test_golden_records_encode_and_decode_to_the_stored_bytes(name: str, case: str):
    golden = json.loads(GOLDEN_PATH.read_text(encoding="utf-8"))[name][case]
    x = tensor_of(np.frombuffer(bytes.fromhex(golden["input"]), dtype="<u2"))
    data, scales = encode(FORMATS[name], x)
    assert data.numpy().tobytes().hex() == golden["data"]
    assert scales.numpy().tobytes().hex() == golden["scales"]
    decoded = decode(FORMATS[name], data, scales)
    assert bits_of(decoded).astype("<u2").tobytes().hex() == golden["decoded"]


@pytest.mark.parametrize("name", FORMATS)
def test_record_sizes_are_those_of_the_specification(name: str):
    record = FORMATS[name]
    assert (record.data_row_bytes, record.scale_row_bytes) == oracle.RECORD_BYTES[name]
    assert record.record_bytes == sum(oracle.RECORD_BYTES[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_random_records_equal_the_oracle(name: str, kind: str):
    layout, record = oracle.LAYOUTS[name], FORMATS[name]
    bits = random_bits(kind, 3, layout.width)
    data, scales = encode(record, tensor_of(bits))
    decoded = bits_of(decode(record, data, scales))
    for row in range(len(bits)):
        expected = oracle.encode(layout, bits[row].tolist())
        assert (data[row].numpy().tobytes(), scales[row].numpy().tobytes()) == expected
        assert decoded[row].tolist() == oracle.decode(layout, *expected)


# ---- every bf16 number --------------------------------------------------------------------------


def check_tiles(record: RecordFormat, tiles: oracle.Tiles, bits: np.ndarray) -> None:
    """Tiles of finite bf16 patterns [n, tile], packed into records, against the fast oracle."""
    per_record = tiles.width // tiles.tile
    full = np.zeros((-(-len(bits) // per_record) * per_record, tiles.tile), dtype=np.uint16)
    full[: len(bits)] = bits
    x = np.zeros((len(full) // per_record, record.width), dtype=np.uint16)
    x[:, : tiles.width] = full.reshape(-1, tiles.width)
    data, scales = (part.numpy() for part in encode(record, tensor_of(x)))
    codes, raw = oracle.encode_tiles(tiles, full)
    coded_bytes = tiles.width if tiles.element == "e4m3" else tiles.width // 2
    found = data[:, :coded_bytes]
    if tiles.element == "e2m1":
        found = np.stack((found & 0xF, found >> 4), axis=-1)
    np.testing.assert_array_equal(found.reshape(codes.shape), codes)
    np.testing.assert_array_equal(
        scales[:, : per_record * raw.shape[1]].reshape(raw.shape), raw, err_msg="scales"
    )


def narrow(name: str) -> tuple[RecordFormat, oracle.Tiles]:
    """The coded part of a format; one scale for all of 448 channels would make the sweep slow,
    so that format runs with 32."""
    tiles = oracle.coded(oracle.LAYOUTS[name])[0]
    if name == "fp8_row":
        return records.fp8_row(36, 4), replace(tiles, width=32, tile=32)
    if name == "index_fp8":
        return records.index_fp8(32), replace(tiles, width=32, tile=32)
    return FORMATS[name], tiles


def test_there_are_65280_finite_bf16_numbers():
    assert len(FINITE) == 65_280


def test_fast_oracle_equals_the_slow_one():
    for name in CODED:
        tiles = oracle.coded(oracle.LAYOUTS[name])[0]
        bits = FINITE[Numbers(1).integers(0, len(FINITE), 20, tiles.tile)]
        bits[::2] = random_bits("normal", 10, tiles.tile)
        codes, raw = oracle.encode_tiles(tiles, bits)
        for row, pattern in enumerate(bits):
            slow_codes, slow_raw = oracle.encode_tile(tiles, pattern.tolist())
            assert codes[row].tolist() == slow_codes
            assert raw[row].tobytes() == slow_raw


@pytest.mark.parametrize("name", CODED)
def test_every_finite_bf16_number_as_the_largest_of_its_tile(name: str):
    record, tiles = narrow(name)
    bits = np.zeros((len(FINITE), tiles.tile), dtype=np.uint16)
    bits[np.arange(len(FINITE)), np.arange(len(FINITE)) % tiles.tile] = FINITE
    check_tiles(record, tiles, bits)


@pytest.mark.parametrize("name", CODED)
def test_every_finite_bf16_number_beside_its_neighbours(name: str):
    record, tiles = narrow(name)
    bits = np.resize(FINITE, (-(-len(FINITE) // tiles.tile), tiles.tile))
    check_tiles(record, tiles, bits)


@pytest.mark.parametrize("top", [448.0, 6.0, 1.0, 3.5, 65280.0, 0.000101])
@pytest.mark.parametrize("name", CODED)
def test_every_bf16_number_below_a_given_largest_one(name: str, top: float):
    record, tiles = narrow(name)
    top_bits = bits_of(bf16([top]))[0]
    magnitude = FINITE & 0x7FFF
    below = FINITE[magnitude <= top_bits]
    bits = np.full((-(-len(below) // (tiles.tile - 1)), tiles.tile), top_bits, dtype=np.uint16)
    bits[:, 1:] = np.resize(below, bits[:, 1:].shape)
    check_tiles(record, tiles, bits)


@pytest.mark.parametrize("exponent", [-20, -9, -1, 0, 1, 8, 100])
@pytest.mark.parametrize("name", CODED)
def test_midpoints_go_to_the_even_code(name: str, exponent: int):
    """All midpoints of the grid under a scale of 2^exponent, as far as the scale can be that."""
    record, tiles = narrow(name)
    if tiles.scale == "e4m3":
        exponent = min(8, max(-9, exponent))
    grid = oracle.GRIDS[tiles.element]
    middle = np.array([(a + b) / 2 for a, b in itertools.pairwise(grid)])
    values = np.concatenate((middle, -middle)) * 2.0**exponent
    rows = -(-len(values) // (tiles.tile - 1))
    x = np.full((rows, tiles.tile), grid[-1] * 2.0**exponent)
    x[:, 1:] = np.resize(values, (rows, tiles.tile - 1))
    bits = bits_of(torch.from_numpy(x).to(torch.bfloat16))
    np.testing.assert_array_equal(oracle.bf16_values(bits), x)  # bf16 holds them exactly
    codes, _ = oracle.encode_tiles(tiles, bits)
    assert (codes[:, 1:] % 2 == 0).all()
    check_tiles(record, tiles, bits)


# ---- what no specification fixes ----------------------------------------------------------------


@pytest.mark.parametrize("name", CODED)
def test_infinity_behaves_as_the_largest_number_of_its_sign(name: str):
    record = FORMATS[name]
    bits = random_bits("normal", 4, record.width)
    bits[:, 5], bits[:, 11] = 0x7F80, 0xFF80
    same = bits.copy()
    same[:, 5], same[:, 11] = 0x7F7F, 0xFF7F
    coded = oracle.coded(oracle.LAYOUTS[name])[0].width
    bits[:, coded:] = same[:, coded:]
    for found, expected in zip(
        encode(record, tensor_of(bits)), encode(record, tensor_of(same)), strict=True
    ):
        assert torch.equal(found, expected)


NAN_SCALES = {"ue8m0": [0xFF], "e4m3": [0x7F], "fp32": [0x00, 0x00, 0xC0, 0x7F]}


@pytest.mark.parametrize("nan_bits", [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF])
@pytest.mark.parametrize("name", CODED)
def test_a_nan_makes_its_tile_nan_and_no_other(name: str, nan_bits: int):
    """By its scale, which every reader multiplies with; E4M3 codes of the tile are NaN too."""
    record, tiles = FORMATS[name], oracle.coded(oracle.LAYOUTS[name])[0]
    nth = tiles.width // tiles.tile - 1
    tile = slice(nth * tiles.tile, (nth + 1) * tiles.tile)
    bits = random_bits("normal", 4, record.width)
    bits[:, tile.start + 3] = 0
    data, scales = encode(record, tensor_of(bits))
    bits[:, tile.start + 3] = nan_bits
    nan_data, nan_scales = encode(record, tensor_of(bits))
    marker = NAN_SCALES[tiles.scale]
    at = slice(nth * len(marker), (nth + 1) * len(marker))
    assert nan_scales[:, at].tolist() == [marker] * 4
    decoded = bits_of(decode(record, nan_data, nan_scales))
    assert (decoded[:, tile] == 0x7FC0).all()
    scales[:, at] = torch.tensor(marker, dtype=torch.uint8)
    if tiles.element == "e4m3":
        assert (nan_data[:, tile] == 0x7F).all()
        data[:, tile] = 0x7F
    assert torch.equal(nan_data, data)
    assert torch.equal(nan_scales, scales)
    rest = np.delete(decoded, tile, axis=1)
    assert not np.isnan(oracle.bf16_values(rest)).any()


@pytest.mark.parametrize("name", CODED)
def test_zeros_keep_their_sign_and_take_the_smallest_scale(name: str):
    record = FORMATS[name]
    tiles = oracle.coded(oracle.LAYOUTS[name])[0]
    bits = np.zeros((1, record.width), dtype=np.uint16)
    bits[:, 1::2] = 0x8000
    data, scales = encode(record, tensor_of(bits))
    assert (bits_of(decode(record, data, scales)) == bits).all()
    if tiles.element == "e4m3":
        assert data[0, :4].tolist() == [0x00, 0x80, 0x00, 0x80]
    else:
        assert set(data[0].tolist()) == {0x80}
    smallest = {"mxfp4": 1, "nvfp4": 1, "v41_entry": 1, "fp8_ds": 105, "v41_window": 105}
    if name in smallest:
        assert set(scales[0, : tiles.width // tiles.tile].tolist()) == {smallest[name]}


@pytest.mark.parametrize("name", ["fp8_ds", "fp8_row", "bf16", "index_bf16"])
def test_channels_kept_as_bf16_keep_every_bit(name: str):
    record = FORMATS[name]
    coded = sum(part.width for part in oracle.coded(oracle.LAYOUTS[name]))
    bits = np.zeros((-(-(1 << 16) // (record.width - coded)), record.width), dtype=np.uint16)
    bits[:, coded:] = np.resize(np.arange(1 << 16, dtype=np.uint16), bits[:, coded:].shape)
    data, scales = encode(record, tensor_of(bits))
    assert (bits_of(decode(record, data, scales)) == bits).all()
    assert data[:, coded:].numpy().tobytes() == bits[:, coded:].astype("<u2").tobytes()


def test_low_nibble_is_the_even_channel():
    x = torch.zeros(128, dtype=torch.bfloat16)
    x[0], x[1], x[2], x[3] = 6.0, -0.5, 1.5, 3.0
    data, scales = encode(FORMATS["mxfp4"], x)
    assert data[:2].tolist() == [0x97, 0x53]
    assert scales.tolist() == [127, 1, 1, 1]
    assert decode(FORMATS["mxfp4"], data, scales)[:4].tolist() == [6.0, -0.5, 1.5, 3.0]


@pytest.mark.parametrize("kind", ["normal", "any bits"])
def test_pad_bytes_of_the_scale_row_are_zero(kind: str):
    _, scales = encode(FORMATS["fp8_ds"], tensor_of(random_bits(kind, 50, 512)))
    assert scales.shape == (50, 8)
    assert (scales[:, 7] == 0).all()


def test_a_pad_byte_is_not_read():
    data, scales = encode(FORMATS["fp8_ds"], tensor_of(random_bits("normal", 3, 512)))
    expected = decode(FORMATS["fp8_ds"], data, scales)
    scales[:, 7] = 0xFF
    assert torch.equal(decode(FORMATS["fp8_ds"], data, scales), expected)


# ---- decode -------------------------------------------------------------------------------------


def check_decode(name: str, data: np.ndarray, scales: np.ndarray) -> None:
    found = bits_of(decode(FORMATS[name], torch.from_numpy(data), torch.from_numpy(scales)))
    for row in range(len(data)):
        expected = oracle.decode(oracle.LAYOUTS[name], data[row].tobytes(), scales[row].tobytes())
        assert found[row].tolist() == expected


def test_every_e4m3_code_under_every_power_of_two_scale():
    """256 codes fill half a 528-byte record; the other half has the mirrored scale byte."""
    data = np.tile(np.arange(256, dtype=np.uint8), (128, 2))
    low = np.arange(128, dtype=np.uint8)
    scales = np.repeat(np.stack((low, 255 - low), axis=1), 8, axis=1)
    check_decode("v41_window", data, scales)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "v41_entry"])
def test_every_e2m1_code_under_every_scale_byte(name: str):
    tiles = oracle.coded(oracle.LAYOUTS[name])[0]
    per_record = tiles.width // tiles.tile
    codes = np.resize(np.arange(16, dtype=np.uint8), tiles.width)
    packed = codes[0::2] | codes[1::2] << 4
    scales = np.arange(256, dtype=np.uint8).reshape(-1, per_record)
    check_decode(name, np.tile(packed, (len(scales), 1)), scales)


def test_every_e4m3_code_under_fp32_scales():
    scales = np.array(
        [1.0, 1 / 448, 0.1, 3.3e38, 1e36, 1e-38, 1e-45, 0.0, np.inf, np.nan, 7.3e-5, 2.0**-149],
        dtype=np.float32,
    )
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    data = np.tile(codes, (len(scales), 1))
    check_decode("index_fp8", data, np.repeat(scales, 2).view(np.uint8).reshape(-1, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POWER_OF_TWO)
def test_values_survive_a_second_round_trip(name: str, kind: str):
    """A stored vector that is read and stored again gives the same numbers."""
    record = FORMATS[name]
    once = decode(record, *encode(record, tensor_of(random_bits(kind, 20, record.width))))
    twice = decode(record, *encode(record, once))
    assert (bits_of(twice) == bits_of(once)).all()


@pytest.mark.parametrize("name", POWER_OF_TWO)
def test_bytes_survive_decode_and_encode_where_a_tile_fills_its_scale(name: str):
    """Any codes, any scale byte that can occur: if a tile's largest code is above half of the
    grid's largest value, encoding what was decoded gives the same bytes."""
    record, tiles = FORMATS[name], oracle.coded(oracle.LAYOUTS[name])[0]
    numbers = Numbers(5)
    grid = np.array(oracle.GRIDS[tiles.element])
    above_half = np.flatnonzero(grid > grid[-1] / 2)
    per_record = tiles.width // tiles.tile
    lowest = 105 if tiles.element == "e4m3" else 1
    highest = 246 if tiles.element == "e4m3" else 252
    scale_bytes = np.arange(lowest, highest + 1, dtype=np.uint8)
    rows = -(-len(scale_bytes) // per_record) * 3
    codes = numbers.integers(0, len(grid), rows, per_record, tiles.tile).numpy().astype(np.uint8)
    signs = np.array([0, oracle.SIGN_BIT[tiles.element]], np.uint8)
    codes |= signs[numbers.integers(0, 2, *codes.shape)]
    codes[:, :, 9] = above_half[numbers.integers(0, len(above_half), rows, per_record)]
    codes = codes.reshape(rows, tiles.width)
    if tiles.element == "e2m1":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = np.zeros((rows, record.scale_row_bytes), dtype=np.uint8)
    scales[:, :per_record] = np.resize(scale_bytes, (rows, per_record))
    data = np.zeros((rows, record.data_row_bytes), dtype=np.uint8)
    data[:, : codes.shape[1]] = codes
    again = encode(record, decode(record, torch.from_numpy(data), torch.from_numpy(scales)))
    np.testing.assert_array_equal(again[0].numpy(), data)
    np.testing.assert_array_equal(again[1].numpy(), scales)


# ---- calling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_leading_shape_and_strides_do_not_matter(name: str):
    record = FORMATS[name]
    x = tensor_of(random_bits("heavy tails", 6, record.width))
    data, scales = encode(record, x)
    for shape in ((2, 3), (1, 6, 1), (6,)):
        shaped = encode(record, x.view(*shape, record.width))
        assert shaped[0].shape == (*shape, record.data_row_bytes)
        assert shaped[1].shape == (*shape, record.scale_row_bytes)
        assert torch.equal(shaped[0].view(6, -1), data)
        assert torch.equal(shaped[1].reshape(6, -1), scales)
    wide = torch.zeros((record.width, 12), dtype=torch.bfloat16)
    wide[:, ::2] = x.T
    strided = encode(record, wide.T[::2])
    assert torch.equal(strided[0], data)
    assert torch.equal(strided[1], scales)
    assert torch.equal(encode(record, x[2])[0], data[2])
    repeated = encode(record, x[2].expand(6, -1))
    assert torch.equal(repeated[0], data[2].expand(6, -1))
    assert torch.equal(repeated[1], scales[2].expand(6, -1))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("name", FORMATS)
def test_no_vectors_make_no_records(name: str, shape: tuple[int, ...]):
    record = FORMATS[name]
    data, scales = encode(record, torch.zeros((*shape, record.width), dtype=torch.bfloat16))
    assert data.shape == (*shape, record.data_row_bytes)
    assert scales.shape == (*shape, record.scale_row_bytes)
    assert decode(record, data, scales).shape == (*shape, record.width)


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_leaves_its_input_alone(name: str):
    bits = random_bits("any bits", 4, FORMATS[name].width)
    x = tensor_of(bits.copy())
    encode(FORMATS[name], x)
    assert (bits_of(x) == bits).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int16])
@pytest.mark.parametrize("name", FORMATS)
def test_another_type_is_refused(name: str, dtype: torch.dtype):
    with pytest.raises(InvalidInput, match=str(FORMATS[name].width)):
        encode(FORMATS[name], torch.zeros((2, FORMATS[name].width), dtype=dtype))


@pytest.mark.parametrize("extra", [-1, 1, -64, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_another_width_is_refused(name: str, extra: int):
    width = FORMATS[name].width + extra
    with pytest.raises(InvalidInput, match=rf"{FORMATS[name].width} channels.* \[2, {width}\]$"):
        encode(FORMATS[name], torch.zeros((2, width), dtype=torch.bfloat16))


@pytest.mark.parametrize("power", [-6, -1, 3])
def test_a_global_scale_shifts_every_value(power: int):
    """With a power of two as global scale the bytes are those of the input divided by it."""
    plain = records.nvfp4(128)
    code = plain.parts[0].code
    assert code is not None
    scaled = replace(
        plain, parts=(replace(plain.parts[0], code=replace(code, global_scale=2.0**power)),)
    )
    x = tensor_of(random_bits("heavy tails", 20, 128))
    expected = encode(plain, x)
    found = encode(scaled, x * 2.0**power)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(decode(scaled, *found), decode(plain, *expected) * 2.0**power)


# ---- numerics -----------------------------------------------------------------------------------


def half_ulp(exact: Tensor) -> Tensor:
    """How far the nearest bf16 number can be: half of the step at that size."""
    _, exponent = torch.frexp(exact.abs().clamp_min(2.0**-126))
    return torch.ldexp(torch.ones_like(exact), exponent - 9)


def sylvester(n: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@pytest.mark.parametrize("n", [2, 32, 128])
def test_hadamard_of_unit_vectors_is_the_sylvester_matrix_in_natural_order(n: int):
    found = numerics.hadamard(torch.eye(n).to(torch.bfloat16)).float().numpy()
    scale = bf16([n**-0.5]).float().item()
    np.testing.assert_array_equal(found, sylvester(n) * scale)


@pytest.mark.parametrize("kind", ["normal", "outlier channels", "heavy tails"])
def test_hadamard_equals_the_explicit_matrix(kind: str):
    x = tensor_of(random_bits(kind, 50, 128))
    wide = x.double()
    exact = wide @ torch.from_numpy(sylvester(128)) * 128**-0.5
    error = (numerics.hadamard(x).double() - exact).abs()
    # one rounding to bf16, and what fp32 loses on the way through seven sums
    assert (error <= half_ulp(exact) + wide.abs().sum(dim=1, keepdim=True) * 2.0**-23).all()


def test_hadamard_twice_gives_the_vector_back():
    x = tensor_of(random_bits("normal", 50, 128))
    twice = numerics.hadamard(numerics.hadamard(x))
    norm = x.double().norm(dim=-1, keepdim=True)
    assert ((twice.double() - x.double()).norm(dim=-1, keepdim=True) < norm * 2.0**-7).all()


def test_exp_nonpositive_is_within_two_ulp():
    points = np.concatenate(
        (
            np.linspace(-87.0, 0.0, 200_001),
            -(10.0 ** (Numbers(3).uniform(200_000).numpy() * 41.9 - 40.0)),
            # around the halves of ln 2, where the reduced argument changes sign
            np.outer((np.arange(250) / 2) * math.log(2), [-1 - 1e-7, -1.0, -1 + 1e-7]).ravel(),
        )
    ).astype(np.float32)
    points = points[points >= -87.0]
    found = numerics.exp_nonpositive(torch.from_numpy(points)).numpy()
    exact = np.exp(points.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert (np.abs(found.astype(np.float64) - exact) / ulp).max() <= 2.0


def test_exp_nonpositive_at_its_ends():
    x = torch.tensor([0.0, -0.0, -1e-45, -87.0, -87.00001, -1000.0, -torch.inf])
    found = numerics.exp_nonpositive(x)
    assert found[:3].tolist() == [1.0, 1.0, 1.0]
    assert found[3] > 2.0**-126
    assert found[4:].tolist() == [0.0, 0.0, 0.0]


def test_to_bf16_rounds_to_nearest_even_and_knows_one_nan():
    patterns = Numbers(7).bits(20_000).numpy().view(np.uint32)
    patterns[:5000] = patterns[:5000] & 0xFFFF0000 | 0x8000  # ties
    values = patterns.view(np.float32)
    found = bits_of(numerics.to_bf16(torch.from_numpy(values.copy())))
    assert found.tolist() == [oracle.bf16_bits(float(v)) for v in values]


@pytest.mark.parametrize("kind", ["normal", "outlier channels", "heavy tails", "tiny"])
def test_rms_norm_equals_float64_up_to_one_rounding(kind: str):
    eps = 1e-6
    x = tensor_of(random_bits(kind, 40, 512))
    weight = 1.0 + 0.3 * Numbers(2).normal(512)
    wide = x.double()
    exact = weight.double() * wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    error = (numerics.rms_norm(x, weight, eps).double() - exact).abs()
    assert (error <= half_ulp(exact) + exact.abs() * 2.0**-21).all()


def test_rms_norm_of_zeros_is_zero():
    found = numerics.rms_norm(torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(8), 1e-6)
    assert (bits_of(found) == 0).all()


@pytest.mark.parametrize("width", [512, 128])
def test_rotate_equals_float64_up_to_one_rounding(width: int):
    x = tensor_of(random_bits("outlier channels", 40, width))
    angle = Numbers(4).uniform(40, 32).double().numpy() * 100 - 50
    cos, sin = (torch.from_numpy(f(angle)).float() for f in (np.cos, np.sin))
    found = numerics.rotate(x, cos, sin)
    assert (bits_of(found)[:, : width - 64] == bits_of(x)[:, : width - 64]).all()
    even, odd = x[:, -64::2].double(), x[:, -63::2].double()
    size = even.abs() + odd.abs()
    for got, exact in (
        (found[:, -64::2], even * cos.double() - odd * sin.double()),
        (found[:, -63::2], even * sin.double() + odd * cos.double()),
    ):
        assert ((got.double() - exact).abs() <= half_ulp(exact) + size * 2.0**-22).all()


def test_rotate_leaves_the_other_channels_bit_for_bit():
    bits = random_bits("any bits", 10, 512)
    found = numerics.rotate(tensor_of(bits), torch.ones(10, 32), torch.zeros(10, 32))
    assert (bits_of(found)[:, :448] == bits[:, :448]).all()


def test_gated_pool_equals_a_float64_softmax_and_never_reads_invalid_rows():
    numbers = Numbers(6)
    values = numbers.heavy(30, 8, 64).double().numpy()
    logits = numbers.normal(30, 8, 64).double().numpy() * 10.0
    valid = (numbers.uniform(30, 8) < 0.6).numpy()
    valid[:, 3] = True
    weight = np.where(valid[..., None], np.exp(logits - logits.max(axis=1, keepdims=True)), 0.0)
    exact = (weight * values).sum(axis=1) / weight.sum(axis=1)
    values[~valid], logits[~valid] = np.nan, np.nan
    found = numerics.gated_pool(
        torch.from_numpy(values).float(), torch.from_numpy(logits).float(), torch.from_numpy(valid)
    )
    bound = np.nanmax(np.abs(values), axis=1) * 1e-5
    assert (np.abs(found.double().numpy() - exact) <= bound).all()

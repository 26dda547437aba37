"""Record formats as byte counts; what the bytes mean is tested with the codec."""

from __future__ import annotations

import pytest

from dsv4.cache import records
from dsv4.cache.records import Part, RecordFormat, TileCode
from dsv4.errors import SchemaError

E4M3 = TileCode(element="e4m3", tile=32, scale="ue8m0", amax_floor=1e-4)
E2M1 = TileCode(element="e2m1", tile=16, scale="e4m3", amax_floor=6 * 2.0**-9)


@pytest.mark.parametrize(
    ("name", "data", "scales", "record"),
    [
        ("fp8_ds", 448 + 64 * 2, 7 + 1, 584),
        ("fp8_row", 448 + 64 * 2, 4, 580),
        ("bf16", 1024, 0, 1024),
    ],
)
def test_entry_formats_of_v4(name: str, data: int, scales: int, record: int) -> None:
    found = records.entry_format(name, head_dim=512, rope_dim=64)
    assert found.name == name
    assert (found.data_row_bytes, found.scale_row_bytes) == (data, scales)
    assert found.record_bytes == record


@pytest.mark.parametrize(
    ("name", "data", "scales", "record"),
    [("mxfp4", 64, 4, 68), ("nvfp4", 64, 8, 72), ("fp8", 128, 4, 132), ("bf16", 256, 0, 256)],
)
def test_index_formats_of_v4(name: str, data: int, scales: int, record: int) -> None:
    found = records.index_format(name, index_dim=128)
    assert found.name == name
    assert (found.data_row_bytes, found.scale_row_bytes) == (data, scales)
    assert found.record_bytes == record


def test_fp8_ds_is_the_trained_code() -> None:
    nope, rope = records.fp8_ds(512, 64).parts
    assert (nope.start, nope.width, nope.tiles) == (0, 448, 7)
    assert nope.code == TileCode(element="e4m3", tile=64, scale="ue8m0", amax_floor=1e-4)
    assert (rope.start, rope.width, rope.code) == (448, 64, None)


def test_v41_records_are_new_data_and_no_new_code() -> None:
    window = RecordFormat(
        name="v41", width=512, parts=(Part(name="fp8", start=0, width=512, code=E4M3),)
    )
    entry = RecordFormat(
        name="v41_fp4", width=512, parts=(Part(name="fp4", start=0, width=512, code=E2M1),)
    )
    assert (window.data_row_bytes, window.scale_row_bytes) == (512, 16)
    assert (entry.data_row_bytes, entry.scale_row_bytes) == (256, 32)
    assert (window.record_bytes, entry.record_bytes) == (528, 288)


@pytest.mark.parametrize("head_dim", [66, 72, 80, 96, 128, 192, 576])
@pytest.mark.parametrize("name", records.ENTRY_FORMATS)
def test_toy_widths_have_whole_tiles(name: str, head_dim: int) -> None:
    found = records.entry_format(name, head_dim=head_dim, rope_dim=64)
    for part in found.parts:
        if part.code is not None:
            assert part.tiles * part.code.tile == part.width
    if name == "fp8_ds":
        assert found.scale_row_bytes % 8 == 0


@pytest.mark.parametrize(
    ("width", "parts", "message"),
    [
        (64, (Part(name="a", start=0, width=32),), "cover 32 channels of 64"),
        (64, (Part(name="a", start=1, width=63),), "starts at 1"),
        (
            96,
            (Part(name="a", start=0, width=64), Part(name="b", start=32, width=64)),
            "starts at 32",
        ),
        (40, (Part(name="a", start=0, width=40, code=E4M3),), "not whole tiles of 32"),
    ],
)
def test_parts_must_tile_the_record(width: int, parts: tuple[Part, ...], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        RecordFormat(name="broken", width=width, parts=parts)


def test_half_a_byte_cannot_be_stored() -> None:
    with pytest.raises(SchemaError, match="whole bytes"):
        records.mxfp4(127)


def test_unknown_formats_name_the_known_ones() -> None:
    with pytest.raises(SchemaError, match=r"fp8_ds, fp8_row, .*bf16"):
        records.entry_format("fp4", head_dim=512, rope_dim=64)
    with pytest.raises(SchemaError, match="mxfp4, nvfp4, fp8, bf16"):
        records.index_format("int4", index_dim=128)

"""The worked example of DeepSeek-V4.1's records, byte for byte."""

from __future__ import annotations

import hashlib

import torch

from dsv4.cache.records import RecordFormat, entry_format, index_format
from dsv4.reference.codec import decode, encode

FP8 = entry_format("v41_fp8", head_dim=512, rope_dim=64)
FP4 = entry_format("v41_fp4", head_dim=512, rope_dim=64)


def example() -> torch.Tensor:
    """((37 c mod 101) - 50) / 16, but 0 for channels 32 to 63."""
    x = torch.tensor([((37 * c) % 101 - 50) / 16 for c in range(512)])
    x[32:64] = 0
    return x.bfloat16()


def stored(record: RecordFormat, x: torch.Tensor) -> tuple[bytes, bytes]:
    data, scales = encode(record, x)
    return bytes(data.tolist()), bytes(scales.tolist())


def test_a_window_row_of_528_bytes() -> None:
    data, scales = stored(FP8, example())
    assert data[:32].hex() == "fced74fadc78f7667bf270fcea76f90079f66a7cf072fbe677f85c7af46d7cee"
    assert data[32:64] == bytes(32)
    assert data[480:].hex() == "79f6687bf271fce976f9507af56b7cf072fbe478f8607af46efced74fadc78f7"
    assert scales.hex() == "78697878787878787878787878787878"
    assert hashlib.sha256(data + scales).hexdigest() == (
        "9ef5ca4ded1e5b933ae8711753c0d1c228f489c5c0caaeb4e2a593113564acf0"
    )
    found = decode(FP8, *encode(FP8, example()))[:8].tolist()
    assert found == [-3.0, -0.8125, 1.5, -2.5, -0.1875, 2.0, -1.875, 0.4375]


def test_an_entry_of_288_bytes() -> None:
    data, scales = stored(FP4, example())
    assert data[:16].hex() == "bfe5692ec7f45a0ed6724cafe6613dc7"
    assert data[16:32] == bytes(16)
    assert data[248:].hex() == "f56a1ed7f45b9ee6"
    assert scales.hex() == "3030010130303030302f3030303030303030303030303030303030302f303030"
    assert hashlib.sha256(data + scales).hexdigest() == (
        "ac7af695809550ef7a46f9d08a3a1ed8635789a865c6a2c10a69803dd48bce4d"
    )
    found = decode(FP4, *encode(FP4, example()))[:8].tolist()
    assert found == [-3, -0.75, 1.5, -2, -0.25, 2, -2, 0.5]


def test_an_index_key_of_68_bytes() -> None:
    data, scales = stored(index_format("mxfp4", index_dim=128), example()[:128])
    assert data.hex() == (
        "adc3481ca5d2390cb4512a9dc4402ba5"
        + "00" * 16
        + "491cb5d23a8cc4512a9dc4401ba5d3490cb5d23a8cc4512a9dc3401ba5d2490c"
    )
    assert scales.hex() == "7f017f7f"


def test_a_quotient_is_a_division() -> None:
    """By the reciprocal of the scale this tie would go the other way."""
    x = torch.zeros(512, dtype=torch.bfloat16)
    x[0], x[1] = 6 * 0.46875, 0.5859375
    data, scales = stored(FP4, x)
    assert torch.tensor(list(scales[:1]), dtype=torch.uint8).view(torch.float8_e4m3fn) == 0.46875
    assert data[0] >> 4 == 2

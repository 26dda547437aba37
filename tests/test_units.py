from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.errors import InvalidInput
from dsv4.units import (
    format_bytes,
    format_tokens,
    parse_byte_rate,
    parse_bytes,
    parse_link,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "count_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80 gib", 80 * 2**30),
        ("  1.5 TiB ", 3 * 2**39),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("2PiB", 2**51),
        ("584B", 584),
        ("0", 0),
        ("85899345920", 85_899_345_920),
        ("1_000_000", 1_000_000),
        ("1.1GiB", 1_181_116_006),  # 1,181,116,006.4: the fraction of a byte is dropped
        (85_899_345_920, 85_899_345_920),
    ],
)
def test_bytes_are_read_exactly(text: str | int, count_bytes: int) -> None:
    assert parse_bytes(text) == count_bytes


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1M", 1_048_576),
        ("1m", 1_048_576),
        ("128k", 131_072),
        ("128 K", 131_072),
        ("1.5k", 1536),
        ("1_000_000", 1_000_000),
        ("7", 7),
        (7, 7),
    ],
)
def test_tokens_count_in_powers_of_two(text: str | int, tokens: int) -> None:
    assert parse_tokens(text) == tokens


GARBAGE = [
    "",
    "   ",
    "GiB",
    "-1",
    "-1GiB",
    "+1",
    "nan",
    "inf",
    "-inf",
    "1e9",
    "0x10",
    "1.2.3",
    "1.",
    ".5",
    "1__0",
    "_1",
    "1_",
    "1,000",
    "1.5",
    "8 0",
    "\u0661\u0662",  # digits, but not ours
    "9" * 5000,
    -1,
    True,
    1.5,
    float("nan"),
    float("inf"),
    None,
    b"80GiB",
]


@pytest.mark.parametrize("parse", [parse_byte_rate, parse_bytes, parse_link, parse_tokens])
@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda value: repr(value)[:12])
def test_garbage_is_refused_with_an_example(parse, garbage) -> None:
    with pytest.raises(InvalidInput):
        parse(garbage)


def test_units_of_one_kind_are_not_units_of_the_other() -> None:
    assert parse_bytes("80G") == 80 * 10**9  # the smaller of the two that it could mean
    with pytest.raises(InvalidInput, match="128k"):
        parse_tokens("1GiB")


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [
        (0, "0 B"),
        (584, "584 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1024**2 - 1, "1 MiB"),  # never "1024 KiB"
        (15_097_856, "14.4 MiB"),
        (80 * 2**30, "80 GiB"),
        (3_684_958_208, "3.43 GiB"),
        (2**60, "1,024 PiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit(count_bytes: int, text: str) -> None:
    assert format_bytes(count_bytes) == text


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (0, "0"),
        (128, "128"),
        (1024, "1k"),
        (131_072, "128k"),
        (1_048_576, "1M"),
        (1_000_000, "1,000,000"),
        (128_000, "128,000"),  # 125k, which nobody means
        (1_024_000, "1,024,000"),
    ],
)
def test_tokens_are_shown_exactly(tokens: int, text: str) -> None:
    assert format_tokens(tokens) == text


@pytest.mark.parametrize("format_count", [format_bytes, format_tokens])
@pytest.mark.parametrize("value", [-1, 1.0, float("nan"), True])
def test_only_counts_are_shown(format_count, value) -> None:
    with pytest.raises(InvalidInput):
        format_count(value)


@given(st.integers(0, 2**40))
def test_what_is_shown_of_tokens_reads_back(tokens: int) -> None:
    assert parse_tokens(format_tokens(tokens).replace(",", "_")) == tokens


@given(st.integers(0, 2**59))
def test_what_is_shown_of_bytes_is_off_by_half_a_percent_at_most(count_bytes: int) -> None:
    shown = parse_bytes(format_bytes(count_bytes).replace(",", "_"))
    assert abs(shown - count_bytes) <= 0.005 * count_bytes + 1


@pytest.mark.parametrize(
    ("text", "bits"),
    [("400Gb", 4 * 10**11), ("25 Gb/s", 25 * 10**9), ("1.6Tb", 16 * 10**11), ("10Mb", 10**7)],
)
def test_rates_of_links_are_bits(text: str, bits: int) -> None:
    assert parse_link(text) == bits
    assert parse_link(bits) == bits


@pytest.mark.parametrize("text", ["50GB", "400", "400G", "gb", "-1Gb", "0Gb", "1e3Gb", 0, None])
def test_other_rates_are_refused(text: object) -> None:
    with pytest.raises(InvalidInput):
        parse_link(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count_bytes"), [("55GB/s", 55 * 10**9), ("1 GiB", 2**30), ("7", 7), (7, 7)]
)
def test_rates_of_memory_are_bytes(text: str | int, count_bytes: int) -> None:
    assert parse_byte_rate(text) == count_bytes


@pytest.mark.parametrize("text", ["400Gb", "400Gb/s", "0", "0GB/s", "GB/s", "55GB/h", 0])
def test_rates_that_are_not_bytes_are_refused(text: str | int) -> None:
    with pytest.raises(InvalidInput):
        parse_byte_rate(text)

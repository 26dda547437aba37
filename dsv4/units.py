"""Bytes and token counts as people write them. Torch-free.

Bytes exist in both families of units: GiB = 2^30, GB = 10^9. Tokens count in powers of two, as
context lengths do: 128k = 131,072 and 1M = 1,048,576.
"""

from __future__ import annotations

import re
from fractions import Fraction

from dsv4.errors import InvalidInput, is_whole, require_count

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BYTE_FACTORS: dict[str, int] = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY_UNITS)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS)},
    # as people write them; the smaller of the two that it could mean
    **{unit[0].lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS) if power},
}
_TOKEN_FACTORS: dict[str, int] = {"": 1, "k": 1024, "m": 1024**2}
_QUANTITY = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_RATE_FACTORS = {"M": 10**6, "G": 10**9, "T": 10**12}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([MGT])b(?:/s)?", re.ASCII)
_LONGEST_TEXT = 64


def parse_bytes(text: str | int) -> int:
    """Reads "80GiB", "80 GB", "1.5 TiB", "1_000_000" or a plain integer as bytes.

    Case does not matter; a fraction of a byte is dropped ("1.1GiB" is 1,181,116,006). "80G" is
    80GB, the smaller of the two that it could mean. Raises InvalidInput for anything else.
    """
    return _parse(text, _BYTE_FACTORS, what="bytes", example="80GiB, 80GB, 1.5TiB or 85899345920")


def require_bytes(name: str, given: str | int) -> int:
    """An amount of memory that an option `name` was given: at least a byte, as a number or as
    `parse_bytes` reads it. Raises InvalidInput."""
    return require_count(name, parse_bytes(given) if isinstance(given, str) else given)


def parse_tokens(text: str | int) -> int:
    """Reads "1M" (1,048,576), "128k" (131,072), "1_000_000" or a plain integer as tokens.

    Case does not matter; a fraction of a token is dropped. Raises InvalidInput for anything else.
    """
    return _parse(text, _TOKEN_FACTORS, what="tokens", example="1M, 128k or 1_000_000")


def parse_link(text: str | int) -> int:
    """Reads "400Gb", "25 Gb/s", "1.6Tb" or a plain integer as bits per second. Here case matters:
    b is a bit. Raises InvalidInput for anything else, "50GB" included."""
    if is_whole(text):
        return require_count("bits per second", text)
    match = None
    if isinstance(text, str) and len(text) <= _LONGEST_TEXT:
        match = _RATE.fullmatch(text.strip())
    bits = 0 if match is None else int(Fraction(match[1]) * _RATE_FACTORS[match[2]])
    if not bits:
        raise InvalidInput(
            f"{text!r} is not the rate of a link: write 400Gb, 25Gb/s or 1.6Tb; b is a bit, and "
            f"50GB/s are 400Gb"
        )
    return bits


def parse_byte_rate(text: str | int) -> int:
    """Reads "55GB/s", "50 GiB/s" or a plain integer as bytes per second. Raises InvalidInput for
    anything else, "400Gb" included, whose b is a bit."""
    if isinstance(text, str) and len(text) <= _LONGEST_TEXT:
        amount = text.strip().removesuffix("/s")
        if not amount.endswith("b"):
            return require_count("bytes per second", parse_bytes(amount))
    elif is_whole(text):
        return require_count("bytes per second", text)
    raise InvalidInput(f"{text!r} is not a rate in bytes: write 55GB/s; 400Gb/s are 50GB/s")


def format_bytes(count_bytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more: "3.43 GiB"."""
    require_count("count_bytes", count_bytes, at_least=0)
    value, unit = float(count_bytes), 0
    # 1023.995 would be shown as 1024.00, which is 1 of the next unit
    while value >= 1023.995 and unit < len(_BINARY_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = f"{value:,.2f}".rstrip("0").rstrip(".")
    return f"{digits} {_BINARY_UNITS[unit]}"


def format_like(count_bytes: int, written: str | int | None) -> str:
    """Bytes in the family of units of a size that someone wrote: "80 GB" where that was "4x80GB",
    "80 GiB" where it had a binary unit or none."""
    unit = "" if not isinstance(written, str) else written.strip().lower()
    if not unit.endswith(tuple("kmgtp")) and (unit.endswith("ib") or not unit.endswith("b")):
        return format_bytes(count_bytes)
    require_count("count_bytes", count_bytes, at_least=0)
    value, nth = float(count_bytes), 0
    while value >= 999.995 and nth < len(_DECIMAL_UNITS) - 1:
        value, nth = value / 1000, nth + 1
    return f"{value:,.2f}".rstrip("0").rstrip(".") + f" {_DECIMAL_UNITS[nth]}"


def format_tokens(tokens: int) -> str:
    """Whole multiples with their unit ("128k", "1M"), everything else in full ("1,000,000"), round
    decimal numbers too ("128,000", though it is 125k)."""
    require_count("tokens", tokens, at_least=0)
    for suffix, factor in (("M", 1024**2), ("k", 1024)):
        if tokens % 1000 and tokens % factor == 0:
            return f"{tokens // factor:,}{suffix}"
    return f"{tokens:,}"


def _parse(text: str | int, factors: dict[str, int], *, what: str, example: str) -> int:
    if is_whole(text):
        return require_count(what, text, at_least=0)
    match = None
    if isinstance(text, str) and len(text) <= _LONGEST_TEXT:
        match = _QUANTITY.fullmatch(text.strip())
    factor = factors.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidInput(f"{text!r} is not a number of {what}: write {example}")
    count = Fraction(match[1]) * factor
    if factor == 1 and count.denominator != 1:
        raise InvalidInput(f"{text!r} is not a whole number of {what}: write {example}")
    return int(count)

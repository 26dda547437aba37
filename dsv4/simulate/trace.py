"""Recorded loads: which requests came when, and which of them begin alike. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4.errors import InvalidInput, is_number, is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A request that came `at_s` seconds after the first one. `names` are those of its prompt's
    blocks: equal names mean equal prefixes up to there."""

    at_s: float
    input_tokens: int
    output_tokens: int
    names: Sequence[int]


def read_trace(path: Path | str) -> Iterator[TraceRequest]:
    """The requests of a trace in Mooncake's format: an object a line with `timestamp` (ms),
    `input_length`, `output_length` and `hash_ids`. Raises InvalidInput, with the line."""
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _request(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the trace {path} cannot be read: {error}") from error


def _request(line: str, where: str) -> TraceRequest:
    try:
        found = json.loads(line)
        at_ms, names = found["timestamp"], found["hash_ids"]
        tokens = found["input_length"], found["output_length"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{where}: {error!r}: each line must be an object with timestamp, input_length, "
            f"output_length and hash_ids"
        ) from error
    is_sound = is_number(at_ms) and all(is_whole(count) and count >= 0 for count in tokens)
    if not is_sound or not isinstance(names, list) or not all(map(is_whole, names)):
        raise InvalidInput(f"{where}: times and lengths must be numbers, hash_ids a list of them")
    return TraceRequest(
        at_s=at_ms / 1000, input_tokens=tokens[0], output_tokens=tokens[1], names=names
    )

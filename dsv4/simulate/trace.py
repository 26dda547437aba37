"""Recorded loads: which requests came when, and which of them begin alike. Torch-free.

A trace has an object a line. Three formats are read:

    Mooncake's       timestamp (ms), input_length, output_length, hash_ids: a name for each 512
                     tokens of the prompt, the last one for the rest
    lengths only     the same without hash_ids: no two prompts begin alike
    `dsv4 serve`     a line of --json-logs of a request that ended: time, input_length,
                     output_length, hash_ids, block_tokens, session. Other lines of the log are
                     passed over. hash_ids name whole blocks, of the prompt and then of the answer

Equal names must mean equal prefixes: a name that comes after two different ones is refused, and
so are more names than a request has tokens for. Both are signs of blocks of another size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dsv4.errors import InvalidInput, is_number, is_whole

NAME_TOKENS = 512  # of a name in Mooncake's format
MOST_TOKENS = 1 << 31  # of a prompt or an answer; none has ever been near
MOST_MS = 1e14  # three thousand years: nanoseconds are more


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A request that came `at_s` seconds after the first one. `names` are those of its blocks of
    `name_tokens` tokens: equal names mean equal prefixes up to there. The last one may name fewer,
    the rest of the prompt; with `has_answer` all name whole blocks, those of the answer too.
    `session` is the conversation that it belongs to, where that is known."""

    at_s: float
    input_tokens: int
    output_tokens: int
    names: Sequence[int]
    name_tokens: int = NAME_TOKENS
    has_answer: bool = False
    session: str | None = None


def read_trace(path: Path | str) -> Iterator[TraceRequest]:
    """The requests of a trace, in the order of the file, in Mooncake's format, with lengths only,
    or of the server's log. Names are numbered as they come first. Raises InvalidInput, with the
    line."""
    names = _Names()
    try:
        with Path(path).open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found = _request(line, f"{path}, line {number}", names)
                    if found is not None:
                        yield found
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the trace {path} cannot be read: {error}") from error


def load_trace(path: Path | str) -> list[TraceRequest]:
    """All requests of a trace by the time they came, the first at 0 s. A request without a session
    gets the one whose prompt it continues. Raises InvalidInput, also for a trace without
    requests."""
    found = sorted(read_trace(path), key=lambda request: request.at_s)
    if not found:
        raise InvalidInput(f"the trace {path} has no request: give a line for each")
    begin_s = found[0].at_s
    return [*with_sessions(replace(each, at_s=each.at_s - begin_s) for each in found)]


def with_sessions(trace: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """A request whose names continue the newest prompt of a session belongs to it; any other one
    begins a session. Sessions that the trace names stay."""
    ends: dict[int, str] = {}  # the last whole name of the newest prompt of each session
    newest: dict[str, int] = {}
    for number, request in enumerate(trace):
        whole = request.names[: request.input_tokens // request.name_tokens]
        session = request.session
        if session is None:
            known = (ends[name] for name in reversed(whole) if name in ends)
            session = next(known, f"#{number}")
        if whole:
            if session in newest and ends.get(newest[session]) == session:
                del ends[newest[session]]
            ends[whole[-1]], newest[session] = session, whole[-1]
        yield request if request.session else replace(request, session=session)


def repeated(
    trace: Sequence[TraceRequest], times: int, *, period_s: float | None = None
) -> Iterator[TraceRequest]:
    """The same load again and again, each time with other names, so that no repetition finds what
    an earlier one has cached. `period_s` is the time between two beginnings (default: the whole
    trace, to its last request)."""
    names = 1 + max((name for each in trace for name in each.names), default=0)
    if period_s is None:
        period_s = trace[-1].at_s if trace else 0.0
    for turn in range(times):
        for each in trace:
            session = each.session and f"{turn}:{each.session}"
            moved = [name + turn * names for name in each.names]
            yield replace(each, at_s=each.at_s + turn * period_s, names=moved, session=session)


class _Names:
    """Names as small numbers, and which one each comes after."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._before: list[int] = []
        self._name_tokens: int | None = None

    def read(self, given: Sequence[int], name_tokens: int, where: str) -> list[int]:
        """Raises InvalidInput for names that cannot be those of prefixes."""
        if given and name_tokens != (self._name_tokens or name_tokens):
            raise InvalidInput(
                f"{where}: names of {name_tokens} tokens, after others of {self._name_tokens}: "
                f"give a trace for each"
            )
        before, numbers = -1, []
        for name in given:
            number = self._numbers.setdefault(name, len(self._numbers))
            if number == len(self._before):
                self._before.append(before)
            elif self._before[number] != before:
                raise InvalidInput(
                    f"{where}: hash_ids has {name} after another name than before: equal names "
                    f"must mean equal prompts up to there"
                )
            numbers.append(number)
            before = number
        if given:
            self._name_tokens = name_tokens
        return numbers


def _request(line: str, where: str, known: _Names) -> TraceRequest | None:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise TypeError(f"found {type(found).__name__}")
        if "message" in found and "input_length" not in found:
            return None  # another line of a server's log
        tokens = found["input_length"], found["output_length"]
        at_s = _seconds(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(
            f"{where}: {error!r:.200}: each line must be an object with timestamp (ms), "
            f"input_length, output_length and, where prompts begin alike, hash_ids"
        ) from error
    names, session = found.get("hash_ids", []), found.get("session")
    name_tokens, has_answer = found.get("block_tokens", NAME_TOKENS), "block_tokens" in found
    if not all(is_whole(count) and 0 <= count <= MOST_TOKENS for count in tokens):
        raise InvalidInput(f"{where}: lengths must be whole numbers from 0 to {MOST_TOKENS:,}")
    if not isinstance(names, list) or not all(map(is_whole, names)):
        raise InvalidInput(f"{where}: hash_ids must be a list of whole numbers")
    if not is_whole(name_tokens) or name_tokens < 1:
        raise InvalidInput(f"{where}: block_tokens={name_tokens!r}: must be a whole number above 0")
    if session is not None and not isinstance(session, str | int):
        raise InvalidInput(f"{where}: session must be a text or a number")
    most = sum(tokens) // name_tokens if has_answer else -(-tokens[0] // name_tokens)
    if len(names) > most:
        raise InvalidInput(
            f"{where}: hash_ids has {len(names):,} names, but its tokens make {most:,} blocks of "
            f"{name_tokens:,}: Mooncake's names are of {NAME_TOKENS} tokens, others say their "
            f"block_tokens and name whole blocks"
        )
    return TraceRequest(
        at_s=at_s,
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        names=known.read(names, name_tokens, where),
        name_tokens=name_tokens,
        has_answer=has_answer,
        session=None if session is None else str(session) or None,
    )


def _seconds(found: dict[str, Any]) -> float:
    """Raises ValueError, KeyError."""
    if "timestamp" in found:
        at_ms = found["timestamp"]
        if not is_number(at_ms) or not abs(at_ms) <= MOST_MS:
            raise ValueError(f"timestamp={at_ms!r:.40}, in milliseconds")
        return float(at_ms) / 1000
    return datetime.fromisoformat(found["time"]).timestamp()

"""Calls of tools in an answer, as DeepSeek-V4 writes them:

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

after an empty line, as encoding_dsv4.py of its checkpoints renders and reads them. A parameter is a
text as it stands, or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dsv4.serve.generation import overlap

MARK = "\uff5cDSML\uff5c"  # a token of its own in DeepSeek's vocabulary
OPEN, CLOSE = f"<{MARK}tool_calls>", f"</{MARK}tool_calls>"
BREAK = "\n\n"  # before a block: the template writes it again, so the text goes without it
_INVOKE = re.compile(rf'\s*<{MARK}invoke name="([^"]+)">(.*?)</{MARK}invoke>', re.DOTALL)
_PARAMETER = re.compile(
    rf'\s*<{MARK}parameter name="([^"]+)" string="(true|false)">(.*?)</{MARK}parameter>',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`arguments` are by name, as JSON has them."""

    name: str
    arguments: dict[str, Any]

    @property
    def json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(slots=True)
class CallReader:
    """Takes an answer's text apart as it comes. A block is read when it is whole; one that is
    malformed or never ends is text like any other."""

    held: str = field(default="", init=False)  # text that may belong to a block
    calls: int = field(default=0, init=False)

    def push(self, text: str) -> list[str | Call]:
        """What this text completes: text, and calls, in their order."""
        found = list[str | Call]()
        self.held += text
        while (first := self.held.find(OPEN)) >= 0:
            last = self.held.find(CLOSE, first)
            before = self.held[:first]
            if last < 0:
                found.append(before.removesuffix(BREAK))
                self.held = self.held[first - len(BREAK) * before.endswith(BREAK) :]
                return _joined(found)
            block, self.held = self.held[first : last + len(CLOSE)], self.held[last + len(CLOSE) :]
            calls = read_block(block)
            self.calls += len(calls)
            found += [before.removesuffix(BREAK), *calls] if calls else [before + block]
        certain = len(self.held) - max(overlap(self.held, BREAK + OPEN), overlap(self.held, OPEN))
        found.append(self.held[:certain])
        self.held = self.held[certain:]
        return _joined(found)

    def read(self, text: str, *, is_last: bool) -> list[str | Call]:
        """What this text completes, and with the last one what was held back."""
        return self.push(text) + (self.end() if is_last else [])

    def end(self) -> list[str | Call]:
        """What is left when nothing more comes."""
        left, self.held = self.held, ""
        return [left] if left else []


def _joined(parts: Sequence[str | Call]) -> list[str | Call]:
    """Texts that follow each other as one."""
    found = list[str | Call]()
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part:
            found.append(part)
    return found


def read_block(block: str) -> Sequence[Call]:
    """The calls of a block, from its opening mark to its closing one; none if anything in it is not
    as it should be."""
    calls, rest = list[Call](), block[len(OPEN) : -len(CLOSE)]
    at = 0
    while (found := _INVOKE.match(rest, at)) is not None:
        arguments = _arguments(found[2])
        if arguments is None:
            return ()
        calls.append(Call(name=found[1], arguments=arguments))
        at = found.end()
    return () if rest[at:].strip() else calls


def _arguments(text: str) -> dict[str, Any] | None:
    given, at = dict[str, Any](), 0
    while (found := _PARAMETER.match(text, at)) is not None:
        name, is_text, value = found.groups()
        if name in given:
            return None
        try:
            given[name] = value if is_text == "true" else _value(value)
        except (ValueError, RecursionError):
            return None
        at = found.end()
    return None if text[at:].strip() else given


def _value(text: str) -> Any:
    """Raises ValueError for what a client's JSON could not say, RecursionError."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(word)

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # 1e999, half a surrogate
    return value

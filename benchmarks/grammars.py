"""Which grammar library keeps an answer to a JSON schema: what each follows, and what it costs.

    uv venv /tmp/grammars && uv pip install --python /tmp/grammars --no-deps \\
        llguidance xgrammar apache-tvm-ffi outlines-core
    PYTHONPATH=.:$SITE_PACKAGES /tmp/grammars/bin/python -m benchmarks.grammars
    python -m benchmarks.grammars --table                      # what docs/serve.md has

Each library gets the same vocabulary of bytes and words, the same schemas, and documents in tokens.
A schema is followed if every document that it allows can be written to its end, with spaces after
commas and colons or without, and no other one.
Appends to benchmarks/results/grammars.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "grammars.jsonl"
WORDS = 129_280  # as many as DeepSeek-V4's tokenizer has
END = 0  # the token that ends an answer
LIBRARIES = {"llguidance": "llguidance", "xgrammar": "xgrammar", "outlines-core": "outlines_core"}


# ---- what is asked -------------------------------------------------------------------------------

_NAMED = {"type": "object", "additionalProperties": False}
_TREE = {
    "$defs": {
        "node": {
            **_NAMED,
            "properties": {
                "name": {"type": "string"},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "below"],
        }
    },
    "$ref": "#/$defs/node",
}
_BIG = {
    **_NAMED,
    "properties": {f"field_{nth}": {"type": "integer"} for nth in range(60)},
    "required": [f"field_{nth}" for nth in range(60)],
}
# a schema by name; documents that it allows, and documents that it does not
SCHEMAS: dict[str, tuple[Any, Sequence[Any], Sequence[Any]]] = {
    "required": (
        {**_NAMED, "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
         "required": ["a", "b"]},
        [{"a": 1, "b": True}],
        [{"a": 1}, {"a": "1", "b": True}, {"a": 1, "b": True, "c": 1}],
    ),
    "optional": (
        {**_NAMED, "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}},
        [{}, {"a": 1}, {"b": None}, {"a": 1, "b": None}],
        [{"b": 1}],
    ),
    "enum": ({"enum": ["device", "host", 3, None]}, ["device", 3, None], ["disk", 4]),
    "const": ({"const": {"a": [1, 2]}}, [{"a": [1, 2]}], [{"a": [1, 3]}]),
    "items": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        [[1, 2], [1, 2, 3]],
        [[1], [1, 2, 3, 4], ["1", "2"]],
    ),
    "range": ({"type": "integer", "minimum": 7, "maximum": 120}, [7, 99, 120], [6, 121, -7]),
    "length": (
        {"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "abcd", "äöü"], ["a", "abcde"],
    ),
    "pattern": ({"type": "string", "pattern": "^[a-f0-9]{4}$"}, ["09af"], ["09ag", "09a"]),
    "format": ({"type": "string", "format": "date"}, ["2026-11-19"], ["2026-13-19", "today"]),
    "any of": (
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]},
        [1, [], ["a"]],
        ["a", [1]],
    ),
    "recursion": (
        _TREE,
        [{"name": "a", "below": [{"name": "b", "below": []}, {"name": "c", "below": []}]}],
        [{"name": "a", "below": [{"name": "b"}]}, {"name": 1, "below": []}],
    ),
    "any object": ({"type": "object"}, [{}, {"a": {"b": [1, "x", None]}}], [[], "x", 1]),
    "all of": (
        {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
        [3, 5],
        [2, 6],
    ),
    "60 fields": (_BIG, [{f"field_{nth}": nth for nth in range(60)}], [{"field_0": 0}]),
    "1,000 values": (
        {"enum": [f"value {nth}" for nth in range(1000)]}, ["value 0", "value 999"], ["value 1000"],
    ),
}  # fmt: skip


def vocabulary() -> list[bytes]:
    """The end, all bytes, and pieces of words of this repository, the most frequent first."""
    counts: dict[bytes, int] = {}
    for path in sorted([*ROOT.glob("dsv4/**/*.py"), *ROOT.glob("docs/**/*.md")]):
        for word in re.findall(rb" ?\w+|[^\w\s]+|\s+", path.read_bytes()):
            for end in range(2, min(len(word), 16) + 1):
                for first in range(len(word) - end + 1):
                    piece = word[first : first + end]
                    counts[piece] = counts.get(piece, 0) + 1
    frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))
    return [b"", *(bytes([byte]) for byte in range(256)), *frequent][:WORDS]


def in_tokens(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """The longest pieces from left to right."""
    found, first = list[int](), 0
    while first < len(text):
        end = next(e for e in range(min(len(text), first + 16), first, -1) if text[first:e] in ids)
        found.append(ids[text[first:end]])
        first = end
    return found


# ---- the libraries -------------------------------------------------------------------------------


class Follower(Protocol):
    """One answer."""

    def mask(self) -> np.ndarray[Any, Any]:
        """Which tokens may come, bits in words of 32."""

    def take(self, token: int) -> None: ...


Library = Callable[[Sequence[bytes]], Callable[[str], Callable[[], Follower]]]


def llguidance(words: Sequence[bytes]) -> Callable[[str], Callable[[], Follower]]:
    import llguidance as lib

    ids = {word: token for token, word in enumerate(words) if word}

    class Words:
        bos_token_id, eos_token_id = None, END

        def __init__(self) -> None:
            self.special_token_ids, self.tokens = [END], [b"<|end|>", *words[1:]]

        def __call__(self, text: Any) -> list[int]:
            return in_tokens(text.encode() if isinstance(text, str) else text, ids)

    wrapped: Any = lib.TokenizerWrapper(Words())  # type: ignore[no-untyped-call]
    tokenizer = lib.LLTokenizer(wrapped, n_vocab=len(words))

    def compiled(schema: str) -> Callable[[], Follower]:
        text = lib.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
        whole = lib.LLMatcher(tokenizer, text, log_level=0)
        if whole.is_error():
            raise ValueError(whole.get_error())

        class One:
            def __init__(self) -> None:
                self._matcher = whole.deep_copy()

            def mask(self) -> np.ndarray[Any, Any]:
                return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)

            def take(self, token: int) -> None:
                if token != END:
                    self._matcher.consume_token(token)

        return One

    return compiled


def xgrammar(words: Sequence[bytes]) -> Callable[[str], Callable[[], Follower]]:
    import xgrammar as lib

    info = lib.TokenizerInfo([*words], vocab_type=lib.VocabType.RAW, stop_token_ids=[END])
    compiler = lib.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compiled(schema: str) -> Callable[[], Follower]:
        whole = compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False)

        class One:
            def __init__(self) -> None:
                self._matcher = lib.GrammarMatcher(whole)
                self._mask = lib.allocate_token_bitmask(1, len(words))

            def mask(self) -> np.ndarray[Any, Any]:
                self._matcher.fill_next_token_bitmask(self._mask)
                found: np.ndarray[Any, Any] = self._mask.numpy()[0].view(np.uint32)
                return found

            def take(self, token: int) -> None:
                if not self._matcher.accept_token(token):
                    raise ValueError("refused")

        return One

    return compiled


def outlines_core(words: Sequence[bytes]) -> Callable[[str], Callable[[], Follower]]:
    from outlines_core import Guide, Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    known = Vocabulary(END, {word: [token] for token, word in enumerate(words) if word})

    def compiled(schema: str) -> Callable[[], Follower]:
        index = Index(build_regex_from_schema(schema, whitespace_pattern=""), known)

        class One:
            def __init__(self) -> None:
                self._guide = Guide(index)
                self._mask = np.zeros((len(words) + 31) // 32, dtype=np.uint32)

            def mask(self) -> np.ndarray[Any, Any]:
                mask = self._mask
                self._guide.write_mask_into(mask.ctypes.data, mask.size, mask.itemsize)
                return mask

            def take(self, token: int) -> None:
                self._guide.advance(token, return_tokens=False)

        return One

    return compiled


MAKERS: dict[str, Library] = {
    "llguidance": llguidance,
    "xgrammar": xgrammar,
    "outlines-core": outlines_core,
}


# ---- what is measured ----------------------------------------------------------------------------


def writes(one: Follower, tokens: Sequence[int], times: list[float]) -> bool:
    """Whether a document can be written, and the answer may end after it."""
    for token in [*tokens, END]:
        begun = time.perf_counter()
        mask = one.mask()
        times.append(time.perf_counter() - begun)
        if not mask[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return False
        if token != END:
            one.take(token)
    return True


def measured(name: str, words: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """A row for each schema, and one for the vocabulary."""
    ids = {word: token for token, word in enumerate(words) if word}
    begun = time.perf_counter()
    library = MAKERS[name](words)
    yield {"library": name, "setup_s": round(time.perf_counter() - begun, 3)}
    for schema, (asked, allowed, refused) in SCHEMAS.items():
        row: dict[str, Any] = {"library": name, "schema": schema, "right": False}
        times, begun = list[float](), time.perf_counter()
        try:
            make = library(json.dumps(asked))
            row["compile_ms"] = round(1e3 * (time.perf_counter() - begun), 3)

            def answer(document: Any, make: Any = make, times: Any = times) -> bool:
                texts = [
                    json.dumps(document, separators=given, ensure_ascii=False)
                    for given in ((",", ":"), (", ", ": "))
                ]
                return any(writes(make(), in_tokens(text.encode(), ids), times) for text in texts)

            row["misses"] = [each for each in allowed if not answer(each)]
            row["lets_by"] = [each for each in refused if answer(each)]
            row["right"] = not row["misses"] and not row["lets_by"]
            row["mask_us"] = [round(1e6 * each, 1) for each in times]
        except Exception as error:  # whatever a library raises for what it cannot do
            row["refuses"] = str(error).partition("\n")[0][:120]
        yield row
    yield {
        "library": name,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Of the newest run."""
    run = rows[-1]["run"]
    newest = [row for row in rows if row["run"] == run]
    lines = [
        "| | schemas followed | refused | followed wrongly | set-up, s | compiling, ms: median, "
        "most | a mask, µs: median, p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in LIBRARIES:
        own = [row for row in newest if row["library"] == name]
        tried = [row for row in own if "schema" in row]
        right = [row for row in tried if row["right"]]
        refused = [row["schema"] for row in tried if "refuses" in row]
        wrong = [row["schema"] for row in tried if not row["right"] and "refuses" not in row]
        compiling = [row["compile_ms"] for row in right]
        masks = [us for row in right for us in row["mask_us"]]
        cells = (
            f"{name} {run['versions'][name]}",
            f"{len(right)} of {len(tried)}",
            ", ".join(refused) or "none",
            ", ".join(wrong) or "none",
            f"{next(row['setup_s'] for row in own if 'setup_s' in row):.2f}",
            f"{np.median(compiling):.1f}, {max(compiling):.0f}",
            f"{np.median(masks):.0f}, {np.percentile(masks, 99):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.grammars")
    parser.add_argument("--table", action="store_true", help="print the table of the newest run")
    parser.add_argument("--library", choices=LIBRARIES, help="only this one, and record nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.table:
        lines = options.results.read_text(encoding="utf-8").splitlines()
        print(table([json.loads(line) for line in lines]))
        return
    words = vocabulary()
    if options.library is not None:
        for row in measured(options.library, words):
            print(json.dumps(row), flush=True)
        return
    run = {**machine(LIBRARIES), "vocabulary": WORDS}
    with options.results.open("a", encoding="utf-8") as file:
        for name in LIBRARIES:
            for row in measured(name, words):
                file.write(json.dumps({**row, "run": run}) + "\n")


if __name__ == "__main__":
    main()

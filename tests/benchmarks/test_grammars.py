"""The comparison of grammar libraries, with the one that the server uses."""

from __future__ import annotations

import json

import pytest

from benchmarks import grammars


@pytest.fixture(scope="module")
def words() -> list[bytes]:
    return grammars.vocabulary()[:4000]


def test_tokens_are_the_text(words: list[bytes]) -> None:
    ids = {word: token for token, word in enumerate(words) if word}
    assert len(ids) == len(words) - 1
    text = json.dumps(grammars.SCHEMAS["recursion"][1], ensure_ascii=False).encode()
    assert b"".join(words[token] for token in grammars.in_tokens(text, ids)) == text


def test_every_schema_is_followed(words: list[bytes]) -> None:
    """And a document that ends too early, or is of another schema, is seen."""
    rows = [*grammars.measured("llguidance", words)]
    followed = {row["schema"]: row["right"] for row in rows if "schema" in row}
    assert followed == dict.fromkeys(grammars.SCHEMAS, True)
    assert all(row["mask_us"] for row in rows if "schema" in row)
    make = grammars.llguidance(words)(json.dumps(grammars.SCHEMAS["items"][0]))
    ids = {word: token for token, word in enumerate(words) if word}
    for text, is_right in ((b"[1,2]", True), (b"[1,2", False), (b"[1]", False), (b"{}", False)):
        assert grammars.writes(make(), grammars.in_tokens(text, ids), []) is is_right


def test_the_table_has_what_was_recorded() -> None:
    rows = [json.loads(line) for line in grammars.RESULTS.read_text(encoding="utf-8").splitlines()]
    shown = grammars.table(rows).splitlines()[2:]
    assert [line.split()[1] for line in shown] == [*grammars.LIBRARIES]
    docs = (grammars.ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    assert all(line in docs for line in shown)

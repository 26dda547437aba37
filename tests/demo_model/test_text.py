"""Text as tokens: against the tokenizers package and transformers, which read the same files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.demo_model.checkpoint import DEMO, Checkpoint
from dsv4.demo_model.text import SPECIAL, byte_names
from dsv4.errors import InvalidInput

TOKENIZER = Checkpoint.load().tokenizer
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a block?"},
    {"role": "assistant", "content": "A block is the unit."},
    {"role": "user", "content": "Ünd   what else? 你好\n"},
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@given(st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_all_text_comes_back(text: str):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text.encode("utf-8", "replace").decode()
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode("utf-8", "replace")


@pytest.mark.extra("transformers")
@pytest.mark.parametrize(
    "text",
    ["What is a block?", "", "  two  spaces\n", "naïve 你好 🙂", "x" * 300, "\u017f\x00\x7f"],
)
def test_the_tokenizers_package_cuts_the_same_pieces(theirs: Any, text: str):
    ids = TOKENIZER.encode(text)
    assert theirs.encode(text, add_special_tokens=False) == ids
    assert theirs.decode(ids) == text


@pytest.mark.extra("transformers")
def test_the_chat_template_makes_the_same_prompt(theirs: Any):
    found = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert found == TOKENIZER.chat(CHAT)


def test_text_gives_no_special_token():
    ids = TOKENIZER.encode("".join(SPECIAL))
    assert not set(ids) & set(TOKENIZER.special.values())
    assert TOKENIZER.decode(ids) == "".join(SPECIAL)
    assert TOKENIZER.decode(list(TOKENIZER.special.values())) == ""


def test_every_byte_has_a_name_and_a_token():
    assert len(set(byte_names())) == 256
    assert all(TOKENIZER.encode(text) for text in map(chr, range(256)))
    assert {bytes([byte]) for byte in range(256)} <= set(TOKENIZER.pieces)


def test_an_unknown_role_is_refused():
    with pytest.raises(InvalidInput, match="role 'tool': this model knows system, user, assistant"):
        TOKENIZER.chat([{"role": "tool", "content": "x"}])

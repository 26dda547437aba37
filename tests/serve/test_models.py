"""dsv4/serve/models.py: text as tokens and back, and a model on a cache."""

from __future__ import annotations

import pytest

from dsv4 import InvalidInput, PoolTooSmall, PrefixOptions
from dsv4.engine import Engine
from dsv4.serve.models import ByteTokenizer, Room, StandIn, TextStream, decode
from tests.support.numbers import Numbers

TEXT = "Zwölf κ 🙂 blocks"


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_gives_what_decoding_at_once_gives(seed: int) -> None:
    """Of any bytes: whole characters, cut ones, and what is no UTF-8, in random pieces."""
    draw, tokenizer = Numbers(seed), ByteTokenizer()
    tokens = draw.integers(0, tokenizer.vocabulary, 60).tolist()
    tokens[10:10] = tokenizer.encode(TEXT)
    stream, found, at = TextStream(tokenizer), [], 0
    while at < len(tokens):
        count = int(draw.integers(1, 5, 1))
        found.append(stream.push(tokens[at : at + count]))
        at += count
    raw = bytes(token for token in tokens if token < 256)
    assert "".join(found) + stream.end() == raw.decode(errors="replace")
    assert decode(tokenizer, tokens) == raw.decode(errors="replace")


def test_a_stream_holds_back_only_characters_that_are_not_whole() -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer)
    euro = tokenizer.encode("a€")
    assert [stream.push([token]) for token in euro] == ["a", "", "", "€"]
    assert stream.end() == ""


def test_text_gives_no_special_token() -> None:
    tokenizer = ByteTokenizer()
    assert max(tokenizer.encode(f"{TEXT}\u0100<|end|>")) < tokenizer.END
    assert decode(tokenizer, tokenizer.encode(TEXT)) == TEXT


def test_a_chat_is_roles_and_text() -> None:
    model = StandIn()
    say, role = model.tokenizer.encode, model.tokenizer.role_token
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": TEXT}]
    end = model.tokenizer.END
    assert model.chat_tokens(chat) == [
        *(role("system"), *say("be"), end),
        *(role("user"), *say(TEXT), end, role("assistant")),
    ]
    with pytest.raises(InvalidInput, match="role 'king'"):
        model.chat_tokens([{"role": "king", "content": ""}])
    with pytest.raises(InvalidInput, match="neither tools"):
        model.chat_tokens(chat, tools=[{"type": "function"}])


def test_a_model_opens_on_the_room_that_it_is_given() -> None:
    sizes = {"max_requests": 2, "max_context": 512, "max_step_tokens": 128}
    opened = StandIn().open(Room(**sizes, prefix=PrefixOptions()))
    assert opened.manager.stats().blocks_total == 2 * (512 // 128 + 1)
    engine = Engine(model=opened.model, manager=opened.manager)
    with opened.stepping():
        job = engine.submit(StandIn().chat_tokens([{"role": "user", "content": "hi"}]), 5)
        engine.run()
    assert len(job.generated) == 5
    with pytest.raises(PoolTooSmall):
        StandIn().open(Room(**sizes, memory_bytes=1 << 16, prefix=PrefixOptions()))
    memory = 32 << 20
    opened = StandIn().open(Room(**sizes, memory_bytes=memory, prefix=PrefixOptions()))
    assert opened.manager.memory.memory_bytes().total <= memory

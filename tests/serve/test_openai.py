"""OpenAI's own client against the server, compared with the model alone, token by token."""

from __future__ import annotations

import json

import openai
import pytest

from dsv4.serve.models import StandIn, decode
from tests.serve.serving import Running, chat_ids, greedy, greedy_text

TOKENIZER = StandIn().tokenizer
ASK = "What is an entry?"


def test_a_chat_says_what_the_model_says_alone(server: Running) -> None:
    client, messages = server.openai(), [{"role": "user", "content": ASK}]
    found = client.chat.completions.create(
        model="stand-in", messages=messages, temperature=0, max_tokens=20
    )
    expected = greedy_text(chat_ids(ASK), 20)
    assert found.choices[0].message.content == expected
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens == len(chat_ids(ASK))
    assert found.usage.completion_tokens == 20
    with client.chat.completions.create(
        model="stand-in",
        messages=messages,
        temperature=0,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = [*stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == found.usage.total_tokens
    assert len(chunks) > 10


@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_of_several_prompts(server: Running, as_ids: bool) -> None:
    prompts = ["blocks", "rings and tails"]
    given = [TOKENIZER.encode(each) for each in prompts] if as_ids else prompts
    found = server.openai().completions.create(
        model="stand-in", prompt=given, temperature=0, max_tokens=12, n=2
    )
    expected = [greedy_text(TOKENIZER.encode(each), 12) for each in prompts]
    assert [choice.text for choice in found.choices] == [each for each in expected for _ in "12"]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == sum(map(len, prompts))
    assert found.usage.completion_tokens == 48


def test_a_second_turn_reports_cached_tokens(server: Running) -> None:
    client, messages = server.openai(), [{"role": "user", "content": "p" * 300}]
    first = client.chat.completions.create(
        model="stand-in", messages=messages, temperature=0, max_tokens=8
    )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert first.usage.prompt_tokens_details.created_cache_tokens == 256
    said = first.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    second = client.chat.completions.create(
        model="stand-in", messages=messages, temperature=0, max_tokens=8
    )
    assert second.usage.prompt_tokens_details.cached_tokens == 256
    details = second.usage.prompt_tokens_details.cached_tokens_details
    assert details == {"device": 256, "host": 0, "storage": 0}
    assert second.usage.prompt_cache_hit_tokens == 256
    assert second.usage.prompt_cache_miss_tokens == second.usage.prompt_tokens - 256
    assert second.choices[0].message.content == greedy_text(chat_ids("p" * 300, said, "more"), 8)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(server: Running, stream: bool) -> None:
    """Also one that is cut by steps, and whose beginning appears before."""
    whole = greedy_text(TOKENIZER.encode("stop"), 40)
    stop = whole[9:12]
    found = server.openai().completions.create(
        model="stand-in",
        prompt="stop",
        temperature=0,
        max_tokens=40,
        stop=["never to be seen", stop],
        stream=stream,
    )
    pieces = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert pieces[-1].finish_reason == "stop"


def test_an_answer_ends_at_a_stop_token(server: Running) -> None:
    whole = greedy(TOKENIZER.encode("tokens"), 30)
    stop = whole[7]
    found = server.openai().completions.create(
        model="stand-in",
        prompt="tokens",
        temperature=0,
        max_tokens=30,
        extra_body={"stop_token_ids": [stop]},
    )
    assert found.choices[0].text == decode(TOKENIZER, whole[: whole.index(stop)])
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "gpt-9"}, 404, "'stand-in'"),
        ({"max_tokens": 5000}, 400, "at most max_context=2048"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": float("nan")}, 400, ""),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": [300]}, 400, "vocabulary"),
        ({"prompt": [[1], []]}, 400, ""),
        ({"prompt": "\ud800"}, 400, "UTF-8"),
        ({"best_of": 2}, 400, "best_of"),
        ({"unheard_of": 1}, 400, "unheard_of"),
        ({"n": 17}, 400, "n:"),
        ({"logit_bias": {"9999": 1}}, 400, "9999"),
        ({"logit_bias": {"7": 101}}, 400, "between -100 and 100"),
        ({"stop": [""]}, 400, "stop.0: String should have at least 1"),
        ({"stop": ["a"] * 17}, 400, "stop: List should have at most 16 items"),
        ({"prompt": [1, -1]}, 400, "prompt.1: Input should be greater"),
        ({"prompt": [True]}, 400, "prompt.0: Input should be a valid integer"),
        ({"logit_bias": {"07": 1}}, 400, "logit_bias"),
        ({"model": "x" * 9999}, 404, "x" * 64 + "…' is not here"),
        ({"response_format": {"type": "json_schema"}}, 400, "json_schema"),
        ({"cache_salt": "x" * 129}, 400, "cache_salt"),
    ],
)
def test_bad_requests_are_answered_with_what_is_wrong(
    server: Running, change: dict[str, object], status: int, says: str
) -> None:
    body = {"model": "stand-in", "prompt": "hello", "max_tokens": 4, **change}
    with server.http() as client:
        found = client.post(
            "/v1/completions",
            content=json.dumps(body),
            headers={"content-type": "application/json"},
        )
    assert found.status_code == status
    error = found.json()["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error" or status == 404
    assert "hello" not in found.text


def test_clients_raise_their_own_errors(server: Running) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_context=2048") as found:
        client.completions.create(model="stand-in", prompt="x", max_tokens=4000)
    assert found.value.code == "context_length_exceeded"
    assert client.models.list().data[0].id == "stand-in"
    assert client.models.retrieve("stand-in").max_model_len == 2048

"""Anthropic's own client against the server; and what both APIs have beside chats."""

from __future__ import annotations

import anthropic
import pytest

from dsv4.serve.models import StandIn
from tests.serve.serving import Running, chat_ids, greedy_text

ASK = "What is a ring?"
COLD = {"temperature": 0}  # the client has no name for it any more


def test_a_message_says_what_the_model_says_alone(server: Running) -> None:
    client, expected = server.anthropic(), greedy_text(chat_ids(ASK), 12)
    asked = {"model": "stand-in", "max_tokens": 12, "extra_body": COLD}
    messages = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]
    found = client.messages.create(messages=messages, **asked)
    assert found.content[0].text == expected
    assert found.stop_reason == "max_tokens"
    assert found.usage.output_tokens == 12
    assert found.usage.input_tokens == len(chat_ids(ASK))
    with client.messages.stream(messages=messages, **asked) as stream:
        assert "".join(stream.text_stream) == expected
        last = stream.get_final_message()
    assert last.stop_reason == "max_tokens"
    assert last.usage.output_tokens == 12


def test_a_second_turn_reads_what_the_first_created(server: Running) -> None:
    client, long = server.anthropic(), "r" * 300
    system = [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]
    asked = {"model": "stand-in", "max_tokens": 4, "extra_body": COLD, "system": system}
    first = client.messages.create(messages=[{"role": "user", "content": "a"}], **asked).usage
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens) == (0, 256)
    second = client.messages.create(messages=[{"role": "user", "content": "b"}], **asked).usage
    assert (second.cache_read_input_tokens, second.cache_creation_input_tokens) == (256, 0)
    prompt = StandIn().chat_tokens(
        [{"role": "system", "content": long}, {"role": "user", "content": "b"}]
    )
    assert second.input_tokens + 256 == len(prompt)


def test_a_stop_sequence_is_named(server: Running) -> None:
    whole = greedy_text(chat_ids("stop"), 24)
    stop = whole[8:10]
    found = server.anthropic().messages.create(
        model="stand-in",
        max_tokens=24,
        extra_body=COLD,
        stop_sequences=["unseen", stop],
        messages=[{"role": "user", "content": "stop"}],
    )
    assert found.content[0].text == whole[: whole.index(stop)]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not here"),
        ({"max_tokens": 9999}, anthropic.BadRequestError, "max_context=2048"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "'image'",
        ),
        ({"tools": [{"name": "f", "input_schema": {}}]}, anthropic.BadRequestError, "tools"),
    ],
)
def test_errors_are_anthropic_s(server: Running, change: dict, kind: type, says: str) -> None:
    asked = {"model": "stand-in", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(kind, match=says) as found:
        server.anthropic().messages.create(**{**asked, **change})
    assert found.value.body["type"] == "error"
    assert found.value.body["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_metrics_count_what_was_asked(server: Running) -> None:
    server.anthropic().messages.create(
        model="stand-in", max_tokens=3, messages=[{"role": "user", "content": "x"}]
    )
    with server.http() as client:
        found = client.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in found.text.splitlines()
        if not line.startswith("#")
    }
    counters = server.state.runner.counters
    assert values["dsv4_generation_tokens_total"] == counters.generated_tokens
    assert values["dsv4_prefix_cache_hits_total"] == counters.cached_tokens
    assert values["dsv4_num_requests_running"] == 0
    answers = values["dsv4_time_to_first_token_seconds_count"]
    assert answers == sum(counters.finished.values())
    assert values["dsv4_inter_token_latency_seconds_count"] == (counters.generated_tokens - answers)
    blocks = server.engine.manager.stats()
    assert values['dsv4_blocks{state="free"}'] == blocks.blocks_free

"""The trained demo model, as a server serves it."""

from __future__ import annotations

import time

import pytest

from dsv4 import PrefixOptions
from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.engine import Engine
from dsv4.errors import ContextOverflow, InvalidInput
from dsv4.serve.demo import ServedDemo
from dsv4.serve.models import Room, ServedModel, StandIn, decode
from tests.serve.serving import running

MODEL: ServedModel = ServedDemo()
ROOM = Room(max_requests=4, max_context=1024, max_step_tokens=512, prefix=PrefixOptions())


def test_it_answers_a_chat_and_reuses_it():
    opened, question = MODEL.open(ROOM), "What is a snapshot?"
    engine = Engine(model=opened.model, manager=opened.manager, drafts=0)
    messages = []
    answers = Checkpoint.load().answers
    asked = ("What is dsv4?", "What is a block?", "What is an entry?", question)
    for text in asked:
        messages.append({"role": "user", "content": text})
        ids = MODEL.chat_tokens(messages)
        job = engine.submit(ids, 80, stop_tokens=MODEL.tokenizer.end_tokens)
        with opened.stepping():
            engine.run()
        assert job.is_stopped
        said = decode(MODEL.tokenizer, job.generated)
        assert said == answers[text]
        messages.append({"role": "assistant", "content": said})
    again = engine.submit(ids, 80, stop_tokens=MODEL.tokenizer.end_tokens)
    engine.run()
    assert again.tokens_skipped >= opened.manager.schema.block_tokens
    assert again.generated == job.generated
    opened.manager.check_invariants()


def test_its_name_goes_with_its_weights():
    assert MODEL.name == "dsv4-demo"
    digest = Checkpoint.load().training["sha256"]["model.safetensors"]
    assert digest in MODEL.weights_id
    assert MODEL.max_context == 4096


def test_what_its_template_cannot_render_is_refused():
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidInput, match="neither tools nor options"):
        MODEL.chat_tokens(chat, tools=[{"type": "function"}])
    with pytest.raises(InvalidInput, match="role 'tool'"):
        MODEL.chat_tokens([{"role": "tool", "content": "x"}])


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized(monkeypatch):
    """Which would take a minute for a body of 8 MiB."""
    text = "a" * (MODEL.max_context * MODEL.tokenizer.longest_token + 1)
    monkeypatch.setattr(type(MODEL.tokenizer), "encode", None)
    least = MODEL.max_context + 1
    with pytest.raises(ContextOverflow, match=f"^{least} tokens asked, .* it may be even more"):
        MODEL.chat_tokens([{"role": "user", "content": text}])
    with running(ServedDemo()) as server, server.http() as client:
        body = {"model": MODEL.name, "prompt": text, "max_tokens": 1}
        found = client.post("/v1/completions", json=body)
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "context_length_exceeded"


def test_no_token_is_longer_than_it_says():
    for model in (MODEL, StandIn()):
        words = model.tokenizer
        found = max(len(words.token_bytes(token)) for token in range(words.vocabulary))
        assert found == words.longest_token


def test_it_loads_at_once():
    """In processor time, of which a busy machine takes none away."""
    begin = time.process_time()
    ServedDemo().open(ROOM)
    assert time.process_time() - begin < 2

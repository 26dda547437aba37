"""Clients that misbehave, and what nobody may see. 4xx with a typed body, and the server lives."""

from __future__ import annotations

import json
import logging
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from pydantic import ValidationError

from dsv4.cache.prefix.prefixes import Prefixes
from dsv4.errors import RecoveryNeeded
from dsv4.serve import process
from dsv4.serve.bodies import MOST_PARTS, STRING, brackets, count_parts
from dsv4.serve.models import StandIn
from dsv4.serve.runner import ShuttingDown, Timing
from dsv4.serve.schemas import ChatRequest, CompletionRequest, MessagesRequest
from tests.serve.serving import WAIT_S, Running, greedy_text, running

ASK = {"model": "stand-in", "prompt": "robust", "max_tokens": 3, "temperature": 0}
JSON = {"content-type": "application/json"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")


def lives(server: Running) -> None:
    expected = greedy_text(StandIn().tokenizer.encode("robust"), 3)
    with server.http() as client:
        found = client.post("/v1/completions", json=ASK)
    assert found.json()["choices"][0]["text"] == expected
    server.wait_until(server.is_idle)
    server.engine.manager.check_invariants()


def raw(server: Running, data: bytes, *, ends: bool = True) -> bytes:
    """Sends bytes and their end, and reads what comes until the server closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(data)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "\xc3\x28"}',
        b"[" * 100_000,
        b'{"model": "stand-in", "prompt": ' + b'{"a":' * 5_000,
        b'{"model": "stand-in", "max_tokens": 1' + b"0" * 5_000 + b"}",
        b'{"model": "stand-in", "max_tokens": 1, "messages": [{"role": "\\ud800"}]}',
    ],
)
def test_bad_bodies(server: Running, path: str, body: bytes) -> None:
    with server.http() as client:
        found = client.post(path, content=body, headers=JSON)
    assert 400 <= found.status_code < 500
    assert found.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (CompletionRequest, {"prompt": [-1]}),
        (CompletionRequest, {"prompt": [[]]}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [-1]}),
        (ChatRequest, {"messages": [{}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": [1]}),
        (MessagesRequest, {"messages": [{}]}),
        (MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "system": [{}]}),
    ],
)
def test_a_body_of_many_mistakes_is_refused_at_the_first(model: Any, change: Any) -> None:
    """8 MiB have room for millions, and each would take a kilobyte to report."""
    many = {k: v * 5_000 if isinstance(v, list) and len(v) == 1 else v for k, v in change.items()}
    if change.get("tools") or change.get("system"):
        many["messages"] = change["messages"]
    for more in ({}, {f"x{n}": 1 for n in range(5_000)}):
        with pytest.raises(ValidationError) as found:
            model.model_validate({"model": "m", "max_tokens": 1, **many, **more})
        assert found.value.error_count() <= 8
    bias = {"logit_bias": {f"x{n}": "y" for n in range(5_000)}}
    with pytest.raises(ValidationError) as found:
        CompletionRequest.model_validate({"model": "m", "prompt": "x", **bias})
    assert found.value.error_count() == 1


def test_a_client_that_sends_no_request_is_cut_off(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says nothing, one that never ends its head, one that does so the second time; and
    one that reads nothing of a response that is over. A request that runs may take longer."""
    monkeypatch.setattr(process, "PATIENCE_S", 0.4)
    host, port = server.url.removeprefix("http://").split(":")
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for sent in (b"", b"GET /he", head + b"\r\n" + head):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(sent)
            with suppress(ConnectionResetError):
                while connection.recv(65536):
                    pass
    with server.http() as client:
        body = {**ASK, "prompt": "x" * 200, "max_tokens": 200, "ignore_eos": True}
        found = client.post("/v1/completions", json=body)
        assert found.json()["usage"]["completion_tokens"] == 200
    lives(server)


def test_a_body_of_very_many_parts_is_refused_before_it_is_parsed(server: Running) -> None:
    """Parsing 8 MiB of them would keep all streams waiting for seconds. Brackets of a text are no
    parts, and a text cannot hide any."""
    chat = {"model": "stand-in", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with server.http() as client:
        for part in ("[]", "{}", '{"a":[]}'):
            parts = ",".join([part] * MOST_PARTS)
            body = f'{{"metadata": {{"\\"": "\\\\", "a": [{parts}]}}, {json.dumps(chat)[1:]}'
            assert json.loads(body)["metadata"]
            found = client.post(PATHS[1], content=body, headers=JSON)
            assert found.status_code == 400
            assert f"at most {MOST_PARTS} may be asked" in found.json()["error"]["message"]
            hidden = client.post(PATHS[1], content=body.encode("utf-16"), headers=JSON)
            assert hidden.status_code == 400
            assert "not UTF-8" in hidden.json()["error"]["message"]
        text = '[{"' * 2 * MOST_PARTS
        found = client.post(PATHS[1], json={**chat, "metadata": {"a": text}})
        assert found.status_code == 200, found.text


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_body_are_counted_as_json_has_them(seed: int) -> None:
    draw = random.Random(seed)

    def value(depth: int) -> Any:
        if depth == 0 or draw.random() < 0.2:
            return draw.choice([1, None, '"', "\\", "[{", '\\"[', "é", "\ud83d", ""])
        inner = [value(depth - 1) for _ in range(draw.randrange(4))]
        return inner if draw.random() < 0.5 else {f'"{n}[': each for n, each in enumerate(inner)}

    def parts(found: Any) -> int:
        if isinstance(found, dict):
            return 1 + sum(map(parts, found.values()))
        return 1 + sum(map(parts, found)) if isinstance(found, list) else 0

    whole = [value(6) for _ in range(9)]
    body = json.dumps(whole).encode()
    assert brackets(STRING.sub(b"", body)) == parts(whole) <= count_parts(body)
    cut = body[: draw.randrange(len(body))]  # one that ends in a string: no part is counted twice
    assert brackets(STRING.sub(b"", cut)) <= parts(whole)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (b'"metadata": {"a": [NaN]}', "NaN, which is not a number"),
        (b'"metadata": {"a": -Infinity}', "-Infinity, which"),
        (b'"cache_salt": "a", "cache_salt": "b"', "'cache_salt' comes twice"),
        (b'"metadata": {"b": {"a": 1, "b": 2, "a": 1}}', "'a' comes twice"),
        (b'"user": "\\uD83d"', "a text is not UTF-8"),
        (b'"metadata": {"\\udc00": 1}', "a text is not UTF-8"),
        (b'"user": "\xff"', "the byte at 10 is not UTF-8"),
        (b'"metadata": {"a": ' + b"[" * 2000 + b"]" * 2000 + b"}", "nested too deeply"),
        (b'"seed": ' + b"1" * 5000, "too many digits"),
        (b'"seed": 1,', "not JSON: Expecting property name enclosed in double quotes at character"),
    ],
)
def test_what_parsers_read_differently_is_refused(server: Running, more: bytes, says: str) -> None:
    """Else a proxy that checks a request might have checked another one."""
    chat = {"model": "stand-in", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    body = b"{" + more + b", " + json.dumps(chat)[1:].encode()
    if says.startswith("not JSON"):
        body = b"{" + more + b"}"
    with server.http() as client:
        found = client.post(PATHS[1], content=body, headers=JSON)
        assert found.status_code == 400
        assert says in found.json()["error"]["message"]
        emoji = {**chat, "user": "\U0001f642"}  # which JSON may write as two surrogates
        assert client.post(PATHS[1], json=emoji).status_code == 200
        marked = b"\xef\xbb\xbf" + json.dumps(emoji).encode()
        assert client.post(PATHS[1], content=marked, headers=JSON).status_code == 200


def test_connections_above_the_limit_get_a_typed_answer() -> None:
    with running(max_connections=2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
            for path, kind in (("/v1/messages", "overloaded_error"), ("/health", "server_error")):
                with server.http() as client:
                    found = client.post(path, json={})
                assert found.status_code == 503
                assert found.headers["retry-after"] == "1"
                assert found.json()["error"]["type"] == kind
        until = time.monotonic() + WAIT_S
        while server.server.server_state.connections:
            assert time.monotonic() < until
            time.sleep(0.01)
        lives(server)


def test_a_body_must_say_that_it_is_json(server: Running) -> None:
    """Else a page of another site could send one without asking."""
    with server.http() as client:
        for kind in ({}, {"content-type": "text/plain"}):
            found = client.post("/v1/completions", content=json.dumps(ASK), headers=kind)
            assert found.status_code == 400
            assert "Content-Type: application/json" in found.json()["error"]["message"]


def test_floods_of_headers_and_broken_requests(server: Running) -> None:
    line = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    for data in (
        line + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
        line + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /none HTTP/9.9\r\n\r\n",
        b"\x00" * 1000,
        line + b"Content-Length: nonsense\r\n\r\n",
        line + b"Content-Length: 10\r\n\r\nshort",
    ):
        try:
            answer = raw(server, data)
        except OSError:
            continue  # cut off while it was still sending
        head, _, body = answer.partition(b"\r\n\r\n")
        assert not answer or b" 4" in head.split(b"\r\n")[0]
        assert not answer or json.loads(body)["error"]["message"]
    lives(server)


def test_what_is_no_http_is_answered_once(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken body ends the request that it belongs to; one after a request, the connection."""
    line = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = json.dumps({**ASK, "stream": True}).encode()
    for data, answers in (
        (line + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\nzzz\r\n', [b"400"]),
        (line + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", [b"400"]),
        (line + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"\0\r\n\r\n", [b"200", b"400"]),
    ):
        found = raw(server, data, ends=False)
        assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == answers
        assert json.loads(found.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    lives(server)
    assert "Exception in ASGI" not in caplog.text


def random_body(draw: random.Random) -> Any:
    """Something like a request, with random parts in place of its own."""
    odd: list[Any] = [None, True, -1, 0, 1e308, "", "x", [], {}, [[]], {"a": 1}, "\ud83d", 2**70]
    body: dict[str, Any] = {
        "model": "stand-in",
        "prompt": "r",
        "messages": [{"role": "user", "content": "r"}],
        "max_tokens": 1,
    }
    names = ["temperature", "stop", "n", "logprobs", "stream", "tools", "response_format", "seed"]
    names += ["logit_bias", "cache_salt", "session_id", "priority", "nvext", "system", *body]
    for _ in range(draw.randrange(1, 4)):
        body[draw.choice(names)] = draw.choice(odd)
    return body


@pytest.mark.parametrize(
    "count", [200, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_random_bad_requests(server: Running, count: int) -> None:
    draw = random.Random(count)
    with server.http(headers=JSON) as client:
        for _ in range(count):
            body = random_body(draw)
            found = client.post(draw.choice(PATHS), content=json.dumps(body))
            assert found.status_code < 500, (body, found.text)
            if found.status_code >= 400:
                assert found.json()["error"]["message"]
    lives(server)


def test_limits_of_bytes_and_the_key() -> None:
    with running(max_body_bytes=2000, api_key="right") as server:
        good = {"authorization": "Bearer right", **JSON}
        with server.http() as client:
            assert client.get("/health").status_code == 200
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
                found = client.post("/v1/completions", json=ASK, headers=headers)
                assert found.status_code == 401
                assert "right" not in found.text
                assert client.get("/cache/state", headers=headers).status_code == 401
            assert client.post("/v1/completions", json=ASK, headers=good).status_code == 200
            key = {"x-api-key": "right"}
            assert client.post("/v1/completions", json=ASK, headers=key).status_code == 200
            huge = json.dumps({**ASK, "prompt": "x" * 3000})
            found = client.post("/v1/completions", content=huge, headers=good)
            assert found.status_code == 413

            def slices() -> Any:
                for at in range(0, len(huge), 100):
                    yield huge[at : at + 100].encode()

            found = client.post("/v1/completions", content=slices(), headers=good)
            assert found.status_code == 413
            assert found.json()["error"]["code"] == "body_too_large"


def test_a_reader_that_stops_reading_holds_nothing_up() -> None:
    """Nor does it keep the server from ending."""
    with running() as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({**ASK, "max_tokens": 300, "stream": True, "logprobs": 20}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(20)
            lives(server)


def test_prompts_and_keys_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dsv4")
    caplog.set_level(logging.DEBUG, "uvicorn")
    secret = "zanzibar"
    with running(api_key=f"{secret}-key") as server:
        forward = server.engine.model.forward

        def fails(*_: Any) -> Any:
            raise RuntimeError("the device")

        headers = {"x-api-key": f"{secret}-key", "x-tenant-id": secret}
        with server.http(headers=headers) as client:
            for change in ({}, {"max_tokens": 9999}, {"stop": 7}, {secret: 1}):
                client.post("/v1/completions", json={**ASK, "prompt": secret, **change})
            server.engine.model.forward = fails
            found = client.post(
                "/v1/completions", json={**ASK, "prompt": secret, "cache_salt": secret}
            )
            assert found.status_code == 500
            server.engine.model.forward = forward
    assert "POST /v1/completions 200" in caplog.text
    assert "the device" in caplog.text
    ours = [record for record in caplog.records if record.name.startswith(("dsv4", "uvicorn"))]
    text = "\n".join(logging.Formatter().format(record) for record in ours)
    assert secret not in text


@pytest.mark.parametrize("broken", ["admit_request", "prepare_forward", "recover"])
def test_a_device_that_is_broken_ends_requests_and_no_more(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running ones and waiting ones are told; and once it works again, so does the server."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device")

    with running(max_requests=1) as server:
        lives(server)
        with monkeypatch.context() as patch:
            patch.setattr(type(server.engine.manager), broken, fails)
            if broken == "recover":
                patch.setattr(type(server.engine.manager), "prepare_forward", fails)

            def status(_: int) -> int:
                with server.http() as client:
                    return client.post(PATHS[0], json={**ASK, "prompt": "x" * 200}).status_code

            with ThreadPoolExecutor(3) as threads:
                assert [*threads.map(status, range(3))] == [500] * 3
            with server.http() as client:
                assert client.get("/health").status_code == 200
        lives(server)


def test_the_thread_that_steps_survives_those_who_listen() -> None:
    def fails(*_: Any) -> None:
        raise KeyError("a listener's own")

    with running() as server:
        runner = server.state.runner
        runner.after_step.insert(0, fails)
        runner.after_turn.insert(0, fails)
        runner.timing = Timing(first=fails, later=fails, end=fails)
        for _ in range(2):
            with server.http() as client:
                assert client.post(PATHS[0], json=ASK).status_code in (200, 500)
        runner.timing = None
        lives(server)


def test_what_is_kept_is_let_go_later_if_it_cannot_be_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a step that was broken off: until the next one calls of the manager raise."""
    clock, calls = [0.0], [0]
    with running() as server:
        keeper, manager = server.state.runner.keeper, server.engine.manager
        keeper.clock = lambda: clock[0]
        unpin = Prefixes.unpin

        def fails(*given: Any) -> None:
            calls[0] += 1
            if calls[0] < 3:
                raise RecoveryNeeded("a step was interrupted")
            unpin(*given)

        monkeypatch.setattr(Prefixes, "unpin", fails)
        with server.http() as client:
            kept = {"cache_control": {"type": "ephemeral"}, "session_id": "one"}
            asked = client.post(PATHS[0], json={**ASK, "prompt": "k" * 140, **kept})
            assert asked.status_code == 200
            assert manager.stats().blocks_pinned == 1
            clock[0] = 1e6
            lives(server)
            lives(server)
        server.wait_until(lambda: not manager.stats().blocks_pinned)
        assert calls[0] == 3


def test_calls_after_the_end_are_answered() -> None:
    with running() as server:
        runner = server.state.runner
    runner.close(WAIT_S)
    assert not runner.is_alive
    with pytest.raises(ShuttingDown):
        runner.call(lambda: None).result(WAIT_S)


def test_a_name_of_another_site_does_not_reach_loopback() -> None:
    with running(allowed_hosts=("127.0.0.1",)) as server, server.http() as client:
        assert client.get("/health").status_code == 200
        for name in ("evil.example", "evil.example:127", "127.0.0.1.evil.example", "", "a:b:c"):
            found = client.get("/health", headers={"host": name})
            assert found.status_code == 400
            assert found.json()["error"]["code"] == "unknown_host"
        for name in ("127.0.0.1", "127.0.0.1:1"):
            assert client.get("/health", headers={"host": name}).status_code == 200
        preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        found = client.options("/v1/completions", headers=preflight)
        assert "access-control-allow-origin" not in found.headers


def test_a_page_that_may_call_can_read_errors() -> None:
    """Those of the key and of limits too: a browser gives a page nothing without these headers."""
    page = {"origin": "http://page.example"}
    options = {"api_key": "right", "allow_origins": ("http://page.example",)}
    with running(**options) as server, server.http() as client:
        preflight = {**page, "access-control-request-method": "POST"}
        assert client.options("/v1/completions", headers=preflight).status_code == 200
        found = client.post("/v1/completions", json=ASK, headers=page)
        assert found.status_code == 401
        assert found.headers["access-control-allow-origin"] == page["origin"]
        found = client.get("/health", headers={"origin": "http://other.example"})
        assert "access-control-allow-origin" not in found.headers


def test_fifty_streams_with_disconnects(server: Running) -> None:
    """Every second client goes in the middle; the others are given what the model says alone."""
    words = ["a", "bb", "ccc", "dddd", "eeeee"]
    expected = {word: greedy_text(StandIn().tokenizer.encode(word), 8) for word in words}

    def one(nth: int) -> str | None:
        word = words[nth % len(words)]
        client = server.openai()
        stream = client.completions.create(
            model="stand-in", prompt=word, max_tokens=8, temperature=0, stream=True
        )
        text = ""
        for count, chunk in enumerate(stream):
            text += chunk.choices[0].text
            if nth % 2 and count > 1:
                stream.close()
                client.close()
                return None
        client.close()
        return text

    with ThreadPoolExecutor(50) as threads:
        found = [*threads.map(one, range(50))]
    for nth, text in enumerate(found):
        assert text is None if nth % 2 else text == expected[words[nth % len(words)]]
    lives(server)
    stats = server.engine.manager.stats()
    assert stats.blocks_live == 0
    assert stats.slots_free == stats.slots_total


@pytest.mark.parametrize(
    "examples", [8, pytest.param(400, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_the_description_of_the_api_holds(examples: int) -> None:
    """schemathesis makes requests from it, good ones and bad ones."""
    from hypothesis import HealthCheck, Phase, settings
    from schemathesis import openapi

    with running() as server:
        schema = openapi.from_url(f"{server.url}/openapi.json")
        tried = []
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path == "/cache/events":  # has no end
                continue
            tried.append(operation.path)
            strategy = operation.as_strategy()

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=[*HealthCheck],
            )
            def check(case: Any) -> None:
                response = case.call(timeout=WAIT_S)
                assert response.status_code < 500, response.text
                if response.status_code >= 400:
                    assert response.json()["error"]["message"]

            from hypothesis import given

            given(case=strategy)(check)()
        assert {"/v1/chat/completions", "/v1/messages", "/v1/models", "/health"} <= {*tried}
        lives(server)


def test_an_unknown_path_is_a_typed_404(server: Running) -> None:
    with server.http() as client:
        for path in ("/nothing", "/v1/nothing", "/v1/messages/batches"):
            found = client.get(path)
            assert found.status_code in (404, 405)
            assert found.json()["error"]["message"]
        found = client.get("/v1/completions")
        assert (found.status_code, found.headers["allow"]) == (405, "POST")

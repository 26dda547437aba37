"""What the operator of a server chooses: entries in host memory, keys, events, explanations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4 import InvalidInput
from dsv4.serve.app import make_state
from dsv4.serve.models import StandIn
from dsv4.serve.options import EventOptions, ServerOptions
from tests.events.consumer import Reader
from tests.serve.serving import Running, greedy_text, running

ASK = {"model": "stand-in", "temperature": 0, "max_tokens": 3}
TOKENIZER = StandIn().tokenizer
KEY = bytes(range(32))


def usage(server: Running, prompt: str | list[str], **body: Any) -> dict[str, Any]:
    with server.http() as client:
        found = client.post("/v1/completions", json={**ASK, "prompt": prompt, **body})
    assert found.status_code == 200, found.text
    result: dict[str, Any] = found.json()["usage"]
    return result


def cached(server: Running, prompt: str, **body: Any) -> int:
    count: int = usage(server, prompt, **body)["prompt_tokens_details"]["cached_tokens"]
    return count


# ---- entries in host memory ----------------------------------------------------------------------


def test_entries_may_be_in_host_memory() -> None:
    """A long prompt leaves the device, is read by the selection, and says what it says with
    everything on the device; the page is shown which blocks those are."""
    prompt = "entries far away " * 100
    with running(max_requests=1, host_memory_bytes=64 << 20) as server, server.http() as client:
        body = {**ASK, "prompt": prompt, "max_tokens": 12}
        for reused in (0, 1664):
            found = client.post("/v1/completions", json=body).json()
            assert found["choices"][0]["text"] == greedy_text(TOKENIZER.encode(prompt), 12)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == reused
        state = client.get("/cache/state").json()
        stats = server.engine.manager.stats().residency
        server.engine.manager.check_invariants()
    assert stats.blocks_only_in_host == state["blocks"]["in_host_memory"] > 0
    away = state["entries"]["in_host_memory"]
    assert len(away) == state["blocks"]["in_host_memory"]
    assert {*away} <= {node["block_id"] for node in state["tree"]["nodes"]}
    assert state["entries"]["rows_total"] < len(state["tree"]["nodes"])
    assert state["entries"]["misses"] > 0


def test_host_memory_that_is_too_small_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidInput, match="give more"):
        make_state(StandIn(), ServerOptions(host_memory_bytes=1000))


def test_without_host_memory_the_state_says_nothing_of_it() -> None:
    with running() as server, server.http() as client:
        found = client.get("/cache/state").json()
    assert "entries" not in found
    assert "in_host_memory" not in found["blocks"]


# ---- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_is_kept_with_a_key_is_found_with_it_alone(tmp_path: Path, encrypt: bool) -> None:
    prompt, place = "q" * 300, tmp_path / "kv"
    options: dict[str, Any] = {"disk": place, "disk_bytes": 1 << 30}
    keyed = {**options, "cache_key": KEY, "encrypt": encrypt}
    for tried, hit in ((keyed, 0), (keyed, 256), (options, 0), (keyed, 256)):
        with running(**tried) as server:
            found = cached(server, prompt)
            assert found >= hit if hit else not found
    with running(**options, cache_key=KEY[::-1]) as server:
        assert cached(server, prompt) == 0


def test_no_repr_shows_a_key() -> None:
    options = ServerOptions(cache_key=KEY, api_key="zanzibar")
    assert "zanzibar" not in repr(options)
    assert repr(KEY) not in repr(options)


# ---- events --------------------------------------------------------------------------------------


def test_routers_hear_what_is_cached() -> None:
    """With the session and the salt; and that all is gone when the server ends."""
    events = EventOptions(
        endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", topic="kv@pod-1@stand-in"
    )
    prompt = TOKENIZER.encode("events " * 40)
    with running(events=events) as server:
        publisher = server.state.runner.publisher
        assert publisher is not None
        reader = Reader(publisher.endpoint, publisher.replay_endpoint, 128)
        try:
            assert reader.read_one()  # of a new subscriber
            usage(server, "events " * 40, cache_salt="mine", session_id="talk")
            while reader.known.blocks(prompt, ["GPU"], "s:mine") < 2:
                assert reader.read_one()
            assert reader.known.blocks(prompt, ["GPU"]) == 0
            assert {*reader.known.sessions.values()} == {"talk"}
            assert not reader.known.trouble
        finally:
            reader.close()


# ---- explanations --------------------------------------------------------------------------------


def test_usage_says_why_a_prompt_was_not_cached() -> None:
    """In both APIs, streamed or whole; those who watch see the kind, and no token ids."""
    with running(explain=True) as server, server.http() as client:
        cold = usage(server, "e" * 300)["cache_debug"]
        assert [each["kind"] for each in cold] == ["never_seen"]
        (again,) = usage(server, "e" * 300)["cache_debug"]
        assert (again["kind"], again["found_tokens"]) == (None, 256)
        (other,) = usage(server, "e" * 200 + "f" * 100)["cache_debug"]
        assert other["kind"] == "differs"
        assert other["difference"]["at"] == 200
        assert "differs from a cached prompt at token 200" in other["text"]
        (salted,) = usage(server, "e" * 300, cache_salt="mine")["cache_debug"]
        assert salted == {**cold[0], "is_complete": True}
        server.state.runner.call(server.engine.manager.prefix.evict).result(60)
        (gone,) = usage(server, "e" * 300)["cache_debug"]
        assert gone["kind"] == "evicted"
        assert gone["leaving"]["rule"] == "asked"
        several = usage(server, ["short", "e" * 300])["cache_debug"]
        assert [each["kind"] for each in several] == ["too_short", None]
        body = {
            "model": "stand-in",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "x"}],
        }
        said = client.post("/v1/messages", json=body).json()["usage"]["cache_debug"]
        assert [each["kind"] for each in said] == ["too_short"]
        streamed = client.post("/v1/messages", json={**body, "stream": True}).text
        assert '"cache_debug": [{' in streamed
        turns = client.get("/cache/state").json()["turns"]
    kinds = ["never_seen", None, "differs", "never_seen", "evicted", "too_short", None]
    assert [turn["missed_because"] for turn in turns[:7]] == kinds
    assert "difference" not in json.dumps(turns)


def test_without_the_option_nothing_is_explained() -> None:
    """Those who share a salt could read each other's prompts with it."""
    with running() as server, server.http() as client:
        usage(server, "e" * 300)
        assert "cache_debug" not in usage(server, "f" * 300)
        assert "missed_because" not in client.get("/cache/state").json()["turns"][0]
        refused = client.post("/v1/completions", json={**ASK, "prompt": "e", "cache_debug": True})
        assert refused.status_code == 400

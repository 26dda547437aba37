"""What reaches the cache from a request: salts, sessions, priorities, how long to keep; and what
survives the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4.cache.prefix.hints import Hints
from tests.serve.serving import Running, chat_ids, greedy_text, running

ASK = {"model": "stand-in", "temperature": 0, "max_tokens": 2}


def usage(server: Running, prompt: str, headers: Any = None, **body: Any) -> dict[str, Any]:
    with server.http(headers=headers) as client:
        found = client.post("/v1/completions", json={**ASK, "prompt": prompt, **body})
    assert found.status_code == 200, found.text
    result: dict[str, Any] = found.json()["usage"]
    return result


def cached(server: Running, prompt: str, headers: Any = None, **body: Any) -> int:
    count: int = usage(server, prompt, headers, **body)["prompt_tokens_details"]["cached_tokens"]
    return count


def test_salts_and_tenants_share_nothing(server: Running) -> None:
    """Nor does a tenant reach another's by a salt that looks like it."""
    ways: list[tuple[Any, dict[str, str]]] = [
        (None, {}),
        (None, {"cache_salt": "a"}),
        (None, {"cache_salt": "b"}),
        ({"x-tenant-id": "a"}, {}),
        ({"x-tenant-id": "b"}, {}),
        ({"x-tenant-id": "a"}, {"cache_salt": "b"}),
        (None, {"cache_salt": "t1:a:"}),
        (None, {"cache_salt": "t1:a:b"}),
        ({"x-tenant-id": "a:b"}, {}),
    ]
    assert [cached(server, "s" * 140, *way[:1], **way[1]) for way in ways] == [0] * len(ways)
    assert [cached(server, "s" * 140, *way[:1], **way[1]) for way in ways] == [128] * len(ways)


def test_priorities_and_sessions_reach_the_queue(server: Running) -> None:
    seen = []
    listen = server.state.runner.after_turn
    listen.append(lambda job: seen.append(job.data.terms))
    try:
        cached(server, "a", priority=3)
        cached(server, "a", {"X-Vllm-Priority": "-4"})
        cached(server, "a", nvext={"agent_hints": {"priority": 7, "osl": 9}})
        for name in ("X-Session-ID", "X-Dynamo-Session-ID", "x-claude-code-session-id"):
            cached(server, "a", {name: "talk"})
        cached(server, "a", {"thread-id": "talk"}, session_id="other")
        cached(server, "a", prompt_cache_key="talk")
        cached(server, "a", {"x-tenant-id": "t"}, prompt_cache_key="talk")
    finally:
        listen.pop()
    assert [terms.priority for terms in seen[:3]] == [-3, 4, 7]
    assert len({terms.session for terms in (*seen[3:6], seen[7])}) == 1
    assert len({terms.session for terms in (seen[0], seen[3], seen[6], seen[8])}) == 4
    with server.http(headers={"X-Vllm-Priority": "high"}) as client:
        assert client.post("/v1/completions", json={**ASK, "prompt": "a"}).status_code == 400


def test_what_is_to_be_kept_is_pinned_and_gives_way() -> None:
    """Until its time is over, its session has a newer turn, or a request needs its memory."""
    clock = [0.0]
    with running(max_requests=1) as server:
        server.state.runner.keeper.clock = lambda: clock[0]
        keep = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

        def pinned() -> int:
            return int(server.engine.manager.stats().blocks_pinned)

        cached(server, "k" * 140, session_id="talk", **keep)
        assert pinned() == 1
        cached(server, "k" * 300, session_id="talk", **keep)
        assert pinned() == 2
        cached(server, "l" * 140, session_id="other", **keep)
        assert pinned() == 3
        cached(server, "l" * 140, {"X-Dynamo-Session-Final": "true"}, session_id="other")
        assert pinned() == 2
        clock[0] = 3000.0
        cached(server, "m", session_id="third")
        assert pinned() == 2
        clock[0] = 4000.0
        cached(server, "m", session_id="third")
        assert pinned() == 0
        cached(server, "k" * 700, session_id="talk", **keep)
        assert 0 < 2 * pinned() <= server.engine.manager.stats().blocks_total or not pinned()
        cached(server, "n" * 1500, session_id="big")
        server.engine.manager.check_invariants()


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Its history is not run again, and the text is the same as without the restart."""
    first_ask, said = "h" * 300, ""
    options: dict[str, Any] = {"disk": tmp_path / "kv", "disk_bytes": 1 << 30}

    def turn(server: Running, *chat: str) -> tuple[str, Any]:
        roles = ("user", "assistant")
        found = server.openai().chat.completions.create(
            model="stand-in",
            messages=[{"role": roles[n % 2], "content": text} for n, text in enumerate(chat)],
            temperature=0,
            max_tokens=6,
        )
        return str(found.choices[0].message.content), found.usage.prompt_tokens_details

    with running(**options) as server:
        said, _ = turn(server, first_ask)
    forward_tokens = []
    with running(**options) as server:
        forward = server.engine.model.forward

        def counted(plan: Any, ids: Any, rows: Any) -> Any:
            forward_tokens.append(len(ids))
            return forward(plan, ids, rows)

        server.engine.model.forward = counted
        answer, details = turn(server, first_ask, said, "and?")
        prompt = chat_ids(first_ask, said, "and?")
    assert answer == greedy_text(prompt, 6)
    assert details.cached_tokens >= 256
    assert details.cached_tokens_details == {
        "device": 0,
        "host": 0,
        "storage": details.cached_tokens,
    }
    assert sum(forward_tokens) <= len(prompt) - 256 + 6
    assert (tmp_path / "kv").is_dir()


def test_usage_says_which_tier_had_it() -> None:
    """After the device had to evict it for others."""
    with running(max_requests=1, max_context=1024, host_tier_bytes=64 << 20) as server:
        usage(server, "u" * 300)
        manager = server.engine.manager

        def evict() -> None:
            manager.tiers.drain(30.0)
            manager.prefix.evict()

        server.state.runner.call(evict).result(60)
        found = usage(server, "u" * 300)["prompt_tokens_details"]
        assert found["cached_tokens"] >= 256
        assert found["cached_tokens_details"] == {
            "device": 0,
            "host": found["cached_tokens"],
            "storage": 0,
        }
        again = usage(server, "u" * 300)["prompt_tokens_details"]
        assert again["cached_tokens_details"]["device"] >= 256


def test_sessions_and_priorities_reach_the_prefix_cache(server: Running) -> None:
    """As hints: fewer priorities, and a key that conversations share is none."""
    seen = []
    listen = server.state.runner.after_turn
    listen.append(lambda job: seen.append(job.hints))
    try:
        cached(server, "a", session_id="talk", priority=-500)
        cached(server, "a", prompt_cache_key="many")
        cached(server, "a", {"X-Dynamo-Session-Final": "true"}, session_id="talk")
        cached(server, "a", {"X-Dynamo-Session-Final": "true"})
    finally:
        listen.pop()
    assert seen == [
        Hints(session="talk", priority=8),
        Hints(),
        Hints(session="talk", final=True),
        Hints(),
    ]

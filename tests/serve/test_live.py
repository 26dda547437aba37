"""/cache/state and /cache/events: the picture of the cache."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from dsv4.serve.failures import ApiError
from dsv4.serve.live import MOST_BEHIND, RATE_HZ, WatchedStream, Watcher
from tests.serve.serving import WAIT_S, Running

ASK = {"model": "stand-in", "temperature": 0, "ignore_eos": True}


def lines(stream: Any) -> Any:
    """(event, data) of server-sent events."""
    name = ""
    for line in stream.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_the_state_is_what_the_manager_says(server: Running) -> None:
    with server.http() as client:
        for salt in ("one", "one", "two"):
            client.post(
                "/v1/completions",
                json={**ASK, "prompt": "q" * 300, "max_tokens": 3, "cache_salt": salt},
            )
        found = client.get("/cache/state").json()
    stats = server.engine.manager.stats()
    blocks = found["blocks"]
    assert blocks["total"] == stats.blocks_total
    assert sum(blocks[name] for name in ("free", "live", "cached", "in_flight")) == blocks["total"]
    assert [turn["hit_tokens"] for turn in found["turns"][-3:]] == [0, 256, 0]
    assert [turn["missed_tokens"] for turn in found["turns"][-3:]] == [300, 44, 300]
    tree = found["tree"]
    assert tree["blocks"] == len(tree["nodes"]) == 4
    seen: set[str] = set()
    for node in tree["nodes"]:
        assert node["parent"] is None or node["parent"] in seen
        seen.add(node["id"])
    assert found["requests"] == []
    sessions = [turn["session"] for turn in found["turns"][-3:]]
    assert sessions[0] == sessions[1] != sessions[2]
    assert "one" not in json.dumps(found)  # a salt is for its tenant alone


def test_events_follow_a_request(server: Running) -> None:
    body = {**ASK, "prompt": "w" * 150, "max_tokens": 400, "stream": True}
    with server.http() as client, client.stream("GET", "/cache/events") as watched:
        events = lines(watched)
        assert next(events)[0] == "state"
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            while True:
                name, event = next(events)
                assert name == "step"
                if event["requests"]:
                    break
            (request,) = event["requests"]
            length = request["length"]
            assert request["prompt_tokens"] == 150
            assert length >= 150
            assert request["window"] == [max(0, length - 128), length]
            assert {"ratio": 4, "entries": length // 4, "unfinished_tokens": length % 4} in request[
                "groups"
            ]
            assert len(request["blocks"]) >= length // 128
            assert event["blocks"]["live"] >= len(request["blocks"])
        while not event["turns"]:
            name, event = next(events)
        assert event["turns"][0]["prompt_tokens"] == 150
        assert len(event["tree"]["nodes"]) > 0


def test_without_a_watcher_a_step_does_nothing_for_it(server: Running) -> None:
    live, counted = server.state.live, []
    counters = live.counters
    live.counters = lambda: counted.append(1) or counters()  # type: ignore[method-assign]
    try:
        with server.http() as client:
            client.post("/v1/completions", json={**ASK, "prompt": "x", "max_tokens": 20})
        assert not counted
    finally:
        live.counters = counters  # type: ignore[method-assign]


def test_a_watcher_that_does_not_read_costs_bounded_memory(server: Running) -> None:
    """It is given a whole state instead of what it has missed."""
    watcher = Watcher()
    for nth in range(10 * MOST_BEHIND):
        watcher.put(str(nth))
    assert watcher.queue.qsize() == MOST_BEHIND
    assert watcher.lost == 9 * MOST_BEHIND
    watcher.clear()
    assert not watcher.lost
    assert watcher.queue.empty()


def test_a_watcher_that_reads_nothing_for_long_is_cut_off(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few of them would keep all others from watching, for ever."""
    live = server.state.live

    async def watch() -> None:
        async def receive() -> Any:
            await asyncio.sleep(WAIT_S)

        async def send(_: Any) -> None:
            if live._watchers:
                await asyncio.sleep(WAIT_S)  # the client's buffers are full

        await WatchedStream(live.watch())({"type": "http"}, receive, send)

    monkeypatch.setattr("dsv4.serve.live.PATIENCE_S", 0.05)
    with pytest.raises(ApiError, match=r"nothing was read for 0\.05 s"):
        asyncio.run(watch())
    assert not live._watchers


def test_events_are_bounded_however_fast_turns_end(server: Running) -> None:
    """And none is lost: each turn is in some event, the last one too."""
    with server.http() as client, client.stream("GET", "/cache/events") as watched:
        events = lines(watched)
        _, state = next(events)
        last = state["turns"][-1]["number"] if state["turns"] else 0
        begun = time.monotonic()
        for _ in range(30):
            client.post("/v1/completions", json={**ASK, "prompt": "x", "max_tokens": 1})
        numbers, count = list[int](), 0
        while len(numbers) < 30:
            _, event = next(events)
            count += 1
            numbers += [turn["number"] for turn in event["turns"]]
        seconds = time.monotonic() - begun
    assert numbers == [*range(last + 1, last + 31)]
    assert count <= RATE_HZ * seconds + 2


def test_a_page_that_watches_costs_a_fiftieth_of_a_step_at_most(server: Running) -> None:
    """Of the thread that steps, however large the picture is: one that takes long comes less often.
    Measured in processor time, of which a busy machine takes none away."""
    live, runner = server.state.live, server.state.runner
    with server.http() as client:
        for nth in range(3):
            client.post(
                "/v1/completions",
                json={**ASK, "prompt": f"{nth}" * 1900, "max_tokens": 1, "cache_salt": f"{nth}"},
            )
    tree, watcher = live.tree, Watcher()
    live._watchers.add(watcher)

    def cost() -> tuple[float, float, float]:
        begun = time.thread_time()
        live._send_changes()
        ended = time.thread_time()
        return ended - begun, live._interval_s, live._rested_s - ended

    try:
        assert len(tree()["nodes"]) >= 3 * 14
        for more in (0, 100):

            def slow(more: int = more) -> Any:
                return [tree() for _ in range(more + 1)][-1]

            live.tree = slow  # type: ignore[method-assign]
            spent, interval, rest = runner.call(cost).result(WAIT_S)
            assert interval >= 1 / RATE_HZ
            assert spent <= 0.02 * interval
            assert spent <= 0.02 * rest
    finally:
        live.tree = tree  # type: ignore[method-assign]
        live._interval_s = 1 / RATE_HZ
        live._watchers.discard(watcher)


def test_on_a_machine_that_leaves_little_time_steps_go_before_events(server: Running) -> None:
    """However late the next event is: what counts is what the thread has computed in between. When
    nothing is left to compute, the last event comes."""
    live, runner, sent = server.state.live, server.state.runner, list[bool]()
    engine, send = runner.engine, live._send_changes
    live._send_changes = lambda: sent.append(bool(engine.jobs))  # type: ignore[method-assign]

    def steps() -> None:
        live._last_s, live._rested_s = 0.0, time.thread_time() + WAIT_S
        engine.jobs.append(object())  # type: ignore[arg-type]
        try:
            live._after_step()
            assert sent == []
            live._rested_s = time.thread_time()
            live._after_step()
            assert sent == [True]
            live._rested_s = time.thread_time() + WAIT_S
        finally:
            engine.jobs.clear()
        live._after_step()
        assert sent == [True, False]

    watcher = Watcher()
    live._watchers.add(watcher)
    try:
        runner.call(steps).result(WAIT_S)
    finally:
        live._send_changes, live._rested_s = send, 0.0  # type: ignore[method-assign]
        live._watchers.discard(watcher)

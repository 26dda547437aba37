"""Random load on a server: clients that ask, leave, break off, send garbage and watch; and what is
as before when they have gone.

    python -m tests.serve.load --seconds 600 [--seed 1] [--way tiers]
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch

from dsv4.serve.models import Opened, Room, StandIn
from tests.serve.serving import WAIT_S, Running, greedy_text, running

CLIENTS = 12
STUCK_S = 120.0  # without a byte; then it depends on how far the server got in the meantime
MOST_STEPS = 20_000  # that an answer may take: longer than all that may wait before it
WORDS = ["block ", "ring ", "entry ", "window ", "Größe ", "\U0001f642 "]
MOST_GROWTH = 96 << 20  # of the process in bytes, between the warm server and the end
# options of a server: few blocks, so that requests give memory back all the time
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiers": {"host_tier_bytes": 4 << 20, "disk_bytes": 64 << 20},
    "host_memory": {"host_memory_bytes": 64 << 20},
}


class Tight(StandIn):
    """The stand-in with less memory than its requests would take."""

    def open(self, room: Room) -> Opened:
        full = super().open(room)
        if room.host_memory_bytes is not None:
            return full
        memory = full.manager.memory.memory_bytes().total
        arena = full.manager.memory.memory_bytes().block_arena
        tight: dict[str, Any] = {name: getattr(room, name) for name in room.__slots__}
        return super().open(Room(**{**tight, "memory_bytes": memory - arena // 2}))


@cache
def known_texts() -> dict[str, str]:
    """Prompts, the longest of several blocks, and what the model says to them alone."""
    draw = random.Random(0)
    prompts = ["".join(draw.choices(WORDS, k=count)) for count in (1, 5, 40, 90)]
    return {text: greedy_text(StandIn().tokenizer.encode(text), 10) for text in prompts}


class Load:
    """Threads that do random things until the time is over. `found` counts what came back; what
    must not be is in `wrong`."""

    def __init__(self, server: Running, seed: int, *, long: bool) -> None:
        self.server, self.seed, self.lengths = server, seed, [1, 7, 40, 300][: 4 if long else 3]
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self.clients, self.known = CLIENTS if long else CLIENTS // 2, known_texts()

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._client, args=(random.Random(self.seed + n), until))
            for n in range(1, self.clients + 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 10 * STUCK_S)
        if any(thread.is_alive() for thread in threads):
            self.wrong.append("a client is stuck")

    def _client(self, draw: random.Random, until: float) -> None:
        ways: list[Callable[[httpx.Client, random.Random], str]] = [
            *[self._ask] * 6,
            *[self._leave] * 3,
            self._break_off,
            self._garbage,
            self._watch,
            self._check,
            self._check,
        ]
        while time.monotonic() < until and not self.wrong:
            with self.server.http() as client:
                client.timeout = httpx.Timeout(STUCK_S)
                for _ in range(draw.randrange(1, 6)):
                    if time.monotonic() > until:
                        return
                    way = draw.choice(ways)
                    steps = self.server.engine.steps
                    try:
                        kind = way(client, draw)
                    except httpx.TimeoutException:
                        taken = self.server.engine.steps - steps
                        if not 0 < taken < MOST_STEPS:
                            faulthandler.dump_traceback()  # of all threads
                            name = way.__name__
                            self.wrong.append(f"{name}: nothing in {STUCK_S:g} s, {taken} steps")
                            return
                        kind = "slow"
                    except httpx.TransportError as error:
                        self.wrong.append(f"{way.__name__}: {error!r}")
                        return
                    with self._lock:
                        self.found[f"{way.__name__[1:]}: {kind}"] += 1

    def _body(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        text = "".join(draw.choices(WORDS, k=draw.choice([1, 8, 60, 150])))
        path = draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/messages"])
        body: dict[str, Any] = {"model": "stand-in", "max_tokens": draw.choice(self.lengths)}
        body["stream"] = draw.random() < 0.6
        if path == "/v1/completions":
            body["prompt"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        extra: list[dict[str, Any]] = [
            {"temperature": 0},
            {"seed": draw.randrange(9), "temperature": 2, "top_p": 0.9},
            {"cache_salt": draw.choice("ab")},
            {"session_id": draw.choice("cde"), "priority": draw.randrange(-3, 4)},
            {"cache_control": {"type": "ephemeral"}, "session_id": draw.choice("cde")},
        ]
        if path != "/v1/messages":
            extra += [{"n": draw.randrange(1, 4)}, {"stop": ["a", "zz"]}, {"ignore_eos": True}]
            extra += [{"response_format": {"type": "json_object"}}]
            extra += [{"logprobs": 2 if path == "/v1/completions" else True}]
        for each in draw.sample(extra, k=draw.randrange(len(extra))):
            body |= each
        return path, body

    def _ask(self, client: httpx.Client, draw: random.Random) -> str:
        path, body = self._body(draw)
        found = client.post(path, json=body)
        if found.status_code == 200:
            if body["stream"]:
                end = "data: [DONE]" if path != "/v1/messages" else "message_stop"
                if end not in found.text:
                    self.wrong.append(f"a stream without an end: {found.text[-300:]}")
            return "200"
        if found.status_code == 429 and int(found.headers["retry-after"]) >= 1:
            return "429"
        if found.status_code >= 500 or not found.json()["error"]["message"]:
            self.wrong.append(f"{found.status_code} {found.text[:300]} of {json.dumps(body)[:500]}")
        return str(found.status_code)

    def _leave(self, client: httpx.Client, draw: random.Random) -> str:
        """In the middle of a stream, or before its first byte."""
        path, body = self._body(draw)
        with client.stream("POST", path, json={**body, "stream": True}) as found:
            count = draw.randrange(4)
            for nth, _ in enumerate(found.iter_lines()):
                if nth >= count:
                    break
        return "left"

    def _break_off(self, client: httpx.Client, draw: random.Random) -> str:
        """Anywhere in a request, or after it: also a reader that never reads."""
        path, body = self._body(draw)
        content = json.dumps(body).encode()
        data = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sent = data.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
        host, port = self.server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=STUCK_S) as connection:
            connection.sendall(sent[: draw.choice([7, len(sent) // 2, len(sent) - 1, len(sent)])])
            time.sleep(draw.choice([0, 0.01, 0.2]))
        return "broken off"

    def _garbage(self, client: httpx.Client, draw: random.Random) -> str:
        content = draw.choice([b"{", b"\xff\xfe", b"[]" * 500, draw.randbytes(200)])
        found = client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        if not 400 <= found.status_code < 500:
            self.wrong.append(f"garbage got {found.status_code}")
        return str(found.status_code)

    def _watch(self, client: httpx.Client, draw: random.Random) -> str:
        with client.stream("GET", "/cache/events") as found:
            for nth, _ in enumerate(found.iter_lines()):
                if nth > draw.randrange(12):
                    break
        client.get("/metrics").raise_for_status()
        return str(found.status_code)

    def _check(self, client: httpx.Client, draw: random.Random) -> str:
        """A text that is known must come, whatever else runs."""
        prompt = draw.choice([*self.known])
        salt = draw.choice([{}, {"cache_salt": "c"}, {"session_id": f"s{draw.randrange(3)}"}])
        body = {"model": "stand-in", "prompt": prompt, "max_tokens": 10, "temperature": 0}
        found = client.post("/v1/completions", json={**body, **salt})
        if found.status_code == 429:
            return "429"
        if found.json()["choices"][0]["text"] != self.known[prompt]:
            self.wrong.append(f"another text: {found.text[:300]}")
        return "200"


def measures() -> dict[str, int]:
    """Of the process, which holds the clients too."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "bytes": resident,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def held(server: Running) -> dict[str, int]:
    """Blocks, slots, and rows of the host and of what residency lends."""
    manager = server.engine.manager
    stats = manager.stats()
    found = {
        "blocks live": stats.blocks_live,
        "blocks in flight": stats.blocks_in_flight,
        "blocks cached": stats.blocks_cached,
        "blocks free": stats.blocks_free,
        "slots taken": stats.slots_total - stats.slots_free,
        "snapshot rows taken": 0 if stats.prefix is None else stats.prefix.snapshots_used,
    }
    found |= {f"{tier.name} bytes": tier.held_bytes for tier in stats.tiers}
    if stats.residency is not None:
        found["entry rows taken"] = stats.residency.rows_total - stats.residency.rows_free
        found["blocks with entries on the device"] = stats.residency.blocks_on_device
    return found


def settled(server: Running) -> dict[str, int]:
    """What is held once nobody asks: no request, no slot, no block but cached ones; the connections
    of those who left are closed."""
    server.wait_until(server.is_idle)
    manager = server.engine.manager

    def look() -> None:
        manager.check_invariants()
        stats = manager.stats()
        assert stats.blocks_live == stats.blocks_in_flight == 0
        assert stats.slots_free == stats.slots_total
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total

    until = time.monotonic() + WAIT_S
    while server.server.server_state.connections or server.state.live._watchers:
        assert time.monotonic() < until, "connections are left"
        time.sleep(0.05)
    if manager.tiers:
        assert manager.tiers.drain(WAIT_S)
    server.state.runner.call(look).result(WAIT_S)
    return server.state.runner.call(lambda: held(server)).result(WAIT_S) | measures()


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What was done, and what was held with nobody there: after the warm-up, and at the end."""

    done: Counter[str]
    before: dict[str, int]
    after: dict[str, int]

    def grown(self, name: str) -> int:
        return self.after[name] - self.before[name]


def play(seconds: float, seed: int, way: str) -> Played:
    """Load for some time, after a fifth of it that warms up. Raises AssertionError for what must
    not be."""
    torch.set_num_threads(1)
    options = {"max_requests": 6, "max_context": 1024, "max_step_tokens": 128, "max_waiting": 16}
    with tempfile.TemporaryDirectory() as place:
        more = dict(WAYS[way])
        if "disk_bytes" in more:
            more["disk"] = Path(place) / "kv"
        with running(Tight(), **options, **more) as server:
            done, found = Counter[str](), list[dict[str, int]]()
            for part, part_seed in ((seconds / 5, seed), (4 * seconds / 5, seed + 100)):
                load = Load(server, part_seed, long=seconds > 30)
                load.run(part)
                assert not load.wrong, load.wrong[:3]
                found.append(settled(server))
                done += load.found
            done["preemptions"] = server.state.runner.counters.preemptions
            done["steps"] = server.engine.steps
    return Played(done=done, before=found[0], after=found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=WAYS, default="tiers")
    options = parser.parse_args()
    found = play(options.seconds, options.seed, options.way)
    told = {"done": found.done, "before": found.before, "after": found.after}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()

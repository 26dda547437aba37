"""Replicas on Ray Serve, with real processes: a prefill and two decode replicas of the demo model.

One test, because it needs one cluster: what a single server says, 30 conversations routed by what
is cached and in turn, and a decode replica that is killed in the middle of streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
import pytest
import torch

from dsv4.serve.demo import ServedDemo
from dsv4.serve.options import ServerOptions
from tests.ray.application import Answer, Application, Streams, application, kill, stream
from tests.ray.loads import long_answers, words
from tests.serve.serving import running

pytest.importorskip("ray", reason="replicas on Ray need the extra ray: pip install 'dsv4[ray]'")

# a replica has room for half of the conversations
SERVER = {
    "max_context": 1024,
    "max_requests": 4,
    "max_step_tokens": 256,
    "memory_bytes": 3 << 20,
    "host_tier_bytes": 5 << 19,
}
CONVERSATIONS, TURNS = 30, 3


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    """One server without Ray: what nothing disturbs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with running(ServedDemo(), max_context=2048) as found:
        yield found.url
    torch.set_num_threads(threads)


@dataclass(kw_only=True)
class Load:
    """30 conversations of several turns, a few at once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    said: dict[int, list[str]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def converse(url: str, salt: str) -> Load:
    """A conversation's next turn waits for its answer, as people do, and others come between."""
    load, lock = Load(), threading.Lock()
    messages = {nth: list[dict[str, str]]() for nth in range(CONVERSATIONS)}

    def turn(nth: int, number: int) -> None:
        messages[nth].append(
            {"role": "user", "content": words(100 * nth + number, 140 if number else 220)}
        )
        body = {
            "messages": messages[nth],
            "max_tokens": 4,
            "temperature": 0,
            "cache_salt": salt,
            "session_id": f"conversation {nth}",
        }
        answer = stream(url, "/v1/chat/completions", body, Answer())
        assert answer.error is None
        messages[nth].append({"role": "assistant", "content": answer.text})
        with lock:
            load.prompt_tokens += answer.usage["prompt_tokens"]
            load.cached_tokens += answer.usage["prompt_tokens_details"]["cached_tokens"]
            load.said.setdefault(nth, []).append(answer.text)

    with ThreadPoolExecutor(4) as pool:
        for number in range(TURNS):
            list(pool.map(turn, range(CONVERSATIONS), [number] * CONVERSATIONS))
    return load


def nothing_is_left(found: Application) -> bool:
    return all(not each["jobs"] for each in found.state()["replicas"].values())


def held_blocks(found: Application, role: str, replicas: int) -> int:
    """By requests and arrivals, of all replicas: Ray Serve asks any of them."""
    states: dict[str, dict[str, int]] = {}
    while len(states) < replicas:
        state = found.handle(role).cache_state.remote().result(timeout_s=60)
        states[state["replica"]] = state["blocks"]
    return sum(blocks["live"] + blocks["in_flight"] for blocks in states.values())


@pytest.mark.timeout(900)  # a minute or two where nothing else runs
def test_replicas_answer_as_one_server_and_survive_a_kill(alone: str):
    began_s = time.monotonic()
    with application(
        prefill=1, decode=2, server=ServerOptions(**SERVER), prefill_from=200
    ) as found:
        found.wait_for(prefill=1, decode=2)
        up_s = time.monotonic() - began_s

        # ---- routed by what is cached, and in turn
        routed = converse(found.url, "routed")
        found.handle("router").reroute.remote("round-robin").result()
        in_turn = converse(found.url, "in turn")
        found.handle("router").reroute.remote("prefix").result()
        assert routed.said == in_turn.said  # where it runs is not to be seen in what it says
        assert routed.hit_rate > in_turn.hit_rate + 0.1
        rates = f"{routed.hit_rate:.1%} of the prompts cached, in turn {in_turn.hit_rate:.1%}"

        # ---- a decode replica is killed in the middle of streams
        bodies = long_answers(4, 120)
        expected = [stream(alone, "/v1/completions", body, Answer()) for body in bodies]
        streams = Streams(url=found.url, path="/v1/completions", bodies=bodies).start()
        streams.wait_for_pieces(10)
        victim = found.busy("decode")
        assert victim is not None
        assert psutil.Process(victim["pid"]).nice() == psutil.Process().nice()
        kill(victim["pid"])
        for answer, wanted in zip(streams.join(), expected, strict=True):
            assert answer.error is None
            assert (answer.text, answer.finish) == (wanted.text, "length")
            assert answer.usage["completion_tokens"] == 120
        assert found.metric("dsv4_lost_legs_total") >= 1
        found.wait_for(decode=2)  # Ray has started another one
        found.wait_until(lambda: nothing_is_left(found), "every job has ended")
        assert held_blocks(found, "decode", 2) == 0
        still = max(each.longest_gap_s for each in streams.answers)
        print(f"up in {up_s:.1f} s; {rates}; a stream stood still for {still:.2f} s")

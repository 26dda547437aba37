"""Streams that something happens to, and what they would have said without it."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.serve.demo import ServedDemo
from dsv4.serve.options import ServerOptions
from tests.ray.application import Answer, Application, Streams, stream
from tests.ray.loads import long_answers
from tests.serve.serving import running

TOKENS = 200
SERVER = ServerOptions(max_context=1024, max_requests=8)


def bodies() -> list[dict[str, Any]]:
    return long_answers(6, TOKENS)


def undisturbed() -> list[Answer]:
    """Of one server without Ray."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with running(ServedDemo(), max_context=1024) as alone:
            return [stream(alone.url, "/v1/completions", each, Answer()) for each in bodies()]
    finally:
        torch.set_num_threads(threads)


def check(streams: Streams, expected: list[Answer], what: str) -> None:
    for answer, wanted in zip(streams.join(), expected, strict=True):
        assert answer.error is None
        assert (answer.text, answer.finish) == (wanted.text, wanted.finish)
        assert answer.usage["completion_tokens"] == TOKENS
    gaps = sorted(answer.longest_gap_s for answer in streams.answers)
    print(f"\n{what}: streams stood still for up to {gaps[-1]:.2f} s, half for {gaps[3]:.2f} s")


def nothing_is_left(found: Application) -> None:
    """No job, and no block that a request holds."""

    def idle() -> bool:
        return all(not each["jobs"] for each in found.state()["replicas"].values())

    found.wait_until(idle, "every job has ended")
    assert found.metric("dsv4_num_requests_running") == 0

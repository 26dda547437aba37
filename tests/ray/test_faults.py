"""What happens to processes while they stream: each answer has the tokens of an undisturbed run, in
their order, once. Prints how long a stream stood still.

Nightly: each test has a cluster of its own, and waits for processes to start anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from dsv4.serve.demo import ServedDemo
from dsv4.serve.options import ServerOptions
from tests.ray.application import Answer, Application, Streams, application, kill, stopped, stream
from tests.ray.loads import long_answers
from tests.serve.serving import running

pytest.importorskip("ray", reason="replicas on Ray need the extra ray: pip install 'dsv4[ray]'")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

TOKENS = 200
SERVER = ServerOptions(max_context=1024, max_requests=8)
Fault = Callable[[Application], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Answer]]:
    """Of one server without Ray."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with running(ServedDemo(), max_context=1024) as alone:
        yield [stream(alone.url, "/v1/completions", each, Answer()) for each in bodies()]
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def apart() -> Iterator[Application]:
    with application(prefill=1, decode=2, server=SERVER, prefill_from=128, silence_s=3.0) as found:
        found.wait_for(prefill=1, decode=2)
        yield found


def bodies() -> list[dict[str, Any]]:
    return long_answers(6, TOKENS)


def pid_of(found: Application, role: str) -> int:
    about = found.busy(role) or next(iter(found.replicas(role).values()))
    return int(about["pid"])


def killed(role: str) -> Fault:
    def fault(found: Application) -> AbstractContextManager[None]:
        kill(found.router_pid() if role == "router" else pid_of(found, role))
        return nullcontext()

    return fault


def frozen(role: str) -> Fault:
    """Stands still until all answers have come."""

    def fault(found: Application) -> AbstractContextManager[None]:
        return stopped(found.router_pid() if role == "router" else pid_of(found, role))

    return fault


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


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("kill -9 of a decode replica", killed("decode")),
        ("SIGSTOP of a decode replica", frozen("decode")),
        ("kill -9 of the router", killed("router")),
        ("SIGSTOP of the router", frozen("router")),
        ("kill -9 of the prefill replica", killed("prefill")),
        ("SIGSTOP of the prefill replica", frozen("prefill")),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_streams_outlive_a_process(
    apart: Application, expected: list[Answer], what: str, fault: Fault
):
    """In the middle of their answers; new requests come while the process is gone."""
    streams = Streams(url=apart.url, path="/v1/completions", bodies=bodies()).start()
    streams.wait_for_pieces(8)
    with fault(apart):
        later = Streams(url=apart.url, path="/v1/completions", bodies=bodies()).start()
        check(streams, expected, f"{what}, of streams that ran")
        check(later, expected, f"{what}, of streams that came then")
    apart.wait_for(prefill=1, decode=2)
    nothing_is_left(apart)


@pytest.mark.parametrize("how", [killed("prefill"), frozen("prefill")], ids=["kill", "stop"])
def test_streams_outlive_a_prefill_replica_in_the_middle_of_prompts(
    apart: Application, expected: list[Answer], how: Fault
):
    """While prompts run there and requests are handed over."""
    streams = Streams(url=apart.url, path="/v1/completions", bodies=bodies()).start()
    apart.wait_until(lambda: apart.busy("prefill"), "prompts run")
    with how(apart):
        check(streams, expected, "the prefill replica while prompts run")
    apart.wait_for(prefill=1, decode=2)
    nothing_is_left(apart)


def test_replicas_may_be_scaled_down_and_up_while_they_stream(expected: list[Answer]):
    """A replica that leaves has two seconds: shorter than its streams."""
    from ray import serve

    from dsv4.integrations.ray import RayOptions, build

    common: dict[str, Any] = {"server": SERVER, "drain_s": 2.0, "threads": 1, "num_cpus": 0.5}
    with application(replicas=2, server=SERVER, drain_s=2.0) as found:
        found.wait_for(decode=2)
        streams = Streams(url=found.url, path="/v1/completions", bodies=bodies()).start()
        streams.wait_for_pieces(8)
        fewer = build(RayOptions(replicas=1, **common))
        scaling = threading.Thread(target=serve.run, args=(fewer,), kwargs={"name": "dsv4"})
        scaling.start()
        check(streams, expected, "scale down to one replica")
        scaling.join()
        found.wait_for(decode=1)
        nothing_is_left(found)


def test_a_client_that_goes_leaves_nothing(apart: Application):
    import httpx

    body = {**bodies()[0], "model": "dsv4-demo", "stream": True, "max_tokens": 600}
    with (
        httpx.Client(base_url=apart.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
    began_s = time.monotonic()
    nothing_is_left(apart)
    print(f"\na client that goes: its job was over after {time.monotonic() - began_s:.2f} s")

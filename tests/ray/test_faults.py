"""What happens to processes while they stream: each answer has the tokens of an undisturbed run, in
their order, once. Prints how long a stream stood still.

Nightly: each test has a cluster of its own, and waits for processes to start anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest

from tests.ray.application import Answer, Application, Streams, application, kill, stopped
from tests.ray.undisturbed import SERVER, bodies, check, nothing_is_left, undisturbed

pytest.importorskip("ray", reason="replicas on Ray need the extra ray: pip install 'dsv4[ray]'")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

Fault = Callable[[Application], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return undisturbed()


@pytest.fixture(scope="module")
def apart() -> Iterator[Application]:
    with application(prefill=1, decode=2, server=SERVER, prefill_from=128, silence_s=3.0) as found:
        found.wait_for(prefill=1, decode=2)
        yield found


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

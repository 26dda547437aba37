"""An application of replicas on a cluster of this machine, and what happens to its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

WAIT_S = 180.0  # only reached if something is broken
START_S = 300.0  # that a node or a process may need where many share the cores
# of a cluster of tests; Ray's own are 60, 60 and, in Serve, 5 and 10 s
PATIENT = {
    "RAY_worker_register_timeout_seconds": f"{START_S:.0f}",
    "RAY_gcs_server_request_timeout_seconds": f"{START_S:.0f}",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{START_S:.0f}",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
MODEL = "dsv4-demo"
LOCAL: dict[str, Any] = {"threads": 1, "num_cpus": 0.5, "events_host": "127.0.0.1"}


@dataclass(kw_only=True)
class Application:
    url: str
    handle: Callable[[str], Any]

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S)

    def state(self) -> dict[str, Any]:
        with self.http() as client:
            return client.get("/cache/state").raise_for_status().json()

    def metric(self, name: str) -> float:
        with self.http() as client:
            lines = client.get("/metrics").raise_for_status().text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def replicas(self, role: str) -> dict[str, dict[str, Any]]:
        found = self.state()["replicas"]
        return {name: about for name, about in found.items() if about["role"] == role}

    def wait_until(self, holds: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, f"not in time: {what}: {self.state()}"
            time.sleep(0.1)

    def wait_for(self, **counts: int) -> None:
        """Until the router knows this many replicas of each role."""
        self.wait_until(
            lambda: all(len(self.replicas(role)) == count for role, count in counts.items()),
            f"replicas {counts}",
            START_S,
        )

    def busy(self, role: str) -> dict[str, Any] | None:
        """A replica with work."""
        found = [about for about in self.replicas(role).values() if about["jobs"]]
        return found[0] if found else None

    def router_pid(self) -> int:
        return int(self.state()["pid"])


@dataclass(kw_only=True)
class Answer:
    """What a stream has brought, and when."""

    text: str = ""
    finish: str | None = None
    error: object = None
    usage: dict[str, Any] = field(default_factory=dict)
    came_s: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        pairs = zip(self.came_s, self.came_s[1:], strict=False)
        return max((later - before for before, later in pairs), default=0.0)


def stream(url: str, path: str, body: dict[str, Any], into: Answer) -> Answer:
    """One request's events, as they come."""
    asked = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **body}
    with (
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
        client.stream("POST", path, json=asked) as response,
    ):
        if response.status_code != 200:
            into.error = json.loads(response.read())
            return into
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                into.error = event["error"]
                continue
            into.usage = event.get("usage") or into.usage
            for choice in event["choices"]:
                into.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                into.finish = choice["finish_reason"] or into.finish
                into.came_s.append(time.monotonic())
    return into


@dataclass(kw_only=True)
class Streams:
    """Requests that run at once."""

    url: str
    path: str
    bodies: list[dict[str, Any]]
    answers: list[Answer] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> Streams:
        for body in self.bodies:
            answer = Answer()
            self.answers.append(answer)
            arguments = (self.url, self.path, body, answer)
            self.threads.append(threading.Thread(target=stream, args=arguments, daemon=True))
            self.threads[-1].start()
        return self

    def wait_for_pieces(self, count: int) -> None:
        """Until each has begun to answer."""
        until = time.monotonic() + WAIT_S
        while any(len(each.came_s) < count and each.error is None for each in self.answers):
            assert time.monotonic() < until, self.answers
            time.sleep(0.01)

    def join(self) -> list[Answer]:
        for thread in self.threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive(), "an answer does not end"
        return self.answers


@contextmanager
def patient_ray() -> Iterator[None]:
    """A node may take `START_S` to start. Ray gives its raylet 30 s, which no setting changes
    (`ray._private.node.Node.__init__`), and the raylet registers only after its two agents have:
    on a busy machine, Python processes that import for a minute."""
    from ray._private import services

    ask = services.get_node

    def wait(*arguments: Any, **named: Any) -> Any:
        until = time.monotonic() + START_S
        while True:
            try:
                return ask(*arguments, **named)
            except RuntimeError:  # it is not registered yet
                if time.monotonic() > until:
                    raise
            time.sleep(0.2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", wait)
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        yield


@contextmanager
def application(**options: Any) -> Iterator[Application]:
    """Replicas of the demo model, on a cluster of this machine alone."""
    import ray
    from ray import serve

    from dsv4.integrations.ray import RayOptions, build, launch

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with patient_ray():
        launch.start_cluster(8)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(RayOptions(**{**LOCAL, **options})), name="dsv4")
        yield Application(
            url=f"http://127.0.0.1:{port}",
            handle=lambda name: serve.get_deployment_handle(name, "dsv4"),
        )
    finally:
        serve.shutdown()
        ray.shutdown()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still until the block ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # Ray has replaced it meanwhile
            os.kill(pid, signal.SIGCONT)

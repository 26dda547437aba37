"""What `dsv4 serve --ray` does: joins a cluster or starts one on this machine, and serves until a
signal ends it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import ray
from ray import serve

from dsv4.errors import Dsv4Error, InvalidInput
from dsv4.integrations.ray.build import build
from dsv4.integrations.ray.options import RayOptions
from dsv4.serve import process

LOGGER = logging.getLogger("dsv4.ray")
APPLICATION = "dsv4"
STARTS = 3  # of a local cluster: a node that is not up in Ray's 30 s may be the next time
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
ENVIRONMENT = {  # of a cluster that is started here, unless it says otherwise
    "RAY_USAGE_STATS_ENABLED": "0",  # sends nothing elsewhere unasked
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5 are too few where cores are shared
    "RAY_worker_niceness": "0",  # Ray's 15 is for work in the background, not for who answers
}


class NoCluster(Dsv4Error, RuntimeError):
    """Ray does not start on this machine."""


def run(
    options: RayOptions,
    *,
    host: str,
    port: int,
    address: str | None = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serves on `host` and `port` until SIGINT or SIGTERM; a second one does not wait for running
    requests. `address` is that of a cluster of Ray; None starts one on this machine, which ends
    with this call. Raises InvalidInput for an address that cannot be listened on or joined, and
    NoCluster."""
    with process.listen(host, port) as listener:
        url, port = process.address(listener), listener.getsockname()[1]
    _join(options, address)
    if address is None:  # all replicas are here
        options = options.model_copy(update={"events_host": "127.0.0.1"})
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(build(options), name=APPLICATION, route_prefix="/")
        ended = _Ended()
        if on_start is not None:
            on_start(url)
        ended.wait()
        LOGGER.info("draining")
        _drain(options.drain_s)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def start_cluster(cpus: int) -> None:
    """A cluster in processes of this machine, until `ray.shutdown`. `cpus` is what Ray counts: they
    need not be there, and processes share what is. Raises NoCluster."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for left in reversed(range(STARTS)):
        try:
            ray.init(address="local", include_dashboard=False, num_cpus=cpus, **QUIET)
            return
        except Exception as error:  # Ray has no type for a node that is too slow
            ray.shutdown()
            if not left:
                raise NoCluster(
                    f"Ray did not start on this machine in {STARTS} attempts: {error} Its logs are "
                    f"under /tmp/ray/session_latest/logs; on a busy machine, try when it is less so"
                ) from error
            LOGGER.warning("Ray did not start (%s): once more", error)


def _drain(seconds: float) -> None:
    """Takes the application away, and waits until its streams have ended, for this long."""
    serve.delete(APPLICATION, _blocking=False)  # Ray's own waiting raises after a minute
    until = time.monotonic() + seconds
    while APPLICATION in serve.status().applications and time.monotonic() < until:
        time.sleep(0.2)


def _join(options: RayOptions, address: str | None) -> None:
    if address is None:
        replicas = options.decoders + (options.prefill or 0)
        start_cluster(max(os.cpu_count() or 1, round(replicas * options.num_cpus + 1)))
        return
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"the cluster at {address!r} cannot be joined: {error}") from error


class _Ended:
    """The first signal ends the waiting, the second the process."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()

    def wait(self) -> None:
        while not self._event.wait(1.0):
            pass

"""`dsv4 serve --ray` as a process. Nightly, except for what it refuses."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from dsv4.cli import app
from tests.ray.application import WAIT_S, Streams
from tests.ray.loads import long_answers

pytest.importorskip("ray", reason="replicas on Ray need the extra ray: pip install 'dsv4[ray]'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "2"), "are of --ray: add it"),
        (("--ray", "--replicas", "1", "--prefill", "1"), "or prefill and decode"),
        (("--ray", "--events", "tcp://127.0.0.1:0"), "leave them out"),
        (("--ray", "--routing", "random"), "'round-robin'"),
    ],
)
def test_what_cannot_be_is_one_line(options: tuple[str, ...], message: str):
    done = CliRunner().invoke(app, ["serve", *options])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_cluster_that_does_not_start_is_tried_again_and_then_said(
    monkeypatch: pytest.MonkeyPatch,
):
    import ray

    from dsv4.integrations.ray import launch

    for name in launch.ENVIRONMENT:
        monkeypatch.setenv(name, launch.ENVIRONMENT[name])
    begun: list[str] = []

    def init(**_: object) -> None:
        begun.append("start")
        if len(begun) < works_at:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: begun.append("end"))
    works_at = 3
    launch.start_cluster(2)
    assert begun == ["start", "end", "start"]
    begun.clear()
    works_at = 100
    with pytest.raises(launch.NoCluster, match="in 3 attempts: The current node timed out"):
        launch.start_cluster(2)
    assert begun == ["start", "end"] * 3


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_first_signal_lets_streams_end_and_leaves_no_process():
    options = ("--ray", "--replicas", "2", "--port", "0", "--context", "1024")
    server = subprocess.Popen(
        [sys.executable, "-m", "dsv4", "serve", *options], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        url = re.search(r"http://\S+", first)
        assert url is not None, first
        streams = Streams(url=url[0], path="/v1/completions", bodies=long_answers(4, 200)).start()
        streams.wait_for_pieces(8)
        children = psutil.Process(server.pid).children(recursive=True)
        assert len(children) > 5  # Ray's, and replicas
        began_s = time.monotonic()
        server.send_signal(signal.SIGINT)
        for answer in streams.join():
            assert answer.error is None
            assert answer.usage["completion_tokens"] == 200
        assert server.wait(2 * WAIT_S) == 0
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert not alive
        print(f"\nended {time.monotonic() - began_s:.1f} s after the signal")
    finally:
        if server.poll() is None:
            server.kill()

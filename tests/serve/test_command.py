"""`dsv4 serve` as a process: what it prints, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dsv4.simulate.trace import read_trace
from tests.serve.serving import WAIT_S

ROOT = Path(__file__).parents[2]


@contextmanager
def command(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "dsv4.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r" at (http://[^\s\"]+)", first)
        assert found, first + process.stderr.read()  # type: ignore[union-attr]
        as_json = "--json-logs" in options
        curl = json.loads(first)["curl"] if as_json else process.stdout.readline()
        assert curl.startswith(f"curl {found[1]}/v1/chat/completions")
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def until_it_answers(url: str) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
        assert client.get(f"{url}/ready", timeout=WAIT_S).json() == {"ready": True}


def test_all_that_a_server_prints_is_a_trace(tmp_path: Path) -> None:
    """Of one file that has both its outputs, as `> log 2>&1` makes it."""
    log = tmp_path / "log"
    with log.open("w") as out:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, "-m", "dsv4.cli", "serve", "--port", "0", "--json-logs"]
        process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            until = time.monotonic() + WAIT_S
            while not (found := re.search(r" at (http://[^\s\"]+)", log.read_text())):
                assert time.monotonic() < until
                time.sleep(0.05)
            until_it_answers(found[1])
            ask = {"model": "dsv4-demo", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
            httpx.post(f"{found[1]}/v1/completions", json=ask, timeout=WAIT_S).raise_for_status()
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
    (request,) = read_trace(log)
    assert request.output_tokens == 3


def test_ctrl_c_drains_and_a_second_one_ends_at_once() -> None:
    """A stream that runs goes on to its end after the first. In the second life one that would run
    for minutes is cut."""
    ask = {"model": "dsv4-demo", "prompt": "x", "stream": True, "ignore_eos": True}
    with command("--json-logs") as (process, url), httpx.Client(timeout=WAIT_S) as client:
        until_it_answers(url)
        body = {**ask, "max_tokens": 60}
        with client.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            rest = [*lines]
        assert rest[-2:] == ["data: [DONE]", ""]
        _, logs = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        entries = [json.loads(line) for line in logs.splitlines()]
        said = [re.sub(r"[\d.]+ (s|requests left)$", r"\1", each["message"]) for each in entries]
        assert {"draining: requests left", "GET /ready 200 s"} <= {*said}
    with command("--drain", "600") as (process, url), httpx.Client(timeout=WAIT_S) as client:
        until_it_answers(url)
        body = {**ask, "max_tokens": 3900}
        with client.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            while "draining" not in process.stderr.readline():  # type: ignore[union-attr]
                pass
            process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        _, logs = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130  # without waiting until Python has taken torch apart
        assert "ending at once: 1 requests left" in logs
        assert "Traceback" not in logs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--memory", "1MiB"), "PoolTooSmall"),
        (("--memory", "lots"), "InvalidInput: 'lots'"),
        (("--context", "1M"), "has 4096 positions"),
        (("--host", "203.0.113.1"), "choose another one with --port, or 0 for any"),
        (("/nowhere/at/all",), "/nowhere/at/all does not exist: give a checkpoint's directory"),
        (("--api-key", " "), "the API key is empty"),
        (("--host-memory", "1KiB"), "give more"),
        (("--encrypt",), "encrypt=True"),
        (("--key-file", "/nowhere"), "cannot be read"),
        (("--events", "nowhere"), "InvalidInput"),
        (("--events-replay", "tcp://127.0.0.1:*"), "give --events too"),
    ],
)
def test_what_cannot_be_is_one_line(options: tuple[str, ...], says: str) -> None:
    from typer.testing import CliRunner

    from dsv4.cli import app

    found = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert found.exit_code == 2
    assert says in found.output
    assert len(found.output.splitlines()) == 1

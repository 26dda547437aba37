"""Dynamo's own indexer reads our events, and knows of every prompt what we know. It is not among
the dependencies: `make .venv-dynamo` installs it, and DSV4_DYNAMO says where."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4 import EventPublisher
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from tests.events.consumer import TIMEOUT_S
from tests.events.lives import BLOCK, SCHEMA, Asked, Lives, cached, make
from tests.support.tiers import PATIENT

DYNAMO = os.environ.get("DSV4_DYNAMO", "")
pytestmark = pytest.mark.skipif(not DYNAMO, reason="DSV4_DYNAMO does not say where Dynamo is")
ANY = "tcp://127.0.0.1:*"


class Indexer:
    """The process, and what it is asked over HTTP."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"],
            env={**os.environ, "PYTHONPATH": DYNAMO, "DYN_LOG": "warn"},
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self.connection = http.client.HTTPConnection("127.0.0.1", self.port)
                self.connection.request("GET", "/health")
                self.connection.getresponse().read()
                return
            except ConnectionError:
                assert self.process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.02)

    def post(self, path: str, **body: Any) -> Any:
        self.connection.request(
            "POST", path, json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = self.connection.getresponse()
        text = answer.read()
        assert answer.status < 300, text
        return json.loads(text)

    def matched(self, asked: Asked) -> list[int]:
        """Blocks on the device, then on in host memory, then on in storage."""
        ids, salt = asked
        salted = {} if salt is None else {"cache_salt": salt}
        answer = self.post("/query", token_ids=ids, model_name="tiny", **salted)
        found = answer["instances"].get("1")
        if found is None:
            return [0, 0, 0]
        assert found["longest_matched"] == max(found["gpu"], found["cpu"], found["disk"])
        return [found[name] // BLOCK for name in ("gpu", "cpu", "disk")]

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    started = Indexer(tmp_path / "log")
    yield started
    started.stop()


class Lossy:
    """A socket that loses some of what is published while `loses` is set."""

    def __init__(self, real: Any) -> None:
        self.real, self.draw, self.loses, self.lost = real, random.Random(1), True, 0

    def send_multipart(self, *message: Any) -> None:
        if self.loses and self.draw.random() < 0.3:
            self.lost += 1
        else:
            self.real.send_multipart(*message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def assert_same(indexer: Indexer, manager: Any, tiers: list[Any], asked: list[Asked]) -> int:
    """Of all prompts, once it has read everything; returns the longest."""
    wanted = [cached(manager, each, tiers=tiers) for each in asked]
    until = time.monotonic() + TIMEOUT_S
    for each, ours in zip(asked, wanted, strict=True):
        while (theirs := indexer.matched(each)) != ours:
            assert time.monotonic() < until, (theirs, ours, indexer.log.read_text()[-2000:])
            time.sleep(0.01)
    return max(ours[-1] for ours in wanted)


@pytest.mark.parametrize("buffer_batches", [10_000, 3])
def test_dynamos_indexer_knows_what_is_cached(
    buffer_batches: int, tmp_path: Path, indexer: Indexer
) -> None:
    """After lives with evictions and tiers, of which it misses messages; and after a restart."""
    room = 12 * SCHEMA.bytes.block
    endpoint = replay = ANY
    first = True
    for seed in (1, 2):
        tiers: list[Any] = [
            HostTier(room, limits=PATIENT),
            DiskTier(tmp_path / f"tier {seed}", 3 * room, limits=PATIENT),
        ]
        manager = make(num_blocks=16, tiers=tiers)
        publisher = EventPublisher(manager, endpoint, replay=replay, buffer_batches=buffer_batches)
        lossy = publisher._sender._publisher = Lossy(publisher._sender._publisher)
        if first:
            endpoint, replay = publisher.endpoint, str(publisher.replay_endpoint)
            worker = {"instance_id": 1, "model_name": "tiny", "block_size": BLOCK}
            indexer.post("/register", **worker, endpoint=endpoint, replay_endpoint=replay)
            first = False
        lives = Lives(manager, seed)
        longest = 0
        for _ in range(2):
            lossy.loses = True
            lives.some(20)
            lossy.loses = False
            lives.some(1)
            longest = max(longest, assert_same(indexer, manager, tiers, lives.questions(250)))
        assert longest >= 4
        assert lossy.lost > 3
        stats = publisher.stats()
        assert stats.replays > 0
        assert (stats.snapshots > 0) == (buffer_batches == 3)
        publisher.close(TIMEOUT_S)
        for tier in tiers:
            tier.close(TIMEOUT_S)

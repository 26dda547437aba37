"""Object storage's own faults, with a real S3 server: killed, stopped, damaged, forbidden."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dsv4.errors import InvalidInput
from dsv4.tiers import object as object_module
from dsv4.tiers.object import FIRST_ASKED, RETRIES, ObjectTier
from dsv4.tiers.record import Kind, Label, Reason
from dsv4.tiers.tier import FAILURES, Limits, State
from tests.support.tiers import (
    PATIENT,
    Memory,
    assert_never_wrong,
    chain,
    file_bytes,
    found,
    free_port,
    label,
    load,
    s3_config,
    s3_server,
    states,
    stop,
    store,
    until,
    wait,
)

QUICK = Limits(threads=4, deadline_s=3.0, back_off_s=0.2)  # where a deadline is to pass


@contextmanager
def connected(port: int, place: str = "s3://bucket/faults", **options: Any) -> Iterator[ObjectTier]:
    options = {"limits": PATIENT, **options}
    tier = ObjectTier(place, config=s3_config(port), allow_http=True, **options)
    try:
        yield tier
    finally:
        tier.close(5.0)


class Between:
    """Stands between a tier and the server: writes down what is asked, and answers some of it by
    itself where `fault` says with which status."""

    def __init__(self, port: int) -> None:
        self.asked: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.command, self.path))
                status = outer.fault(self.command, self.path)
                if status is not None:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
                server.request(self.command, self.path, body, dict(self.headers))
                answer = server.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
                server.close()

            do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port


@pytest.fixture
def between(s3_port: int) -> Iterator[Between]:
    made = Between(s3_port)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def rested(tier: ObjectTier) -> None:
    until(lambda: not tier.stats().backing_off)


def test_objects_are_named_by_their_keys(s3_port: int, memory: Memory) -> None:
    """Any S3 client finds them, under the prefix."""
    wanted = label("named")
    with connected(s3_port, "s3://bucket/one/two") as tier:
        assert store(tier, [memory.filled(wanted, pieces=3)]) == [State.DONE]
        import obstore

        bare = obstore.store.from_url(
            "s3://bucket", config=s3_config(s3_port), client_options={"allow_http": True}
        )
        data = bytes(obstore.get(bare, f"one/two/{wanted.key}").bytes())
        assert data == file_bytes(wanted)[: wanted.record_bytes]


def test_damaged_objects_are_refused_and_deleted(s3_port: int, memory: Memory) -> None:
    good = label("damaged", payload_bytes=20_000)
    whole = bytes(file_bytes(good)[: good.record_bytes])
    flipped, other = bytearray(whole), file_bytes(label("b", payload_bytes=20_000))
    flipped[9_000] ^= 8
    with connected(s3_port) as tier:
        for data, reason in (
            (bytes(flipped), Reason.PAYLOAD_SUM),
            (bytes(len(whole)), Reason.MAGIC),
            (bytes(other[: len(whole)]), Reason.DIGEST),
            (whole[:9_000], Reason.SHORT),
            (whole + b"\0", Reason.PAYLOAD_BYTES),
        ):
            tier._obstore.put(tier._bucket, str(good.key), data)
            progress = wait(tier, tier.load([memory.blank(good)]))
            assert states(progress) == [State.REFUSED]
            refusal = progress.outcomes[0].refusal
            assert refusal is not None
            assert refusal.reason is reason
            assert found(tier, [good]) == [False]
        assert store(tier, [memory.filled(good)]) == [State.DONE]
        assert assert_never_wrong(tier, memory, [good]) == [State.DONE]


def test_a_server_that_is_killed_stopped_and_comes_back(memory: Memory) -> None:
    port, labels = free_port(), chain("a", 3)
    with connected(port) as tier, connected(port, limits=QUICK) as quick:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DROPPED] * 3
        with s3_server(port) as server:
            rested(tier)
            assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 3
            assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 3

            stop(server)
            ticket = quick.load([memory.blank(each) for each in labels])
            assert states(wait(quick, ticket, settled=False)) == [State.MISSING] * 3
            until(lambda: quick.poll(ticket).settled)  # requests end with the deadline
            os.kill(server.pid, signal.SIGCONT)
            assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 3
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            assert assert_never_wrong(tier, memory, labels) == [State.MISSING] * 3
            rested(tier)
            assert found(tier, labels) == [False] * 3
            assert store(tier, [memory.filled(label("b"))]) == [State.DROPPED]
        assert tier.stats().outages >= 3


def test_a_bucket_that_does_not_exist_costs_records(s3_port: int, memory: Memory) -> None:
    with connected(s3_port, "s3://nowhere/at/all") as tier:
        assert store(tier, [memory.filled(label("a"))]) == [State.DROPPED]
        rested(tier)
        assert load(tier, [memory.blank(label("a"))]) == [State.MISSING]


def states_behind(block: Label, count: int) -> list[Label]:
    """As a prompt asks for them: the longest first."""
    return [
        label(("state", n, block.digest), kind=Kind.STATE, parent=block.digest, tokens=n)
        for n in range(block.tokens + count - 1, block.tokens - 1, -1)
    ]


def test_a_cold_prompt_costs_a_few_requests(between: Between, memory: Memory) -> None:
    """Not one for each block and for each length that a state might have."""
    cold = chain("cold", 1000)
    with connected(between.port) as tier:
        assert found(tier, cold) == [False] * 1000
        assert [method for method, _ in between.asked] == ["HEAD"] * FIRST_ASKED
        between.asked.clear()
        assert found(tier, states_behind(cold[0], 127)) == [False] * 127
        assert [method for method, _ in between.asked] == ["GET", "HEAD"]


def test_blocks_are_found_up_to_the_first_that_is_missing(between: Between, memory: Memory) -> None:
    labels = chain("found", 90)
    with connected(between.port) as tier:
        there = [*labels[:70], *labels[71:75]]
        assert store(tier, [memory.filled(each) for each in there]) == [State.DONE] * 74
        between.asked.clear()
        assert found(tier, labels)[:71] == [True] * 70 + [False]
        assert len(between.asked) <= 90
        assert found(tier, labels[71:]) == [True] * 4 + [False] * 15
        others = [label(("alone", n), kind=Kind.SNAPSHOT) for n in range(5)]
        assert store(tier, [memory.filled(each) for each in others[1::2]]) == [State.DONE] * 2
        assert found(tier, [*others, *labels[:3]]) == [False, True] * 2 + [False] + [True] * 3


def test_a_long_lookup_ends_with_its_deadline(
    between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its requests is answered in time, and all of them would take three deadlines."""
    monkeypatch.setattr(object_module, "ASKED_AT_ONCE", 4)
    labels = [label(("slow", n), kind=Kind.SNAPSHOT) for n in range(40)]

    def slowly(method: str, path: str) -> int:
        time.sleep(QUICK.deadline_s * 0.3)
        return 404

    between.fault = slowly
    with connected(between.port, limits=QUICK) as tier:
        began = time.monotonic()
        assert found(tier, labels) == [False] * 40
        assert time.monotonic() - began < 2 * QUICK.deadline_s


@pytest.mark.parametrize("most", [1000, 2])
def test_states_are_found_by_one_listing(
    between: Between, memory: Memory, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Where there are more than a listing says, each one is asked for."""
    monkeypatch.setattr("dsv4.tiers.object.MOST_LISTED", most)
    block = label(("block", most))
    states_of, there = states_behind(block, 127), (3, 60, 126)
    with connected(between.port, "s3://bucket/some/place") as tier:
        records = [memory.filled(states_of[nth]) for nth in there]
        assert store(tier, records) == [State.DONE] * 3
        between.asked.clear()
        assert found(tier, states_of) == [nth in there for nth in range(127)]
        assert len(between.asked) == (5 if most == 1000 else 128)
        tier.drop([states_of[60].key])
        until(lambda: found(tier, states_of)[60] is False)
        assert load(tier, [memory.blank(states_of[3])]) == [State.DONE]


def test_a_server_that_fails_now_and_then_costs_no_record(between: Between, memory: Memory) -> None:
    """One request in eight, where one in a thousand left a quarter of the blocks. None of them
    twice: chance alone would refuse some request all its repetitions."""
    labels, refused = chain("now and then", 64), set[tuple[str, str]]()

    def now_and_then(method: str, path: str) -> int | None:
        if len(between.asked) % 8 or (method, path) in refused:
            return None
        refused.add((method, path))
        return 503

    between.fault = now_and_then
    with connected(between.port) as tier:
        assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 64
        assert found(tier, labels) == [True] * 64
        assert assert_never_wrong(tier, memory, labels) == [State.DONE] * 64
        assert (tier.stats().outages, tier.stats().backing_off) == (0, False)
        assert len(refused) >= len(labels) // 8


def test_repetitions_are_bounded_and_several_failures_are_a_rest(
    between: Between, memory: Memory
) -> None:
    labels = chain("never", 3 * FAILURES)
    between.fault = lambda method, path: 500
    limits = Limits(threads=2, deadline_s=60.0, back_off_s=600.0)
    with connected(between.port, limits=limits) as tier:
        begin = time.monotonic()
        assert load(tier, [memory.blank(labels[0])]) == [State.MISSING]
        assert time.monotonic() - begin < limits.deadline_s
        assert len(between.asked) == 1 + RETRIES
        assert not tier.stats().backing_off
        for each in labels[1:]:
            load(tier, [memory.blank(each)])
        assert tier.stats().backing_off
        assert len(between.asked) == FAILURES * (1 + RETRIES)


def test_a_conflict_is_no_record(between: Between, memory: Memory) -> None:
    """S3 says 409 while another request for the name is under way: nothing need be there."""
    wanted = label("conflict")
    between.fault = lambda method, path: 409 if method == "PUT" else None
    with connected(between.port) as tier:
        assert store(tier, [memory.filled(wanted)]) == [State.DROPPED]
        between.fault = lambda method, path: None
        assert found(tier, [wanted]) == [False]
        assert store(tier, [memory.filled(wanted)]) == [State.DONE]
        between.fault = lambda method, path: 409 if method == "PUT" else None
        assert store(tier, [memory.filled(wanted)]) == [State.DONE]  # it is there


@pytest.mark.parametrize("url", ["nonsense", "ftp://a/b", "s3://", None, 3])
def test_a_place_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(InvalidInput, match="is not a place for objects"):
        ObjectTier(url)

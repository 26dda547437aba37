"""Replicas that come and go while others stream: one that starts anew under load, and fewer of them
than before. Each answer has the tokens of an undisturbed run. Prints how long a stream stood still.

Nightly: a cluster of its own, whose replicas run prompts and answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.ray.application import LOCAL, Answer, Application, Streams, application, kill
from tests.ray.undisturbed import SERVER, bodies, check, nothing_is_left, undisturbed

pytest.importorskip("ray", reason="replicas on Ray need the extra ray: pip install 'dsv4[ray]'")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

DRAIN_S = 2.0  # that a replica has which leaves: shorter than its streams


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return undisturbed()


@pytest.fixture(scope="module")
def together() -> Iterator[Application]:
    with application(replicas=2, server=SERVER, drain_s=DRAIN_S) as found:
        found.wait_for(decode=2)
        yield found


def test_a_replica_starts_anew_while_the_other_one_streams(
    together: Application, expected: list[Answer]
):
    """As much as it can, until the new one takes its part."""
    before = {about["pid"] for about in together.replicas("decode").values()}
    kill(before.pop())
    pids, rounds = before, 0
    while len(pids) < 2 or rounds < 2:
        streams = Streams(url=together.url, path="/v1/completions", bodies=bodies()).start()
        check(streams, expected, f"a replica starts anew, round {rounds}")
        pids, rounds = {each["pid"] for each in together.replicas("decode").values()}, rounds + 1
        assert rounds < 100, "it does not start"
    streams = Streams(url=together.url, path="/v1/completions", bodies=bodies()).start()
    check(streams, expected, "a replica has started anew")
    nothing_is_left(together)


def test_replicas_may_be_scaled_down_while_they_stream(
    together: Application, expected: list[Answer]
):
    """The one that stays is new too: Ray Serve takes it for another version."""
    from ray import serve

    from dsv4.integrations.ray import RayOptions, build

    streams = Streams(url=together.url, path="/v1/completions", bodies=bodies()).start()
    streams.wait_for_pieces(8)
    fewer = build(RayOptions(**{**LOCAL, "replicas": 1, "server": SERVER, "drain_s": DRAIN_S}))
    scaling = threading.Thread(target=serve.run, args=(fewer,), kwargs={"name": "dsv4"})
    scaling.start()
    try:
        check(streams, expected, "scale down to one replica")
    finally:
        scaling.join()
    together.wait_for(decode=1)
    nothing_is_left(together)

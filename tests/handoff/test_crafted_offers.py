"""Offers that somebody made on purpose, with a right sum: they are refused, or cost what a read
that fails costs. No process ends for them, and nobody ends offers that they do not have."""

from __future__ import annotations

import hmac
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsv4.cache.handoff import link as links
from dsv4.cache.handoff import offer as offers
from dsv4.cache.handoff import probe as probes
from dsv4.cache.handoff.agent import make_agent
from dsv4.cache.handoff.arrivals import _paired
from dsv4.cache.handoff.lease import taken_note
from dsv4.cache.handoff.link import Link
from dsv4.cache.handoff.offer import Offer
from dsv4.cache.handoff.options import MOST_NAME, HandoffOptions
from dsv4.cache.handoff.probe import Probe
from dsv4.errors import InvalidInput, OfferError
from dsv4.tiers.record import payload_sum
from tests.handoff.test_processes import remote
from tests.support.faults import everything
from tests.support.handoff import (
    PATIENT_S,
    assert_nothing_left,
    close,
    grown,
    handing,
    side,
    until,
)
from tests.support.lives import Text, assert_cold
from tests.support.stack import Stack
from tests.support.tiers import PROJECT, process, python

TOKENS = 900


@pytest.fixture(scope="module")
def owner() -> Iterator[Stack]:
    stack = side("prefill")
    yield stack
    close(stack)


@pytest.fixture(scope="module")
def taker() -> Iterator[Stack]:
    stack = side("decode", max_requests=8)
    yield stack
    close(stack)


@pytest.fixture(autouse=True)
def _nothing_is_left(owner: Stack, taker: Stack) -> Iterator[None]:
    yield
    assert_nothing_left(owner, taker)


def offered(owner: Stack, seed: int, length: int = 300, **options: Any) -> bytes:
    request = grown(owner, Text.random(owner, seed, TOKENS), length)
    packed = owner.manager.handoff.offer(request, **options)
    owner.manager.release_request(request)
    return packed


def reason(taker: Stack, packed: bytes, **options: Any) -> str:
    with pytest.raises(OfferError) as error:
        taker.manager.handoff.accept(packed, **options).wait()
    return error.value.reason


# ---- NIXL's metadata -----------------------------------------------------------------------------


def fates(changes: list[tuple[int, int]]) -> list[list[Any]]:
    """What comes of offers with a byte of metadata changed, in one process, which lives on."""
    with process(
        *(sys.executable, "-m", "tests.handoff.changed", json.dumps(changes)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=PROJECT,
    ) as child:
        assert child.stdout is not None
        lines = [json.loads(line) for line in child.stdout]
        assert child.wait() == 0, lines[-1:]
    assert lines[-1] == "through"
    return lines[1:-1]


def test_no_changed_byte_of_metadata_ends_a_taker():
    """The first three ended it: an assertion of UCX, and two readings past the end."""
    changes = [(109, 2), (144, 2), (288, 2)]
    changes += [(at, 1 << at % 8) for at in range(23, 440, 140)]
    found = fates(changes)
    assert [found[nth][:2] for nth in range(len(changes))] == [list(each) for each in changes]
    assert any("signal" in what for *_, what in found)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flip", [1, 2, 16, 128])
def test_no_byte_of_metadata_ends_a_taker(flip: int):
    found = fates([(at, flip) for at in range(440)])
    assert len(found) == 440


def test_a_peer_is_met_by_its_own_metadata_alone(owner: Stack, taker: Stack):
    """Under a name that the taker knows, or is to know, another's metadata says nothing."""
    other = side("prefill")
    known = offered(owner, 1, takers=9)
    theirs = Offer.unpack(offered(other, 2))
    for order in ("before", "after"):
        crafted = replace(Offer.unpack(known), metadata=theirs.metadata).pack()
        assert reason(taker, crafted) == "failed", order
        assert taker.manager.handoff.accept(known).wait().length == 300
    crafted = replace(theirs, link=handing(taker).side.link.name).pack()
    assert reason(taker, crafted) == "failed"
    assert_nothing_left(other)
    close(other)


def test_metadata_is_tried_once_for_each_peer(
    owner: Stack, taker: Stack, monkeypatch: pytest.MonkeyPatch
):
    """However many arrivals wait for it, so many processes at most."""
    made: list[Probe] = []

    class Counted(Probe):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(links, "Probe", Counted)
    other = side("prefill")
    packed = offered(other, 3, 60, takers=20)
    arrivals = [taker.manager.handoff.accept(packed) for _ in range(6)]
    for arrival in arrivals:
        taker.manager.release_request(arrival.wait())
    assert 1 <= len(made) <= links._PROBES
    count = len(made)
    assert taker.manager.handoff.accept(packed).wait().length == 60
    assert len(made) == count
    assert all(probe.over for probe in made)
    assert_nothing_left(other)
    close(other)


def test_a_probe_ends_with_its_arrival(taker: Stack, monkeypatch: pytest.MonkeyPatch):
    """Its owner stands still: late, and nothing is kept, for nothing was begun here."""
    seen: list[Probe] = []

    class Seen(Probe):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            seen.append(self)

    monkeypatch.setattr(links, "Probe", Seen)
    with remote("stopped") as stopped:
        packed = stopped.offer(4, 300)
        with stopped.stopped():
            arrival = taker.manager.handoff.accept(packed)
            until(taker.manager, lambda: bool(seen))
            assert not seen[0].over
            arrival.deadline = time.monotonic()
            with pytest.raises(OfferError) as error:
                arrival.wait()
            assert error.value.reason == "late"
            until(taker.manager, lambda: not handing(taker).arrivals.open)
            assert taker.manager.stats().blocks_in_flight == 0
            assert seen[0]._process.returncode == -signal.SIGKILL
        assert taker.manager.handoff.accept(packed).wait().length == 300


def test_a_probe_is_understood_whatever_ucx_logs(taker: Stack, monkeypatch: pytest.MonkeyPatch):
    other = side("prefill")
    packed = offered(other, 13)
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    assert taker.manager.handoff.accept(packed).wait().length == 300
    assert_nothing_left(other)
    close(other)


def test_a_probe_that_cannot_be_started_fails_the_arrival(
    taker: Stack, monkeypatch: pytest.MonkeyPatch
):
    other = side("prefill")
    packed = offered(other, 5)
    with monkeypatch.context() as patch:
        patch.setattr(probes, "get_executable", lambda: "/nowhere/python")
        assert reason(taker, packed) == "failed"
    assert taker.manager.handoff.accept(packed).wait().length == 300
    assert_nothing_left(other)
    close(other)


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_a_forgotten_probe_ends_itself(how: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever became of SIGALRM in the process that started it."""
    monkeypatch.setattr(
        probes, "_CODE", probes._CODE.replace("main()", "import dsv4.cache.handoff.probe as p; "
        "import time; p.PROBE_S = 1; p._read = lambda *_: time.sleep(60); p.main()")
    )  # fmt: skip
    before = signal.getsignal(signal.SIGALRM)
    if how == "ignored":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        probe = Probe("owner", b"", 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    try:
        assert probe._process.wait(timeout=30) == -signal.SIGALRM
    finally:
        probe.close()


def test_a_path_that_python_passes_over_is_not_a_probes(
    taker: Stack, monkeypatch: pytest.MonkeyPatch
):
    other = side("prefill")
    monkeypatch.setattr(sys, "path", [*sys.path, PROJECT])  # no string
    assert taker.manager.handoff.accept(offered(other, 17)).wait().length == 300
    assert_nothing_left(other)
    close(other)


# ---- what an offer says --------------------------------------------------------------------------


def test_more_than_any_owner_says_is_refused_at_once(owner: Stack, taker: Stack):
    offer, before = Offer.unpack(offered(owner, 6)), everything(taker.manager)
    (start, _), *_ = offer.state_pieces
    wrong: list[dict[str, Any]] = [
        {"state_pieces": tuple((start + n, 1) for n in range(150_000))},
        {"state_pieces": ((start, 1),) * (offers.MOST_PIECES + 1)},
        {"link": "x" * (offers.MOST_LINK_BYTES + 1)},
        {"metadata": bytes(offers.MOST_METADATA_BYTES + 1)},
        {"words": "x" * (offers.MOST_WORDS_BYTES + 1)},
        {"rows": (0,) * (offers.MOST_BLOCKS + 1), "generations": (0,) * (offers.MOST_BLOCKS + 1)},
        {"tokens": offers.MOST_TOKENS + 1, "ids": None, "root": None},
    ]
    for each in wrong:
        packed = replace(offer, sums=None, **each).pack()
        begun = time.thread_time()
        with pytest.raises(OfferError, match="at most") as error:
            taker.manager.handoff.accept(packed)
        assert error.value.reason == "damaged"
        assert time.thread_time() - begun < 0.5  # 2.4 MB of pieces took 3.2 s
    with pytest.raises(OfferError, match="no offer has more"):
        taker.manager.handoff.accept(bytes(offers.MOST_BYTES + 1))
    assert everything(taker.manager) == before


def test_pieces_are_paired_in_the_time_that_they_need():
    class Few:
        pieces = (memoryview(bytearray(200_000)),)

    begun = time.thread_time()
    rows = _paired(Few, [(n, 1) for n in range(200_000)])  # type: ignore[arg-type]
    assert len(rows) == 200_000
    assert time.thread_time() - begun < 2.0


def test_an_offer_writes_no_lines_into_logs(owner: Stack, taker: Stack):
    offer = Offer.unpack(offered(owner, 7))
    crafted = replace(
        offer, link="a\nCRITICAL all is lost", fingerprint=bytes(32), words="b\x1b[31m"
    )
    with pytest.raises(OfferError) as error:
        taker.manager.handoff.accept(crafted.pack())
    assert error.value.reason == "schema"
    assert str(error.value).isprintable()
    with pytest.raises(OfferError) as error:
        taker.manager.handoff.accept(replace(crafted, fingerprint=offer.fingerprint).pack()).wait()
    assert str(error.value).isprintable()
    for name in ("two\nlines", "x" * (MOST_NAME + 1)):
        with pytest.raises(InvalidInput, match="printable"):
            HandoffOptions(name=name)


def test_an_offer_of_an_older_version_says_so(owner: Stack, taker: Stack):
    packed = bytearray(offered(owner, 8))
    packed[8:10] = (1).to_bytes(2, "little")
    packed[-16:] = payload_sum([memoryview(packed)[:-16]])
    assert reason(taker, bytes(packed)) == "version"


# ---- who made it ---------------------------------------------------------------------------------


def signing(key: bytes) -> dict[str, Any]:
    return {
        "sign": lambda body: hmac.digest(key, body, "sha256"),
        "verify": lambda body, tag: hmac.compare_digest(hmac.digest(key, body, "sha256"), tag),
    }


def test_a_manager_takes_only_what_is_signed_as_it_wants(owner: Stack, taker: Stack):
    one, other = (side(name, handoff=signing(b"a key")) for name in ("prefill", "decode"))
    stranger = side("prefill", handoff=signing(b"another key"))
    text, before = Text.random(one, 9, TOKENS), everything(other.manager)
    packed = offered(one, 9, takers=2)
    unsigned, strange = offered(owner, 9), offered(stranger, 9)
    offer = Offer.unpack(packed)
    ids = offer.ids.copy() if offer.ids is not None else None
    forged = [
        replace(offer, rows=offer.rows[::-1]).pack(),
        replace(offer, metadata=offer.metadata[:-1] + b"!").pack(),
        replace(offer, ids=ids).pack(lambda _: packed[-48:-16]),  # the same, and signed
        replace(offer, tokens=299, ids=None).pack(lambda _: packed[-48:-16]),
    ]
    same = forged.pop(2)
    assert same == packed
    for each in (unsigned, strange, *forged):
        assert reason(other, each) == "untrusted"
    assert everything(other.manager) == before
    assert_cold(other, other.manager.handoff.accept(packed).wait(), text.stream)
    assert taker.manager.handoff.accept(packed).wait().length == 300  # it asks for no signature
    assert one.manager.handoff.withdraw(packed) in (True, False)
    assert_nothing_left(one, other, stranger)
    close(one, other, stranger)


def test_a_signature_is_not_read_past_its_bound(owner: Stack, taker: Stack):
    offer = Offer.unpack(offered(owner, 10, takers=2))
    assert reason(taker, offer.pack(lambda _: bytes(offers.MOST_SIGNATURE_BYTES + 1))) == "damaged"
    copy = taker.manager.handoff.accept(
        offer.pack(lambda _: bytes(offers.MOST_SIGNATURE_BYTES))
    ).wait()
    assert copy.length == 300
    with pytest.raises(InvalidInput, match="verify"):
        HandoffOptions(name="x", verify=b"a key")  # type: ignore[arg-type]


# ---- what takers tell ----------------------------------------------------------------------------


class Stranger:
    """Somebody with NIXL and an offer, who says what he likes."""

    def __init__(self, offer: Offer) -> None:
        self.agent, self.peer = make_agent(f"stranger-{os.urandom(8).hex()}"), offer.link
        self.agent.add_remote_agent(offer.metadata)

    def tell(self, *notes: bytes) -> None:
        for note in notes:
            self.agent.send_notif(self.peer, note)


def test_who_has_one_offer_ends_no_other(owner: Stack):
    request = grown(owner, Text.random(owner, 11, TOKENS), 300)
    mine, *_ = packed = [owner.manager.handoff.offer(request) for _ in range(4)]
    names = [Offer.unpack(each).name for each in packed]
    leases, stranger = handing(owner).leases, Stranger(Offer.unpack(mine))
    taken = leases.taken
    guesses: list[bytes] = []
    for step in range(-8, 9):  # of a count at either end, as there was
        for at in (slice(0, 8), slice(16, 24)):
            guess = bytearray(names[0])
            count = int.from_bytes(guess[at], "little") + step
            guess[at] = (count % (1 << 64)).to_bytes(8, "little")
            guesses += [bytes(guess)] * (bytes(guess) != names[0])
    stranger.tell(*map(taken_note, guesses), b"", b"taken", bytes(1000), taken_note(names[0]))
    until(owner.manager, lambda: leases.taken == taken + 1)
    time.sleep(0.1)
    assert sorted(leases.standing) == sorted(names[1:])
    # nor does he find the names in what he can read
    handoff = handing(owner)
    arena = owner.manager.memory.block_arena.bytes.numpy().tobytes()
    for memory in (arena, bytes(handoff.side.rows.memory), bytes(handoff.side.pledges.memory)):
        assert not any(name in memory for name in names)


def test_names_and_pledges_share_nothing(owner: Stack):
    request = grown(owner, Text.random(owner, 12, TOKENS), 200)
    found = [Offer.unpack(owner.manager.handoff.offer(request)) for _ in range(16)]
    for column in zip(*(each.name + each.pledge for each in found), strict=True):
        assert len(set(column)) > 8  # by chance: one in 10^14 columns


def test_notes_are_read_while_nobody_has_an_offer():
    told: list[bytes] = []
    memory = np.zeros(4096, np.uint8)
    link = Link(
        "idle",
        [links.Memory(address=memory.ctypes.data, size_bytes=4096, keeper=memory)],
        lambda notes: told.extend(notes) or False,  # type: ignore[func-returns-value]
    )
    agent = make_agent(f"stranger-{os.urandom(8).hex()}")
    agent.add_remote_agent(link.metadata)
    for nth in range(500):
        agent.send_notif(link.name, nth.to_bytes(4, "little") + bytes(1000))
    end = time.monotonic() + PATIENT_S
    while len(told) < 500:
        assert time.monotonic() < end, "NIXL keeps them"
        time.sleep(0.01)
    link.close()


# ---- how it ends ---------------------------------------------------------------------------------

ENDS = """
import sys
{before}
import torch
torch.set_num_threads(1)
from tests.support.handoff import close, grown, side
from tests.support.lives import Text
owner, taker = side("prefill"), side("decode")
request = grown(owner, Text.random(owner, 1, 300), 200)
assert taker.manager.handoff.accept(owner.manager.handoff.offer(request)).wait().length == 200
{after}
print("through", flush=True)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", "", id="open"),
        pytest.param("", "close(owner, taker)", id="closed", marks=pytest.mark.nightly),
        pytest.param("import mooncake.store", "", id="after mooncake"),
        pytest.param("", "import mooncake.store", id="before mooncake", marks=pytest.mark.nightly),
    ],
)
def test_a_process_with_a_handoff_exits_with_0(before: str, after: str):
    """With Debian's libibverbs1 installed it ended with SIGSEGV."""
    if "mooncake" in before + after:
        pytest.importorskip("mooncake")
    code = ENDS.format(before=before, after=after)
    with python(code, stdout=subprocess.PIPE, stderr=None) as child:
        out, _ = child.communicate(timeout=PATIENT_S)
    assert (out.strip(), child.returncode) == ("through", 0)

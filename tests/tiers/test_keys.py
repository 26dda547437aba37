"""With a key: names that only its holder can compute, and records and offers that only its holder
can have made. What has no proof, or a wrong one, is never used."""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from dsv4 import CopyError, InvalidInput, PrefixOptions, read_key
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.trail import Tenant, TokenTrail
from dsv4.cache.transfers.tiers import TIER_CALLS
from dsv4.tiers.audit import Audit, Audited
from dsv4.tiers.encryption import encrypted, opened
from dsv4.tiers.host import HostTier
from dsv4.tiers.mooncake import MooncakeTier
from dsv4.tiers.record import (
    KEYED_VERSION,
    Label,
    Parts,
    Reason,
    Record,
    check,
    payload_sum,
    read_header,
    seal,
)
from dsv4.tiers.secret import Secret
from tests.support.lives import Text, run_to
from tests.support.tiered import (
    BLOCK,
    TIMEOUT_S,
    Places,
    assert_like_cold,
    empty,
    keep,
    options,
    run,
    stack_with,
)
from tests.support.tiers import file_bytes, label, payload_of

MINE, THEIRS = bytes(range(32)), bytes(range(1, 33))
IDS = np.arange(5 * BLOCK + 9, dtype=np.int32)


@pytest.fixture(
    params=[
        *(pytest.param(which, marks=pytest.mark.nightly) for which in ("host", "disk")),
        "host and disk",
    ]
)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = Places(request.param, tmp_path)
    yield made
    made.close()


def manager(key: bytes | None = None) -> KVCacheManager:
    return stack_with([], prefix=options(key=key)).manager


def names(made: KVCacheManager, salt: str | None = None) -> list[bytes]:
    trail = made.prefix.prompt(IDS, salt).trail
    assert trail is not None
    states = [trail.state_digests(tokens)[0] for tokens in (BLOCK + 3, 5)]
    return [trail.root, *trail.chain, *states]


# ---- names ---------------------------------------------------------------------------------------


def test_keys_share_no_name_with_each_other_nor_with_none() -> None:
    found = [names(manager(key), salt) for key in (None, MINE, THEIRS) for salt in (None, "a")]
    flat = [name for each in found for name in each]
    assert len(flat) == len(set(flat))
    assert names(manager(MINE)) == names(manager(MINE))


def test_names_are_those_of_the_description() -> None:
    """docs/security.md, computed with hashlib alone."""

    def keyed(data: bytes, use: bytes) -> bytes:
        own = hashlib.blake2b(key=MINE, digest_size=32, person=b"dsv4 " + use).digest()
        return hashlib.blake2b(data, key=own, digest_size=32).digest()

    plain, found = names(manager()), names(manager(MINE))
    root = keyed(plain[0], b"root")
    assert found[0] == root
    for nth in range(5):
        root = keyed(root + IDS[nth * BLOCK : (nth + 1) * BLOCK].tobytes(), b"chain")
        assert found[nth + 1] == root
    inner = hashlib.blake2b(
        IDS[BLOCK : BLOCK + 3].tobytes(), digest_size=32, key=found[1], person=b"dsv4 state"
    ).digest()
    assert found[6] == keyed(inner + b"state", b"chain")


def test_a_name_and_the_tokens_after_it_do_not_give_the_next_name() -> None:
    """As they do without a key: whoever lists a store could ask whether a prompt went on so."""
    for key, can in ((None, True), (MINE, False)):
        trail = manager(key).prefix.prompt(IDS).trail
        assert trail is not None
        guess = TokenTrail(trail.chain[0], BLOCK, IDS[BLOCK:])
        assert (guess.digest(0) == trail.chain[1]) is can
        guess = TokenTrail(
            trail.chain[0], BLOCK, IDS[BLOCK:], Tenant(None, other := Secret(THEIRS), other.link)
        )
        assert guess.digest(0) != trail.chain[1]


def test_names_without_a_key_are_what_they_were() -> None:
    trail = TokenTrail(bytes(32), 4, np.arange(8, dtype=np.int32))
    first = hashlib.blake2b(trail.ids[:4].tobytes(), digest_size=32, key=bytes(32)).digest()
    assert trail.digest(0) == first
    assert trail.digest(1) == (
        hashlib.blake2b(trail.ids[4:].tobytes(), digest_size=32, key=first).digest()
    )


def test_a_prompt_of_another_key_is_refused() -> None:
    mine, theirs, none = manager(MINE), manager(THEIRS), manager()
    prompt = mine.prefix.prompt(IDS)
    assert manager(MINE).admit_request(prompt).length == 0
    for other in (theirs, none):
        with pytest.raises(InvalidInput, match="another schema or model, or with another key"):
            other.admit_request(prompt)
        other.check_invariants()


# ---- records -------------------------------------------------------------------------------------


def sealed(wanted: Label, payload: bytes | None = None) -> Record:
    record = Record(label=wanted, parts=Parts.alone(wanted))
    record.parts.payload[0][:] = payload_of(wanted) if payload is None else payload
    seal(record)
    return record


def fixed(data: bytearray) -> bytearray:
    """With right checksums: whoever damages on purpose knows how they are made."""
    size = int.from_bytes(data[16:24], "little")
    if 256 + size <= len(data):
        data[128:144] = xxhash.xxh3_128_digest(bytes(data[256 : 256 + size]))
    data[248:256] = xxhash.xxh3_64_intdigest(bytes(data[:248])).to_bytes(8, "little")
    return data


def test_a_keyed_record_has_the_header_of_the_description() -> None:
    wanted = replace(label("k"), secret=Secret(MINE))
    header = bytes(sealed(wanted).parts.header)
    plain = bytes(sealed(label("k")).parts.header)
    assert header[8:10] == KEYED_VERSION.to_bytes(2, "little")
    assert (header[:8], header[10:144]) == (plain[:8], plain[10:144])
    own = hashlib.blake2b(key=MINE, digest_size=32, person=b"dsv4 records").digest()
    mac = hashlib.blake2b(header[:144] + payload_of(wanted), key=own, digest_size=32).digest()
    assert header[144:176] == mac
    assert header[176:248] == bytes(72)
    found = read_header(header)
    assert isinstance(found, tuple)
    assert found[0] == wanted  # by anyone: a header is not a secret
    assert found[0].secret is None


def test_a_record_without_a_key_is_what_it_was() -> None:
    header = bytes(sealed(label("k")).parts.header)
    assert header[8:10] == b"\1\0"
    assert header[144:248] == bytes(104)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_damaged_and_forged_records_are_never_accepted(count: int) -> None:
    """All with right checksums: bits flipped, spans replaced, other keys, none, other records."""
    wanted = replace(label("k", payload_bytes=700), secret=Secret(MINE))
    good = sealed(wanted)
    whole = good.parts.whole[0]
    original, draw = bytes(whole), random.Random(count)
    assert check(good) is None
    forgeries = [
        file_bytes(replace(wanted, secret=None)),
        file_bytes(replace(wanted, secret=Secret(THEIRS))),
        file_bytes(replace(wanted, secret=Secret(MINE), tokens=256)),
        file_bytes(replace(wanted, digest=bytes(32))),
        file_bytes(wanted, payload=bytes(700)),
    ]
    own = bytes(forgeries[-1][144:176])  # a right MAC, of another payload
    reasons: set[Reason] = set()
    for nth in range(count):
        data = bytearray(original)
        if nth < len(forgeries) - 1:
            data = forgeries[nth]
        elif nth == len(forgeries) - 1:
            data[144:176] = own
        else:
            for _ in range(draw.randrange(1, 4)):
                at = draw.randrange(956)
                size = draw.choice((1, 1, 8, 32))
                data[at : at + size] = draw.randbytes(len(data[at : at + size]))
        fixed(data)
        if data[:956] == original[:956]:
            continue
        whole[:] = bytes(data)
        refusal = check(good)
        assert refusal is not None, nth
        assert own.hex() not in str(refusal)
        assert original[144:176].hex() not in str(refusal)
        reasons.add(refusal.reason)
    assert reasons >= {Reason.MAC, Reason.DIGEST, Reason.TOKENS}


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_encrypted_records_open_unchanged_or_not_at_all(count: int) -> None:
    """All with right checksums, as above."""
    wanted = replace(label("k", payload_bytes=700), secret=Secret(MINE, encrypts=True))
    outside = encrypted(sealed(wanted))
    original, draw = bytes(outside.parts.whole[0]), random.Random(count)
    assert original[8:10] == b"\x01\xc0"
    assert payload_of(wanted)[:16] not in original
    assert bytes(encrypted(sealed(wanted)).parts.whole[0])[256:] != original[256:]
    record = Record(label=wanted, parts=Parts.alone(wanted))
    whole = record.parts.whole[0]
    for asked, refused in ((wanted, False), (replace(wanted, secret=Secret(MINE)), False)):
        whole[:] = original
        assert (opened(replace(record, label=asked)) is not None) is refused
        assert bytes(record.parts.payload[0]) == payload_of(wanted)
        assert check(record) is None  # sealed as it is in host memory
    for secret in (Secret(THEIRS), None):
        whole[:] = original
        refusal = opened(replace(record, label=replace(wanted, secret=secret)))
        assert refusal is not None
        assert refusal.reason is Reason.MAC
    whole[:] = original
    assert check(record) is not None  # where only plain ones belong
    for nth in range(count):
        data = bytearray(original)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(956) if nth % 2 else draw.randrange(256, 956)
            data[at : at + 4] = draw.randbytes(len(data[at : at + 4]))
        fixed(data)
        if data[:956] == original[:956]:
            continue
        whole[:] = bytes(data)
        assert opened(record) is not None, nth


# ---- managers and their tiers --------------------------------------------------------------------


def test_what_was_kept_with_a_key_comes_back_with_it_alone(places: Any) -> None:
    text = None
    for key, reused in ((MINE, 5), (THEIRS, 0), (None, 0), (MINE, 5)):
        stack = stack_with(places.tiers, prefix=options(key=key))
        text = text or Text.random(stack, 1, 900)
        if places_are_empty(places):
            keep(stack, text, 700)
            empty(stack)
        request = run(stack, text, 700)
        assert request.resume.reused_tokens == reused * BLOCK
        if reused:
            assert_like_cold(stack, request, text)
        assert sum(stack.manager.tiers.all[-1].stats().refused.values()) == 0
        stack.manager.tiers.close(TIMEOUT_S)


def places_are_empty(places: Any) -> bool:
    return all(tier.stats().held_records == 0 for tier in places.tiers)


@pytest.mark.parametrize("forger", [None, THEIRS])
def test_records_that_were_replaced_are_misses_and_counted(
    forger: bytes | None, tmp_path: Path
) -> None:
    """Somebody who can write to the store puts records with right sums under our names."""
    places = Places("disk", tmp_path)
    stack = stack_with(places.tiers, prefix=options(key=MINE))
    text = Text.random(stack, 2, 900)
    keep(stack, text, 700)
    secret = None if forger is None else Secret(forger)
    replaced = 0
    for path in (tmp_path / "tier" / "1").glob("*/*/*"):
        data = bytearray(path.read_bytes())
        found = read_header(bytes(data[:256]))
        assert isinstance(found, tuple)
        given = replace(found[0], secret=secret)
        path.write_bytes(file_bytes(given, bytes(given.payload_bytes)))
        replaced += 1
    assert replaced >= 5
    empty(stack)
    request = run(stack, text, 700)
    assert request.resume.reused_tokens == 0
    assert_like_cold(stack, request, text)
    assert places.tiers[0].stats().refused["mac"] >= 1
    assert stack.manager.stats().transfers.records_refused >= 1
    stack.manager.check_invariants()
    places.close()


def test_a_suspended_request_comes_back_with_its_key_alone() -> None:
    tier = HostTier(16 << 20)
    stack = stack_with([tier], prefix=options(key=MINE))
    text = Text.random(stack, 3, 900)
    request = stack.manager.admit_request(text.ids[:300])
    run_to(stack, request, text, 300)
    stack.manager.tiers.suspend(request)
    assert stack.manager.tiers.drain(TIMEOUT_S)
    for key, source in ((THEIRS, None), (None, None), (MINE, "state")):
        other = stack_with([tier], prefix=options(key=key))
        other.weights = stack.weights
        again = other.manager.tiers.resume(text.ids[:300], timeout_s=TIMEOUT_S)
        assert (again.resume.source == "state") is (source == "state")
        if source:
            run_to(other, again, text, 400)
            assert_like_cold(other, again, text)
        other.manager.release_request(again)
        other.manager.tiers.close(TIMEOUT_S)
    tier.close(TIMEOUT_S)


def test_without_a_key_old_records_stay_readable(tmp_path: Path) -> None:
    """Records that 0.1.0 would have written are those that are written now."""
    places = Places("disk", tmp_path)
    stack = stack_with(places.tiers)
    text = Text.random(stack, 4, 900)
    keep(stack, text, 700)
    for path in (tmp_path / "tier" / "1").glob("*/*/*"):
        header = path.read_bytes()[:256]
        assert header[8:10] == b"\1\0"
        assert header[144:248] == bytes(104)
    empty(stack)
    assert run(stack, text, 700).resume.reused_tokens == 5 * BLOCK
    places.close()


def test_what_lies_on_disk_is_encrypted_and_comes_back(tmp_path: Path) -> None:
    places = Places("host and disk", tmp_path)
    stack = stack_with(places.tiers, prefix=options(key=MINE, encrypt=True))
    text = Text.random(stack, 5, 900)
    keep(stack, text, 700)
    files = [path.read_bytes() for path in (tmp_path / "tier" / "1").glob("*/*/*")]
    assert len(files) >= 5
    assert all(data[8:10] == b"\x01\xc0" for data in files)
    assert stack.manager._parts.prefix
    chain = stack.manager.prefix.prompt(text.ids[:700]).trail
    assert chain is not None
    for digest in chain.chain:
        node = stack.manager._parts.prefix.index.get(digest)
        assert node is not None
        block = bytes(stack.manager.memory.block_arena.bytes[node.block_id].numpy())
        pieces = [block[at : at + 16] for at in range(0, len(block) - 16, 4096)]
        assert not any(len(set(piece)) > 8 and piece in data for piece in pieces for data in files)
    stack.manager.tiers.close(TIMEOUT_S)
    path = next((tmp_path / "tier" / "1").glob("s/*/*"))
    data = bytearray(path.read_bytes())
    for secret in (Secret(MINE), None):
        assert [each.refusal for each in _audited(tmp_path, secret)] == [None] * len(files)
    data[300] ^= 1
    path.write_bytes(fixed(data))
    assert [each.refusal for each in _audited(tmp_path, None)] == [None] * len(files)
    (wrong,) = (each for each in _audited(tmp_path, Secret(MINE)) if each.refusal)
    assert wrong.refusal is not None
    assert wrong.refusal.reason is Reason.MAC
    # another process, which has only the disk, and does not encrypt
    other = stack_with([places.tiers[-1]], prefix=options(key=MINE))
    other.weights = stack.weights
    request = run(other, text, 700)
    assert request.resume.reused_tokens == 5 * BLOCK
    assert_like_cold(other, request, text)
    places.close()


def _audited(root: Path, secret: Secret | None) -> list[Audited]:
    audit = Audit(root / "tier", secret)
    try:
        return list(audit.checked())
    finally:
        audit.close()


def test_encryption_needs_a_key_and_a_tier_that_does_it() -> None:
    with pytest.raises(InvalidInput, match="give key="):
        PrefixOptions(encrypt=True)
    with pytest.raises(InvalidInput, match="encrypt="):
        PrefixOptions(key=MINE, encrypt=1)  # type: ignore[arg-type]
    plain = HostTier(1 << 20, name="plain")
    calls = {call: getattr(plain, call) for call in TIER_CALLS}
    own = SimpleNamespace(name="own", **calls)
    with pytest.raises(InvalidInput, match="would get records as they are"):
        stack_with([own], prefix=options(key=MINE, encrypt=True))  # type: ignore[list-item]
    assert not MooncakeTier.encrypts
    plain.close(TIMEOUT_S)


# ---- the key itself ------------------------------------------------------------------------------


def test_a_key_is_never_shown() -> None:
    given = PrefixOptions(key=MINE, model_id="m")
    stack = stack_with([HostTier(1 << 20)], prefix=options(key=MINE))
    secret = Secret(MINE)
    assert stack.manager._parts.prefix
    for shown in (
        *(repr(given), repr(secret), repr(stack.manager), repr(stack.manager.tiers)),
        repr(replace(label("k"), secret=secret)),
        repr(stack.manager.prefix.prompt(IDS)),
        repr(Tenant("a", secret, secret.link)),
    ):
        for form in (MINE.hex(), repr(MINE), repr(MINE)[2:-1], MINE.decode("latin1")):
            assert form not in shown
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CopyError, match="make it from the key"):
            way(secret)


@pytest.mark.parametrize("key", ["text of 32 characters, not bytes", b"short", bytes(65), 7, b""])
def test_what_is_not_a_key_is_refused_without_showing_it(key: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^key ") as error:
        PrefixOptions(key=key)
    if len(repr(key)) > 3:
        assert repr(key) not in str(error.value)
        assert str(key) not in str(error.value)


def test_a_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text(MINE.hex() + "\n")
    path.chmod(0o600)
    assert read_key(file=path) == read_key(file=str(path)) == MINE
    monkeypatch.setenv("A_KEY", MINE.hex().upper())
    assert read_key(environment="A_KEY") == MINE
    path.chmod(0o640)
    with pytest.raises(InvalidInput, match="mode 640"):
        read_key(file=path)
    path.chmod(0o600)
    for wrong in ("", "secret words", MINE.hex()[:31], MINE.hex()[:30], "0" * 130, "é" * 32):
        path.write_text(wrong)
        with pytest.raises(InvalidInput, match="hexadecimal digits") as error:
            read_key(file=path)
        assert not wrong or wrong not in str(error.value)
        monkeypatch.setenv("A_KEY", wrong)
        with pytest.raises(InvalidInput, match="hexadecimal digits") as error:
            read_key(environment="A_KEY")
        assert not wrong or wrong not in str(error.value)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_key(file=tmp_path / "none")
    with pytest.raises(InvalidInput, match="is not set"):
        read_key(environment="NO_SUCH_KEY")
    for both in ({}, {"file": path, "environment": "A_KEY"}):
        with pytest.raises(InvalidInput, match="say where"):
            read_key(**both)


def test_sums_of_another_key_differ() -> None:
    """Of blocks that another machine reads."""
    block = memoryview(bytes(1000))
    sums = {Secret(MINE).sum([block]), Secret(THEIRS).sum([block]), payload_sum([block])}
    assert len(sums) == 3
    assert {len(each) for each in sums} == {16}

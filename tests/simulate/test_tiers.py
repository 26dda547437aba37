"""Books of a simulated tier beside those of the real host tier."""

from __future__ import annotations

import pytest

from dsv4.simulate.tiers import CountedTier
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Kind, Label
from tests.support.numbers import Numbers

pytest.importorskip("xxhash")
PAYLOAD, ROOM = 4000, 9  # bytes of a record; how many fit
ROOT = bytes(32)


def label(path: tuple[int, ...], kind: Kind = Kind.BLOCK) -> Label:
    def digest(of: tuple[int, ...]) -> bytes:
        return bytes([*of, *[255] * (32 - len(of))]) if of else ROOT

    return Label(
        kind=kind,
        digest=digest(path),
        parent=digest(path[:-1]),
        fingerprint=ROOT,
        tokens=128 * len(path),
        payload_bytes=PAYLOAD,
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_same_records_are_kept_in_the_same_order(seed: int) -> None:
    """Random prompts, stored from their beginning as requests compute them, and used."""
    numbers, real = Numbers(seed), HostTier(ROOM * 8192)
    size = label((0,)).padded_bytes
    own = CountedTier("host", "CPU", ROOM * 8192)
    paths: set[tuple[int, ...]] = set()
    for _ in range(300):
        path = tuple(numbers.integers(0, 3, int(numbers.integers(1, 5, 1)[0])).tolist())
        chain = [path[:end] for end in range(1, len(path) + 1)]
        if numbers.integers(0, 3, 1)[0]:
            for at in chain:
                kind = Kind.BLOCK if at != path else Kind(int(numbers.integers(1, 3, 1)[0]))
                own.store(label(at, kind), size)
                row = real.take(label(at, kind), passing=False)
                if row is not None:
                    real.publish(row)
                    real.release(row)
        else:
            real.use([label(at) for at in chain], label(path, Kind.SNAPSHOT))
            held = [at for at in chain if label(at).key in own]
            if held:
                own.use(label(held[-1]).key)
            own.use(label(path, Kind.SNAPSHOT).key)
        paths.update(chain)
        for at in paths:
            for kind in (Kind.BLOCK, Kind.SNAPSHOT):
                key = label(at, kind).key
                assert (key in own) == real.holds(key), (at, kind)
    assert own.evictions > 20
    assert own.used_bytes == real.stats().held_bytes
    real.close(1.0)


def test_what_never_fits_is_refused() -> None:
    tier = CountedTier("host", "CPU", 4096)
    assert tier.store(label((1,)), 8192) is None
    assert (len(tier), tier.refused) == (0, 1)
    # what leans on it could not be reached
    assert tier.store(label((1, 1)), 4096) is None
    assert tier.refused == 2

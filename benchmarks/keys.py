"""What a key and encryption cost a record: `python -m benchmarks.keys [--bytes N]`. Needs no GPU.

Sums alone, sums and MAC, and encryption with both, of one V4-Flash block on its way out and back.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.tiers.encryption import encrypted, opened
from dsv4.tiers.record import Kind, Label, Parts, Record, check, seal
from dsv4.tiers.secret import Secret

RUNS = 200
KEY = bytes(range(32))


def best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of many runs."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    block_bytes = CacheSchema.build(ModelSpec.preset("v4-flash")).bytes.block
    parser.add_argument("--bytes", type=int, default=block_bytes, help="of a payload")
    size = parser.parse_args().bytes
    for name, secret in (
        ("sums", None),
        ("key", Secret(KEY)),
        ("key and encryption", Secret(KEY, encrypts=True)),
    ):
        label = Label(
            kind=Kind.BLOCK,
            digest=bytes(32),
            parent=bytes(32),
            fingerprint=bytes(32),
            tokens=128,
            payload_bytes=size,
            secret=secret,
        )
        record = Record(label=label, parts=Parts.alone(label))
        record.parts.payload[0][:] = os.urandom(size)
        down, up = best(lambda record=record: seal(record)), 0.0  # type: ignore[misc]
        if secret is None or not secret.encrypts:
            up = best(lambda record=record: check(record))  # type: ignore[misc]
        else:
            down += best(lambda record=record: encrypted(record))  # type: ignore[misc]
            outside = bytes(encrypted(record).parts.whole[0])

            def back(record: Record = record, outside: bytes = outside) -> None:
                record.parts.whole[0][:] = outside
                assert opened(record) is None

            up = best(back)
        print(f"{name}: {size:,} bytes, down {1e6 * down:.0f} µs, up {1e6 * up:.0f} µs")


if __name__ == "__main__":
    main()

"""Copies that the driver begins: their addresses, and how many at once. A driver that copies at
once stands for CUDA's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.cache.transfers import copies
from dsv4.tiers.record import Parts
from tests.support.numbers import Numbers

HEADER = 256


def fake_driver(*, batch: int | None) -> tuple[Any, list[int]]:
    """`batch` is what the call for many returns; None: there is none."""
    calls: list[int] = []

    def one(target: int, source: int, count: int, stream: int) -> int:
        assert stream == 7
        calls.append(1)
        ctypes.memmove(target, source, count)
        return 0

    def many(
        targets: Any,
        sources: Any,
        counts: Any,
        n: int,
        told: Any,
        at: int,
        k: int,
        stream: int,
    ) -> int:
        assert (stream, k, told[0], len(targets)) == (7, 1, 1, n)
        assert ctypes.c_size_t.from_address(at).value == 0
        if not batch:
            calls.append(n)
            for target, source, count in zip(targets, sources, counts, strict=True):
                ctypes.memmove(target, source, count)
        return batch or 0

    found = {"cuMemcpyAsync": one}
    if batch is not None:
        found[copies._BATCH] = many
    return SimpleNamespace(**found), calls


def parts(memory: bytearray, at: int, sizes: list[int]) -> Parts:
    """A record whose payload lies in pieces, with gaps."""
    view, pieces = memoryview(memory), []
    header = view[at : at + HEADER]
    at += HEADER
    for size in sizes:
        pieces.append(view[at : at + size])
        at += size + 5
    return Parts(header=header, payload=tuple(pieces))


@pytest.mark.parametrize("batch", [0, 1, None], ids=["many", "refused", "one by one"])
@pytest.mark.parametrize("rows", [1, 2, 70])
def test_every_byte_arrives(batch: int | None, rows: int) -> None:
    sizes = [40, 0, 33]
    arena = Numbers(rows).integers(0, 256, rows, sum(sizes)).to(torch.uint8)
    memory = bytearray(rows * 512)
    driver, calls = fake_driver(batch=batch)
    down = [(parts(memory, 512 * nth, sizes), arena[nth], True) for nth in range(rows)]
    copies._launch_by_driver(driver, 7, down)
    back = torch.zeros_like(arena)
    up = [(parts(memory, 512 * nth, sizes), back[nth], False) for nth in range(rows)]
    copies._launch_by_driver(driver, 7, up)
    assert torch.equal(back, arena)
    assert sum(calls) == 2 * 2 * rows
    assert max(calls) == (1 if batch != 0 else min(2 * rows, copies.AT_ONCE))


def test_an_error_is_raised() -> None:
    driver = SimpleNamespace(cuMemcpyAsync=lambda *_: 700)
    memory = bytearray(512)
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        copies._launch_by_driver(
            driver, 7, [(parts(memory, 0, [8]), torch.zeros(8, dtype=torch.uint8), True)]
        )

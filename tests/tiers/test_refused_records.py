"""Damaged records below a manager: refused, with what is behind them; bytes as of a cold run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.cache.prefix.options import full, zero
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Kind, Label, Parts, Record, seal
from tests.support.lives import Text, run_to
from tests.support.stack import Stack
from tests.support.tiered import (
    BLOCK,
    TIMEOUT_S,
    assert_like_cold,
    disk,
    empty,
    keep,
    options,
    stack_with,
)
from tests.support.tiers import digest, file_of

Damage = Callable[[Path, Label], None]


def flip(at: int) -> Damage:
    def damage(path: Path, label: Label) -> None:
        data = bytearray(path.read_bytes())
        data[at if at >= 0 else label.record_bytes + at] ^= 0x10
        path.write_bytes(data)

    return damage


def truncate(path: Path, label: Label) -> None:
    path.write_bytes(path.read_bytes()[: label.padded_bytes // 2])


def relabelled(path: Path, label: Label, **other: object) -> None:
    """A record whose sums are right, of something else."""
    data = path.read_bytes()
    record = Record(label=replace(label, **other), parts=Parts.alone(label))  # type: ignore[arg-type]
    record.parts.payload[0][:] = data[256 : label.record_bytes]
    seal(record)
    path.write_bytes(bytes(record.parts.whole[0]))


def foreign_schema(path: Path, label: Label) -> None:
    relabelled(path, label, fingerprint=digest("another schema"))


def other_parent(path: Path, label: Label) -> None:
    relabelled(path, label, parent=digest("another prompt"))


def older_version(path: Path, label: Label) -> None:
    data = bytearray(path.read_bytes())
    data[8:10] = (0).to_bytes(2, "little")
    path.write_bytes(data)


def remove(path: Path, label: Label) -> None:
    path.unlink()


DAMAGES: dict[str, Damage] = {
    "a bit of the magic": flip(3),
    "a bit of the tokens": flip(24),
    "a bit of the sum": flip(130),
    "the first byte": flip(256),
    "the last byte": flip(-1),
    "truncated": truncate,
    "foreign schema": foreign_schema,
    "another parent": other_parent,
    "older version": older_version,
    "gone": remove,
}


def labels_of(stack: Stack, text: Text, tokens: int, kind: Kind) -> list[Label]:
    trail = stack.manager.prefix.prompt(text.ids[:tokens]).trail
    assert trail is not None
    assert stack.manager.tiers
    blocks = range(tokens // BLOCK)
    return [stack.manager.tiers.labels.of_block(trail, block, kind) for block in blocks]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_block_ends_the_prompt_there(tmp_path: Path, name: str):
    tier = disk(tmp_path)
    stack = stack_with([tier], prefix=options(full()))
    text = Text.random(stack, 1, 900)
    keep(stack, text, 700)
    empty(stack)
    label = labels_of(stack, text, 700, Kind.BLOCK)[2]
    DAMAGES[name](file_of(tmp_path / "tier", label), label)
    fetch = stack.manager.tiers.fetch(text.ids[:700])
    while not fetch.poll():
        stack.manager.check_invariants()
    assert fetch.fetched_blocks == 2
    stats = stack.manager.stats()
    assert stats.transfers is not None
    assert stats.prefix is not None
    assert stats.prefix.blocks_indexed == 2
    assert (stats.transfers.records_refused > 0) is (name != "gone")
    request = stack.manager.admit_request(text.ids[:700])
    assert (request.resume.start, request.resume.source) == (2 * BLOCK, "snapshot")
    run_to(stack, request, text, 800)
    assert_like_cold(stack, request, text)
    stack.manager.release_request(request)
    assert stack.manager.tiers.drain(TIMEOUT_S)
    empty(stack)  # what was refused was replaced by what the request computed
    fetch = stack.manager.tiers.fetch(text.ids[:700])
    while not fetch.poll():
        pass
    assert fetch.fetched_blocks == 5
    tier.close(TIMEOUT_S)


@pytest.mark.parametrize("name", ["the last byte", "foreign schema", "gone"])
def test_a_damaged_snapshot_is_not_used(tmp_path: Path, name: str):
    tier = disk(tmp_path)
    stack = stack_with([tier], prefix=options(full()))
    text = Text.random(stack, 2, 900)
    keep(stack, text, 700)
    empty(stack)
    for label in labels_of(stack, text, 700, Kind.SNAPSHOT)[3:]:
        DAMAGES[name](file_of(tmp_path / "tier", label), label)
    request = stack.manager.tiers.admit(text.ids[:700], timeout_s=TIMEOUT_S)
    assert (request.resume.reused_tokens, request.resume.start) == (5 * BLOCK, 3 * BLOCK)
    run_to(stack, request, text, 800)
    assert_like_cold(stack, request, text)
    tier.close(TIMEOUT_S)


def test_a_bit_that_flips_in_host_memory_is_found_before_the_device_has_it():
    tier = HostTier(8 << 20)
    stack = stack_with([tier], prefix=options(zero()))
    text = Text.random(stack, 3, 900)
    keep(stack, text, 700)
    empty(stack)
    (row,) = tier.hold([labels_of(stack, text, 700, Kind.BLOCK)[3]])
    assert row is not None
    row.parts.payload[0][1000] ^= 1
    tier.release(row)
    fetch = stack.manager.tiers.fetch(text.ids[:700])
    while not fetch.poll():
        pass
    assert fetch.fetched_blocks == 3
    assert stack.manager.stats().tiers[0].refused == {"payload_sum": 1}
    request = stack.manager.admit_request(text.ids[:700])
    run_to(stack, request, text, 700)
    assert_like_cold(stack, request, text)


def test_another_model_finds_nothing(tmp_path: Path):
    tier = disk(tmp_path)
    stack = stack_with([tier])
    text = Text.random(stack, 4, 900)
    keep(stack, text, 700)
    other = options()
    other = replace(other, model_id="tiny 2")
    second = stack_with([tier], prefix=other)
    fetch = second.manager.tiers.fetch(text.ids[:700])
    while not fetch.poll():
        pass
    assert (fetch.fetched_blocks, tier.stats().loaded_bytes) == (0, 0)
    salted = stack.manager.tiers.fetch(text.ids[:700], "a user")
    while not salted.poll():
        pass
    assert salted.fetched_blocks == 0
    tier.close(TIMEOUT_S)

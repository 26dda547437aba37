"""Ids come in many shapes: each is read as the numbers it holds, or refused. Two prompts never
share a digest because of how they were given."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.trail import token_ids
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec

SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=2048)
WHOLE = ("i1", "u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8")


@pytest.mark.parametrize("dtype", [*WHOLE, ">u8"])
def test_ids_of_every_width_and_byte_order_are_what_they_say(dtype: str):
    kind = np.iinfo(np.dtype(dtype))
    largest = min(int(kind.max), 2**31 - 1)
    wanted = [0, 1, 100, largest - 1, largest]
    given = np.array(wanted, dtype=dtype)
    for each in (given, given[::1], np.array(wanted * 2, dtype=dtype)[:5], given[::-1][::-1]):
        found = token_ids(each)
        assert (found.dtype, found.tolist()) == (np.dtype(np.int32), wanted)
        assert found.flags.owndata


@pytest.mark.parametrize("dtype", WHOLE)
def test_ids_below_0_or_above_32_bits_are_refused(dtype: str):
    kind = np.iinfo(np.dtype(dtype))
    for wrong in (-1, int(kind.min), 2**31, int(kind.max)):
        if 0 <= wrong < 2**31 or not int(kind.min) <= wrong <= int(kind.max):
            continue
        for at in range(3):
            ids = np.array([5, 6, 7], dtype=dtype)
            ids[at] = wrong
            with pytest.raises(InvalidInput, match=f"{wrong}.*0 or more and fit 32 bits"):
                token_ids(ids)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tensors_of_every_width_are_what_they_say(dtype: torch.dtype):
    assert token_ids(torch.tensor([0, 1, 127], dtype=dtype)).tolist() == [0, 1, 127]
    if dtype != torch.uint8:
        with pytest.raises(InvalidInput, match="between -1 and 1"):
            token_ids(torch.tensor([1, -1], dtype=dtype))


def test_other_sequences_are_read_too():
    wanted = [3, 0, 2**31 - 1]
    for given in (wanted, tuple(wanted), deque(wanted), array("q", wanted), map_of(wanted)):
        assert token_ids(given).tolist() == wanted
    assert token_ids(range(4)).tolist() == [0, 1, 2, 3]
    assert token_ids([]).tolist() == []


def map_of(ids: list[int]) -> list[np.integer[Any]]:
    """As a loop over an array gives them."""
    return [np.int16(ids[0]), np.uint8(ids[1]), np.int64(ids[2])]


ODD: dict[str, tuple[Any, str]] = {
    "a text": ("hello", "got str: tokenize it first"),
    "bytes": (b"hello", "got bytes: tokenize it first"),
    "what a tokenizer returns": (
        BatchEncoding({"input_ids": [1, 2], "attention_mask": [1, 1]}),
        "got BatchEncoding: give its input_ids",
    ),
    "a dict of ids": ({"input_ids": [1, 2]}, "got dict: give its input_ids"),
    "rows of several requests": ([[1, 2], [3]], "one row of whole numbers"),
    "texts": (["hello", "you"], "text: tokenize it first"),
    "an array of texts": (np.array(["hello"]), "text: tokenize it first"),
    "a text among ids": (np.array([1, "hello"], dtype=object), "text: tokenize it first"),
    "True": ([True, 2], "True or False"),
    "numpy's True": ([np.True_, 2], "True or False"),
    "True in a deque": (deque([True, 2]), "True or False"),
    "booleans": (np.array([True]), "bool"),
    "fractions": ([1.0, 2.0], "whole numbers"),
    "fractions of 16 bits": (np.array([1.0], dtype=np.float16), "whole numbers"),
    "two rows": ([[1, 2], [3, 4]], "one row"),
    "numbers that no integer has": ([1, 2**70], "whole numbers"),
    "below 0": ([1, -1], "between -1 and 1"),
    "dates": (np.array(["2026-01-01"], dtype="M8[D]"), "whole numbers"),
}


@pytest.mark.parametrize("name", ODD)
def test_wherever_ids_enter_what_is_none_is_refused(name: str):
    given, words = ODD[name]
    manager = KVCacheManager(SCHEMA, num_blocks=16, max_requests=4, prefix=PrefixOptions())
    request = manager.admit_request([1, 2, 3])
    plan = manager.prepare_forward([(request, 2)])
    plan.mark_appended()
    calls = (
        manager.prefix.prompt,
        manager.admit_request,
        manager.prefix.look_up,
        manager.room.needed_blocks,
        manager.prefix.pin,
        lambda ids: manager.commit(plan, ids=ids),
    )
    for call in calls:
        with pytest.raises(InvalidInput, match=words):
            call(given)
    assert manager.room.can_admit(given) is False
    manager.commit(plan)
    for supply in (manager.supply_ids, manager.continue_request):
        with pytest.raises(InvalidInput, match=words):
            supply(request, given)
    manager.check_invariants()


def test_prompts_that_differ_share_no_digest():
    """-1 in eight bits was 255, and numbers of the other byte order were 0."""
    manager = KVCacheManager(SCHEMA, num_blocks=16, max_requests=4, prefix=PrefixOptions())
    ids = np.arange(256) % 100

    def digests(given: Any) -> list[bytes]:
        trail = manager.prefix.prompt(given).trail
        assert trail is not None
        return trail.chain

    plain = digests(ids)
    for dtype in (*WHOLE, ">u8"):
        assert digests(ids.astype(dtype)) == plain
    assert digests(ids + (1 << 24))[0] != digests(np.zeros(256, dtype=int))[0]
    assert digests((ids + (1 << 24)).astype(">i4")) == digests(ids + (1 << 24))
    with pytest.raises(InvalidInput):
        manager.prefix.prompt((ids - 1).astype(np.int8))


def test_nothing_is_no_prompt():
    manager = KVCacheManager(SCHEMA, num_blocks=16, max_requests=4, prefix=PrefixOptions())
    with pytest.raises(InvalidInput, match="got NoneType: tokenize it first"):
        manager.admit_request(None)  # type: ignore[arg-type]

"""Rows of a batch on the fast path are what each of them is alone, wherever its padding lies.

Rows share projections, whose sums then run in another order: 1e-5, and the same greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.integrations.fast_v4 import assert_close, fast, generate, manager_of, plain_model
from tests.integrations.tiny_v4 import prompt
from tests.support.numbers import Numbers

LENGTHS = (5, 129, 1, 70)
TOLERANCE = 1e-5
STEPS = 6


def padded(rows: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """ids and mask [rows, columns]; padding is a token id like any other, in rows it is no part of.
    "both": some rows on the left, some on the right, one in the middle."""
    columns = max(len(row) for row in rows)
    ids = Numbers(9).integers(0, 128, len(rows), columns)
    mask = torch.zeros_like(ids)
    for nth, row in enumerate(rows):
        places = torch.arange(len(row))
        if side == "left" or (side == "both" and nth % 2):
            places = places + columns - len(row)
        if side == "both" and nth == 3:
            places[len(row) // 2 :] = torch.arange(columns - len(row) + len(row) // 2, columns)
            places[: len(row) // 2] = torch.arange(len(row) // 2)
        ids[nth, places], mask[nth, places] = row, 1
    return ids, mask


@torch.no_grad()
def alone(row: Tensor) -> list[Tensor]:
    """The logits of a prompt's tokens, then of each greedy step, of the unmodified model."""
    plain = plain_model()
    output = plain(row[None])
    logits = [output.logits[0]]
    for _ in range(STEPS):
        token = logits[-1][-1:].argmax(dim=-1, keepdim=True)
        output = plain(token, past_key_values=output.past_key_values)
        logits.append(output.logits[0])
    return logits


@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_padded_rows_equal_rows_alone(side: str) -> None:
    rows = [prompt(n, seed=n)[0] for n in LENGTHS]
    expected = [alone(row) for row in rows]
    ids, mask = padded(rows, side)
    with fast(plain_model()) as model:
        output = model(ids, attention_mask=mask)
        past = output.past_key_values
        assert [request.length for request in past.requests] == list(LENGTHS)
        found = [output.logits[nth][mask[nth] == 1] for nth in range(len(rows))]
        for nth, logits in enumerate(found):
            assert_close(logits, expected[nth][0], TOLERANCE)
        for step in range(STEPS):
            tokens = torch.stack([logits[-1].argmax(dim=-1, keepdim=True) for logits in found])
            mask = torch.cat((mask, torch.ones_like(tokens)), dim=1)
            output = model(tokens, attention_mask=mask, past_key_values=past)
            found = list(output.logits)
            for nth, logits in enumerate(found):
                assert_close(logits, expected[nth][step + 1], TOLERANCE)
        assert torch.equal(past.history_mask, mask.bool())


@torch.no_grad()
def test_a_row_may_sit_out_a_step() -> None:
    rows = [prompt(n, seed=n)[0] for n in (40, 9)]
    expected = [alone(row) for row in rows]
    ids, mask = padded(rows, "left")
    with fast(plain_model()) as model:
        past = model(ids, attention_mask=mask).past_key_values
        tokens = torch.tensor([[expected[0][0][-1].argmax()], [77]])
        mask = torch.cat((mask, torch.tensor([[1], [0]])), dim=1)
        first = model(tokens, attention_mask=mask, past_key_values=past).logits
        assert_close(first[0], expected[0][1], TOLERANCE)
        assert [request.length for request in past.requests] == [41, 9]
        tokens = torch.tensor([[expected[0][1][-1].argmax()], [expected[1][0][-1].argmax()]])
        mask = torch.cat((mask, torch.tensor([[1], [1]])), dim=1)
        second = model(tokens, attention_mask=mask, past_key_values=past).logits
    assert_close(second[0], expected[0][2], TOLERANCE)
    assert_close(second[1], expected[1][1], TOLERANCE)


def test_padding_changes_no_byte_of_the_cache() -> None:
    """Whatever ids stand in the padding, the arenas end up the same, poison included."""
    rows = [prompt(n, seed=n)[0] for n in (70, 3)]
    arenas = []
    for filler in (0, 101):
        ids, mask = padded(rows, "left")
        ids[mask == 0] = filler
        with fast(plain_model()) as model:
            with torch.no_grad():
                past = model(ids, attention_mask=mask).past_key_values
            manager = manager_of(model)
            arenas.append(
                (manager.memory.block_arena.bytes.clone(), manager.memory.slot_arena.bytes.clone())
            )
            assert past.requests[1].length == 3
    assert torch.equal(arenas[0][0], arenas[1][0])
    assert torch.equal(arenas[0][1], arenas[1][1])


def test_generate_with_left_padding_equals_generate_alone() -> None:
    rows = [prompt(n, seed=n)[0] for n in (5, 129, 1)]
    ids, mask = padded(rows, "left")
    with fast(plain_model()) as model:
        together = generate(model, ids, 12, attention_mask=mask)
    for nth, row in enumerate(rows):
        solo = generate(plain_model(), row[None], 12)
        assert torch.equal(together.sequences[nth, -12:], solo.sequences[0, -12:])
        for ours, theirs in zip(together.logits, solo.logits, strict=True):
            assert_close(ours[nth], theirs[0], TOLERANCE)

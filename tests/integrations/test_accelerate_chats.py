"""Conversations: a turn runs what is new in it, whoever holds the cache in between."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dsv4.errors import Dsv4Error, RequestError
from tests.integrations.fast_v4 import counted, fast, generate, manager_of, plain_model
from tests.integrations.tiny_v4 import paged, prompt, tiny_model

NEW_TOKENS = 5


def check_like_plain(found: Tensor, ids: Tensor, **options: Any) -> None:
    expected = plain_model().generate(
        ids, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=False, **options
    )
    assert found.tolist() == expected.tolist()


def turn(sequences: Tensor, tokens: int, seed: int) -> Tensor:
    """What the user says next, behind what was said."""
    return torch.cat((sequences, prompt(tokens, rows=len(sequences), seed=seed)), dim=1)


@pytest.mark.parametrize(
    ("max_batch", "is_held"),
    [
        (1, True),
        (3, True),
        *(pytest.param(rows, False, marks=pytest.mark.nightly) for rows in (1, 3)),
    ],
)
def test_a_turn_runs_only_what_is_new(max_batch: int, is_held: bool) -> None:
    """Also when the program still holds the output of the turn before, which stays usable where
    there are rows for both."""
    ids, held = prompt(131), []
    with fast(plain_model(), max_batch=max_batch) as model, counted(model) as runs:
        for nth in range(3):
            del runs[:]
            out = generate(model, ids, NEW_TOKENS)
            check_like_plain(out.sequences, ids)
            # the last token that was generated has not run yet
            assert runs[0] == (131 if nth == 0 else 1 + 6)
            held = [*held, out] if is_held else []
            ids = turn(out.sequences, 6, nth)
            if not is_held:
                del out
        if is_held and max_batch == 3:
            first = held[0].past_key_values
            assert first.columns == 131 + NEW_TOKENS - 1
            model(ids[:, :1], past_key_values=first)
        elif is_held:
            with pytest.raises(RequestError, match="a newer batch needed its rows"):
                model(ids[:, :1], past_key_values=held[0].past_key_values)
        stats = manager_of(model).stats().prefix
        assert stats is not None
        assert stats.hits["state"] == 2


def test_rows_that_others_took_leave_their_blocks() -> None:
    """What was generated is cached in whole blocks even then."""
    ids, other = prompt(120), prompt(20, seed=9)
    with fast(plain_model(), max_batch=1) as model, counted(model) as runs:
        said = model.generate(ids, max_new_tokens=12, do_sample=False)
        generate(model, other, NEW_TOKENS)
        del runs[:]
        ids = turn(said, 6, 1)
        out = generate(model, ids, NEW_TOKENS)
        check_like_plain(out.sequences, ids)
        stats = manager_of(model).stats().prefix
        assert stats is not None
        assert stats.tokens_shared == 128


def test_an_edited_conversation_is_not_mistaken() -> None:
    ids = prompt(131)
    with fast(plain_model(), max_batch=1) as model:
        said = generate(model, ids, NEW_TOKENS).sequences
        ids = turn(said, 6, 1)
        for column in (60, 134):
            edited = ids.clone()
            edited[:, column] = (edited[:, column] + 1) % 128
            check_like_plain(generate(model, edited, NEW_TOKENS).sequences, edited)


def test_the_same_prompt_again_and_in_a_batch() -> None:
    """One row of the batch goes on from the idle one, the other from a fork of it."""
    ids = prompt(131)
    with fast(plain_model(), max_batch=2) as model, counted(model) as runs:
        ids = turn(generate(model, ids, NEW_TOKENS).sequences, 6, 1)
        check_like_plain(generate(model, ids, NEW_TOKENS).sequences, ids)
        check_like_plain(generate(model, ids, NEW_TOKENS).sequences, ids)
        more = turn(generate(model, ids, NEW_TOKENS).sequences, 6, 2)
        del runs[:]
        both = torch.cat((more, more))
        check_like_plain(generate(model, both, NEW_TOKENS).sequences, both)
        assert runs[0] == 2 * 7


def test_beams_leave_a_row_to_go_on_from() -> None:
    ids = prompt(60)
    beams = {"num_beams": 2, "max_new_tokens": 6, "do_sample": False}
    with fast(plain_model(), max_batch=2) as model, counted(model) as runs:
        said = model.generate(ids, **beams)
        ids = turn(said, 4, 1)
        del runs[:]
        found = model.generate(ids, **beams)
        assert runs[0] < 2 * ids.shape[1]
    assert found.tolist() == plain_model().generate(ids, use_cache=False, **beams).tolist()


def test_one_cache_of_transformers_passed_each_turn() -> None:
    """The recipe of transformers' documentation."""
    ids = prompt(131)
    past = DynamicCache(config=plain_model().config)
    with fast(plain_model(), max_batch=2) as model, counted(model) as runs:
        for nth in range(2):
            del runs[:]
            said = model.generate(
                ids, past_key_values=past, max_new_tokens=NEW_TOKENS, do_sample=False
            )
            check_like_plain(said, ids)
            assert runs[0] == (131 if nth == 0 else 7)
            assert past.get_seq_length() == said.shape[1] - 1
            ids = turn(said, 6, nth)
        twin = copy.deepcopy(past)
        past.crop(-3)
        assert (past.get_seq_length(), twin.get_seq_length()) == (
            said.shape[1] - 4,
            said.shape[1] - 1,
        )
        for kept in (past, twin):
            found = model.generate(
                ids, past_key_values=kept, max_new_tokens=NEW_TOKENS, do_sample=False
            )
            check_like_plain(found, ids)
        past.reset()
        assert past.get_seq_length() == 0
        check_like_plain(
            model.generate(ids, past_key_values=past, max_new_tokens=NEW_TOKENS, do_sample=False),
            ids,
        )


def test_a_cache_that_has_said_something_else() -> None:
    """An edited conversation, the same prompt again, a shorter one: with all ids and one cache."""
    ids, past = prompt(131), DynamicCache(config=plain_model().config)
    edited = ids.clone()
    edited[0, 129] = (edited[0, 129] + 1) % 128
    with fast(plain_model(), max_batch=1, max_draft_tokens=8) as model, counted(model) as runs:
        for text in (ids, edited, edited, ids[:, :60], prompt(70, seed=7)):
            said = model.generate(
                text, past_key_values=past, max_new_tokens=NEW_TOKENS, do_sample=False
            )
            check_like_plain(said, text)
        assert runs[1 + NEW_TOKENS - 1] == 2, "the edited token and the one behind it"


def test_one_paged_cache_passed_each_turn() -> None:
    model, ids = tiny_model(), prompt(40)
    past = paged(model)
    for nth in range(2):
        said = model.generate(ids, past_key_values=past, max_new_tokens=4, do_sample=False)
        alone = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)
        assert said.tolist() == alone.tolist()
        ids = turn(said, 6, nth)


def test_rows_of_unused_copies_are_known() -> None:
    """They make room like other caches that were not used for longest, and free when gone."""
    ids = prompt(40)
    with fast(plain_model(), max_batch=3) as model, torch.no_grad():
        past = model(ids).past_key_values
        copies = [copy.deepcopy(past) for _ in range(2)]
        model(ids[:, :1], past_key_values=past)
        found = generate(model, prompt(9, rows=2, seed=4), NEW_TOKENS)
        assert found.sequences.shape == (2, 14)
        for closed in (*copies, copy.deepcopy(copies[0])):
            with pytest.raises(RequestError, match="a newer batch needed its rows"):
                model(ids[:, :1], past_key_values=closed)
        model(ids[:, :1], past_key_values=past)
        del found, copies, closed, past
        gc.collect()
        past = model(ids).past_key_values
        copies = [copy.deepcopy(past) for _ in range(2)]
        with pytest.raises(Dsv4Error, match="slots"):
            copy.deepcopy(past)
        del copies
        gc.collect()
        assert manager_of(model).stats().requests_live == 1
        copy.deepcopy(past)

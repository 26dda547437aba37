"""The task of the recall model: pairs of a key and a value lie anywhere in a long text of fillers,
and at its end the values of some keys are asked for.

Tokens: BEGIN, ASK, then KEYS keys, VALUES values and the fillers. The window reaches nothing but
the question, so an answer can only come from entries that the indexer has selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.errors import InvalidInput

BEGIN, ASK = 0, 1
KEYS, VALUES = 32, 16
FIRST_KEY, FIRST_VALUE = 2, 2 + KEYS
FIRST_FILLER = FIRST_VALUE + VALUES
VOCABULARY = 64
PAIR_ROOM = 12  # tokens that each pair has for itself, more than a group and the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """`ids` int64 [tokens]. `asked` are the positions of keys whose value comes next, `values` the
    right tokens there, and `found` the positions of the pairs that say so."""

    ids: Tensor
    asked: Tensor
    values: Tensor
    found: Tensor


def recall(tokens: int, *, pairs: int, questions: int, generator: torch.Generator) -> Recall:
    """A text of `tokens` tokens with `pairs` pairs, whose last 3 · `questions` tokens ask for the
    values of different keys and give them. Nothing that is asked lies in the last quarter. Raises
    InvalidInput if the pairs do not fit."""

    def draw(most: int, count: int) -> Tensor:
        return torch.randperm(most, generator=generator)[:count]

    body = tokens - 3 * questions
    ids = torch.randint(FIRST_FILLER, VOCABULARY, (tokens,), generator=generator)
    ids[0] = BEGIN
    room = int(body * 0.75) // PAIR_ROOM
    if not questions <= pairs <= min(room - 1, KEYS):
        raise InvalidInput(
            f"{questions} questions about {pairs} pairs in {tokens} tokens: at most "
            f"{min(room - 1, KEYS)} pairs fit, and no key is asked for twice"
        )
    shift = torch.randint(0, PAIR_ROOM - 2, (pairs,), generator=generator)
    at = draw(room - 1, pairs) * PAIR_ROOM + 1 + shift
    keys, values = draw(KEYS, pairs), torch.randint(0, VALUES, (pairs,), generator=generator)
    ids[at], ids[at + 1] = FIRST_KEY + keys, FIRST_VALUE + values
    chosen = draw(pairs, questions)
    ids[body::3] = ASK
    ids[body + 1 :: 3], ids[body + 2 :: 3] = FIRST_KEY + keys[chosen], FIRST_VALUE + values[chosen]
    return Recall(
        ids=ids,
        asked=torch.arange(body + 1, tokens, 3),
        values=FIRST_VALUE + values[chosen],
        found=at[chosen],
    )

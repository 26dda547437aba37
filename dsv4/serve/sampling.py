"""From logits to a token, as a client asked: temperature, filters, penalties, seed.

A token depends on its own row of logits, on the text before it, and on a number that belongs to
the seed and the position: never on what else runs, nor on how often the request was preempted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dsv4.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. `temperature=0` takes the most likely. `top_k=0` keeps all. Penalties
    are OpenAI's (of generated tokens) and the repetition penalty (of the prompt's too)."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the most likely token of the logits as they are."""
        penalties = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return self.temperature == 0 and not penalties and self.repetition_penalty == 1


@dataclass(slots=True, kw_only=True)
class History:
    """The tokens of a text, as penalties count them."""

    prompt: frozenset[int] = frozenset()
    counts: dict[int, int] = field(default_factory=dict)  # of generated tokens

    def add(self, token: int) -> None:
        self.counts[token] = self.counts.get(token, 0) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and its logarithmic probability under the model, before temperature, filters,
    penalties and biases; and the most likely tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def choose(
    row: Tensor,
    sampling: Sampling,
    history: History,
    position: int,
    allowed: Tensor | None = None,
) -> int:
    """The token after a text of `position` generated tokens, from its logits [vocabulary].
    `allowed` bool [vocabulary] leaves out the others. Raises InvalidInput for logits that say
    nothing."""
    if sampling.is_plain_greedy and allowed is None:
        return _most_likely(row)
    scores = adjusted(row, sampling, history)
    if allowed is not None:
        scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
    if sampling.temperature == 0:
        return _most_likely(scores)
    return _drawn(scores, sampling, position)


def adjusted(row: Tensor, sampling: Sampling, history: History) -> Tensor:
    """fp64 logits with penalties and biases."""
    scores = row.double()
    if sampling.repetition_penalty != 1 and (seen := history.prompt | history.counts.keys()):
        at = torch.tensor(sorted(seen), device=row.device)
        old = scores[at]
        by = sampling.repetition_penalty
        scores = scores.index_copy(0, at, torch.where(old > 0, old / by, old * by))
    less: dict[int, float] = {}
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in history.counts.items():
            less[token] = sampling.presence_penalty + count * sampling.frequency_penalty
    for token, bias in sampling.logit_bias.items():
        less[token] = less.get(token, 0.0) - bias
    if less:
        at = torch.tensor([*less], device=row.device)
        by_token = torch.tensor([*less.values()], dtype=torch.float64, device=row.device)
        scores = scores.index_add(0, at, by_token, alpha=-1)
    return scores


def _drawn(scores: Tensor, sampling: Sampling, position: int) -> int:
    """From the tempered distribution: its `top_k` most likely, of these the fewest that have
    `top_p` of their probability, of these none less likely than `min_p` of the most likely."""
    count = min(sampling.top_k or len(scores), len(scores))
    order = scores.sort(descending=True, stable=True)
    best, ids = order.values[:count], order.indices[:count]
    _require_number(best[0])
    likely = ((best - best[0]) / sampling.temperature).softmax(dim=0)
    before = likely.cumsum(dim=0) - likely
    kept = (before < sampling.top_p) & (likely >= sampling.min_p * likely[0])
    kept[0] = True
    likely = torch.where(kept, likely, 0.0)
    total = likely.cumsum(dim=0)
    point = uniform(sampling.seed, position) * float(total[-1])
    nth = int(torch.searchsorted(total, torch.tensor(point, dtype=total.dtype), right=True))
    last = int(kept.nonzero()[-1])  # where rounding leads past the end
    return int(ids[min(nth, last)])


def uniform(seed: int, position: int) -> float:
    """A number of [0, 1) that belongs to the seed and the position."""
    bits = np.random.Philox(key=seed % 2**64, counter=position)
    return float(np.random.Generator(bits).random())


def logprobs(row: Tensor, token: int, top: int) -> TokenLogprob:
    """The logarithmic probability of a token, and those of the `top` most likely ones."""
    all_of_them = row.double().log_softmax(dim=0)
    best = all_of_them.topk(min(top, len(row)))
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token=token, logprob=float(all_of_them[token]), top=tuple(found))


def _most_likely(scores: Tensor) -> int:
    best = int(scores.argmax())
    _require_number(scores[best])
    return best


def _require_number(best: Tensor) -> None:
    """Raises InvalidInput: argmax and sort give NaN first, and -inf only where all are left out."""
    if not torch.isfinite(best):
        raise InvalidInput(
            f"the best of the logits is {float(best)}: the model or the request's biases leave no "
            f"token"
        )

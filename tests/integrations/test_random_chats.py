"""Random days of an accelerated model: conversations that go on, are edited, cropped, copied, in
beams and with drafts, and an engine's jobs between them. All tokens are the plain model's."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch

from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.errors import ContextOverflow, OutOfSlots, RequestError
from dsv4.integrations.transformers import Engine, Job
from tests.integrations.fast_v4 import fast, manager_of, plain_model
from tests.integrations.tiny_v4 import VOCABULARY

LONGEST = 330
POLICIES = {"default": {}, "full": {"prefix": PrefixOptions(policy=full())}}
POLICIES |= {"zero": {"prefix": PrefixOptions(policy=zero())}, "none": {"prefix": None}}


class Day:
    """One model, a few conversations, and what happens to them."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        self.engine = Engine(model=model, step_tokens=self.random.choice([5, 40, 64]))
        self.texts: list[list[int]] = [self.words(self.random.choice([1, 100, 128, 200]))]
        self.held: list[tuple[Any, list[int]]] = []  # caches, and the tokens that they have
        self.jobs: list[Job] = []

    def words(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def text(self) -> list[int]:
        """A conversation that goes on, mostly; edited or cut off, or a new one."""
        text = list(self.random.choice(self.texts))
        kind = self.random.randrange(8)
        if kind == 0:
            text = self.words(self.random.randrange(1, 150))
        elif kind == 1 and len(text) > 1:
            del text[self.random.randrange(1, len(text)) :]
        elif kind == 2:
            text[self.random.randrange(len(text))] = self.random.randrange(VOCABULARY)
        text += self.words(self.random.choice([0, 1, 3, 20, 128]))
        return text[:LONGEST]

    def expected(self, text: list[int], tokens: int, **options: Any) -> list[int]:
        ids = torch.tensor([text])
        found: list[int] = (
            plain_model()
            .generate(ids, max_new_tokens=tokens, do_sample=False, use_cache=False, **options)[0]
            .tolist()
        )
        return found

    def generate(self) -> None:
        text, tokens = self.text(), self.random.randrange(1, 6)
        options: dict[str, Any] = {}
        kind = self.random.randrange(6)
        if kind == 0:
            options = {"num_beams": 2}
        expected = self.expected(text, tokens, **options)
        if kind == 1:
            options = {"prompt_lookup_num_tokens": self.random.choice([2, 5])}
        out = self.model.generate(
            torch.tensor([text]),
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            **options,
        )
        assert out.sequences[0].tolist() == expected, options
        self.texts = [*self.texts[-4:], expected]
        if self.random.random() < 0.5 and not options:
            self.held.append((out.past_key_values, expected[:-1]))

    def use_held(self) -> None:
        """A cache that was kept goes on, cropped perhaps, or a copy of it does."""
        if not self.held:
            return
        past, text = self.held.pop(self.random.randrange(len(self.held)))
        kind = self.random.randrange(4)
        try:
            if kind == 0:
                past = copy.deepcopy(past)
            if kind == 1 and len(text) > 1:
                kept = self.random.randrange(1, len(text))
                past.crop(torch.tensor(kept - len(text)))
                text = text[:kept]
            more = self.words(self.random.choice([1, 2, 40]))
            with torch.no_grad():
                found = self.model(torch.tensor([more]), past_key_values=past).logits[0, -1]
                whole = plain_model()(torch.tensor([[*text, *more]])).logits[0, -1]
        except (RequestError, OutOfSlots, ContextOverflow):
            return  # closed, no row for a copy, or too long
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)
        self.held.append((past, [*text, *more]))

    def submit(self) -> None:
        text = self.text()
        self.jobs.append(self.engine.submit(text, self.random.randrange(1, 6)))

    def step(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            self.engine.step()
        if self.jobs and self.random.random() < 0.2:
            self.engine.cancel(self.random.choice(self.jobs))

    def finish_jobs(self) -> None:
        self.engine.run()
        for job in self.jobs:
            text = job.tokens[: job.prompt_tokens]
            if job.generated:
                expected = self.expected(text, len(job.generated))
                assert job.tokens == expected
                self.texts = [*self.texts[-4:], expected]
            assert job.cancelled or len(job.generated) == job.new_tokens
        self.jobs = []

    def forget(self) -> None:
        if self.held:
            self.held.pop()
        gc.collect()

    def act(self) -> None:
        weights = {"generate": 6, "use_held": 4, "submit": 4, "step": 4, "forget": 1}
        (name,) = self.random.choices(list(weights), list(weights.values()))
        if name == "use_held" and self.random.random() < 0.5:
            self.finish_jobs()
        getattr(self, name)()


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_random_days(seed: int, policy: str) -> None:
    options = {"max_batch": 2 + seed % 3, "max_draft_tokens": 3 * (seed % 2), "max_step_tokens": 64}
    with fast(plain_model(), max_context=400, **options, **POLICIES[policy]) as model:
        day = Day(model, seed)
        for _ in range(25):
            day.act()
            manager_of(model).check_invariants()
        day.finish_jobs()

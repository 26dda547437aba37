"""What the demo does with transformers, part by part: the trained model answers on transformers'
cache and on this one.

transformers  each prompt alone, on transformers' own cache: the others are compared with this
paged         the same model with a PagedCache: logits must be equal bit for bit
batch         accelerated, all prompts in one padded batch: tokens must be equal
prefix        a prompt whose beginning is cached: tokens must be equal
restart       a process that answered is killed, this one continues from disk: tokens must be equal
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dsv4.demo.events import Emit, PartBegins, PartResult, PrefixResult, Verdict
from dsv4.demo.prefix import run_twice
from dsv4.demo.prompts import (
    AFTER_RESTART,
    BEFORE_RESTART,
    FIRST,
    NEW_TOKENS,
    QUESTIONS,
    SECOND,
    SHARED,
    Prompts,
)
from dsv4.demo.watch import Watcher
from dsv4.errors import MissingExtra
from dsv4.integrations.transformers import PagedCache, accelerate, restore
from dsv4.units import format_bytes

RECORDS = "bf16"  # unquantised
# transformers adds in a different order, so where its own two best logits are this close, either
# token is right, and so is what follows
TIE = 1e-3
ALL_AGREE = "all tokens as transformers generates them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """`tokens` [rows, n] that were generated, and the `logits` [rows, n, vocabulary] of each."""

    tokens: Tensor
    logits: Tensor


class Story:
    """Runs the parts on the model of `speaking_v4()` and reports through `emit`. The model is
    unchanged afterwards."""

    def __init__(self, model: Any, texts: Prompts, emit: Emit) -> None:
        self.model, self.texts, self._emit = model, texts, emit
        self.prompts = {name: texts.asking(asked) for name, asked in QUESTIONS.items()}
        self.max_context = max(map(len, self.prompts.values())) + NEW_TOKENS
        self.alone: dict[str, Generated] = {}
        self.alone_bytes: dict[str, list[int]] = {}
        self.parts: list[PartResult] = []

    def transformers(self) -> None:
        *others, last = (str(len(prompt)) for prompt in self.prompts.values())
        lengths = f"{', '.join(others)} and {last} tokens"
        clock = self._begin(
            "transformers", f"transformers' own cache, prompts of {lengths}, each alone"
        )
        for name, prompt in self.prompts.items():
            watcher = Watcher("transformers", [name], self._emit, self.texts.said)
            self.alone[name] = self._generate(watcher, prompt[None])
            self.alone_bytes[name] = watcher.transformers_bytes
        total = sum(in_use[-1] for in_use in self.alone_bytes.values())
        self._end(clock, "not compared", f"{format_bytes(total)} of states in fp32", self.alone)

    def paged(self) -> None:
        name = next(iter(self.prompts))
        clock = self._begin("paged", f"model untouched, PagedCache instead, prompt {name}")
        cache = PagedCache.for_model(self.model, max_batch=1, max_context=self.max_context)
        watcher = Watcher("paged", [name], self._emit, self.texts.said, self.alone_bytes[name])
        ours = self._generate(watcher, self.prompts[name][None], past_key_values=cache)
        equal = torch.equal(ours.logits, self.alone[name].logits)
        found = "equal bit for bit" if equal else "NOT equal bit for bit"
        self._end(clock, "agrees" if equal else "differs", f"all logits {found}", [name])

    def batch(self) -> None:
        clock = self._begin("batch", "accelerated, all prompts in one padded batch")
        verdict, note = self._compare(self._generate_batch())
        self._end(clock, verdict, note, self.prompts)

    def prefix(self) -> PrefixResult:
        clock = self._begin("prefix", "a second prompt with the same beginning")
        first, second = (self.texts.asking([*SHARED, last]) for last in (FIRST, SECOND))
        result, tokens = run_twice(
            self.model, first, second, new_tokens=NEW_TOKENS, records=RECORDS
        )
        theirs = _generate(self.model, second[None])
        verdict, note = compare_tokens("the second prompt", tokens, theirs)
        if result.second_run_tokens == result.second_prompt_tokens:
            verdict, note = "differs", "nothing was reused"
        said = {SECOND: self.texts.said(tokens)}
        self._end(clock, verdict, f"{_saving(result)}; {note}", ["second"], said)
        return result

    def restart(self) -> None:
        clock = self._begin(
            "restart", "a process answers and is killed, another one continues from disk"
        )
        try:
            from dsv4.demo.restart import answer_and_die, go_on
        except MissingExtra as error:
            self._end(clock, "not compared", str(error), [])
            return
        with TemporaryDirectory(prefix="dsv4-demo-") as root:
            prompt = self.texts.asking(BEFORE_RESTART)
            before = answer_and_die(Path(root), prompt, new_tokens=NEW_TOKENS)
            after = self.texts.following(AFTER_RESTART)
            question = torch.cat((before, after))
            found = go_on(self.model, Path(root), question, new_tokens=NEW_TOKENS, records=RECORDS)
        theirs = _generate(self.model, question[None])
        verdict, note = compare_tokens("the question", found.tokens, theirs)
        if found.run_tokens > len(after) + 1:
            verdict, note = "differs", "the conversation was computed again"
        saved = (
            f"{found.run_tokens} of {found.prompt_tokens} prompt tokens computed, "
            f"{format_bytes(found.loaded_bytes)} loaded from disk"
        )
        said = {
            BEFORE_RESTART[-1]: self.texts.said(before[len(prompt) :].tolist()),
            AFTER_RESTART: self.texts.said(found.tokens),
        }
        self._end(clock, verdict, f"{saved}; {note}", ["question"], said)

    def _generate_batch(self) -> Generated:
        """All prompts, padded on the left, through the accelerated model."""
        steps = zip(*self.alone_bytes.values(), strict=True)
        in_use = [sum(step) for step in steps]
        watcher = Watcher("batch", list(self.prompts), self._emit, self.texts.said, in_use)
        accelerate(
            self.model,
            max_batch=len(self.prompts),
            max_context=self.max_context,
            records=RECORDS,
        )
        try:
            return self._generate(watcher, **pad_left(list(self.prompts.values())))
        finally:
            restore(self.model)

    def _generate(self, watcher: Watcher, ids: Tensor, **options: Any) -> Generated:
        with watcher.watching(self.model):
            return _generate(self.model, ids, **options)

    def _compare(self, ours: Generated) -> tuple[Verdict, str]:
        """Compares all rows with the prompts run alone."""
        found = [
            compare_tokens(f"prompt {name}", tokens.tolist(), self.alone[name])
            for name, tokens in zip(self.alone, ours.tokens, strict=True)
        ]
        for verdict, note in found:
            if verdict == "differs":
                return verdict, note
        ties = [note for _, note in found if note != ALL_AGREE]
        return "agrees", ties[0] if ties else ALL_AGREE

    def _begin(self, part: str, title: str) -> tuple[str, str, float]:
        self._emit(PartBegins(part=part, title=title))
        return part, title, time.perf_counter()

    def _end(
        self,
        begun: tuple[str, str, float],
        verdict: Verdict,
        note: str,
        prompts: Sequence[str] | dict[str, Any],
        said: dict[str, str] | None = None,
    ) -> None:
        part, title, begin = begun
        result = PartResult(
            part=part,
            title=title,
            note=note,
            verdict=verdict,
            seconds=time.perf_counter() - begin,
            tokens=len(prompts) * NEW_TOKENS,
            said=said or {},
        )
        self.parts.append(result)
        self._emit(result)


def compare_tokens(who: str, ours: Sequence[int], theirs: Generated) -> tuple[Verdict, str]:
    """Greedy tokens of one row must be equal up to where transformers' own logits tie."""
    expected = theirs.tokens[0].tolist()
    for step, (found, wanted) in enumerate(zip(ours, expected, strict=True)):
        if found == wanted:
            continue
        best, next_best = theirs.logits[0, step].topk(2).values.tolist()
        if best - next_best <= TIE:
            return "agrees", f"{who}: tokens equal up to step {step}, where two logits tie"
        return "differs", (
            f"{who}: token {found} at step {step}, but transformers generates {wanted}, "
            f"{best - next_best:.4f} ahead of the next"
        )
    return "agrees", ALL_AGREE


def pad_left(prompts: Sequence[Tensor]) -> dict[str, Tensor]:
    """`ids` and `attention_mask` [rows, longest], as generate takes them."""
    longest = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0)) for p in prompts])
    counts = torch.tensor([len(p) for p in prompts])
    mask = torch.arange(longest) >= (longest - counts)[:, None]
    return {"ids": ids, "attention_mask": mask.long()}


def _saving(found: PrefixResult) -> str:
    return (
        f"{found.second_run_tokens} of {found.second_prompt_tokens} prompt tokens computed, first "
        f"token after {found.second_seconds:.2f} s instead of {found.first_seconds:.2f} s "
        f"({found.source})"
    )


def _generate(model: Any, ids: Tensor, **options: Any) -> Generated:
    out = model.generate(
        ids,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return Generated(tokens=out.sequences[:, ids.shape[1] :], logits=torch.stack(out.logits, dim=1))

"""One answer while it is generated: its text, its stop strings, its grammar, what it reports.

Everything here runs in the thread that steps the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dsv4.cache.prefix.explain import Explanation
from dsv4.cache.prefix.hints import Hints
from dsv4.engine import Job
from dsv4.serve.grammar import Grammar
from dsv4.serve.models import TextStream
from dsv4.serve.sampling import History, Sampling, TokenLogprob, choose, logprobs

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer, and where those of the prompt came from."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    host_tokens: int = 0  # of the cached ones
    storage_tokens: int = 0
    stored_tokens: int = 0  # of the prompt, in whole blocks that are cached now and were not
    explanation: Explanation | None = None  # why no more was cached

    @property
    def device_tokens(self) -> int:
        return self.cached_tokens - self.host_tokens - self.storage_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a step adds to an answer. The last one has a reason, and an error if there was one."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stopped_by: str | None = None  # the stop string
    usage: Usage | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On what terms a request is served: its place in the order and in the cache. `keep_s`:
    how long its prefix shall stay cached; 0 ends that for its session."""

    salt: str | None = None
    session: str = ""
    priority: int = 0  # higher is sooner
    keep_s: float | None = None
    hints: Hints | None = None  # for the prefix cache


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """What the server keeps of a job, as its `data`. `emit` receives its pieces. Of an answer that
    continues here, `said` are the tokens that were generated elsewhere: the last ones of what is
    submitted."""

    sampling: Sampling
    stream: TextStream
    emit: Callable[[Piece], None]
    history: History = field(default_factory=History)
    stops: tuple[str, ...] = ()
    logprobs: int | None = None  # how many of the most likely tokens; None: not wanted
    grammar: Grammar | None = None
    terms: Terms
    said: tuple[int, ...] = ()
    # ---- where it is
    number: int = 0  # in the order of arrival
    passed: int = 0  # jobs that came later and were admitted sooner
    generated: int = 0
    held: str = ""  # text that may be the beginning of a stop string
    stopped_by: str | None = None
    host_tokens: int = 0
    storage_tokens: int = 0
    explanation: Explanation | None = None  # of its prompt, before it was admitted
    arrived_s: float = field(default_factory=time.monotonic)
    last_s: float | None = None
    newest: TokenLogprob | None = None  # of the token that this step chose

    def rank(self, passes: int) -> int:
        return self.terms.priority + self.passed // passes

    def choose(self, row: Tensor) -> int:
        """The next token of its logits. Raises InvalidInput."""
        allowed = None if self.grammar is None else self.grammar.allowed()
        return choose(row, self.sampling, self.history, self.generated, allowed)

    def note_logprobs(self, row: Tensor, token: int) -> None:
        if self.logprobs is not None:
            self.newest = logprobs(row, token, self.logprobs)

    def push(self, job: Job, new: Sequence[int]) -> Piece:
        """The piece of new tokens. If a stop string is found, `stopped_by` is set and the text ends
        before it."""
        for token in new:
            self.history.add(token)
        self.generated += len(new)
        if self.grammar is not None:
            self.grammar.advance(new)
        said = new[:-1] if job.is_stopped else new  # a stop token is not part of the text
        text = self._up_to_stop(self.stream.push(said))
        found = (self.newest,) if said and self.newest is not None else ()
        return Piece(text=text, tokens=tuple(said), logprobs=found)

    def last(self, job: Job, usage: Usage) -> Piece:
        """What is left when the job has ended."""
        if self.stopped_by is not None:
            return Piece(finish="stop", stopped_by=self.stopped_by, usage=usage)
        if job.error is not None:
            return Piece(finish="error", error=job.error, usage=usage)
        text = self._up_to_stop(self.stream.end())
        if self.stopped_by is not None:
            return Piece(text=text, finish="stop", stopped_by=self.stopped_by, usage=usage)
        text, self.held = text + self.held, ""
        reason: FinishReason = "length"
        if job.cancelled and not job.is_complete:
            reason = "cancelled"
        elif job.is_stopped:
            reason = "stop"
        return Piece(text=text, finish=reason, usage=usage)

    def _up_to_stop(self, new: str) -> str:
        """The text that is certain: up to the first stop string, or to what may become one."""
        text = self.held + new
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.held = ""
            return text[:at]
        kept = max((overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]


def begin(generation: Generation, ids: Sequence[int]) -> None:
    """Before the job of these tokens is submitted: the answer is where `said` has brought it."""
    said = generation.said
    generation.history.prompt = frozenset(ids[: len(ids) - len(said)])
    for token in said:
        generation.history.add(token)
    generation.generated = len(said)
    if generation.grammar is not None:
        generation.grammar.advance(said)


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of the stop string."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0

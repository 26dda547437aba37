"""From a request to its answers: prompts become jobs, pieces come back, and a client that goes
takes its jobs with it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dsv4.cache.prefix.explain import Explanation
from dsv4.cache.prefix.hints import MOST_PRIORITY, Hints
from dsv4.engine import Job
from dsv4.errors import InvalidInput
from dsv4.serve.bodies import cut
from dsv4.serve.failures import ApiError
from dsv4.serve.generation import Generation, Piece, Terms, Usage
from dsv4.serve.grammar import Grammar
from dsv4.serve.models import Defaults, ServedModel, TextStream
from dsv4.serve.sampling import Sampling
from dsv4.serve.schemas import CacheFields, SamplingFields

SESSION_HEADERS = (
    *("x-session-id", "x-dynamo-session-id", "x-claude-code-session-id", "thread-id"),
)
LONGEST_ID = 128


def read_terms(request: Request, body: CacheFields, keep_s: float | None = None) -> Terms:
    """The terms that headers and body ask for. Raises ApiError."""
    headers, ext = request.headers, body.nvext
    tenant = headers.get("x-tenant-id")
    names = [body.session_id, *(headers.get(name) for name in SESSION_HEADERS)]
    session = next((name for name in names if name), None)
    for name in (tenant, session):
        if name is not None and len(name) > LONGEST_ID:
            raise ApiError(400, f"a tenant or session of {len(name)} characters: at most 128")
    priority = -body.priority
    if "x-vllm-priority" in headers:
        try:
            priority = -int(headers["x-vllm-priority"])
        except ValueError:
            raise ApiError(400, "X-Vllm-Priority is not a whole number") from None
    if ext is not None and ext.agent_hints is not None:
        priority += ext.agent_hints.priority
    asked = [body.cache_control, None if ext is None else ext.cache_control]
    kept = [keep_s or 0.0, *(each.seconds for each in asked if each is not None)]
    longest = max(kept) or None
    if headers.get("x-dynamo-session-final", "").lower() in ("1", "true"):
        longest = 0.0
    return Terms(
        salt=_salt(tenant, body.cache_salt),
        session=_session(tenant, body, session),
        priority=max(-1000, min(1000, priority)),
        keep_s=longest,
        hints=_for_cache(session, priority, is_final=longest == 0.0),
    )


def read_salt(request: Request, salt: str | None) -> str | None:
    """The salt of a request that has this one. Raises ApiError."""
    tenant = request.headers.get("x-tenant-id")
    if tenant is not None and len(tenant) > LONGEST_ID:
        raise ApiError(400, f"a tenant of {len(tenant)} characters: at most {LONGEST_ID}")
    return _salt(tenant, salt)


def _for_cache(name: str | None, priority: int, *, is_final: bool) -> Hints:
    """What the prefix cache should prefer; it knows fewer priorities. `prompt_cache_key` is not a
    session there: different conversations may have the same key, and a session has only one newest
    state."""
    return Hints(
        session=name or None,
        priority=max(-MOST_PRIORITY, min(MOST_PRIORITY, priority)),
        final=is_final and bool(name),
    )


def _salt(tenant: str | None, salt: str | None) -> str | None:
    """Made of tenant and salt, so that a tenant that gives another's salt still shares nothing with
    it."""
    if tenant is None:
        return None if not salt else f"s:{salt}"
    return f"t{len(tenant)}:{tenant}:{salt or ''}"


def _session(tenant: str | None, body: CacheFields, session: str | None) -> str:
    name = session or body.prompt_cache_key or ""
    return f"{tenant or ''}/{body.cache_salt or ''}/{name}"


def sampling(body: SamplingFields, defaults: Defaults, **others: Any) -> Sampling:
    """How tokens are chosen: as the request says, or else as the model wants it, or else with the
    defaults of OpenAI's API."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given: dict[str, Any] = {}
    for name in names:
        asked = getattr(body, name, None)
        value = getattr(defaults, name) if asked is None else asked
        if value is not None:
            given[name] = value
    if given.get("top_k") == -1:
        given["top_k"] = 0
    seed = getattr(body, "seed", None)
    given["seed"] = secrets.randbits(63) if seed is None else seed
    return Sampling(**given, **{k: v for k, v in others.items() if v is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the model, `choices` times. `new_tokens=None`: as many as fit."""

    ids: Sequence[int]
    new_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    grammar: Callable[[], Grammar] | None = None
    choices: int = 1


class Asked(Protocol):
    """What runs jobs: the thread that steps (`dsv4.serve.runner.Runner` has the contract), or other
    processes. Calls may come from any thread and may wait."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def max_context(self) -> int: ...

    @property
    def most_tokens(self) -> int: ...

    def check_fits(self, tokens: int, count: int = 1) -> None: ...

    def submit(
        self,
        ids: Sequence[int],
        new_tokens: int,
        generation: Generation,
        *,
        stop_tokens: frozenset[int],
    ) -> Job: ...

    def cancel(self, job: Job) -> None: ...


@dataclass(slots=True, kw_only=True)
class Answer:
    """The jobs of one request, and what they have said."""

    runner: Asked
    model: ServedModel
    jobs: list[Job] = field(default_factory=list)
    heard: asyncio.Queue[tuple[int, Piece]] = field(default_factory=asyncio.Queue)

    async def ask(self, questions: Sequence[Question], terms: Terms) -> None:
        """Submits all, or none. Raises what `Runner.submit` raises, and ApiError."""
        try:
            await run_in_threadpool(self._submit, questions, terms)
        except BaseException:
            self.cancel()
            raise

    def _submit(self, questions: Sequence[Question], terms: Terms) -> None:
        words, longest = self.model.tokenizer.vocabulary, self.model.max_context
        longest = min(longest, self.runner.most_tokens)
        jobs = list[tuple[Question, int]]()
        for question in questions:
            ids, bias = question.ids, question.sampling.logit_bias
            if not ids:
                raise ApiError(400, "the prompt is empty: it needs at least one token")
            for token in (*bias, *question.stop_tokens):
                if token >= words:
                    raise ApiError(400, f"token {token}: the vocabulary has {words}")
            new = question.new_tokens
            if new is None:
                new = max(1, longest - len(ids))
            jobs += [(question, new)] * question.choices
        for question, new in jobs:
            self.runner.check_fits(len(question.ids) + new, len(jobs))
        for nth, (question, new) in enumerate(jobs):
            self.jobs.append(self._job(nth, question, new, terms))

    def _job(self, nth: int, question: Question, new_tokens: int, terms: Terms) -> Job:
        def emit(piece: Piece) -> None:
            self.heard.put_nowait((nth, piece))

        chosen = question.sampling
        generation = Generation(
            sampling=replace(chosen, seed=chosen.seed + nth),
            stream=TextStream(self.model.tokenizer),
            emit=emit,
            stops=question.stops,
            logprobs=question.logprobs,
            grammar=None if question.grammar is None else question.grammar(),
            terms=terms,
        )
        return self.runner.submit(
            question.ids,
            new_tokens,
            generation,
            stop_tokens=question.stop_tokens,
        )

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of all jobs, as they come, until each job has ended."""
        left = len(self.jobs)
        while left:
            nth, piece = await self.heard.get()
            left -= piece.finish is not None
            yield nth, piece

    async def whole(self, request: Request) -> list[Whole]:
        """Everything that the jobs say. Ends them if the client disconnects. Raises the first
        job's error."""
        gone = asyncio.ensure_future(_disconnect(request))
        collected = asyncio.ensure_future(self._collect())
        try:
            await asyncio.wait((gone, collected), return_when=asyncio.FIRST_COMPLETED)
            if not collected.done():
                raise ApiError(499, "the client has disconnected")
            return collected.result()
        finally:
            for task in (gone, collected):
                task.cancel()
            self.cancel()

    async def _collect(self) -> list[Whole]:
        found = [Whole() for _ in self.jobs]
        async for nth, piece in self.pieces():
            found[nth].add(piece)
            if piece.error is not None:
                raise piece.error
        return found

    def cancel(self) -> None:
        """Ends what still runs."""
        for job in self.jobs:
            if not job.is_over:
                self.runner.cancel(job)


@dataclass(slots=True)
class Whole:
    """One job's answer, all of it."""

    texts: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    last: Piece = field(default_factory=Piece)

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.pieces.append(piece)
        if piece.finish is not None:
            self.last = piece

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def usage(self) -> Usage:
        assert self.last.usage is not None
        return self.last.usage


def total(usages: Sequence[Usage]) -> Usage:
    """The usage of one prompt with several answers: the prompt counts once, with what its first
    answer found cached."""
    first = usages[0]
    return replace(first, generated_tokens=sum(each.generated_tokens for each in usages))


def cache_debug(explanations: Sequence[Explanation]) -> dict[str, Any]:
    """Why no more was cached, for each prompt; nothing on a server that does not explain."""
    if not explanations:
        return {}
    return {"cache_debug": [{"text": str(each), **each.to_dict()} for each in explanations]}


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. Whatever ends it, the answer's jobs end too."""

    def __init__(self, events: AsyncIterator[str], answer: Answer) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.cancel()


def require_model(name: str, model: ServedModel) -> None:
    """Raises ApiError for a model that is not served."""
    if name != model.name:
        message = f"the model {cut(name)!r} is not here: this server has {model.name!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


def flat_content(content: object) -> str | None:
    """The text of a message's content, its parts one after the other. Raises InvalidInput."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInput(f"content is {type(content).__name__}: give text")
    return "".join(part.text for part in content)

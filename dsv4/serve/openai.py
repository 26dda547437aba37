"""/v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import json
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dsv4.serve.answers import (
    Answer,
    EventStream,
    Question,
    Whole,
    cache_debug,
    flat_content,
    read_terms,
    require_model,
    sampling,
    total,
)
from dsv4.serve.bodies import BoundedRoute
from dsv4.serve.calls import Call, CallReader
from dsv4.serve.failures import ApiError, as_api_error
from dsv4.serve.generation import Piece, Terms, Usage
from dsv4.serve.grammar import Grammar
from dsv4.serve.models import Message, ServedModel, Tokenizer, require_may_fit
from dsv4.serve.sampling import TokenLogprob
from dsv4.serve.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ExplainRequest,
    OpenAIFields,
)
from dsv4.serve.state import Served

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
CHOICES = 64  # of one request: prompts times n


def routes(state: Served) -> APIRouter:
    router = APIRouter(route_class=BoundedRoute)

    @router.get("/v1/models")
    async def models() -> JSONResponse:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [state.model_card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        """The model that is served, by its name."""
        require_model(name, state.model)
        return JSONResponse(state.model_card())

    @router.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """The answer to a chat."""
        require_model(body.model, state.model)
        terms = read_terms(request, body)
        top = None
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if body.logprobs:
            top = body.top_logprobs or 0
        ids = await run_in_threadpool(rendered, state, body)
        asked = body.max_completion_tokens or body.max_tokens or state.new_tokens
        question = _question(state, body, ids, asked, top)
        shape = _Chat(state.model.tokenizer, reads_calls=_may_call(body))
        return await _answer(state, request, body, [question], terms, shape)

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """What follows a text, or each of several."""
        require_model(body.model, state.model)
        terms = read_terms(request, body)
        prompts = await run_in_threadpool(_prompts, state, body.prompt)
        if len(prompts) * (body.n or 1) > CHOICES:
            raise ApiError(400, f"{len(prompts)} prompts: at most {CHOICES} choices in all")
        asked = body.max_tokens or COMPLETION_TOKENS
        questions = [_question(state, body, ids, asked, body.logprobs) for ids in prompts]
        shape = _Text(state.model.tokenizer)
        return await _answer(state, request, body, questions, terms, shape)

    return router


def _may_call(body: ChatRequest) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def rendered(state: Served, body: ChatRequest | ExplainRequest) -> list[int]:
    """A chat's tokens."""
    has_tools = _may_call(body) if isinstance(body, ChatRequest) else True
    return state.model.chat_tokens(
        [_message(each) for each in body.messages or ()],
        tools=[each.model_dump() for each in body.tools or ()] if has_tools else (),
        options=body.chat_template_kwargs,
    )


def encoded(state: Served, prompt: str | Sequence[int]) -> Sequence[int]:
    """A text's tokens. Raises ContextOverflow."""
    return _encoded(state.model, prompt) if isinstance(prompt, str) else prompt


def _prompts(state: Served, prompt: str | Sequence[Any]) -> list[Sequence[int]]:
    if isinstance(prompt, str):
        return [_encoded(state.model, prompt)]
    if isinstance(prompt[0], int):
        return [[*prompt]]
    return [_encoded(state.model, each) if isinstance(each, str) else each for each in prompt]


def _encoded(model: ServedModel, text: str) -> list[int]:
    """Raises ContextOverflow."""
    require_may_fit(text, model.tokenizer, model.max_context)
    return model.tokenizer.encode(text)


def _message(message: ChatMessage) -> Message:
    given = message.model_dump(exclude_unset=True, exclude={"cache_control"})
    return {**given, "content": flat_content(message.content)}


def _question(
    state: Served,
    body: OpenAIFields,
    ids: Sequence[int],
    new_tokens: int | None,
    logprobs: int | None,
) -> Question:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    ends = frozenset() if body.ignore_eos else state.model.tokenizer.end_tokens
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    chosen = sampling(
        body,
        state.model.defaults,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=bias,
    )
    if any(abs(value) > 100 for value in bias.values()):
        raise ApiError(400, "a bias is between -100 and 100", param="logit_bias")
    return Question(
        ids=ids,
        new_tokens=new_tokens,
        sampling=chosen,
        stops=stops,
        stop_tokens=ends | frozenset(body.stop_token_ids or ()),
        logprobs=logprobs,
        grammar=_grammar(state, body),
        choices=body.n or 1,
    )


def _grammar(state: Served, body: OpenAIFields) -> Callable[[], Grammar] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return lambda: state.grammars.json(None)
    if wanted.json_schema is None:
        raise ApiError(400, "json_schema is missing", param="response_format.json_schema")
    schema = wanted.json_schema.schema_
    return lambda: state.grammars.json(schema)


# ---- answers -------------------------------------------------------------------------------------


async def _answer(
    state: Served,
    request: Request,
    body: OpenAIFields,
    questions: Sequence[Question],
    terms: Terms,
    shape: _Chat | _Text,
) -> Response:
    answer = Answer(runner=state.asked, model=state.model)
    await answer.ask(questions, terms)
    head = {
        "id": f"{shape.prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": state.model.name,
    }
    if body.stream:
        wants_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_events(answer, head, shape, questions, bool(wants_usage)), answer)
    found = await answer.whole(request)
    choices = [shape.choice(nth, whole) for nth, whole in enumerate(found)]
    usage = _usage(_per_prompt([whole.usage for whole in found], questions))
    return JSONResponse({**head, "object": shape.kind, "choices": choices, "usage": usage})


async def _events(
    answer: Answer,
    head: dict[str, Any],
    shape: _Chat | _Text,
    questions: Sequence[Question],
    wants_usage: bool,
) -> AsyncIterator[str]:
    head = {**head, "object": shape.chunk_kind}
    if wants_usage:
        head["usage"] = None
    usages: dict[int, Usage] = {}
    offsets = [0] * len(answer.jobs)
    for nth in range(len(answer.jobs)):
        if (first := shape.first(nth)) is not None:
            yield _event({**head, "choices": [first]})
    try:
        async for nth, piece in answer.pieces():
            if piece.error is not None:
                body = as_api_error(piece.error).body(anthropic=False)
                yield _event(body)
                return
            if piece.usage is not None:
                usages[nth] = piece.usage
            choice = shape.delta(nth, piece, offsets[nth])
            offsets[nth] += len(piece.text)
            if choice is not None:
                yield _event({**head, "choices": [choice]})
        if wants_usage:
            found = _per_prompt([usages[nth] for nth in sorted(usages)], questions)
            yield _event({**head, "choices": [], "usage": _usage(found)})
        yield "data: [DONE]\n\n"
    finally:
        answer.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _per_prompt(usages: Sequence[Usage], questions: Sequence[Question]) -> list[Usage]:
    found, at = [], 0
    for question in questions:
        found.append(total(usages[at : at + question.choices]))
        at += question.choices
    return found


def _usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """With the names of OpenAI, vLLM, SGLang and DeepSeek."""
    prompt = sum(each.prompt_tokens for each in usages)
    generated = sum(each.generated_tokens for each in usages)
    cached = sum(each.cached_tokens for each in usages)
    explained = [each.explanation for each in usages if each.explanation is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "created_cache_tokens": sum(each.stored_tokens for each in usages),
            "cached_tokens_details": {
                "device": sum(each.device_tokens for each in usages),
                "host": sum(each.host_tokens for each in usages),
                "storage": sum(each.storage_tokens for each in usages),
            },
        },
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
        **cache_debug(explained),
    }


class _Chat:
    """The shape of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, reads_calls: bool) -> None:
        self._tokenizer, self._reads_calls = tokenizer, reads_calls
        self._readers = defaultdict[int, CallReader](CallReader)

    def first(self, nth: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": nth, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, nth: int, piece: Piece, offset: int) -> dict[str, Any] | None:
        text, calls = self._read(nth, piece.text, piece)
        if not (text or calls or piece.logprobs or piece.finish):
            return None
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        return {
            "index": nth,
            "delta": delta,
            "logprobs": self._logprobs([piece]),
            "finish_reason": self._finish(nth, piece),
        }

    def choice(self, nth: int, whole: Whole) -> dict[str, Any]:
        text, calls = self._read(nth, whole.text, whole.last)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in calls
            ]
        return {
            "index": nth,
            "message": message,
            "logprobs": self._logprobs(whole.pieces),
            "finish_reason": self._finish(nth, whole.last),
        }

    def _read(self, nth: int, text: str, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """What a text of an answer adds to its content, and to its calls; with the last piece also
        what was held back."""
        if not self._reads_calls:
            return text, []
        reader = self._readers[nth]
        before = reader.calls
        found = reader.read(text, is_last=piece.finish is not None)
        calls = [each for each in found if isinstance(each, Call)]
        return "".join(each for each in found if isinstance(each, str)), [
            {
                "index": before + at,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.json},
            }
            for at, call in enumerate(calls)
        ]

    def _finish(self, nth: int, piece: Piece) -> str | None:
        has_called = self._reads_calls and self._readers[nth].calls > 0
        if has_called and piece.finish == "stop" and piece.stopped_by is None:
            return "tool_calls"
        return piece.finish

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        found = [self._entry(each) for piece in pieces for each in piece.logprobs]
        return {"content": found, "refusal": None} if found else None

    def _entry(self, found: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in found.top]
        return {**self._token(found.token, found.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": [*raw]}


class _Text:
    """The shape of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def first(self, nth: int) -> dict[str, Any] | None:
        return None

    def delta(self, nth: int, piece: Piece, offset: int) -> dict[str, Any] | None:
        if not (piece.text or piece.logprobs or piece.finish):
            return None
        return {
            "index": nth,
            "text": piece.text,
            "logprobs": self._logprobs([piece], offset),
            "finish_reason": piece.finish,
        }

    def choice(self, nth: int, whole: Whole) -> dict[str, Any]:
        return {
            "index": nth,
            "text": whole.text,
            "logprobs": self._logprobs(whole.pieces, 0),
            "finish_reason": whole.last.finish,
        }

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any] | None:
        """A token's offset is where the text was when it came."""
        words, values, tops, offsets = [], [], [], []
        for piece in pieces:
            for each in piece.logprobs:
                words.append(self._word(each.token))
                values.append(each.logprob)
                tops.append({self._word(token): value for token, value in each.top})
                offsets.append(offset)
            offset += len(piece.text)
        if not words:
            return None
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(names, (words, values, tops, offsets), strict=True))

    def _word(self, token: int) -> str:
        """The token's text; bytes that are not UTF-8 as OpenAI writes them."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode() if raw else f"<|{token}|>"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

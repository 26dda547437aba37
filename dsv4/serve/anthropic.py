"""/v1/messages, as Anthropic's clients speak it."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dsv4.errors import InvalidInput
from dsv4.serve.answers import (
    Answer,
    EventStream,
    Question,
    cache_debug,
    read_terms,
    require_model,
    sampling,
)
from dsv4.serve.bodies import BoundedRoute
from dsv4.serve.failures import as_api_error
from dsv4.serve.generation import Piece, Usage
from dsv4.serve.models import Message
from dsv4.serve.schemas import AnthropicBlock, AnthropicTool, MessagesRequest
from dsv4.serve.state import Served


def routes(state: Served) -> APIRouter:
    router = APIRouter(route_class=BoundedRoute)

    @router.post("/v1/messages")
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """The answer to a chat."""
        require_model(body.model, state.model)
        terms = read_terms(request, body, max(_kept(body), default=None))

        def render() -> list[int]:
            chat = _messages(body)
            return state.model.chat_tokens(chat, tools=[_tool(each) for each in body.tools or ()])

        ids = await run_in_threadpool(render)
        question = Question(
            ids=ids,
            new_tokens=body.max_tokens,
            sampling=sampling(body, state.model.defaults),
            stops=tuple(body.stop_sequences or ()),
            stop_tokens=state.model.tokenizer.end_tokens,
        )
        answer = Answer(runner=state.asked, model=state.model)
        await answer.ask([question], terms)
        head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": state.model.name,
        }
        if body.stream:
            return EventStream(_events(answer, head, len(ids)), answer)
        (found,) = await answer.whole(request)
        content = [{"type": "text", "text": found.text}]
        return JSONResponse({**head, "content": content, **_end(found.last, found.usage)})

    return router


def _kept(body: MessagesRequest) -> Iterable[float]:
    """For how many seconds the parts of a request ask to be cached. Every part keeps the whole
    prompt."""
    parts: list[Any] = [body, *(body.tools or ())]
    for content in (body.system, *(message.content for message in body.messages)):
        if isinstance(content, list):
            parts += content
    return (part.cache_control.seconds for part in parts if part.cache_control is not None)


def _messages(body: MessagesRequest) -> list[Message]:
    """In OpenAI's shape, which templates read. Raises InvalidInput."""
    chat = list[Message]()
    if body.system is not None:
        chat.append({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        if isinstance(message.content, str):
            chat.append({"role": message.role, "content": message.content})
        else:
            chat += _blocks(message.role, message.content)
    return chat


def _blocks(role: str, blocks: Sequence[AnthropicBlock]) -> list[Message]:
    """One message of text and calls, with the results of earlier calls before it."""
    results, texts, calls = list[Message](), list[str](), list[dict[str, Any]]()
    for block in blocks:
        given = block.model_extra or {}
        if block.type == "text":
            texts.append(_text([block]))
        elif block.type == "tool_use" and role == "assistant":
            function = {
                "name": str(given.get("name", "")),
                "arguments": json.dumps(given.get("input", {})),
            }
            calls.append({"id": str(given.get("id", "")), "type": "function", "function": function})
        elif block.type == "tool_result" and role == "user":
            said = given.get("content", "")
            content = said if isinstance(said, str) else _text(said)
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": str(given.get("tool_use_id", "")),
                    "content": content,
                }
            )
        else:
            raise InvalidInput(f"a block of type {block.type!r} of the {role}: give text")
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if texts or calls or not results else results


def _text(content: object) -> str:
    """Raises InvalidInput for what is not text."""
    if isinstance(content, str):
        return content
    found = []
    for block in content if isinstance(content, list) else [content]:
        given = block if isinstance(block, dict) else {}
        if isinstance(block, AnthropicBlock):
            given = {"type": block.type, **(block.model_extra or {})}
        if given.get("type") != "text" or not isinstance(given.get("text"), str):
            raise InvalidInput(f"a block of type {given.get('type')!r}: give text")
        found.append(given["text"])
    return "".join(found)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


# ---- answers -------------------------------------------------------------------------------------


def _end(piece: Piece, usage: Usage) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens"}.get(piece.finish or "", "end_turn")
    if piece.stopped_by is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": piece.stopped_by, "usage": _usage(usage)}


def _usage(usage: Usage) -> dict[str, Any]:
    """The prompt's tokens are in three parts: read from the cache, put there, and others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.stored_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.stored_tokens,
        "output_tokens": usage.generated_tokens,
        **cache_debug([] if usage.explanation is None else [usage.explanation]),
    }


async def _events(answer: Answer, head: dict[str, Any], prompt: int) -> AsyncIterator[str]:
    """Only the last event says what the prompt found in the cache: before, it is not known."""
    usage = {"input_tokens": prompt, "output_tokens": 0}
    message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=message)
    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    try:
        async for _, piece in answer.pieces():
            if piece.error is not None:
                body = as_api_error(piece.error).body(anthropic=True)
                yield _event("error", error=body["error"])
                return
            if piece.text:
                yield _event(
                    "content_block_delta",
                    index=0,
                    delta={"type": "text_delta", "text": piece.text},
                )
            if piece.usage is not None:
                end = _end(piece, piece.usage)
                used = end.pop("usage")
                yield _event("content_block_stop", index=0)
                yield _event("message_delta", delta=end, usage=used)
        yield _event("message_stop")
    finally:
        answer.cancel()


def _event(kind: str, **body: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n"

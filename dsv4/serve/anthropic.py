"""/v1/messages, as Anthropic's clients speak it."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
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
from dsv4.serve.calls import Call, CallReader
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

        has_none = body.tool_choice is not None and body.tool_choice.type == "none"
        tools = [] if has_none else [_tool(each) for each in body.tools or ()]

        def render() -> list[int]:
            return state.model.chat_tokens(_messages(body), tools=tools)

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
        reader = CallReader() if tools else None
        if body.stream:
            return EventStream(_events(answer, head, len(ids), reader), answer)
        (found,) = await answer.whole(request)
        content = _content(found.text, reader)
        end = _end(found.last, found.usage, reader)
        return JSONResponse({**head, "content": content, **end})

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


def _read(text: str, reader: CallReader | None, *, is_last: bool) -> list[str | Call]:
    """What a text adds to an answer; with the last one also what was held back."""
    if reader is None:
        return [text] if text else []
    return reader.read(text, is_last=is_last)


def _block(part: str | Call) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    call_id = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": call_id, "name": part.name, "input": part.arguments}


def _content(text: str, reader: CallReader | None) -> list[dict[str, Any]]:
    """An answer's blocks: one at least."""
    return [_block(part) for part in _read(text, reader, is_last=True) or [""]]


def _end(piece: Piece, usage: Usage, reader: CallReader | None) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens"}.get(piece.finish or "", "end_turn")
    if piece.stopped_by is not None:
        reason = "stop_sequence"
    elif piece.finish == "stop" and reader is not None and reader.calls:
        reason = "tool_use"
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


class _Blocks:
    """The events of an answer's blocks: text grows, a call comes whole."""

    def __init__(self) -> None:
        self._index, self._is_open = -1, False

    def add(self, part: str | Call) -> Iterator[str]:
        if isinstance(part, Call):
            yield from self.close()
            yield self._start({**_block(part), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": part.json})
            yield from self.close()
            return
        if not self._is_open:
            yield self._start(_block(""))
        if part:
            yield self._delta({"type": "text_delta", "text": part})

    def end(self) -> Iterator[str]:
        """An answer has one block at least."""
        if self._index < 0:
            yield from self.add("")
        yield from self.close()

    def close(self) -> Iterator[str]:
        if self._is_open:
            self._is_open = False
            yield _event("content_block_stop", index=self._index)

    def _start(self, block: dict[str, Any]) -> str:
        self._index, self._is_open = self._index + 1, True
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)


async def _events(
    answer: Answer, head: dict[str, Any], prompt: int, reader: CallReader | None
) -> AsyncIterator[str]:
    """Only the last event says what the prompt found in the cache: before, it is not known."""
    blocks = _Blocks()
    usage = {"input_tokens": prompt, "output_tokens": 0}
    message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=message)
    try:
        async for _, piece in answer.pieces():
            if piece.error is not None:
                body = as_api_error(piece.error).body(anthropic=True)
                yield _event("error", error=body["error"])
                return
            for part in _read(piece.text, reader, is_last=piece.finish is not None):
                for event in blocks.add(part):
                    yield event
            if piece.usage is not None:
                end = _end(piece, piece.usage, reader)
                used = end.pop("usage")
                for event in blocks.end():
                    yield event
                yield _event("message_delta", delta=end, usage=used)
        yield _event("message_stop")
    finally:
        answer.cancel()


def _event(kind: str, **body: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n"

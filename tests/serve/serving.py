"""A server in this process, on a port of its own, and what it must answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import anthropic
import httpx
import openai
import torch
import uvicorn

from dsv4.cache.prefix.options import PrefixOptions
from dsv4.serve import process
from dsv4.serve.app import make_state
from dsv4.serve.models import Room, ServedModel, StandIn, decode
from dsv4.serve.options import ServerOptions
from dsv4.serve.state import ServerState

KEY = "not-a-secret"
WAIT_S = 200.0  # only reached if something is broken


@dataclass(kw_only=True)
class Running:
    url: str
    state: ServerState
    server: uvicorn.Server

    @property
    def engine(self) -> Any:
        return self.state.runner.engine

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            **{
                "base_url": f"{self.url}/v1",
                "api_key": KEY,
                "max_retries": 0,
                "timeout": WAIT_S,
                **options,
            }
        )

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            **{
                "base_url": self.url,
                "api_key": KEY,
                "max_retries": 0,
                "timeout": WAIT_S,
                **options,
            }
        )

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S, **options)

    def wait_until(self, holds: Any) -> None:
        """Until something is so between two steps."""
        event = threading.Event()
        runner = self.state.runner

        def look() -> None:
            if holds():
                event.set()

        runner.after_step.append(look)
        try:
            runner.call(look).result(WAIT_S)
            assert event.wait(WAIT_S) or runner.call(holds).result(WAIT_S)
        finally:
            runner.after_step.remove(look)

    def is_idle(self) -> bool:
        return not self.engine.jobs and not self.engine.manager.requests


@contextmanager
def running(model: ServedModel | None = None, **options: Any) -> Iterator[Running]:
    """A server of a model (the stand-in), until the block ends."""
    state = make_state(model or StandIn(), ServerOptions(**options))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(process.config(state))
    started = threading.Event()
    startup = server.startup

    async def note_start(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = note_start  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert started.wait(WAIT_S)
    try:
        port = listener.getsockname()[1]
        yield Running(url=f"http://127.0.0.1:{port}", state=state, server=server)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive()


@cache
def _alone() -> Any:
    """A model on a cache of its own, one request at a time, without a prefix cache in between."""
    room = Room(max_requests=1, max_context=2048, max_step_tokens=512, prefix=PrefixOptions())
    return StandIn().open(room)


def greedy(ids: Sequence[int], new_tokens: int, ends: frozenset[int] = frozenset()) -> list[int]:
    """What the stand-in says, token by token, with nothing else there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    opened = _alone()
    manager, tokens = opened.manager, [*ids]
    request = manager.admit_request()
    try:
        while len(tokens) < len(ids) + new_tokens and not ends & {*tokens[len(ids) :]}:
            run = tokens[request.length :][:512]
            with manager.step([(request, len(run))]) as plan:
                logits = opened.model.forward(plan, torch.tensor(run), torch.tensor([len(run) - 1]))
            if request.length == len(tokens):
                tokens.append(int(logits[0].argmax()))
    finally:
        manager.release_request(request)
        torch.set_num_threads(threads)
    return tokens[len(ids) :]


def greedy_text(ids: Sequence[int], new_tokens: int) -> str:
    tokenizer = StandIn().tokenizer
    found = greedy(ids, new_tokens, tokenizer.end_tokens)
    return decode(tokenizer, [token for token in found if token not in tokenizer.end_tokens])


def chat_ids(*said: str) -> list[int]:
    """Of user, assistant, user, … in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[nth % 2], "content": text} for nth, text in enumerate(said)]
    return StandIn().chat_tokens(messages)

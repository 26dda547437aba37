"""What all routes share."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.concurrency import run_in_threadpool

from dsv4.serve.answers import Asked
from dsv4.serve.grammar import Grammars
from dsv4.serve.live import Live
from dsv4.serve.metrics import Metrics
from dsv4.serve.models import ServedModel
from dsv4.serve.options import ServerOptions
from dsv4.serve.runner import Runner, Timing
from dsv4.serve.turns import Turns


@dataclass(kw_only=True)
class Served(ABC):
    """What all routes share: a model, where its jobs run, and what the server was asked to be."""

    model: ServedModel
    options: ServerOptions
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    @abstractmethod
    def asked(self) -> Asked:
        """What runs the jobs."""

    @abstractmethod
    async def metrics_text(self) -> bytes:
        """In Prometheus' exposition format."""

    @abstractmethod
    async def cache_state(self) -> dict[str, Any]:
        """What the cache holds, between two steps."""

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.model.tokenizer)

    @property
    def new_tokens(self) -> int | None:
        """The length of an answer whose request does not give one. None: as many tokens as fit."""
        return self.options.max_new_tokens or self.model.defaults.new_tokens

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dsv4",
            "max_model_len": self.asked.max_context,
        }


@dataclass(kw_only=True)
class ServerState(Served):
    """One model on one engine, in this process."""

    runner: Runner
    metrics: Metrics = field(init=False)
    live: Live = field(init=False)

    def __post_init__(self) -> None:
        self.metrics, self.live = Metrics(self.runner), Live(self.runner)
        Turns(self.runner)  # the runner has it
        self.runner.timing = Timing(
            first=self.metrics.first.observe,
            later=self.metrics.later.observe,
            end=self.metrics.whole.observe,
        )

    @property
    def asked(self) -> Runner:
        return self.runner

    async def metrics_text(self) -> bytes:
        return await run_in_threadpool(self.metrics.text)

    async def cache_state(self) -> dict[str, Any]:
        return await asyncio.wrap_future(self.runner.call(self.live.state))

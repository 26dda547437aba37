"""What all routes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dsv4.serve.grammar import Grammars
from dsv4.serve.live import Live
from dsv4.serve.metrics import Metrics
from dsv4.serve.models import ServedModel
from dsv4.serve.options import ServerOptions
from dsv4.serve.runner import Runner, Timing
from dsv4.serve.turns import Turns


@dataclass(kw_only=True)
class ServerState:
    """One model on one engine, and what the server was asked to be."""

    model: ServedModel
    runner: Runner
    options: ServerOptions
    created: int = field(default_factory=lambda: int(time.time()))
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

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.model.tokenizer)

    @property
    def new_tokens(self) -> int | None:
        """The length of an answer whose request does not give one. None: as many tokens as fit."""
        return self.options.max_new_tokens

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dsv4",
            "max_model_len": self.runner.manager.schema.max_context,
        }

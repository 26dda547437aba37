"""The demo model as `dsv4 serve` serves it: `dsv4.serve.models.ServedModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from dsv4.cache.schema import CacheSchema
from dsv4.demo.prompts import SHARED
from dsv4.demo_model.cached import CachedModel
from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.demo_model.text import Tokenizer
from dsv4.errors import InvalidInput
from dsv4.serve.models import Defaults, Message, Opened, Room, open_cache, require_may_fit


class ServedDemo:
    """Loads the model; records are those that V4 is stored in. The same tokens give the same
    logits, to the last bit, whatever else is in a step."""

    name = "dsv4-demo"
    defaults = Defaults()

    def __init__(self) -> None:
        self._checkpoint = Checkpoint.load()

    @property
    def weights_id(self) -> str:
        return f"dsv4-demo {self._checkpoint.training['sha256']['model.safetensors']}"

    @cached_property
    def max_context(self) -> int:
        return self._checkpoint.network.spec.max_context

    @property
    def tokenizer(self) -> Tokenizer:
        return self._checkpoint.tokenizer

    @property
    def introduction(self) -> list[Message]:
        """A few questions and the answers to them: blocks that conversations share."""
        return [
            {"role": role, "content": text}
            for question in SHARED
            for role, text in (
                ("user", question),
                ("assistant", self._checkpoint.answers[question]),
            )
        ]

    def chat_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Raises InvalidInput for tools, for options and for roles that it does not know;
        ContextOverflow for what is far too long."""
        if tools or options:
            raise InvalidInput("the demo model's chat template has neither tools nor options")
        spoken = [{"role": m["role"], "content": m["content"] or ""} for m in messages]
        require_may_fit("".join(m["content"] for m in spoken), self.tokenizer, self.max_context)
        return self.tokenizer.chat(spoken)

    def open(self, room: Room) -> Opened:
        network = self._checkpoint.network
        schema = CacheSchema.build(
            network.spec, max_context=room.max_context, entries_apart=room.entries_apart
        )
        manager = open_cache(schema, room)
        return Opened(model=CachedModel(network, manager), manager=manager)

"""What a server needs of a model: text to tokens and back, chats, and what runs on a cache.

`ServedModel` is the protocol. `StandIn` is the smallest model that has all of it: bytes as tokens
and random weights, for tests.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsv4.cache import build
from dsv4.cache.handoff.options import HandoffOptions
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.schema import CacheSchema
from dsv4.engine import Model, Padding
from dsv4.errors import ContextOverflow, InvalidInput
from dsv4.model import ModelSpec
from dsv4.tiers.tier import Tier

# of OpenAI's chat API, content already as one string: {"role": …, "content": …, "tool_calls": …}
Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """Text as token ids. Every token stands for bytes of UTF-8, special ones for none; so a text
    can be decoded token by token (`TextStream`) and a grammar can follow it."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Each ends what the model says."""

    @property
    def longest_token(self) -> int:
        """No token stands for more bytes."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a plain text. No text gives a special token, and none is added."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; b"" for a special one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds for a request that does not say it. None: what the API says. `new_tokens`: of an
    answer in a chat."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    new_tokens: int | None = None


class ServedModel(Protocol):
    """A model with its tokenizer and its chat template. It holds no cache until `open`."""

    @property
    def name(self) -> str:
        """What clients call it."""

    @property
    def weights_id(self) -> str:
        """Names the weights: what is cached for one name is never used for another."""

    @property
    def max_context(self) -> int:
        """Tokens that a request may have, prompt and answer."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def defaults(self) -> Defaults:
        """How it wants to be sampled."""

    def chat_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a chat, up to where the model's answer begins. `tools` are described as in
        OpenAI's API; `options` go to the template. No text of a message becomes a special token, if
        the model can prevent that. Raises InvalidInput for a chat that the template cannot
        render."""

    def open(self, room: Room) -> Opened:
        """A cache in this room, and the model on it. Raises PoolTooSmall, InvalidInput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a model may take for its cache. With `memory_bytes=None` all of `max_requests` requests
    fit at once with `max_context` tokens each. With `host_memory_bytes` entries may be in host
    memory, and the schema keeps them apart."""

    max_requests: int
    max_context: int
    max_step_tokens: int
    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    prefix: PrefixOptions
    tiers: Sequence[Tier] = ()
    handoff: HandoffOptions | None = None

    @property
    def entries_apart(self) -> bool:
        return self.host_memory_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model on its cache. The server steps it in one thread, always inside `stepping()`."""

    model: Model
    manager: KVCacheManager
    padding: Padding | None = None
    stepping: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def open_cache(schema: CacheSchema, room: Room, *, device: str = "cpu") -> KVCacheManager:
    """A manager for `room`, for models that run on one of their own. Raises PoolTooSmall."""
    options: dict[str, Any] = {
        "max_requests": room.max_requests,
        "max_step_tokens": room.max_step_tokens,
        "device": device,
        "prefix": room.prefix,
        "tiers": room.tiers,
        "host_memory": room.host_memory_bytes,
        "handoff": room.handoff,
    }
    if room.memory_bytes is not None:
        return build.manager_from_memory(schema, memory_bytes=room.memory_bytes, **options)
    # one block more for each request: a rewind into a cached block copies it
    blocks = room.max_requests * (schema.blocks_for(room.max_context) + 1)
    return KVCacheManager(schema, num_blocks=blocks, **options)


def require_may_fit(text: str, tokenizer: Tokenizer, max_context: int) -> None:
    """For a text that is too long whatever its tokens are, before time is spent on finding them.
    Raises ContextOverflow."""
    least = -(-len(text) // tokenizer.longest_token)  # a character is a byte or more
    if least > max_context:
        note = "shorten the prompt (counted from its length: it may be even more)"
        raise ContextOverflow(asked_tokens=least, max_context_tokens=max_context, note=note)


# ---- tokens as text ------------------------------------------------------------------------------


class TextStream:
    """Tokens in, text out, as soon as its characters are whole. Bytes that are not UTF-8 become
    U+FFFD, as when everything is decoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, tokens)))

    def end(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")


class ByteTokenizer:
    """Tokens 0 to 255 are the bytes; after them come `END` and one token for each role."""

    ROLES = ("system", "user", "assistant", "tool")
    END = 256
    vocabulary = END + 1 + len(ROLES)
    longest_token = 1
    end_tokens = frozenset({END})

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < self.END else b""

    def role_token(self, role: str) -> int:
        """Raises InvalidInput."""
        if role not in self.ROLES:
            raise InvalidInput(f"role {role!r}: this model knows {', '.join(self.ROLES)}")
        return self.END + 1 + self.ROLES.index(role)


# ---- the stand-in --------------------------------------------------------------------------------


class StandIn:
    """A model of bytes with random weights: it says nothing, but the same each time."""

    name = "stand-in"
    weights_id = "dsv4.testing.RandomModel"
    defaults = Defaults()

    def __init__(self, *, max_context: int = 2048) -> None:
        self.max_context = max_context
        self.tokenizer = ByteTokenizer()

    def chat_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Each message is its role's token, its text and END. Raises InvalidInput for tools, for
        options and for roles that it does not know."""
        if tools or options:
            raise InvalidInput("the stand-in's template has neither tools nor options")
        tokens = list[int]()
        for message in messages:
            tokens.append(self.tokenizer.role_token(message["role"]))
            tokens += [*self.tokenizer.encode(message["content"] or ""), self.tokenizer.END]
        return [*tokens, self.tokenizer.role_token("assistant")]

    def open(self, room: Room) -> Opened:
        from dsv4.testing import EngineModel

        schema = CacheSchema.build(
            ModelSpec.preset("tiny"), max_context=room.max_context, entries_apart=room.entries_apart
        )
        manager = open_cache(schema, room)
        model = EngineModel(manager, vocabulary=self.tokenizer.vocabulary)
        return Opened(model=model, manager=manager)

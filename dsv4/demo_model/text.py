"""Text as tokens and back, and a conversation as a prompt: from the tokenizer.json and the chat
template of a checkpoint, without the packages that other models need for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dsv4.errors import InvalidInput

BEGIN, END = "<|begin|>", "<|end|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL = (BEGIN, END, *ROLES.values())

# what transformers' apply_chat_template makes of the same messages
CHAT_TEMPLATE = (
    "{{ '" + BEGIN + "' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '" + END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ROLES["assistant"] + "' }}{% endif %}"
)


def byte_names() -> list[str]:
    """The character that stands for each byte in a tokenizer.json of byte-level tokens: itself
    where it is printable, the others in order from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


@dataclass(frozen=True, kw_only=True)  # no slots: pieces are turned around once
class Tokenizer:
    """`pieces[id]` are the bytes of a token; of special ones, which text never contains, none.
    `special` are the ids of those by name. Text is cut from left to right into the longest pieces
    that there are; every byte is one, so all text can be read."""

    pieces: tuple[bytes, ...]
    special: Mapping[str, int]

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads a tokenizer.json as tools/train_demo.py writes it."""
        found = json.loads(path.read_text("utf-8"))
        special = {each["content"]: each["id"] for each in found["added_tokens"]}
        names = {name: byte for byte, name in enumerate(byte_names())}
        pieces = [b""] * len(found["model"]["vocab"])
        for text, token in found["model"]["vocab"].items():
            if text not in special:
                pieces[token] = bytes(names[character] for character in text)
        return cls(pieces=tuple(pieces), special=special)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.pieces) if piece}

    @cached_property
    def longest_token(self) -> int:
        """No token stands for more bytes."""
        return max(map(len, self.pieces))

    def encode(self, text: str) -> list[int]:
        """Special tokens are not read: what looks like one is text like any other."""
        # a lone surrogate has no UTF-8
        data, ids, first = text.encode("utf-8", "replace"), [], 0
        while first < len(data):
            for end in range(min(first + self.longest_token, len(data)), first, -1):
                token = self._ids.get(data[first:end])
                if token is not None:
                    ids.append(token)
                    first = end
                    break
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens give nothing, bytes that are not UTF-8 the replacement character."""
        return b"".join(self.pieces[token] for token in ids).decode("utf-8", "replace")

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return len(self.pieces)

    @property
    def end(self) -> int:
        """The token that ends a message."""
        return self.special[END]

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset({self.end})

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt for the answer to the last of `messages`, which have "role" and "content".
        Raises InvalidInput for a role that the model does not know."""
        ids = [self.special[BEGIN]]
        for message in messages:
            role = message["role"]
            if role not in ROLES:
                raise InvalidInput(
                    f"a message has the role {role!r}: this model knows {', '.join(ROLES)}"
                )
            ids += [self.special[ROLES[role]], *self.encode(message["content"]), self.end]
        return [*ids, self.special[ROLES["assistant"]]]

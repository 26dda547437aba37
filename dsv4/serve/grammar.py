"""Answers that follow a JSON schema, by llguidance (docs/serve.md says why that one)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import llguidance
import numpy as np
import torch
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.serve.models import Tokenizer

MOST_COMPILED = 16  # schemas that are kept


class _Words:
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        count = tokenizer.vocabulary
        self.tokens = [tokenizer.token_bytes(token) for token in range(count)]
        self.special_token_ids = [token for token in range(count) if not self.tokens[token]]
        for token in self.special_token_ids:
            self.tokens[token] = b"<|%d|>" % token
        self.eos_token_id = min(tokenizer.end_tokens)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


class Grammars:
    """The grammars of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary, self._ends = tokenizer.vocabulary, tokenizer.end_tokens
        words: Any = llguidance.TokenizerWrapper(_Words(tokenizer))
        self._tokenizer = llguidance.LLTokenizer(words, n_vocab=tokenizer.vocabulary)
        # one can take a second; `n` answers, and most clients' requests, have the same
        self._compiled = lru_cache(MOST_COMPILED)(self._compile)

    def json(self, schema: Mapping[str, Any] | None) -> Grammar:
        """An answer that is JSON of a schema; an object if there is none. Raises InvalidInput for
        a schema that cannot be followed."""
        return self._compiled(json.dumps({"type": "object"} if schema is None else schema)).fresh()

    def _compile(self, schema: str) -> Grammar:
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_flexible": False}
            )
        except ValueError as error:
            raise InvalidInput(f"the JSON schema cannot be followed: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise InvalidInput(f"the JSON schema cannot be followed: {_first_line(matcher)}")
        return Grammar(matcher, self._vocabulary, self._ends, json.loads(schema))


class Grammar:
    """Which tokens one answer may continue with."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: int,
        ends: frozenset[int],
        schema: Mapping[str, Any],
    ) -> None:
        self.schema = schema  # a grammar of the same schema, elsewhere, says the same
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends

    def fresh(self) -> Grammar:
        """The same, from its beginning, for an answer of its own."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary, self._ends, self.schema)

    def allowed(self) -> Tensor:
        """bool [vocabulary]; the end tokens once the answer may end. Raises InvalidInput."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise InvalidInput(f"the grammar has failed: {_first_line(self._matcher)}")
        bits = np.unpackbits(words, bitorder="little", count=self._vocabulary)
        mask = torch.from_numpy(bits.astype(bool))
        mask[sorted(self._ends)] = self._matcher.is_accepting() or self._matcher.is_stopped()
        return mask

    def advance(self, tokens: Sequence[int]) -> None:
        """The answer has continued with these."""
        for token in tokens:
            if token in self._ends or self._matcher.is_stopped():
                return
            self._matcher.consume_token(token)


def _first_line(matcher: llguidance.LLMatcher) -> str:
    """What is wrong; after it comes a picture of the parser."""
    return str(matcher.get_error()).partition("\n")[0]

"""`generate` of an accelerated model: calls that cannot give right results are refused before
anything runs, and the rows that it uses are reserved until it has finished."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from dsv4.cache.prefix.hints import Hints
from dsv4.errors import ContextOverflow, InvalidInput, require_type
from dsv4.integrations.transformers.caches import FastCaches
from dsv4.integrations.transformers.rows import UNKNOWN_ID

_DEFAULT_NEW_TOKENS = 20  # transformers' default, where no limit is given
_outer = threading.local()  # .salt, .hints: of the call of generate that runs in this thread


class FastGenerate:
    """Replaces the generate of one DeepseekV4ForCausalLM, and calls it."""

    def __init__(self, model: Any, caches: FastCaches) -> None:
        self.model, self.caches = model, caches
        self.replaced: Any = None
        self.own_generate: Any = model.generate
        functools.update_wrapper(self, self.own_generate)

    def __call__(self, *args: Any, **options: Any) -> Any:
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            _check_padding(mask)
        given = options.get("generation_config", args[1] if len(args) > 1 else None)
        asked = given or self.model.generation_config
        if options.get("assistant_early_exit") or getattr(asked, "assistant_early_exit", None):
            raise InvalidInput(
                "assistant_early_exit drafts with the first layers of the model, but the rows of a "
                "cache belong to all of its layers: draft with prompt_lookup_num_tokens or with an "
                "assistant_model"
            )
        ids = options.get("input_ids", options.get("inputs", args[0] if args else None))
        self._check_room(ids, options, asked)
        self._check_assistant(options.get("assistant_model"))
        salt = options.pop("salt", getattr(_outer, "salt", None))
        if not isinstance(salt, str | None):
            raise InvalidInput(f"salt={salt!r}: give a string; prompts share only within one salt")
        hints = options.pop("hints", getattr(_outer, "hints", None))
        _check_hints(hints, ids)
        chunk = options.get("prefill_chunk_size") or getattr(asked, "prefill_chunk_size", None)
        with (
            self._salted(salt, options.get("past_key_values"), hints) as salt,
            self.caches.running(chunked=chunk is not None, salt=salt, hints=hints),
        ):
            self._crop_what_differs(options.get("past_key_values"), ids, mask)
            return self.own_generate(*args, **options)

    def _check_room(self, ids: Any, options: dict[str, Any], asked: Any) -> None:
        """Raises ContextOverflow for more tokens than a row may have, as far as the numbers are
        given: before anything runs, because generated tokens would be lost."""

        def given(name: str) -> Any:
            return options[name] if name in options else getattr(asked, name, None)

        if not isinstance(ids, Tensor) or ids.dim() != 2:
            ids = options.get("inputs_embeds")
        if not isinstance(ids, Tensor) or ids.dim() < 2:
            return
        new = given("max_new_tokens")
        if new is None:
            longest = given("max_length")
            if longest is None:
                new = _DEFAULT_NEW_TOKENS
            elif ids.dim() == 2:
                new = longest - ids.shape[1]
        if not isinstance(new, int) or new < 1:
            return
        padding = given("pad_token_id") if ids.dim() == 2 else None
        tokens = _longest(ids, options.get("attention_mask"), padding) + new - 1
        if isinstance(drafts := given("prompt_lookup_num_tokens"), int):
            tokens += drafts  # which transformers does not cut at the end
        most = self.caches.max_context
        assistant = options.get("assistant_model")
        helper = vars(assistant).get("generate") if hasattr(assistant, "__dict__") else None
        if isinstance(helper, FastGenerate):
            most = min(most, helper.caches.max_context)
        if tokens > most:
            raise context_overflow(tokens, most)
        against = options.get("negative_prompt_ids")
        if given("guidance_scale") in (None, 1) or not isinstance(against, Tensor):
            return
        # a row of its own, to which every new token is appended too
        tokens = _longest(against, options.get("negative_prompt_attention_mask"), None) + new - 1
        if tokens > self.caches.max_context:
            raise context_overflow(
                tokens,
                self.caches.max_context,
                f"negative_prompt_ids are {against.shape[-1]} columns long, and the {new} new "
                f"tokens follow them too: ",
            )

    def _check_assistant(self, assistant: Any) -> None:
        """Raises InvalidInput for a V4 whose own cache would be cropped, which it cannot be."""
        if isinstance(assistant, DeepseekV4ForCausalLM) and not isinstance(
            vars(assistant).get("generate"), FastGenerate
        ):
            raise InvalidInput(
                "assistant_model is a DeepSeek-V4 that is not accelerated, and transformers' cache "
                "of such a model cannot take wrong drafts back: accelerate(assistant_model, …) too"
            )

    @contextmanager
    def _salted(self, salt: str | None, given: Any, hints: Hints | None) -> Iterator[str | None]:
        """The salt of this call, which an assistant's calls inside have too, as its hints. A cache
        that was begun with one continues with it. Raises InvalidInput for another."""
        with self.caches.turn:
            cache = self.caches.cache_of(given)
        if cache is not None and cache.requests:
            if salt is not None and salt != cache.rows.salt:
                raise InvalidInput(
                    f"salt={salt!r}, but the cache was begun with {cache.rows.salt!r}: go on with "
                    f"that, or begin with another cache"
                )
            salt = cache.rows.salt
        before = getattr(_outer, "salt", None), getattr(_outer, "hints", None)
        _outer.salt, _outer.hints = salt, hints
        try:
            yield salt
        finally:
            _outer.salt, _outer.hints = before

    def _crop_what_differs(self, given: Any, ids: Any, mask: Any) -> None:
        """transformers leaves out as many columns as the cache has, whatever is in them. If all ids
        of a conversation come with a cache that holds other tokens or other padding, the cache is
        cropped to where they differ; the last column always runs."""
        with self.caches.turn:
            cache = self.caches.cache_of(given)
        if cache is None or not isinstance(ids, Tensor) or ids.dim() != 2:
            return
        if isinstance(mask, Tensor) and mask.shape != ids.shape:
            return  # the ids are only those of the new columns
        columns, history = cache.columns, cache.history_ids
        if not columns or len(ids) != len(history) or bool((history == UNKNOWN_ID).any()):
            return
        common = min(columns, ids.shape[1])
        shown = cache.history_mask[:, :common]
        differs = (history[:, :common] != ids[:, :common].to(history.device)) & shown
        if isinstance(mask, Tensor):
            differs |= mask[:, :common].to(history.device).bool() != shown
        parted = differs.any(dim=0).nonzero()
        if len(parted):
            common = int(parted[0, 0])
        keep = min(common, ids.shape[1] - 1)
        if keep < columns:
            cache.crop(keep - columns)


def context_overflow(asked_tokens: int, max_context_tokens: int, why: str = "") -> ContextOverflow:
    return ContextOverflow(
        asked_tokens=asked_tokens,
        max_context_tokens=max_context_tokens,
        note=f"{why}accelerate(max_context=…) with more, or ask for fewer tokens",
    )


def _longest(ids: Tensor, mask: Any, padding: Any) -> int:
    """Tokens of the longest row of ids [rows, columns], or of embeddings. Without a mask, ids equal
    to `padding` do not count: transformers derives a mask from them."""
    if not (isinstance(mask, Tensor) and mask.dim() == 2):
        mask = ids != padding if isinstance(padding, int) else torch.ones(ids.shape[:2])
    return int(mask.count_nonzero(dim=1).max())


def _check_padding(mask: Tensor) -> None:
    """Raises InvalidInput for rows without a token, or with padding after one."""
    shown = mask.bool()
    ends = shown[:, -1] if shown.shape[1] else torch.zeros(len(shown), dtype=torch.bool)
    if bool(ends.all()):
        return
    row = int((~ends).nonzero()[0, 0])
    raise wrong_padding(row, is_empty=not bool(shown[row].any()))


def wrong_padding(row: int, *, is_empty: bool) -> InvalidInput:
    if is_empty:
        return InvalidInput(
            f"attention_mask hides all of row {row}, so there is nothing to generate from: give "
            f"each row a token, a start token for instance, or leave the row out"
        )
    return InvalidInput(
        f"row {row} is padded on the right, so generate would read the next token after padding: "
        f'pad on the left, tokenizer.padding_side = "left"'
    )


def _check_hints(hints: Any, ids: Any) -> None:
    """Raises InvalidInput."""
    if hints is None:
        return
    require_type("hints", hints, Hints)
    rows = ids.shape[0] if isinstance(ids, Tensor) and ids.dim() == 2 else 1
    if hints.session is not None and rows > 1:
        raise InvalidInput(
            f"hints: session={hints.session!r} for {rows} prompts: a session has one newest state, "
            f"so give each prompt a call of its own, or hints without a session"
        )

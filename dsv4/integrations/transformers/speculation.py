"""Prompt lookup and assistant models on a `PagedCache`, with a model that is not accelerated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4.errors import InvalidInput
from dsv4.integrations.transformers.model_check import require_type
from dsv4.integrations.transformers.paged_cache import PagedCache


@contextmanager
def speculation(model: Any) -> Iterator[None]:
    """Lets `generate` use drafts with a PagedCache.

    transformers marks V4 as `_is_stateful`, which makes generate refuse drafts, because the model's
    own cache cannot take tokens back; a PagedCache can. Inside, the mark is off, and calls of the
    model with any other cache are refused, for their results would be wrong. An accelerated model
    needs no such context: all its caches can. Raises InvalidInput.
    """
    require_type(model)
    if vars(model).get("_is_stateful") is False:
        raise InvalidInput(
            "the model takes drafts already: it is accelerated, or inside speculation"
        )

    def check(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        cache = given.get("past_key_values", args[3] if len(args) > 3 else None)
        if cache is not None and not isinstance(cache, PagedCache):
            raise InvalidInput(
                f"a {type(cache).__name__} cannot take drafts back: inside speculation(model) pass "
                f"past_key_values=PagedCache.for_model(model, max_draft_tokens=…, …)"
            )

    hook = model.register_forward_pre_hook(check, with_kwargs=True)
    layers = model.config.num_hidden_layers  # an early exit that is refused leaves fewer
    vars(model)["_is_stateful"] = False
    try:
        yield
    finally:
        hook.remove()
        model.config.num_hidden_layers = layers
        del vars(model)["_is_stateful"]

"""`accelerate(model)`: a V4 model of transformers uses our cache for attention, with its own
parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, periodic
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, RecoveryNeeded, ThreadError, require_count
from dsv4.integrations.transformers.attention import (
    FastAttention,
    RunningStep,
    SplitAttention,
    make_rope_tables,
    rounds_scores,
)
from dsv4.integrations.transformers.cache import PagedCache
from dsv4.integrations.transformers.caches import FastCaches
from dsv4.integrations.transformers.forward import FastForward
from dsv4.integrations.transformers.generate import FastGenerate
from dsv4.integrations.transformers.lockstep import Lockstep, Manager, places
from dsv4.integrations.transformers.model import cache_schema, read_ranks, require_type, require_v4
from dsv4.integrations.transformers.private import FORWARD_ARGUMENTS, require_names
from dsv4.ops.backend import BackendName

if TYPE_CHECKING:
    from dsv4.tiers.tier import Tier


PREFIX = PrefixOptions()
FETCH_TIMEOUT_S = 5.0
KEEP_TIMEOUT_S = 30.0


def accelerate(
    model: Any,
    *,
    max_batch: int,
    max_context: int,
    records: str = "fp8_ds",
    index: str | None = None,
    max_draft_tokens: int = 0,
    max_step_tokens: int = 4096,
    capture: bool = True,
    prefix: PrefixOptions | None = PREFIX,
    warmup: bool = False,
    tiers: Sequence[Tier] = (),
    fetch_timeout_s: float = FETCH_TIMEOUT_S,
    backend: BackendName | None = None,
    host_memory: int | str | None = None,
    hot_rows: int | None = None,
) -> None:
    """Replaces the attention of every layer of a DeepseekV4ForCausalLM, in place, for inference.

    Forward and generate work as before, also with left or right padding, and return PagedCaches.
    All caches together have `max_batch` rows of `max_context` tokens. `records` and `index` are
    formats as in PagedCache.for_model. Speculation (prompt lookup, an assistant) takes back up to
    `max_draft_tokens` + 1 tokens without running any again. Prompts run in pieces of
    `max_step_tokens` tokens. With `capture`, decode steps on a GPU are captured and replayed where
    the experts allow it; do not move the model then. Modules, parameters and state_dict do not
    change.

    The layers may be on several devices (device_map): each device has the cache, tables and buffers
    of its own layers, and decode steps run uncaptured.

    A model that several processes compute (transformers' expert parallelism) is accelerated in
    each, with the same arguments; its decode steps run uncaptured. All make the same calls.

    Prompts that `generate` runs are cached as `prefix` says, and a later prompt that begins like
    one of them is only computed from there; None switches that off. What is cached belongs to the
    weights and the adapters that it was computed with (docs/transformers.md says which changes are
    noticed) and to the salt: `generate(…, salt="…")`.

    With `warmup` all kernels are compiled now (KVCacheManager.warmup), and no prompt waits for the
    compiler; on a CPU there is nothing to compile.

    With `tiers` (docs/tiers.md) that outlives the process: any process with the same tiers can
    continue a conversation without computing it again. Prompts wait for them at most
    `fetch_timeout_s`. `prefix` must have a `model_id` then, which names the current weights, with
    the adapters that are active now; what is computed with others gets names of its own. Rows that
    are given back store their state in the tiers; `restore` and the end of the process wait for
    that.

    With `host_memory`, in bytes or as "256GB", most entries of long prompts lie in host memory
    and are fetched when they are selected, bit for bit (docs/residency.md); `hot_rows` is how many
    of a layer each row keeps on the device. All rows at `max_context` must fit into it. Several
    devices share it by the bytes of their layers' entries.

    `backend` computes the cache's part: "triton" (default on a GPU) or "reference" (default
    elsewhere), which runs on GPUs without kernels and is never captured.

    Raises InvalidInput, ConfigError, SchemaError or UnsupportedGpu, and the model is unchanged.
    """
    require_v4(model)
    if is_accelerated(model):
        raise InvalidInput("the model is accelerated already: restore(model) first")
    for name, count in (("max_batch", max_batch), ("max_step_tokens", max_step_tokens)):
        require_count(name, count)
    ranks = read_ranks(model)
    require_names(model)
    found = places(model)
    if len(found) > 1 and (tiers or ranks is not None):
        what = "tiers" if tiers else "several processes"
        raise InvalidInput(
            f"the layers of the model are on {len(found)} devices, which does not go together with "
            f"{what} yet: put them on one device"
        )
    with torch.inference_mode(False), torch.no_grad():
        schema = cache_schema(
            model,
            max_context=max_context,
            records=records,
            index=index,
            max_draft_tokens=max_draft_tokens,
            entries_apart=host_memory is not None,
        )
        sizes: dict[str, Any] = {
            # with prompts cached, one more per row: a rewind into a cached block copies it
            "num_blocks": max_batch * (schema.blocks_for(max_context) + (prefix is not None)),
            "max_requests": max_batch,
            "max_step_tokens": max_step_tokens,
            "prefix": _default_prefix(schema) if prefix is PREFIX else prefix,
            "backend": backend,
            "host_memory": host_memory,
            "hot_rows": hot_rows,
        }
        manager: Manager
        if len(found) > 1:
            manager = Lockstep(schema, found, **sizes)
        else:
            manager = KVCacheManager(
                schema,
                device=found[0][0],
                tiers=tiers,
                **sizes,
            )
            if tiers:
                weakref.finalize(model, _keep_all, manager)
        tables = {}
        for device, layers in found:
            made = make_rope_tables(model.model.rotary_emb, max_context, device)
            tables.update(dict.fromkeys(layers, made))
        if warmup:
            manager.warmup(kv_norm=False, round_bf16=rounds_scores(schema))
    step = RunningStep(manager=manager, rope_tables=tables, ranks=ranks)
    caches = FastCaches(manager, model, fetch_timeout_s=fetch_timeout_s, ranks=ranks)
    # a graph belongs to one device and one process, and the reference reads the device's values
    capture = (
        capture and ranks is None and len(found) == 1 and manager._parts.backend.name == "triton"
    )
    forward = FastForward(model.model, step, caches, capture=capture)
    attention = FastAttention if len(found) == 1 else SplitAttention
    for layer in model.model.layers:
        _replace(layer.self_attn, "forward", attention(layer.self_attn, step))
    _replace(model.model, "forward", forward)
    _replace(model, "generate", FastGenerate(model, caches))
    # transformers refuses drafts for models whose cache cannot take tokens back; this one can
    vars(model)["_is_stateful"] = False
    forward.hook = model.register_forward_pre_hook(forward.observe, with_kwargs=True)


def restore(model: Any) -> None:
    """Restores the model's own forward; caches of the fast path cannot be used with it. Waits for a
    running step; calls in the middle of a generation then raise InvalidInput.

    Raises InvalidInput if the model is not accelerated.
    """
    require_type(model)
    if not is_accelerated(model):
        raise InvalidInput("the model is not accelerated: there is nothing to restore")
    forward = vars(model.model)["forward"]
    with forward.caches.turn:
        _keep_all(forward.step.manager)
        forward.is_restored = True
        forward.hook.remove()
        for module in (model.model, *(layer.self_attn for layer in model.model.layers)):
            _put_back(module, "forward")
        _put_back(model, "generate")
        del vars(model)["_is_stateful"]


def _keep_all(manager: KVCacheManager) -> None:
    """Stores what the rows hold in the tiers, as far as possible within a time limit."""
    if not manager.tiers:
        return
    with suppress(ThreadError, RecoveryNeeded):
        for request in manager.requests:
            manager.room.release_later(request, suspend=True)
        manager.tiers.drain(KEEP_TIMEOUT_S)


def _default_prefix(schema: CacheSchema) -> PrefixOptions | None:
    """PREFIX, adapted: a period of whole blocks, and None where layers keep no blocks."""
    if not schema.bytes.block:
        return None
    blocks = -(-PREFIX.policy.period_tokens // schema.block_tokens)
    return replace(PREFIX, policy=periodic(blocks * schema.block_tokens))


def is_accelerated(model: Any) -> bool:
    return isinstance(vars(model.model).get("forward"), FastForward)


def _replace(module: Any, name: str, ours: FastForward | FastAttention | FastGenerate) -> None:
    """Sets an instance's own method, which overrides its class's. It may already have one, from
    other hooks."""
    ours.replaced = vars(module).get(name)
    vars(module)[name] = ours


def _put_back(module: Any, name: str) -> None:
    replaced = vars(module).pop(name).replaced
    if replaced is not None:
        vars(module)[name] = replaced


@contextmanager
def speculation(model: Any) -> Iterator[None]:
    """Lets `generate` use drafts with a PagedCache.

    transformers marks V4 as `_is_stateful`, which makes generate refuse drafts, because the model's
    own cache cannot take tokens back; a PagedCache can. Inside, the mark is off, and calls of the
    model with any other cache are refused, because their results would be wrong. An accelerated
    model needs no such context: all its caches can. Raises InvalidInput.
    """
    require_type(model)
    if vars(model).get("_is_stateful") is False:
        raise InvalidInput(
            "the model takes drafts already: it is accelerated, or inside speculation"
        )

    def check(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        cache = (dict(zip(FORWARD_ARGUMENTS, args, strict=False)) | given).get("past_key_values")
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

"""A transformers.Cache whose every KV byte lies in the arenas of a KVCacheManager."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request
from dsv4.cache.stats import MemoryBytes
from dsv4.errors import InvalidInput, require_count
from dsv4.integrations.transformers.layers import PagedLayer
from dsv4.integrations.transformers.lockstep import Manager
from dsv4.integrations.transformers.model import cache_schema, require_schema, require_v4
from dsv4.integrations.transformers.rows import UNKNOWN_ID, CacheRows, RowPool

if TYPE_CHECKING:
    from dsv4.integrations.transformers.caches import FastCaches


# columns that a replay runs at once: transformers' attention is dense in them
REPLAY_COLUMNS = 2048
LOGGER = logging.getLogger("dsv4")


class PagedCache(Cache):
    """Pass it as `past_key_values` to the model it was made for: forward and generate.

    Each batch row is one request of the manager, admitted at the first forward. Caches that are
    collected give their rows back. For inference: no gradient flows through what is stored.
    """

    def __init__(
        self,
        manager: Manager,
        model: Any,
        *,
        caches: FastCaches | None = None,
    ) -> None:
        """Rows of a manager that may serve several caches, which `caches` knows of, if they are an
        accelerated model's. Raises InvalidInput, SchemaMismatch."""
        require_v4(model)
        require_schema(manager.schema, model)
        self._caches = caches
        # calls that change a manager come one at a time: its caches take turns
        self._turn: AbstractContextManager[Any] = RLock() if caches is None else caches.turn
        self.rows = CacheRows(RowPool(manager) if caches is None else caches.pool, model)
        layers = range(len(manager.schema.layers))
        super().__init__(layers=[PagedLayer(self.rows, layer) for layer in layers])
        weakref.finalize(self, self.rows.give_back)
        if caches is None:  # an accelerated model informs its caches itself
            weakref.finalize(self, _observe(self, model.model))

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        max_batch: int,
        max_context: int,
        records: str = "bf16",
        index: str | None = None,
        max_draft_tokens: int = 0,
        device: torch.device | str | None = None,
    ) -> PagedCache:
        """A cache with its own manager, with memory for `max_batch` rows of `max_context` tokens.

        `records` "bf16" keeps window rows and entries unquantised, in the model's own type (an fp32
        model's as fp32); "fp8_ds" as DeepSeek-V4 was trained. `index` is the format of indexer
        keys: by default unquantised with "bf16", "mxfp4" with "fp8_ds". `max_draft_tokens` + 1
        tokens can be cropped without running the model. Raises InvalidInput, ConfigError,
        SchemaError.
        """
        schema = cache_schema(
            model,
            max_context=max_context,
            records=records,
            index=index,
            max_draft_tokens=max_draft_tokens,
        )
        require_count("max_batch", max_batch)
        with torch.inference_mode(False):  # arenas are written in every mode
            manager = KVCacheManager(
                schema,
                num_blocks=max_batch * schema.blocks_for(max_context),
                max_requests=max_batch,
                max_step_tokens=max_batch * schema.block_tokens,
                device=model.device if device is None else device,
                backend="reference",  # the layers here read and write pages with plain torch
            )
        return cls(manager, model)

    # ---- what the cache holds --------------------------------------------------------------

    @property
    def manager(self) -> KVCacheManager:
        """Of an accelerated model on several devices it is a Lockstep, which has fewer calls."""
        return cast(KVCacheManager, self.rows.manager)

    @property
    def requests(self) -> list[Request]:
        """One per batch row; none before the first forward."""
        return self.rows.requests

    @property
    def columns(self) -> int:
        """Columns of the batch that have been processed, padding included: get_seq_length()."""
        return self.rows.columns

    @property
    def history_ids(self) -> Tensor:
        """int64 [rows, columns]: the ids of all processed columns, -1 where embeddings came."""
        return self.rows.history.ids

    @property
    def history_mask(self) -> Tensor:
        """bool [rows, columns]: False where a column is padding, which the cache does not hold."""
        return self.rows.history.mask

    def memory_bytes(self) -> MemoryBytes:
        """What the manager has allocated, used or not."""
        return self.manager.memory.memory_bytes()

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.manager.schema.max_context

    # ---- for accelerate, which writes through handles --------------------------------------

    def open_rows(self, batch: int) -> list[Request]:
        """The requests of the rows, admitted if there are none. Raises InvalidInput, OutOfSlots."""
        self.rows.open(batch, "accelerate")
        return self.requests

    def note_columns(self, ids: Tensor | None, mask: Tensor) -> None:
        """Columns [rows, n] have been processed: their ids, if known, and which are real."""
        self.rows.note_columns(ids, mask)

    # ---- the interface of transformers' caches ---------------------------------------------

    def reset(self) -> None:
        """Gives all rows back. The next forward starts from nothing, even in a closed cache."""
        with self._turn:
            self.rows.release()
            if self._caches is not None:
                self._caches.reopen(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest -n columns for a negative n, all after the first n for a positive one.

        Up to 1 + max_draft_tokens tokens only the length changes. Further back the window is gone,
        and the model runs the remaining tokens again; these must have come as ids, otherwise it
        raises InvalidInput.
        """
        target = _columns(tokens_to_remove)
        with self._turn:
            if target <= 0:
                target += self.columns
            if target >= self.columns:
                return
            if target <= 0:
                self.rows.release()
            else:
                self._crop(target)

    def _crop(self, target: int) -> None:
        lengths = self.history_mask[:, :target].sum(dim=1).tolist()
        ids, mask = self.history_ids[:, :target], self.history_mask[:, :target]
        if all(self._rings_hold(r, n) for r, n in zip(self.requests, lengths, strict=True)):
            self._rewind(lengths)
            self.rows.cut(target)
            return
        if bool((ids[mask] == UNKNOWN_ID).any()):
            raise InvalidInput(
                f"crop to {target} of {self.columns} columns needs tokens that came as embeddings "
                f"to run again: keep the cache, or crop at most "
                f"{self.manager.schema.max_rollback_tokens} tokens"
            )
        model = self._replaying_model(mask)
        removed, caches = self.columns - target, self._caches
        rerun = None if caches is None or self.rows.writer != "accelerate" else caches.rerun
        if caches is None or rerun is None or "forward" not in vars(model.model):
            self.rows.release()
            self._replay(model, ids, mask)
            return
        self._rewind(lengths)
        try:
            tokens = rerun(self, ids, mask)
        except BaseException:
            self.rows.release()
            raise
        LOGGER.log(
            logging.WARNING if caches.is_used(self) else logging.DEBUG,
            "%d columns were taken back and %d tokens ran again for it: with "
            "accelerate(max_draft_tokens=%d) none does",
            *(removed, tokens, removed - 1),
        )
        self.rows.cut(target)

    def _rewind(self, lengths: Sequence[int]) -> None:
        """Takes all rows back to these lengths, or releases them all."""
        try:
            for request, length in zip(self.requests, lengths, strict=True):
                self.manager.rewind(request, length)
        except BaseException:
            self.rows.release()  # rows of different lengths are useless
            raise

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues row beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in this order."""
        with self._turn:
            if self.requests:
                self.rows.take(torch.arange(len(self.requests))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, adjacent. Raises InvalidInput past max_batch."""
        with self._turn:
            if self.requests:
                self.rows.take([row for row in range(len(self.requests)) for _ in range(repeats)])

    def activate_past_recording(self) -> None:
        """Nothing to do: crop goes back to any length."""

    def _rings_hold(self, request: Request, length: int) -> bool:
        reach = request.written_tokens - self.manager.schema.max_rollback_tokens
        return length >= max(reach, request.reused_tokens)

    def _replaying_model(self, mask: Tensor) -> Any:
        """The model that can run the tokens again. Raises InvalidInput, with the rows unchanged."""
        model = self.rows.model()
        if model is None:
            raise InvalidInput("the model of this cache is gone, so its tokens cannot run again")
        if not bool(mask.all()) and "forward" not in vars(model.model):
            raise InvalidInput(
                "the rows are padded, and the model that would run them again is restored: "
                "accelerate it first, or crop fewer tokens"
            )
        return model

    @torch.no_grad()
    def _replay(self, model: Any, ids: Tensor, mask: Tensor) -> None:
        padded, first = not bool(mask.all()), 0
        # columns before the first token of any row go with it
        least = int(mask.any(dim=0).long().argmax()) + 1
        while first < ids.shape[1]:
            end = min(max(first + REPLAY_COLUMNS, least), ids.shape[1])
            model(
                input_ids=ids[:, first:end],
                attention_mask=mask[:, :end].long() if padded else None,
                past_key_values=self,
                use_cache=True,
                logits_to_keep=1,
            )
            first = end

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "a PagedCache cannot be pickled or copied shallowly, because its rows lie in the "
            "memory of its manager: copy.deepcopy(cache) continues from the same tokens, "
            "accelerate(tiers=…) keeps a conversation, and history_ids are enough to run it again"
        )

    def __deepcopy__(self, memo: Any) -> PagedCache:
        """A cache that continues from the same tokens: its rows are forks, whole blocks are shared.
        Raises OutOfSlots if the manager has no rows left."""
        with self._turn, torch.inference_mode(False):
            twin = type(self)(self.manager, self.rows.model(), caches=self._caches)
            if self._caches is not None:
                self._caches.note_copy(self, twin)
            twin.rows.fork_from(self.rows)
        return twin


def transformers_cache_bytes(cache: Cache) -> int:
    """Bytes of all states in a cache of transformers' own; keys that are also values count once."""
    tensors: dict[tuple[int, int], int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for state in value.values() if isinstance(value, dict) else (value,):
                if isinstance(state, Tensor) and state.is_floating_point():
                    tensors[state.data_ptr(), state.nbytes] = state.nbytes
    return sum(tensors.values())


def _columns(given: Any) -> int:
    """A whole number, also as a tensor or array with one element, as transformers passes it."""
    if not (isinstance(given, bool) or getattr(given, "dtype", None) == torch.bool):
        try:
            return operator.index(given)
        except (TypeError, RuntimeError):
            pass
    raise InvalidInput(f"crop({given!r}): give a whole number of columns")


def _observe(cache: PagedCache, model: Any) -> Any:
    """Lets the cache see the calls of `model` that use it. Returns a handle that ends this."""
    seen = weakref.ref(cache)

    def observe(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive = seen()
        if alive is not None and any(value is alive for value in (*args, *kwargs.values())):
            alive.rows.observe(args, kwargs)

    return model.register_forward_pre_hook(observe, with_kwargs=True).remove

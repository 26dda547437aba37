"""The caches that an accelerated model has given out, all on one manager."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, RLock, local
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from dsv4.cache.prefix.hints import Hints
from dsv4.cache.requests import Request, root_of
from dsv4.errors import InvalidInput, OverQuota, RequestError
from dsv4.integrations.transformers.cache import PagedCache
from dsv4.integrations.transformers.lockstep import Manager
from dsv4.integrations.transformers.model import Ranks
from dsv4.integrations.transformers.rows import RowPool, known_rows
from dsv4.integrations.transformers.weights import Weights

if TYPE_CHECKING:
    from dsv4.integrations.transformers.engine import Engine


# runs the tokens of a cache again that are missing after a rewind; returns their number
Rerun = Callable[[PagedCache, Tensor, Tensor], int]


class RunningCall:
    """A call of generate, and the caches that it uses: their rows are not taken before it has
    finished. `chunked` if its prompt comes in several forwards; it shares prompts with those of its
    `salt`; `hints` are those of its requests.
    """

    def __init__(self, *, chunked: bool, salt: str | None, hints: Hints | None) -> None:
        self.chunked, self.salt, self.hints = chunked, salt, hints
        self.caches: list[PagedCache] = []


class FastCaches:
    """One PagedCache per batch that is being generated, all on the rows of one `pool`. Rows come
    back when a cache is collected, and stay idle for the next turn. A new batch takes free rows,
    then idle ones, then those of the caches that were not used for longest, which are closed,
    except caches that a running call uses: it waits for them. `turn` is held by every call that
    changes the manager."""

    def __init__(
        self,
        manager: Manager,
        model: Any,
        *,
        fetch_timeout_s: float,
        ranks: Ranks | None = None,
    ) -> None:
        self._manager, self._model, self._ranks = manager, model, ranks
        # the exit of a condition is Python code: an interrupt there would keep its lock
        self.turn = RLock()
        self.changed = Condition(self.turn)
        self.pool = RowPool(manager, keeps=True, fetch_timeout_s=fetch_timeout_s)
        self.weights = Weights(model, by_value=bool(manager.tiers))
        self.rerun: Rerun | None = None
        self.engines: WeakSet[Engine] = WeakSet()  # whose jobs have rows
        self._last_use: WeakKeyDictionary[PagedCache, int] = WeakKeyDictionary()
        self._why_closed: WeakKeyDictionary[PagedCache, str] = WeakKeyDictionary()
        self._aliases = CacheAliases()
        self._uses = 0
        self._calls: list[RunningCall] = []
        self._here = local()  # .calls: the calls that run in this thread, the outermost first
        self._waiting: deque[object] = deque()  # rows go to the first caller that asked

    # ---- calls -----------------------------------------------------------------------------

    @contextmanager
    def running(
        self, *, chunked: bool = False, salt: str | None = None, hints: Hints | None = None
    ) -> Iterator[RunningCall]:
        """A call of generate runs in this thread, and keeps the caches that it uses."""
        call = RunningCall(chunked=chunked, salt=salt, hints=hints)
        here = self._calls_here()
        with self.turn:
            self._calls.append(call)
        here.append(call)
        try:
            yield call
        finally:
            here.remove(call)
            with self.turn:
                self._calls.remove(call)
                self.changed.notify_all()

    @property
    def max_context(self) -> int:
        return self._manager.schema.max_context

    @property
    def call(self) -> RunningCall | None:
        """The generate that runs in this thread."""
        here = self._calls_here()
        return here[-1] if here else None

    @property
    def is_generating(self) -> bool:
        return self.call is not None

    def is_used(self, cache: PagedCache) -> bool:
        """Whether the generate that runs in this thread has begun to use a cache."""
        call = self.call
        return call is not None and cache in call.caches

    def _calls_here(self) -> list[RunningCall]:
        if not hasattr(self._here, "calls"):
            self._here.calls = []
        calls: list[RunningCall] = self._here.calls
        return calls

    def mend(self) -> None:
        """Restores the manager, if an interrupt came inside one of its calls or before a plan was
        begun. The holder of the turn calls it before anything else."""
        manager = self._manager
        if manager._parts.guard.is_shut:
            manager.recover()
        while manager.room.open_plans:
            manager.fail(manager.room.open_plans[0])

    # ---- caches ----------------------------------------------------------------------------

    def cache_of(self, given: Any) -> PagedCache | None:
        """Our cache that is given, or that the given one stands for. Raises InvalidInput or
        RequestError for one that no call can continue now."""
        cache = self._aliases.get(given)
        if not isinstance(cache, PagedCache):
            return None
        self._check_ours(cache)
        return cache

    def find(self, given: Any, *, rows: int) -> PagedCache | None:
        """The cache that a call with `past_key_values=given` continues; None if it is a new one.
        Raises InvalidInput or RequestError for one that it cannot continue."""
        cache = self._aliases.get(given)
        if not isinstance(cache, PagedCache):
            _check_empty(cache)
            return None
        self._check_ours(cache)
        cache.rows.check_batch(rows, "accelerate")
        return cache

    def open(
        self,
        given: Any,
        found: PagedCache | None,
        *,
        rows: int,
        prompts: Sequence[NDArray[np.int64]] | None = None,
    ) -> PagedCache:
        """The cache that `find` returns for `given`, made if there is none, with its rows open: for
        these prompts, if given."""
        cache = found
        if cache is None:
            with torch.inference_mode(False):
                cache = PagedCache(self._manager, self._model, caches=self)
        if not cache.rows.requests:
            self._open_rows(cache, rows, prompts)
            self._aliases.add(given, cache)
        self._note_use(cache)
        call = self.call
        if call is not None and cache not in call.caches:
            call.caches.append(cache)
        return cache

    def _open_rows(
        self, cache: PagedCache, rows: int, prompts: Sequence[NDArray[np.int64]] | None
    ) -> None:
        given = None if self.call is None else self.call.salt
        hints = None if self.call is None else self.call.hints
        weights = self.weights.name
        salt = self.salt_now(given)

        def open_rows(reuse: bool) -> list[int]:
            self._make_room(rows)
            cache.rows.check_batch(rows, "accelerate")
            if prompts is None or not reuse:
                admitted = self.pool.admit_empty(rows)
            else:
                admitted = self.pool.admit(prompts, self._lent(), salt=salt, hints=hints)
            cache.rows.adopt(admitted, "accelerate")
            cache.rows.salt, cache.rows.weights = given, weights
            return cache.rows.lengths

        if self._ranks is None:
            open_rows(True)
        else:
            self._ranks.open_alike(rows, open_rows, cache.reset)

    def salt_now(self, given: str | None) -> str | None:
        """The salt of prompts that are computed with the current weights."""
        name = self.weights.name
        if name is None:
            return given
        return f"weights {name}" if given is None else f"weights {name}, salt {given}"

    def discard(self, cache: PagedCache) -> None:
        """Undoes its opening."""
        cache.reset()
        self._last_use.pop(cache, None)
        self._aliases.remove(cache)

    def close(self, cache: PagedCache, why: str) -> None:
        """Takes the rows back; from now on using the cache raises an error that says why."""
        cache.reset()
        self._last_use.pop(cache, None)
        self._why_closed[cache] = why

    def reopen(self, cache: PagedCache) -> None:
        """A cache that has been reset can be used again."""
        self._why_closed.pop(cache, None)

    def note_copy(self, original: PagedCache, copy: PagedCache) -> None:
        """A cache is about to be copied: idle rows make room, and the copy counts as used now. The
        copy of a closed one is closed."""
        self.pool.evict(len(original.requests))
        if original in self._why_closed:
            self._why_closed[copy] = self._why_closed[original]
        self._note_use(copy)

    def _note_use(self, cache: PagedCache) -> None:
        self._uses += 1
        self._last_use[cache] = self._uses

    def _check_ours(self, cache: PagedCache) -> None:
        if cache.rows.manager is not self._manager:
            raise InvalidInput(
                "this PagedCache has memory of its own, but an accelerated model keeps all rows in "
                "one: leave past_key_values out and pass on the cache that is returned"
            )
        if cache in self._why_closed:
            raise RequestError(f"the cache is closed: {self._why_closed[cache]}")
        here = self._calls_here()
        if any(cache in call.caches for call in self._calls if call not in here):
            raise RequestError(
                "another call of generate is using this cache: wait until it is over, or give each "
                "its own with copy.deepcopy"
            )

    # ---- rows ------------------------------------------------------------------------------

    def admit(
        self, ids: NDArray[np.int64], salt: str | None, hints: Hints | None = None
    ) -> Request:
        """A request for one prompt, for a caller that keeps the tokens itself. Room must have been
        made. Raises OutOfBlocks, ContextOverflow."""
        manager, found = self._manager, list[Request]()
        self.weights.read()
        salt = self.salt_now(salt)

        def open_row(reuse: bool) -> list[int]:
            if reuse:
                found[:] = self.pool.admit([ids], self._lent(), salt=salt, hints=hints)
            else:
                prompt: Any = manager.prefix.prompt(ids, salt, hints=hints)
                found[:] = [manager.admit_request(prompt, reuse=False)]
            return [request.length for request in found]

        def close() -> None:
            manager.release_request(found[0])

        if self._ranks is None:
            open_row(True)
        else:
            self._ranks.open_alike(1, open_row, close)
        return found[0]

    @property
    def is_waited_for(self) -> bool:
        """Whether a call waits for rows: later callers must wait after it."""
        return bool(self._waiting)

    def make_room(self, rows: int) -> bool:
        """Whether this many rows are free or idle, after closing caches that are not in use."""
        unused = sorted(self._unused(), key=self._last_use.__getitem__)
        lacking = rows - sum(len(cache.requests) for cache in unused)
        if lacking > self._free_rows() and not self._reclaim(lacking):
            return False
        for cache in unused:
            if self._free_rows() >= rows:
                break
            cache.rows.give_back()
            self.close(
                cache,
                f"a newer batch needed its rows, and the model was accelerated for max_batch="
                f"{self._manager.memory.max_requests} rows in all; accelerate with a larger "
                f"max_batch to keep several batches alive",
            )
        return True

    def give_back_unused(self, error: OverQuota | None = None) -> bool:
        """Releases blocks of the row that was idle for longest, or else of the least recently used
        cache, which is closed; returns whether there was one. With an error, of those of the salt
        whose quota is full."""
        root = None if error is None else error.root
        if self.pool.evict_oldest(root):
            return True
        unused = sorted(self._unused(), key=self._last_use.__getitem__)
        if root is not None:
            unused = [cache for cache in unused if root in map(root_of, cache.requests)]
        if unused:
            self.close(
                unused[0],
                "jobs of an Engine needed its blocks, for others are pinned; unpin something, or "
                "accelerate with a larger max_batch",
            )
        return bool(unused)

    def _free_rows(self) -> int:
        return self._manager.stats().slots_free + self.pool.count

    def _reclaim(self, rows: int) -> bool:
        """Releases rows leaked by an interrupt, i.e. requests that no cache, job or idle list
        refers to. Returns whether `rows` are free or idle then."""
        held = {row.request for row in self.pool.rows}
        for cache in (*self._last_use, *(cache for call in self._calls for cache in call.caches)):
            held.update(cache.requests)
        for engine in self.engines:
            held.update(job.request for job in engine.jobs if job.request is not None)
        for request in self._manager.requests:
            if request not in held:
                self._manager.release_request(request)
        return self._free_rows() >= rows

    def _make_room(self, rows: int) -> None:
        """The same, but waits for running calls. Raises RequestError in a call that would wait for
        itself, with nothing changed."""
        if not self._waiting and self.make_room(rows):
            return
        if any(call.caches for call in self._calls_here()):
            if self.make_room(rows):
                return
            raise RequestError(
                f"{rows} more rows are needed while this call and others use those that the model "
                f"was accelerated for, max_batch={self._manager.memory.max_requests}: max_batch "
                f"counts the rows of all batches, beams and samples that run at once"
            )
        ticket = object()
        self._waiting.append(ticket)
        try:
            while self._waiting[0] is not ticket or not self.make_room(rows):
                helped = [engine.help() for engine in [*self.engines]]  # a step may make another
                if not any(helped):
                    self.changed.wait()
        finally:
            self._waiting.remove(ticket)
            self.changed.notify_all()

    def _unused(self) -> list[PagedCache]:
        """Caches with rows that no running call uses."""
        used = [cache for call in self._calls for cache in call.caches]
        return [cache for cache in self._last_use if cache.requests and cache not in used]

    def _lent(self) -> list[Any]:
        """Rows of caches that are referenced but not in use now."""
        return [
            row
            for cache in self._unused()
            for row in known_rows(cache.requests, cache.rows.history)
        ]


def _check_empty(cache: Any) -> None:
    if cache is None:
        return
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise InvalidInput(
            f"past_key_values is a {type(cache).__name__}: pass the cache of a decoder, or nothing"
        )
    if columns := cache.get_seq_length():
        raise InvalidInput(
            f"past_key_values is a {type(cache).__name__} with {columns} columns in it, which the "
            f"fast path cannot read: run the prompt with the accelerated model, or restore(model)"
        )


# what a Cache does itself, and not through its layers
_VERBS = (
    *("crop", "reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"),
    *("activate_past_recording", "__deepcopy__"),
)


class CacheAliases:
    """Which of our caches an object of transformers stands for. From its first call on it behaves
    like ours, so that passing it again, or reading its length, finds the conversation; it keeps
    ours alive."""

    def __init__(self) -> None:
        self._ours: WeakKeyDictionary[Cache, tuple[PagedCache, Any]] = WeakKeyDictionary()

    def get(self, given: Any) -> Any:
        """Ours, or what was given."""
        if isinstance(given, Cache) and given in self._ours:
            return self._ours[given][0]
        return given

    def add(self, given: Any, cache: PagedCache) -> None:
        """Lets `given`, if it is an empty cache of transformers, stand for ours."""
        if given is None or isinstance(given, PagedCache) or given in self._ours:
            return
        self._ours[given] = cache, given.layers
        given.layers = cache.layers
        for verb in _VERBS:
            setattr(given, verb, getattr(cache, verb))

    def remove(self, cache: PagedCache) -> None:
        """Objects that stand for this cache become what they were."""
        for given, (ours, layers) in list(self._ours.items()):
            if ours is cache:
                del self._ours[given]
                given.layers = layers
                for verb in _VERBS:
                    delattr(given, verb)

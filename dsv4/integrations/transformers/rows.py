"""The rows of one batch in a cache: their requests, their tokens, and the step that runs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.requests import LENGTH, Request, root_of
from dsv4.errors import ContextOverflow, InvalidInput, RequestError
from dsv4.integrations.transformers.lockstep import Manager, Prompts
from dsv4.integrations.transformers.private import FORWARD_ARGUMENTS

_SLOT = attrgetter("slot")
Writer = Literal["transformers", "accelerate"]
Ids = NDArray[np.int64]
UNKNOWN_ID = -1
_FIRST_COLUMNS = 256


_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def uncompiled(verb: _Verb) -> _Verb:
    """torch.compile(model) compiles what is around the cache, whose bookkeeping is in Python."""
    disabled: _Verb = torch.compiler.disable(
        verb, reason="dsv4: a PagedCache runs as it is; compile the model without fullgraph"
    )
    return disabled


class History:
    """`ids` int64 (-1 where embeddings were given) and `mask` bool (False: padding), both [rows,
    columns]. Memory grows by doubling, so a column costs the same at any length. Made outside of
    inference mode, so that it can be written in every mode."""

    @torch.inference_mode(False)
    def __init__(self, rows: int) -> None:
        self.columns = 0
        self._ids = torch.empty((rows, 0), dtype=torch.int64)
        self._mask = torch.empty((rows, 0), dtype=torch.bool)

    @property
    def ids(self) -> Tensor:
        return self._ids[:, : self.columns]

    @property
    def mask(self) -> Tensor:
        return self._mask[:, : self.columns]

    def add(self, ids: Tensor | None, mask: Tensor) -> None:
        """Columns [rows, n]: their ids, if known, and which are real."""
        first, self.columns = self.columns, self.columns + mask.shape[1]
        device = mask.device if ids is None else ids.device
        if self.columns > self._ids.shape[1] or self._ids.device != device:
            self._grow(device)
        span = slice(first, self.columns)
        self._mask[:, span] = mask.to(self._mask.device)
        if ids is None:
            self._ids[:, span] = UNKNOWN_ID
        else:
            self._ids[:, span] = ids

    def cut(self, columns: int) -> None:
        self.columns = columns

    @torch.inference_mode(False)
    def take(self, rows: list[int]) -> History:
        """Row i becomes what row rows[i] was."""
        taken = History(len(rows))
        chosen = torch.tensor(rows, dtype=torch.int64, device=self._ids.device)
        taken._ids, taken._mask, taken.columns = self._ids[chosen], self._mask[chosen], self.columns
        return taken

    @torch.inference_mode(False)
    def _grow(self, device: torch.device) -> None:
        rows, room = self._ids.shape
        room = max(room, _FIRST_COLUMNS)
        while room < self.columns:
            room *= 2
        grown = []
        for old in (self._ids, self._mask):
            new = torch.zeros((rows, room), dtype=old.dtype, device=device)
            new[:, : old.shape[1]] = old.to(device)
            grown.append(new)
        self._ids, self._mask = grown


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KnownRow:
    """A request between two calls, and the ids of its tokens."""

    request: Request
    ids: Ids

    def common(self, manager: Manager, prompt: Ids) -> int:
        """How many tokens of a prompt the row has and can continue after. The last one always runs,
        for its logits; and the rings reach back only so far."""
        request, most = self.request, min(self.request.length, len(prompt) - 1)
        differs = np.flatnonzero(self.ids[:most] != prompt[:most])
        same = int(differs[0]) if len(differs) else most
        reach = request.written_tokens - manager.schema.max_rollback_tokens
        is_held = same == request.length or same >= max(reach, request.reused_tokens)
        return same if is_held else 0

    def is_kin(self, prompt: Prompt | Prompts) -> bool:
        """Whether model and salt are those of the prompt."""
        mine, asked = self.request.trail, prompt.trail
        return mine is not None and asked is not None and mine.root == asked.root

    def supply_ids(self, manager: Manager) -> None:
        """Supplies the ids of what was generated, so that its blocks are cached."""
        trail = self.request.trail
        known = 0 if trail is None else len(trail.ids)
        if known < self.request.length:
            manager.supply_ids(self.request, self.ids[known:])


def known_rows(requests: Sequence[Request], history: History) -> Iterator[KnownRow]:
    """The rows of a batch that another prompt may continue from: sound ones that were admitted with
    ids, and whose later tokens came as ids too."""
    if not requests:
        return
    ids, mask = np.asarray(history.ids.cpu()), np.asarray(history.mask.cpu())
    for row, request in enumerate(requests):
        tokens = ids[row][mask[row]]
        if request.released or request.trail is None or request.incomplete_from is not None:
            continue
        if request.is_torn or len(tokens) != request.length or (tokens == UNKNOWN_ID).any():
            continue
        yield KnownRow(request=request, ids=tokens)


class RowPool:
    """The owner of all rows of a manager. Callers that need rows take them here and give them back
    here: a cache (CacheRows) or a job of an Engine, which hold them meanwhile.

    A pool that `keeps` them also has idle rows: what is given back stays, with all that it
    holds, until its place is needed. A prompt that begins with the tokens of an idle row continues
    it, to the token. Those that were idle for longest go first.
    """

    def __init__(
        self, manager: Manager, *, keeps: bool = False, fetch_timeout_s: float = 0
    ) -> None:
        """Prompts wait for the manager's tiers, if it has any, for `fetch_timeout_s` at most."""
        self.manager, self.keeps, self._fetch_timeout_s = manager, keeps, fetch_timeout_s
        self._arrived: deque[tuple[list[Request], History]] = deque()
        self._rows: list[KnownRow] = []  # the oldest first

    # ---- giving out ------------------------------------------------------------------------

    def admit_empty(self, rows: int) -> list[Request]:
        """Rows without tokens, and without ids to come. Raises OutOfSlots, and there are none."""
        self.evict(rows)
        return self._all(partial(self.manager.admit_request, 0) for _ in range(rows))

    def admit(
        self,
        prompts: Sequence[Ids],
        lent: Sequence[KnownRow] = (),
        *,
        salt: str | None = None,
        hints: Hints | None = None,
    ) -> list[Request]:
        """A request per prompt: an idle row that continues, a fork of a row in `lent`, or
        a new one, for which tiers are asked where there are any. Rows of another salt are never
        used. Raises OutOfSlots, OutOfBlocks, and nothing has changed except that older rows are
        gone."""
        if not self._has_tiers:
            return self._continue_or_admit(prompts, lent, salt, hints)
        self.evict(len(prompts))
        fetched = partial(self.manager.tiers.admit, timeout_s=self._fetch_timeout_s)
        read: list[Any] = [self.manager.prefix.prompt(each, salt, hints=hints) for each in prompts]
        return self._all(partial(fetched, prompt) for prompt in read)

    def _all(self, calls: Iterable[Callable[[], Request]]) -> list[Request]:
        """What these calls admit. If one raises, nothing is left."""
        admitted: list[Request] = []
        try:
            for call in calls:
                admitted.append(call())
        except BaseException:
            for request in admitted:
                self.manager.room.release_later(request)
            raise
        return admitted

    def fork(self, requests: Sequence[Request]) -> list[Request]:
        """A twin of each. Raises OutOfSlots, OutOfBlocks, and there are none."""
        return self._all(partial(self._fork, request) for request in requests)

    def _fork(self, request: Request) -> Request:
        (fork,) = self.manager.fork(request, 1)
        return fork

    # ---- taking back -----------------------------------------------------------------------

    @property
    def _has_tiers(self) -> bool:
        return bool(self.manager.tiers)

    def release(self, requests: Sequence[Request]) -> None:
        """Frees their places, at once without tiers; otherwise these keep what rows
        hold."""
        if self._has_tiers:
            self.release_later(requests)
            return
        for request in requests:
            self.manager.release_request(request)

    def release_later(self, requests: Sequence[Request]) -> None:
        """The same, safe at any time and from any thread, where a garbage collection starts too."""
        for request in requests:
            self.manager.room.release_later(request, suspend=self._has_tiers)

    def give_back(self, requests: list[Request], history: History) -> None:
        """Rows that their cache does not need any more, at any time and from any thread: they are
        idle from now on, or released."""
        if self.keeps and not self._has_tiers and any(r.trail is not None for r in requests):
            self._arrived.append((requests, history))
        else:
            self.release_later(requests)

    def keep(self, row: KnownRow) -> None:
        """Keeps a row that its job does not need any more. The caller has the turn."""
        self._collect()
        self._rows.append(row)

    # ---- idle rows -------------------------------------------------------------------------

    @property
    def rows(self) -> list[KnownRow]:
        """Idle ones, the oldest first."""
        self._collect()
        return self._rows

    @property
    def count(self) -> int:
        return len(self.rows)

    def evict(self, rows: int) -> None:
        """Releases the oldest until this many rows of the manager are free, or none is left."""
        self._collect()
        while self._rows and self.manager.stats().slots_free < rows:
            self._release(self._rows.pop(0))

    def evict_oldest(self, root: bytes | None = None) -> bool:
        """Releases one row, of one salt or of any; returns whether there was one."""
        self._collect()
        for row in self._rows:
            if root is None or root_of(row.request) == root:
                self._rows.remove(row)
                self._release(row)
                return True
        return False

    def _continue_or_admit(
        self,
        prompts: Sequence[Ids],
        lent: Sequence[KnownRow],
        salt: str | None,
        hints: Hints | None,
    ) -> list[Request]:
        self._collect()
        manager = self.manager
        read: list[Any] = [manager.prefix.prompt(prompt, salt, hints=hints) for prompt in prompts]
        takers: dict[KnownRow, list[int]] = {}
        starts = [0] * len(prompts)
        for nth, prompt in enumerate(prompts):
            donor, starts[nth] = self._best(prompt, read[nth], lent)
            if donor is not None and starts[nth] > manager.prefix.look_up(read[nth]).start:
                takers.setdefault(donor, []).append(nth)
        taken = [row for row in self._rows if row in takers]
        self._rows = [row for row in self._rows if row not in takers]
        admitted: dict[int, Request] = {}
        try:
            self.evict(len(prompts) - len(taken))
            for donor, nths in takers.items():
                donor.supply_ids(manager)
                own = [donor.request] if donor in taken else []
                requests = [*manager.fork(donor.request, len(nths) - len(own)), *own]
                admitted.update(zip(nths, requests, strict=True))
                for nth, request in zip(nths, requests, strict=True):
                    self._continue(request, starts[nth], read[nth])
            for nth, waiting in enumerate(read):
                if nth not in admitted:
                    admitted[nth] = manager.admit_request(waiting)
        except BaseException:
            for request in {*admitted.values(), *(row.request for row in taken)}:
                manager.room.release_later(request)
            raise
        return [admitted[nth] for nth in range(len(prompts))]

    def _best(
        self, ids: Ids, prompt: Prompt | Prompts, lent: Sequence[KnownRow]
    ) -> tuple[KnownRow | None, int]:
        """The row that has most of a prompt, and how much; idle rows before lent ones, the newest
        first."""
        best: tuple[KnownRow | None, int] = None, 0
        for row in (*reversed(self._rows), *lent):
            if row.request.released or row.request.is_torn:
                continue  # interrupted
            common = row.common(self.manager, ids)
            if common > best[1] and row.is_kin(prompt):
                best = row, common
        return best

    def _continue(self, request: Request, start: int, prompt: Any) -> None:
        if request.length > start:
            self.manager.rewind(request, start)
        self.manager.continue_request(request, prompt)

    def _release(self, row: KnownRow) -> None:
        if not row.request.released:
            if not row.request.is_torn:
                row.supply_ids(self.manager)
            self.manager.release_request(row.request)

    def _collect(self) -> None:
        """Takes in what was parked; rows that no prompt could continue from are released."""
        while self._arrived:
            requests, history = self._arrived[0]
            known = list(known_rows(requests, history))
            self._rows.extend(known)
            kept = {row.request for row in known}
            for request in requests:
                if request not in kept and not request.released:
                    self.manager.release_request(request)
            self._arrived.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is known of a forward before it reaches the first layer."""

    ids: Tensor | None


class CacheRows:
    """One request per batch row, and the history of the columns that have been processed; padding
    is in the history but in no request. Layers and cache share this object; it does not know the
    cache."""

    def __init__(self, pool: RowPool, model: Any) -> None:
        self.pool, self.manager = pool, pool.manager
        self.model: weakref.ref[Any] = weakref.ref(model)
        self._last_call: Call | None = None
        self._forget()

    def _forget(self) -> None:
        self.requests: list[Request] = []
        self.history = History(0)
        self.writer: Writer | None = None
        # the salt and weights that other prompts must have to share anything with these
        self.salt: str | None = None
        self.weights: str | None = None
        # the step that the layers are in
        self.start, self.layers_done = 0, 0
        self.slots = torch.empty(0, dtype=torch.int64)
        self._unsupplied_columns = self._supply_after = 0  # columns

    @property
    def columns(self) -> int:
        return self.history.columns

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row has, without its padding. It takes the same time for many rows
        as for one."""
        slots = [*map(_SLOT, self.requests)]
        found: list[int] = self.manager._parts.table.numbers[LENGTH, slots].tolist()
        return found

    # ---- rows ------------------------------------------------------------------------------

    def open(self, batch: int, writer: Writer) -> None:
        """Takes an empty row for each of the batch, unless they are there. Raises InvalidInput,
        OutOfSlots."""
        self.check_batch(batch, writer)
        if not self.requests:
            self.adopt(self.pool.admit_empty(batch), writer)

    def adopt(self, requests: list[Request], writer: Writer) -> None:
        """These requests are the rows from now on."""
        self.requests, self.writer = requests, writer
        self.history = History(len(requests))

    def go_on_with(self, weights: str | None) -> None:
        """Steps from here on are computed with other weights than those before: what the rows hold
        must not be reused under either name."""
        self.weights = weights
        for request in self.requests:
            request.trail = None

    def check_batch(self, batch: int, writer: Writer) -> None:
        """Raises InvalidInput for a batch that does not fit these rows."""
        if batch > self.manager.memory.max_requests:
            raise InvalidInput(
                f"a batch of {batch} rows, but the cache was made for max_batch="
                f"{self.manager.memory.max_requests}: make it larger or split the batch"
            )
        if self.requests and batch != len(self.requests):
            raise InvalidInput(
                f"a batch of {batch} rows continues a cache of {len(self.requests)}: reset() the "
                f"cache for another batch"
            )
        if self.requests and writer != self.writer:
            raise InvalidInput(
                f"the cache holds what {self.writer} wrote, and {writer} keeps unfinished groups "
                f"another way: reset() the cache when the model changes hands"
            )

    def release(self) -> None:
        """Gives all rows back; the next forward opens new ones."""
        self.pool.release(self.requests)
        self._forget()

    def give_back(self) -> None:
        """The same, wherever a garbage collection starts, even in the middle of a call; a prompt
        that begins like one of the rows may continue it."""
        self.pool.give_back(self.requests, self.history)
        self._forget()

    def fork_from(self, other: CacheRows) -> None:
        """Becomes a copy of other rows. Raises OutOfSlots, OutOfBlocks, with nothing changed."""
        forks = self.pool.fork(other.requests)
        self.requests, self.writer = forks, other.writer
        self.salt, self.weights = other.salt, other.weights
        self.history = other.history.take(list(range(len(forks))))
        self.start, self.layers_done = other.start, other.layers_done
        self.slots = torch.tensor([fork.slot for fork in forks], device=self.manager.device)

    def take(self, index: list[int]) -> None:
        """Row i becomes what row index[i] was: rows without a successor are released, then those
        with several are forked. Raises InvalidInput, with nothing changed."""
        if not index or not all(0 <= row < len(self.requests) for row in index):
            raise InvalidInput(f"rows {index} of a cache of {len(self.requests)} rows")
        self.pool.evict(len(index) - len(self.requests))
        self._check_size(len(index))
        for row, request in enumerate(self.requests):
            if row not in index:
                self.manager.release_request(request)
        heirs: dict[int, list[Request]] = {}
        for row in set(index):
            extra = index.count(row) - 1
            forks = self.manager.fork(self.requests[row], extra) if extra else []
            heirs[row] = [*forks, self.requests[row]]
        self.requests = [heirs[row].pop() for row in index]
        self.history = self.history.take(index)

    def _check_size(self, rows: int) -> None:
        free = self.manager.memory.max_requests - self.manager.stats().requests_live
        if rows - len(self.requests) > free:
            raise InvalidInput(
                f"{len(self.requests)} rows cannot become {rows}: the cache was made for max_batch="
                f"{self.manager.memory.max_requests}, and {free} more are free"
            )

    # ---- tokens ----------------------------------------------------------------------------

    def note_columns(self, ids: Tensor | None, mask: Tensor) -> None:
        """Columns [rows, n] that have been processed: their ids, if known, and which are real."""
        self.history.add(ids, mask)
        self._unsupplied_columns += mask.shape[1]
        if self.writer == "accelerate" and self._unsupplied_columns >= self._supply_after:
            self._supply_ids()

    def _supply_ids(self) -> None:
        """Supplies the ids of generated tokens as soon as a block may be complete, so that it is
        cached like a prompt, and its snapshot can still be taken."""
        manager, block = self.manager, self.manager.schema.block_tokens
        self._unsupplied_columns = 0
        if not manager.prefix or manager.tiers:
            self._supply_after = manager.schema.max_context + 1
            return
        self._supply_after = min(block - request.length % block for request in self.requests)

        def lacks_ids(request: Request) -> bool:
            trail = request.trail
            return trail is not None and len(trail.ids) // block < request.length // block

        if any(map(lacks_ids, self.requests)):
            for row in known_rows(self.requests, self.history):
                if lacks_ids(row.request):
                    row.supply_ids(manager)

    def cut(self, columns: int) -> None:
        """Forgets the tokens of later columns; the step has ended."""
        self.history.cut(columns)
        self.layers_done = 0

    # ---- steps of transformers' own layers -------------------------------------------------

    @uncompiled
    def observe(self, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """A forward with this cache begins. Raises InvalidInput for masks and positions that
        transformers' own layers would misinterpret."""
        given = dict(zip(FORWARD_ARGUMENTS, args, strict=False)) | given
        model = self.model()
        if model is not None and "forward" not in vars(model.model):
            self._check_call(given)
        self._last_call = Call(ids=given.get("input_ids"))

    def _check_call(self, given: dict[str, Any]) -> None:
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        tokens = embeds if ids is None else ids
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            return  # transformers reports what is wrong
        batch, columns = tokens.shape[:2]
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            _check_mask(mask, batch, self.columns, columns)
        if isinstance(positions, Tensor):
            expected = torch.arange(self.columns, self.columns + columns, device=positions.device)
            if tuple(positions.shape) not in ((1, columns), (batch, columns)) or not bool(
                (positions == expected).all()
            ):
                raise InvalidInput(
                    f"position_ids are not {self.columns} to {self.columns + columns - 1} in each "
                    f"row: the cache holds {self.columns} columns, and the next ones come after "
                    f"them; leave position_ids out"
                    + _hint(bool((positions[..., 0] < self.columns).any()))
                )

    def begin_step(self, batch: int, columns: int) -> None:
        """The first layer begins a step: checks it, takes its blocks and moves the lengths.

        Raises InvalidInput, RequestError or ContextOverflow before anything has changed.
        """
        call, self._last_call = self._last_call, None
        if call is None and self.pool.keeps:
            raise InvalidInput(
                "the cache is one of an accelerated model, which alone goes on from what "
                "accelerate wrote: make one for the restored model with PagedCache.for_model(model)"
            )
        if call is None:
            raise InvalidInput(
                "the cache was made for another model than the one that runs: make one with "
                "PagedCache.for_model(model, ...)"
            )
        model = self.model()
        if model is not None and model.training:
            raise InvalidInput(
                "the model is in training mode, but a PagedCache keeps nothing for gradients: call "
                "model.eval(), or train with use_cache=False"
            )
        if self.layers_done not in (0, len(self.manager.schema.layers)):
            raise RequestError(
                f"the last forward broke off after {self.layers_done} layers, so the newest "
                f"{self.columns - self.start} columns are incomplete: crop({self.start}) or reset()"
            )
        self.check_batch(batch, "transformers")
        end, most = self.columns + columns, self.manager.schema.max_context
        if end > most:
            raise ContextOverflow(
                asked_tokens=end,
                max_context_tokens=most,
                note="make the cache with PagedCache.for_model(max_context=…), or ask for less",
            )
        self.open(batch, "transformers")
        self._take_blocks(columns)
        self.start, self.layers_done = self.columns, 0
        self.slots = torch.tensor([r.slot for r in self.requests], device=self.manager.device)
        ids = call.ids
        device = torch.device("cpu") if ids is None else ids.device
        self.note_columns(ids, torch.ones((batch, columns), dtype=torch.bool, device=device))

    def _take_blocks(self, columns: int) -> None:
        """Makes plans of at most a step buffer each. Layers here write through plane views, which
        the plan does not see, so a plan only takes blocks, updates the block table and moves the
        lengths."""
        manager = cast(KVCacheManager, self.manager)  # of one device: transformers' layers run
        piece = max(1, manager.memory.max_step_tokens // len(self.requests))
        for first in range(0, columns, piece):
            count = min(piece, columns - first)
            with manager.step([(request, count) for request in self.requests]) as plan:
                plan.mark_appended()


def _check_mask(mask: Tensor, batch: int, past_columns: int, columns: int) -> None:
    """Raises InvalidInput for a mask of another shape, or with padding."""
    if mask.shape != (batch, past_columns + columns):
        raise InvalidInput(
            f"attention_mask is {list(mask.shape)}, expected [{batch}, {past_columns + columns}]: "
            f"one column for each of the {past_columns} processed and {columns} new ones"
            + _hint(mask.shape[1] <= past_columns + columns)
        )
    if not bool(mask.all()):
        raise InvalidInput(
            "the attention mask has padding, which transformers' own V4 attention cannot place in "
            "a cache: run rows of one length, or dsv4.integrations.transformers.accelerate"
        )


def _hint(is_whole: bool) -> str:
    """A hint for a call that passes a text from its first id to a cache that has some of it."""
    if not is_whole:
        return ""
    return "; to run a text from its first id, as generate does with drafts, reset() the cache"

"""A model on several devices: a manager on each, for the layers that are there, in lockstep."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch

from dsv4.cache.absent import NoTiers
from dsv4.cache.batch import Batch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.stats import MemoryBytes, ResidencyStats, Stats
from dsv4.cache.step import checks as step_checks
from dsv4.errors import InvalidInput, PlanError, RecoveryNeeded
from dsv4.ops.backend import BackendName
from dsv4.ops.device import on_device
from dsv4.units import parse_bytes

Place = tuple[torch.device, list[int]]  # a device, and the layers that are there
Of = Callable[[Request], Request]  # a request's counterpart in one of the managers
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prompts:
    """A prompt as each manager has read it."""

    parts: tuple[Prompt, ...]

    @property
    def trail(self) -> TokenTrail | None:
        return self.parts[0].trail


class Everywhere:
    """The managers of one model, and doing the same in all of them. Requests are those of the first
    one; each has a twin in every other one."""

    def __init__(self, managers: Sequence[KVCacheManager]) -> None:
        self.managers, self.first = tuple(managers), managers[0]
        # for the other managers: a value that held its key would keep it alive
        self.twins: WeakKeyDictionary[Request, tuple[Request, ...]] = WeakKeyDictionary()
        self._busy = threading.RLock()
        self._depth, self._is_broken = 0, False
        self._leaving: deque[Request] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One call does its work in all managers before another begins, including a finalizer's."""
        with self._busy:
            if self._is_broken:
                self.refuse()
            self._depth += 1
            try:
                if self._depth == 1:
                    self._release_leaving()
                yield
            finally:
                self._depth -= 1

    def refuse(self) -> NoReturn:
        """From now on all calls raise."""
        self._is_broken = True
        raise RecoveryNeeded(
            "a call failed on one device after it was done on another, so the parts of this cache "
            "differ: restore(model) and accelerate it again"
        )

    def call(self, call: Callable[[KVCacheManager, Of, int], _T]) -> list[_T]:
        """`call(manager, of, nth)` for each manager, in order. If the first one raises, nothing has
        changed; if a later one does, the managers stay different."""
        done: list[_T] = []
        with self.turn():
            try:
                for nth, manager in enumerate(self.managers):
                    with on_device(manager.device):
                        done.append(call(manager, partial(self.twin, nth), nth))
            except BaseException:
                self._is_broken = self._is_broken or bool(done)
                raise
        return done

    def twin(self, nth: int, request: Request) -> Request:
        return self.twins[request][nth - 1] if nth else request

    def release(self, request: Request) -> None:
        self.call(lambda manager, of, nth: manager.release_request(of(request)))

    def release_later(self, request: Request) -> None:
        """With the next call. Safe at any time and from any thread."""
        self._leaving.append(request)
        if self._depth or not self._busy.acquire(blocking=False):
            return
        try:
            with suppress(RecoveryNeeded), self.turn():
                pass  # every call begins with the deferred releases
        finally:
            self._busy.release()

    def _release_leaving(self) -> None:
        for _ in range(len(self._leaving)):
            request = self._leaving.popleft()
            if any(request in plan.requests for plan in self.first.room.open_plans):
                self._leaving.append(request)
            elif not request.released:
                self.release(request)


class LockstepPrefix:
    """`lockstep.prefix`: what an accelerated model calls of `manager.prefix`."""

    def __init__(self, everywhere: Everywhere) -> None:
        self._everywhere, self._first = everywhere, everywhere.first

    def __bool__(self) -> bool:
        return bool(self._first.prefix)

    def prompt(self, ids: Any, salt: str | None = None, *, hints: Hints | None = None) -> Prompts:
        managers = self._everywhere.managers
        return Prompts(
            parts=tuple(manager.prefix.prompt(ids, salt, hints=hints) for manager in managers)
        )

    def look_up(self, prompt: Prompts) -> Resume:
        return self._first.prefix.look_up(prompt.parts[0])

    def evict(self, blocks: int | None = None) -> int:
        return self._everywhere.call(lambda manager, of, nth: manager.prefix.evict(blocks))[0]


class LockstepRoom:
    """`lockstep.room`: what an accelerated model calls of `manager.room`. Plans are those of the
    first manager."""

    def __init__(self, everywhere: Everywhere) -> None:
        self._everywhere, self._room = everywhere, everywhere.first.room

    @property
    def open_plans(self) -> list[ForwardPlan]:
        return self._room.open_plans

    def needed_blocks(self, prompt: Prompts) -> int:
        return self._room.needed_blocks(prompt.parts[0])

    def released_blocks(self, request: Request) -> int:
        return self._room.released_blocks(request)

    def release_later(self, request: Request, *, suspend: bool = False) -> None:
        """It never suspends one, because it has no tiers."""
        self._everywhere.release_later(request)


class LockstepMemory:
    """`lockstep.memory`: how many requests and tokens all managers are made for, and their bytes
    together."""

    def __init__(self, managers: Sequence[KVCacheManager]) -> None:
        self._managers, memory = tuple(managers), managers[0].memory
        self.max_requests, self.max_step_tokens = memory.max_requests, memory.max_step_tokens

    def memory_bytes(self) -> MemoryBytes:
        """On all devices together."""
        parts = [manager.memory.memory_bytes() for manager in self._managers]
        names = [field.name for field in fields(MemoryBytes)]
        return MemoryBytes(**{name: sum(getattr(part, name) for part in parts) for name in names})


class Lockstep:
    """A manager per device, each for the layers that are there. Every call is made on all of them.

    Requests and plans are those of the first manager; each has a twin in every other one, with the
    same slot, the same blocks and the same tokens. Layers are counted as the model counts them:
    `acquire` finds the device. If managers could reuse different numbers of tokens, because layers
    need different state to continue, none reuses any. It has the calls of a KVCacheManager that an
    accelerated model makes, in the same places; it has no tiers.
    """

    tiers = NoTiers()

    def __init__(
        self,
        schema: CacheSchema,
        places: Sequence[Place],
        *,
        num_blocks: int,
        max_requests: int,
        max_step_tokens: int,
        prefix: PrefixOptions | None,
        backend: BackendName | None = None,
        host_memory: int | str | None = None,
        hot_rows: int | None = None,
    ) -> None:
        """`schema` is the whole model's. Of `host_memory` each device has the share of its layers'
        entries. Raises InvalidInput for a place without compressed layers, whose manager would have
        no blocks to share, and as a manager does."""
        parts = [schema_part(schema, layers) for _, layers in places]
        for part, (device, layers) in zip(parts, places, strict=True):
            if not part.bytes.block:
                raise InvalidInput(
                    f"layers {layers} on {device} are window-only: put one with compressed entries "
                    f"on each device, or all of the model on one"
                )
        self.schema = schema
        self.managers = tuple(
            KVCacheManager(
                part,
                num_blocks=num_blocks,
                max_requests=max_requests,
                max_step_tokens=max_step_tokens,
                prefix=prefix,
                backend=backend,
                device=device,
                **_host_options(part, schema, host_memory, hot_rows),
            )
            for part, (device, _) in zip(parts, places, strict=True)
        )
        first = self._first = self.managers[0]
        self.device, self._parts = first.device, first._parts
        self._everywhere = Everywhere(self.managers)
        self.prefix = LockstepPrefix(self._everywhere)
        self.room = LockstepRoom(self._everywhere)
        self.memory = LockstepMemory(self.managers)
        self._places = {
            layer: (nth, local)
            for nth, (_, layers) in enumerate(places)
            for local, layer in enumerate(layers)
        }
        self._plans: dict[int, tuple[ForwardPlan, ...]] = {}  # by id: as long as a plan is open

    # ---- requests --------------------------------------------------------------------------

    def admit_request(
        self, prompt: Any = 0, salt: str | None = None, *, reuse: bool = True
    ) -> Request:
        with self._everywhere.turn():
            request, *twins = self._everywhere.call(
                lambda manager, of, nth: manager.admit_request(
                    _part(prompt, nth), salt, reuse=reuse
                )
            )
            self._everywhere.twins[request] = tuple(twins)
            if all(twin.length == request.length for twin in twins):
                return request
            self.release_request(request)
            return self.admit_request(prompt, salt, reuse=False)

    def continue_request(self, request: Request, prompt: Prompts) -> Resume:
        return self._everywhere.call(
            lambda manager, of, nth: manager.continue_request(of(request), prompt.parts[nth])
        )[0]

    def fork(self, request: Request, count: int) -> list[Request]:
        with self._everywhere.turn():
            forks, *theirs = self._everywhere.call(
                lambda manager, of, nth: manager.fork(of(request), count)
            )
            for fork, *twins in zip(forks, *theirs, strict=True):
                self._everywhere.twins[fork] = tuple(twins)
            return forks

    def rewind(self, request: Request, length: int) -> Resume:
        with self._everywhere.turn():
            resume = self._everywhere.call(
                lambda manager, of, nth: manager.rewind(of(request), length)
            )[0]
            if all(twin.length == request.length for twin in self._everywhere.twins[request]):
                return resume
            self._everywhere.call(lambda manager, of, nth: manager.room.reset_slot(of(request)))
            return Resume(start=0, reused_tokens=0, end=length, source="nothing")

    def supply_ids(self, request: Request, ids: Any) -> None:
        self._everywhere.call(lambda manager, of, nth: manager.supply_ids(of(request), ids))

    def release_request(self, request: Request) -> None:
        self._everywhere.release(request)

    # ---- steps -----------------------------------------------------------------------------

    def prepare_forward(self, steps: Any, **options: Any) -> ForwardPlan:
        with self._everywhere.turn():
            plan, *theirs = self._everywhere.call(
                lambda manager, of, nth: manager.prepare_forward(
                    [(of(request), *rest) for request, *rest in steps], **options
                )
            )
            self._plans[id(plan)] = tuple(theirs)
            return plan

    def acquire(self, layer: int, batch: Batch | None = None) -> LayerCacheHandle:
        if layer not in self._places:
            raise InvalidInput(f"layer {layer} of a model with {len(self._places)} layers")
        nth, local = self._places[layer]
        if nth and batch is not None:
            batch = self._twin_of(batch, nth)
        return self.managers[nth].acquire(local, batch)

    def _twin_of(self, batch: Batch, nth: int) -> Batch:
        """The batch of the same rows on another device."""
        for plan in self._first.room.open_plans:
            for own, twin in zip(plan.batches, self._plans[id(plan)][nth - 1].batches, strict=True):
                if own is batch:
                    return twin
        return batch  # which the other manager refuses

    def commit(self, plan: ForwardPlan, *, partial: bool = False, **options: Any) -> None:
        """Raises PlanError for a step that a layer on any device has not stored; then no manager
        has committed."""
        with self._everywhere.turn():
            for manager, each in zip(
                self.managers[1:], self._plans.get(id(plan), ()), strict=False
            ):
                try:
                    step_checks.every_layer(each, each.counts, partial=partial)
                except PlanError as error:
                    raise PlanError(
                        f"on {manager.device}, whose layers count from 0: {error}"
                    ) from None
            self._end(plan, lambda manager, each: manager.commit(each, partial=partial, **options))

    def abandon(self, plan: ForwardPlan) -> None:
        self._end(plan, lambda manager, each: manager.abandon(each))

    def fail(self, plan: ForwardPlan) -> None:
        self._end(plan, lambda manager, each: manager.fail(each))

    def _end(self, plan: ForwardPlan, call: Callable[[KVCacheManager, ForwardPlan], None]) -> None:
        """A plan that a call ends, and its twins."""
        twins = (plan, *self._plans.get(id(plan), ()))
        self._everywhere.call(lambda manager, of, nth: call(manager, twins[nth]))
        del self._plans[id(plan)]

    def recover(self) -> None:
        """Several devices cannot be recovered: from now on all calls raise."""
        self._everywhere.refuse()

    def warmup(self, **options: Any) -> int:
        return sum(manager.warmup(**options) for manager in self.managers)

    # ---- looking ---------------------------------------------------------------------------

    @property
    def requests(self) -> tuple[Request, ...]:
        return self._first.requests

    def stats(self) -> Stats:
        """Statistics of the first device; slots and blocks are the same on all. Of entries in host
        memory they are the sums over all devices."""
        found = [manager.stats() for manager in self.managers]
        return replace(found[0], residency=self._residency_of(found))

    def _residency_of(self, found: Sequence[Stats]) -> ResidencyStats | None:
        parts = [(nth, each.residency) for nth, each in enumerate(found) if each.residency]
        if not parts:
            return None
        of_model = {place: layer for layer, place in self._places.items()}
        layers = [
            replace(each, layer=of_model[nth, each.layer])
            for nth, part in parts
            for each in part.layers
        ]
        names = [field.name for field in fields(ResidencyStats) if field.name != "layers"]
        sums = {name: sum(getattr(part, name) for _, part in parts) for name in names}
        return ResidencyStats(**sums, layers=tuple(sorted(layers, key=lambda each: each.layer)))

    def check_invariants(self) -> None:
        for nth, manager in enumerate(self.managers):
            manager.check_invariants()
            for request in self.requests:
                twin = self._everywhere.twin(nth, request)
                assert (twin.slot, twin.length) == (request.slot, request.length)
                assert twin.block_ids == request.block_ids


Manager = KVCacheManager | Lockstep


def _part(prompt: Any, nth: int) -> Any:
    return prompt.parts[nth] if isinstance(prompt, Prompts) else prompt


def schema_part(schema: CacheSchema, layers: Sequence[int]) -> CacheSchema:
    """The schema of only some layers, counted from 0, laid out as in the whole model: the same
    blocks and the same rings, so that slots and block tables of all parts are the same."""
    model = schema.model
    chosen = tuple(
        replace(model.layers[layer], layer=nth, owner=nth) for nth, layer in enumerate(layers)
    )
    keeps_apart = any(
        page is not None and page.apart
        for page in (schema.layout.page("entries", layer) for layer in layers)
    )
    return CacheSchema.build(
        replace(model, layers=chosen),
        block_tokens=schema.block_tokens,
        max_context=schema.max_context,
        max_draft_tokens=schema.max_draft_tokens,
        entry_format=schema.entry_format,
        window_format=schema.window_format,
        index_format=schema.index_format,
        entries_apart=keeps_apart,
    )


def _host_options(
    part: CacheSchema, schema: CacheSchema, host_memory: int | str | None, hot_rows: int | None
) -> dict[str, Any]:
    """A device without entries that may be in host memory has none of it."""
    if schema.bytes.entries and host_memory is not None:
        if not part.bytes.entries:
            return {}
        host_memory = parse_bytes(host_memory) * part.bytes.entries // schema.bytes.entries
    return {"host_memory": host_memory, "hot_rows": hot_rows}


def devices_of(layer: Any) -> set[torch.device]:
    return {parameter.device for parameter in layer.parameters()}


def places(model: Any) -> list[Place]:
    """The devices that the layers of a model are on, the first layer's first. Raises InvalidInput
    for a layer that is on several."""
    found: dict[torch.device, list[int]] = {}
    for index, layer in enumerate(model.model.layers):
        devices = devices_of(layer)
        if any(device.type == "meta" for device in devices):
            raise InvalidInput(
                f"layer {index} is offloaded, so its parameters are nowhere between two calls: "
                f"use a device_map without disk and offloading"
            )
        if len(devices) != 1:
            raise InvalidInput(
                f"layer {index} lies on {', '.join(sorted(map(str, devices)))}: keep a layer on "
                f"one device (device_map with no_split_module_classes)"
            )
        found.setdefault(devices.pop(), []).append(index)
    return list(found.items())

"""A model on several devices: a manager on each, for the layers that are there, in lockstep."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch

from dsv4.cache.batch import Batch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.prompt import Prompt
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.stats import MemoryBytes
from dsv4.cache.step import checks as step_checks
from dsv4.errors import InvalidInput, PlanError, RecoveryNeeded
from dsv4.ops.backend import BackendName
from dsv4.ops.device import on_device

Place = tuple[torch.device, list[int]]  # a device, and the layers that are there


class SplitPrompt(Prompt):
    """A prompt as each manager has read it: `parts` as the others have."""

    __slots__ = ("parts",)

    def __init__(self, first: Prompt, parts: tuple[Prompt, ...]) -> None:
        super().__init__(first.tokens, first.trail, first.family)
        self.parts = parts


class SplitManager(KVCacheManager):
    """The manager of the first device, which does to the others whatever is done to it.

    Requests and plans are the first one's; each has a twin in every other manager, with the same
    slot, the same blocks and the same tokens. Layers are counted as the model counts them:
    `acquire` finds the device. Where managers could reuse different numbers of tokens, for what a
    layer needs to go on differs, none reuses any. There are no tiers.
    """

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
    ) -> None:
        """`schema` is the whole model's. Raises InvalidInput for a place without compressed layers,
        whose manager would have no blocks to share."""
        parts = [schema_part(schema, layers) for _, layers in places]
        for part, (device, layers) in zip(parts, places, strict=True):
            if not part.block_bytes:
                raise InvalidInput(
                    f"layers {layers} on {device} are window-only: put one with compressed entries "
                    f"on each device, or all of the model on one"
                )
        options: dict[str, Any] = {
            "num_blocks": num_blocks,
            "max_requests": max_requests,
            "max_step_tokens": max_step_tokens,
            "prefix": prefix,
            "backend": backend,
        }
        super().__init__(parts[0], device=places[0][0], **options)
        self.others = tuple(
            KVCacheManager(part, device=device, **options)
            for part, (device, _) in zip(parts[1:], places[1:], strict=True)
        )
        self.whole_schema = schema
        self._places = {
            layer: (nth, local)
            for nth, (_, layers) in enumerate(places)
            for local, layer in enumerate(layers)
        }
        self._twins: WeakKeyDictionary[Request, tuple[Request, ...]] = WeakKeyDictionary()
        self._plans: dict[int, tuple[ForwardPlan, ...]] = {}  # by id: as long as a plan is open
        self._busy = threading.RLock()
        self._depth, self._is_broken = 0, False
        self._left: deque[Request] = deque()

    # ---- doing the same everywhere ---------------------------------------------------------

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """One call does its work in all managers before another begins, a finalizer's too."""
        with self._busy, on_device(self.device):
            if self._is_broken:
                self._refuse()
            self._depth += 1
            try:
                if self._depth == 1:
                    self._release_left()
                yield
            finally:
                self._depth -= 1

    def _refuse(self) -> NoReturn:
        raise RecoveryNeeded(
            "a call failed on one device after it was done on another, so the parts of this cache "
            "differ: restore(model) and accelerate it again"
        )

    def _others_do(self, call: Callable[[KVCacheManager, int], Any]) -> list[Any]:
        """The same on the other devices. If it fails there, the parts differ for good."""
        done = []
        try:
            for nth, other in enumerate(self.others):
                with on_device(other.device):
                    done.append(call(other, nth))
            return done
        except BaseException:
            self._is_broken = True
            raise

    def _twin(self, request: Request, nth: int) -> Request:
        return self._twins[request][nth]

    def _release_left(self) -> None:
        for _ in range(len(self._left)):
            request = self._left.popleft()
            if any(request in plan.requests for plan in self.open_plans):
                self._left.append(request)
            elif not request.released:
                self.release_request(request)

    # ---- requests --------------------------------------------------------------------------

    def prompt(self, ids: Any, salt: str | None = None) -> Prompt:
        first = super().prompt(ids, salt)
        return SplitPrompt(first, tuple(other.prompt(ids, salt) for other in self.others))

    def admit_request(
        self, prompt: Any = 0, salt: str | None = None, *, reuse: bool = True
    ) -> Request:
        with self._in_step():
            request = super().admit_request(prompt, salt, reuse=reuse)
            self._twins[request] = tuple(
                self._others_do(
                    lambda other, nth: other.admit_request(_part(prompt, nth), salt, reuse=reuse)
                )
            )
            if all(twin.length == request.length for twin in self._twins[request]):
                return request
            self.release_request(request)
            return self.admit_request(prompt, salt, reuse=False)

    def continue_request(self, request: Request, prompt: Any) -> Resume:
        with self._in_step():
            resume = super().continue_request(request, prompt)
            self._others_do(
                lambda other, nth: other.continue_request(
                    self._twin(request, nth), _part(prompt, nth)
                )
            )
            return resume

    def fork(self, request: Request, count: int) -> list[Request]:
        with self._in_step():
            forks = super().fork(request, count)
            theirs = self._others_do(lambda other, nth: other.fork(self._twin(request, nth), count))
            for nth, fork in enumerate(forks):
                self._twins[fork] = tuple(of_one[nth] for of_one in theirs)
            return forks

    def rewind(self, request: Request, length: int) -> Resume:
        with self._in_step():
            resume = super().rewind(request, length)
            self._others_do(lambda other, nth: other.rewind(self._twin(request, nth), length))
            if all(twin.length == request.length for twin in self._twins[request]):
                return resume
            self.reset_slot(request)
            return Resume(start=0, reused_tokens=0, end=length, source="nothing")

    def reset_slot(self, request: Request) -> None:
        with self._in_step():
            super().reset_slot(request)
            self._others_do(lambda other, nth: other.reset_slot(self._twin(request, nth)))

    def supply_ids(self, request: Request, ids: Any) -> None:
        with self._in_step():
            super().supply_ids(request, ids)
            self._others_do(lambda other, nth: other.supply_ids(self._twin(request, nth), ids))

    def release_request(self, request: Request) -> None:
        with self._in_step():
            super().release_request(request)
            self._others_do(lambda other, nth: other.release_request(self._twin(request, nth)))

    def release_later(self, request: Request, *, suspend: bool = False) -> None:
        self._left.append(request)
        if self._depth or not self._busy.acquire(blocking=False):
            return
        try:
            with suppress(RecoveryNeeded), self._in_step():
                pass  # every call begins with releasing those that have left
        finally:
            self._busy.release()

    def pin(self, *args: Any, **options: Any) -> NoReturn:
        self._not_split("pin")

    def extend(self, *args: Any, **options: Any) -> NoReturn:
        self._not_split("extend")

    def allocate_block(self, *args: Any, **options: Any) -> NoReturn:
        self._not_split("allocate_block")

    def _not_split(self, call: str) -> NoReturn:
        raise InvalidInput(f"{call} is for a cache on one device, and this one is on several")

    def evict(self, blocks: int | None = None) -> int:
        with self._in_step():
            evicted = super().evict(blocks)
            self._others_do(lambda other, nth: other.evict(blocks))
            return evicted

    # ---- steps -----------------------------------------------------------------------------

    def prepare_forward(self, steps: Any, **options: Any) -> ForwardPlan:
        with self._in_step():
            plan = super().prepare_forward(steps, **options)
            self._plans[id(plan)] = tuple(
                self._others_do(
                    lambda other, nth: other.prepare_forward(
                        [(self._twin(request, nth), *rest) for request, *rest in steps],
                        **options,
                    )
                )
            )
            return plan

    def acquire(self, layer: int, batch: Batch | None = None) -> LayerCacheHandle:
        if layer not in self._places:
            raise InvalidInput(f"layer {layer} of a model with {len(self._places)} layers")
        nth, local = self._places[layer]
        if nth == 0:
            return super().acquire(local, batch)
        for plan in self.open_plans:
            if batch in plan.batches:
                twin = self._plans[id(plan)][nth - 1]
                batch = twin.batches[plan.batches.index(batch)]
        return self.others[nth - 1].acquire(local, batch)

    def commit(self, plan: ForwardPlan, *args: Any, **options: Any) -> None:
        with self._in_step():
            partial = options.get("partial", False)
            of_others = zip(self.others, self._plans.get(id(plan), ()), strict=False)
            for other, each in of_others:  # before any of them has moved
                try:
                    step_checks.every_layer(each, each.counts, partial=partial)
                except PlanError as error:
                    raise PlanError(
                        f"on {other.device}, whose layers count from 0: {error}"
                    ) from None
            super().commit(plan, *args, **options)
            theirs = self._plans.pop(id(plan))
            self._others_do(lambda other, nth: other.commit(theirs[nth], *args, **options))

    def abandon(self, plan: ForwardPlan) -> None:
        with self._in_step():
            super().abandon(plan)
            theirs = self._plans.pop(id(plan))
            self._others_do(lambda other, nth: other.abandon(theirs[nth]))

    def fail(self, plan: ForwardPlan) -> None:
        with self._in_step():
            super().fail(plan)
            theirs = self._plans.pop(id(plan))
            self._others_do(lambda other, nth: other.fail(theirs[nth]))

    def recover(self) -> None:
        """Cannot put several devices in order: from now on all calls say so."""
        self._is_broken = True
        self._refuse()

    def warmup(self, **options: Any) -> int:
        return super().warmup(**options) + sum(other.warmup(**options) for other in self.others)

    # ---- looking ---------------------------------------------------------------------------

    def memory_bytes(self) -> MemoryBytes:
        """On all devices together."""
        parts = [super().memory_bytes(), *(other.memory_bytes() for other in self.others)]
        names = [field.name for field in fields(MemoryBytes)]
        return MemoryBytes(**{name: sum(getattr(part, name) for part in parts) for name in names})

    def check_invariants(self) -> None:
        super().check_invariants()
        for nth, other in enumerate(self.others):
            other.check_invariants()
            for request in self.requests:
                twin = self._twin(request, nth)
                assert (twin.slot, twin.length) == (request.slot, request.length)
                assert twin.block_ids == request.block_ids


def _part(prompt: Any, nth: int) -> Any:
    return prompt.parts[nth] if isinstance(prompt, SplitPrompt) else prompt


def schema_part(schema: CacheSchema, layers: Sequence[int]) -> CacheSchema:
    """The schema of some layers alone, counted from 0, laid out as in the whole: the same blocks
    and the same rings, so that slots and block tables of all parts are the same."""
    model = schema.model
    chosen = tuple(
        replace(model.layers[layer], layer=nth, owner=nth) for nth, layer in enumerate(layers)
    )
    return CacheSchema.build(
        replace(model, layers=chosen),
        block_tokens=schema.block_tokens,
        max_context=schema.max_context,
        max_draft_tokens=schema.max_draft_tokens,
        entry_format=schema.entry_format,
        window_format=schema.window_format,
        index_format=schema.index_format,
    )


def whole_schema(manager: KVCacheManager) -> CacheSchema:
    """Of all layers of the model, wherever they are."""
    return manager.whole_schema if isinstance(manager, SplitManager) else manager.schema


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

"""What a model currently computes with: its parameters, and its active adapters."""

from __future__ import annotations

import hashlib
import uuid
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_KEPT_STATES = 64
_CHUNK_BYTES = 1 << 25  # of a tensor that is digested at once
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state that the model was in. `memory` is the memory that its weights were in: the state is
    valid while all of that is alive. Tensors are not referred to weakly, because
    torch.utils.swap_tensors refuses tensors that have any."""

    name: str | None
    version: int
    memory: list[StorageWeakRef]


class Weights:
    """Names the states of a model's weights, so that nothing computed with one is used with
    another. The state in which it was accelerated has no name (None); each later one has a name
    that is unique across processes, and the same one when it comes back: when an adapter is set
    again, for instance.

    A state consists of the parameters and buffers that take part, how often each was written to and
    where it lies, and for PEFT's layers of which adapters are active and merged, and how they are
    scaled. Writes that torch does not count (through `.data`), and what hooks do, are not noticed.

    `by_value` is for tiers, whose records outlive states: states with the same values have the same
    name, wherever they lie and however often they were written, so what was stored with them is
    found after `load_state_dict`. Each tensor is read once for that. `version` always distinguishes
    states, as graphs that have read memory require.
    """

    def __init__(self, model: Any, *, by_value: bool = False) -> None:
        self._model, self._by_value = weakref.ref(model), by_value
        self._states: OrderedDict[tuple[Any, ...], State] = OrderedDict()
        self._digests: dict[Stamp, tuple[StorageWeakRef, str]] = {}
        # a layer with adapters: all are switched together
        self._tuner: dict[str, Any] | None = None
        self._switches: Any = None
        self._adapted: list[Any] = []
        self._merged: list[Any] = []
        self._merges = 0  # weights that were merged and unmerged again are not quite the same
        self.name: str | None = None
        self.version = 0
        state, tensors = self._read()
        self._first_digest = self._digest(tensors)
        self._note(state, tensors, None)

    def read(self) -> str | None:
        """The name of the model's current state, found by looking at every parameter."""
        state, tensors = self._read()
        found = self._states.get(state)
        if found is not None and not any(map(StorageWeakRef.expired, found.memory)):
            self._states.move_to_end(state)
            self.name, self.version = found.name, found.version
        else:
            self._note(state, tensors, self._new_name(tensors))
        return self.name

    def glance(self) -> str | None:
        """The cheap version for every step: only checks whether adapters were switched."""
        if self._tuner is not None and _switches(self._tuner) != self._switches:
            return self.read()
        return self.name

    def _new_name(self, tensors: list[Tensor]) -> str | None:
        digest = self._digest(tensors)
        if digest is None:
            return uuid.uuid4().hex
        return None if digest == self._first_digest else digest

    def _note(self, state: tuple[Any, ...], tensors: list[Tensor], name: str | None) -> None:
        memory = [StorageWeakRef(_local(tensor).untyped_storage()) for tensor in tensors]
        self.name, self.version = name, self.version + 1
        self._states[state] = State(name=name, version=self.version, memory=memory)
        self._states.move_to_end(state)
        while len(self._states) > _KEPT_STATES:
            oldest, known = self._states.popitem(last=False)
            if known.name is None:  # the state that tiers and other processes know
                self._states[oldest] = known

    def _digest(self, tensors: list[Tensor]) -> str | None:
        """A digest of all values that the model computes with. None if other things count too, or
        they cannot be read."""
        if not self._by_value or any(hooks for _, _, hooks in self._adapted):
            return None
        known: dict[Stamp, tuple[StorageWeakRef, str]] = {}
        for tensor in tensors:
            stamp, local = _stamp(tensor), _local(tensor)
            entry = self._digests.get(stamp)
            if entry is None or entry[0].expired():
                try:
                    digest = digest_of(local)
                except (RuntimeError, NotImplementedError):  # a type without bytes of its own
                    return None
                entry = StorageWeakRef(local.untyped_storage()), digest
            known[stamp] = entry
        self._digests = known
        digest_of_all = hashlib.blake2b(digest_size=16)
        digest_of_all.update(repr((self._adapted, self._merged)).encode())
        for tensor in tensors:
            local = _local(tensor)
            shape = (str(local.dtype), *local.shape, known[_stamp(tensor)][1])
            digest_of_all.update(repr(shape).encode())
        return digest_of_all.hexdigest()

    def _read(self) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The state, and the tensors that it consists of."""
        adapted: list[Any] = []
        merged: list[Any] = []
        found: list[Tensor | None] = []
        self._tuner = None
        waiting = [self._model()]
        while waiting:
            if (module := waiting.pop()) is None:
                continue
            own: dict[str, Any] = module.__dict__
            is_tuner = "_disable_adapters" in own
            active: tuple[str, ...] = ()
            if is_tuner:
                if self._tuner is None:
                    self._tuner, self._switches = own, _switches(own)
                active = _active(own)
                merged.extend(filter(None, [tuple(own.get("merged_adapters", ()))]))
                if active:
                    scales = own.get("scaling") or {}
                    # the form of adapters of a single call
                    hooks = tuple(own["_forward_pre_hooks"])
                    adapted.append((active, tuple(map(scales.get, active)), hooks))
            found.extend(own["_parameters"].values())
            if own["_buffers"]:
                unsaved = own["_non_persistent_buffers_set"]
                found.extend(each for name, each in own["_buffers"].items() if name not in unsaved)
            for child in own["_modules"].values():
                if not (is_tuner and _is_by_adapter(child)):
                    waiting.append(child)
                    continue
                for part in (child._parameters, child._buffers):
                    found.extend(map(part.get, active))
                waiting.extend(map(child._modules.get, active))
        if merged != self._merged:
            self._merged = merged
            self._merges += 1
        self._adapted = adapted
        tensors = [tensor for tensor in found if tensor is not None]
        return (self._merges, *adapted, *map(_stamp, tensors)), tensors


def digest_of(tensor: Tensor) -> str:
    """A digest of a tensor's bytes, computed on its device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        array: Any = flat.numpy()
        return hashlib.blake2b(array, digest_size=16).hexdigest()
    return f"{flat.device.type} {mixed_sum(flat):x}"


def mixed_sum(flat: Tensor) -> int:
    """A 64-bit sum of uint8 [n], for devices: every 8 bytes are mixed with their place by a
    permutation, and the results are added, so that a change of any 8 bytes is always noticed."""
    total = 0
    for first in range(0, len(flat), _CHUNK_BYTES):
        part = flat[first : first + _CHUNK_BYTES]
        if len(part) % 8:
            part = nn.functional.pad(part, (0, -len(part) % 8))
        elif part.storage_offset() % 8:
            part = part.clone()
        place = torch.arange(first // 8, first // 8 + len(part) // 8, device=part.device)
        mixed = part.view(torch.int64) ^ (place * -0x61C8864680B583EB)
        mixed = mixed * -0x40A7B892E31B1A47
        mixed ^= (mixed >> 30) & 0x3FFFFFFFF  # without the sign that a shift brings
        mixed *= -0x6B2FB644ECCEEE15
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        total += int(mixed.sum())
    return total % (1 << 64)


def _stamp(tensor: Any) -> Stamp:
    local = _local(tensor)
    return id(tensor), -1 if local.is_inference() else local._version, local.data_ptr()


def _local(tensor: Any) -> Any:
    """This process's part of a tensor that is split between processes."""
    return getattr(tensor, "_local_tensor", tensor)


def _active(tuner: dict[str, Any]) -> tuple[str, ...]:
    """The adapters that a PEFT layer applies."""
    if tuner["_disable_adapters"]:
        return ()
    names = tuner.get("_active_adapter", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _switches(tuner: dict[str, Any]) -> Any:
    active = _active(tuner)
    scales = tuner.get("scaling") or {}
    return active, tuple(map(scales.get, active)), tuple(tuner.get("merged_adapters", ()))


def _is_by_adapter(child: Any) -> bool:
    """Whether a PEFT layer keeps a part of each adapter there, by its name."""
    is_dict = isinstance(child, nn.ModuleDict | nn.ParameterDict)
    return is_dict or type(child).__name__ == "BufferDict"

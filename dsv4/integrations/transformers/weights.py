"""What a model computes with now: its parameters, and the adapters that are active in it."""

from __future__ import annotations

import uuid
import weakref
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_KEPT_STATES = 64


class Weights:
    """Names the states of a model's weights, so that nothing computed with one is used with
    another. The state in which it was accelerated has no name (None); each later one has a name
    that no other has, in no process, and the same one when it comes back: when an adapter is set
    again, for instance.

    A state is which parameters and buffers take part, how often each was written to and where it
    lies, and of PEFT's layers which adapters are active and merged, and how they are scaled. Not
    seen are writes that torch does not count (through `.data`), and what hooks do.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        # by state, which says where memory is: good while all of that is alive. Tensors themselves
        # are not referred to weakly: torch.utils.swap_tensors refuses those that are
        self._names: OrderedDict[tuple[Any, ...], tuple[str | None, list[StorageWeakRef]]] = (
            OrderedDict()
        )
        self._tuner: dict[str, Any] | None = None  # a layer with adapters: all are switched alike
        self._switches: Any = None
        self._merged: list[Any] = []
        self._merges = 0  # what was merged and taken out again is not quite what it was
        self.name: str | None = None
        self._note(*self._read(), None)

    def read(self) -> str | None:
        """The name of the state that the model is in, after a look at every parameter."""
        state, tensors = self._read()
        found = self._names.get(state)
        if found is not None and not any(map(StorageWeakRef.expired, found[1])):
            self._names.move_to_end(state)
            self.name = found[0]
        else:
            self._note(state, tensors, uuid.uuid4().hex)
        return self.name

    def glance(self) -> str | None:
        """The same in every step: looks whether adapters were switched, and no further."""
        if self._tuner is not None and _switches(self._tuner) != self._switches:
            return self.read()
        return self.name

    def _note(self, state: tuple[Any, ...], tensors: list[Tensor], name: str | None) -> None:
        memory = [StorageWeakRef(_local(tensor).untyped_storage()) for tensor in tensors]
        self._names[state] = name, memory
        self._names.move_to_end(state)
        while len(self._names) > _KEPT_STATES:
            oldest, known = self._names.popitem(last=False)
            if known[0] is None:  # the one that tiers and other processes know
                self._names[oldest] = known
        self.name = name

    def _read(self) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The state, and the tensors that it speaks of."""
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
                    hooks = tuple(own["_forward_pre_hooks"])  # adapters of one call come so
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
        tensors = [tensor for tensor in found if tensor is not None]
        return (self._merges, *adapted, *map(_stamp, tensors)), tensors


def _stamp(tensor: Any) -> tuple[int, int, int]:
    local = _local(tensor)
    return id(tensor), -1 if local.is_inference() else local._version, local.data_ptr()


def _local(tensor: Any) -> Any:
    """This process's part of one that is split between processes."""
    return getattr(tensor, "_local_tensor", tensor)


def _active(tuner: dict[str, Any]) -> tuple[str, ...]:
    """The adapters that a layer of PEFT's applies."""
    if tuner["_disable_adapters"]:
        return ()
    names = tuner.get("_active_adapter", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _switches(tuner: dict[str, Any]) -> Any:
    active = _active(tuner)
    scales = tuner.get("scaling") or {}
    return active, tuple(map(scales.get, active)), tuple(tuner.get("merged_adapters", ()))


def _is_by_adapter(child: Any) -> bool:
    """Whether a layer of PEFT's keeps something of each adapter there, by its name."""
    is_dict = isinstance(child, nn.ModuleDict | nn.ParameterDict)
    return is_dict or type(child).__name__ == "BufferDict"

"""A second device that is none: layers behind a border belong to it, and an operation that takes
tensors of both sides raises, as it would on two GPUs. Tensors made of nothing belong to whoever
uses them first; copies between the sides are allowed, as `to` and `copy_` are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers import DeepseekV4ForCausalLM

from dsv4.integrations.transformers.lockstep import Lockstep

HERE, THERE = "here", "there"
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Sides(TorchDispatchMode):
    """Which side each storage is on, by its address; all tensors stay alive, so no address comes
    again."""

    def __init__(self) -> None:
        super().__init__()
        self._side: dict[int, str] = {}
        self._alive: list[Tensor] = []
        self.operations = {HERE: 0, THERE: 0}

    def put(self, side: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._alive.append(tensor)
            if tensor.numel():
                self._side[tensor.untyped_storage().data_ptr()] = side

    def side(self, tensor: Tensor) -> str | None:
        return self._side.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def move(self, given: Any, side: str) -> Any:
        """Copies of all tensors in it, on that side."""

        def copied(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            self.put(side, copy)
            return copy

        return tree_map_only(Tensor, copied, given)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        sides = {side for t in given if t.dim() and (side := self.side(t)) is not None}
        if len(sides) > 1 and function not in _COPIES:
            raise AssertionError(f"{function} takes tensors of both devices")
        result = function(*args, **(kwargs or {}))
        made = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        if function is torch.ops.aten.copy_.default:
            sides = {side for t in given[:1] if (side := self.side(t)) is not None}
        for side in sides:
            self.operations[side] += 1
            self.put(side, *(t for t in (*made, *given) if self.side(t) is None))
        self._alive.extend(made)
        return result


@contextmanager
def second_device(model: DeepseekV4ForCausalLM, border: int) -> Iterator[None]:
    """Inside, accelerate finds the layers from `border` on on another device."""
    count = len(model.model.layers)
    device, accelerating = torch.device("cpu"), "dsv4.integrations.transformers.accelerate"
    split = [(device, list(range(border))), (device, list(range(border, count)))]
    with pytest.MonkeyPatch.context() as patch:  # the package's name of it is the function's
        patch.setattr(sys.modules[accelerating], "places", lambda model: split)
        yield


@contextmanager
def watched(model: DeepseekV4ForCausalLM, border: int) -> Iterator[Sides]:
    """Inside, an accelerated model's tensors are on the side where they belong."""
    sides = Sides()
    forward = vars(model.model)["forward"]
    manager = forward.step.manager
    assert isinstance(manager, Lockstep)
    behind = [*model.model.layers[border:], model.model.norm, model.model.hc_head, model.lm_head]
    there = {id(t) for m in behind for t in (*m.parameters(), *m.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        sides.put(THERE if id(tensor) in there else HERE, tensor)
    for side, part in zip((HERE, THERE), manager.managers, strict=True):
        lane = part.memory.lanes[0]
        tensors = [
            part.memory.block_arena.bytes,
            part.memory.slot_arena.bytes,
            part.memory.block_table,
        ]
        sides.put(side, *tensors, *lane.workspace.tensors, *_tensors(lane.buffers))
    for layer, tables in forward.step.rope_tables.items():
        sides.put(THERE if layer >= border else HERE, *tables.values())

    def cross(module: Any, args: Any, kwargs: Any) -> Any:
        return sides.move(args, THERE), {
            name: sides.move(value, THERE) for name, value in kwargs.items()
        }

    hook = model.model.layers[border].register_forward_pre_hook(cross, with_kwargs=True)
    later = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, sides.move(kwargs, THERE)), with_kwargs=True
        )
        for layer in model.model.layers[border + 1 :]
    ]
    with sides:
        yield sides
    for each in (hook, *later):
        each.remove()


def _tensors(holder: Any) -> list[Tensor]:
    return [t for t in vars(holder).values() if isinstance(t, Tensor)]

"""What an object really has allocated: every tensor that can be reached from it."""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch import Tensor

# what Python or torch owns: not followed
_FOREIGN = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, bytes)


def tensors_of(root: object) -> Iterator[Tensor]:
    """All tensors in attributes, slots, containers and closures, from `root` on."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    kept: list[object] = []  # so that no id is used twice
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _FOREIGN):
            continue
        seen.add(id(found))
        kept.append(found)
        if isinstance(found, Tensor):
            yield found
            continue
        if isinstance(found, dict):
            waiting += [*found, *found.values()]
        elif isinstance(found, list | tuple | set | frozenset):
            waiting += found
        waiting += getattr(found, "__dict__", {}).values()
        for kind in type(found).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if name not in ("__weakref__", "__dict__") and hasattr(found, name):
                    waiting.append(getattr(found, name))


def bytes_of(root: object, device: str = "cpu") -> int:
    """Bytes of a device's memory that those tensors have, each counted once."""
    storages = {}
    for tensor in tensors_of(root):
        if tensor.device.type != device:
            continue
        storage = tensor.untyped_storage()
        # on the meta device all begin at 0
        storages[storage.data_ptr() or ("meta", storage._cdata)] = storage.nbytes()
    return sum(storages.values())

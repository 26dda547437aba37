"""Device errors and interrupts at every point of a call, and all that must be as before."""

from __future__ import annotations

import dis
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager

# what the cache does on its device, on a CPU too
TENSOR_CALLS = ("copy_", "index_copy_", "zero_", "clone", "to", "__setitem__")
TORCH_CALLS = ("index_select", "arange", "tensor")
LOCKED = re.compile(r"with [\w.]*lock:")
# behind these Python looks whether a signal has come, and at the beginning of a function
LOOKING = re.compile(r"RESUME|JUMP_BACKWARD|PRECALL|CALL($|_KW|_FUNCTION)")


class DeviceFault(RuntimeError):
    """Stands for CUDA's errors."""


class Faults:
    """Counts the device operations of a call, and fails the one that is asked for."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at, self.count = fail_at, 0

    @contextmanager
    def injected(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in TENSOR_CALLS:
                patch.setattr(Tensor, name, self._wrapped(getattr(Tensor, name)))
            for name in TORCH_CALLS:
                patch.setattr(torch, name, self._wrapped(getattr(torch, name)))
            yield

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count - 1 == self.fail_at:
                raise DeviceFault("CUDA error: out of memory")
            return call(*args, **options)

        return wrapped


def everything(manager: KVCacheManager) -> dict[str, Any]:
    """All that somebody could read: what is free on the device is left out."""
    table, prefix = manager._parts.table, manager._parts.prefix
    allocator = table.allocator
    kept = [b for b in range(allocator.total) if b not in set(allocator._free)]
    live = sorted(table.live)
    found: dict[str, Any] = {
        "blocks": {b: _bytes(manager.memory.block_arena.bytes[b]) for b in kept},
        "slots": {s: _bytes(manager.memory.slot_arena.bytes[s]) for s in live},
        "table": {
            s: manager.memory.block_table[s, : r.published_blocks].tolist()
            for s, r in table.live.items()
        },
        "free": sorted(allocator._free),
        "references": list(allocator._references),
        "cached": bytes(allocator._cached),
        "free slots": sorted(table.free_slots),
        "requests": {
            s: (
                *(id(r), r.slot, r.length, list(r.block_ids), r.published_blocks, r.released),
                *(r.written_tokens, r.reused_tokens, r.rings_exact_from),
                *(r.resume, r.incomplete_from),
                None if r.trail is None else (r.trail.ids.tolist(), list(r.trail.chain)),
            )
            for s, r in table.live.items()
        },
        "plans": [*map(id, manager.room.open_plans)],
        "stats": manager.stats().to_dict(),
    }
    if prefix:
        nodes = list(prefix.index.nodes())
        found["index"] = {
            node.digest: (node.block_id, node.children, node.pins, node.snapshot) for node in nodes
        }
        rows = [node.snapshot for node in nodes if node.snapshot is not None]
        found["snapshots"] = {row: _bytes(prefix.pool.bytes[row]) for row in rows}
        found["free rows"] = sorted(prefix.rows._free)
        found["pins"] = {id(pin) for pin in prefix.pins._standing}
    return found


def _bytes(row: Tensor) -> bytes:
    return row.cpu().numpy().tobytes()


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line that a call runs in these files; with `inside`, at
    the n-th place, in lines too, where Python looks for signals. Not at the end of
    `with …lock:`, whose line is traced again: Python handles no signal between what is in there and
    the release of the lock, unless that is written in Python (`python_locks`). Nor at the line
    after the `del` by which a call leaves its manager: no place of `inside` is there."""

    def __init__(
        self,
        at: int | None = None,
        files: tuple[str, ...] = ("/dsv4/cache/",),
        *,
        inside: bool = False,
    ) -> None:
        self.at, self.count, self.files, self.inside = at, 0, files, inside
        self.python_locks: set[str] = set()
        self._last_lines: dict[FrameType, int] = {}
        self._last_ops: dict[FrameType, str] = {}

    @contextmanager
    def injected(self) -> Iterator[None]:
        if self.inside:  # Python 3.12 traces instructions only if somebody asked before settrace
            sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            self._last_lines.clear()
            self._last_ops.clear()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        name, caller = frame.f_code.co_filename, frame.f_back
        if not self._is_ours(name):
            locks = name == threading.__file__ and frame.f_code.co_name in ("__enter__", "__exit__")
            if locks and caller is not None and self._is_ours(caller.f_code.co_filename):
                self.python_locks.add(f"{caller.f_code.co_filename}:{caller.f_lineno}")
            return None
        frame.f_trace_opcodes = self.inside
        if event == "opcode":
            before = self._last_ops.get(frame, "")
            self._last_ops[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if LOOKING.match(before):
                self._reach()
        elif event == "line" and not self.inside:
            before_line = self._last_lines.get(frame, 0)
            self._last_lines[frame] = frame.f_lineno
            line = linecache.getline(name, frame.f_lineno).lstrip()
            if before_line > frame.f_lineno and LOCKED.match(line):
                return self._trace
            if name.endswith("/changes.py") and line == "return result\n":
                return self._trace
            self._reach()
        elif event == "return":
            self._last_lines.pop(frame, None)
            self._last_ops.pop(frame, None)
        return self._trace

    def _reach(self) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            raise KeyboardInterrupt

    def _is_ours(self, name: str) -> bool:
        return any(part in name for part in self.files)

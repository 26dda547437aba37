"""The flat byte arenas and the strided views that the schema's planes cut out of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4.cache.pages import ITEM_BYTES, ArenaName, Plane
from dsv4.cache.schema import CacheSchema, row_bytes
from dsv4.errors import InvalidInput
from dsv4.units import format_bytes

TORCH_DTYPES = {
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def _is_out_of_memory(error: BaseException) -> bool:
    """On a CPU torch says so in words only."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "allocate memory" in str(error)


class Arena:
    """uint8 [rows, row_bytes], zeroed, so that padding bytes have a value. Reused rows are not:
    nothing outside a request's length is ever read. Raises InvalidInput if the device does not
    have the memory."""

    def __init__(
        self, schema: CacheSchema, name: ArenaName, rows: int, device: torch.device
    ) -> None:
        self.name = name
        shape = (rows, row_bytes(schema, name))
        try:
            self.bytes = torch.zeros(shape, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:  # of a GPU: OutOfMemoryError, a RuntimeError
            if not _is_out_of_memory(error):
                raise
            raise InvalidInput(
                f"{device} does not give the {format_bytes(math.prod(shape))} of the {name} arena "
                f"({rows:,} rows): give the cache less memory or fewer requests, or free some first"
            ) from error

    @property
    def rows(self) -> int:
        return self.bytes.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.bytes.shape[1]

    def memory_bytes(self) -> int:
        return self.bytes.numel()

    def view(self, plane: Plane) -> Tensor:
        """The plane in every row: [rows, *plane.shape], sharing the arena's memory."""
        item = ITEM_BYTES[plane.dtype]
        typed = self.bytes.view(TORCH_DTYPES[plane.dtype])
        return typed.as_strided(
            (self.rows, *plane.shape),
            (self.row_bytes // item, *(stride // item for stride in plane.strides_bytes)),
            plane.offset_bytes // item,
        )


class LayerPlanes:
    """The views of one layer in one arena, by plane name, as attributes."""

    def __init__(self, schema: CacheSchema, arena: Arena, layer: int, keeper: int) -> None:
        self.layer = layer
        self._arena = arena
        self._planes = {
            p.name: p for p in schema.layout.planes if p.layer == keeper and p.arena == arena.name
        }
        self._views = {name: arena.view(plane) for name, plane in self._planes.items()}

    def __getattr__(self, name: str) -> Tensor:
        views: dict[str, Tensor] = self.__dict__.get("_views", {})
        if name in views:
            return views[name]
        raise AttributeError(
            f"layer {self.__dict__.get('layer')} keeps no {name!r} here; it has "
            f"{', '.join(views) or 'no planes'}"
        )

    @property
    def views(self) -> dict[str, Tensor]:
        """All views by name, in the order of their bytes."""
        return dict(self._views)

    def memory_bytes(self) -> int:
        """Payload of this layer over all rows; alignment and pad bytes belong to no layer."""
        return self._arena.rows * sum(p.payload_bytes for p in self._planes.values())

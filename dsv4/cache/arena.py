"""The flat byte arenas and the strided views that the schema's planes cut out of them."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.pages import ITEM_BYTES, ArenaName, Plane
from dsv4.cache.schema import CacheSchema, row_bytes
from dsv4.errors import InvalidInput

TORCH_DTYPES = {
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


class Arena:
    """uint8 [rows, row_bytes], zeroed, so that padding bytes have a value. Reused rows are not:
    nothing outside a request's length is ever read."""

    def __init__(
        self, schema: CacheSchema, name: ArenaName, rows: int, device: torch.device
    ) -> None:
        """Raises InvalidInput where the device has no such memory."""
        self.name = name
        each = row_bytes(schema, name)
        try:
            self.bytes = torch.zeros((rows, each), dtype=torch.uint8, device=device)
        except RuntimeError as error:  # other errors of a GPU say nothing of memory
            if device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
                raise
            raise InvalidInput(
                f"{rows:,} {name}s take {rows * each:,} bytes of {device}, which has no such piece "
                f"of memory: give the cache less, or free some. The device says: {error}"
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
            p.name: p for p in schema.planes if p.layer == keeper and p.arena == arena.name
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

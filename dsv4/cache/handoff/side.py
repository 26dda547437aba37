"""What offers and arrivals of one manager share: host memory, the link, and where blocks lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.handoff.link import Link, Where
from dsv4.cache.handoff.options import HandoffOptions
from dsv4.cache.handoff.rows import Pledges, StateRows
from dsv4.cache.requests import RequestTable
from dsv4.cache.residency.residency import Residency
from dsv4.cache.schema import CacheSchema
from dsv4.cache.transfers.copies import Copies
from dsv4.cache.transfers.labels import Labels
from dsv4.tiers.record import address, payload_sum
from dsv4.tiers.secret import MAC_BYTES, Secret, same


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One side of hand-offs. `defer` receives what the next call of the manager has to release."""

    options: HandoffOptions
    schema: CacheSchema
    table: RequestTable
    block_arena: Tensor
    slot_arena: Tensor
    model: bytes  # hash of what names the weights
    labels: Labels
    secret: Secret | None
    rows: StateRows
    pledges: Pledges
    copies: Copies
    link: Link
    gpu: int | None  # where blocks are
    residency: Residency | None  # where entries are kept apart
    can_sum: bool  # blocks are in host memory, where checksums of them can be computed
    defer: Callable[[object], None]

    @property
    def blocks_at(self) -> tuple[Where, int]:
        return ("DRAM", 0) if self.gpu is None else ("VRAM", self.gpu)

    def block_at(self, block_id: int) -> int:
        """The address of a block."""
        return self.block_arena.data_ptr() + block_id * self.schema.bytes.block

    def entries_at(self, block_id: int) -> int:
        """The address of its entries, in host memory."""
        assert self.residency is not None
        return address(self.residency.copies.piece(block_id))

    def sum_of(self, block_id: int) -> bytes:
        """Of a block in host memory: a checksum, or with a key a MAC."""
        block = [self.block_bytes(block_id)]
        if self.residency is not None:
            block.append(self.residency.copies.piece(block_id))
        return payload_sum(block) if self.secret is None else self.secret.sum(block)

    def sign(self, packed: bytes) -> bytes:
        """The signature of an offer: what `HandoffOptions.sign` makes, then the MAC of the key."""
        own = b"" if self.options.sign is None else self.options.sign(packed)
        return own if self.secret is None else own + self.secret.offer_mac(packed + own)

    def verify(self, packed: bytes, signature: bytes) -> bool:
        """Whether an offer has the MAC of the key, and a signature that `HandoffOptions.verify`
        accepts."""
        if self.secret is not None:
            signature, mac = signature[:-MAC_BYTES], signature[-MAC_BYTES:]
            if not same(self.secret.offer_mac(packed + signature), mac):
                return False
        verify = self.options.verify
        return verify is None or verify(packed, signature)

    def block_bytes(self, block_id: int) -> memoryview:
        """A block in host memory, without entries that are apart."""
        row: NDArray[np.uint8] = self.block_arena[block_id].numpy()
        return row.data


def words(schema: CacheSchema) -> str:
    """What people need in order to see why two schemas differ."""
    formats = (schema.entry_format, schema.window_format, schema.index_format)
    apart = ", entries apart (host_memory)" if schema.bytes.entries else ""
    form = "" if schema.page_form == "planes" else f", page_form={schema.page_form}"
    return (
        f"{schema.model.name}, {len(schema.layers)} layers, block_tokens={schema.block_tokens}, "
        f"hca_state={schema.hca_state}, formats {' '.join(each.name for each in formats)}"
        f"{form}{apart}"
    )

"""The names of a prompt's records: one chain of digests, three kinds. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from dsv4.cache.prefix.trail import DIGEST_BYTES, TokenTrail
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import SnapshotLayout, StateLayout
from dsv4.tiers.record import Kind, Label

if TYPE_CHECKING:
    from dsv4.cache.prefix.observer import NewlyCached
    from dsv4.tiers.secret import Secret


class Labels:
    """The labels of one schema's records. Model and salt are in the digests of a trail. With a
    secret, records are sealed with it, and those that are not are refused."""

    def __init__(self, schema: CacheSchema, secret: Secret | None = None) -> None:
        self._secret = secret
        self.block_tokens, self.state = schema.block_tokens, StateLayout(schema)
        self._bytes = {
            Kind.BLOCK: schema.bytes.block + schema.bytes.entries,
            Kind.SNAPSHOT: SnapshotLayout(schema).row_bytes,
            Kind.STATE: self.state.payload_bytes,
        }
        # 32 hexadecimal digits of a hash; the header has room for 64
        self._fingerprint = bytes.fromhex(schema.content_fingerprint).ljust(DIGEST_BYTES, b"\0")

    def payload_bytes(self, kind: Kind) -> int:
        return self._bytes[kind]

    def make(
        self, kind: Kind, digest: bytes, parent: bytes, tokens: int, owner: bytes = b""
    ) -> Label:
        return Label(
            kind=kind,
            digest=digest,
            parent=parent,
            fingerprint=self._fingerprint,
            tokens=tokens,
            payload_bytes=self._bytes[kind],
            secret=self._secret,
            owner=owner,
        )

    def of_cached(self, cached: NewlyCached) -> Label:
        """A block that was cached, or the snapshot at its end."""
        kind = Kind.SNAPSHOT if cached.is_snapshot else Kind.BLOCK
        node = cached.node
        return self.make(kind, node.digest, cached.parent, cached.tokens, node.root)

    def of_block(self, trail: TokenTrail, block: int, kind: Kind = Kind.BLOCK) -> Label:
        """A block of a prompt, or the snapshot at its end."""
        parent = trail.digest(block - 1) if block else trail.root
        tokens = (block + 1) * self.block_tokens
        return self.make(kind, trail.digest(block), parent, tokens, trail.root)

    def of_blocks(self, trail: TokenTrail, blocks: int) -> Sequence[Label]:
        """The labels of a prompt's first blocks, each made when it is looked at."""
        return _Blocks(self, [trail.root, *trail.chain[:blocks]])

    def of_state(self, trail: TokenTrail, tokens: int) -> Label:
        """The state of a request with the trail's first `tokens` tokens, at least one."""
        return self.make(Kind.STATE, *trail.state_digests(tokens), tokens, trail.root)


class _Blocks(Sequence[Label]):
    def __init__(self, labels: Labels, digests: list[bytes]) -> None:
        self._labels, self._digests = labels, digests

    def __len__(self) -> int:
        return len(self._digests) - 1

    @overload
    def __getitem__(self, at: int) -> Label: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Label]: ...
    def __getitem__(self, at: int | slice) -> Label | Sequence[Label]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        n = range(len(self))[at]
        tokens = (n + 1) * self._labels.block_tokens
        own, before, root = self._digests[n + 1], self._digests[n], self._digests[0]
        return self._labels.make(Kind.BLOCK, own, before, tokens, root)

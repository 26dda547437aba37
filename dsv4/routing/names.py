"""The names of a prompt's blocks, computed without a manager. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from dsv4.cache.prefix.trail import Tenant, TokenIds, TokenTrail, chain_root, token_ids
from dsv4.errors import require_count
from dsv4.tiers.secret import Secret, require_key


def block_hash(digest: bytes) -> int:
    """A chain digest as events say it: a number that fits signed and unsigned 64 bits."""
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What replicas have in common whose blocks have the same names: the content fingerprint of
    their schema (`CacheSchema.content_fingerprint`), and the `model_id` and `key` of their
    `PrefixOptions`."""

    fingerprint: str
    model_id: str = ""
    block_tokens: int = 128
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_count("block_tokens", self.block_tokens)
        if self.key is not None:
            require_key(self.key)

    @cached_property
    def _secret(self) -> Secret | None:
        return None if self.key is None else Secret(self.key)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_secret"}

    def names(self, ids: TokenIds, salt: str | None = None) -> list[int]:
        """The names of a prompt's whole blocks, in order: the `block_hashes` of the replicas'
        events. Raises InvalidInput."""
        read, secret = token_ids(ids), self._secret
        root = chain_root(fingerprint=self.fingerprint, model_id=self.model_id, salt=salt)
        tenant = Tenant(salt)
        if secret is not None:
            root, tenant = secret.root(root), Tenant(salt, secret, secret.link)
        trail = TokenTrail(root, self.block_tokens, read, tenant)
        trail.hash_blocks(len(read) // self.block_tokens)
        return [block_hash(digest) for digest in trail.chain]

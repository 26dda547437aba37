"""A waiting prompt, whose ids are read and hashed once. Torch-free."""

from __future__ import annotations

from dsv4.cache.prefix.trail import TokenTrail


class Prompt:
    """Token ids of a prompt, as `KVCacheManager.prompt` made it. It holds no memory of the cache
    and nothing changes it: it may be looked up and admitted any number of times, by every manager
    of the same schema and model."""

    __slots__ = ("family", "tokens", "trail")

    def __init__(self, tokens: int, trail: TokenTrail | None, family: tuple[str, ...]) -> None:
        self.tokens, self.trail, self.family = tokens, trail, family

    def __len__(self) -> int:
        return self.tokens

    def __repr__(self) -> str:
        return f"Prompt({self.tokens} tokens)"

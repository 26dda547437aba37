"""The digests of a simulated request's blocks. Torch-free."""

from __future__ import annotations

import numpy as np

from dsv4.cache.prefix.trail import Ids, TokenTrail
from dsv4.errors import InvalidInput
from dsv4.simulate.trace import TraceRequest

DIGEST_BYTES = 9
_OWN = 1 << 71  # names from here on belong to one request: its answer, or blocks without a name
_ROOT = bytes(DIGEST_BYTES)


def block_names(request: TraceRequest, block_tokens: int) -> list[int]:
    """A name for each whole block of what the request's names cover. A name of several blocks gives
    each its own; of several names in a block the last one is taken, because it names all before it
    too. Raises InvalidInput where neither fits."""
    names, per_name = request.names, request.name_tokens
    known = len(names) * per_name
    if not request.has_answer:
        known = min(known, request.input_tokens)
    blocks = known // block_tokens
    if per_name % block_tokens == 0:
        times = per_name // block_tokens
        if times == 1:
            return [*names[:blocks]]
        return [names[nth // times] * times + nth % times for nth in range(blocks)]
    if block_tokens % per_name:
        raise InvalidInput(
            f"the trace names {per_name} tokens at a time, which do not make blocks of "
            f"{block_tokens}: give a block size that divides it, or a multiple"
        )
    times = block_tokens // per_name
    return [names[times * (nth + 1) - 1] for nth in range(blocks)]


class NamedTrail(TokenTrail):
    """A trail whose digests are made of the trace's names instead of tokens. `number` is the
    request's: blocks without a name have one that nothing else has."""

    __slots__ = ("names", "number")

    def __init__(self, names: list[int], block_tokens: int, tokens: int, number: int) -> None:
        super().__init__(_ROOT, block_tokens, _no_ids(0))
        self.names, self.number = names, number
        self.prompt_tokens = tokens
        self._known = tokens
        self.hash_blocks(tokens // block_tokens)

    @property
    def ids(self) -> Ids:
        """As many ids as there are tokens; their values mean nothing."""
        return _no_ids(self._known)

    def hash_blocks(self, blocks: int) -> None:
        chain, names = self.chain, self.names
        first = len(chain)
        for name in names[first:blocks]:
            chain.append(name.to_bytes(DIGEST_BYTES, "little"))
        for nth in range(max(first, len(names)), blocks):
            own = _OWN | self.number << 24 | nth
            chain.append(own.to_bytes(DIGEST_BYTES, "little"))

    def copy(self) -> NamedTrail:
        twin = NamedTrail(self.names, self.block_tokens, self.prompt_tokens, self.number)
        twin.hints = self.hints
        return twin

    def grow(self, tokens: int) -> None:
        """From now on this number of tokens is known."""
        self._known = tokens


def name_of(digest: bytes) -> int:
    """The name of a block, as a router knows it."""
    return int.from_bytes(digest, "little")


def _no_ids(tokens: int) -> Ids:
    return np.broadcast_to(np.int32(0), tokens)

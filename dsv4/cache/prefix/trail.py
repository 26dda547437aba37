"""What is known of a request's tokens: their ids, and one chain digest per whole block.
Torch-free."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsv4.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

    from dsv4.cache.prefix.hints import Hints
    from dsv4.cache.prepare_forward import ForwardPlan
    from dsv4.tiers.secret import Secret

Ids = NDArray[np.int32]
Positions = NDArray[np.int64]
TokenIds: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]] | Tensor"
DIGEST_BYTES = 32
_LARGEST_ID = np.iinfo(np.int32).max
_BOOLEANS = frozenset((bool, np.bool_))
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (4, 8)}


def token_ids(given: TokenIds) -> Ids:
    """Token ids as int32, in memory of their own. Raises InvalidInput for anything else."""
    try:
        ids: Any = given
        if not isinstance(ids, np.ndarray):
            torch = sys.modules.get("torch")  # without loading it
            is_tensor = torch is not None and isinstance(ids, torch.Tensor)
            ids = np.asarray(ids.detach().cpu() if is_tensor else ids)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidInput(
            f"token ids are not one row of whole numbers, which is what a request has: {error}"
        ) from error
    is_list = ids is not given and isinstance(given, Sequence)
    has_flags = is_list and not _BOOLEANS.isdisjoint(map(type, given))
    if has_flags or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        _refuse_ids(given, ids, has_flags=has_flags)
    if ids.dtype.byteorder not in "=|" or ids.itemsize < 4:  # read directly below
        ids = ids.astype(np.int64)
    # as unsigned numbers, negative ids are too large: one comparison per id finds both
    if ids.size and ids.view(_UNSIGNED[ids.itemsize]).max() > _LARGEST_ID:
        _refuse_range(ids)
    return np.array(ids, dtype=np.int32)


def _refuse_ids(given: object, ids: NDArray[Any], *, has_flags: bool) -> NoReturn:
    found = f"token ids: got {type(given).__name__}"
    if isinstance(given, Mapping):  # what tokenizers return
        raise InvalidInput(f"{found}: give its input_ids, one row of them for each request")
    if isinstance(given, str | bytes | None):
        raise InvalidInput(
            f"{found}: tokenize it first; a prompt is one row of whole numbers, or a count"
        )
    if has_flags:
        raise InvalidInput("token ids hold True or False: give them as whole numbers")
    if ids.dtype.kind in "USTO" and any(isinstance(each, str | bytes) for each in ids.flat):
        raise InvalidInput("token ids hold text: tokenize it first")
    raise InvalidInput(
        f"token ids are {ids.dtype} of shape {list(ids.shape)}: give one row of whole numbers; "
        f"a prompt may also be a count"
    )


def _refuse_range(ids: NDArray[Any]) -> NoReturn:
    raise InvalidInput(
        f"token ids lie between {ids.min()} and {ids.max()}: they must be 0 or more and fit 32 bits"
    )


class RecentIds:
    """The newest ids of all requests at once, by slot: `ids`, a ring of two blocks or more, and how
    many tokens are `known` in all, -1 where they are not collected.

    A step brings every request an id or two. They are put here all at once, and a trail takes its
    own when it is read, at least once per block.
    """

    def __init__(self, slots: int, block_tokens: int) -> None:
        self.rows = 1 << (2 * block_tokens - 1).bit_length()  # a power of two
        self.ids = np.zeros((slots, self.rows), dtype=np.int32)
        self._flat = self.ids.reshape(-1)
        self.known = np.full(slots, -1, dtype=np.int64)

    def learn(
        self,
        slots: Positions,
        starts: Positions,
        ends: Positions,
        ids: Ids,
        token_rows: tuple[Positions, Positions, Positions],
    ) -> None:
        """Ids of all tokens of a step, a block per request at most: `token_rows` says in which row
        of the step and in which slot each one's request is, and which of its tokens from `starts`
        on it is. Those before `ends` count; what is written after them is never read. They
        follow what is known without a gap."""
        row, slot, nth = token_rows
        at = starts.take(row)
        at += nth
        at &= self.rows - 1
        at += slot * self.rows
        self._flat[at] = ids
        known = self.known.take(slots)
        np.maximum(known, ends, out=known, where=known >= 0)
        self.known[slots] = known


def next_digest(digest: bytes, span: memoryview) -> bytes:
    return hashlib.blake2b(span, digest_size=DIGEST_BYTES, key=digest).digest()


class Tenant(NamedTuple):
    """Whose tokens these are: the salt that the root was made with, where it is known (a trail that
    came from another machine has only the root), and how the next digest is made: with a key its
    own way."""

    salt: str | None = None
    secret: Secret | None = None
    link: Callable[[bytes, memoryview], bytes] = next_digest


ANYONE = Tenant()


class TokenTrail:
    """Ids of a request's tokens from 0 on, and the chain digests made from them so far.

    The digest of a block is a keyed hash over all tokens up to its end, so equal digests mean equal
    prefixes under an equal root: nothing needs to be compared on a hit. The trail of a live request
    takes what `RecentIds` has for its slot. A `sealed` trail learns nothing more: what its request
    computes from there on is never found again.
    """

    __slots__ = (
        "_ids",
        "_known",
        "_recent",
        "_slot",
        "block_tokens",
        "chain",
        "hints",
        "prompt_tokens",
        "root",
        "sealed",
        "tenant",
    )

    def __init__(self, root: bytes, block_tokens: int, ids: Ids, tenant: Tenant = ANYONE) -> None:
        self.root, self.block_tokens, self.tenant = root, block_tokens, tenant
        self.prompt_tokens = len(ids)
        self.hints: Hints | None = None  # of the request that has it
        self.chain: list[bytes] = []
        self._ids, self._known = ids, len(ids)
        self._recent: RecentIds | None = None
        self._slot = -1
        self.sealed = False

    @property
    def ids(self) -> Ids:
        self.take_recent()
        return self._ids[: self._known]

    def attach(self, recent: RecentIds, slot: int) -> None:
        """From now on a request in this slot has the trail."""
        if self.sealed:
            recent.known[slot] = -1
            return
        self._recent, self._slot = recent, slot
        recent.known[slot] = self._known

    def detach(self) -> None:
        """From now on the slot belongs to another request."""
        self.take_recent()
        self._recent = None

    def take_recent(self) -> int:
        """Takes what the slot has. Returns how many ids there are."""
        if self._recent is None:
            return self._known
        start, end = self._known, int(self._recent.known[self._slot])
        if end > start:
            ring, rows = self._recent.ids[self._slot], self._recent.rows
            round_end = start - start % rows + rows
            self._add(start, ring[start % rows :][: end - start])
            if end > round_end:
                self._add(round_end, ring[: end - round_end])
        elif end < start:  # interrupted
            self._recent.known[self._slot] = start
        return self._known

    def _add(self, start: int, ids: Ids) -> None:
        end = start + len(ids)
        if end > len(self._ids):
            grown = np.empty(max(2 * len(self._ids), end), dtype=np.int32)
            grown[: self._known] = self._ids[: self._known]
            self._ids = grown
        self._ids[start:end] = ids
        self._known = end

    def _set_known(self, tokens: int) -> None:
        """After an interrupt, `take_recent` finds the old number or the new one."""
        if self._recent is not None and tokens < self._known:
            self._recent.known[self._slot] = tokens
        self._known = tokens
        if self._recent is not None:
            self._recent.known[self._slot] = tokens

    def digest(self, block: int) -> bytes:
        """The chain digest of a block whose tokens are all known."""
        if block >= len(self.chain):
            self.hash_blocks(block + 1)
        return self.chain[block]

    def hash_blocks(self, blocks: int) -> None:
        """Makes the digests of the first `blocks` blocks, whose tokens are all known."""
        if blocks * self.block_tokens > self._known:
            known = self.take_recent()
            assert blocks * self.block_tokens <= known, "a digest of tokens that are not known"
        chain, ids, block_tokens = self.chain, self._ids.data, self.block_tokens
        digest, link = chain[-1] if chain else self.root, self.tenant.link
        for at in range(len(chain) * block_tokens, blocks * block_tokens, block_tokens):
            digest = link(digest, ids[at : at + block_tokens])
            chain.append(digest)

    def state_digests(self, tokens: int) -> tuple[bytes, bytes]:
        """Of the first `tokens` tokens, never equal to a block's; and that of their last block."""
        whole = tokens // self.block_tokens
        parent = self.digest(whole - 1) if whole else self.root
        rest, secret = self.ids[whole * self.block_tokens : tokens].tobytes(), self.tenant.secret
        digest = hashlib.blake2b(rest, digest_size=32, key=parent, person=b"dsv4 state").digest()
        return digest if secret is None else secret.link(digest, b"state"), parent

    def check(self, start: int, ids: Ids) -> None:
        """Raises InvalidInput if `ids`, the tokens from `start` on, contradict what is known."""
        self.take_recent()
        if start >= self._known:
            return
        known = self._ids[start : min(self._known, start + len(ids))]
        if not np.array_equal(known, ids[: len(known)]):
            wrong = start + int(np.flatnonzero(known != ids[: len(known)])[0])
            raise InvalidInput(
                f"token {wrong} was given as {self._ids[wrong]} before and as "
                f"{ids[wrong - start]} now: give the ids of the tokens that ran (after a hit those "
                f"of request.resume.run); to change tokens, rewind the request first"
            )

    def learn(self, start: int, ids: Ids) -> None:
        """Adds what `check` has accepted. After a gap nothing can be learned."""
        self.take_recent()
        if self.sealed:
            return
        if start <= self._known < start + len(ids):
            self._add(start, ids)
            self._set_known(self._known)

    def cut(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens. Digests go first, so that an interrupt leaves
        none of tokens that are not known."""
        self.take_recent()
        if tokens < self._known:
            del self.chain[tokens // self.block_tokens :]
            self._set_known(tokens)

    def keep(self) -> tuple[int, list[bytes]]:
        """What `cut` forgets, for `restore`."""
        self.take_recent()
        return self._known, list(self.chain)

    def restore(self, kept: tuple[int, list[bytes]]) -> None:
        """Undoes the cuts since `keep`, if nothing has been learned since."""
        known, chain = kept
        self._set_known(known)
        self.chain = chain

    def copy(self) -> TokenTrail:
        twin = TokenTrail(self.root, self.block_tokens, self.ids.copy(), self.tenant)
        twin.chain, twin.prompt_tokens = list(self.chain), self.prompt_tokens
        twin.sealed, twin.hints = self.sealed, self.hints
        return twin


@dataclass(frozen=True, slots=True)
class StepIds:
    """Either all of them (`ids`), where each request has a few; or `apart` for each trail that
    learns some: its trail, a position and the ids from there on. They are checked and not yet
    learned."""

    ids: Ids | None
    apart: list[tuple[TokenTrail, int, Ids]]
    recent: RecentIds

    @classmethod
    def read(
        cls, plan: ForwardPlan, kept: Positions, ids: Ids, recent: RecentIds, block_tokens: int
    ) -> StepIds:
        """Raises InvalidInput if they do not fit the step, or contradict what is known."""
        if len(ids) != plan.shape.num_tokens:
            _refuse_count(len(ids), plan.num_tokens)
        starts, known = plan.starts, recent.known.take(plan.shape.slots)
        has_gaps = False
        if np.count_nonzero(starts != known):
            for row in ((starts < known) & (kept > 0)).nonzero()[0].tolist():
                trail, start, span = _of_row(plan, kept, ids, row)
                trail.check(start, span)
            has_gaps = bool(((starts > known) & (known >= 0)).any())
        if plan.shape.most_tokens <= block_tokens and not has_gaps:
            return cls(ids, [], recent)
        new = (starts <= known) & (known < starts + kept)
        return cls(None, [_of_row(plan, kept, ids, r) for r in new.nonzero()[0].tolist()], recent)

    def learn(self, plan: ForwardPlan, ends: Positions) -> None:
        """Adds them to what is known of the requests, up to `ends`."""
        if self.ids is not None:
            shape = plan.shape
            self.recent.learn(shape.slots, plan.starts, ends, self.ids, shape.token_rows)
        for trail, start, span in self.apart:
            trail.learn(start, span)


def _refuse_count(ids: int, tokens: int) -> NoReturn:
    raise InvalidInput(
        f"{ids} token ids for a step of {tokens} tokens: give all of them, in the order of the plan"
    )


def _of_row(plan: ForwardPlan, kept: Positions, ids: Ids, row: int) -> tuple[TokenTrail, int, Ids]:
    """A request's trail, where its step starts, the ids of the tokens that it keeps."""
    trail, first = plan.requests[row].trail, int(plan.shape.first_rows[row])
    assert trail is not None
    return trail, int(plan.starts[row]), ids[first : first + int(kept[row])]


def chain_root(*, fingerprint: str, model_id: str, salt: str | None) -> bytes:
    """Where chains start. Different layouts, models or salts share no digest; no salt differs from
    the empty one. With a key, `Secret.root` of this."""
    for name, value in (("salt", salt), ("model_id", model_id)):
        if value is not None and not isinstance(value, str):
            raise InvalidInput(f"{name}={value!r}: must be a string")
    given = [model_id] if salt is None else [model_id, salt]
    parts = [fingerprint.encode(), *(text.encode(errors="surrogatepass") for text in given)]
    root = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"dsv4 prefix")
    for part in parts:
        root.update(len(part).to_bytes(8, "little") + part)
    return root.digest()

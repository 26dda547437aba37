"""Why a prompt was not found: a memory of what was cached, and of how it left. Torch-free."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import Cause, NewlyCached, Observer
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.prefix.trail import Ids, TokenIds, TokenTrail
from dsv4.errors import InvalidInput, require_count, require_flag

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager

MissKind = Literal[
    "too_short", "never_seen", "differs", "evicted", "refused", "other_salt", "other_model"
]
Rule = Literal[
    "asked", "quota", "superseded", "final", "ttl", "priority", "worth_least", "interrupt"
]
MOST_COMPARED = 1024  # blocks that come after the same one; the newest
IDS_AROUND = 4  # token ids before the one that differs and after it
CONTENT_BYTES = 16
SEVERAL = b""  # in place of a root: requests of more than one


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A prompt differs from a cached one at token `at`. `given` and `cached` are the ids of both
    from token `first` on, a few around that one; each may end before the other. `is_cached` is
    false if the other one was evicted since."""

    at: int
    first: int
    given: tuple[int, ...]
    cached: tuple[int, ...]
    is_cached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """How a block left the cache: how many `seconds_ago`, for `whom` memory was needed, and by
    which `rule` it was chosen. `in_tier`: a tier has its bytes, as far as was known then. `tier` is
    the one whose bytes were refused."""

    seconds_ago: float
    whom: str = ""
    rule: Rule | None = None
    in_tier: bool = False
    tier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What of a prompt is cached on the device, and why the block after that is not.

    `tokens` are the prompt's, `found_tokens` those that an admission would share, `replayed_tokens`
    those of them that would run again for lack of a snapshot. `kind` says why the block at token
    `found_tokens` is not there:

        None           nothing is missing: only a rest that fills no block is computed
        "too_short"    the prompt has no whole block before its last token
        "never_seen"   no prompt that began like this one went on with a whole block
        "differs"      `difference` says from which token on it is another prompt
        "evicted"      `leaving` says when, for whom and why
        "refused"      a tier had it, but its bytes were damaged or not made with the key
        "other_salt"   these tokens are cached for another salt
        "other_model"  the prompt was made for another model, layout or key

    `is_complete`: nothing was forgotten that the answer could depend on. Otherwise "never_seen"
    means: not among what is remembered.
    """

    tokens: int
    found_tokens: int
    replayed_tokens: int
    kind: MissKind | None
    difference: Difference | None = None
    leaving: Leaving | None = None
    is_complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """As sentences."""
        text = f"{self.found_tokens} of {self.tokens} tokens are cached"
        if self.replayed_tokens:
            text += f", {self.replayed_tokens} of them run again without a snapshot near the end"
        return f"{text}. {self._why()}"

    def _why(self) -> str:
        at = f"The block from token {self.found_tokens} on"
        match self.kind:
            case None:
                return "No whole block is missing."
            case "too_short":
                return "A prompt must be longer than one block to find one."
            case "never_seen" if self.is_complete:
                return f"{at} was never cached."
            case "never_seen":
                return f"{at} was not cached, as far as is remembered."
            case "differs":
                return self._differs()
            case "evicted" | "refused":
                return self._left(at)
            case "other_salt":
                return f"{at} is cached for another salt."
            case "other_model":
                return "The prompt was made for another model, layout or key."

    def _differs(self) -> str:
        difference = self.difference
        if difference is None:
            return (
                f"Another prompt goes on after token {self.found_tokens}; with which tokens is not "
                f"remembered."
            )
        other = "a cached prompt" if difference.is_cached else "a prompt that was evicted since"
        at = difference.at - difference.first
        given, cached = difference.given[at : at + 1], difference.cached[at : at + 1]
        ids = f": {given[0]} in place of {cached[0]}" if given and cached else ""
        return f"It differs from {other} at token {difference.at}{ids}."

    def _left(self, at: str) -> str:
        leaving = self.leaving
        assert leaving is not None
        ago = f"{leaving.seconds_ago:.1f} s ago"
        if self.kind == "refused":
            return f"{at} was refused {ago}: tier {leaving.tier!r} had bytes that are not it."
        text = f"{at} was evicted {ago}, for {leaving.whom}, because {_RULES[leaving.rule]}."
        return f"{text} A tier had it then." if leaving.in_tier else text


_RULES: dict[Rule | None, str] = {
    None: "memory was short",
    "asked": "evict() was called",
    "quota": "the quota of its salt was full",
    "superseded": "its session had a newer state",
    "final": "its session had ended",
    "ttl": "nothing else was left, though its time had not passed",
    "priority": "its priority was low",
    "worth_least": "it was worth least",
    "interrupt": "a call was interrupted",
}


class _Gone(NamedTuple):
    at_s: float
    whom: bytes | None  # the root of the request that needed memory
    session: str | None  # and its session
    rule: Rule
    in_tier: bool


class _Entry:
    """One block: of which tokens, after which block, and how it left, if it has."""

    __slots__ = ("content", "gone", "ids", "parent", "root")

    def __init__(self, root: bytes, parent: bytes, content: bytes, ids: bytes) -> None:
        self.root, self.parent, self.content, self.ids = root, parent, content, ids
        self.gone: _Gone | None = None


class History(Observer):
    """The newest blocks that were cached, at most `most` of them, with their tokens: about one KiB
    each. It hears of a block when it is cached and when it leaves; a step that completes no block
    costs nothing."""

    def __init__(self, most: int, block_tokens: int) -> None:
        self._most, self._block_tokens = most, block_tokens
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the oldest news first
        self._after: dict[bytes, dict[bytes, None]] = {}  # by the digest before them
        self._roots_of: dict[bytes, dict[bytes, bytes]] = {}  # by content: digest to root
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()  # when, which tier
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._entries)

    # ---- what happens ------------------------------------------------------------------------

    def cached(self, new: NewlyCached, trail: TokenTrail) -> None:
        if not new.is_snapshot:
            self.landed(new.node, trail)

    def landed(self, node: PrefixNode, trail: TokenTrail) -> None:
        self._refused.pop(node.digest, None)
        known = self._entries.get(node.digest)
        if known is not None:
            known.gone = None
            self._entries.move_to_end(node.digest)
            return
        depth, size = node.depth, self._block_tokens
        parent = trail.chain[depth - 1] if depth else trail.root
        before = self._entries.get(parent)
        ids = trail.ids[depth * size : (depth + 1) * size].tobytes()
        content = b"" if depth and before is None else _content(before, ids)
        self._entries[node.digest] = _Entry(trail.root, parent, content, ids)
        self._after.setdefault(parent, {})[node.digest] = None
        if content:
            self._roots_of.setdefault(content, {})[node.digest] = trail.root
        if len(self._entries) > self._most:
            self._forget()

    def left(self, victims: Sequence[PrefixNode], cause: Cause) -> None:
        now, trails = time.time(), [each for each in cause.askers if each is not None]
        roots = {each.root for each in trails}
        whom = None if not trails else trails[0].root if len(roots) == 1 else SEVERAL
        names = {None if each.hints is None else each.hints.session for each in trails}
        session = names.pop() if len(names) == 1 else None
        for nth, node in enumerate(victims):
            entry = self._entries.get(node.digest)
            if entry is not None:
                rule = "quota" if nth < cause.over_quota else _rule(node, cause)
                own = session if whom == entry.root else None
                entry.gone = _Gone(now, whom, own, rule, node.stored)
                self._entries.move_to_end(node.digest)

    def refused(self, digest: bytes, tier: str) -> None:
        self._refused[digest] = time.time(), tier
        self._refused.move_to_end(digest)
        if len(self._refused) > self._most:
            self._refused.popitem(last=False)

    def recovered(self, nodes: Collection[PrefixNode]) -> None:
        left, now = {node.digest for node in nodes}, time.time()
        for digest, entry in self._entries.items():
            if digest in left:
                entry.gone = None
            elif entry.gone is None:
                entry.gone = _Gone(now, None, None, "interrupt", in_tier=False)

    def _forget(self) -> None:
        digest, entry = self._entries.popitem(last=False)
        _discard(self._after, entry.parent, digest)
        _discard(self._roots_of, entry.content, digest)
        self.forgotten += 1

    # ---- what is asked -----------------------------------------------------------------------

    def why(
        self, trail: TokenTrail, block: int, *, salts: bool
    ) -> tuple[MissKind, Difference | None, Leaving | None]:
        """Why this block of a prompt is not cached. All of its tokens must be known."""
        digest = trail.digest(block)
        entry, refused = self._entries.get(digest), self._refused.get(digest)
        if refused is not None:
            at_s, tier = refused
            return "refused", None, Leaving(seconds_ago=_since(at_s), tier=tier)
        if entry is not None and entry.gone is not None:
            return "evicted", None, _leaving(entry.gone, entry.root)
        difference = self._difference(trail, block)
        if difference is not None:
            return "differs", difference, None
        if salts and self._is_of_another(trail, block):
            return "other_salt", None, None
        return "never_seen", None, None

    def _difference(self, trail: TokenTrail, block: int) -> Difference | None:
        """From the block after the same one that begins like this one for longest; None if there
        is none, or if a first block has nothing in common with any."""
        parent, size = trail.digest(block - 1) if block else trail.root, self._block_tokens
        # copied at once: another thread may be adding to it
        after = [*self._after.get(parent, ())][-MOST_COMPARED:]
        found = [each for digest in after if (each := self._entries.get(digest)) is not None]
        if not found:
            return None
        first = block * size
        given: Ids = trail.ids[first : first + size]
        ids = np.frombuffer(b"".join(each.ids for each in found), np.int32).reshape(-1, size)
        differs = ids[:, : len(given)] != given
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), len(given))
        rank = 2 * common + [each.gone is None for each in found]
        nth = int(rank.argmax())
        same = int(common[nth])
        if not block and not same:
            return None
        start = max(0, same - IDS_AROUND)
        return Difference(
            at=first + same,
            first=first + start,
            given=tuple(given[start : same + IDS_AROUND + 1].tolist()),
            cached=tuple(ids[nth, start : same + IDS_AROUND + 1].tolist()),
            is_cached=found[nth].gone is None,
        )

    def _is_of_another(self, trail: TokenTrail, block: int) -> bool:
        content, size = b"", self._block_tokens
        for nth in range(block + 1):
            ids = trail.ids[nth * size : (nth + 1) * size].tobytes()
            content = _next_content(content, ids)
        named = [*self._roots_of.get(content, {}).items()]
        others = [self._entries.get(digest) for digest, root in named if root != trail.root]
        return any(each is not None and each.gone is None for each in others)


def _next_content(content: bytes, ids: bytes) -> bytes:
    return hashlib.blake2b(ids, digest_size=CONTENT_BYTES, key=content).digest()


def _content(before: _Entry | None, ids: bytes) -> bytes:
    """A name of all tokens up to the end of a block, the same for all salts; empty if those before
    it are not remembered."""
    if before is None:
        return _next_content(b"", ids)
    return _next_content(before.content, ids) if before.content else b""


def _discard(among: dict[bytes, dict[bytes, Any]], name: bytes, digest: bytes) -> None:
    found = among.get(name)
    if found is not None:
        found.pop(digest, None)
        if not found:
            del among[name]


def _rule(node: PrefixNode, cause: Cause) -> Rule:
    hints = node.hints
    if cause.reason == "asked":
        return "asked"
    if node.is_superseded:
        return "final" if hints is not None and hints.final else "superseded"
    if node.keep_until and hints is not None and hints.ttl_s is not None:
        return "ttl" if node.keep_until > time.monotonic() else "worth_least"
    return "priority" if node.priority < 0 else "worth_least"


def _leaving(gone: _Gone, root: bytes) -> Leaving:
    """What the salt whose block it was may know: of any other salt only that it was another one."""
    if gone.rule in ("asked", "interrupt"):
        whom = "the caller"
    elif gone.whom is None:
        whom = "a request without token ids"
    elif gone.whom == SEVERAL:
        whom = "a step with requests of several salts"
    elif gone.whom != root:
        whom = "another salt"
    elif gone.session is not None:
        whom = f"session {gone.session!r}"
    else:
        whom = "a request of the same salt"
    return Leaving(seconds_ago=_since(gone.at_s), whom=whom, rule=gone.rule, in_tier=gone.in_tier)


def _since(at_s: float) -> float:
    return max(0.0, time.time() - at_s)


class Explainer:
    """Says why a prompt finds nothing, or less than expected: `Explainer(manager).explain(prompt)`.

    It remembers the tokens of the newest `blocks` blocks, cached or evicted since, in about one KiB
    of host memory each. Make it right after the manager: what was cached before is not explained.
    Raises InvalidInput.
    """

    def __init__(self, manager: KVCacheManager, *, blocks: int = 16_384) -> None:
        prefix = manager._parts.prefix
        if not prefix:
            raise InvalidInput(
                "nothing is cached and nothing to explain: build the manager with prefix=..."
            )
        self._manager = manager
        self._came_late = len(prefix.index) > 0
        self._history = History(require_count("blocks", blocks), manager.schema.block_tokens)
        self._observers = prefix.notices.observers
        self._observers.append(self._history)

    def __repr__(self) -> str:
        return f"Explainer({len(self._history)} blocks are remembered)"

    def explain(
        self, prompt: TokenIds | Prompt, salt: str | None = None, *, salts: bool = False
    ) -> Explanation:
        """Why the first block of a prompt that is not cached is not. Changes nothing.

        It says nothing of other salts except that memory was needed for one. With `salts` it also
        says whether the same tokens are cached for another salt: for operators, because a tenant
        could ask for another's prompts with that. Raises InvalidInput, ContextOverflow, and
        ThreadError while a call of the manager runs.
        """
        require_flag("salts", salts)
        manager = self._manager
        if not isinstance(prompt, Prompt):
            prompt = manager.prefix.prompt(prompt, salt)
        elif salt is not None:
            raise InvalidInput("a prompt has its salt already: give it to manager.prefix.prompt")
        try:
            resume = manager.prefix.look_up(prompt)
        except InvalidInput:
            kind: MissKind = "other_model"
            return Explanation(tokens=len(prompt), found_tokens=0, replayed_tokens=0, kind=kind)
        trail, size = prompt.trail, manager.schema.block_tokens
        assert trail is not None
        block = resume.reused_tokens // size
        found = Explanation(
            tokens=len(prompt),
            found_tokens=resume.reused_tokens,
            replayed_tokens=len(resume.replay),
            kind=None,
        )
        return self._with_reason(found, trail, block, salts=salts)

    def _with_reason(
        self, found: Explanation, trail: TokenTrail, block: int, *, salts: bool
    ) -> Explanation:
        size = self._manager.schema.block_tokens
        if (block + 1) * size >= found.tokens:
            kind: MissKind | None = None if block else "too_short"
            return replace(found, kind=kind)
        kind, difference, leaving = self._history.why(trail, block, salts=salts)
        is_complete = not (self._came_late or self._history.forgotten)
        if kind == "never_seen" and block:
            node = self._manager._parts.prefix.index.get(trail.digest(block - 1))
            if node is not None and node.children:  # whose tokens are forgotten
                kind = "differs"
        return replace(
            found, kind=kind, difference=difference, leaving=leaving, is_complete=is_complete
        )

    def close(self) -> None:
        """Forgets everything. From now on nothing is remembered."""
        if self._history in self._observers:
            self._observers.remove(self._history)
        self._history = History(1, self._manager.schema.block_tokens)
        self._came_late = True

"""What a caller may know of a request, beyond its tokens: hints for what is kept. Torch-free."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from dsv4.cache.prefix.eviction import EvictionPolicy
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import NewlyCached, Notices, Observer
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.errors import InvalidInput, is_number, is_utf8, is_whole, require_flag

MOST_PRIORITY = 8
LONGEST_NAME = 256  # characters of a session
MOST_SESSIONS = 65_536  # whose newest state is remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Hints at admission, all optional. They change what is evicted first, never a result.

    `session` names a conversation or an agent: its newer state supersedes its older one, which then
    goes first; with `final` nothing is expected after this request. `priority`, a whole number from
    -8 to 8: each step counts four times. `ttl_s` is a floor, which each use refreshes: until these
    seconds have passed other blocks go first. It is not a promise: under pressure it gives way
    before a request is refused (docs/retention.md).
    """

    session: str | None = None
    priority: int = 0
    ttl_s: float | None = None
    final: bool = False

    def __post_init__(self) -> None:
        name = self.session
        if name is not None and not (
            isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and is_utf8(name)
        ):
            raise InvalidInput(
                f"hints: session={name!r}: must be a string of 1 to {LONGEST_NAME} characters "
                f"of UTF-8, or None"
            )
        if not is_whole(self.priority) or abs(self.priority) > MOST_PRIORITY:
            raise InvalidInput(
                f"hints: priority={self.priority!r}: must be a whole number from "
                f"-{MOST_PRIORITY} to {MOST_PRIORITY}; a larger one is kept longer"
            )
        object.__setattr__(self, "priority", int(self.priority))
        ttl_s = self.ttl_s
        if ttl_s is not None and (not is_number(ttl_s) or not 0 < ttl_s < math.inf):
            raise InvalidInput(f"hints: ttl_s={ttl_s!r}: must be a number of seconds above 0")
        require_flag("hints: final", self.final)
        if self.final and self.session is None:
            raise InvalidInput("hints: final=True says that a session ends: name the session too")


class Sessions(Observer):
    """Which cached block is the newest state of each session. What a newer state does not begin
    with is superseded: the policy is given the last block of it. A name is one session for each
    salt, and only the newest `MOST_SESSIONS` are remembered. It observes the prefix cache from the
    first session on."""

    def __init__(self, policy: EvictionPolicy, notices: Notices) -> None:
        self._policy, self._notices = policy, notices
        self._ends: OrderedDict[tuple[bytes, str], PrefixNode] = OrderedDict()
        self._observes = False

    def admitted(self, trail: TokenTrail, hints: Hints) -> None:
        """A request of a session continues or begins."""
        if hints.session is None:
            return
        if not self._observes:
            self._notices.observe(self)
            self._observes = True
        end = self._ends.get((trail.root, hints.session))
        if end is not None and (end.depth + 1) * trail.block_tokens <= len(trail.ids):
            self._compare(end, trail)

    def cached(self, new: NewlyCached, trail: TokenTrail) -> None:
        hints, node = trail.hints, new.node
        if hints is None or hints.session is None or new.is_snapshot:
            return
        key = trail.root, hints.session
        end = self._ends.get(key)
        if end is not None and end is not node:
            if node.depth <= end.depth:  # all blocks before the old end are cached: it is another
                self._supersede(end)
            else:
                self._compare(end, trail)
        self._ends[key] = node
        self._ends.move_to_end(key)
        if len(self._ends) > MOST_SESSIONS:
            self._ends.popitem(last=False)

    def _compare(self, end: PrefixNode, trail: TokenTrail) -> None:
        if trail.digest(end.depth) != end.digest:
            self._supersede(end)

    def _supersede(self, end: PrefixNode) -> None:
        if end.is_cached and not end.children:
            self._policy.superseded(end)

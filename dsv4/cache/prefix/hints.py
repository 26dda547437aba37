"""What a caller may know of a request, beyond its tokens: hints for what is kept. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsv4.errors import InvalidInput, is_number, is_whole, require_flag

MOST_PRIORITY = 8
LONGEST_NAME = 256  # characters of a session or a tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Hints at admission, all optional. They change what is evicted first, never a result.

    `session` names a conversation or an agent: its newer state supersedes its older one, which then
    goes first; with `final` nothing is expected after this request. `priority`, a whole number from
    -8 to 8: each step counts four times. `ttl_s` is a floor, which each use refreshes: until these
    seconds have passed other blocks go first. It is no promise: under pressure it gives way before
    a request is refused (docs/retention.md). `tenant` is whose quota counts, if that is not the
    prompt's salt.
    """

    session: str | None = None
    priority: int = 0
    ttl_s: float | None = None
    tenant: str | None = None
    final: bool = False

    def __post_init__(self) -> None:
        for name in ("session", "tenant"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
                raise InvalidInput(
                    f"hints: {name}={value!r}: must be a string of 1 to {LONGEST_NAME} characters, "
                    f"or None"
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

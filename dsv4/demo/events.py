"""What the demo reports while it runs and at the end: plain values for the screen, the picture
and JSON. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["agrees", "differs", "not compared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheState:
    """The cache after a step. `closed` counts groups that became entries in this step, `entries`
    all that live requests have, both by layer kind and over all layers of it. `trained_bytes` is
    what the same blocks and slots take in fp8 entries and fp4 keys, as V4 was trained."""

    blocks_live: int
    blocks_total: int
    slots_live: int
    slots_total: int
    blocks_taken: int
    closed: dict[str, int]
    entries: dict[str, int]
    block_bytes: int
    slot_bytes: int
    trained_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A forward that is over. `step` 0 ran the prompts. `lengths` are tokens in the cache, `chosen`
    all tokens generated so far and `said` their text, up to its end, by request.
    `transformers_bytes` is what transformers' own caches have after this step, one cache per
    request; None without transformers. Where theirs is used, `cache` is None."""

    part: str
    step: int
    lengths: dict[str, int]
    chosen: dict[str, list[int]]
    said: dict[str, str]
    transformers_bytes: int | None
    cache: CacheState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBegins:
    part: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """`note` says what was found; only a part that `differs` fails the demo. `said` are questions
    and answers that no step has reported."""

    part: str
    title: str
    note: str
    verdict: Verdict
    seconds: float
    tokens: int
    said: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixResult:
    """Two prompts with the same beginning, one after the other."""

    shared_tokens: int
    first_prompt_tokens: int
    first_run_tokens: int
    first_seconds: float
    second_prompt_tokens: int
    second_run_tokens: int
    second_seconds: float
    reused_tokens: int
    source: str
    snapshot_bytes: int


DemoEvent = PartBegins | StepEvent | PartResult
Emit = Callable[[DemoEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Without transformers there is only the first part and no `prefix`."""

    parts: list[PartResult]
    prefix: PrefixResult | None

    @property
    def passed(self) -> bool:
        return all(part.verdict != "differs" for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}

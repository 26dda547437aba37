"""What the processes of an application send each other. Ray pickles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dsv4.cache.prefix.explain import Explanation
from dsv4.routing.names import Naming
from dsv4.serve.failures import ApiError, as_api_error
from dsv4.serve.generation import Terms
from dsv4.serve.sampling import Sampling, TokenLogprob

Role = Literal["prefill", "decode"]
Ids = npt.NDArray[np.int64]


# ---- to a replica, and back ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Generate after `ids`, of which the last `said` are of the answer already. `replica` is the
    one that was chosen, or None; those in `avoided` were given up. `offers`: when it is done, offer
    the request. `offer`: the request can be had from another replica."""

    ids: Ids
    said: int
    new_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    logprobs: int | None
    schema: Mapping[str, Any] | None  # of its grammar
    terms: Terms
    pulse_s: float  # in which it says something, even if it is only that it lives
    replica: str | None = None
    avoided: frozenset[str] = frozenset()
    offers: bool = False
    offer: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request waits or runs there."""

    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the prompt found in a cache."""

    cached: int
    host: int
    storage: int
    explanation: Explanation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What steps have added: tokens, with the one that ended the answer. None: it still lives."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob | None, ...] = ()
    found: Found | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Nothing more comes. `complete`: the replica has done what it was asked."""

    complete: bool
    offer: bytes | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as a client is shown it; errors themselves may not survive pickling."""

    status: int
    message: str
    code: str | None
    param: str | None
    retry_after_s: int | None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        shown = as_api_error(error)
        return cls(
            status=shown.status,
            message=shown.message,
            code=shown.code,
            param=shown.param,
            retry_after_s=shown.retry_after_s,
        )

    @property
    def is_final(self) -> bool:
        """Whether another replica would say the same."""
        return 400 <= self.status < 500 and self.status != 429

    def error(self) -> ApiError:
        return ApiError(
            self.status,
            self.message,
            code=self.code,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


Message: TypeAlias = Accepted | Said | Over


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one request, on any replica."""

    max_context: int
    most_tokens: int
    block_tokens: int


# ---- to the router, and back ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A replica that takes requests: where its events are published, what its blocks are called,
    and how many tokens of prompts it has not run yet, with one for each answer that runs.
    `resumes`: it keeps the states of its requests, so it can go on from any of its blocks."""

    replica: str
    role: Role
    endpoint: str
    replay: str
    naming: Naming
    resumes: bool
    pid: int
    node: str
    load: float
    jobs: int
    cached_tokens: int  # of all prompts that it has served
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Where a request goes: the replica of its answer, and of its prompt if another one shall run
    it."""

    decode: str
    prefill: str | None

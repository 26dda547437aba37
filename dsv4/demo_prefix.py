"""Two requests that begin alike: the second takes the beginning from the first one's blocks.

The model's own layers run on a manager with a prefix cache, request by request, as an engine would.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix_options import PrefixOptions
from dsv4.cache.request import Request
from dsv4.demo_events import PrefixResult
from dsv4.integrations.transformers.fast_attention import (
    FastAttention,
    RunningStep,
    make_rope_tables,
)
from dsv4.integrations.transformers.model_check import cache_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    request: Request
    tokens: list[int]
    prompt_seconds: float
    run_tokens: int


class PrefixEngine:
    """Serves one request at a time from a model of transformers; unquantised records."""

    def __init__(self, model: Any, *, max_context: int) -> None:
        schema = cache_schema(model, max_context=max_context)
        self.model = model
        self.manager = KVCacheManager(
            schema,
            num_blocks=2 * schema.blocks_for(max_context),
            max_requests=2,
            max_step_tokens=max_context,
            prefix=PrefixOptions(snapshots=4, model_id="demo"),
        )
        tables = make_rope_tables(model.model.rotary_emb, max_context, self.manager.device)
        self._step = RunningStep(manager=self.manager, rope_tables=tables)

    @torch.no_grad()
    def answer(self, prompt: Tensor, new_tokens: int) -> Answer:
        """Runs what is left of the prompt, then decodes greedily. The request stays alive."""
        begin = time.perf_counter()
        request = self.manager.admit_request(prompt)
        left = prompt[request.resume.start :]
        with self._replaced_attention():
            chosen = [self._run(request, left)]
            prompt_seconds = time.perf_counter() - begin
            while len(chosen) < new_tokens:
                chosen.append(self._run(request, torch.tensor(chosen[-1:])))
        return Answer(
            request=request, tokens=chosen, prompt_seconds=prompt_seconds, run_tokens=len(left)
        )

    def _run(self, request: Request, ids: Tensor) -> int:
        """One step; the token that the model chooses behind `ids`."""
        self._step.plan = plan = self.manager.prepare_forward([(request, len(ids))])
        hidden = self.model.model(
            input_ids=ids[None],
            attention_mask={"packed": None},  # attention is ours: no dense mask
            position_ids=plan.tokens[:, 1].long()[None],
            use_cache=False,
        ).last_hidden_state
        self.manager.commit(plan, tokens=ids)
        return int(self.model.lm_head(hidden[0, -1]).argmax())

    @contextmanager
    def _replaced_attention(self) -> Iterator[None]:
        modules = [layer.self_attn for layer in self.model.model.layers]
        for module in modules:
            vars(module)["forward"] = FastAttention(module, self._step)
        try:
            yield
        finally:
            for module in modules:
                del vars(module)["forward"]


def run_twice(
    model: Any, first: Tensor, second: Tensor, *, new_tokens: int
) -> tuple[PrefixResult, list[int]]:
    """What the second prompt saved, and the tokens it got. Everything is given back."""
    engine = PrefixEngine(model, max_context=max(len(first), len(second)) + new_tokens)
    manager = engine.manager
    earlier = engine.answer(first, new_tokens)
    manager.release_request(earlier.request)
    later = engine.answer(second, new_tokens)
    resume = later.request.resume
    manager.release_request(later.request)
    manager.check_invariants()
    shared = (first[: len(second)] == second[: len(first)]).int().cumprod(0).sum()
    stats = manager.stats()
    assert stats.prefix is not None
    assert stats.blocks_live == stats.requests_live == 0
    result = PrefixResult(
        shared_tokens=int(shared),
        first_prompt_tokens=len(first),
        first_run_tokens=earlier.run_tokens,
        first_seconds=earlier.prompt_seconds,
        second_prompt_tokens=len(second),
        second_run_tokens=later.run_tokens,
        second_seconds=later.prompt_seconds,
        reused_tokens=resume.reused_tokens,
        source=resume.source,
        snapshot_bytes=stats.prefix.snapshot_bytes,
    )
    return result, later.tokens

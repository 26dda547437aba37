"""The first part of the demo, for which nothing but this library is needed: the trained model
answers four conversations at once, on `dsv4.engine.Engine` and this cache."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.demo.events import CacheState, Emit, PartBegins, PartResult, StepEvent, Verdict
from dsv4.demo.prompts import NEW_TOKENS, QUESTIONS, Prompts
from dsv4.demo.state import cache_state
from dsv4.demo_model import parallel
from dsv4.demo_model.cached import CachedModel
from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.demo_model.network import Network
from dsv4.engine import Engine

PART = "engine"


def answer_alone(checkpoint: Checkpoint, texts: Prompts, emit: Emit) -> PartResult:
    """Tokens must be those of the model without a cache."""
    title = "four conversations at once on this cache, with nothing but this library"
    emit(PartBegins(part=PART, title=title))
    begin = time.perf_counter()
    prompts = {name: texts.asking(asked) for name, asked in QUESTIONS.items()}
    found = _answer(checkpoint.network, prompts, texts, emit)
    wrong = [
        name
        for name, tokens in found.items()
        if _without_cache(checkpoint.network, prompts[name], tokens) != tokens
    ]
    verdict: Verdict = "differs" if wrong else "agrees"
    note = "all tokens as without a cache"
    if wrong:
        note = f"prompt {wrong[0]}: other tokens than without a cache"
    result = PartResult(
        part=PART,
        title=title,
        note=note,
        verdict=verdict,
        seconds=time.perf_counter() - begin,
        tokens=len(prompts) * NEW_TOKENS,
    )
    emit(result)
    return result


def _answer(
    network: Network, prompts: Mapping[str, Tensor], texts: Prompts, emit: Emit
) -> dict[str, list[int]]:
    """The tokens of each answer; reports every step. Records are unquantised, so that the tokens
    can be compared."""
    longest = max(map(len, prompts.values())) + NEW_TOKENS + 1
    schema = CacheSchema.build(
        network.spec, max_context=longest, entry_format="fp32", index_format="fp32"
    )
    trained = CacheSchema.build(network.spec, max_context=longest)
    manager = KVCacheManager(
        schema,
        num_blocks=len(prompts) * schema.blocks_for(longest),
        max_requests=len(prompts),
    )
    engine = Engine(model=CachedModel(network, manager), manager=manager)
    # one token more than is shown: with its last token a job leaves the cache
    jobs = {name: engine.submit(ids.tolist(), NEW_TOKENS + 1) for name, ids in prompts.items()}
    state: CacheState | None = None
    step = 0
    while engine.step():
        requests = [job.request for job in jobs.values() if job.request is not None]
        if len(requests) < len(jobs) or not all(job.generated for job in jobs.values()):
            continue
        state = cache_state(manager, requests, state, trained)
        emit(
            StepEvent(
                part=PART,
                step=step,
                lengths={name: len(job.tokens) - 1 for name, job in jobs.items()},
                chosen={name: list(job.generated) for name, job in jobs.items()},
                said={name: texts.said(job.generated) for name, job in jobs.items()},
                transformers_bytes=None,
                cache=state,
            )
        )
        step += 1
    return {name: job.generated[:NEW_TOKENS] for name, job in jobs.items()}


def _without_cache(network: Network, prompt: Tensor, tokens: list[int]) -> list[int]:
    """What the model without a cache chooses at each of `tokens`, after the prompt and those
    before."""
    ids = torch.cat((prompt, torch.tensor(tokens[:-1], dtype=torch.int64)))
    with torch.no_grad():
        logits = parallel.run(network, ids[None]).logits[0, len(prompt) - 1 :]
    return logits.argmax(dim=-1).tolist()

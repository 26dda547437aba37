"""A continuous-batching engine for a tiny V4, a few seconds on a CPU: how to make a model for it.

`dsv4.engine.Engine` has the waiting queue, prefill chunks together with decodes, prefix reuse,
drafts, overlap, preemption and cancellation, and it survives errors of the device and Ctrl-C. What
it does not have is a model. Yours needs two methods, `forward` and `draft`, and its
`vocabulary`; this file has them, written out for layers that are computed by hand.

    python -m examples.engine

Where the engine calls them is in dsv4/engine.py, which reads from top to bottom.
"""

from __future__ import annotations

import torch
from torch import Tensor

import dsv4
from dsv4.engine import Engine
from dsv4.testing import VOCABULARY, RandomModel, normed


class Model:
    """Weights, and the cache that the layers write and read."""

    vocabulary = VOCABULARY

    def __init__(self, cache: dsv4.KVCacheManager) -> None:
        self.cache = cache
        self.weights = RandomModel(cache.schema, cache.device)  # yours come from a checkpoint
        self.followers = torch.zeros(VOCABULARY, dtype=torch.int64, device=cache.device)

    def forward(self, plan: dsv4.ForwardPlan, ids: Tensor, rows: Tensor) -> Tensor:
        """The tokens of a step, of all its requests one after the other, through all layers; then
        the logits of the rows that are asked for: each request's newest token, and its drafts.

        Which request a token belongs to, and its position, are in the plan: a layer projects its
        input, and the cache does the rest. Nothing here asks the device for a value, so the next
        step can be planned and launched while this one runs."""
        x = self.weights.embedding[ids]
        for number, layer in enumerate(self.weights.layers):
            handle, rope, indices = self.cache.acquire(number, plan.batch), layer.cache.rope, None
            given = normed(x)
            handle.append(*layer.projections(given), weights=layer.cache)
            if layer.has_indexer:
                indices = handle.select(*layer.index_queries(given), rope=rope)
            q = layer.queries(given, plan.batch)
            attended, _ = handle.attend(q, layer.sink, indices, inverse_rope=rope)
            x = x + layer.output(attended)
        logits = normed(x) @ self.weights.head
        self.followers[ids] = logits.argmax(dim=-1)
        return logits[rows]

    def draft(self, plan: dsv4.ForwardPlan, newest: Tensor, count: int) -> Tensor:
        """A guess of the next `count` tokens after each of `newest`: what the model chose when it
        last saw that token. A draft layer (MTP) or a small model guesses better; wrong guesses
        change no answer. Who has none gives the engine `drafts=0`."""
        guesses = [newest]
        for _ in range(count):
            guesses.append(self.followers[guesses[-1]])
        return torch.stack(guesses[1:], dim=1)


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    schema = dsv4.CacheSchema.build(
        dsv4.ModelSpec.preset("tiny"), max_context=1024, max_draft_tokens=3, steps_ahead=1
    )
    cache = dsv4.KVCacheManager(  # and not dsv4.Cache: so few blocks that memory runs short
        schema,
        num_blocks=6,
        max_requests=4,
        max_step_tokens=160,
        max_open_plans=2,
        prefix=dsv4.PrefixOptions(snapshots=8),
    )
    engine = Engine(model=Model(cache), manager=cache)
    generator = torch.Generator().manual_seed(2)

    def text(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    shared = text(260)  # a system prompt
    jobs = [engine.submit(ids, 24) for ids in (text(240), [*shared, *text(120)], text(3))]
    for _ in range(6):
        engine.step()
    jobs += [engine.submit([*shared, *text(n)], 16) for n in (30, 4)]
    unwanted = engine.submit(text(250), 500)
    for _ in range(6):
        engine.step()
    engine.cancel(unwanted)
    engine.run()
    for job in jobs:
        print(
            f"prompt of {job.prompt_tokens} tokens: {len(job.generated)} generated, "
            f"{job.drafts_kept} of them from drafts, {job.tokens_skipped} not run for they were "
            f"cached, preempted {job.preemptions} times"
        )
    stats = cache.stats()
    print(f"{stats.blocks_free} blocks free + {stats.blocks_cached} cached = {stats.blocks_total}")


if __name__ == "__main__":
    main()

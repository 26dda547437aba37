"""A decode loop without any framework, a few seconds on a CPU.

A model of random weights with layers of every kind generates greedily. Prompts are prefilled in
chunks, the last request joins while the others decode, and every decode step also checks draft
tokens: `commit` keeps those that the model chooses itself, the others vanish.

    python -m examples.decode_loop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4 import CacheSchema, KVCacheManager, ModelSpec, Request
from dsv4.testing import VOCABULARY, RandomModel

PROMPT_TOKENS = (150, 5, 130)
JOINS_AT_STEP = (0, 0, 6)
NEW_TOKENS = 24
CHUNK_TOKENS = 60
DRAFT_TOKENS = 3


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """One request and its tokens: the prompt, then what was generated.

    [0, request.length)      in the cache
    [request.length, end)    known, not yet run: the rest of the prompt, or the newest token
    """

    request: Request
    tokens: list[int]
    prompt_tokens: int
    drafts_kept: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def next_input(self) -> list[int]:
        """A chunk of the prompt, or the newest token followed by drafts."""
        known = self.tokens[self.request.length :]
        return known[:CHUNK_TOKENS] if len(known) > 1 else known + self._drafts()

    def take(self, ids: list[int], chosen: list[int]) -> int:
        """Adds what the model chose after `ids`. Returns how many of `ids` are right."""
        known = len(self.tokens) - self.request.length
        if len(ids) < known:
            return len(ids)
        right = known
        while right < len(ids) and ids[right] == chosen[right - 1]:
            right += 1
        self.tokens += chosen[known - 1 : right]
        self.drafts_kept += right - known
        return right

    def _drafts(self) -> list[int]:
        """A cheap guess: what followed when the newest token was last seen."""
        earlier = [at for at, token in enumerate(self.tokens[:-1]) if token == self.tokens[-1]]
        return self.tokens[earlier[-1] + 1 :][:DRAFT_TOKENS] if earlier else []


def run_step(model: RandomModel, manager: KVCacheManager, live: Sequence[Generation]) -> None:
    """One forward pass over all live requests, whatever each of them is doing."""
    inputs = [generation.next_input() for generation in live]
    counts = [len(ids) for ids in inputs]
    plan = manager.prepare_forward(
        [(g.request, count) for g, count in zip(live, counts, strict=True)]
    )
    logits = model.logits([token for ids in inputs for token in ids], manager, plan)
    chosen = [best.tolist() for best in logits.argmax(dim=-1).split(counts)]
    manager.commit(plan, [g.take(*ids) for g, *ids in zip(live, inputs, chosen, strict=True)])


def generate(prompts: Sequence[list[int]], joins_at_step: Sequence[int]) -> list[Generation]:
    """Runs every prompt until it has NEW_TOKENS more. Prompt n joins at step joins_at_step[n]."""
    schema = CacheSchema.build(
        ModelSpec.preset("tiny"), max_draft_tokens=DRAFT_TOKENS, max_context=1024
    )
    manager = KVCacheManager(schema, num_blocks=12, max_requests=4, max_step_tokens=512)
    model = RandomModel(schema)
    live: list[Generation] = []
    done: list[Generation] = []
    step = 0
    while len(done) < len(prompts):
        for prompt, joins_at in zip(prompts, joins_at_step, strict=True):
            if joins_at == step:
                request = manager.admit_request(len(prompt))
                live.append(
                    Generation(request=request, tokens=list(prompt), prompt_tokens=len(prompt))
                )
        run_step(model, manager, live)
        for generation in [g for g in live if len(g.generated) >= NEW_TOKENS]:
            manager.release_request(generation.request)
            live.remove(generation)
            done.append(generation)
        step += 1
    return done


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(VOCABULARY, (count,), generator=generator).tolist() for count in PROMPT_TOKENS
    ]
    for generation in generate(prompts, JOINS_AT_STEP):
        print(
            f"prompt of {generation.prompt_tokens} tokens: {len(generation.generated)} generated, "
            f"{generation.drafts_kept} of them from drafts: {generation.generated[:12]} …"
        )


if __name__ == "__main__":
    main()

"""Prefill in one process, decode in two others, a router between them, a few seconds on a CPU.

The prefill process runs prompts and offers each request when its first token is known. The router,
this process, carries the offers: a few kilobytes. A decode process accepts, reads the cache from
the other's memory with NIXL, and continues with drafts. One request moves to the other decode
process in the middle of its answer. What does not arrive is computed: the hand-off only saves time.
The tokens are those of a single process.

    pip install ".[nixl]"        # in a checkout
    python -m examples.disaggregated

Read it top to bottom: a worker, whatever its role; then the router.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import dsv4
from dsv4.testing import VOCABULARY, RandomModel
from examples import decode_loop
from examples.decode_loop import NEW_TOKENS, Generation

PROMPT_TOKENS = (150, 260, 129)
MOVES = 1  # this prompt's request moves on
MOVES_AFTER = 6  # tokens of its answer
PREFILL, DECODE = "prefill", ("decode 0", "decode 1")
# the caches may have different drafts and sizes
DRAFTS = {PREFILL: 0, "decode 0": decode_loop.DRAFT_TOKENS, "decode 1": decode_loop.DRAFT_TOKENS}
BLOCKS = {PREFILL: 12, "decode 0": 9, "decode 1": 7}


# ---- a worker ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """A manager, a model, and the jobs that it has. The router decides what comes and what goes."""

    name: str
    router: Connection
    model: RandomModel = field(init=False)
    manager: dsv4.KVCacheManager = field(init=False)
    live: dict[int, Generation] = field(default_factory=dict)
    arrivals: dict[int, tuple[dsv4.Arrival, list[int], int]] = field(default_factory=dict)
    waiting: dict[int, tuple[list[int], int]] = field(default_factory=dict)  # computed here
    leaving: set[int] = field(default_factory=set)  # jobs that move in the middle

    def __post_init__(self) -> None:
        schema = dsv4.CacheSchema.build(
            dsv4.ModelSpec.preset("tiny"), max_draft_tokens=DRAFTS[self.name], max_context=1024
        )
        self.model = RandomModel(schema)
        self.manager = dsv4.KVCacheManager(
            schema,
            num_blocks=BLOCKS[self.name],
            max_requests=4,
            max_step_tokens=512,
            prefix=dsv4.PrefixOptions(model_id="decode_loop's random weights", snapshots=4),
            handoff=dsv4.HandoffOptions(name=self.name, deadline_s=60),
        )

    def run(self) -> None:
        while True:
            busy = bool(self.live or self.arrivals or self.waiting)
            while self.router.poll(0.0 if busy else 1.0):
                call, arguments = self.router.recv()
                if call == "stop":
                    return
                getattr(self, call)(**arguments)
                busy = True
            self.settle()
            if self.live:
                self.step()
            elif self.arrivals or self.waiting:
                time.sleep(0.0005)

    # ---- what the router asks

    def prefill(self, job: int, prompt: list[int]) -> None:
        request = self.manager.admit_request(prompt)
        self.live[job] = Generation(request=request, tokens=prompt, prompt_tokens=len(prompt))

    def accept(
        self, job: int, tokens: list[int], prompt_tokens: int, offer: bytes, moves: bool
    ) -> None:
        """Starts to read. The worker continues with its other jobs meanwhile."""
        if moves:
            self.leaving.add(job)
        try:
            self.arrivals[job] = self.manager.handoff.accept(offer), tokens, prompt_tokens
        except (dsv4.OfferError, dsv4.OutOfBlocks, dsv4.OutOfSlots) as error:
            self.compute(job, tokens, prompt_tokens, error)

    # ---- in the order of a turn

    def settle(self) -> None:
        """Continues requests that have arrived."""
        for job, (arrival, tokens, prompt_tokens) in list(self.arrivals.items()):
            if not arrival.poll():
                continue
            del self.arrivals[job]
            if arrival.request is None:
                self.compute(job, tokens, prompt_tokens, arrival.error)
                continue
            self.live[job] = Generation(
                request=arrival.request, tokens=tokens, prompt_tokens=prompt_tokens
            )
            self.tell("arrived", job=job, bytes_read=arrival.read_bytes)
        for job, (tokens, prompt_tokens) in list(self.waiting.items()):
            if self.manager.room.can_admit(
                tokens
            ):  # memory of a read that failed is released later
                del self.waiting[job]
                request = self.manager.admit_request(tokens)
                self.live[job] = Generation(
                    request=request, tokens=tokens, prompt_tokens=prompt_tokens
                )

    def compute(self, job: int, tokens: list[int], prompt_tokens: int, error: Any) -> None:
        """Computes what did not arrive, as soon as there is room."""
        self.tell("failed", job=job, why=str(error))
        self.waiting[job] = tokens, prompt_tokens

    def step(self) -> None:
        """One forward pass over all jobs; then those that have finished leave."""
        live = list(self.live.values())
        inputs = [generation.next_input() for generation in live]
        counts, ids = [len(each) for each in inputs], [token for each in inputs for token in each]
        plan = self.manager.prepare_forward(
            [(g.request, count) for g, count in zip(live, counts, strict=True)]
        )
        logits = self.model.logits(ids, self.manager, plan)
        chosen = [best.tolist() for best in logits.argmax(dim=-1).split(counts)]
        kept = [g.take(*each) for g, *each in zip(live, inputs, chosen, strict=True)]
        self.manager.commit(plan, kept, ids=ids)
        for job, generation in list(self.live.items()):
            count = len(generation.generated)
            if (self.name == PREFILL and count) or (job in self.leaving and count >= MOVES_AFTER):
                self.give_away(job)
            elif count >= NEW_TOKENS:
                self.manager.release_request(generation.request)
                del self.live[job]
                self.tell("done", job=job, tokens=generation.tokens)

    def give_away(self, job: int) -> None:
        """Offers a request and releases it: what was offered stays until it was taken."""
        generation = self.live.pop(job)
        self.leaving.discard(job)
        offer = self.manager.handoff.offer(generation.request)
        self.manager.release_request(generation.request)
        self.tell("offered", job=job, tokens=generation.tokens, offer=offer)

    def tell(self, what: str, **arguments: Any) -> None:
        self.router.send((self.name, what, arguments))


def work(name: str, router: Connection) -> None:
    """A process's main."""
    torch.set_num_threads(1)
    Worker(name=name, router=router).run()


# ---- the router ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Job:
    """What the router knows of a prompt."""

    prompt: list[int]
    ways: list[str] = field(default_factory=list)
    offer_bytes: int = 0
    bytes_read: int = 0
    failures: list[str] = field(default_factory=list)
    tokens: list[int] | None = None


def route(prompts: Sequence[list[int]]) -> list[Job]:
    """Runs all prompts, with a process for prefill and two for decode."""
    jobs = [Job(prompt=list(prompt)) for prompt in prompts]
    spawn = get_context("spawn")
    workers, pipes = [], {}
    for name in (PREFILL, *DECODE):
        pipes[name], other = spawn.Pipe()
        workers.append(spawn.Process(target=work, args=(name, other), daemon=True))
        workers[-1].start()
        other.close()
    for number, job in enumerate(jobs):
        job.ways.append(PREFILL)
        pipes[PREFILL].send(("prefill", {"job": number, "prompt": job.prompt}))
    while any(job.tokens is None for job in jobs):
        for pipe in wait(list(pipes.values())):
            assert isinstance(pipe, Connection)
            name, what, told = pipe.recv()  # EOFError: a worker is gone, and so is this example
            job = jobs[told["job"]]
            if what == "offered":
                target = DECODE[told["job"] % 2] if name == PREFILL else _other(name)
                job.ways.append(target)
                job.offer_bytes = len(told["offer"])
                moves = told["job"] == MOVES and name == PREFILL
                accepted = {**told, "prompt_tokens": len(job.prompt), "moves": moves}
                pipes[target].send(("accept", accepted))
            elif what == "arrived":
                job.bytes_read += told["bytes_read"]
            elif what == "failed":
                job.failures.append(told["why"])
            else:
                job.tokens = told["tokens"]
    for pipe in pipes.values():
        pipe.send(("stop", {}))
    for worker in workers:
        worker.join()
    return jobs


def _other(name: str) -> str:
    return DECODE[1 - DECODE.index(name)]


def main() -> int:
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(VOCABULARY, (count,), generator=generator).tolist() for count in PROMPT_TOKENS
    ]
    jobs = route(prompts)
    alone = {
        tuple(g.tokens[: g.prompt_tokens]): g.generated[:NEW_TOKENS]
        for g in decode_loop.generate(prompts, [0] * len(prompts))
    }
    same = True
    for job in jobs:
        assert job.tokens is not None
        generated = job.tokens[len(job.prompt) :][:NEW_TOKENS]
        same = same and generated == alone[tuple(job.prompt)]
        print(
            f"prompt of {len(job.prompt)} tokens: {' → '.join(job.ways)}, {len(generated)} "
            f"generated; the last offer had {job.offer_bytes:,} bytes, {job.bytes_read:,} were read"
            + "".join(f"; computed, for {why}" for why in job.failures)
        )
    print(f"as a single process generates them: {'yes' if same else 'no'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

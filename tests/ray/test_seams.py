"""What of the server the integration with Ray relies on, without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4.cache.handoff.options import HandoffOptions
from dsv4.serve.app import make_state
from dsv4.serve.demo import ServedDemo
from dsv4.serve.generation import Generation, Piece, Terms
from dsv4.serve.models import TextStream
from dsv4.serve.options import ServerOptions
from dsv4.serve.sampling import Sampling
from dsv4.serve.state import ServerState
from tests.support.handoff import until

PROMPT = ServedDemo().tokenizer.encode("A block has 128 tokens. " * 40)[:300]
GREEDY = Sampling(seed=1, temperature=0.0)
SEEDED = Sampling(seed=11, temperature=1.2, presence_penalty=0.7, repetition_penalty=1.1)
NEW = 24


def opened(**options: Any) -> ServerState:
    handoff = HandoffOptions(name="test", deadline_s=30.0)
    return make_state(ServedDemo(), ServerOptions(max_context=1024, **options), handoff)


def submit(
    state: ServerState, sampling: Sampling, said: tuple[int, ...] = (), new: int = NEW, **how: Any
) -> tuple[Generation, Any, list[Piece]]:
    """A job that is not stepped yet."""
    heard = list[Piece]()
    generation = Generation(
        sampling=sampling,
        stream=TextStream(state.model.tokenizer),
        emit=heard.append,
        terms=Terms(salt=how.get("salt")),
        said=said,
    )
    handovers = state.runner.engine.handovers
    assert handovers is not None
    if how.get("offers"):
        handovers.offer_when_done(generation)
    if how.get("offer") is not None:
        handovers.expect(generation, how["offer"])
    ids = [*how.get("prompt", PROMPT), *said]
    job = state.runner.submit(ids, new, generation, stop_tokens=frozenset())
    return generation, job, heard


def ended(state: ServerState, job: Any) -> list[int]:
    """Steps until nothing is left, in this thread."""
    runner = state.runner
    while runner.engine.jobs:
        runner._step()
    assert job.error is None
    return list(job.generated)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_an_answer_goes_on_where_it_was(sampling: Sampling):
    """On another server, from the prompt and the tokens so far."""
    state = opened()
    _, job, _ = submit(state, sampling)
    whole = ended(state, job)
    for count in (1, 7, NEW - 1):
        other = opened()
        _, job, _ = submit(other, sampling, tuple(whole[:count]), NEW - count)
        assert ended(other, job) == whole[count:]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_prompt_that_ran_elsewhere_arrives(sampling: Sampling):
    state = opened()
    _, job, _ = submit(state, sampling)
    whole = ended(state, job)
    prefill, decode = opened(), opened()
    generation, job, heard = submit(prefill, sampling, new=1, offers=True)
    first = ended(prefill, job)
    assert [piece.finish for piece in heard][-1] == "length"
    offer = prefill.runner.engine.handovers.offer(generation)
    assert offer is not None
    _, job, _ = submit(decode, sampling, tuple(first), NEW - 1, offer=offer)
    assert first + ended(decode, job) == whole
    assert job.tokens_skipped == len(PROMPT)  # nothing of it was computed
    assert decode.runner.manager.stats().handoff.requests_arrived == 1


def test_an_offer_of_another_prompt_is_not_used():
    """Its job is computed, and what arrived is given back."""
    prefill, decode = opened(), opened()
    generation, job, _ = submit(prefill, GREEDY, new=1, offers=True, prompt=PROMPT[::-1])
    ended(prefill, job)
    offer = prefill.runner.engine.handovers.offer(generation)
    _, job, _ = submit(decode, GREEDY, (), NEW, offer=offer)
    state = opened()
    _, alone, _ = submit(state, GREEDY)
    assert ended(decode, job) == ended(state, alone)
    assert job.tokens_skipped == 0
    assert not decode.runner.manager.requests


def test_an_offer_whose_owner_is_gone_costs_time_alone():
    prefill, decode = opened(), opened()
    generation, job, _ = submit(prefill, GREEDY, new=1, offers=True)
    first = ended(prefill, job)
    offer = prefill.runner.engine.handovers.offer(generation)
    prefill.runner.manager.handoff.close()
    _, job, _ = submit(decode, GREEDY, tuple(first), NEW - 1, offer=offer)
    state = opened()
    _, alone, _ = submit(state, GREEDY)
    assert first + ended(decode, job) == ended(state, alone)
    manager = decode.runner.manager
    assert manager.stats().blocks_live == 0
    until(manager, lambda: manager.stats().blocks_in_flight == 0)  # a read that is given up ends


def test_a_job_that_is_cancelled_while_it_arrives_gives_all_back():
    prefill, decode = opened(), opened()
    generation, job, _ = submit(prefill, GREEDY, new=1, offers=True)
    first = ended(prefill, job)
    offer = prefill.runner.engine.handovers.offer(generation)
    _, job, heard = submit(decode, GREEDY, tuple(first), NEW - 1, offer=offer)
    decode.runner._step()
    decode.runner.cancel(job)
    while decode.runner.engine.jobs:
        decode.runner._step()
    assert heard[-1].finish == "cancelled"
    assert not decode.runner.engine.handovers.expects(job)
    assert not decode.runner.manager.requests

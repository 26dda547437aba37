"""The trained model computes the same on the cache, without one and in transformers, and says what
it was trained to say, with unquantised records and with those that V4 is stored in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4 import CacheSchema, KVCacheManager, ModelSpec
from dsv4.demo_model import parallel
from dsv4.demo_model.cached import CachedModel
from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.demo_model.network import Network
from dsv4.engine import Engine
from dsv4.errors import ConfigError, SchemaMismatch

CHECKPOINT = Checkpoint.load()
NETWORK, TOKENIZER = CHECKPOINT.network, CHECKPOINT.tokenizer
# in fp32 the forms differ by the order of sums, and by the grid of exact products
TOLERANCE = 5e-3
QUESTIONS = ("What is a block?", "Who are you?", "Thanks")
UNKNOWN = "What is a trumpet?"


def manager(entries: str = "fp32", keys: str = "fp32", requests: int = 4) -> KVCacheManager:
    schema = CacheSchema.build(
        NETWORK.spec, max_context=640, entry_format=entries, index_format=keys
    )
    made = KVCacheManager(schema, num_blocks=5 * requests + 4, max_requests=requests)
    made.memory.block_arena.bytes.fill_(0xFF)
    made.memory.slot_arena.bytes.fill_(0xFF)
    return made


def conversation(count: int) -> list[int]:
    """The first topics with their answers: a text that the model knows, over 500 tokens long."""
    messages = []
    for question, answer in list(CHECKPOINT.answers.items())[::9][:count]:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return TOKENIZER.chat(messages)[:-1]


def forced(made: KVCacheManager, ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """The logits of every token, which run in steps of these sizes."""
    model, request = CachedModel(NETWORK, made), made.admit_request(len(ids))
    found, first = [], 0
    for count in chunks:
        with made.step([(request, count)]) as plan:
            part = torch.tensor(ids[first : first + count])
            found.append(model.forward(plan, part, torch.arange(count)))
        first += count
    made.release_request(request)
    return torch.cat(found)


def answers(made: KVCacheManager, questions: Sequence[str]) -> list[str]:
    engine = Engine(model=CachedModel(NETWORK, made), manager=made)
    jobs = [
        engine.submit(
            TOKENIZER.chat([{"role": "user", "content": question}]),
            64,
            stop_tokens={TOKENIZER.end},
        )
        for question in questions
    ]
    engine.run()
    return [TOKENIZER.decode(job.generated) for job in jobs]


def test_the_form_on_the_cache_is_the_one_that_was_trained():
    """Prefill, a chunk, then decode, far past the window, with more entries than are selected."""
    ids = conversation(12)
    assert len(ids) > 512
    assert len(ids) // 4 > 4 * NETWORK.spec.index_topk
    with torch.no_grad():
        expected = parallel.run(NETWORK, torch.tensor([ids])).logits[0]
    steps = [130, 70, *[1] * 40]
    found = forced(manager(), ids, [*steps, len(ids) - sum(steps)])
    assert (found - expected).abs().max() < TOLERANCE
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.extra("transformers")
def test_transformers_computes_the_same():
    from dsv4.demo.model import speaking_v4

    ids = torch.tensor([conversation(8)])
    with torch.no_grad():
        theirs = speaking_v4(CHECKPOINT)(ids).logits
        ours = parallel.run(NETWORK, ids).logits
    assert (theirs - ours).abs().max() < 1e-3


def test_no_bit_depends_on_what_shares_a_step():
    ids, other = conversation(5), conversation(2)
    alone = forced(manager("fp8_ds", "mxfp4"), ids, [len(ids) - 3, 1, 1, 1])
    made = manager("fp8_ds", "mxfp4")
    model = CachedModel(NETWORK, made)
    requests = [made.admit_request(len(text)) for text in (other, ids)]
    found, first = [], 0
    for count, others in ((100, 7), (len(ids) - 101, 50), (1, 1)):
        with made.step([(requests[0], others), (requests[1], count)]) as plan:
            run = torch.tensor([*other[:others], *ids[first : first + count]])
            logits = model.forward(plan, run, torch.arange(others + count))
            found.append(logits[others:])
        first += count
    assert torch.equal(torch.cat(found), alone[: len(ids)])


@pytest.mark.parametrize(("entries", "keys"), [("fp32", "fp32"), ("fp8_ds", "mxfp4")])
def test_it_answers_with_every_kind_of_record(entries: str, keys: str):
    found = answers(manager(entries, keys), [*QUESTIONS, UNKNOWN])
    assert found[:-1] == [CHECKPOINT.answers[question] for question in QUESTIONS]
    assert found[-1].startswith("I do not know that.")
    assert "Ask me about blocks" in found[-1]


@pytest.mark.nightly
def test_it_answers_all_that_it_was_trained_on():
    asked = list(CHECKPOINT.answers)
    found = answers(manager("fp8_ds", "mxfp4", requests=16), asked)
    wrong = [q for q, text in zip(asked, found, strict=True) if text != CHECKPOINT.answers[q]]
    assert len(wrong) <= len(asked) // 50, wrong


def test_a_draft_is_what_followed():
    made = manager()
    model, request = CachedModel(NETWORK, made), made.admit_request(4)
    with made.step([(request, 4)]) as plan:
        logits = model.forward(plan, torch.tensor([0, 3, 9, 4]), torch.tensor([3]))
    guessed = model.draft(plan, torch.tensor([4]), 2)
    assert guessed.shape == (1, 2)
    assert guessed[0, 0] == logits[0].argmax()


def test_another_models_cache_is_refused():
    schema = CacheSchema.build(ModelSpec.preset("tiny"), max_context=512)
    with pytest.raises(SchemaMismatch, match=r"lay it out with CacheSchema.build\(network.spec\)"):
        CachedModel(NETWORK, KVCacheManager(schema, num_blocks=4, max_requests=1))


def test_a_model_of_more_experts_is_refused():
    with pytest.raises(ConfigError, match="n_routed_experts=2"):
        Network(config={**NETWORK.config, "n_routed_experts": 2}, weights=NETWORK.weights)


def test_its_products_are_exact():
    """Weights of 8 bits, none so small that a sum of products needs more bits than fp64 has."""
    for name, weight in NETWORK.weights.items():
        assert torch.equal(weight, weight.bfloat16().float()), name
        small = weight[weight != 0].abs().min() if (weight != 0).any() else torch.tensor(1.0)
        assert small >= 2**-20, name
    assert replace(NETWORK).exact().is_exact

"""Prompts that begin alike: generate runs the shared part once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.errors import InvalidInput
from dsv4.integrations.transformers.accelerate import accelerate, restore
from tests.integrations.fast_v4 import counted, fast, generate, manager_of, plain_model
from tests.support.numbers import Numbers

NEW_TOKENS = 6


def ids(count: int, seed: int) -> Tensor:
    return Numbers(seed).integers(3, plain_model().config.vocab_size, 1, count)


def check_like_plain(found: Any, prompt: Tensor, **options: Any) -> None:
    expected = generate(plain_model(), prompt, NEW_TOKENS, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("policy", "shared_tokens"), [(None, 300), (full(), 140), (zero(), 140)])
def test_the_second_prompt_runs_from_where_it_differs(policy: Any, shared_tokens: int) -> None:
    shared, cached = ids(shared_tokens, 1), shared_tokens // 128 * 128
    first = torch.cat((shared, ids(20, 2)), dim=1)
    second = torch.cat((shared, ids(37, 3)), dim=1)
    options = {} if policy is None else {"prefix": PrefixOptions(policy=policy)}
    with fast(plain_model(), **options) as model, counted(model) as runs:
        check_like_plain(generate(model, first, NEW_TOKENS), first)
        assert runs[0] == shared_tokens + 20
        del runs[:]
        check_like_plain(generate(model, second, NEW_TOKENS), second)
        stats = manager_of(model).stats().prefix
        assert stats is not None
        assert sum(stats.hits.values()) == 1
        if policy is None or policy.kind == "full":
            assert runs[0] == shared_tokens + 37 - cached
        del runs[:]
        check_like_plain(generate(model, second, NEW_TOKENS), second)
        if policy is None or policy.kind == "full":
            assert runs[0] == shared_tokens + 37 - cached


def test_rows_of_a_padded_batch_reuse_each_its_own() -> None:
    model_ids = [ids(300, 1), torch.cat((ids(300, 1)[:, :200], ids(30, 4)), dim=1), ids(9, 5)]
    longest = max(row.shape[1] for row in model_ids)
    batch = torch.zeros((3, longest), dtype=torch.int64)
    mask = torch.zeros((3, longest), dtype=torch.int64)
    for row, prompt in enumerate(model_ids):
        batch[row, longest - prompt.shape[1] :] = prompt
        mask[row, longest - prompt.shape[1] :] = 1
    with fast(plain_model(), prefix=PrefixOptions(policy=full())) as model, counted(model) as runs:
        generate(model, model_ids[0], NEW_TOKENS)
        del runs[:]
        found = generate(model, batch, NEW_TOKENS, attention_mask=mask)
        assert runs[0] == (300 - 256) + (230 - 128) + 9
        for row, prompt in enumerate(model_ids):
            alone = generate(plain_model(), prompt, NEW_TOKENS)
            assert (
                found.sequences[row, longest:].tolist() == alone.sequences[0, -NEW_TOKENS:].tolist()
            )


def test_a_forward_that_wants_all_logits_runs_all_tokens() -> None:
    prompt = ids(140, 1)
    with fast(plain_model()) as model, counted(model) as runs:
        generate(model, prompt, NEW_TOKENS)
        del runs[:]
        found = model(prompt).logits
        assert runs == [140]
        torch.testing.assert_close(found, plain_model()(prompt).logits, rtol=0, atol=1e-4)
        hidden = model(prompt, logits_to_keep=1, output_hidden_states=True).hidden_states
        assert runs == [140, 140]
        assert all(bool(layer.any(dim=-1).all()) for layer in hidden)
        model.model(prompt)
        assert runs == [140, 140, 140]


def test_without_it_every_prompt_runs_whole() -> None:
    prompt = ids(140, 1)
    with fast(plain_model(), prefix=None) as model, counted(model) as runs:
        for _ in range(2):
            generate(model, prompt, NEW_TOKENS)
        assert [count for count in runs if count > 1] == [140, 140]
        assert manager_of(model).stats().prefix is None


def test_cached_prompts_make_room_for_new_ones() -> None:
    """Three blocks: a prompt takes two and leaves one cached, so the third evicts the first's."""
    prompts = [ids(140, seed) for seed in range(3)]
    with fast(plain_model(), max_batch=1, max_context=256) as model:
        for prompt in (*prompts, prompts[0]):
            check_like_plain(generate(model, prompt, NEW_TOKENS), prompt)
        stats = manager_of(model).stats().prefix
        assert stats is not None
        assert (stats.block_evictions, stats.misses["evicted"]) == (2, 1)


def test_restore_leaves_no_hook() -> None:
    model = plain_model()
    before = dict(model._forward_pre_hooks)
    accelerate(model, max_batch=1, max_context=640, records="bf16")
    assert len(model._forward_pre_hooks) == len(before) + 1
    restore(model)
    assert dict(model._forward_pre_hooks) == before


def kept(manager: Any) -> list[Hints | None]:
    """The hints of all cached blocks."""
    return [node.hints for node in manager._parts.prefix.index.nodes()]


@pytest.mark.parametrize("tiered", [False, True])
def test_hints_of_generate_and_of_the_engine_reach_the_cache(tiered: bool) -> None:
    from dsv4.integrations.transformers.engine import Engine
    from dsv4.tiers.host import HostTier

    hints, own = Hints(session="chat", priority=2, ttl_s=60), Hints(priority=-1)
    tiers = [HostTier(8 << 20)] if tiered else []
    options = {"prefix": PrefixOptions(model_id="m"), "tiers": tiers}
    with fast(plain_model(), **options) as model:
        manager = manager_of(model)
        prompt = ids(140, 1)
        model.generate(prompt, max_new_tokens=2, do_sample=False, hints=hints)
        assert kept(manager) == [hints]
        model.generate(ids(140, 2), max_new_tokens=2, do_sample=False)
        assert sorted(kept(manager), key=repr) == [hints, None]
        for wrong in ("chat", 3):
            with pytest.raises(InvalidInput, match="hints"):
                model.generate(prompt, max_new_tokens=1, hints=wrong)
        two = torch.cat((ids(140, 3), ids(140, 4)))
        with pytest.raises(InvalidInput, match="one newest state"):
            model.generate(two, max_new_tokens=1, hints=hints)
        model.generate(two, max_new_tokens=1, do_sample=False, hints=own)
        assert kept(manager).count(own) == 2
        engine = Engine(model=model)
        engine.submit(ids(140, 5)[0].tolist(), 2, hints=Hints(session="job"))
        engine.run()
        assert Hints(session="job") in kept(manager)
    for tier in tiers:
        tier.close(timeout_s=5)

"""The unmodified model on our arenas gives, bit for bit, what it gives on transformers' cache.

Free memory is poisoned in every cache here (tiny_v4.paged)."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from dsv4.errors import ContextOverflow, InvalidInput
from dsv4.integrations.transformers import PagedCache, transformers_cache_bytes
from tests.integrations.tiny_v4 import (
    POISON,
    assert_same_generation,
    assert_same_logits,
    draw_weights,
    generate,
    own_cache,
    paged,
    prompt,
    run,
    tiny_config,
    tiny_model,
)

PROMPTS = (1, 3, 4, 5, 127, 128, 129, 300)
TYPES = (torch.float32, torch.bfloat16)


def check_generation(
    *, tokens: int, new_tokens: int, seed: int, dtype: torch.dtype, topk: int, rows: int = 1
) -> None:
    model = tiny_model(seed, dtype, topk)
    ids = prompt(tokens, rows=rows, seed=seed)
    cache = paged(model, max_context=tokens + new_tokens)
    found = generate(model, ids, cache, new_tokens=new_tokens)
    assert_same_generation(found, generate(model, ids, own_cache(model), new_tokens=new_tokens))
    assert cache.get_seq_length() == cache.columns == tokens + new_tokens - 1
    assert torch.equal(cache.history_ids, found.sequences[:, :-1])
    assert [request.length for request in cache.requests] == [cache.columns] * rows
    cache.manager.check_invariants()


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", PROMPTS)
def test_greedy_generation_is_identical(tokens: int, dtype: torch.dtype):
    rows = 1 + tokens % 2
    check_generation(tokens=tokens, new_tokens=8, seed=tokens % 3, dtype=dtype, topk=16, rows=rows)


def test_long_answers_are_identical():
    """Past two ends of blocks and rings."""
    check_generation(tokens=5, new_tokens=500, seed=1, dtype=torch.float32, topk=16)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tokens", "seed", "dtype", "topk"),
    list(itertools.product(PROMPTS, range(3), TYPES, (16, 512))),
    ids=str,
)
def test_500_tokens_are_identical_in_every_configuration(
    tokens: int, seed: int, dtype: torch.dtype, topk: int
):
    check_generation(tokens=tokens, new_tokens=500, seed=seed, dtype=dtype, topk=topk, rows=2)


@pytest.mark.parametrize("steps", [(1, 2, 5, 130, 1, 3, 127), (269,), (128, 128, 13), (3, 1, 265)])
def test_prompts_in_pieces_are_identical(steps: tuple[int, ...]):
    """Pieces shorter and longer than groups, rings and blocks."""
    model = tiny_model()
    ids = prompt(sum(steps), rows=2)
    cache = paged(model)
    assert_same_logits(run(model, ids, cache, steps), run(model, ids, own_cache(model), steps))


def test_a_conversation_continues():
    """generate with a cache that has a past, as chats do it."""
    model = tiny_model()
    caches = (paged(model), own_cache(model))
    ids = prompt(20)
    for turn in range(3):
        first, second = (generate(model, ids, cache, new_tokens=9) for cache in caches)
        assert_same_generation(first, second)
        ids = torch.cat((first.sequences, prompt(7, seed=turn + 10)), dim=1)


def test_two_caches_of_one_model_do_not_meet():
    model = tiny_model()
    ids = prompt(140, rows=2)
    caches = [paged(model, max_batch=1) for _ in range(2)]
    found = [[run(model, row[None, :130], c, [130])] for row, c in zip(ids, caches, strict=True)]
    for column in range(130, 140):
        for row in range(2):
            found[row].append(run(model, ids[row : row + 1, [column]], caches[row], [1]))
    for row in range(2):
        expected = run(model, ids[row : row + 1], own_cache(model), [130] + [1] * 10)
        assert_same_logits([step[0] for step in found[row]], expected)


# ---- where the bytes are ------------------------------------------------------------------------


def test_all_kv_lies_in_the_arenas():
    """Poisoning the arenas between two steps makes the next one NaN; nothing else is held."""
    model = tiny_model()
    cache = paged(model)
    run(model, prompt(150), cache, [130, 20])
    assert transformers_cache_bytes(cache) == 0
    for layer in cache.layers:
        assert all(compressor._previous is None for compressor in layer.compressors.values())
    for arena, layers in (("slot_arena", (0, 1, 2)), ("block_arena", (1, 2))):
        getattr(cache.manager.memory, arena).bytes.fill_(POISON)
        with torch.no_grad():
            logits = model(input_ids=prompt(1), past_key_values=cache).logits
        assert logits.isnan().all(), (arena, layers)
        cache.reset()
        cache.manager.memory.slot_arena.bytes.fill_(0)
        run(model, prompt(150), cache, [150])


def test_memory_of_both_caches():
    model = tiny_model()
    cache, own = paged(model, max_batch=1, max_context=256), own_cache(model)
    run(model, prompt(255), cache, [255])
    run(model, prompt(255), own, [255])
    schema, ours = cache.manager.schema, cache.memory_bytes()
    assert ours.block_arena == 2 * schema.bytes.block
    assert ours.slot_arena == schema.bytes.slot
    # what transformers keeps after 255 tokens, in channels: windows (keys and values apart only in
    # the window-only layer), entries and keys, the unfinished group, the group before it
    head, index, window = 64, 32, 127
    sliding = 2 * window * head
    csa = window * head + 63 * (head + index) + 2 * 3 * 2 * (head + index) + 2 * 4 * (head + index)
    hca = window * head + 1 * head + 2 * 127 * head
    assert transformers_cache_bytes(own) == 4 * (sliding + csa + hca)


def test_a_forgotten_cache_leaves_the_model_as_it_was():
    model = tiny_model()
    hooks = len(model.model._forward_pre_hooks)
    cache = paged(model)
    manager = cache.manager
    run(model, prompt(5, rows=2), cache, [5])
    assert manager.stats().requests_live == 2
    assert len(model.model._forward_pre_hooks) == hooks + 1
    del cache
    gc.collect()
    assert len(model.model._forward_pre_hooks) == hooks
    assert manager.stats().requests_live == 0
    manager.check_invariants()


def test_caches_can_share_a_manager():
    model = tiny_model()
    first = paged(model, max_batch=3)
    second = PagedCache(first.manager, model)
    ids = prompt(135, rows=3)
    found = (
        run(model, ids[:2], first, [131] + [1] * 4),
        run(model, ids[2:], second, [131] + [1] * 4),
    )
    assert first.manager.stats().requests_live == 3
    expected = [run(model, part, own_cache(model), [131] + [1] * 4) for part in (ids[:2], ids[2:])]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_logits(ours, theirs)


def test_a_compiled_model_runs_on_it() -> None:
    """What is around the cache is compiled, and the cache runs as it is: with the same logits, and
    refusing the same calls with the same errors."""
    config = tiny_config(layer_types=["compressed_sparse_attention"])
    model, ids = draw_weights(DeepseekV4ForCausalLM(config).eval(), 0), prompt(40)
    expected = run(model, ids, paged(model), (30, 1, 9))
    cache, compiled = paged(model, max_context=48), torch.compile(model, backend="eager")
    other = paged(draw_weights(DeepseekV4ForCausalLM(config).eval(), 1))
    mask = torch.ones((1, 41), dtype=torch.int64)
    mask[0, 3] = 0
    try:
        found = run(compiled, ids, cache, (30, 1, 9))  # type: ignore[arg-type]
        for error, past, options in (
            (ContextOverflow, cache, {"input_ids": ids[:, :9]}),
            (InvalidInput, other, {"input_ids": ids[:, :9]}),
            (InvalidInput, cache, {"input_ids": ids[:, :1], "attention_mask": mask}),
        ):
            with pytest.raises(error), torch.no_grad():
                compiled(past_key_values=past, use_cache=True, **options)
        assert cache.columns == 40
        cache.crop(12)  # the model runs these tokens again
        (again,) = run(compiled, ids[:, 12:21], cache, (9,))  # type: ignore[arg-type]
    finally:
        torch.compiler.reset()
    assert_same_logits(found, expected)
    assert torch.allclose(again, expected[0][:, 12:21], atol=1e-4)

"""A prefix hit equals a cold prefill, byte for byte: blocks, live rows of the slot, what comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full, periodic, zero
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.model import v4_layers
from tests.support.lives import TINY, TINY_LAYERS, ColdRun, Text, run_to, tiny_stack
from tests.support.stack import HCA_STATES, Stack

PROMPT = 1000
REPLAY = 128 * len(TINY_LAYERS)


def prefix_stack(
    policy: SnapshotPolicy, *, drafts: int = 0, snapshots: int = 16, **options: Any
) -> Stack:
    return tiny_stack(drafts, prefix=PrefixOptions(policy=policy, snapshots=snapshots), **options)


def compute(stack: Stack, text: Text, tokens: int, chunk: int = 300) -> None:
    """A request comes, runs its prompt and goes."""
    request = stack.manager.admit_request(text.ids[:tokens])
    run_to(stack, request, text, tokens, chunk=chunk)
    stack.manager.release_request(request)


def check_hit(stack: Stack, text: Text, tokens: int, chunk: int) -> Resume:
    """A request that comes with a prompt shows a cold run's bytes, and goes on showing them."""
    manager = stack.manager
    request = manager.admit_request(text.ids[:tokens])
    resume = request.resume
    assert request.length == resume.start < tokens == resume.end
    cold = ColdRun(stack, text.stream, tokens + 140)
    run_to(stack, request, text, tokens, chunk=chunk)
    cold.assert_same(stack, request)
    run_to(stack, request, text, tokens + 5, chunk=1)
    cold.assert_same(stack, request)
    run_to(stack, request, text, tokens + 140, chunk=135)
    cold.assert_same(stack, request)
    manager.check_invariants()
    manager.release_request(request)
    return resume


@pytest.mark.parametrize(
    ("policy", "drafts", "state"),
    [
        (full(), 0, "raw"),
        (full(), 3, "raw"),
        (full(), 0, "online"),
        (periodic(256), 3, "raw"),
        (zero(), 0, "raw"),
        (zero(), 3, "online"),
        pytest.param(periodic(256), 0, "raw", marks=pytest.mark.nightly),
        pytest.param(zero(), 3, "raw", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_boundary_of_a_prompt(policy: SnapshotPolicy, drafts: int, state: HcaState):
    stack = prefix_stack(policy, drafts=drafts, state=state, num_blocks=40, snapshots=64)
    prompt = Text.random(stack, 0, PROMPT)
    compute(stack, prompt, PROMPT)
    for nth, boundary in enumerate(range(128, PROMPT, 128)):
        other = Text.random(stack, 10 + nth, boundary + 300)
        compute(stack, other, 200)  # the slot and free blocks change hands in between
        text = prompt.then(other, boundary + nth)
        # replays are long: in chunks; what follows a snapshot: token by token too
        chunk = 150 if policy.kind != "full" or nth % 2 else (1, 3, 7, 4)[nth // 2]
        resume = check_hit(stack, text, boundary + 20, chunk)
        assert resume.reused_tokens == boundary
        if policy.kind == "full":
            assert (resume.start, resume.source) == (boundary, "snapshot")
        elif policy.kind == "periodic":
            # the prompt's own end, 896, has one too
            at = boundary if boundary == 896 else boundary // 256 * 256
            assert resume.start == max(at, boundary - REPLAY)
        else:
            assert resume.start == max(0, boundary - REPLAY)
            assert resume.source == ("replay" if resume.start else "nothing")
    assert (
        stack.manager.stats().prefix.hits["snapshot"]
        == {"full": 7, "periodic": 6, "zero": 0}[policy.kind]
    )


@pytest.mark.parametrize("policy", [full(), periodic(256), zero()], ids=str)
def test_after_others_churned_the_whole_pool(policy: SnapshotPolicy):
    stack = prefix_stack(policy, num_blocks=13, snapshots=6)
    prompt = Text.random(stack, 0, PROMPT + 140)
    compute(stack, prompt, PROMPT)
    for seed in range(1, 4):  # each evicts some of what was there
        compute(stack, Text.random(stack, seed, 900), 900)
        check_hit(stack, prompt, PROMPT, chunk=200)
    stats = stack.manager.stats()
    assert stats.prefix.block_evictions > 13
    assert stats.blocks_free + stats.blocks_live + stats.blocks_cached == stats.blocks_total


def test_the_snapshot_is_gone_but_the_blocks_stayed():
    stack = prefix_stack(full(), num_blocks=40, snapshots=2)
    prompt = Text.random(stack, 0, PROMPT + 140)
    compute(stack, prompt, PROMPT)
    compute(stack, Text.random(stack, 1, 300), 300)  # takes both snapshots
    resume = check_hit(stack, prompt, PROMPT, chunk=130)
    assert (resume.source, resume.reused_tokens, resume.start) == ("replay", 896, 896 - REPLAY)
    # the replay was exact from 896 on, so that boundary has a snapshot again
    assert check_hit(stack, prompt, PROMPT, chunk=130).source == "snapshot"


def test_the_last_blocks_are_gone_but_earlier_snapshots_stayed():
    stack = prefix_stack(full(), num_blocks=40)
    prompt = Text.random(stack, 0, PROMPT + 140)
    compute(stack, prompt, PROMPT)
    assert stack.manager.prefix.evict(4) == 4
    resume = check_hit(stack, prompt, PROMPT, chunk=90)
    assert (resume.source, resume.start, resume.reused_tokens) == ("snapshot", 384, 384)


def test_all_blocks_are_gone():
    stack = prefix_stack(full(), num_blocks=40)
    prompt = Text.random(stack, 0, PROMPT + 140)
    compute(stack, prompt, PROMPT)
    assert stack.manager.prefix.evict() == 7
    resume = check_hit(stack, prompt, PROMPT, chunk=200)
    assert (resume.source, resume.start, resume.reused_tokens) == ("nothing", 0, 0)
    assert stack.manager.stats().prefix.misses["evicted"] == 1


@pytest.mark.parametrize("chunk", [3, 126, 129, 385])
def test_snapshots_do_not_depend_on_how_the_prompt_was_cut(chunk: int):
    """Boundaries are crossed by single tokens, by chunks that split a group, and by several at
    once; the snapshot's bytes are the same."""
    stacks = [prefix_stack(full(), drafts=3, num_blocks=8) for _ in range(2)]
    prompt = Text.random(stacks[0], 0, 400)
    for stack, size in zip(stacks, (400, chunk), strict=True):
        compute(stack, prompt, 400, chunk=size)
    rows = [
        [
            n.snapshot
            for n in sorted(s.manager._parts.prefix.index.nodes(), key=lambda n: n.block_id)
        ]
        for s in stacks
    ]
    taken = [s.manager._parts.prefix.pool.bytes[r] for s, r in zip(stacks, rows, strict=True)]
    assert len(rows[0]) == len(rows[1]) == 3
    layout = stacks[0].manager._parts.prefix.pool.layout
    for section in layout.sections:
        span = slice(section[0].offset_bytes, section[-1].offset_bytes + section[-1].bytes)
        assert bool((taken[0][:, span] == taken[1][:, span]).all())


def test_a_request_reuses_what_another_has_computed_so_far():
    stack = prefix_stack(full(), num_blocks=20)
    prompt = Text.random(stack, 0, 800)
    first = stack.manager.admit_request(prompt.ids[:600])
    run_to(stack, first, prompt, 300)
    second = stack.manager.admit_request(prompt.ids[:600])
    assert second.resume.start == 256
    for length in (400, 520, 600):
        for request in (first, second):
            run_to(stack, request, prompt, length, chunk=60)
    for request in (first, second):
        ColdRun(stack, prompt.stream, 600).assert_same(stack, request)
    stack.manager.check_invariants()


@pytest.mark.parametrize("state", HCA_STATES)
def test_what_was_generated_is_reused_too(state: HcaState):
    stack = prefix_stack(full(), drafts=3, state=state, num_blocks=20)
    text, wrong = Text.random(stack, 0, 700), Text.random(stack, 1, 700)
    request = stack.manager.admit_request(text.ids[:100])
    run_to(stack, request, text, 100)
    while request.length < 260:  # two of four drafts are accepted
        at = request.length
        draft = text.then(wrong, at + 2)
        stack.step([(request, draft.stream, 4)], accepted=[2], ids=draft.ids[at : at + 4].tolist())
    stack.manager.release_request(request)
    assert check_hit(stack, text, 300, chunk=200).start == 256


def test_the_unfinished_tokens_of_a_prompt_without_ids_are_not_cached():
    stack = prefix_stack(full(), num_blocks=20)
    text = Text.random(stack, 0, 700)
    request = stack.manager.admit_request(text.ids[:200])
    run_to(stack, request, text.stream, 400)  # ids past 200 are never told
    stack.manager.release_request(request)
    assert check_hit(stack, text, 500, chunk=200).reused_tokens == 128


def test_a_2000_token_prompt_hits_with_defaults():
    stack = tiny_stack(prefix=PrefixOptions(), num_blocks=40)
    text = Text.random(stack, 0, 2040)
    compute(stack, text, 2000, chunk=512)
    request = stack.manager.admit_request(text.ids[:2000])
    assert (request.resume.start, request.resume.reused_tokens) == (1920, 1920)


def test_one_case_on_the_triton_backend():
    """Interpreted, so it is small: blocks of 16 tokens. The twin that it must equal runs on the
    reference backend."""
    model = replace(TINY, window=16, layers=v4_layers([4, 16], backbone=2))
    schema = CacheSchema.build(model, max_context=64, block_tokens=16)
    stack = Stack(
        schema,
        layers=(0, 1),
        num_blocks=8,
        backend="triton",
        prefix=PrefixOptions(policy=full(), snapshots=4),
    )
    text = Text.random(stack, 0, 24)
    compute(stack, text, 18, chunk=13)
    for source, start in (("snapshot", 16), ("nothing", 0)):
        request = stack.manager.admit_request(text.ids[:18])
        assert (request.resume.source, request.resume.start) == (source, start)
        assert request.resume.reused_tokens == 16
        blocks = stack.manager.memory.block_arena.bytes[request.block_ids[:1]].clone()
        run_to(stack, request, text, 20, chunk=13)
        ColdRun(stack, text.stream, 20).assert_same(stack, request)
        assert bool((stack.manager.memory.block_arena.bytes[request.block_ids[:1]] == blocks).all())
        stack.manager.release_request(request)
        for node in stack.manager._parts.prefix.index.nodes():  # then without any snapshot
            if node.snapshot is not None:
                stack.manager._parts.prefix.rows.drop(node)


def test_ids_may_come_as_list_array_or_tensor():
    stack = prefix_stack(full(), num_blocks=8)
    text = Text.random(stack, 0, 300)
    compute(stack, text, 200)
    for ids in (
        text.ids[:200].tolist(),
        text.ids[:200].astype(np.uint16),
        torch.from_numpy(text.ids[:200].copy()),
        torch.from_numpy(text.ids[:200].astype(np.int64)),
    ):
        request = stack.manager.admit_request(ids)
        assert request.resume.start == 128
        stack.manager.release_request(request)

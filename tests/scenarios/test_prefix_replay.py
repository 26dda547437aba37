"""A replay of window · layers tokens leaves the exact state, in a stack where a wrong window row
spreads upwards from layer to layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix import resume as prefix_resume
from dsv4.cache.prefix.options import PrefixOptions, zero
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.model import ModelSpec, v4_layers
from tests.support.attending_model import AttendingModel
from tests.support.numbers import Numbers
from tests.support.stack import HCA_STATES, POISON, Stack, readable_bytes

TINY = ModelSpec.preset("tiny")
# windows and blocks of 16 tokens, so that many boundaries can be tried
SMALL = replace(TINY, window=16, layers=v4_layers([0, 4, 16, 4, 0], backbone=4))
THREE_LAYERS = replace(TINY, layers=v4_layers([0, 4, 128], backbone=3))


class Runner:
    """A manager with poisoned memory and a model that attends."""

    def __init__(
        self,
        model: ModelSpec,
        block_tokens: int,
        drafts: int = 0,
        state: HcaState = "raw",
    ) -> None:
        self.schema = CacheSchema.build(
            model,
            max_context=1280,
            block_tokens=block_tokens,
            max_draft_tokens=drafts,
            hca_state=state,
        )
        self.layers = range(len(self.schema.layers))
        self.model = AttendingModel(self.schema)
        self.manager = self.new_manager(PrefixOptions(policy=zero()))

    def new_manager(self, prefix: PrefixOptions | None) -> KVCacheManager:
        manager = KVCacheManager(
            self.schema, num_blocks=40, max_requests=2, max_step_tokens=256, prefix=prefix
        )
        manager.memory.block_arena.bytes.fill_(POISON)
        manager.memory.slot_arena.bytes.fill_(POISON)
        return manager

    def run(
        self, manager: KVCacheManager, request: Request, ids: list[int], chunk: int
    ) -> torch.Tensor:
        """Hidden states of the tokens from the request's length to the end of `ids`."""
        states = []
        while request.length < len(ids):
            step = ids[request.length : request.length + chunk]
            states.append(self.model.step(manager, [(request, step)]))
        return torch.cat(states)

    def compute(
        self, ids: list[int], chunk: int = 50
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A request comes, runs and goes: its hidden states and bytes. The first of its prefix is
        a cold run."""
        request = self.manager.admit_request(ids)
        states = self.run(self.manager, request, ids, chunk)
        found = self.readable(self.manager, request)
        self.manager.release_request(request)
        return states, found

    def cold(self, ids: list[int]) -> dict[str, torch.Tensor]:
        manager = self.new_manager(None)
        request = manager.admit_request(len(ids))
        self.run(manager, request, ids, 100)
        return self.readable(manager, request)

    def readable(self, manager: KVCacheManager, request: Request) -> dict[str, torch.Tensor]:
        stack = Stack.__new__(Stack)
        stack.schema, stack.layers, stack.manager = self.schema, self.layers, manager
        return readable_bytes(stack, request)


def tokens(seed: int, count: int) -> list[int]:
    return Numbers(seed).integers(0, 512, count).tolist()


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, rows in found.items() if not torch.equal(rows, expected[name])]


@pytest.mark.parametrize(
    ("drafts", "chunk", "prompts", "state"),
    [
        (0, 1, [113], "raw"),
        (0, 33, [113, 144], "raw"),
        (3, 4, [150], "raw"),
        (3, 4, [150], "online"),
        (3, 70, [129, 159], "raw"),
    ],
)
def test_the_state_behind_a_replay_is_exact(
    drafts: int, chunk: int, prompts: list[int], state: HcaState
):
    runner = Runner(SMALL, 16, drafts, state)
    ids = tokens(0, 160)
    states, expected = runner.compute(ids)
    reach = 16 * len(SMALL.layers)
    for prompt in prompts:
        runner.compute(tokens(prompt, 60))
        request = runner.manager.admit_request(ids[:prompt])
        reused = (prompt - 1) // 16 * 16
        assert (request.resume.start, request.resume.reused_tokens) == (reused - reach, reused)
        found = runner.run(runner.manager, request, ids, chunk)
        # from the first token that is not replayed on, hidden states are those of the cold run
        assert torch.equal(found[reach:], states[reused:])
        assert not different(runner.readable(runner.manager, request), expected)
        runner.manager.release_request(request)


def test_replayed_outputs_are_not_exact_and_a_shorter_replay_would_not_do(
    monkeypatch: pytest.MonkeyPatch,
):
    runner = Runner(SMALL, 16)
    ids = tokens(0, 160)
    states, expected = runner.compute(ids)
    request = runner.manager.admit_request(ids)
    start = request.resume.start
    found = runner.run(runner.manager, request, ids, 100)
    wrong = (found != states[start:]).any(dim=1)
    assert bool(wrong[:16].all())  # the error is there, and it spreads
    assert int(wrong.nonzero().max()) > 32
    runner.manager.release_request(request)
    # two layers' worth less, and wrong rows are left in what is read later
    short = 16 * (len(SMALL.layers) - 3)
    monkeypatch.setattr(prefix_resume, "replay_start", lambda schema, reused: reused - short)
    request = runner.manager.admit_request(ids)
    assert request.resume.start == start + 48
    runner.run(runner.manager, request, ids, 100)
    assert different(runner.readable(runner.manager, request), expected)


def test_windows_of_128():
    check_long_replay(THREE_LAYERS, prompt=600, start=128, reused=512)


@pytest.mark.nightly
def test_windows_of_128_in_all_layers():
    check_long_replay(TINY, prompt=1000, start=256, reused=896)


def check_long_replay(model: ModelSpec, *, prompt: int, start: int, reused: int) -> None:
    runner = Runner(model, 128)
    ids = tokens(1, prompt)
    states, expected = runner.compute(ids, chunk=200)
    request = runner.manager.admit_request(ids)
    assert (request.resume.start, request.resume.reused_tokens) == (start, reused)
    found = runner.run(runner.manager, request, ids, 250)
    assert torch.equal(found[reused - start :], states[reused:])
    assert not different(runner.readable(runner.manager, request), expected)


@pytest.mark.parametrize("state", HCA_STATES)
def test_a_rewind_without_a_snapshot_replays(state: HcaState):
    runner = Runner(SMALL, 16, state=state)
    ids = tokens(0, 160)
    request = runner.manager.admit_request(ids)
    runner.run(runner.manager, request, ids, 64)
    plan = runner.manager.rewind(request, 135)
    reach = 16 * len(SMALL.layers)
    assert (plan.start, plan.reused_tokens, plan.end) == (128 - reach, 128, 135)
    changed = ids[:135] + tokens(5, 20)
    runner.run(runner.manager, request, changed, 20)
    assert not different(runner.readable(runner.manager, request), runner.cold(changed))

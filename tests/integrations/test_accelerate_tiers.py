"""A conversation goes on after its process has ended, without running what was said."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.prefix.options import PrefixOptions
from dsv4.errors import InvalidInput
from dsv4.integrations.transformers.accelerate import accelerate
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from tests.integrations.fast_v4 import fast, generate, manager_of, plain_model
from tests.integrations.test_accelerate_prefix import counted, ids

TIMEOUT_S = 120.0
NEW_TOKENS = 9
OPTIONS = PrefixOptions(model_id="tiny weights, seed 0")


@contextmanager
def process(root: Path, **options: Any) -> Iterator[tuple[Any, list[int], DiskTier]]:
    """What a process has: a model, and tiers that it opened; the tokens that it runs."""
    disk = DiskTier(root / "tier", 1 << 28)
    try:
        with (
            fast(
                plain_model(),
                prefix=OPTIONS,
                tiers=[HostTier(4 << 20), disk],
                fetch_timeout_s=TIMEOUT_S,
                **options,
            ) as model,
            counted(model) as runs,
        ):
            yield model, runs, disk
    finally:
        disk.close(TIMEOUT_S)


def expected(prompt: Tensor) -> Any:
    return generate(plain_model(), prompt, NEW_TOKENS)


def say(model: Any, prompt: Tensor) -> Any:
    """A turn: what it gave, and its cache is forgotten."""
    found = generate(model, prompt, NEW_TOKENS)
    found.past_key_values = None
    gc.collect()
    return found


@pytest.mark.parametrize("tokens", [40, 300])
def test_a_conversation_goes_on_in_another_process(tmp_path: Path, tokens: int) -> None:
    prompt = ids(tokens, 1)
    with process(tmp_path) as (model, runs, _):
        first = say(model, prompt)
        assert sum(runs) == tokens + NEW_TOKENS - 1
    said = first.sequences
    assert said.tolist() == expected(prompt).sequences.tolist()
    question = torch.cat((said, ids(11, 2)), dim=1)
    with process(tmp_path) as (model, runs, disk):
        second = say(model, question)
        # the last token of the answer had not run, then the question
        assert runs[0] == 1 + 11
        assert disk.stats().loaded_bytes > 0
        stats = manager_of(model).stats()
        assert stats.prefix is not None
        assert stats.prefix.hits["state"] == 1
    wanted = expected(question)
    assert second.sequences.tolist() == wanted.sequences.tolist()
    for ours, theirs in zip(second.logits, wanted.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    with process(tmp_path) as (model, runs, _):
        third = torch.cat((second.sequences, ids(5, 3)), dim=1)
        assert say(model, third).sequences.tolist() == expected(third).sequences.tolist()
        assert runs[0] == 1 + 5


def test_a_batch_goes_on_row_by_row(tmp_path: Path) -> None:
    prompt = torch.cat((ids(150, 4), ids(150, 5)))
    with process(tmp_path) as (model, _, _):
        said = say(model, prompt).sequences
    question = torch.cat((said, torch.cat((ids(7, 6), ids(7, 7)))), dim=1)
    with process(tmp_path) as (model, runs, _):
        found = say(model, question)
        assert runs[0] == 2 * (1 + 7)
    assert found.sequences.tolist() == expected(question).sequences.tolist()


def test_weights_that_are_loaded_again_find_what_was_stored(tmp_path: Path) -> None:
    prompt = ids(300, 1)
    with process(tmp_path) as (model, runs, disk):
        values = {name: value.clone() for name, value in model.state_dict().items()}
        first = say(model, prompt)
        assert manager_of(model).tiers.drain(TIMEOUT_S)
        stored = disk.stats().stored
        manager_of(model).prefix.evict()
        model.load_state_dict(values)
        runs.clear()
        again = say(model, prompt)
        assert sum(runs) < 60 + NEW_TOKENS
        assert torch.equal(again.sequences, first.sequences)
        assert manager_of(model).tiers.drain(TIMEOUT_S)
        assert disk.stats().stored == stored
        with torch.no_grad():
            model.model.layers[1].self_attn.kv_proj.weight[3, 5] += 0.01
        runs.clear()
        say(model, prompt)
        assert sum(runs) >= 300


def test_tiers_that_are_gone_cost_time_and_nothing_else(tmp_path: Path) -> None:
    prompt = ids(200, 8)
    with process(tmp_path) as (model, runs, disk):
        disk.close(TIMEOUT_S)
        found = say(model, prompt)
        assert sum(runs) == 200 + NEW_TOKENS - 1
    assert found.sequences.tolist() == expected(prompt).sequences.tolist()


def test_weights_without_a_name_are_kept_nowhere() -> None:
    with pytest.raises(InvalidInput, match="which weights"):
        accelerate(plain_model(), max_batch=1, max_context=256, tiers=[HostTier(1 << 20)])
    assert "forward" not in vars(plain_model().model)

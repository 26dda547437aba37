"""Generation over a prompt most of whose entries are in host memory."""

from __future__ import annotations

import sys

import pytest
import torch

from dsv4.errors import InvalidInput
from dsv4.integrations.transformers.accelerate import accelerate
from dsv4.integrations.transformers.lockstep import Lockstep
from tests.integrations.fast_v4 import fast, generate, manager_of, plain_model
from tests.integrations.test_accelerate_prefix import ids


def test_generation_is_the_same_wherever_entries_are():
    prompt, found = ids(600, 5), []
    for options in ({}, {"host_memory": "64MB"}):
        with fast(plain_model(), max_batch=1, max_step_tokens=64, prefix=None, **options) as model:
            made = generate(model, prompt, 12)
            found.append((made.sequences, made.logits))
            stats = manager_of(model).stats().residency
    assert stats is not None
    assert stats.blocks_only_in_host > stats.blocks_on_device - 3
    assert stats.misses > 0
    (sequences, logits), (other_sequences, other_logits) = found
    assert torch.equal(sequences, other_sequences)
    assert all(map(torch.equal, logits, other_logits))


@pytest.mark.parametrize("layers", [([0, 1], [2, 3]), ([0, 1, 3], [2])])
def test_layers_on_two_devices_have_their_entries_in_one_host_memory(
    layers: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Layer 2 has no entries that may leave."""
    places = [(torch.device("cpu"), each) for each in layers]
    accelerating = sys.modules["dsv4.integrations.transformers.accelerate"]
    monkeypatch.setattr(accelerating, "places", lambda model: places)
    prompt, found = ids(600, 5), []
    for options in ({}, {"host_memory": "64MB"}):
        with fast(plain_model(), max_batch=2, max_step_tokens=64, **options) as model:
            made = generate(model, prompt, 6)
            found.append((made.sequences, made.logits))
            del made
            again = generate(model, prompt, 6)
            assert torch.equal(again.sequences, found[-1][0])
            assert again.past_key_values.requests[0].reused_tokens > 500
            stats = manager_of(model).stats().residency
            manager = manager_of(model)
            assert isinstance(manager, Lockstep)
            parts = [part.schema.bytes.entries for part in manager.managers]
            del again
    (sequences, logits), (other_sequences, other_logits) = found
    assert torch.equal(sequences, other_sequences)
    assert all(map(torch.equal, logits, other_logits))
    assert stats is not None
    assert [each.layer for each in stats.layers] == [
        spec.layer for spec in manager.schema.model.layers if spec.has_indexer
    ]
    assert all(each.misses for each in stats.layers)
    assert [bool(part) for part in parts] == [True, layers[1] != [2]]
    assert stats.host_bytes == manager.managers[0].stats().blocks_total * sum(parts)


def test_host_memory_that_does_not_hold_all_rows_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidInput, match="holds the entries of"):
        accelerate(plain_model(), max_batch=1, max_context=640, host_memory=1000)
    two = [(torch.device("cpu"), [0, 1]), (torch.device("cpu"), [2, 3])]
    monkeypatch.setattr(
        sys.modules["dsv4.integrations.transformers.accelerate"], "places", lambda model: two
    )
    with pytest.raises(InvalidInput, match="holds the entries of"):
        accelerate(plain_model(), max_batch=1, max_context=640, host_memory=1000)
    with pytest.raises(InvalidInput, match="hot_rows is for entries in host memory"):
        accelerate(plain_model(), max_batch=1, max_context=640, hot_rows=64)

"""Generation over a prompt most of whose entries are in host memory."""

from __future__ import annotations

import pytest
import torch

from dsv4.errors import InvalidInput
from dsv4.integrations.transformers.accelerate import accelerate
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


def test_host_memory_that_does_not_hold_all_rows_is_refused():
    with pytest.raises(InvalidInput, match="holds the entries of"):
        accelerate(plain_model(), max_batch=1, max_context=640, host_memory=1000)

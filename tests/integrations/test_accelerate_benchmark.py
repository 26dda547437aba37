"""benchmarks/transformers_decode.py at a size for a CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache

from benchmarks import transformers_decode as benchmark
from benchmarks import transformers_engine
from benchmarks.registry import SUITES
from dsv4.integrations.transformers.accelerate import accelerate, is_accelerated, restore
from tests.support.numbers import Numbers


@pytest.fixture(scope="module")
def model() -> Any:
    return benchmark.make_model(device="cpu", dtype=torch.float32, **transformers_engine.SMALL)


def shapes(cache: Cache) -> list[dict[str, Any]]:
    """Of every tensor of every layer, inside dictionaries too."""

    def shape(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return list(value.shape)
        return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else value

    return [{name: shape(value) for name, value in vars(layer).items()} for layer in cache.layers]


@torch.no_grad()
def test_the_filled_cache_of_transformers_is_as_a_prompt_leaves_it(model: Any) -> None:
    prompt = Numbers(1).integers(0, 64, 1, 256)
    assert shapes(benchmark.filled_dynamic_cache(model, 256)) == shapes(
        model(prompt).past_key_values
    )


@torch.no_grad()
def test_the_filled_paged_cache_holds_finite_numbers_to_decode_behind(model: Any) -> None:
    accelerate(model, max_batch=1, max_context=600)
    cache = benchmark.filled_paged_cache(model, 512)
    assert cache.get_seq_length() == cache.requests[0].length == 512
    token = torch.zeros((1, 1), dtype=torch.int64)
    logits = [model(token, past_key_values=cache).logits for _ in range(5)]
    assert torch.isfinite(torch.cat(logits)).all()
    cache.manager.check_invariants()
    restore(model)


def test_both_sides_are_measured_and_the_model_is_left_alone(model: Any) -> None:
    found = benchmark.compare(model, 512, steps=2)
    assert not is_accelerated(model)
    assert found.microseconds > 0
    assert found.peers_us["transformers"] > 0
    assert found.note.startswith("5 layers; ")
    assert found.cache_bytes.keys() == found.step_bytes.keys() == {"dsv4", "transformers"}
    assert found.cache_bytes["transformers"] == benchmark.stored_bytes(
        benchmark.filled_dynamic_cache(model, 512)
    )
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert 0.5 * weights < found.must_move_bytes < 1.5 * weights


def test_memory_is_what_a_context_needs(model: Any) -> None:
    """Counted by hand for 512 tokens of a window layer, two CSA and two HCA layers."""
    windows = 5 * 127 * 64
    csa = 2 * (128 * (64 + 32) + 2 * 4 * (64 + 32))  # entries and keys, and the previous group
    hca = 2 * 4 * 64
    cache = benchmark.filled_dynamic_cache(model, 512)
    assert benchmark.stored_bytes(cache) == 4 * (windows + csa + hca)
    accelerate(model, max_batch=1, max_context=600)
    ours = benchmark.stored_bytes(benchmark.filled_paged_cache(model, 512))
    restore(model)
    record, key = 48 + 2 * 16 + 8, 32 // 2 + 1
    in_blocks = 2 * (128 * (record + key) + 4 * record)
    in_slot = 5 * 128 * record + 2 * 2 * 4 * ((4 + 8) * (64 + 32) + 128 * 64)
    assert in_blocks + in_slot <= ours <= 1.05 * (in_blocks + in_slot)  # alignment


def test_the_suite_is_registered_at_the_promised_contexts() -> None:
    assert [case.context for case in SUITES["transformers"]()] == [8_192, 65_536, 524_288]


def test_the_engine_is_measured_beside_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--device cpu --small --requests 1 6 --prompt-tokens 9 --new-tokens 2"
    monkeypatch.setattr("sys.argv", ["transformers_engine", *asked.split()])
    transformers_engine.main()
    printed = capsys.readouterr()
    results = json.loads(printed.out)["results"]
    assert [found["requests"] for found in results] == [1, 6]
    for found in results:
        assert min(found["engine"], found["generate"], found["transformers"]) > 0
    assert printed.err.count("tokens/s") == 2
    small = transformers_engine.SMALL
    model = benchmark.make_model(device="cpu", dtype=torch.bfloat16, **small)  # the same
    assert not is_accelerated(model)

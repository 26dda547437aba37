"""Quantised records: the model sees exactly what our codec leaves of its KV, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.quantised_layers import rounding_cache
from tests.integrations.tiny_v4 import (
    assert_same_generation,
    assert_same_logits,
    generate,
    own_cache,
    paged,
    prompt,
    run,
    tiny_model,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 127, 300])
def test_fp8_ds_equals_transformers_with_rounded_kv(tokens: int, dtype: torch.dtype):
    model = tiny_model(tokens % 3, dtype)
    ids = prompt(tokens, rows=2)
    found = generate(model, ids, paged(model, records="fp8_ds"), new_tokens=12)
    expected = generate(model, ids, rounding_cache(model, "fp8_ds", "mxfp4"), new_tokens=12)
    assert_same_generation(found, expected)
    exact = generate(model, ids, own_cache(model), new_tokens=12)
    # the first token of a prompt sees its own rounded row too
    assert not torch.equal(found.logits[0], exact.logits[0])


@pytest.mark.parametrize(
    ("records", "index", "rounded"),
    [
        ("bf16", "mxfp4", (None, "mxfp4")),
        ("bf16", "fp8", (None, "fp8")),
        ("fp8_ds", "nvfp4", ("fp8_ds", "nvfp4")),
        ("fp8_ds", "bf16", ("fp8_ds", None)),
        ("fp8_row", None, ("fp8_row", "mxfp4")),
    ],
)
def test_records_and_keys_are_chosen_apart(
    records: str, index: str | None, rounded: tuple[str | None, str | None]
):
    model = tiny_model()
    ids, steps = prompt(200), [190] + [1] * 10
    found = run(model, ids, paged(model, records=records, index=index), steps)
    assert_same_logits(found, run(model, ids, rounding_cache(model, *rounded), steps))


def test_formats_of_the_arenas():
    for dtype, unquantised in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        schema = paged(tiny_model(dtype=dtype)).manager.schema
        assert [
            f.name for f in (schema.entry_format, schema.window_format, schema.index_format)
        ] == [unquantised] * 3
        schema = paged(tiny_model(dtype=dtype), records="fp8_ds").manager.schema
        assert (schema.entry_format.name, schema.index_format.name) == ("fp8_ds", "mxfp4")

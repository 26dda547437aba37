"""`dsv4.Cache`: one call from a name and an amount of memory to a manager."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4
from dsv4.cache import build
from dsv4.cache.arena import Arena
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.options import ManagerOptions, complete
from dsv4.cache.schema import CacheSchema
from dsv4.errors import ConfigError, InvalidInput, PoolTooSmall, SchemaError
from dsv4.model import PRESETS, ModelSpec

MEMORY = 64 << 20


def test_a_name_and_an_amount_of_memory_are_enough() -> None:
    cache = dsv4.Cache("tiny", memory="256MiB")
    assert isinstance(cache, KVCacheManager)
    assert cache.schema == CacheSchema.build(PRESETS["tiny"])
    assert cache.memory.max_requests == 32
    assert cache.prefix
    other = build.other_bytes(cache.schema, max_requests=32, prefix=dsv4.PrefixOptions()) + 32 * (
        cache.schema.bytes.slot + cache.schema.bytes.block_table_row
    )
    blocks = (2**28 - other) // cache.schema.bytes.block
    assert cache.stats().blocks_total == blocks
    assert cache.memory.memory_bytes().total <= 2**28


def test_options_reach_schema_and_manager() -> None:
    cache = dsv4.Cache(
        ModelSpec.preset("tiny"),
        memory=MEMORY,
        max_requests=3,
        max_context="4k",
        context=300,
        prefix=None,
        max_draft_tokens=2,
        steps_ahead=1,
        hca_state="online",
        max_step_tokens=256,
        batch_invariant=True,
    )
    schema = cache.schema
    assert (schema.max_context, schema.max_draft_tokens, schema.steps_ahead) == (4096, 2, 1)
    assert schema.hca_state == "online"
    assert not cache.prefix
    assert (cache.memory.max_requests, cache.memory.max_step_tokens) == (3, 256)
    plan = cache.prepare_forward([])
    cache.prepare_forward([])  # as many plans as steps_ahead needs
    cache.fail(plan)


def test_every_option_of_both_can_be_given() -> None:
    """By the same name, and with the same type."""
    parameters = inspect.signature(CacheSchema.build).parameters.values()
    taken = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    del taken["max_context"], taken["entries_apart"]  # `host_memory` implies it
    assert {
        name: without_text(kind) for name, kind in forward(build.SchemaOptions).items()
    } == taken
    assert complete({}).keys() == ManagerOptions.__annotations__.keys()
    for call in (KVCacheManager, build.manager_from_memory, build.manager_from_budget):
        options = inspect.signature(call).parameters["options"]
        assert (options.kind, options.annotation) == (
            options.VAR_KEYWORD,
            "Unpack[ManagerOptions]",
        )


def forward(kind: type) -> dict[str, str]:
    return {name: ref.__forward_arg__ for name, ref in kind.__annotations__.items()}


def without_text(kind: str) -> str:
    """Annotated[kind, text] without the text."""
    annotated = ast.parse(kind, mode="eval").body
    assert isinstance(annotated, ast.Subscript)
    assert isinstance(annotated.slice, ast.Tuple)
    assert ast.unparse(annotated.value) == "Annotated"
    return ast.unparse(annotated.slice.elts[0])


def test_a_config_file_is_read(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="deepseek_v3"):
        dsv4.Cache(tmp_path / "config.json", memory=MEMORY)
    with pytest.raises(ConfigError, match="cannot read"):
        dsv4.Cache("nowhere/config.json", memory=MEMORY)


def test_an_unknown_option_is_refused_by_the_name_of_what_was_called() -> None:
    schema: Any = dsv4.CacheSchema.build(ModelSpec.preset("tiny"), max_context=256)
    known: dict[str, Any] = {"max_requests": 1, "bogus": 1}
    budget: Any = dsv4.compute_block_budget(schema, memory_bytes=MEMORY, max_requests=1)
    calls: dict[str, Callable[[], object]] = {
        "KVCacheManager": lambda: KVCacheManager(schema, num_blocks=1, **known),
        "manager_from_memory": lambda: dsv4.manager_from_memory(
            schema, memory_bytes=MEMORY, **known
        ),
        "manager_from_budget": lambda: dsv4.manager_from_budget(schema, budget, **{"bogus": 1}),
        "other_bytes": lambda: dsv4.other_bytes(schema, **known),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidInput, match=f"^{name} has no option 'bogus'"):
            call()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'v5'"):
        dsv4.Cache("v5", memory=MEMORY)
    with pytest.raises(ConfigError, match="a model is int"):
        dsv4.Cache(5, memory=MEMORY)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="did you mean 'max_step_tokens'"):
        dsv4.Cache("tiny", memory=MEMORY, max_steps_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="did you mean 'max_context'"):
        dsv4.Cache("tiny", memory=MEMORY, max_contex=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="it has memory, max_requests"):
        dsv4.Cache("tiny", memory=MEMORY, xyz=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="write 80GiB"):
        dsv4.Cache("tiny", memory="64X")
    with pytest.raises(SchemaError, match="multiple of 128"):
        dsv4.Cache("tiny", memory=MEMORY, block_tokens=100)
    with pytest.raises(PoolTooSmall) as error:
        dsv4.Cache("tiny", memory="1MiB")
    dsv4.Cache("tiny", memory=error.value.minimum_bytes)


def test_memory_that_the_machine_does_not_have() -> None:
    """More than a process can address, so that the system refuses it wherever this runs."""
    schema = CacheSchema.build(ModelSpec.load("tiny"))
    with pytest.raises(
        InvalidInput, match=r"cpu does not give the .* PiB of the block arena \(68,719,"
    ):
        Arena(schema, "block", 1 << 36, torch.device("cpu"))

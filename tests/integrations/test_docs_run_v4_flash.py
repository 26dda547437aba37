"""The memory bill of docs/run_v4_flash.md is what the planner says."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import DeepseekV4ForCausalLM

from dsv4.cache.schema import CacheSchema
from dsv4.integrations.transformers.attention import make_rope_tables
from dsv4.model import ModelSpec
from dsv4.units import parse_tokens
from tests.integrations.tiny_v4 import tiny_config

TEXT = (Path(__file__).parents[2] / "docs" / "run_v4_flash.md").read_text("utf-8")
UNITS = {"MiB": 2**20, "GiB": 2**30}


def test_bytes_of_the_cache() -> None:
    rows = re.findall(r"^\| (\d+) \W (\w+) \| ([\d.]+) (\w+) \|", TEXT, re.MULTILINE)
    assert len(rows) == 4
    for requests, context, size, unit in rows:
        tokens = parse_tokens(context)
        schema = CacheSchema.build(ModelSpec.preset("v4-flash"), max_context=tokens)
        blocks = schema.blocks_for(tokens)
        arenas = blocks * schema.bytes.block + schema.bytes.slot + 4 * blocks
        found = int(requests) * arenas / UNITS[unit]
        assert abs(found - float(size)) < 0.6 * 10 ** -len(size.partition(".")[2]), (found, size)


def test_bytes_of_rotation_tables() -> None:
    """What accelerate makes for a model with the rotated channels of V4-Flash."""
    model = DeepseekV4ForCausalLM(tiny_config(head_dim=128, qk_rope_head_dim=64))
    assert ModelSpec.preset("v4-flash").rope_dim == 64
    tables = make_rope_tables(model.model.rotary_emb, 1000, torch.device("cpu"))
    of_a_token = sum(table.nbytes for table in tables.values()) / 1000
    assert f"{of_a_token:.0f} bytes for a token" in TEXT
    rows = re.findall(r"^\| \d+ \W (\w+) \|.*\| (\d+) MiB \|$", TEXT, re.MULTILINE)
    assert len(rows) == 4
    for context, size in rows:
        assert parse_tokens(context) * of_a_token == int(size) * UNITS["MiB"]

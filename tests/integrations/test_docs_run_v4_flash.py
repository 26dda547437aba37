"""The memory bill of docs/run_v4_flash.md is what the planner says."""

from __future__ import annotations

import re
from pathlib import Path

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.units import parse_tokens

TEXT = (Path(__file__).parents[2] / "docs" / "run_v4_flash.md").read_text("utf-8")
UNITS = {"MiB": 2**20, "GiB": 2**30}


def test_bytes_of_the_cache() -> None:
    rows = re.findall(r"^\| (\d+) \W (\w+) \| ([\d.]+) (\w+) \|", TEXT, re.MULTILINE)
    assert len(rows) == 4
    for requests, context, size, unit in rows:
        tokens = parse_tokens(context)
        schema = CacheSchema.build(ModelSpec.preset("v4-flash"), max_context=tokens)
        blocks = schema.blocks_for(tokens)
        arenas = blocks * schema.block_bytes + schema.slot_bytes + 4 * blocks
        found = int(requests) * arenas / UNITS[unit]
        assert abs(found - float(size)) < 0.6 * 10 ** -len(size.partition(".")[2]), (found, size)

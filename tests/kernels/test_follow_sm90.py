"""The kernel that fills in where requests start, compiled for sm_90."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dsv4.kernels.launch import Launch
from dsv4.ops.calls import FollowedDrafts, FollowedItems, Following
from tests.kernels.sm90 import compiled, empty, run_apart

CASES = {"decodes": True, "decodes beside a chunk": False}


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_apart("tests.kernels.test_follow_sm90")
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_small(made: dict[str, dict[str, Any]], case: str) -> None:
    assert made[case]["spill_bytes"] == 0
    assert made[case]["registers"] <= 64
    assert made[case]["stores"] > 0


def launch(narrow: bool) -> Launch:
    """With V4's ratios and three drafts."""
    from dsv4.kernels import follow

    buffer = empty(4096, dtype=torch.int32)
    items = tuple(
        FollowedItems(ratio=ratio, overlap=overlap, items=buffer[at : at + 64].view(8, 8))
        for ratio, overlap, at in ((4, True, 128), (128, False, 256))
    )
    return follow.follow_launch(
        Following(
            follows=buffer[:40].view(8, 5),
            batch=buffer[64:96].view(8, 4),
            tokens=buffer[96:128].view(8, 4),
            items=items,
            batch_before=empty(8, 4, dtype=torch.int32),
            accepted=empty(8, dtype=torch.int64),
            narrow=narrow,
            most_tokens=4,
            drafts=FollowedDrafts(
                batch=buffer[512:608].view(24, 4),
                tokens=buffer[608:704].view(24, 4),
                steps=3,
                rows=8,
            ),
        )
    )


def compile_case(narrow: bool) -> dict[str, Any]:
    found = compiled(launch(narrow))
    return {
        "spill_bytes": found.spill_bytes,
        "registers": found.registers,
        "stores": found.ptx.count("st.global"),
    }


if __name__ == "__main__":
    print(json.dumps({case: compile_case(narrow) for case, narrow in CASES.items()}))

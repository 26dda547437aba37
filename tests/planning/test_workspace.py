"""The planner's workspace, which needs no torch, is what a manager allocates on that GPU."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import assembly
from dsv4.cache.memory import CacheMemory
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.snapshots import SnapshotPool
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.backend import TritonBackend
from dsv4.kernels.hopper import attend as hopper_attend
from dsv4.kernels.numerics import INTERPRETED
from dsv4.kernels.target import TARGETS, compiling_for
from dsv4.model import PRESETS
from dsv4.planning.gpus import GPUS
from dsv4.planning.workspace import snapshot_pool_bytes, workspace_of

CUDA = torch.device("cuda")


def allocated(
    schema: CacheSchema, *, target: str, requests: int, tokens: int, plans: int, processors: int
) -> int:
    """Bytes of the real thing, made on the meta device for a GPU that is not there."""
    with pytest.MonkeyPatch.context() as patch, compiling_for(TARGETS[target]):
        patch.setattr(hopper_attend, "processors", lambda device: processors)
        patch.setattr(INTERPRETED, "value", False)
        memory = CacheMemory(
            schema,
            TritonBackend(CUDA),
            num_blocks=0,
            max_requests=requests,
            max_step_tokens=tokens,
            device=torch.device("meta"),
            max_open_plans=plans,
        ).memory_bytes()
    return memory.step_buffers + memory.workspace


@pytest.mark.parametrize("gpu", ["H200", "B200", "L40S"])
@pytest.mark.parametrize(
    ("name", "options", "requests", "tokens", "plans"),
    [
        ("v4-flash", {}, 1, 8192, 1),
        ("v4-flash", {"max_context": 8192, "max_draft_tokens": 2, "steps_ahead": 1}, 40, 512, 2),
        ("v4-pro", {"block_tokens": 256}, 3, 64, 1),
        ("v41-flash", {}, 300, 2048, 1),
        ("tiny", {"hca_state": "online"}, 5, 1, 1),
    ],
)
def test_it_is_what_a_manager_has(
    gpu: str, name: str, options: dict[str, object], requests: int, tokens: int, plans: int
) -> None:
    schema = CacheSchema.build(PRESETS[name], **options)  # type: ignore[arg-type]
    target = {"H200": "sm_90", "B200": "sm_100", "L40S": "sm_89"}[gpu]
    of = workspace_of(schema, GPUS[gpu.lower()], max_step_tokens=tokens, open_plans=plans)
    assert of(requests) == allocated(
        schema, target=target, requests=requests, tokens=tokens, plans=plans, processors=132
    )


@pytest.mark.parametrize("name", ["v4-flash", "v41-flash", "tiny"])
@pytest.mark.parametrize("snapshots", [0, 1, 64])
def test_so_are_snapshots(name: str, snapshots: int) -> None:
    schema = CacheSchema.build(PRESETS[name])
    options = PrefixOptions(snapshots=snapshots)
    assert snapshot_pool_bytes(schema, snapshots) == SnapshotPool.bytes_on_device(
        schema, options, torch.device("meta")
    )
    assert assembly.other_bytes  # what adds both on a machine with torch


def test_hoppers_are_those_whose_kernels_run() -> None:
    """By the list of the kernels' targets."""
    hopper = {name.strip() for name in TARGETS["sm_90"].gpus.split(",")}
    assert {gpu.name for gpu in GPUS.values() if gpu.hopper_processors} >= hopper
    for target in TARGETS.values():
        if not target.is_hopper:
            for gpu in GPUS.values():
                if gpu.name in target.gpus.replace(" ", "-").split(",-"):
                    assert gpu.hopper_processors is None

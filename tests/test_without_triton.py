"""Triton has wheels for Linux alone: elsewhere planning, the reference backend and transformers'
`PagedCache` work without it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKED = "import sys; sys.modules['triton'] = None\n"

PLAN = """
from dsv4.cli import app
app(["plan", "v4-flash", "--memory", "80GiB", "--context", "1M"], standalone_mode=False)
"""
READ_AND_WRITE = """
import torch
from dsv4 import CacheSchema, KVCacheManager, LayerWeights, ModelSpec, rope_table

model = ModelSpec.preset("tiny")
assert model.layers[0].attention == "swa"
schema = CacheSchema.build(model, max_context=512)
manager = KVCacheManager(schema, num_blocks=4, max_requests=1, max_step_tokens=8)
request = manager.admit_request(5)
plan = manager.prepare_forward([(request, 5)])
handle = manager.acquire(0, plan.batch)
weights = LayerWeights(rope=rope_table(model, yarn=False, tokens=512))
kv = torch.ones(5, model.head_dim, dtype=torch.bfloat16)
handle.append(kv, weights=weights)
q = torch.ones(5, model.heads, model.head_dim, dtype=torch.bfloat16)
out, _ = handle.attend(q, torch.full((model.heads,), -1e9))
assert torch.equal(out, torch.ones_like(q)), "rows that are all alike, averaged"
manager.commit(plan, partial=True)
print("backend:", handle.backend.name)
"""
VERIFY = """
from dsv4.verify import verify
assert all(report.passed for report in verify(None, backend="reference", device="cpu"))
"""
TRANSFORMERS = """
import torch
from dsv4.demo.model import tiny_v4
from dsv4.integrations.transformers import PagedCache, accelerate

model, ids = tiny_v4(), torch.arange(20)[None]
cache = PagedCache.for_model(model, max_batch=1, max_context=128)
paged = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
accelerate(model, max_batch=1, max_context=128, records="bf16")
assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), paged)
"""


def run_without_triton(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        (PLAN, "23 requests"),
        (READ_AND_WRITE, "backend: reference"),
        (VERIFY, ""),
        (TRANSFORMERS, ""),
    ],
    ids=["plan", "append and attend", "verify", "transformers"],
)
def test_what_works_without_triton(source: str, printed: str):
    done = run_without_triton(source)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_the_triton_backend_says_what_is_missing():
    done = run_without_triton(
        "import torch\n"
        "from dsv4.backends import load_backend\n"
        "from dsv4 import MissingExtra\n"
        "try:\n"
        "    load_backend('triton', torch.device('cpu'))\n"
        "except MissingExtra as error:\n"
        "    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "needs the package triton" in done.stdout


def test_the_block_works():
    done = run_without_triton("import dsv4.kernels.append")
    assert done.returncode == 1
    assert "triton" in done.stderr


def test_pip_asks_for_triton_on_linux_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = project["optional-dependencies"]["torch"]
    (triton,) = (line for line in asked if line.startswith("triton"))
    assert triton.partition(";")[2].strip() == "platform_system == 'Linux'"

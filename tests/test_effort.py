"""How much of the sources one must read to follow a journey: the files that it runs through, and
the lines of the functions that it calls. Measured on the running library, so that a new feature
cannot make the main path longer unnoticed.

What the model computes for itself (dsv4.testing) and what the backend computes are left out, with
all that they call: this is the host's part. Where a number has become smaller, make the bound
smaller too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TypeVar

import pytest

from dsv4 import CacheSchema, DiskTier, KVCacheManager, ModelSpec, PrefixOptions, Request
from dsv4.testing import RandomModel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsv4"
LEFT_OUT = ("reference/", "testing.py")
R = TypeVar("R")

# journey: files, lines of functions. Wanted are 14 and 850 (decode), 9 and 330, 18 and 1,000.
BOUNDS = {
    "decode": (14, 1141),
    "decode, a block": (26, 1517),
    "hit": (15, 550),
    "evict, fetch, admit": (37, 1753),
}
PROMPT = [nth % 32 for nth in range(300)]


@cache
def lines_of(file: str) -> dict[int, int]:
    """How many lines each function of a file has, by its first one, decorators included."""
    found = {}
    for node in ast.walk(ast.parse((PACKAGE / file).read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            assert node.end_lineno is not None
            found[first] = found[node.lineno] = node.end_lineno - first + 1
    return found


def effort(journey: Callable[[], R]) -> tuple[R, set[str], int]:
    """What it returns; the files that it runs through in this thread, and how many lines the
    functions have that it calls."""
    seen: set[tuple[str, int]] = set()
    root, left_out = f"{PACKAGE}/", list[FrameType]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and left_out and left_out[-1] is frame:
            left_out.pop()
        if event != "call" or left_out or not code.co_filename.startswith(root):
            return
        file = code.co_filename.removeprefix(root)
        if file.startswith(LEFT_OUT):
            left_out.append(frame)
        elif not code.co_name.startswith("<"):
            seen.add((file, code.co_firstlineno))

    sys.setprofile(note)
    try:
        result = journey()
    finally:
        sys.setprofile(None)
    lines = sum(lines_of(file).get(first, 0) for file, first in seen)
    return result, {file for file, _ in seen}, lines


class Scene:
    """One manager, and a model that makes its steps."""

    def __init__(self, **options: object) -> None:
        schema = CacheSchema.build(ModelSpec.preset("tiny"), max_draft_tokens=3, max_context=4096)
        self.model = RandomModel(schema)
        self.manager = KVCacheManager(
            schema,
            num_blocks=16,
            max_requests=4,
            backend="reference",
            prefix=PrefixOptions(model_id="x"),
            **options,
        )

    def step(self, request: Request, ids: list[int]) -> None:
        plan = self.manager.prepare_forward([(request, len(ids))])
        batch, hidden = plan.batch, self.model.embedding[ids]
        for number, layer in enumerate(self.model.layers):
            handle, rope, indices = self.manager.acquire(number, batch), layer.cache.rope, None
            handle.append(*layer.projections(hidden), weights=layer.cache)
            if layer.has_indexer:
                indices = handle.select(*layer.index_queries(hidden), rope=rope)
            q = layer.queries(hidden, batch)
            out, _ = handle.attend(q, layer.sink, indices, inverse_rope=rope)
            hidden = hidden + layer.output(out)
        self.manager.commit(plan, ids=ids)


def decode() -> tuple[set[str], int]:
    """The first decode step of a request: nothing is repeated yet."""
    scene = Scene()
    request = scene.manager.admit_request(PROMPT)
    scene.step(request, PROMPT)
    _, files, lines = effort(lambda: scene.step(request, [1]))
    return files, lines


def complete() -> tuple[set[str], int]:
    """A decode step that completes a block where a snapshot is taken, and the step after it, which
    takes another block."""
    scene = Scene()
    prompt = (4 * PROMPT)[:1023]
    request = scene.manager.admit_request(prompt)
    scene.step(request, prompt)
    held = len(request.block_ids)

    def two() -> None:
        scene.step(request, [1])
        scene.step(request, [2])

    _, files, lines = effort(two)
    stats = scene.manager.stats().prefix
    assert stats is not None
    assert (request.length, len(request.block_ids)) == (1025, held + 1)
    assert stats.blocks_indexed == held
    return files, lines


def hit() -> tuple[set[str], int]:
    """Admission of a prompt that begins as one that was released."""
    scene = Scene()
    request = scene.manager.admit_request(PROMPT)
    scene.step(request, PROMPT)
    scene.manager.release_request(request)
    request, files, lines = effort(lambda: scene.manager.admit_request([*PROMPT[:290], 7, 8, 9]))
    assert request.length
    return files, lines


def disk(folder: Path) -> tuple[set[str], int]:
    """Everything is evicted; a prompt comes back from disk."""
    scene = Scene(tiers=[DiskTier(folder, 64 << 20)])
    manager = scene.manager
    request = manager.admit_request(PROMPT)
    scene.step(request, PROMPT)
    manager.release_request(request)
    assert manager.tiers.drain(30)

    def back() -> Request:
        manager.prefix.evict()
        return manager.tiers.admit(PROMPT, timeout_s=30)

    request, files, lines = effort(back)
    assert request.length
    return files, lines


@pytest.mark.parametrize("journey", BOUNDS)
def test_a_journey_is_no_longer_than_it_was(journey: str, tmp_path: Path) -> None:
    walks = {
        "decode": decode,
        "decode, a block": complete,
        "hit": hit,
        "evict, fetch, admit": lambda: disk(tmp_path),
    }
    files, lines = walks[journey]()
    most_files, most_lines = BOUNDS[journey]
    found = f"{journey}: {len(files)} files, functions of {lines} lines"
    assert len(files) <= most_files, found
    assert lines <= most_lines, found


def test_the_life_of_a_decode_token_is_told_file_by_file() -> None:
    """The second table has what runs besides where a step completes a block."""
    text = (ROOT / "docs" / "internals.md").read_text("utf-8")
    _, _, section = text.partition("## The life of a decode token")
    tables, _, _ = section.partition("\n\nA decode step stores")
    cache_of = (PACKAGE / "cache").resolve()
    every, block = (
        {str((cache_of / name).relative_to(PACKAGE.resolve())) for name in names}
        for names in (
            re.findall(r"^\|[^|]*\| `([^`]+)` \|", table, re.MULTILINE)
            for table in tables.split("\n\nMost steps complete no block")
        )
    )
    (files, _), (with_block, _) = decode(), complete()
    assert every == files
    assert block == with_block - files
    assert files <= with_block

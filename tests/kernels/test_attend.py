"""Interpreted attention kernel: near the float64 formula, blind to what it must not read, and the
same bits whoever shares the launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache.records import nvfp4
from dsv4.errors import InvalidInput, SchemaError
from dsv4.kernels import attend as kernel
from dsv4.kernels import sizes
from dsv4.kernels.target import TARGETS, AttentionTiles, Target, attention_tiles, compiling_for
from dsv4.reference import attend as reference
from dsv4.reference.pages import page_rows
from tests.reference.test_attend import Step, check, make_step, with_nan
from tests.support.numbers import Numbers
from tests.support.stack import PAGE_FORMS


def workspace_of(step: Step) -> Tensor | None:
    most = 0
    if step.entries is not None:
        most = step.entries.block_table.shape[1] * step.entries.page.rows
        most = most if step.indices is None else step.indices.shape[1]
    splits = kernel.split_count(step.window.window, most)
    tokens, heads, width = step.q.shape
    elements = kernel.workspace_elements(tokens, heads, width, splits)
    if not elements:
        return None
    workspace = torch.full((elements,), torch.nan)
    workspace[: kernel.PLACES] = 0
    return workspace


def run(step: Step, *, turn: bool = False) -> tuple[Tensor, Tensor]:
    workspace = workspace_of(step)
    found = step.run(kernel.attend, turn=turn, workspace=workspace)
    if workspace is not None:
        counters = workspace[: kernel.PLACES].view(torch.int32)
        assert (counters == 0).all(), "a replayed graph would wait for ever"
    return found


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    bits = [(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True)]
    return all(torch.equal(x, y) for x, y in bits)


@pytest.fixture
def many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, one a split: even short lists of keys are merged from several programs."""

    def small(target: Target, heads: int, **records: bool) -> AttentionTiles:
        return replace(attention_tiles(target, heads, **records), keys=16)

    monkeypatch.setattr(kernel, "attention_tiles", small)
    for module in (kernel, sizes):
        monkeypatch.setattr(module, "UNIT_KEYS", 16)
    monkeypatch.setattr(sizes, "UNITS_PER_SPLIT", 1)


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("turn", [False, True])
def test_is_the_dense_formula(kind: str, turn: bool) -> None:
    step = make_step([(40, 2), (0, 1), (129, 1)], kind=kind, padding=2)
    check(step, run(step, turn=turn), turn=turn)


@pytest.mark.parametrize("name", TARGETS)
def test_the_tiles_of_every_target_give_the_dense_formula(name: str) -> None:
    step = make_step([(400, 2), (0, 1), (129, 1)], kind="csa", padding=1, heads=5)
    with compiling_for(TARGETS[name]):
        check(step, run(step, turn=True), turn=True)


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("places", [512, 2], ids=["parallel", "serial"])
def test_merged_splits(kind: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel, sizes):
        monkeypatch.setattr(module, "PLACES", places)
    step = make_step([(300, 2), (2, 1), (99, 1)], kind=kind, window=40, padding=1, ratio=8)
    check(step, run(step, turn=True), turn=True)


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_parallel_and_serial_give_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step([(300, 1), (64, 2)], kind=kind, window=40, ratio=8, padding=1)
    parallel = run(step)
    for module in (kernel, sizes):
        monkeypatch.setattr(module, "PLACES", 4)
    assert same(parallel, run(step))


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_permuting_the_batch_permutes_the_bits(kind: str) -> None:
    step = make_step([(90, 2), (7, 1), (131, 1)], kind=kind, padding=1)
    out, lse = run(step)
    order = [4, 2, 0, 3, 1]
    permuted = run(step.take(order))
    assert same(permuted, (out[order], lse[order]))


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_many_queries_are_many_single_ones(kind: str) -> None:
    step = make_step([(90, 4), (3, 1)], kind=kind, window=24)
    out, lse = run(step)
    for row in range(5):
        assert same(run(step.take([row])), (out[row : row + 1], lse[row : row + 1]))


@pytest.mark.parametrize("record", ["fp8_row", "bf16"])
def test_other_records_and_a_window_of_its_own(record: str) -> None:
    step = make_step([(77, 1), (12, 1)], kind="csa", record=record, window_record="fp8_ds")
    check(step, run(step))


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_a_chunk_reads_staged_rows(kind: str) -> None:
    step = make_step([(0, 3), (21, 5), (5, 1)], kind=kind, chunk=True)
    check(step, run(step, turn=True), turn=True)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 20, "top_k": 70},
        {"heads": 1, "width": 64, "rope_dim": 16},
        {"heads": 2, "width": 512, "window": 128},
        {"heads": 70},
    ],
    ids=str,
)
def test_other_shapes(shape: dict[str, int]) -> None:
    step = make_step([(200, 1)], kind="csa", **shape)  # type: ignore[arg-type]
    check(step, run(step, turn=True), turn=True)


def test_large_logits_do_not_overflow() -> None:
    step = make_step([(60, 1)], kind="hca", spread=30.0)
    check(step, run(step))


def test_sinks_at_the_ends() -> None:
    step = make_step([(40, 1)], kind="csa")
    step.sink = torch.tensor([-torch.inf, torch.inf, 80.0, -80.0])
    out, lse = run(step)
    assert (out[:, 1] == 0).all()
    assert out[:, 2].abs().max() < 1e-20
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("record", ["fp8_ds", "fp8_row", "bf16", "v41"])
@pytest.mark.parametrize("entry", [False, True], ids=["window", "entry"])
def test_a_nan_in_a_key_makes_its_queries_nan_and_no_others(record: str, entry: bool) -> None:
    names = {"window_record": "v41_fp8", "record": "v41_fp4"} if record == "v41" else {}
    step = make_step([(40, 2), (29, 1)], kind="csa", **(names or {"record": record}))
    before = run(step)
    hurt = torch.tensor(with_nan(step, 1, entry=entry))
    out, lse = run(step)
    assert out[hurt].isnan().all()
    assert lse[hurt].isnan().all()
    assert same((out[~hurt], lse[~hurt]), (before[0][~hurt], before[1][~hurt]))


@pytest.mark.parametrize("record", ["fp8_ds", "bf16"])
def test_keys_of_logit_minus_infinity_are_none(record: str) -> None:
    """The output is 0 then, whatever the sink, as for a query without keys."""
    step = make_step([(0, 1), (9, 1)], kind="swa", record=record)
    key = step.keys[0]
    assert key is not None
    step.q[0, 2:, 5] = -torch.inf * torch.sign(key[0, 5]).float()
    step.sink = torch.tensor([3e38, 0.0, -torch.inf, 3e38])
    out, lse = run(step)
    assert (out[0, 2:] == 0).all()
    assert (lse[0, 2:] == -torch.inf).all()
    assert (out[:, 0] == 0).all()  # such a sink leaves nothing to any key
    assert out[:, 1].isfinite().all()
    assert not out[1].isnan().any()
    assert lse[1].isfinite().all()


def test_nothing_selected_leaves_the_window() -> None:
    step = make_step([(40, 1)], kind="csa")
    assert step.indices is not None
    step.indices.fill_(-1)
    alone = make_step([(40, 1)], kind="csa")
    alone.entries = alone.indices = None
    assert same(run(step), run(alone))


def test_empty_steps_launch_nothing() -> None:
    step = make_step([(3, 1)], kind="csa")
    out, _ = run(step.take([]))
    assert out.shape[0] == 0


@pytest.mark.usefixtures("many_splits")
def test_workspaces_that_are_too_small_are_refused() -> None:
    step = make_step([(90, 1)], kind="csa")
    workspace = workspace_of(step)
    assert workspace is not None
    for given in (None, workspace[:-1]):
        with pytest.raises(InvalidInput, match=f"needs a workspace of {workspace.numel()}"):
            step.run(kernel.attend, workspace=given)


def test_one_workspace_serves_all_shapes() -> None:
    largest = kernel.workspace_elements(256, 64, 512, 16)
    for tokens in (1, 7, 255, 256, 5000):
        for splits in (2, 5, 16):
            assert kernel.workspace_elements(tokens, 64, 512, splits) <= largest
    assert kernel.workspace_elements(8192, 64, 512, 1) == 0


def test_records_it_cannot_read_are_refused() -> None:
    step = make_step([(40, 1)], kind="csa")
    assert step.entries is not None
    page = replace(step.entries.page, format=nvfp4(64))
    step.entries = replace(step.entries, page=page)
    with pytest.raises(SchemaError, match="records of nvfp4 64"):
        step.run(kernel.attend)


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize(
    "records", [{}, {"record": "v41_fp4", "window_record": "v41_fp8"}], ids=str
)
def test_resolved_entries_give_the_bits_of_those_in_blocks(records: dict[str, str]) -> None:
    """Also where the table has nothing, and where the records are in no order."""
    step = make_step([(90, 2), (2, 1), (131, 1)], kind="csa", window=40, padding=1, **records)
    expected = run(step, turn=True)
    resolved = resolve_at_random(step)
    assert same(run(resolved, turn=True), expected)
    reference_before, reference_after = (each.run(reference.attend) for each in (step, resolved))
    assert same(reference_before, reference_after)


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize("chunk", [False, True])
def test_whole_records_give_the_bits_of_planes(kind: str, chunk: bool, width: int) -> None:
    """Records of 528 and 288 bytes, and narrower ones with zeros up to a multiple of 16."""
    planes, whole = (
        make_step(
            [(90, 2), (2, 1), (131, 1)],
            kind=kind,
            window=40,
            width=width,
            padding=1,
            chunk=chunk,
            record="v41_fp8" if kind == "swa" else "v41_fp4",
            window_record="v41_fp8",
            page_form=form,
        )
        for form in PAGE_FORMS
    )
    assert whole.window.page.scale_offset_bytes == whole.window.page.offset_bytes + width
    found = run(whole, turn=True)
    assert same(found, run(planes, turn=True))
    check(whole, found, turn=True)
    assert same(*(step.run(reference.attend) for step in (planes, whole)))


def resolve_at_random(step: Step) -> Step:
    """The same records, whole ones, in an arena of their own in any order, and indices that name
    their places."""
    source, indices = step.entries, step.indices
    assert source is not None
    assert indices is not None
    visible = (step.tokens[:, 1] + 1) // source.ratio
    named = (indices >= 0) & (indices < visible[:, None]) & (step.tokens[:, :1] >= 0)
    rows = source.page.rows
    most = -(-indices.numel() // rows) + 3
    page = replace(source.page, offset_bytes=32, apart=True)
    arena = torch.full((most, 32 + page.payload_bytes + 16), 0xFF, dtype=torch.uint8)
    places = Numbers(7).permutation(most * rows)[: indices.numel()].view(indices.shape)
    from_pages, to_pages = page_rows(source.arena, source.page), page_rows(arena, page)
    for token, nth in named.nonzero().tolist():
        entry, (row, record) = int(indices[token, nth]), divmod(int(places[token, nth]), rows)
        block = source.block_table[step.tokens[token, 0], entry // rows].long()
        for source_part, target_part in zip(from_pages, to_pages, strict=True):
            target_part[row, record, : source_part.shape[-1]] = source_part[block, entry % rows]
    junk = torch.full_like(source.block_table, -1)
    return replace(
        step,
        entries=replace(source, arena=arena, page=page, block_table=junk, resolved=True),
        indices=torch.where(named, places, -1).int(),
    )

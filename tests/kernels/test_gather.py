"""Gathers: interpreted Triton and reference against records decoded one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import PageForm
from dsv4.cache.schema import CacheSchema
from dsv4.kernels import gather as kernel_gather
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource, WindowSource
from dsv4.reference import gather as reference_gather
from dsv4.reference.pages import read_records
from tests.support.stack import Stack, Stream

BACKENDS = {"reference": reference_gather, "triton": kernel_gather}
CSA, HCA = 1, 2
LENGTHS = (37, 140, 3)
FORMS: list[tuple[str, PageForm]] = [("fp8_ds", "planes"), ("v41_fp8", "records")]
POISON = -123.0


def lived(
    records: str = "fp8_ds",
    *,
    index: str = "mxfp4",
    chunk: bool = False,
    form: PageForm = "planes",
) -> tuple[Stack, list]:
    """Three requests of different lengths, in blocks that are not in physical order."""
    schema = CacheSchema.build(
        ModelSpec.preset("tiny"),
        max_context=256,
        entry_format=records,
        index_format=index,
        page_form=form,
    )
    stack = Stack(schema, layers=[CSA, HCA], max_requests=6, num_blocks=8)
    streams = [stack.stream(i, max(LENGTHS) + 2) for i in range(len(LENGTHS))]
    spare = [stack.manager.admit_request(128) for _ in range(3)]
    stack.manager.release_request(spare[1])
    work = [(stack.manager.admit_request(), s, n) for s, n in zip(streams, LENGTHS, strict=True)]
    if not chunk:
        stack.step(work)
        stack.step([(r, s, 0) for r, s, _ in work])
    return stack, work


def entry_source(stack: Stack, layer: int, kind: str = "entries") -> EntrySource:
    page = stack.schema.layout.page(kind, layer)  # type: ignore[arg-type]
    assert page is not None
    return EntrySource(
        arena=stack.manager.memory.block_arena.bytes,
        page=page,
        block_table=stack.manager.memory.block_table,
        ratio=stack.schema.layers[layer].spec.ratio,
    )


def expected_entry(stack: Stack, source: EntrySource, request, entry: int) -> Tensor:
    block = torch.tensor(request.block_ids[entry // source.page.rows])
    row = torch.tensor(entry % source.page.rows)
    return read_records(source.arena, source.page, block, row)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("records", ["fp8_ds", "fp8_row", "bf16"])
def test_chosen_entries_and_zeros_for_the_rest(backend: str, records: str) -> None:
    stack, work = lived(records)
    source = entry_source(stack, CSA)
    requests = [r for r, _, _ in work]
    slot = torch.tensor([requests[1].slot, -1, requests[0].slot, requests[2].slot])
    position = torch.tensor(
        [r.length - 1 for r in (requests[1], requests[1], requests[0], requests[2])]
    )
    indices = torch.tensor(
        [[34, -1, 0, 35, 2**30], [1, 1, 1, 1, 1], [8, 9, -7, 0, 3], [0, 1, -1, 2, 5]]
    ).int()
    out = torch.full((4, 5, 128), POISON, dtype=torch.bfloat16)
    BACKENDS[backend].gather_entries(
        source, slot=slot.int(), position=position.int(), indices=indices, out=out
    )
    for row, request in ((0, requests[1]), (2, requests[0]), (3, requests[2])):
        for column, entry in enumerate(indices[row].tolist()):
            wanted = torch.zeros(128, dtype=torch.bfloat16)
            if 0 <= entry < request.length // 4:
                wanted = expected_entry(stack, source, request, entry)
            assert torch.equal(out[row, column], wanted), (row, entry)
    assert (out[1] == POISON).all()


@pytest.mark.parametrize(("records", "form"), FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", [CSA, HCA])
def test_all_visible_entries_in_order(
    backend: str, layer: int, records: str, form: PageForm
) -> None:
    stack, work = lived(records, form=form)
    source = entry_source(stack, layer)
    slot = torch.tensor([r.slot for r, _, _ in work] + [-1]).int()
    position = torch.tensor([r.length - 1 for r, _, _ in work] + [0]).int()
    out = torch.full((4, 40, 128), POISON, dtype=torch.bfloat16)
    lengths = torch.full((4,), -9, dtype=torch.int32)
    BACKENDS[backend].gather_all_entries(
        source, slot=slot, position=position, out=out, lengths=lengths
    )
    for row, (request, _, _) in enumerate(work):
        count = request.length // source.ratio
        assert lengths[row] == count
        for entry in range(count):
            assert torch.equal(out[row, entry], expected_entry(stack, source, request, entry))
        assert (out[row, count:] == POISON).all()
    assert lengths[3] == -9
    assert (out[3] == POISON).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_entries_than_room_gives_the_oldest(backend: str) -> None:
    stack, work = lived()
    source = entry_source(stack, CSA)
    out = torch.full((1, 5, 128), POISON, dtype=torch.bfloat16)
    lengths = torch.zeros(1, dtype=torch.int32)
    request = work[1][0]
    BACKENDS[backend].gather_all_entries(
        source,
        slot=torch.tensor([request.slot]).int(),
        position=torch.tensor([request.length - 1]).int(),
        out=out,
        lengths=lengths,
    )
    assert lengths.item() == 5
    assert torch.equal(out[0, 4], expected_entry(stack, source, request, 4))


@pytest.mark.parametrize(("records", "form"), FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_window_of_a_narrow_step_comes_from_the_ring_in_order(
    backend: str, records: str, form: PageForm
) -> None:
    stack, work = lived(records, form=form)
    plan = stack.manager.prepare_forward([(r, 1) for r, _, _ in work])
    stack.write(plan, [s for _, s, _ in work])
    page = stack.schema.layout.page("window", CSA)
    assert page is not None
    source = WindowSource(
        arena=stack.manager.memory.slot_arena.bytes,
        page=page,
        window=128,
        staged=not plan.batch.is_decode,
    )
    check_window(stack, BACKENDS[backend], source, plan, work)


@pytest.mark.parametrize(("records", "form"), FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_window_of_a_chunk_reaches_back_over_its_start(
    backend: str, records: str, form: PageForm
) -> None:
    stack, work = lived(records, form=form, chunk=True)
    stack.step([(r, s, n // 2) for r, s, n in work])
    plan = stack.manager.prepare_forward([(r, n - n // 2) for r, _, n in work])
    assert not plan.batch.is_decode
    stack.write(plan, [s for _, s, _ in work], layers=[CSA])
    source = stack.manager.acquire(CSA, plan.batch).window_source(plan.batch)
    assert source.staged
    check_window(stack, BACKENDS[backend], source, plan, work, every=9)


def check_window(stack: Stack, backend, source: WindowSource, plan, work, every: int = 1) -> None:
    tokens = plan.batch.tokens[::every]
    out = torch.full((len(tokens), 128, 128), POISON, dtype=torch.bfloat16)
    lengths = torch.zeros(len(tokens), dtype=torch.int32)
    backend.gather_window(
        source,
        batch=plan.batch.request_rows,
        batch_row=tokens[:, 2],
        position=tokens[:, 1],
        out=out,
        lengths=lengths,
    )
    for row, (_, position, batch_row, _) in enumerate(tokens.tolist()):
        wanted = window_values(stack, work[batch_row][1], position)
        assert lengths[row] == len(wanted)
        assert torch.equal(out[row, : len(wanted)], wanted), (row, position)
        assert (out[row, len(wanted) :] == POISON).all()


def window_values(stack: Stack, stream: Stream, position: int) -> Tensor:
    """The window of one query, from the stream itself: norm, RoPE, round trip."""
    from dsv4.reference.codec import decode, encode
    from dsv4.reference.numerics import rms_norm, rotate

    first = max(0, position - 127)
    weights = stack.weights[CSA]
    assert weights.kv_norm is not None
    rows = rms_norm(stream.kv[CSA][first : position + 1], weights.kv_norm, 1e-6)
    table = weights.rope[first : position + 1]
    rows = rotate(rows, table[:, :32], table[:, 32:])
    return decode(stack.schema.window_format, *encode(stack.schema.window_format, rows))

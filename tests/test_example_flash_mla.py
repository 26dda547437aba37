"""The FlashMLA example: our pages read by index, stride and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, PlanError, SchemaMismatch
from dsv4.model import ModelSpec, v4_layers
from examples import flash_mla
from tests.oracles import records as oracle
from tests.support.reading import queries, rows, sink
from tests.support.stack import Stack

SWA, CSA, HCA = 0, 1, 2
DRAFTS = 3
LENGTHS = (1, 131, 258)  # a window that is not full, one that has wrapped, entries in three blocks
PADDED_TOKENS = 8


@pytest.fixture(scope="module")
def step() -> tuple[Stack, ForwardPlan]:
    """An open decode step: 1, 4 and 2 new tokens, and a row of padding."""
    model = replace(ModelSpec.preset("v4-flash"), index_topk=64)
    model = replace(model, layers=v4_layers([0, 4, 128], backbone=3))
    schema = CacheSchema.build(model, max_context=512, max_draft_tokens=DRAFTS)
    stack = Stack(schema, layers=[SWA, CSA, HCA], num_blocks=9, max_step_tokens=400)
    requests = [stack.manager.admit_request() for _ in LENGTHS]
    streams = [stack.stream(seed, 300) for seed in range(len(LENGTHS))]
    stack.step(list(zip(requests, streams, LENGTHS, strict=True)))
    plan = stack.manager.prepare_forward(
        list(zip(requests, (1, 4, 2), strict=True)), pad_tokens=PADDED_TOKENS, pad_requests=4
    )
    stack.write(plan, streams)
    return stack, plan


def attended(
    stack: Stack, plan: ForwardPlan, layer: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What FlashMLA would be passed, and what `handle.attend` gives for the same queries."""
    handle = stack.manager.acquire(layer, plan.batch)
    asked = [queries(stack, seed, 300) for seed in range(len(plan.counts))]
    chosen = None
    if handle.memory.index_compressor is not None:
        chosen = handle.select(
            rows(plan, [a.index_q for a in asked]),
            rows(plan, [a.index_weights for a in asked]),
            rope=stack.weights[layer].rope,
        )
    q = rows(plan, [a.q for a in asked])
    out, lse = handle.attend(q, sink(stack), chosen)
    return flash_mla.flash_mla_arguments(handle, q, sink(stack), chosen), out, lse


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
def test_the_stand_in_agrees_with_attend(step: tuple[Stack, ForwardPlan], layer: int) -> None:
    """Free memory is NaN: a wrong index, stride or scale would show."""
    stack, plan = step
    arguments, expected, expected_lse = attended(stack, plan, layer)
    name, out, lse = flash_mla.run(arguments)
    assert name.startswith("stand-in")
    live = plan.num_tokens
    assert torch.isfinite(out[:live].float()).all()
    for token in range(live):
        difference = (out[token].double() - expected[token].double()).norm()
        assert difference <= 3e-3 * expected[token].double().norm()
    torch.testing.assert_close(lse[:live], expected_lse[:live], rtol=0, atol=1e-4)
    assert (out[live:] == 0).all(), "a padding row has no key and gives 0"


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
def test_nothing_is_copied(step: tuple[Stack, ForwardPlan], layer: int) -> None:
    stack, plan = step
    arguments, _, _ = attended(stack, plan, layer)
    for key, arena in (("k_cache", stack.manager.memory.slot_arena),
                       ("extra_k_cache", stack.manager.memory.block_arena)):  # fmt: skip
        if key == "extra_k_cache" and layer == SWA:
            assert key not in arguments
            continue
        pages = arguments[key]
        assert pages.untyped_storage().data_ptr() == arena.bytes.data_ptr()
        assert pages.shape[2:] == (1, 584)
        assert pages.stride() == (arena.row_bytes, 584, 584, 1)


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
def test_every_index_names_the_record_it_should(
    step: tuple[Stack, ForwardPlan], layer: int
) -> None:
    """Recounted in plain Python from lengths and block ids."""
    stack, plan = step
    schema, handle = stack.schema, stack.manager.acquire(layer, plan.batch)
    arguments, _, _ = attended(stack, plan, layer)
    spec = handle.schema.spec
    token = 0
    for request, start, count in zip(
        plan.requests, plan.starts.tolist(), plan.counts.tolist(), strict=True
    ):
        for position in range(start, start + count):
            window = arguments["indices"][token, 0].tolist()
            seen = range(position, max(-1, position - schema.model.window), -1)
            wanted = [request.slot * schema.ring_rows + p % schema.ring_rows for p in seen]
            assert window == wanted + [-1] * (len(window) - len(wanted))
            if spec.ratio:
                entries = arguments["extra_indices_in_kvcache"][token, 0].tolist()
                rows_a_page = schema.block_tokens // spec.ratio
                visible = [
                    request.block_ids[e * spec.ratio // schema.block_tokens] * rows_a_page
                    + e % rows_a_page
                    for e in range((position + 1) // spec.ratio)
                ]
                named = [index for index in entries if index != -1]
                assert len(set(named)) == len(named)
                if layer == HCA or len(visible) <= schema.model.index_topk:
                    assert named == visible
                else:
                    assert len(named) == schema.model.index_topk
                    assert set(named) <= set(visible)
            token += 1
    for key in ("indices", "extra_indices_in_kvcache"):
        if key in arguments:
            assert arguments[key].dtype == torch.int32
            assert arguments[key].shape[-1] % 64 == 0
            assert (arguments[key][token:] == -1).all()


def test_the_stand_in_decodes_records_as_the_oracle_does(step: tuple[Stack, ForwardPlan]) -> None:
    stack, plan = step
    arguments, _, _ = attended(stack, plan, CSA)
    last = arguments["extra_indices_in_kvcache"][plan.num_tokens - 1, 0]
    named = [index for index in last.tolist() if index != -1][::20]
    decoded = flash_mla._decode(arguments["extra_k_cache"], torch.tensor(named))
    page = stack.schema.layout.page("entries", CSA)
    assert page is not None
    for row, index in zip(decoded, named, strict=True):
        raw = bytes(stack.manager.memory.block_arena.bytes[index // page.rows].tolist())
        data = page.offset_bytes + 576 * (index % page.rows)
        scales = page.offset_bytes + 576 * page.rows + 8 * (index % page.rows)
        bits = oracle.decode(
            oracle.LAYOUTS["fp8_ds"], raw[data : data + 576], raw[scales : scales + 8]
        )
        assert row.tolist() == [oracle.bf16_value(b) for b in bits]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert flash_mla.main("cpu") == 0
    printed = capsys.readouterr().out
    for kind in ("swa", "csa", "hca"):
        assert f"{kind}: stand-in" in printed


def test_shapes_that_flash_mla_cannot_read_are_refused() -> None:
    tiny = CacheSchema.build(ModelSpec.preset("tiny"), max_context=256)
    narrow_heads = Stack(tiny, layers=[CSA], num_blocks=2)
    model = replace(ModelSpec.preset("v4-flash"), layers=v4_layers([4], backbone=1))
    other_records = Stack(
        CacheSchema.build(model, max_context=256, entry_format="bf16"), layers=[0], num_blocks=2
    )
    records = Stack(CacheSchema.build(model, max_context=256), layers=[0], num_blocks=2)
    for stack, heads, error, match in (
        (narrow_heads, 64, InvalidInput, r"\[1, 64, 128\].*heads, 512"),
        (other_records, 64, SchemaMismatch, "1024.*584 bytes.*fp8_ds"),
        (records, 16, InvalidInput, "64 or 128 heads"),
    ):
        plan = stack.manager.prepare_forward([(stack.manager.admit_request(), 1)])
        handle = stack.manager.acquire(stack.layers[0], plan.batch)
        q = torch.zeros(1, heads, stack.schema.model.head_dim, dtype=torch.bfloat16)
        with pytest.raises(error, match=match):
            flash_mla.flash_mla_arguments(handle, q, torch.zeros(heads))


def test_a_chunk_is_refused() -> None:
    model = replace(ModelSpec.preset("v4-flash"), layers=v4_layers([0], backbone=1))
    stack = Stack(CacheSchema.build(model, max_context=256), layers=[0], num_blocks=0)
    plan = stack.manager.prepare_forward([(stack.manager.admit_request(), 5)])
    q = torch.zeros(5, 64, 512, dtype=torch.bfloat16)
    with pytest.raises(PlanError, match=r"5 tokens.*staged"):
        flash_mla.flash_mla_arguments(stack.manager.acquire(0, plan.batch), q, torch.zeros(64))

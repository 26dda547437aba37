"""Quantise-and-scatter, interpreted, against the reference: whole arenas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import Page, PageForm, PageKind
from dsv4.cache.records import WHOLE_FORMATS
from dsv4.cache.schema import CacheSchema
from dsv4.kernels import gather
from dsv4.kernels.write_records import write_records
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource
from dsv4.reference import gather as reference_gather
from dsv4.reference.append import write_records as reference_write_records
from tests.support.formats import BF16_ENTRY_FORMATS, BF16_INDEX_FORMATS
from tests.support.numbers import Numbers
from tests.support.stack import POISON

CSA = 1
CASES: list[tuple[str, PageKind, str, PageForm]] = [
    *(("tiny", "entries", name, "planes") for name in BF16_ENTRY_FORMATS),
    *(("tiny", "index_keys", name, "planes") for name in BF16_INDEX_FORMATS),
    *(("v4-flash", "entries", name, "planes") for name in BF16_ENTRY_FORMATS),
    *(
        (model, "entries", name, "records")
        for model in ("tiny", "v4-flash")
        for name in WHOLE_FORMATS
    ),
]


def page_and_arena(
    preset: str, kind: PageKind, name: str, form: PageForm = "planes"
) -> tuple[Page, Tensor]:
    model = ModelSpec.preset(preset)
    option = {"entry_format": name} if kind == "entries" else {"index_format": name}
    schema = CacheSchema.build(model, max_context=512, page_form=form, **option)
    page = schema.layout.page(kind, CSA if preset == "tiny" else 2)
    assert page is not None
    return page, torch.full((3, schema.bytes.block), POISON, dtype=torch.uint8)


def hard_rows(count: int, width: int) -> Tensor:
    """Ordinary rows, outliers, zeros, the smallest and largest numbers, NaN and infinity."""
    numbers = Numbers(count)
    x = numbers.normal(count, width)
    x[1] = numbers.heavy(width, spread=4.0)
    x[2] = 0.0
    x[3] *= 1e-30
    x[4] *= 1e37
    x[5, ::9] = float("nan")
    x[6, 3], x[6, width - 1] = float("inf"), -float("inf")
    x[7] = -0.0
    return x.to(torch.bfloat16)


def both(page: Page, arena: Tensor, at: list[tuple[int, int]], rows: Tensor) -> tuple[Tensor, ...]:
    arenas = []
    for write in (reference_write_records, write_records):
        arenas.append(arena.clone())
        arena_row, page_row = torch.tensor(at, dtype=torch.int64).reshape(-1, 2).unbind(1)
        write(arenas[-1], page, arena_row.contiguous(), page_row.contiguous(), rows)
    return tuple(arenas)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("preset", "kind", "name", "form"), CASES)
def test_every_format(preset: str, kind: PageKind, name: str, form: PageForm):
    page, arena = page_and_arena(preset, kind, name, form)
    rows = hard_rows(10, page.format.width)
    at = [(2, 0), (0, 31), (0, 5), (1, 1), (1, 2), (2, 3), (2, 31), (0, 0), (1, 30), (2, 17)]
    expected, found = both(page, arena, at, rows)
    assert torch.equal(expected, found)
    assert not torch.equal(found, arena)


@pytest.mark.parametrize("name", BF16_ENTRY_FORMATS)
def test_a_nan_is_gathered_as_nan(name: str):
    """Whole tiles of it, and bf16 channels alone: as the reference reads them."""
    page, arena = page_and_arena("tiny", "entries", name)
    rows = Numbers(1).normal(4, page.format.width).to(torch.bfloat16)
    rows[1, 3], rows[2, page.format.width - 1] = torch.nan, -torch.nan
    at = torch.arange(4)
    write_records(arena, page, at * 0, at, rows)
    source = EntrySource(arena=arena, page=page, block_table=torch.zeros(1, 1).int(), ratio=1)
    found = []
    for backend in (reference_gather, gather):
        out = torch.zeros(1, 4, page.format.width, dtype=torch.bfloat16)
        backend.gather_all_entries(
            source,
            slot=torch.zeros(1).int(),
            position=torch.tensor([3]).int(),
            out=out,
            lengths=torch.zeros(1).int(),
        )
        found.append(out[0])
    assert torch.equal(found[0].isnan(), found[1].isnan())
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
    assert found[1][1, 3].isnan()
    assert found[1][2, -1].isnan()
    assert not found[1][[0, 3]].isnan().any()


def test_negative_rows_write_nothing():
    page, arena = page_and_arena("tiny", "entries", "fp8_ds")
    rows = hard_rows(8, page.format.width)
    at = [(-1, 0), (0, -1), (-1, -1), (-7, 3), (2, -9), (-1, 31), (-1, 2), (1, -1)]
    expected, found = both(page, arena, at, rows)
    assert torch.equal(expected, arena)
    assert torch.equal(found, arena)


def test_negative_rows_between_live_ones():
    page, arena = page_and_arena("tiny", "index_keys", "mxfp4")
    rows = hard_rows(8, page.format.width)[[0, 1, 2, 7]]
    expected, found = both(page, arena, [(1, 4), (-1, 4), (0, 9), (2, -1)], rows)
    assert torch.equal(expected, found)
    assert (found[2] == POISON).all()


def test_no_rows_at_all():
    page, arena = page_and_arena("tiny", "entries", "fp8_ds")
    empty = torch.empty(0, page.format.width, dtype=torch.bfloat16)
    expected, found = both(page, arena, [], empty)
    assert torch.equal(expected, arena)
    assert torch.equal(found, arena)


def test_strided_rows():
    page, arena = page_and_arena("tiny", "entries", "fp8_ds")
    wide = hard_rows(8, page.format.width + 24)[[0, 1, 2, 7]]
    rows = wide[:, : page.format.width]
    assert not rows.is_contiguous()
    expected, found = both(page, arena, [(0, 1), (1, 2), (2, 3), (0, 4)], rows)
    assert torch.equal(expected, found)

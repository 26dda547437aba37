"""Pages of whole records (`page_form="records"`): where FlashMLA looks for them, and what may not
mix with planes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Cache
from dsv4.cache.schema import CacheSchema, bytes_by_kind
from dsv4.cache.state import SnapshotLayout, StateLayout
from dsv4.cache.views import page_tensor
from dsv4.errors import InvalidInput, SchemaError
from dsv4.model import ModelSpec
from dsv4.reference.append import write_records
from examples.flash_mla import entry_indices, window_indices
from tests.oracles import records as oracle
from tests.reference.test_v41_records import example
from tests.support.reading import queries, rows, sink
from tests.support.stack import POISON, Stack

FLASH, TINY = ModelSpec.preset("v41-flash"), ModelSpec.preset("v41-tiny")
WINDOW_ONLY, PAIRS, READER, SINGLES = 0, 2, 3, 20
# of the worked example of tests/reference/test_v41_records.py: data row, then scale row
WINDOW_SHA = "9ef5ca4ded1e5b933ae8711753c0d1c228f489c5c0caaeb4e2a593113564acf0"
ENTRY_SHA = "ac7af695809550ef7a46f9d08a3a1ed8635789a865c6a2c10a69803dd48bce4d"
SHAPES: list[dict[str, Any]] = [
    {},
    {"max_draft_tokens": 5},
    {"block_tokens": 256, "ring_rows": 131},
    {"align_bytes": 512},
    {"block_tokens": 2, "align_bytes": 16},
    {"entries_apart": True},
    {"entry_format": "v41_fp8"},
]


def build(model: ModelSpec = FLASH, **options: Any) -> CacheSchema:
    return CacheSchema.build(model, page_form="records", **options)


# ---- FlashMLA's side, from the README and kv_cache_utils.cuh of its release of 2026-09-30 --------


def token_bytes(cache: Tensor, index: int) -> bytes:
    """The record that FlashMLA reads for an index. It counts records from the tensor's first byte
    on, through whatever lies between two pages; so pages must be a number of records apart."""
    record = cache.shape[3]
    assert record in (528, 288)
    assert cache.stride(1) == record
    assert cache.data_ptr() % 16 == 0
    assert cache.stride(0) % record == 0
    page, offset = divmod(index, cache.shape[1])
    nth = page * (cache.stride(0) // record) + offset
    first = cache.storage_offset() + nth * record
    return bytes(cache.as_strided((record,), (1,), first).tolist())


def decoded(raw: bytes) -> list[float]:
    """528 bytes: 512 E4M3 codes, then 16 powers of two. 288: 512 E2M1 codes, then 32 E4M3
    scales."""
    name, data = ("v41_window", 512) if len(raw) == 528 else ("v41_entry", 256)
    bits = oracle.decode(oracle.LAYOUTS[name], raw[:data], raw[data:])
    return [oracle.bf16_value(each) for each in bits]


def attended(q: Tensor, sink: Tensor, keys: Tensor) -> Tensor:
    """Of one token in float64: q [heads, 512], keys [n, 512]."""
    logits = q.double() @ keys.T * 512**-0.5
    total = torch.logaddexp(logits.logsumexp(-1), sink.double())
    return (logits - total[:, None]).exp() @ keys


# ---- where the bytes are -------------------------------------------------------------------------


def test_a_known_window_row_and_entry_are_where_flash_mla_looks() -> None:
    """By hand: ring row 77 of slot 3, entry row 33 of block 5, of layers that are not the first."""
    schema = build(max_draft_tokens=5)
    slots = torch.full((4, schema.bytes.slot), POISON, dtype=torch.uint8)
    blocks = torch.full((6, schema.bytes.block), POISON, dtype=torch.uint8)
    window, entries = schema.layout.page("window", READER), schema.layout.page("entries", SINGLES)
    assert window is not None
    assert entries is not None
    one = torch.tensor([0])
    write_records(slots, window, one + 3, one + 77, example()[None])
    write_records(blocks, entries, one + 5, one + 33, example()[None])
    # before it three rings of 133 rows, each up to a multiple of 32, and the tail of layer 2: of up
    # to 4 tokens values and gates of 512 channels
    rings = 3 * (133 * 528 + 16) + 4 * 2 * 2048
    assert window.offset_bytes == rings
    row = bytes(slots[3, rings + 77 * 528 :][:528].tolist())
    assert hashlib.sha256(row).hexdigest() == WINDOW_SHA
    assert row[512:].hex() == "78697878787878787878787878787878"
    # three owners of pairs before, each with 64 entries and 64 index keys
    assert entries.offset_bytes == 3 * (64 * 288 + 64 * 68)
    entry = bytes(blocks[5, entries.offset_bytes + 33 * 288 :][:288].tolist())
    assert hashlib.sha256(entry).hexdigest() == ENTRY_SHA
    assert entry[256:].hex() == "3030010130303030302f3030303030303030303030303030303030302f303030"
    # nothing else was written
    assert int((slots != POISON).sum()) == 528 - row.count(POISON)
    assert int((blocks != POISON).sum()) == 288 - entry.count(POISON)
    # and FlashMLA finds both by an index
    assert token_bytes(page_tensor(slots, window), 3 * 133 + 77) == row
    assert token_bytes(page_tensor(blocks, entries), 5 * 128 + 33) == entry
    assert decoded(row)[:4] == [-3.0, -0.8125, 1.5, -2.5]
    assert decoded(entry)[:4] == [-3.0, -0.75, 1.5, -2.0]


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_pages_are_a_number_of_records_apart(options: dict[str, Any]) -> None:
    schema = build(**options)
    arenas = {
        "block": schema.bytes.block,
        "slot": schema.bytes.slot,
        "entries": schema.bytes.entries,
    }
    for page in schema.layout.pages:
        if page.kind == "index_keys":
            assert page.form == "planes"
            continue
        assert page.record_bytes == page.format.record_bytes == page.data_stride_bytes
        assert page.scale_offset_bytes == page.offset_bytes + page.format.data_row_bytes
        assert page.offset_bytes % 16 == 0
        assert arenas[page.arena] % page.record_bytes == 0
    for kinds, total in (("block", schema.bytes.block + schema.bytes.entries),
                         ("slot", schema.bytes.slot)):  # fmt: skip
        assert sum(bytes_by_kind(schema)[kinds].values()) == total


def test_what_it_costs() -> None:
    """Bytes after the last page, so that the next one is a number of records away."""
    planes, whole = CacheSchema.build(FLASH), build()
    assert (planes.bytes.block, whole.bytes.block) == (113_920, 396 * 288)
    assert (planes.bytes.slot, whole.bytes.slot) == (2_918_400, 5528 * 528)
    assert whole.bytes.per_token == 891
    assert SnapshotLayout(whole).row_bytes == SnapshotLayout(planes).row_bytes == 2_682_240
    assert StateLayout(whole).payload_bytes == StateLayout(planes).payload_bytes + 128
    pairs = zip(planes.layout.pages, whole.layout.pages, strict=True)
    assert all(old.offset_bytes == new.offset_bytes for old, new in pairs)


def test_a_decode_step_is_what_flash_mla_would_compute() -> None:
    """Attention over the bytes that FlashMLA reads for our index lists, in float64, against
    `handle.attend`. What nobody has written is NaN."""
    schema = build(max_context=512, max_draft_tokens=1)
    stack = Stack(schema, layers=[WINDOW_ONLY, PAIRS, READER, SINGLES], num_blocks=9)
    requests = [stack.manager.admit_request() for _ in range(3)]
    streams = [stack.stream(seed, 300) for seed in range(3)]
    stack.step(list(zip(requests, streams, (1, 131, 258), strict=True)))
    plan = stack.manager.prepare_forward([(request, 1) for request in requests])
    stack.write(plan, streams)
    asked = [queries(stack, seed, 300, heads=2) for seed in range(3)]
    q, sinks = rows(plan, [each.q for each in asked]), sink(stack, 2)
    tokens = plan.batch.tokens
    for layer in stack.layers:
        handle = stack.manager.acquire(layer, plan.batch)
        caches = [(handle.read_swa_view().pages, window_indices(handle, tokens))]
        chosen = None
        if handle.schema.spec.ratio:
            chosen = torch.arange(0, 300, 3, dtype=torch.int32).expand(3, -1).contiguous()
            view = handle.read_classical_view()
            assert view.page.form == "records"
            caches.append((view.pages, entry_indices(handle, tokens, chosen)))
        for (pages, _), arena in zip(
            caches,
            (stack.manager.memory.slot_arena, stack.manager.memory.block_arena),
            strict=False,
        ):
            assert pages.untyped_storage().data_ptr() == arena.bytes.data_ptr()  # no copy
        out, _ = handle.attend(q, sinks, chosen)
        for nth, request in enumerate(requests):
            keys = [
                decoded(token_bytes(pages, index))
                for pages, listed in caches
                for index in listed[nth].tolist()
                if index >= 0
            ]
            count = min(request.length + 1, 128)
            if handle.schema.spec.ratio:
                count += -(-((request.length + 1) // handle.schema.spec.ratio) // 3)
            assert len(keys) == count
            expected = attended(q[nth], sinks, torch.tensor(keys, dtype=torch.float64))
            assert (out[nth].double() - expected).norm() <= 3e-3 * expected.norm(), layer


# ---- what may not mix ----------------------------------------------------------------------------


def test_fingerprints_know_the_form() -> None:
    for model in (FLASH, TINY):
        planes, whole = CacheSchema.build(model), build(model)
        assert planes == CacheSchema.build(model, page_form="planes")
        assert planes.content_fingerprint != whole.content_fingerprint
        assert planes.fingerprint != whole.fingerprint
        assert build(model, max_draft_tokens=3).content_fingerprint == whole.content_fingerprint
    # a model of windows only has no page in a block, but snapshots
    alone = replace(TINY, layers=TINY.layers[:1])
    assert build(alone).content_fingerprint != CacheSchema.build(alone).content_fingerprint
    assert "records whole" in repr(build())
    assert "records whole" not in repr(CacheSchema.build(FLASH))


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        ("v4-flash", {}, "fp8_ds"),
        ("tiny", {"entry_format": "bf16"}, "bf16"),
        ("v41-flash", {"entry_format": "fp8_ds"}, "fp8_ds"),
        ("v41-flash", {"window_format": "bf16"}, "bf16"),
    ],
)
def test_other_records_stay_planes(model: str, options: dict[str, str], named: str) -> None:
    spec = ModelSpec.preset(model)
    with pytest.raises(SchemaError, match=rf"{named} records.*v41_fp8 or v41_fp4.*planes"):
        CacheSchema.build(spec, page_form="records", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["plane", "", None, 1, True])
def test_forms_that_are_none(form: Any) -> None:
    with pytest.raises(InvalidInput, match=r"page_form=.*choose one of planes, records"):
        CacheSchema.build(FLASH, page_form=form)


def test_it_is_an_option_of_cache() -> None:
    cache = Cache(TINY, memory="64MB", max_requests=2, max_context=1024, page_form="records")
    assert cache.schema.page_form == "records"
    assert cache.memory.workspace.staging_page.form == "records"

"""fp32 records: kept bit for bit, and a whole step in fp32 against formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.records import Part, RecordFormat, TileCode, entry_format, index_format
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, SchemaError
from dsv4.model import ModelSpec
from dsv4.reference.codec import decode, encode
from tests.support.numbers import Numbers
from tests.support.stack import Stack, Stream

TINY = ModelSpec.preset("tiny")
SWA, CSA, HCA = 0, 1, 2
TOKENS = 135


def schema(**options: str) -> CacheSchema:
    chosen = {"entry_format": "fp32", "index_format": "fp32"} | options
    return CacheSchema.build(TINY, max_context=512, **chosen)


@pytest.mark.parametrize(
    "record",
    [entry_format("fp32", head_dim=128, rope_dim=64), index_format("fp32", index_dim=64)],
    ids=["entry", "index"],
)
def test_every_bit_comes_back(record: RecordFormat):
    bits = Numbers(1).bits(50, record.width)
    data, scales = encode(record, bits.view(torch.float32))
    assert data.shape == (50, 4 * record.width)
    assert scales.shape == (50, 0)
    found = decode(record, data, scales)
    assert found.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), bits)
    with pytest.raises(InvalidInput, match="float32 vectors"):
        encode(record, torch.zeros(1, record.width, dtype=torch.bfloat16))


def test_a_vector_has_one_type():
    code = TileCode(element="e4m3", tile=32, scale="ue8m0", amax_floor=1e-4)
    raw = Part(name="raw", start=0, width=32, value_dtype="float32")
    for parts in (
        (raw, Part(name="coded", start=32, width=32, code=code)),
        (raw, Part(name="other", start=32, width=32)),
        (Part(name="coded", start=0, width=64, code=code, value_dtype="float32"),),
    ):
        with pytest.raises(SchemaError, match="a vector has one type"):
            RecordFormat(name="mixed", width=64, parts=parts)
    with pytest.raises(SchemaError, match="formats of one type"):
        schema(window_format="bf16")


def test_the_triton_backend_refuses_them():
    for options in ({}, {"entry_format": "bf16"}, {"index_format": "bf16"}):
        with pytest.raises(SchemaError, match="backend='reference'"):
            KVCacheManager(schema(**options), num_blocks=2, max_requests=1, backend="triton")


# ---- one step -------------------------------------------------------------------------------


def turn(x: Tensor, table: Tensor, position: int, *, back: bool = False) -> Tensor:
    """RoPE of fp64 [..., width] by complex numbers."""
    cos, sin = table[position].double().chunk(2)
    factor = torch.complex(cos, -sin if back else sin)
    head, tail = x[..., : -2 * len(cos)], x[..., -2 * len(cos) :]
    turned = torch.view_as_complex(tail.contiguous().unflatten(-1, (-1, 2))) * factor
    return torch.cat((head, torch.view_as_real(turned).flatten(-2)), dim=-1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + TINY.rms_eps)


def entry(stack: Stack, stream: Stream, layer: int, nth: int, *, indexer: bool) -> Tensor:
    """The nth entry (or key) of a stream by the definition, fp64."""
    weights = stack.weights[layer]
    compressor = weights.index_compressor if indexer else weights.compressor
    assert compressor is not None
    c, z = (t.double() for t in stream.projections[layer][2 * indexer : 2 * indexer + 2])
    ratio = TINY.layers[layer].ratio
    width = TINY.index_dim if indexer else TINY.head_dim
    values, logits = [], []
    for group, columns in ((nth - 1, slice(0, width)), (nth, slice(c.shape[1] - width, None))):
        if group < 0 or (group < nth and c.shape[1] == width):
            continue
        span = slice(group * ratio, (group + 1) * ratio)
        values.append(c[span, columns])
        logits.append((z[span] + compressor.ape.double())[:, columns])
    pooled = (torch.softmax(torch.cat(logits), dim=0) * torch.cat(values)).sum(0)
    return turn(norm(pooled, compressor.norm), weights.rope, nth * ratio)


def window_row(stack: Stack, stream: Stream, layer: int, position: int) -> Tensor:
    weights = stack.weights[layer]
    assert weights.kv_norm is not None
    row = norm(stream.kv[layer][position].double(), weights.kv_norm)
    return turn(row, weights.rope, position)


@pytest.mark.parametrize("prefill", [TOKENS, 131])
def test_a_step_equals_float64_formulas(prefill: int):
    """Chunk and decode. 1e-5 is some fp32 roundings; rounding anything to bf16 would show 1e-3."""
    stack = Stack(schema(), layers=(SWA, CSA, HCA))
    stream = stack.stream(3, TOKENS)
    request = stack.manager.admit_request()
    stack.step([(request, stream, prefill - 1 if prefill == TOKENS else prefill)])
    numbers = Numbers(9)
    while request.length < TOKENS:
        plan = stack.manager.prepare_forward([(request, 1)])
        stack.write(plan, [stream])
        position = request.length
        for layer in stack.layers:
            q = numbers.normal(1, TINY.heads, TINY.head_dim)
            sink = numbers.normal(TINY.heads)
            handle, rope = stack.manager.acquire(layer, plan.batch), stack.weights[layer].rope
            ratio = TINY.layers[layer].ratio
            chosen = list(range((position + 1) // ratio if ratio else 0))
            indices = None
            if layer == CSA:
                index_q = numbers.normal(1, TINY.index_heads, TINY.index_dim)
                weights = numbers.normal(1, TINY.index_heads)
                turned = turn(index_q[0].double(), rope, position)
                keys = torch.stack([entry(stack, stream, CSA, e, indexer=True) for e in chosen])
                dots = torch.relu(turned @ keys.T)
                scores = (weights[0].double()[:, None] * dots).sum(0)
                chosen = sorted(scores.topk(7).indices.tolist())
                indices = handle.select(index_q, weights, rope=rope, round_bf16=False, top_k=7)
                assert indices[0].tolist() == chosen
            out, _ = handle.attend(q, sink, indices, inverse_rope=rope)
            assert out.dtype == torch.float32
            rows = [
                window_row(stack, stream, layer, p)
                for p in range(max(0, position - TINY.window + 1), position + 1)
            ]
            rows += [entry(stack, stream, layer, e, indexer=False) for e in chosen]
            keys = torch.stack(rows)
            logits = q[0].double() @ keys.T * TINY.head_dim**-0.5
            shares = torch.softmax(torch.cat((logits, sink.double()[:, None]), dim=1), dim=1)
            expected = turn(shares[:, :-1] @ keys, rope, position, back=True)
            torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)
        stack.manager.commit(plan)


def test_types_follow_the_format():
    stack = Stack(schema(index_format="mxfp4"), layers=(CSA,))
    stream = stack.stream(1, 8)
    request = stack.manager.admit_request()
    plan = stack.manager.prepare_forward([(request, 8)])
    handle = stack.manager.acquire(CSA, plan.batch)
    with pytest.raises(InvalidInput, match=r"kv is torch.bfloat16"):
        handle.append(
            stream.kv[CSA].bfloat16(), *stream.projections[CSA], weights=stack.weights[CSA]
        )
    stack.write(plan, [stream])
    rope = stack.weights[CSA].rope
    index_q = torch.zeros(8, TINY.index_heads, TINY.index_dim)
    weights = torch.zeros(8, TINY.index_heads)
    with pytest.raises(InvalidInput, match=r"q is torch.float32"):
        handle.select(index_q, weights, rope=rope)
    chosen = handle.select(index_q.bfloat16(), weights.bfloat16(), rope=rope)
    assert handle.gather_compressed_kv(chosen).dtype == torch.float32
    assert handle.gather_swa_kv()[0].dtype == torch.float32

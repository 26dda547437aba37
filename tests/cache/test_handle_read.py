"""Bad input to the reading calls of a handle, and what they accept."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, PlanError, SchemaMismatch
from dsv4.model import ModelSpec
from tests.support.reading import queries, read, rows, sink
from tests.support.stack import Stack

SWA, CSA, HCA = 0, 1, 2


@pytest.fixture
def stack() -> Stack:
    schema = CacheSchema.build(ModelSpec.preset("tiny"), max_context=256)
    return Stack(schema, layers=[SWA, CSA, HCA], num_blocks=8)


def written(stack: Stack, tokens: int = 6, layers=(SWA, CSA, HCA)):
    stream, asked = stack.stream(0, tokens), queries(stack, 0, tokens)
    request = stack.manager.admit_request()
    plan = stack.manager.prepare_forward([(request, tokens)])
    stack.write(plan, [stream], layers=layers)
    return plan, asked


def test_reading_before_append_is_refused(stack: Stack) -> None:
    plan, asked = written(stack, layers=[])
    for layer in (SWA, CSA, HCA):
        with pytest.raises(PlanError, match="append first"):
            read(stack, plan, layer, [asked])


def test_a_chunk_is_read_before_the_next_layer_appends(stack: Stack) -> None:
    plan, asked = written(stack)  # HCA appended last and holds the staged rows
    read(stack, plan, HCA, [asked])
    with pytest.raises(PlanError, match="another layer reused"):
        read(stack, plan, SWA, [asked])


def test_select_needs_an_indexer(stack: Stack) -> None:
    plan, asked = written(stack)
    handle = stack.manager.acquire(HCA, plan.batch)
    with pytest.raises(SchemaMismatch, match="no indexer"):
        handle.select(asked.index_q, asked.index_weights, rope=stack.weights[CSA].rope)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        {"q": lambda a: a.index_q[:-1]},
        {"q": lambda a: a.index_q.float()},
        {"q": lambda a: a.index_q.to("meta")},
        {"q": lambda a: a.index_q[..., :64]},
        {"q": lambda a: a.index_q.transpose(0, 1).contiguous().transpose(0, 1)},
        {"index_weights": lambda a: a.index_weights[:, :-1]},
        {"index_weights": lambda a: a.index_weights.float()},
        {"out": lambda a: torch.zeros(6, 5, dtype=torch.int32)},
        {"out": lambda a: torch.zeros(6, 16, dtype=torch.int64)},
        {"rope": lambda a: torch.zeros(10, 32)},
        {"top_k": lambda a: 0},
        {"q": lambda a: a.index_q.to_sparse()},
        {"index_weights": lambda a: torch.nested.nested_tensor([a.index_weights])},
        {"out": lambda a: torch.zeros(6, 16, dtype=torch.int32).to_sparse()},
    ],
)
def test_select_refuses_what_does_not_fit(stack: Stack, change) -> None:
    plan, asked = written(stack, layers=[CSA])
    handle = stack.manager.acquire(CSA, plan.batch)
    arguments = {
        "q": asked.index_q,
        "index_weights": asked.index_weights,
        "rope": stack.weights[CSA].rope,
    }
    before = asked.index_q.clone()
    with pytest.raises(InvalidInput):
        handle.select(**{**arguments, **{name: make(asked) for name, make in change.items()}})
    assert torch.equal(asked.index_q, before)


def test_a_workspace_for_not_even_one_row_is_refused(stack: Stack) -> None:
    plan, asked = written(stack, layers=[CSA])
    stack.manager.memory.workspace.select = torch.empty(8, dtype=torch.uint8)
    with pytest.raises(InvalidInput, match="workspace of 8 bytes"):
        read(stack, plan, CSA, [asked])


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        {"q": lambda a: a.q[:-1]},
        {"q": lambda a: a.q.float()},
        {"q": lambda a: a.q[..., :64].contiguous()},
        {"sink": lambda a: torch.zeros(3)},
        {"sink": lambda a: torch.zeros(4, dtype=torch.bfloat16)},
        {"indices": lambda a: None},
        {"indices": lambda a: torch.zeros(6, 4, dtype=torch.int64)},
        {"indices": lambda a: torch.zeros(5, 4, dtype=torch.int32)},
        {"out": lambda a: torch.zeros(6, 4, 128)},
        {"lse": lambda a: torch.zeros(6, 5)},
        {"inverse_rope": lambda a: torch.zeros(4, 4)},
        {"q": lambda a: a.q.to_sparse()},
        {"q": lambda a: torch.nested.nested_tensor([a.q])},
        {"lse": lambda a: torch.zeros(6, 4).to_sparse()},
    ],
)
def test_attend_refuses_what_does_not_fit(stack: Stack, change) -> None:
    plan, asked = written(stack, layers=[CSA])
    handle = stack.manager.acquire(CSA, plan.batch)
    arguments = {
        "q": asked.q,
        "sink": sink(stack),
        "indices": torch.zeros(6, 4, dtype=torch.int32),
    }
    with pytest.raises(InvalidInput):
        handle.attend(**{**arguments, **{name: make(asked) for name, make in change.items()}})


@pytest.mark.parametrize("layer", [SWA, HCA])
def test_only_csa_layers_take_indices(stack: Stack, layer: int) -> None:
    plan, asked = written(stack, layers=[layer])
    handle = stack.manager.acquire(layer, plan.batch)
    with pytest.raises(InvalidInput, match="takes no indices"):
        handle.attend(asked.q, sink(stack), torch.zeros(6, 4, dtype=torch.int32))


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_select_wants_all_index_heads(stack: Stack, heads: int) -> None:
    """A rank of a model that is split by heads would choose entries of its own."""
    plan, asked = written(stack, layers=[CSA])
    handle = stack.manager.acquire(CSA, plan.batch)
    q = asked.index_q[:, :1].expand(-1, heads, -1).contiguous()
    weights = asked.index_weights[:, :1].expand(-1, heads).contiguous()
    before = q.clone()
    assert heads != asked.index_q.shape[1]
    with pytest.raises(InvalidInput, match="gather the index queries"):
        handle.select(q, weights, rope=stack.weights[CSA].rope)
    assert torch.equal(q, before)


def test_results_go_into_the_callers_tensors(stack: Stack) -> None:
    plan, asked = written(stack, layers=[CSA])
    handle = stack.manager.acquire(CSA, plan.batch)
    chosen = torch.full((6, 16), 99, dtype=torch.int32)
    given = handle.select(
        rows(plan, [asked.index_q]), asked.index_weights, chosen, rope=stack.weights[CSA].rope
    )
    assert given is chosen
    assert chosen[5].tolist() == [0] + [-1] * 15
    out, lse = torch.zeros(6, 4, 128, dtype=torch.bfloat16), torch.zeros(6, 4)
    given_out, given_lse = handle.attend(asked.q, sink(stack), chosen, out, lse)
    assert given_out is out
    assert given_lse is lse
    assert out.abs().sum() > 0


def test_gathers_through_the_handle(stack: Stack) -> None:
    plan, _ = written(stack, layers=[CSA])
    handle = stack.manager.acquire(CSA, plan.batch)
    window, lengths = handle.gather_swa_kv()
    assert window.shape == (6, 128, 128)
    assert lengths.tolist() == [1, 2, 3, 4, 5, 6]
    entries = handle.gather_compressed_kv(torch.tensor([[0, -1]] * 6, dtype=torch.int32))
    assert (entries[:3] == 0).all()
    assert (entries[3:, 0] != 0).any()
    everything, counts = handle.gather_all_compressed_kv(
        torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    )
    assert counts.tolist() == [1]
    assert torch.equal(everything[0, 0], entries[5, 0])
    with pytest.raises(InvalidInput):
        handle.gather_all_compressed_kv(torch.zeros(1, 4, 64, dtype=torch.bfloat16))
    with pytest.raises(InvalidInput):
        handle.gather_compressed_kv(torch.zeros(5, 2, dtype=torch.int32))

"""How Hopper's attention of whole queries is shared out: by two launches for few, one for many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.cache import build
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.kernels import attend as portable
from dsv4.kernels.hopper import attend as narrow
from dsv4.kernels.hopper import attend_whole as kernel
from dsv4.model import ModelSpec
from dsv4.ops.calls import Attention
from tests.kernels.test_attend_hopper import PROCESSORS, v4_step
from tests.support.no_gpu import no_gpu
from tests.support.owned import bytes_of

CSA, HCA, LONG = (128, 512), (128, 1024), (128, 8192)


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (narrow, kernel):
        monkeypatch.setattr(module, "processors", lambda _: PROCESSORS)


def shared(tokens: int, heads: int = 64, keys: tuple[int, int] = CSA) -> int:
    return kernel.programs_per_query(tokens, heads, *keys, PROCESSORS)


def whole(tokens: int, **shape: int) -> Attention:
    step = v4_step(tokens, **shape)
    elements = kernel.workspace_elements(tokens, 64, *CSA, PROCESSORS)
    workspace = torch.empty(elements, device="meta")
    return replace(step.call(out=step.q, lse=step.q), batch_invariant=True, workspace=workspace)


def test_few_queries_are_shared_out_and_many_are_not() -> None:
    assert [shared(tokens) for tokens in (0, 1, 4, 8, 16, 32, 34, 64, 8192)] == (
        [1, 20, 20, 16, 8, 4, 1, 1, 1]
    )
    assert [shared(tokens, keys=HCA) for tokens in (1, 4, 16, 33, 34)] == [36, 33, 8, 4, 1]
    assert [shared(tokens, 128, HCA) for tokens in (1, 16, 17)] == [36, 4, 1]
    assert [shared(tokens, keys=LONG) for tokens in (1, 16, 17)] == [132, 8, 1]
    assert shared(1, keys=(128, 0)) == 1  # four tiles


def test_no_program_waits_for_a_processor_and_tiles_fit_the_workspace() -> None:
    for tokens in range(1, 140):
        for heads in (1, 64, 96, 128):
            for keys in (CSA, HCA, LONG, (128, 32)):
                programs = shared(tokens, heads, keys)
                items = tokens * narrow.head_blocks(heads)
                if programs > 1:
                    assert items * programs <= PROCESSORS
                    elements = items * narrow.tiles_of(*keys) * kernel.TILE_ELEMENTS
                    for most in (tokens, tokens + 1, 8192):
                        given = kernel.workspace_elements(most, heads, *keys, PROCESSORS)
                        assert kernel.PARTS_START + elements <= given
                    columns = kernel.columns_per_program(items, PROCESSORS)
                    assert items * (512 // columns) <= PROCESSORS
    most = kernel.workspace_elements(8192, 128, *LONG, PROCESSORS)
    assert 150e6 <= 4 * most <= 160e6


def test_two_launches_for_few_whole_queries() -> None:
    call = whole(4)
    assert kernel.supports(call)
    weights, sums = kernel.attend_launches(call, programs=PROCESSORS)
    assert (weights.grid, sums.grid) == ((4, 20), (4, 16))
    assert kernel.attend_launches(whole(16), programs=PROCESSORS)[1].grid == (16, 8)
    assert kernel.attend_launches(whole(32), programs=PROCESSORS)[1].grid == (32, 4)
    assert not kernel.supports(replace(call, batch_invariant=False))
    assert not kernel.supports(whole(64))
    assert not kernel.supports(whole(4, width=256))


def test_the_second_launch_gets_its_arguments_under_their_names() -> None:
    call, rope = whole(4), torch.empty(9, 64)
    call = replace(call, out=call.q.clone(), lse=torch.empty(4, 64), inverse_rope=rope)
    second = kernel.attend_launches(call, programs=PROCESSORS)[1]
    given = portable.run_time_arguments(call)._asdict()
    *names, tiles = second.kernel.arg_names[: len(second.arguments)]
    assert tiles == "max_tiles"
    assert second.arguments[-1] == narrow.tiles_of(*CSA)
    for name, argument in zip(names, second.arguments[:-1], strict=True):
        assert argument is given[name] or type(argument) is int, name
        assert isinstance(argument, torch.Tensor) or argument == given[name], name


def test_a_workspace_without_their_place_makes_it_one_launch() -> None:
    call = whole(4)
    needed = kernel.PARTS_START + 4 * 20 * kernel.TILE_ELEMENTS
    assert kernel.supports(replace(call, workspace=torch.empty(needed, device="meta")))
    assert not kernel.supports(replace(call, workspace=torch.empty(needed - 1, device="meta")))
    assert not kernel.supports(replace(call, workspace=None))


def test_a_budget_counts_their_workspace() -> None:
    """Of every plan that may be open: no manager allocates more than it was given."""
    flash = ModelSpec.preset("v4-flash")
    schema = CacheSchema.build(replace(flash, layers=flash.layers[:4]), max_context=2048)
    sizes = {"max_requests": 4, "max_step_tokens": 40, "max_open_plans": 2}
    with no_gpu(hopper=True):
        cut, whole = (
            build.other_bytes(schema, batch_invariant=wanted, **sizes) for wanted in (False, True)
        )
        asked = whole + (64 << 20)
        made = build.manager_from_memory(schema, memory_bytes=asked, batch_invariant=True, **sizes)
        total = made.memory.memory_bytes().total
        assert bytes_of(made) == total
        assert asked - schema.bytes.block < total <= asked
        with pytest.raises(InvalidInput, match="batch_invariant=1"):
            build.other_bytes(schema, batch_invariant=1, **sizes)  # type: ignore[arg-type]
    parts = portable.workspace_elements(40, 64, 512, portable.split_count(*CSA))
    assert parts > narrow.workspace_elements(torch.device("cpu"))
    tiles = kernel.workspace_elements(40, 64, *CSA, PROCESSORS)
    assert whole - cut == 2 * 4 * (tiles - parts) > 0

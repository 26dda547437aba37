"""accelerate under expert parallelism: two and four processes over gloo, as torchrun has them."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.integrations.transformers import accelerate
from tests.integrations.expert_ranks import HAS_EP_SIZE, NEW_TOKENS, inputs, whole_model
from tests.integrations.fast_v4 import assert_close, fast, generate
from tests.integrations.tiny_v4 import own_cache

COUNTS = (2, 4)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks saw. Two, then four processes, started once for all tests here."""
    made = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.integrations.expert_ranks", str(made)]
    ended = subprocess.run(
        [*command, *map(str, COUNTS)], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return made


def read(directory: Path, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(directory / f"{ranks}.{rank}.pt") for rank in range(ranks)]


@cache
@torch.no_grad()
def expected() -> dict[str, Tensor]:
    """Of the whole model in one process: transformers' own, and the fast path for padded rows."""
    plain, (ids, mask) = whole_model(), inputs()
    steps = generate(plain, ids[:1], NEW_TOKENS, past_key_values=own_cache(plain))
    with fast(plain, max_batch=2) as model:
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        generated = generate(model, ids, NEW_TOKENS, attention_mask=mask)
    assert_close(logits[:1], plain(ids[:1], use_cache=False).logits, TOLERANCE)
    return {
        "one row": steps.sequences,
        "logits": logits,
        "rows": generated.sequences,
        "row logits": torch.stack(generated.logits),
    }


@pytest.mark.parametrize("ranks", COUNTS)
def test_each_rank_computes_what_one_process_does(directory: Path, ranks: int) -> None:
    want = expected()
    for found in read(directory, ranks):
        assert torch.equal(found["own"], want["one row"])  # the plan works as we think
        assert torch.equal(found["paged"], want["one row"])
        assert_close(found["logits"], want["logits"], TOLERANCE)
        for name in ("cold", "warm", "uneven"):
            tokens, logits = found[name]
            assert torch.equal(tokens, want["rows"])
            assert_close(logits, want["row logits"], TOLERANCE)
        assert torch.equal(found["after"], want["rows"])
        assert_close(found["cropped"], want["logits"][:1, -4:], TOLERANCE)


@pytest.mark.parametrize("ranks", COUNTS)
def test_an_engine_gives_the_same_tokens_on_all_ranks(directory: Path, ranks: int) -> None:
    plain, ids = whole_model(), inputs()[0]

    def alone(text: list[int], new_tokens: int) -> list[int]:
        steps = generate(plain, torch.tensor([text]), new_tokens, use_cache=False)
        new: list[int] = steps.sequences[0, len(text) :].tolist()
        return new

    whole = [alone(text.tolist(), NEW_TOKENS) for text in (ids[0], ids[0, :20])]
    turn = alone([*ids[0].tolist(), *whole[0], 5], 1)
    for found in read(directory, ranks):
        assert found["jobs"] == [*whole, turn, [0]]


def test_layers_of_the_checkpoint_are_split_too(directory: Path) -> None:
    for found in read(directory, 2):
        own, ours = found["fp8"]
        assert_close(ours, own, 1e-3)


@pytest.mark.parametrize("ranks", COUNTS)
def test_ranks_have_the_same_bits(directory: Path, ranks: int) -> None:
    """Or one of them would draw another token some day."""
    first, *others = read(directory, ranks)
    for found in others:
        assert torch.equal(found["logits"], first["logits"])
        assert all(torch.equal(found[name][1], first[name][1]) for name in ("cold", "warm"))


@pytest.mark.parametrize("ranks", COUNTS)
def test_ranks_reuse_the_same_tokens_or_none(directory: Path, ranks: int) -> None:
    for found in read(directory, ranks):
        assert found["cold reused"] == [0, 0]
        assert found["warm reused"] == [128, 0]
        assert found["uneven reused"] == [0, 0]  # rank 0 has forgotten the prompt


@pytest.mark.parametrize("ranks", COUNTS)
def test_a_rank_that_cannot_open_rows_stops_all(directory: Path, ranks: int) -> None:
    for rank, found in enumerate(read(directory, ranks)):
        assert found["failure"] == ("InvalidInput" if rank == 1 else "RequestError")


@pytest.mark.parametrize("ranks", COUNTS)
def test_heads_that_do_not_divide_are_refused(directory: Path, ranks: int) -> None:
    for found in read(directory, ranks):
        assert f"{2 * ranks + 1} index heads on {ranks} ranks" in found["odd heads"]
        assert "layer 0 has q_b_proj.weight split" in found["other plan"]
        assert "indexer.q_b_proj split by heads and the rest" in found["half a plan"]


@pytest.mark.parametrize("ranks", COUNTS)
@pytest.mark.parametrize("plan", ["tp_size alone", "by heads", "experts alone"])
def test_plans_for_tensor_parallelism_are_seen(directory: Path, ranks: int, plan: str) -> None:
    """Newer transformers have one that leaves attention whole; others may be given."""
    for found in read(directory, ranks):
        if not HAS_EP_SIZE:
            pytest.skip("before transformers 5.20 there is no plan for V4 but that for experts")
        if isinstance(found[plan], str):  # transformers 5.23.0 takes no empty tp_plan
            assert plan == "experts alone"
            assert "has no `tp_plan`" in found[plan]
            continue
        assert all(torch.equal(tokens, expected()["one row"]) for tokens in found[plan])


def test_the_docs_say_what_is_tested_here() -> None:
    """tp_plan={}, which they said before, ends in a ValueError of transformers 5.23.0."""
    for page in ("transformers.md", "run_v4_flash.md"):
        text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
        assert "distributed_config=DistributedConfig(tp_size=4, ep_size=4)" in text


def test_a_process_with_some_of_the_layers_is_refused() -> None:
    """As pipeline parallelism leaves a model."""
    model = whole_model()
    model.model.layers[2] = torch.nn.Identity()
    with pytest.raises(InvalidInput, match="layer 2 is Identity: this process has only some"):
        accelerate(model, max_batch=1, max_context=256)

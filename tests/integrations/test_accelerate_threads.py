"""Calls of several threads, and more rows than there are: a call waits or is refused, and takes no
rows from a call that runs."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from dsv4.errors import InvalidInput, RequestError
from dsv4.integrations.transformers import accelerate, restore
from tests.integrations.fast_v4 import fast, generate, manager_of, plain_model
from tests.integrations.tiny_v4 import prompt

NEW_TOKENS = 4
TIMEOUT_S = 120


class Between(LogitsProcessor):
    """Does something between two steps of a generation."""

    def __init__(self, at: int, act: Callable[[], Any]) -> None:
        self.at, self.act, self.step = at, act, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.step += 1
        if self.step == self.at:
            self.act()
        return scores


def expected(ids: Tensor) -> list[list[int]]:
    found: list[list[int]] = generate(plain_model(), ids, NEW_TOKENS).sequences.tolist()
    return found


def test_a_new_call_waits_for_rows_that_a_running_one_uses() -> None:
    """The first is in the middle when the second asks for its row."""
    first, second = prompt(20, seed=1), prompt(30, seed=2)
    with fast(plain_model(), max_batch=1) as model, ThreadPoolExecutor(1) as pool:
        later: list[Any] = []
        waits = threading.Event()

        def start() -> None:
            caches = vars(model.model)["forward"].caches
            assert isinstance(caches.turn, type(threading.RLock()))  # its end is not Python
            own_wait = caches.changed.wait

            def wait(*arguments: Any) -> Any:
                waits.set()
                return own_wait(*arguments)

            caches.changed.wait = wait
            later.append(pool.submit(generate, model, second, NEW_TOKENS))
            assert waits.wait(TIMEOUT_S)

        found = generate(model, first, NEW_TOKENS, logits_processor=[Between(2, start)])
        assert found.sequences.tolist() == expected(first)
        assert later[0].result(TIMEOUT_S).sequences.tolist() == expected(second)


def test_a_call_that_would_wait_for_itself_is_refused() -> None:
    """Its own rows are all there are; it then goes on."""
    ids, refused = prompt(20), []

    with fast(plain_model(), max_batch=1) as model:

        def ask() -> None:
            with pytest.raises(RequestError, match=r"max_batch=1.*beams and samples") as error:
                model(prompt(5, seed=3))
            refused.append(error)

        found = generate(model, ids, NEW_TOKENS, logits_processor=[Between(2, ask)])
        assert refused
        assert found.sequences.tolist() == expected(ids)


def test_a_cache_that_a_call_is_using_is_nobody_elses() -> None:
    ids = prompt(20)
    with fast(plain_model(), max_batch=2) as model, ThreadPoolExecutor(1) as pool:
        past = model(ids).past_key_values
        longer = torch.cat((ids, prompt(3, seed=5)), dim=1)

        def use() -> None:
            with pytest.raises(RequestError, match="another call of generate is using"):
                pool.submit(model, ids[:, :1], past_key_values=past).result(TIMEOUT_S)

        found = generate(
            model, longer, NEW_TOKENS, past_key_values=past, logits_processor=[Between(2, use)]
        )
        assert found.sequences.tolist() == expected(longer)
        model(ids[:, :1], past_key_values=past)


def test_more_threads_than_rows_with_beams_and_drafts() -> None:
    """Each waits for its turn; reorders and crops of one do not meet the steps of another."""
    prompts = [prompt(20 + 7 * seed, seed=seed) for seed in range(5)]
    options: list[dict[str, Any]] = [
        *({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {}, {"num_beams": 2}),
    ]

    def run(model: Any, nth: int, **more: Any) -> Any:
        return model.generate(
            prompts[nth], max_new_tokens=NEW_TOKENS, do_sample=False, **options[nth], **more
        ).tolist()

    with fast(plain_model(), max_batch=2, max_draft_tokens=2) as model:
        alone = [run(model, nth) for nth in range(5)]
        with ThreadPoolExecutor(5) as pool:
            for _ in range(2):
                found = [pool.submit(run, model, nth) for nth in range(5)]
                assert [each.result(TIMEOUT_S) for each in found] == alone
        manager_of(model).check_invariants()


def test_a_call_that_fails_lets_the_next_one_go_on() -> None:
    class Broken(Exception):
        pass

    def fail() -> None:
        raise Broken

    with fast(plain_model(), max_batch=1) as model, ThreadPoolExecutor(2) as pool:
        broken = pool.submit(
            generate, model, prompt(9), NEW_TOKENS, logits_processor=[Between(2, fail)]
        )
        with pytest.raises(Broken):
            broken.result(TIMEOUT_S)
        ids = prompt(20, seed=1)
        found = pool.submit(generate, model, ids, NEW_TOKENS).result(TIMEOUT_S)
        assert found.sequences.tolist() == expected(ids)


@torch.no_grad()
def test_a_model_is_not_restored_in_the_middle_of_a_step() -> None:
    """The layers behind would attend by themselves, over all rows as one. A call that waits for
    rows finds out too."""
    ids, model = prompt(20, rows=2), copy.deepcopy(plain_model())
    with ThreadPoolExecutor(1) as pool:
        accelerate(model, max_batch=2, max_context=64, records="bf16")
        restoring: list[Future[None]] = []

        def begin(*_: Any) -> None:
            restoring.append(pool.submit(restore, model))
            wait(restoring, timeout=0.2)  # as long as it takes, were it not to wait for the step

        hook = model.model.layers[0].mlp.register_forward_pre_hook(begin)
        logits = model(ids).logits
        hook.remove()
        restoring[0].result(TIMEOUT_S)
        torch.testing.assert_close(logits, plain_model()(ids).logits, rtol=0, atol=1e-4)

        accelerate(model, max_batch=2, max_context=64, records="bf16")
        caches, later = vars(model.model)["forward"].caches, []

        def restore_it() -> None:
            later.append(pool.submit(model, prompt(9)))
            while not caches.is_waited_for:
                time.sleep(0.001)
            restore(model)

        with pytest.raises(InvalidInput, match="accelerated model"):
            generate(model, ids, NEW_TOKENS, logits_processor=[Between(2, restore_it)])
        with pytest.raises(InvalidInput, match="has been restored"):
            later[0].result(TIMEOUT_S)


@pytest.mark.parametrize(
    "call",
    [
        *("commit", "fork"),
        *(
            pytest.param(n, marks=pytest.mark.nightly)
            for n in ("continue_request", "admit_request")
        ),
    ],
)
def test_an_interrupt_inside_the_manager_is_mended(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call puts the books in order; a turn does not go on from rows that are torn."""
    ids = prompt(140)
    with fast(plain_model(), max_batch=2) as model:
        said = generate(model, ids, NEW_TOKENS).sequences
        manager = manager_of(model)
        table, name = {
            "continue_request": (manager._parts.table, "grow"),
            "commit": (manager._parts.table, "move"),
            "admit_request": (manager._parts.table, "make_request"),
            "fork": (manager.memory, "copy_slot"),
        }[call]
        more = torch.cat((said, prompt(130, seed=3)), dim=1)
        both = torch.cat((more, more)) if call == "fork" else more
        if call == "admit_request":
            both = prompt(30, seed=8)

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(table, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                generate(model, both, NEW_TOKENS)
        assert generate(model, more, NEW_TOKENS).sequences.tolist() == expected(more)
        manager.check_invariants()

"""accelerate with layers on two devices: a cache on each, in lockstep."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

from dsv4.errors import InvalidInput, PlanError, RecoveryNeeded
from dsv4.integrations.transformers import Engine, accelerate
from dsv4.integrations.transformers.lockstep import Lockstep, places
from tests.integrations.fast_v4 import assert_close, fast, generate, manager_of, plain_model
from tests.integrations.second_device import HERE, THERE, second_device, watched
from tests.integrations.tiny_v4 import prompt
from tests.support.lives import tiny_stack

BORDER = 2


@torch.no_grad()
def test_no_operation_takes_tensors_of_two_devices() -> None:
    """Rows of one length, a padded batch, and the jobs of an engine."""
    plain, ids = plain_model(), prompt(70, rows=2)
    expected = plain(ids).logits
    mask = torch.ones(2, 68, dtype=torch.int64)
    mask[1, :9] = 0
    with second_device(plain, BORDER), fast(plain, max_batch=2) as model:
        with watched(model, BORDER) as sides:
            given = sides.move(ids, HERE)
            output = model(given[:, :68])
            logits = [output.logits]
            for column in (68, 69):
                past = output.past_key_values
                output = model(given[:, column : column + 1], past_key_values=past)
                logits.append(output.logits)
            padded = model(given[:, :68], attention_mask=sides.move(mask, HERE)).logits
        assert_close(torch.cat(logits, dim=1), expected, 1e-4)
        assert_close(padded[:1], expected[:1, :68], 1e-4)
        assert_close(padded[1:, 9:], plain(ids[1:, 9:68]).logits, 1e-4)
        assert min(sides.operations.values()) > 300, sides.operations
        del past, output
        engine = Engine(model=model, step_tokens=30)
        jobs = [engine.submit(ids[row, :length], 2) for row, length in ((0, 40), (1, 9), (1, 5))]
        with watched(model, BORDER):
            engine.run()
        for job in jobs:
            alone = generate(plain, torch.tensor([job.tokens[:-2]]), 2, use_cache=False)
            assert job.tokens == alone.sequences[0].tolist()
        with watched(model, BORDER) as sides, pytest.raises(AssertionError, match="both devices"):
            _ = sides.move(ids, HERE) + sides.move(ids, THERE)  # the net has no hole


def test_two_devices_compute_what_one_does() -> None:
    """Padding, prompts that begin alike, chats, beams and drafts: all that changes rows."""
    plain, ids = plain_model(), prompt(140, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :31] = 0
    options = {"prompt_lookup_num_tokens": 3}
    found = []
    for split in (False, True):
        device = second_device(plain, BORDER) if split else nullcontext()
        with device, fast(plain, max_batch=6) as model:
            assert isinstance(manager_of(model), Lockstep) == split
            results = []
            for _ in range(2):
                steps = generate(model, ids, 3, attention_mask=mask)
                results.append(steps.sequences)
                reused = [request.reused_tokens for request in steps.past_key_values.requests]
                results.append(torch.tensor(reused))
                del steps
            chat = torch.cat((results[0][:1], prompt(9, seed=3)), dim=1)
            results.append(generate(model, chat, 3).sequences)
            results.append(generate(model, ids[:1, :70], 3, num_beams=3).sequences)
            results.append(generate(model, chat[:, -60:], 5, **options).sequences)
            engine = Engine(model=model)
            jobs = [engine.submit(chat[0, :length], 3) for length in (149, 20, 148)]
            engine.run()
            results += [torch.tensor([*job.generated, job.tokens_skipped]) for job in jobs]
            gc.collect()
        found.append(results)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    assert found[0][3].tolist()[0] >= 128


def test_a_failure_on_one_device_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ids = plain_model(), prompt(9)
    with second_device(plain, BORDER), fast(plain, max_batch=2) as model:
        manager = manager_of(model)
        assert isinstance(manager, Lockstep)
        past = model(ids).past_key_values

        def out_of_memory(*args: object, **options: object) -> None:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(manager.managers[1], "prepare_forward", out_of_memory)
        with pytest.raises((torch.OutOfMemoryError, RecoveryNeeded)):
            model(ids[:, :1], past_key_values=past)
        monkeypatch.undo()
        with pytest.raises(RecoveryNeeded, match="accelerate it again"):
            model(ids)
        manager.abandon = lambda plan: None  # type: ignore[method-assign]
        del past


def test_a_step_that_lacks_a_layer_on_one_device_is_committed_on_none() -> None:
    stack, cpu = tiny_stack(), torch.device("cpu")
    stack.manager = manager = Lockstep(
        stack.schema,
        [(cpu, [0, 1]), (cpu, [2, 3, 4])],
        num_blocks=8,
        max_requests=1,
        max_step_tokens=64,
        prefix=None,
    )
    request, stream = manager.admit_request(60), stack.stream(0, 60)
    plan = manager.prepare_forward([(request, 50)])
    stack.write(plan, [stream], layers=[0, 1, 2])
    with pytest.raises(PlanError, match="from 0: this step lacks the append of layer 1,"):
        manager.commit(plan)
    assert request.length == 0
    stack.write(plan, [stream], layers=[3])
    manager.commit(plan)
    manager.check_invariants()
    assert request.length == 50


def test_what_does_not_go_together_is_refused() -> None:
    plain = plain_model()
    with second_device(plain, 1), pytest.raises(InvalidInput, match="window-only"):
        accelerate(plain, max_batch=1, max_context=256)
    layer = plain.model.layers[0]
    assert places(plain) == [(torch.device("cpu"), [0, 1, 2, 3])]
    weight = layer.mlp.gate.weight
    layer.mlp.gate.weight = torch.nn.Parameter(weight.to("meta"))
    try:
        with pytest.raises(InvalidInput, match="layer 0 is offloaded"):
            accelerate(plain, max_batch=1, max_context=256)
    finally:
        layer.mlp.gate.weight = weight

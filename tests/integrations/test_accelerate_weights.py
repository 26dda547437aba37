"""What is cached belongs to the weights and the adapters that it was computed with, and to a salt:
nothing of it is used with others, and all of it is there when they come back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from dsv4.errors import InvalidInput
from dsv4.integrations.transformers import Engine
from dsv4.integrations.transformers.weights import Weights, mixed_sum
from tests.integrations.adapters import add_adapter, disable_adapter, layers_of, set_adapter
from tests.integrations.fast_v4 import fast, generate, plain_model
from tests.integrations.test_accelerate_graphs import record_graphs
from tests.integrations.tiny_v4 import prompt
from tests.support.numbers import Numbers

NEW_TOKENS = 4
IDS = prompt(300)
WARM = 300 - 2 * 128  # what runs of it behind whole blocks
Model = DeepseekV4ForCausalLM
Change = Callable[[Any], Any]


def with_adapters() -> Model:
    model = copy.deepcopy(plain_model())
    for seed, name in enumerate("ab"):
        add_adapter(model, name, seed)
    set_adapter(model, "a")
    return model


def tokens_run(model: Model, plain: Model, ids: Tensor = IDS, **options: Any) -> int:
    """How many of a prompt; what comes out is what the plain model says without a cache."""
    found = generate(model, ids, NEW_TOKENS, **options)
    expected = generate(plain, ids, NEW_TOKENS, use_cache=False)
    assert torch.equal(found.sequences, expected.sequences)
    logits = torch.stack(found.logits), torch.stack(expected.logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    return len(found.past_key_values.requests[0].resume.run)


def test_adapters_that_are_switched_share_nothing_and_find_their_own_again() -> None:
    plain, run = with_adapters(), []
    with fast(plain) as model:
        for name in "abab":
            for each in (plain, model):
                set_adapter(each, name)
            run.append(tokens_run(model, plain))
        for _ in range(2):
            with disable_adapter(model), disable_adapter(plain):
                run.append(tokens_run(model, plain))
        run.append(tokens_run(model, plain))
    assert run == [300, 300, WARM, WARM, 300, WARM, WARM]


def test_an_adapter_that_is_added_later_and_replaced() -> None:
    """What the model computed before it had one is found again while it is disabled."""
    plain, run = copy.deepcopy(plain_model()), []
    with fast(plain) as model:
        run.append(tokens_run(model, plain))
        for seed in (1, 2):  # the second has the name of the first
            for each in (plain, model):
                add_adapter(each, "a", seed)
            run += [tokens_run(model, plain), tokens_run(model, plain)]
        with disable_adapter(model), disable_adapter(plain):
            run.append(tokens_run(model, plain))
        for each in (plain, model):
            add_adapter(each, "b", 3)
            set_adapter(each, "a")
        run.append(tokens_run(model, plain))
    assert run == [300, 300, WARM, 300, WARM, WARM, WARM]


def loaded(model: Model) -> None:
    model.load_state_dict(plain_model(seed=1).state_dict())


def tied_elsewhere(model: Model) -> None:
    weight = model.model.layers[1].self_attn.kv_proj
    weight.weight = torch.nn.Parameter(weight.weight.detach() * 1.5)


@torch.no_grad()
def trained(model: Model) -> None:
    model.model.layers[1].self_attn.kv_proj.weight.mul_(1.5)


def moved(model: Model) -> None:
    weight = model.model.layers[1].self_attn.kv_proj.weight
    weight.data = weight.data * 1.5


def routed(model: Model) -> None:
    model.model.layers[0].mlp.gate.tid2eid.fill_(0)


@pytest.mark.parametrize("change", [loaded, tied_elsewhere, trained, moved, routed])
def test_weights_that_change(change: Change) -> None:
    plain = copy.deepcopy(plain_model())
    with fast(plain) as model:
        tokens_run(model, plain)
        for each in (plain, model):
            change(each)
        assert [tokens_run(model, plain) for _ in range(2)] == [300, WARM]


def test_an_adapter_that_is_scaled_or_merged() -> None:
    plain = with_adapters()
    with fast(plain) as model:
        tokens_run(model, plain)
        for each in (plain, model):
            for lora in layers_of(each):
                lora.scaling["a"] = 0.5
        assert tokens_run(model, plain) == 300
        for lora in layers_of(model):  # PEFT merges through .data, which torch does not count
            lora.merged_adapters.append("a")
        assert tokens_run(model, plain) == 300


@torch.no_grad()
@pytest.mark.parametrize("in_generate", [True, False])
def test_a_cache_that_goes_on_with_another_adapter_is_nobody_elses(in_generate: bool) -> None:
    """What it computes then is neither of the one adapter nor of the other."""
    plain = with_adapters()
    with fast(plain) as model:
        cache = model(IDS[:, :100], logits_to_keep=1).past_key_values
        set_adapter(model, "b")
        if in_generate:
            generate(model, IDS, NEW_TOKENS, past_key_values=cache)
        else:
            for column in range(100, 300):
                model(IDS[:, column : column + 1], past_key_values=cache, logits_to_keep=1)
        for name in "ba":
            for each in (plain, model):
                set_adapter(each, name)
            assert tokens_run(model, plain) == 300
        del cache
        assert tokens_run(model, plain) == WARM  # of the one before


def test_jobs_of_an_engine() -> None:
    """One runs on with another adapter: nobody shares what it computes then."""
    plain, skipped = with_adapters(), []
    with fast(plain, max_step_tokens=128) as model:
        engine = Engine(model=model)
        engine.submit(IDS[0], NEW_TOKENS)
        engine.step()
        for name in "bab":
            for each in (plain, model):
                set_adapter(each, name)
            job = engine.submit(IDS[0], NEW_TOKENS)
            engine.run()
            expected = generate(plain, IDS, NEW_TOKENS, use_cache=False).sequences
            assert job.generated == expected[0, 300:].tolist()
            skipped.append(job.tokens_skipped)
    assert skipped == [0, 0, 256]


def test_captured_steps_belong_to_the_adapter_too() -> None:
    """A replay computes with what the capture saw, wherever the switches are."""
    plain, ids = with_adapters(), prompt(20)
    with fast(plain) as model:
        recording = record_graphs(model)
        forward = vars(model.model)["forward"]
        own, seen = forward.graphs._run, []

        def as_captured(given: Tensor, plan: Any) -> Tensor:
            key = given.data_ptr()  # the static ids of one capture
            active = dict(seen).get(key) or layers_of(model)[0]._active_adapter[0]
            seen.append((key, active))
            now = layers_of(model)[0]._active_adapter[0]
            set_adapter(model, active)
            out = own(given, plan)
            set_adapter(model, now)
            return out

        forward.graphs._run = as_captured
        for name in "abab":
            for each in (plain, model):
                set_adapter(each, name)
            tokens_run(model, plain, ids)
        assert recording.captures == 2
        for seed in range(6):  # those of old weights are not kept for ever
            add_adapter(model, "a", seed)
            generate(model, ids, 2)
        assert len(forward.graphs._steps) == 4


def test_generate_takes_a_salt() -> None:
    plain = plain_model()
    with fast(plain) as model:
        run = [tokens_run(model, plain, salt=salt) for salt in ("a", "b", None, "b", "a")]
        assert run == [300, 300, 300, WARM, WARM]
        assert tokens_run(model, plain) == WARM
        for salt in (b"a", 5):
            with pytest.raises(InvalidInput, match="give a string"):
                generate(model, IDS, 1, salt=salt)
        engine = Engine(model=model)  # whose jobs share with calls of the same salt
        job = engine.submit([*IDS[0].tolist(), 5], 1, "a")
        engine.run()
        assert job.tokens_skipped >= 256


def test_a_cache_keeps_its_salt() -> None:
    """A turn with drafts opens new rows behind the ones of the turn before: for the same salt."""
    plain, ids = plain_model(), IDS[:, :200]
    with fast(plain, max_batch=2, max_draft_tokens=3) as model:
        cache = generate(model, ids, NEW_TOKENS, salt="a").past_key_values
        with pytest.raises(InvalidInput, match="begun with 'a'"):
            generate(model, IDS, NEW_TOKENS, past_key_values=cache, salt="b")
        drafts = {"prompt_lookup_num_tokens": 3}
        generate(model, IDS, NEW_TOKENS, past_key_values=cache, **drafts)
        del cache
        assert tokens_run(model, plain) == 300
        assert tokens_run(model, plain, salt="a") == WARM


def test_an_assistant_has_the_salt_of_the_call() -> None:
    plain = plain_model()
    with fast(plain, max_draft_tokens=5) as model, fast(plain, max_draft_tokens=5) as assistant:
        for salt in ("a", "b"):
            generate(model, IDS, NEW_TOKENS, salt=salt, assistant_model=assistant)
        caches = vars(assistant.model)["forward"].caches
        gc.collect()  # a cache that nobody has may wait for it
        roots = {row.request.trail.root for row in caches.pool.rows}
        assert len(roots) == 2


def test_adapters_of_peft() -> None:
    """The library itself, where it is installed (`make test-newest-transformers` does)."""
    peft = pytest.importorskip("peft")
    lora = partial(
        peft.LoraConfig, r=4, target_modules=["q_a_proj", "kv_proj"], init_lora_weights=False
    )
    plain = copy.deepcopy(plain_model())
    with fast(plain) as model:
        run = [tokens_run(model, plain)]
        torch.manual_seed(0)
        wrapped = [peft.get_peft_model(each, lora(), adapter_name="one") for each in (plain, model)]

        def same_adapters() -> None:  # of both; the weights below them are not written to
            drawn = wrapped[0].state_dict()
            lora_parts = {name: value for name, value in drawn.items() if "lora_" in name}
            wrapped[1].load_state_dict(lora_parts, strict=False)

        for each in wrapped:
            each.add_adapter("two", lora())
            each.add_adapter("dora", lora(use_dora=True))
            each.eval()
        same_adapters()
        for name in ("one", "dora", "two", "one"):
            for each in wrapped:
                each.set_adapter(name)
            run.append(tokens_run(model, plain))
        with wrapped[0].disable_adapter(), wrapped[1].disable_adapter():
            run.append(tokens_run(model, plain))
        for each in wrapped:
            each.set_adapter("two")
            each.merge_adapter()
        run.append(tokens_run(model, plain))
        for each in wrapped:
            each.unmerge_adapter()
            each.delete_adapter("one")
            each.add_adapter("one", lora())
            each.set_adapter("one")
        same_adapters()
        run.append(tokens_run(model, plain))
        # one call's adapters, which hooks bring
        own = wrapped[1].generate(input_ids=IDS, max_new_tokens=1, adapter_names=["two"])
        assert own.shape == (1, 301)
        run.append(tokens_run(model, plain))
    assert run == [300, 300, 300, 300, WARM, WARM, 300, 300, WARM]


def test_a_look_costs_nothing_between_prompts() -> None:
    """`read` walks the model; steps only look at the switches of one layer."""
    with fast(with_adapters()) as model:
        weights = vars(model.model)["forward"].caches.weights
        reads, own = [], Weights.read
        weights.read = lambda: reads.append(1) or own(weights)
        generate(model, IDS, 20)
        assert len(reads) == 1


def test_memory_that_is_used_again_is_another_state() -> None:
    """Allocators like to give the same memory again: here they do."""
    model = copy.deepcopy(plain_model())
    parameter = model.model.layers[1].self_attn.kv_proj.weight
    memory = parameter.data.numpy().copy()
    parameter.data = torch.from_numpy(memory)
    weights = Weights(model)
    names = [weights.read()]
    for _ in range(3):
        parameter.data = torch.zeros_like(parameter)
        names.append(weights.read())
        parameter.data = torch.from_numpy(memory)  # new memory to torch, at the same address
        names.append(weights.read())
    assert names[0] is None
    assert len(set(names)) == 7


def test_tensors_can_still_be_swapped() -> None:
    """As PEFT does to exchange an adapter, and torch to convert modules."""
    plain = copy.deepcopy(plain_model())
    with fast(plain) as model:
        tokens_run(model, plain)
        for each in (plain, model):
            weight = each.model.layers[1].self_attn.kv_proj.weight
            torch.utils.swap_tensors(weight, torch.nn.Parameter(1.5 * weight.detach(), False))
        assert [tokens_run(model, plain) for _ in range(2)] == [300, WARM]


def test_constants_of_parameters_that_lie_elsewhere() -> None:
    """Sinks, norms and biases are read as they are now: an attention keeps copies of them."""
    plain = copy.deepcopy(plain_model())
    with fast(plain) as model:
        tokens_run(model, plain)
        for _ in range(2):
            for each in (plain, model):
                attention = each.model.layers[1].self_attn
                attention.sinks.data = 2.0 - attention.sinks.data
                bias = attention.compressor.position_bias
                bias.data = bias.data.flip(0) + 1.0
            assert [tokens_run(model, plain) for _ in range(2)] == [300, WARM]


def test_the_state_that_has_no_name_is_never_forgotten() -> None:
    """What tiers hold has been written with it; more adapters than states that are kept come."""
    model = with_adapters()
    weights = Weights(model)
    for scale in range(200):
        for lora in layers_of(model):
            lora.scaling["a"] = 2.0 + scale
        assert weights.glance() == weights.read() is not None
    for lora in layers_of(model):
        lora.scaling["a"] = 1.0
    assert weights.glance() is None
    assert len(weights._states) <= 64


def test_the_same_values_have_the_same_name_where_tiers_keep_what_came_of_them() -> None:
    model = copy.deepcopy(plain_model())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    weights, by_state = Weights(model, by_value=True), Weights(model)
    versions = [weights.version]
    model.load_state_dict(values)
    assert weights.read() is None
    assert by_state.read() is not None
    versions.append(weights.version)
    parameter = model.model.layers[1].self_attn.kv_proj.weight
    with torch.no_grad():
        parameter.view(-1)[77] += 1e-6
        changed = weights.read()
        versions.append(weights.version)
        parameter.copy_(values["model.layers.1.self_attn.kv_proj.weight"])
    assert changed is not None
    assert weights.read() is None
    versions.append(weights.version)
    parameter.data = parameter.data.clone()  # elsewhere: what graphs have read is not this
    assert weights.read() is None
    versions.append(weights.version)
    with torch.no_grad():
        parameter.view(-1)[77] += 1e-6
    assert weights.read() == changed
    assert len(set(versions)) == len(versions)


def test_names_by_value_know_which_adapters_are_active_and_how_they_are_scaled() -> None:
    model = with_adapters()
    twin = copy.deepcopy(model)
    weights, others = Weights(model, by_value=True), Weights(twin, by_value=True)
    names = [weights.read()]
    for scale in (2.0, 3.0, 2.0, 1.0):
        for lora in layers_of(model):
            lora.scaling["a"] = scale
        names.append(weights.read())
    assert names[0] is None
    assert names[4] is None
    assert names[1] == names[3] is not None
    assert len(set(names)) == 3
    for lora in layers_of(twin):
        lora.scaling["a"] = 3.0
    assert others.read() == names[2]  # in any process
    layers_of(model)[0].register_forward_pre_hook(lambda *given: None)
    hooked = {weights.read()}
    weights._states.clear()
    hooked.add(weights.read())
    assert len(hooked) == 2  # what hooks do is not known


@pytest.mark.parametrize("size", [1, 7, 8, 1001])
def test_every_changed_byte_changes_the_digest(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of devices, chunk by chunk; bytes may begin anywhere in their memory."""
    monkeypatch.setattr("dsv4.integrations.transformers.weights._CHUNK_BYTES", 512)
    flat = Numbers(3).integers(0, 256, size + 3).to(torch.uint8)
    first = mixed_sum(flat[3:])
    assert mixed_sum(flat[3:].clone()) == first
    found = {first}
    for place in range(3, size + 3, max(1, size // 97)):
        for bit in (1, 128):
            flat[place] ^= bit
            found.add(mixed_sum(flat[3:]))
            flat[place] ^= bit
    assert len(found) == 1 + 2 * len(range(3, size + 3, max(1, size // 97)))
    if size > 8:
        assert mixed_sum(flat[3:].flip(0)) not in found
        two = flat[3:].clone()  # the same change at two places does not cancel
        two[7] ^= 128
        two[15] ^= 128
        assert mixed_sum(two) not in found

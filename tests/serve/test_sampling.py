"""dsv4/serve/sampling.py against numpy, and over HTTP: the same seed gives the same text whatever
else runs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from dsv4 import InvalidInput
from dsv4.serve.models import StandIn
from dsv4.serve.sampling import History, Sampling, adjusted, choose, logprobs, uniform
from tests.serve.serving import Running, greedy
from tests.support.numbers import Numbers

WORDS = 50
TOKENIZER = StandIn().tokenizer


def kept_by_hand(scores: Any, sampling: Sampling) -> dict[int, float]:
    """Which tokens may be drawn, the most likely first, and how likely: one at a time."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    order = order[: sampling.top_k or len(order)]
    weights = {t: np.exp((scores[t] - scores[order[0]]) / sampling.temperature) for t in order}
    whole = sum(weights.values())
    kept, seen = {}, 0.0
    for token in order:
        is_rare = weights[token] < sampling.min_p * weights[order[0]]
        if kept and (seen >= sampling.top_p * whole * (1 + 1e-12) or is_rare):
            break
        kept[token] = weights[token]
        seen += weights[token]
    return kept


@pytest.mark.parametrize("seed", range(40))
def test_a_token_is_the_one_that_its_number_points_at(seed: int) -> None:
    draw = Numbers(seed)
    row = draw.normal(WORDS).double() * 3
    sampling = Sampling(
        seed=seed,
        temperature=float([0.3, 1.0, 2.5][seed % 3]),
        top_k=[0, 1, 7, 500][seed % 4],
        top_p=[1.0, 0.5, 0.01][seed % 3],
        min_p=[0.0, 0.1][seed % 2],
    )
    kept = kept_by_hand(row.numpy(), sampling)
    for position in range(20):
        point = uniform(seed, position) * sum(kept.values())
        ends = np.cumsum([*kept.values()])
        nth = min(int((ends <= point).sum()), len(kept) - 1)
        assert choose(row, sampling, History(), position) == [*kept][nth]


def test_numbers_of_a_seed_are_even_and_its_own() -> None:
    found = np.array([uniform(7, position) for position in range(4000)])
    assert 0 <= found.min() < found.max() < 1
    assert abs(found.mean() - 0.5) < 0.03
    assert len({*found}) == 4000
    assert uniform(7, 3) == uniform(7 + 2**64, 3) != uniform(8, 3)


def test_penalties_and_biases_are_openai_s() -> None:
    row = Numbers(1).normal(WORDS).double()
    history = History(prompt=frozenset({1, 2}), counts={2: 3, 5: 1})
    sampling = Sampling(
        seed=0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias={5: 7.0, 9: -100.0},
    )
    wanted = row.clone()
    for token in (1, 2, 5):
        wanted[token] = wanted[token] / 2 if wanted[token] > 0 else wanted[token] * 2
    wanted[2] -= 0.5 + 3 * 0.25
    wanted[5] -= 0.5 + 0.25 - 7
    wanted[9] -= 100
    assert torch.equal(adjusted(row, sampling, history), wanted)
    assert torch.equal(adjusted(row, Sampling(seed=0), history), row)


def test_a_mask_leaves_only_what_it_allows() -> None:
    row, mask = Numbers(2).normal(WORDS), torch.zeros(WORDS, dtype=torch.bool)
    mask[[3, 4]] = True
    for temperature in (0.0, 5.0):
        sampling = Sampling(seed=1, temperature=temperature)
        assert {choose(row, sampling, History(), n, mask) for n in range(30)} <= {3, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_logits_that_say_nothing_are_refused(temperature: float, bad: float) -> None:
    with pytest.raises(InvalidInput, match="leave no token"):
        choose(torch.full((WORDS,), bad), Sampling(seed=0, temperature=temperature), History(), 0)


def test_logprobs_are_the_model_s() -> None:
    row = Numbers(3).normal(WORDS).double()
    wanted = row - row.exp().sum().log()
    found = logprobs(row, 11, 3)
    assert found.logprob == pytest.approx(float(wanted[11]))
    assert [token for token, _ in found.top] == wanted.argsort(descending=True)[:3].tolist()
    assert logprobs(row, 11, 0).top == ()


# ---- over HTTP -----------------------------------------------------------------------------------


def asked(server: Running, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in ("min_p", "top_k") if name in options}
    return server.openai().completions.create(
        **{"model": "stand-in", "prompt": "seeds", "max_tokens": 16, **options}, extra_body=extra
    )


def test_a_seed_gives_the_same_text_whatever_else_runs(server: Running) -> None:
    ways: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "temperature": 0.7, "top_p": 0.8},
        {"seed": 3, "top_k": 5, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"seed": 4, "min_p": 0.2, "logit_bias": {"65": 5}},
    ]
    alone = [asked(server, **way).choices[0].text for way in ways]
    assert len({*alone}) == len(ways)
    with ThreadPoolExecutor(12) as threads:
        together = [*threads.map(lambda way: asked(server, **way).choices[0].text, ways * 3)]
    assert together == alone * 3


def test_choices_differ_and_the_first_is_the_one_alone(server: Running) -> None:
    one = asked(server, seed=5).choices[0].text
    several = asked(server, seed=5, n=3).choices
    assert several[0].text == one
    assert len({choice.text for choice in several}) == 3


def test_logprobs_are_reported_for_every_token(server: Running) -> None:
    ids = TOKENIZER.encode("seeds")
    tokens = greedy(ids, 6)
    found = asked(server, temperature=0, max_tokens=6, logprobs=2).choices[0]
    assert len(found.logprobs.tokens) == len(tokens)
    chat = server.openai().chat.completions.create(
        model="stand-in",
        messages=[{"role": "user", "content": "seeds"}],
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
        stream=True,
    )
    entries = [
        entry
        for chunk in chat
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(entries) == 5
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].bytes == entry.bytes  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob < 0


@pytest.mark.parametrize("temperature", [0, 3])
def test_json_mode_gives_json_of_the_schema(server: Running, temperature: float) -> None:
    """A model that says nothing still fills the form."""
    schema = {
        "type": "object",
        "properties": {
            "tier": {"enum": ["device", "host", "disk"]},
            "blocks": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["tier", "blocks"],
        "additionalProperties": False,
    }
    found = server.openai().chat.completions.create(
        model="stand-in",
        messages=[{"role": "user", "content": "where?"}],
        temperature=temperature,
        seed=3,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert found.choices[0].finish_reason == "stop"
    answer = json.loads(found.choices[0].message.content)
    assert answer.keys() == {"tier", "blocks"}
    assert answer["tier"] in ("device", "host", "disk")
    assert 0 <= answer["blocks"] <= 99


def test_answers_to_one_schema_do_not_disturb_each_other(server: Running) -> None:
    """It is compiled once; each answer is at its own place in it."""
    schema = {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 3, "maxItems": 3}
    found = server.openai().chat.completions.create(
        model="stand-in",
        messages=[{"role": "user", "content": "several"}],
        temperature=3,
        seed=1,
        n=6,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    answers = [json.loads(choice.message.content) for choice in found.choices]
    assert all(len(answer) == 3 and {*answer} <= {"a", "bb", "ccc"} for answer in answers)
    assert len({*map(tuple, answers)}) > 1


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "nope"}, "cannot be followed"),
        ({"enum": []}, "cannot be followed"),
        ({"$ref": "http://127.0.0.1:1/x"}, "cannot be followed"),  # nothing is fetched
        ({"$ref": "#"}, "the grammar has failed"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(
    server: Running, schema: dict[str, Any], says: str
) -> None:
    body = {
        "model": "stand-in",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    with server.http() as client:
        found = client.post("/v1/chat/completions", json=body)
    assert found.status_code == 400
    message = found.json()["error"]["message"]
    assert says in message
    assert "\n" not in message


def test_json_that_is_cut_short_says_so(server: Running) -> None:
    """And one that may not end there goes on to be JSON only."""
    body = {
        "model": "stand-in",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_object"},
        "temperature": 0,
    }
    with server.http() as client:
        for tokens in (1, 2):
            found = client.post("/v1/chat/completions", json={**body, "max_tokens": tokens})
            (choice,) = found.json()["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["message"]["content"].startswith("{")
        schema = {"type": "json_schema", "json_schema": {"schema": {"const": [1, 2]}}}
        more = {"max_tokens": 30, "ignore_eos": True, "response_format": schema}
        found = client.post("/v1/chat/completions", json={**body, **more})
    assert json.loads(found.json()["choices"][0]["message"]["content"]) == [1, 2]

"""The scripts that train the demo models run, and a run that was interrupted goes on as if it had
not been."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsv4.demo_model.checkpoint import load_network
from dsv4.demo_model.text import Tokenizer

pytestmark = pytest.mark.extra("transformers")  # for tokenizers
TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(TOOLS))
    import train_demo
    import train_recall

    monkeypatch.setattr(train_demo, "STAGES", ((2, 48, 2), (1, 96, 3)))
    monkeypatch.setattr(train_demo, "STEPS", 3)
    monkeypatch.setattr(train_demo, "SAVE_EVERY", 1)
    for name in ("asked_first", "unseen", "unseen_other"):
        whole = getattr(train_demo, name)
        monkeypatch.setattr(train_demo, name, lambda whole=whole: [*whole()][:2])
    short = [dataclasses.replace(stage, steps=1, rows=1) for stage in train_recall.STAGES]
    monkeypatch.setattr(train_recall, "STAGES", short)
    return train_demo, train_recall


def test_a_run_goes_on_where_it_was_interrupted(
    scripts: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo, _ = scripts
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    demo.train(whole, seed=3)
    right = demo.stage
    monkeypatch.setattr(demo, "stage", lambda step: right(step) if step < 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        demo.train(parts, seed=3)
    monkeypatch.setattr(demo, "stage", right)
    demo.train(parts, seed=3)
    for name in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    facts = json.loads((whole / "training.json").read_text("utf-8"))
    assert (facts["seed"], facts["steps"], facts["of_steps"]) == (3, 3, 3)
    assert facts["questions"] == "0 of 2"
    assert Tokenizer.load(whole / "tokenizer.json").vocabulary == 1024
    assert load_network(whole).vocabulary == 1024


def test_the_corpus_keeps_what_it_is_tested_with_apart(scripts: tuple[Any, Any]) -> None:
    import demo_corpus

    topics, otherwise = demo_corpus.load_topics()
    asked = [question for topic in topics for question in topic.asked]
    assert not set(asked) & {question for topic in topics for question in topic.unseen}
    assert not set(demo_corpus.THINGS) & set(demo_corpus.UNSEEN_THINGS)
    assert not set(demo_corpus.OTHER) & set(demo_corpus.UNSEEN_OTHER)
    first, second = demo_corpus.Speaker(5), demo_corpus.Speaker(5)
    turns = [first.turn() for _ in range(50)]
    assert turns == [second.turn() for _ in range(50)]
    assert {answer for _, answer in turns} <= {otherwise, *(topic.text for topic in topics)}


def test_the_recall_model_is_trained(
    scripts: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, script = scripts
    first = script.recall_weights(1)
    script.write(tmp_path, first, {"seed": 1, "steps": 0, "of_steps": 1})
    written = load_file(tmp_path / "model.safetensors")
    assert set(written) == set(first)
    assert all(torch.isfinite(weight).all() for weight in written.values())
    monkeypatch.setattr(script, "right", lambda *_, **__: 0.0)
    runs = [tmp_path / "run", tmp_path / "again", tmp_path / "other"]
    for run, seed in zip(runs, (1, 1, 2), strict=True):
        script.train(run, seed=seed)
    one, again, other = ((run / "model.safetensors").read_bytes() for run in runs)
    assert one == again != other  # a run can be repeated, to the last bit

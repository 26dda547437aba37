"""What is shipped is what was trained, is small, and says of itself what is true."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from dsv4.demo_model.checkpoint import DEMO, RECALL, Checkpoint

ROOT = Path(__file__).parents[2]
MOST_BYTES = 8 * 10**6


@pytest.mark.parametrize("directory", [DEMO, RECALL], ids=["demo", "recall"])
def test_the_files_are_those_of_the_training(directory: Path):
    """After a change of the questions, the model has to be trained anew."""
    training = json.loads((directory / "training.json").read_text("utf-8"))
    assert training["steps"] == training["of_steps"]
    assert "model.safetensors" in training["sha256"]
    for name, digest in training["sha256"].items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest, name


def test_both_models_and_the_tokenizer_are_small():
    files = [path for directory in (DEMO, RECALL) for path in directory.iterdir()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_it_says_of_itself_what_is_true():
    found = Checkpoint.load()
    parameters = sum(weight.numel() for weight in found.network.weights.values())
    assert parameters == found.training["parameters"]
    assert round(parameters / 10**6) == 2
    assert "about two million parameters" in found.answers["Who are you?"]


def test_the_questions_are_one_text_per_topic():
    found = tomllib.loads((DEMO / "questions.toml").read_text("utf-8"))
    texts = [each["text"] for each in found["answer"]]
    assert len(set(texts)) == len(texts) > 60
    asked = [q for each in found["answer"] for q in each.get("ask", ())]
    assert len(set(asked)) == len(asked)
    assert not set(asked) & {q for each in found["answer"] for q in each.get("unseen", ())}


def test_it_answered_its_questions_when_it_was_written():
    training = Checkpoint.load().training
    right, total = map(int, re.fullmatch(r"(\d+) of (\d+)", training["questions"]).groups())
    assert right == total > 60


def test_the_page_about_it_runs():
    text = (ROOT / "docs" / "demo_model.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "docs/demo_model.md", "exec"), {})

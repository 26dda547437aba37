"""The files of a trained model: what from_pretrained of transformers reads too."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4.extras import needed_by

with needed_by("the demo model"):
    import torch
    from safetensors.torch import load_file

from dsv4.demo_model.network import Network
from dsv4.demo_model.text import Tokenizer

DATA = Path(__file__).parents[1] / "data"
DEMO = DATA / "demo_model"
RECALL = DATA / "recall_model"


def load_network(directory: Path) -> Network:
    config = json.loads((directory / "config.json").read_text("utf-8"))
    weights = load_file(directory / "model.safetensors")
    return Network(
        config=config,
        weights={name: weight.to(torch.float32) for name, weight in weights.items()},
    )


@dataclass(frozen=True, kw_only=True)  # no slots: answers are read once
class Checkpoint:
    """The demo model and its text. `training` says how it was trained and what it can do."""

    network: Network
    tokenizer: Tokenizer
    training: dict[str, Any]

    @classmethod
    def load(cls) -> Checkpoint:
        return cls(
            network=load_network(DEMO),
            tokenizer=Tokenizer.load(DEMO / "tokenizer.json"),
            training=json.loads((DEMO / "training.json").read_text("utf-8")),
        )

    @cached_property
    def answers(self) -> dict[str, str]:
        """Questions, one or a few for each topic, and what the model was trained to say."""
        found = tomllib.loads((DEMO / "questions.toml").read_text("utf-8"))
        answers = dict.fromkeys(found["greetings"], found["hello"])
        for each in found["answer"]:
            asked = list(each.get("ask", ()))
            if "term" in each:
                asked.insert(0, f"What is {each['term']}?")
            answers.update(dict.fromkeys(asked, each["text"]))
        return answers

"""What the demo asks: conversations about this cache, the last message a question."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.demo_model.text import Tokenizer

NEW_TOKENS = 32  # of each answer; those to these questions are not longer
# while they are answered, A and C each close an HCA group and take a block
QUESTIONS = {
    "A": (
        "What is dsv4?",
        "What is an entry?",
        "What is a group?",
        "What is the indexer?",
        "What is the window?",
        "What is a draft token?",
    ),
    "B": ("What is an entry?",),
    "C": ("What is a block?", "What is a slot?", "What is a ring?"),
    "D": ("What is CSA?", "What is HCA?"),
}
SHARED = (
    "What is dsv4?",
    "Why does V4 need a special cache?",
    "What is a block?",
    "What is a slot?",
    "What is an entry?",
    "What is a group?",
    "What is the window?",
    "What is an index key?",
    "What is the indexer?",
)
FIRST, SECOND = "What is a draft token?", "What is a fork?"
BEFORE_RESTART = ("What is dsv4?", "What is a block?", "What is a ring?")
AFTER_RESTART = "What is suspend?"


class Prompts:
    """Conversations as tokens. Their earlier answers are those that the model was trained to
    give."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tokenizer: Tokenizer = checkpoint.tokenizer
        self._answers = checkpoint.answers

    def asking(self, questions: Sequence[str]) -> Tensor:
        """int64 [tokens]: all of them answered but the last."""
        messages = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": self._answers[question]})
        return torch.tensor(self.tokenizer.chat(messages[:-1]))

    def following(self, question: str) -> Tensor:
        """int64 [tokens]: what goes after a whole answer to ask something else."""
        begin = 1  # the token that begins a conversation
        return torch.tensor(self.tokenizer.chat([{"role": "user", "content": question}])[begin:])

    def said(self, tokens: Sequence[int]) -> str:
        """The text of what was generated, up to its end."""
        ids = list(tokens)
        end = self.tokenizer.end
        return self.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)

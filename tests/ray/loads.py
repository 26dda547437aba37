"""What the tests ask replicas."""

from __future__ import annotations

import random
from typing import Any


def words(seed: int, count: int) -> str:
    """Text that no other seed begins with."""
    draw = random.Random(seed)
    return " ".join(draw.choice(("block", "entry", "cache", "token", "row")) for _ in range(count))


def long_answers(count: int, tokens: int) -> list[dict[str, Any]]:
    """Greedy ones and seeded ones, with prompts of their own."""
    return [
        {
            "prompt": words(1000 + nth, 200),
            "max_tokens": tokens,
            "ignore_eos": True,
            **({"temperature": 0} if nth % 2 else {"temperature": 1.0, "seed": nth}),
        }
        for nth in range(count)
    ]

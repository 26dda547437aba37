"""Loads for tests of the simulator: conversations that grow, with a common beginning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dsv4.simulate.trace import TraceRequest
from tests.support.numbers import Numbers


def load(requests: int, seed: int = 1, *, talks: int = 12) -> list[TraceRequest]:
    """Requests of `talks` conversations in random order, five a second. Each prompt goes on
    from the one before it in its conversation; some begin anew."""
    numbers = Numbers(seed)
    prompts: list[list[int]] = [[] for _ in range(talks)]
    tokens = [0] * talks
    found, next_name = [], 4
    for nth in range(requests):
        talk = int(numbers.integers(0, talks, 1)[0])
        if not prompts[talk] or not numbers.integers(0, 6, 1)[0]:
            prompts[talk], tokens[talk] = [0, 1, 2], 3 * 512  # a system prompt
        if tokens[talk] % 512:
            prompts[talk].pop()  # the rest of the prompt before: this one goes on after it
        tokens[talk] += int(numbers.integers(50, 3000, 1)[0])
        more = -(-tokens[talk] // 512) - len(prompts[talk])
        prompts[talk] += range(next_name, next_name + more)
        next_name += more
        found.append(
            TraceRequest(
                at_s=nth / 5,
                input_tokens=tokens[talk],
                output_tokens=int(numbers.integers(1, 60, 1)[0]),
                names=[*prompts[talk]],
            )
        )
    return found


def write(trace: Sequence[TraceRequest], path: Path) -> Path:
    """In Mooncake's format."""
    lines = [
        {
            "timestamp": round(1000 * each.at_s),
            "input_length": each.input_tokens,
            "output_length": each.output_tokens,
            "hash_ids": [*each.names],
        }
        for each in trace
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path

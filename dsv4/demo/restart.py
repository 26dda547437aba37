"""A conversation that begins in one process and continues in another: what a disk keeps of it.

`python -m dsv4.demo.restart ROOT NEW_TOKENS PROMPT` is the first process: it answers, says so in
one line of JSON when everything is on disk, and waits to be killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.prefix.options import PrefixOptions
from dsv4.demo.model import speaking_v4
from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.errors import Dsv4Error
from dsv4.integrations.transformers import accelerate, restore
from dsv4.tiers.disk import DiskTier

OPTIONS = PrefixOptions(model_id="the trained model of the demo")
CAPACITY_BYTES = 1 << 30
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What the second process did: `run_tokens` of `prompt_tokens`, and the tokens it generated."""

    prompt_tokens: int
    run_tokens: int
    loaded_bytes: int
    tokens: list[int]


def answer_and_die(root: Path, prompt: Tensor, *, new_tokens: int) -> Tensor:
    """Another process answers a prompt and is killed. Prompt and answer, int64 [tokens]."""
    command = [sys.executable, "-m", "dsv4.demo.restart", str(root), str(new_tokens)]
    with subprocess.Popen(
        [*command, json.dumps(prompt.tolist())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        try:
            line = child.stdout.readline()
        finally:
            child.kill()
    if not line:
        raise Dsv4Error(f"the first process ended with code {child.returncode} and said nothing")
    return torch.tensor(json.loads(line))


def go_on(model: Any, root: Path, prompt: Tensor, *, new_tokens: int, records: str) -> Resumed:
    """This process answers a prompt with what is on disk. The model is unchanged afterwards."""
    tier = DiskTier(root, CAPACITY_BYTES)
    accelerate(
        model,
        max_batch=1,
        max_context=len(prompt) + new_tokens,
        records=records,
        prefix=OPTIONS,
        tiers=[tier],
    )
    try:
        answer = model.generate(
            prompt[None], max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
        )
        start = answer.past_key_values.requests[0].resume.start
    finally:
        restore(model)
        tier.close(CLOSE_S)
    return Resumed(
        prompt_tokens=len(prompt),
        run_tokens=len(prompt) - start,
        loaded_bytes=tier.stats().loaded_bytes,
        tokens=answer.sequences[0, len(prompt) :].tolist(),
    )


def main() -> None:
    root, new_tokens, prompt = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    checkpoint, tier = Checkpoint.load(), DiskTier(root, CAPACITY_BYTES)
    model = speaking_v4(checkpoint)
    longest = len(prompt) + new_tokens
    accelerate(
        model, max_batch=1, max_context=longest, records="bf16", prefix=OPTIONS, tiers=[tier]
    )
    answer = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=checkpoint.tokenizer.end,
        pad_token_id=checkpoint.tokenizer.end,
    )
    restore(model)  # what the rows hold is on disk now
    tier.close(CLOSE_S)
    print(json.dumps(answer[0].tolist()), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

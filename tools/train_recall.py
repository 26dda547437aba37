"""Trains the recall model of dsv4/data/recall_model, on one core of a CPU.

    python tools/train_recall.py OUT [--seed 1]

First on texts of 168 tokens, in which every query reads all entries and the indexer learns from
where attention looks (a KL loss on its scores). Then on texts of 1,024 tokens in which the
questions read what the indexer selects. Longer ones are read without having been trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_demo import CLIP, CONFIG, first_weights, optimizer_of, rate, shipped, write_json

from dsv4.demo_model import parallel
from dsv4.demo_model.network import Network
from dsv4.demo_model.recall import FIRST_FILLER, FIRST_VALUE, VOCABULARY, recall

RECALL_CONFIG: dict[str, Any] = {
    **CONFIG,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["moe"] * 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "o_lora_rank": 64,
    "moe_intermediate_size": 64,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_topk": 8,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
INDEX_LOSS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps of one kind; of a step its rows, of each row its tokens, pairs and questions.
    `span`: where the cosine of the rate would end."""

    steps: int
    span: int
    peak: float
    rows: int
    tokens: int
    pairs: int
    questions: int
    select: bool


STAGES = (
    Stage(steps=200, span=500, peak=1e-3, rows=16, tokens=168, pairs=8, questions=8, select=False),
    Stage(steps=300, span=300, peak=3e-4, rows=8, tokens=1024, pairs=24, questions=16, select=True),
)


def recall_weights(seed: int) -> dict[str, Tensor]:
    """First weights that save a long search on a CPU: a query of a token looks like the entry that
    the token went into, entries keep keys and values rather than fillers, and what is read from an
    entry looks like its tokens. The rest is learned, the indexer's choice of entries above all."""
    weights = first_weights(RECALL_CONFIG, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    attention, indexer = "model.layers.1.self_attn.", "compressor.indexer."
    low, hidden = weights[attention + "q_a_proj.weight"].shape
    down = torch.linalg.qr(draw(hidden, hidden)).Q[:low].contiguous()
    weights[attention + "q_a_proj.weight"] = down
    for queries, compressor in ((attention, "compressor."), (attention + indexer, indexer)):
        name = attention + compressor
        width = weights[name + "kv_norm.weight"].shape[0]
        up = draw(width, low) * low**-0.5
        q = weights[queries + "q_b_proj.weight"]
        weights[queries + "q_b_proj.weight"] = up.repeat(len(q) // width, 1)
        weights[name + "kv_proj.weight"] = (up @ down).repeat(2, 1) * 2
        weights[name + "gate_proj.weight"] *= 0.1
        weights[name + "gate_proj.weight"][:, 0] = 1.0
        if compressor == "compressor.":
            pairs, groups = RECALL_CONFIG["num_attention_heads"] // 2, RECALL_CONFIG["o_groups"]
            weights[attention + "o_a_proj.weight"] = torch.eye(width).repeat(groups, pairs) / pairs
            back = (up @ down).T * 0.5
            weights[attention + "o_b_proj.weight"] = back.repeat(1, groups)
    tokens = weights["model.embed_tokens.weight"]
    tokens *= hidden**0.5  # larger than what the layers add to it at first
    tokens[:, 0] = torch.where(torch.arange(VOCABULARY) < FIRST_FILLER, 4.0, 0.0)
    weights["lm_head.weight"] = tokens * 0.1
    weights["lm_head.weight"][:FIRST_VALUE] = 0.0
    for name in ("self_attn.o_b_proj", "mlp.shared_experts.down_proj"):
        weights[f"model.layers.0.{name}.weight"] *= 0.2
    return weights


def right(network: Network, *, tokens: int, pairs: int, questions: int, seed: int) -> float:
    """The part of one text's questions that is answered right."""
    asked = recall(
        tokens, pairs=pairs, questions=questions, generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        logits = parallel.run(network, asked.ids[None], rows=asked.asked).logits[0]
    return float((logits.argmax(dim=-1) == asked.values).float().mean())


def train(out: Path, *, seed: int) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    weights = recall_weights(seed)
    network = Network(config=RECALL_CONFIG, weights=weights)
    begin, steps = time.monotonic(), 0
    for stage in STAGES:
        optimizer = optimizer_of(weights)
        for nth in range(stage.steps):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + steps)
            told = step(network, optimizer, stage, nth, generator)
            steps += 1
            if nth % 20 == 0 or nth + 1 == stage.steps:
                print(f"{steps} {told} {time.monotonic() - begin:.0f} s", flush=True)
    of_steps = sum(stage.steps for stage in STAGES)
    write(out, weights, {"seed": seed, "steps": steps, "of_steps": of_steps})


def step(
    network: Network,
    optimizer: torch.optim.Optimizer,
    stage: Stage,
    nth: int,
    generator: torch.Generator,
) -> str:
    """One step of a stage, and how it went."""
    texts = [
        recall(stage.tokens, pairs=stage.pairs, questions=stage.questions, generator=generator)
        for _ in range(stage.rows)
    ]
    for group in optimizer.param_groups:
        group["lr"] = rate(nth, stage.span, stage.peak)
    ids, at = torch.stack([text.ids for text in texts]), texts[0].asked
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = parallel.run(
            network,
            ids,
            index_loss=stage.select or nth % 2 == 0,
            select=stage.select,
            rows=at if stage.select else None,
        )
    asked = result.logits.float()
    asked = asked if stage.select else asked[:, at]
    values = torch.stack([text.values for text in texts])
    loss = cross_entropy(asked.flatten(0, 1), values.flatten())
    total = loss if result.index_loss is None else loss + INDEX_LOSS * result.index_loss
    optimizer.zero_grad()
    total.backward()
    trained = [w for group in optimizer.param_groups for w in group["params"]]
    torch.nn.utils.clip_grad_norm_(trained, CLIP)
    optimizer.step()
    part = float((asked.argmax(dim=-1) == values).float().mean())
    return f"loss {float(loss.detach()):.3f} right {part:.2f}"


def write(out: Path, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
    rounded = shipped(weights)
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", RECALL_CONFIG)
    network = Network(config=RECALL_CONFIG, weights={n: w.float() for n, w in rounded.items()})
    facts = {
        **facts,
        "parameters": sum(weight.numel() for weight in rounded.values()),
        "right": {
            str(tokens): right(network, tokens=tokens, pairs=24, questions=12, seed=7)
            for tokens in (512, 1024, 2048, 4096)
        },
        "torch": torch.__version__,
        "sha256": {
            "model.safetensors": hashlib.sha256(
                (out / "model.safetensors").read_bytes()
            ).hexdigest()
        },
    }
    write_json(out / "training.json", facts)
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    train(given.out, seed=given.seed)


if __name__ == "__main__":
    main()

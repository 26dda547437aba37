"""Trains the demo model of dsv4/data/demo_model, on one core of a CPU.

    python tools/train_demo.py OUT [--seed 1]

OUT keeps a checkpoint to go on from; what is shipped is written there too, as often. One thread, a
seed for everything: a run can be repeated on the same machine with the same versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from demo_corpus import QUESTIONS, UNSEEN_OTHER, UNSEEN_THINGS, Speaker
from safetensors.torch import save_file
from tokenizers import Tokenizer as Trained
from tokenizers import models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy

from dsv4.demo_model import parallel
from dsv4.demo_model.network import Network
from dsv4.demo_model.text import BEGIN, CHAT_TEMPLATE, END, ROLES, SPECIAL, Tokenizer, byte_names

VOCABULARY = 1024
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["moe"] * 4,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "partial_rotary_factor": 0.25,
    "sliding_window": 64,
    "q_lora_rank": 96,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 192,
    "hc_mult": 1,
    "hc_sinkhorn_iters": 1,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
# rows of a step and their tokens, up to a step
STAGES = ((8, 256, 384), (4, 512, 450))
STEPS = STAGES[-1][-1]
LEARNING_RATE, WARMUP, CLIP = 2.5e-3, 60, 1.0
# where the cosine of the rate would end, for steps from the first number on: it falls faster then
SPANS = ((0, 600), (350, 480))
INDEX_LOSS = 0.1
QUESTION_WEIGHT = 0.05  # of the tokens of questions; those of answers have 1
SAVE_EVERY = 50
SMALLEST = 2.0**-20  # of the weights that are shipped
PASS = 20.0  # of which the sigmoid is 1: a hyper-connection that passes its stream on


# ---- text ----------------------------------------------------------------------------------------


def train_pieces(speaker: Speaker) -> dict[str, Any]:
    """A tokenizer.json whose tokens are the longest pieces that the trained ones have: its model
    cuts text from left to right, as dsv4.demo_model.text does."""
    texts = [text for _ in range(4000) for text in speaker.turn()]
    bpe = Trained(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=byte_names(), show_progress=False
        ),
    )
    learned = sorted(bpe.get_vocab(), key=bpe.get_vocab().__getitem__)
    vocabulary = {text: nth for nth, text in enumerate([*SPECIAL, *learned])}
    shape = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocabulary[name],
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name in SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **shape},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **shape},
        "model": {
            "type": "WordPiece",
            "unk_token": BEGIN,
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 1 << 20,
            "vocab": vocabulary,
        },
    }


def rows(speaker: Speaker, tokenizer: Tokenizer, count: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Conversations int64 [count, tokens + 1], and the weight of each token as a target."""
    ids = torch.zeros(count, tokens + 1, dtype=torch.int64)
    weight = torch.zeros(count, tokens + 1)
    user, assistant = tokenizer.special[ROLES["user"]], tokenizer.special[ROLES["assistant"]]
    for row in range(count):
        found, weights = [tokenizer.special[BEGIN]], [0.0]
        if (system := speaker.system()) is not None:
            found += [tokenizer.special[ROLES["system"]], *tokenizer.encode(system), tokenizer.end]
            weights += [0.0] * (len(found) - 1)
        while len(found) <= tokens:
            question, answer = map(tokenizer.encode, speaker.turn())
            found += [user, *question, tokenizer.end, assistant, *answer, tokenizer.end]
            weights += [0.0, *[QUESTION_WEIGHT] * len(question), 0.0, 0.0]
            weights += [1.0] * (len(answer) + 1)
        ids[row] = torch.tensor(found[: tokens + 1])
        weight[row] = torch.tensor(weights[: tokens + 1])
    return ids, weight


# ---- weights -------------------------------------------------------------------------------------


def first_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Of transformers' DeepseekV4ForCausalLM, by its names. The hyper-connections of its one
    residual stream pass everything on, and its router has one expert to choose: these are not
    trained (`is_fixed`)."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    low, inner = config["q_lora_rank"], config["moe_intermediate_size"]
    index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
    groups, out = config["o_groups"], config["o_lora_rank"]
    layers = config["num_hidden_layers"]
    weights: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        drawn = torch.randn(rows, columns, generator=generator)
        weights[name] = drawn * (scale * columns**-0.5)

    matrix("model.embed_tokens.weight", config["vocab_size"], hidden)
    matrix("lm_head.weight", config["vocab_size"], hidden, 0.5)
    weights["model.norm.weight"] = torch.ones(hidden)
    weights["model.hc_head.hc_fn"] = torch.zeros(1, hidden)
    weights["model.hc_head.hc_base"] = torch.full((1,), PASS)
    weights["model.hc_head.hc_scale"] = torch.ones(1)
    for nth, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{nth}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        matrix(attention + "q_a_proj.weight", low, hidden)
        matrix(attention + "q_b_proj.weight", heads * width, low)
        matrix(attention + "kv_proj.weight", width, hidden)
        matrix(attention + "o_a_proj.weight", groups * out, heads * width // groups)
        matrix(attention + "o_b_proj.weight", hidden, groups * out, (2 * layers) ** -0.5)
        weights[attention + "q_a_norm.weight"] = torch.ones(low)
        weights[attention + "kv_norm.weight"] = torch.ones(width)
        weights[attention + "sinks"] = torch.zeros(heads)
        if kind != "sliding_attention":
            csa = kind == "compressed_sparse_attention"
            ratio, columns = (4, 2 * width) if csa else (128, width)
            compressors = [("compressor.", ratio, columns, width)]
            if csa:
                indexer = attention + "compressor.indexer."
                compressors.append(("compressor.indexer.", ratio, 2 * index_width, index_width))
                matrix(indexer + "q_b_proj.weight", index_heads * index_width, low)
                matrix(indexer + "scorer.weights_proj.weight", index_heads, hidden)
            for name, ratio, columns, normed in compressors:
                matrix(attention + name + "kv_proj.weight", columns, hidden)
                matrix(attention + name + "gate_proj.weight", columns, hidden)
                weights[attention + name + "position_bias"] = torch.zeros(ratio, columns)
                weights[attention + name + "kv_norm.weight"] = torch.ones(normed)
        for part in ("gate", "up"):
            matrix(f"{mlp}shared_experts.{part}_proj.weight", inner, hidden)
        matrix(mlp + "shared_experts.down_proj.weight", hidden, inner, (2 * layers) ** -0.5)
        matrix(mlp + "experts.gate_up_proj", 2 * inner, hidden)
        matrix(mlp + "experts.down_proj", hidden, inner, (2 * layers) ** -0.5)
        for name in ("gate_up_proj", "down_proj"):
            weights[f"{mlp}experts.{name}"].unsqueeze_(0)
        weights[mlp + "gate.weight"] = torch.zeros(1, hidden)
        weights[mlp + "gate.e_score_correction_bias"] = torch.zeros(1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{norm}.weight"] = torch.ones(hidden)
        for connection in ("attn_hc", "ffn_hc"):
            weights[f"{layer}{connection}.fn"] = torch.zeros(3, hidden)
            weights[f"{layer}{connection}.base"] = torch.tensor([PASS, 0.0, 0.0])
            weights[f"{layer}{connection}.scale"] = torch.ones(3)
    return weights


def shipped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """In bf16, and 0 where they are too small for sums that are exact in fp64
    (`Network.exact`)."""
    rounded = {name: weight.detach().bfloat16() for name, weight in weights.items()}
    return {name: torch.where(w.abs() < SMALLEST, 0.0, w) for name, w in rounded.items()}


def is_fixed(name: str) -> bool:
    return any(part in name for part in ("_hc.", "hc_head.", ".mlp.gate."))


def optimizer_of(weights: dict[str, Tensor]) -> torch.optim.AdamW:
    trained = {name: w.requires_grad_() for name, w in weights.items() if not is_fixed(name)}
    return torch.optim.AdamW(
        [
            {"params": [w for w in trained.values() if w.dim() > 1], "weight_decay": 0.02},
            {"params": [w for w in trained.values() if w.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )


def rate(step: int, steps: int, peak: float) -> float:
    """Of learning: up, then down along a cosine."""
    warm = min(1.0, (step + 1) / WARMUP)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


# ---- training ------------------------------------------------------------------------------------


def stage(step: int) -> tuple[int, int]:
    return next((count, tokens) for count, tokens, end in STAGES if step < end)


def train(out: Path, *, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "checkpoint.pt"
    if not (out / "tokenizer.json").exists():
        described = train_pieces(Speaker(seed))
        (out / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False) + "\n")
    tokenizer = Tokenizer.load(out / "tokenizer.json")
    weights = first_weights(CONFIG, seed)
    optimizer, first = optimizer_of(weights), 0
    if kept.exists():
        found = torch.load(kept)
        first = found["step"]
        for name, weight in weights.items():
            if not is_fixed(name):
                weight.data.copy_(found["weights"][name])
        optimizer.load_state_dict(found["optimizer"])
    network = Network(config=CONFIG, weights=weights)
    begin = time.monotonic()
    for step in range(first, STEPS):
        span = [span for begin, span in SPANS if step >= begin][-1]
        # of the step alone, so that it does not matter where a run was interrupted
        speaker = Speaker(seed * 1_000_003 + step)
        ids, weight = rows(speaker, tokenizer, *stage(step))
        for group in optimizer.param_groups:
            group["lr"] = rate(step, span, LEARNING_RATE)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # halves the time and more
            result = parallel.run(network, ids[:, :-1], index_loss=step % 2 == 0)
        each = cross_entropy(
            result.logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        target = weight[:, 1:].flatten()
        loss = (each * target).sum() / target.sum()
        total = loss if result.index_loss is None else loss + INDEX_LOSS * result.index_loss
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_([w for w in weights.values() if w.requires_grad], CLIP)
        optimizer.step()
        if step % 10 == 0:
            index = float("nan") if result.index_loss is None else float(result.index_loss.detach())
            seconds = time.monotonic() - begin
            print(
                f"{step} loss {float(loss.detach()):.4f} index {index:.3f} {seconds:.0f} s",
                flush=True,
            )
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS:
            state = {"step": step + 1, "weights": weights, "optimizer": optimizer.state_dict()}
            torch.save(state, out / "checkpoint.new")
            (out / "checkpoint.new").replace(kept)
            if (step + 1) % (3 * SAVE_EVERY) == 0 or step + 1 == STEPS:
                write(out, weights, {"seed": seed, "steps": step + 1, "of_steps": STEPS})


def exact_answers(network: Network, tokenizer: Tokenizer, asked: Iterator[tuple[str, str]]) -> str:
    """How many answers greedy decoding gives word for word, as "n of m"."""
    right = total = 0
    for question, answer in asked:
        prompt = tokenizer.chat([{"role": "user", "content": question}])
        ids = torch.tensor([[*prompt, *tokenizer.encode(answer), tokenizer.end]])
        with torch.no_grad():
            guessed = parallel.run(network, ids[:, :-1]).logits.argmax(dim=-1)
        right += bool((guessed[0, len(prompt) - 1 :] == ids[0, len(prompt) :]).all())
        total += 1
    return f"{right} of {total}"


def asked_first() -> Iterator[tuple[str, str]]:
    """The first question of each topic."""
    return ((topic.asked[0], topic.text) for topic in Speaker(0).topics)


def unseen() -> Iterator[tuple[str, str]]:
    return ((question, t.text) for t in Speaker(0).topics for question in t.unseen)


def unseen_other() -> Iterator[tuple[str, str]]:
    """Questions about other things, none of which it was trained on."""
    otherwise = Speaker(0).otherwise
    return ((q.format(n=thing), otherwise) for q in UNSEEN_OTHER for thing in UNSEEN_THINGS)


def write(out: Path, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """All files of the checkpoint, weights in bf16, and what they can do in training.json."""
    rounded = shipped(weights)
    tokenizer = Tokenizer.load(out / "tokenizer.json")
    network = Network(config=CONFIG, weights={n: w.float() for n, w in rounded.items()})
    ids = {"bos_token_id": tokenizer.special[BEGIN], "eos_token_id": tokenizer.end}
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", {**CONFIG, **ids, "pad_token_id": None})
    write_json(out / "generation_config.json", {**ids, "do_sample": False})
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n", "utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )
    facts = {
        **facts,
        "parameters": sum(weight.numel() for weight in rounded.values()),
        "questions": exact_answers(network, tokenizer, asked_first()),
        "unseen": exact_answers(network, tokenizer, unseen()),
        "unseen_other": exact_answers(network, tokenizer, unseen_other()),
        "torch": torch.__version__,
        "sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (QUESTIONS, out / "model.safetensors", out / "tokenizer.json")
        },
    }
    write_json(out / "training.json", facts)
    print(json.dumps(facts), flush=True)


def write_json(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    train(given.out, seed=given.seed)


if __name__ == "__main__":
    main()

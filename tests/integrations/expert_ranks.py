"""What each rank of an accelerated model with expert parallelism does, for test_expert_ranks.

`python -m tests.integrations.expert_ranks DIR 2 4` runs two ranks, then four, as torchrun would,
but imports once; under torchrun it is one rank: `torchrun --nproc-per-node 2 -m … DIR`.
Each rank leaves what it saw in DIR/{ranks}.{rank}.pt.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import init_device_mesh
from transformers import DeepseekV4ForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations import finegrained_fp8

from dsv4.errors import InvalidInput, RequestError
from dsv4.integrations.transformers import Engine, accelerate
from tests.integrations.fast_v4 import KINDS, generate, manager_of
from tests.integrations.fp8_layers import KERNELS, fp8_model
from tests.integrations.tiny_v4 import draw_weights, own_cache, paged, prompt, tiny_config

TOKENS, NEW_TOKENS = 136, 4
OTHER_PLAN = {"model.layers.*.self_attn.q_b_proj": "colwise"}
INDEXER = "model.layers.*.self_attn.compressor.indexer."
BY_HEADS = {f"{INDEXER}q_b_proj": "colwise", f"{INDEXER}scorer.weights_proj": "colwise"}
TIMEOUT = timedelta(seconds=240)  # ranks that a busy machine holds up
# from transformers 5.20 on the experts are split over a mesh of their own
HAS_EP_SIZE = "ep_size" in {field.name for field in fields(DistributedConfig)}
if HAS_EP_SIZE:
    from transformers.distributed.utils import TransformersDeviceMesh


def whole_model(index_heads: int = 32) -> DeepseekV4ForCausalLM:
    config = tiny_config(
        layer_types=list(KINDS),
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        index_n_heads=index_heads,
    )
    return draw_weights(DeepseekV4ForCausalLM(config).eval(), 0, norms=0.2)


def split_model(
    ranks: int,
    index_heads: int = 32,
    plan: Any = "auto",
    whole: DeepseekV4ForCausalLM | None = None,
) -> DeepseekV4ForCausalLM:
    """As from_pretrained(distributed_config=…) leaves it, which needs the package accelerate.
    "auto" is expert parallelism, as the docs say it; "experts alone" leaves the rest whole; None
    is what transformers does with tp_size alone."""
    model = whole or whole_model(index_heads)
    mesh: Any
    if HAS_EP_SIZE:
        names = ("pp", "fsdp", "tp"), ("pp", "efsdp", "ep")
        mesh = TransformersDeviceMesh(
            *(init_device_mesh("cpu", (1, 1, ranks), mesh_dim_names=each) for each in names)
        )
        named = {"auto": {"ep_size": ranks}, "experts alone": {"ep_size": ranks, "tp_plan": {}}}
        options = named[plan] if isinstance(plan, str) else {"tp_plan": plan}
        wanted = DistributedConfig(tp_size=ranks, **options)
    else:
        mesh = init_device_mesh("cpu", (ranks,))
        is_expert = plan == "auto"
        wanted = DistributedConfig(tp_size=ranks, tp_plan=plan, enable_expert_parallel=is_expert)
    model.config.distributed_config = wanted
    split: DeepseekV4ForCausalLM = model.maybe_distribute_model(model, wanted, mesh)
    return split.requires_grad_(False)


def inputs() -> tuple[Tensor, Tensor]:
    """Two rows, of which the second is padded on the left."""
    ids = prompt(TOKENS, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    return ids, mask


def refused(model: DeepseekV4ForCausalLM) -> str:
    try:
        accelerate(model, max_batch=1, max_context=256)
    except InvalidInput as error:
        return str(error)
    return ""


@torch.no_grad()
def run_rank(rank: int, ranks: int) -> dict[str, Any]:
    ids, mask = inputs()
    model = split_model(ranks)
    found: dict[str, Any] = {}
    by_heads = BY_HEADS if HAS_EP_SIZE else "auto"
    found["odd heads"] = refused(split_model(ranks, 2 * ranks + 1, by_heads))
    found["half a plan"] = refused(split_model(ranks, plan=dict([*BY_HEADS.items()][:1])))
    found["other plan"] = refused(split_model(ranks, plan=OTHER_PLAN))
    if HAS_EP_SIZE:
        found["tp_size alone"] = tokens_of(split_model(ranks, plan=None), rank, ids)
        found["by heads"] = tokens_of(split_model(ranks, plan=BY_HEADS), rank, ids)
        try:
            alone = split_model(ranks, plan="experts alone")
        except ValueError as error:
            found["experts alone"] = str(error)
        else:
            found["experts alone"] = tokens_of(alone, rank, ids)
    for name, past in (("own", own_cache(model)), ("paged", paged(model))):
        steps = generate(model, ids[:1], NEW_TOKENS, past_key_values=past)
        found[name] = steps.sequences

    accelerate(model, max_batch=2, max_context=640, records="bf16")
    manager = manager_of(model)
    found["logits"] = model(ids, attention_mask=mask, use_cache=False).logits
    for name in ("cold", "warm", "uneven"):
        if name == "uneven" and rank == 0:  # as if other rows had taken its blocks
            vars(model.model)["forward"].caches.pool.evict(2)
            manager.prefix.evict()
        steps = generate(model, ids, NEW_TOKENS, attention_mask=mask)
        found[name] = steps.sequences, torch.stack(steps.logits)
        found[f"{name} reused"] = [r.reused_tokens for r in steps.past_key_values.requests]
        del steps
    found["cropped"] = logits_behind_a_crop(model, rank, ids)
    if ranks == 2:
        found["fp8"] = logits_of_fp8(ranks, ids)
    found["failure"] = failure_of_one(model, rank, ids)
    found["after"] = generate(model, ids, NEW_TOKENS, attention_mask=mask).sequences
    found["jobs"] = jobs_of_an_engine(model, rank, ids)
    manager.check_invariants()
    return found


def tokens_of(model: DeepseekV4ForCausalLM, rank: int, ids: Tensor) -> list[Tensor]:
    """Of a prompt, and again when one rank has forgotten it."""
    accelerate(model, max_batch=1, max_context=640, records="bf16")
    found = [generate(model, ids[:1], NEW_TOKENS).sequences]
    if rank == 0:
        vars(model.model)["forward"].caches.pool.evict(1)
        manager_of(model).prefix.evict()
    found.append(generate(model, ids[:1], NEW_TOKENS).sequences)
    return found


def jobs_of_an_engine(model: DeepseekV4ForCausalLM, rank: int, ids: Tensor) -> list[list[int]]:
    """More than there are rows; one rank has forgotten what a prompt goes on from."""
    engine = Engine(model=model, step_tokens=100)
    jobs = [engine.submit(ids[row], NEW_TOKENS) for row in (0, 1)]
    jobs.append(engine.submit(ids[0, :20], NEW_TOKENS))
    engine.cancel(jobs[1])
    engine.run()
    if rank == 0:
        vars(model.model)["forward"].caches.pool.evict(2)
        manager_of(model).prefix.evict()
    turn = engine.submit([*jobs[0].tokens, 5], 1)
    engine.run()
    return [jobs[0].generated, jobs[2].generated, turn.generated, [turn.tokens_skipped]]


def logits_behind_a_crop(model: DeepseekV4ForCausalLM, rank: int, ids: Tensor) -> Tensor:
    """Further back than rings reach, where one rank has nothing left to go on from."""
    past = generate(model, ids[:1], 1).past_key_values
    for column in range(8):
        model(ids[:1, column : column + 1], past_key_values=past)
    if rank == 0:
        manager_of(model).prefix.evict()
    past.crop(TOKENS - 4)
    return model(ids[:1, -4:], past_key_values=past).logits


def logits_of_fp8(ranks: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of the checkpoint's layers: transformers' own, and accelerated."""
    finegrained_fp8.load_finegrained_fp8_kernel = lambda: KERNELS
    finegrained_fp8.is_deepgemm_loadable = lambda: False
    whole = fp8_model()
    for key, style in list(whole._ep_plan.items()):  # as transformers' quantiser does
        if style == "grouped_gemm":
            whole._ep_plan[f"{key}_scale_inv"] = style
    model = split_model(ranks, whole=whole)
    own = model(ids, use_cache=False).logits
    accelerate(model, max_batch=2, max_context=640, records="bf16")
    return own, model(ids, use_cache=False).logits


def failure_of_one(model: DeepseekV4ForCausalLM, rank: int, ids: Tensor) -> str:
    """Rank 1 cannot open the rows, which the others must not wait for."""
    caches = vars(model.model)["forward"].caches
    make_room = caches._make_room

    def no_room(rows: int) -> None:
        raise InvalidInput("no rows")

    caches._make_room = no_room if rank == 1 else make_room
    try:
        generate(model, ids, 1)
    except (InvalidInput, RequestError) as error:
        return type(error).__name__
    finally:
        caches._make_room = make_room
    return ""


def main(directory: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store.{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    torch.save(run_rank(rank, ranks), directory / f"{ranks}.{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def launch(directory: Path, ranks: int) -> bool:
    """Forks the ranks; whether all ended well."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            main(directory, rank, ranks)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return not sum(os.waitpid(child, 0)[1] for child in children)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if "RANK" in os.environ:
        main(where, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    elif not all(launch(where, count) for count in map(int, sys.argv[2:])):
        sys.exit(1)

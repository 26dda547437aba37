"""Every launch of every kernel by name, and what a target's assembler makes of it.

    python -m tests.kernels.every_launch sm_100 "attend v4-flash csa 64" "gather all"

prints, as JSON, a row per launch; TRITON_INTERPRET is unset. With --write in front the rows go into
the table of instruction counts (instructions.json) too: rewrite it when a kernel was changed on
purpose.

    python -m tests.kernels.every_launch --warmup sm_100 v41-flash 64

does it for one launch of each kind that a manager of that model can make, with so many heads.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.kernels.target import TARGETS, TRITON, Target, compiling_for
from dsv4.model import ModelSpec
from tests.kernels import (
    compiling,
    test_append_sm90,
    test_attend_hopper_sm90,
    test_attend_sm90,
    test_attend_whole_sm90,
    test_attend_wide_sm90,
    test_follow_sm90,
    test_gather_sm90,
    test_host_entries_sm90,
    test_index_query_sm90,
    test_index_scores_hopper_sm90,
    test_index_scores_sm90,
    test_index_scores_wide_sm90,
    test_top_k_sm90,
    test_write_records_sm90,
)
from tests.support.formats import BF16_INDEX_FORMATS
from tests.support.no_gpu import no_gpu

TABLE = Path(__file__).parent / "instructions.json"
HEADS = (4, 8, 16, 32, 64, 128)
MODELS = {"v4-flash": 512, "v4-pro": 1024}


def names(target: Target) -> list[str]:
    return list(_makers(target))


def rows(target: Target, wanted: list[str]) -> dict[str, dict[str, Any]]:
    """What comes of these launches on a target."""
    return compiled(target, launches(target, wanted))


def compiled(target: Target, launched: Iterable[tuple[str, Launch]]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, launch in launched:
        with contextlib.redirect_stdout(sys.stderr):  # ptxas prints there what it refuses
            made = compiling.compiled(launch, target)
        found[name] = {
            "triton": TRITON,
            "registers": made.registers,
            "threads": target.wave * launch.options["num_warps"],
            "shared_bytes": made.dynamic_shared_bytes,
            "tensor_columns": made.tensor_columns,
            "spill_bytes": made.spill_bytes,
            "spills_in_loops": [loop.spills for loop in made.loops if loop.products],
            "spills_in_plain_loops": [] if made.products else [loop.spills for loop in made.loops],
            "instructions": made.instructions,
            "products": made.products,
            "begins_early": target.options(**launch.options).get("launch_pdl", False),
            "before_begin": made.before_begin,
            "loops": [loop.instructions for loop in made.loops if loop.products],
        }
    return found


def _makers(target: Target) -> dict[str, Callable[[], Launch]]:
    found: dict[str, Callable[[], Launch]] = {}
    if target.is_hopper:
        for case in test_attend_hopper_sm90.CASES:
            found[f"hopper attend {case}"] = partial(test_attend_hopper_sm90.launch, case)
        for case in test_attend_whole_sm90.CASES:
            found[f"hopper attend whole {case}"] = partial(test_attend_whole_sm90.launch, case)
        for case in test_attend_wide_sm90.CASES:
            found[f"hopper attend wide {case}"] = partial(test_attend_wide_sm90.launch, case)
        for case in ("flash csa", "flash hca", "window"):
            found[f"decode {case}"] = partial(test_attend_wide_sm90.decode_launch, case)
        found["hopper scores"] = test_index_scores_hopper_sm90.launch
        found["hopper scores v41"] = partial(test_index_scores_hopper_sm90.launch, heads=32)
        for case in test_index_scores_wide_sm90.CASES:
            found[f"hopper scores {case}"] = partial(test_index_scores_wide_sm90.launch, case)
    for case, shape in test_append_sm90.CASES.items():
        found[f"append {case}"] = partial(test_append_sm90.launch, *shape)
    csa, hca = test_attend_sm90.CSA_LAYER, test_attend_sm90.HCA_LAYER
    for model, listed in MODELS.items():
        for heads in HEADS:
            for kind, layer, entries in (("csa", csa, listed), ("hca", hca, None)):
                for chunk in (False, True):
                    name = f"attend {model} {kind} {heads}" + (" chunk" if chunk else "")
                    found[name] = partial(
                        test_attend_sm90.attend_launch, model, heads, layer, entries, chunk
                    )
    window = test_attend_sm90.WINDOW_LAYER
    attend = test_attend_sm90.attend_launch
    for model, heads in (("v4-flash", 8), ("v4-flash", 32), ("v4-flash", 64), ("v41-flash", 64)):
        found[f"attend {model} window {heads}"] = partial(attend, model, heads, window, None, False)
    found["attend v4-flash window 64 chunk"] = partial(attend, "v4-flash", 64, window, None, True)
    # one split: as a window's is, and the queries of a draft step over one window
    found["attend v4-flash hca 64 at 8k"] = partial(
        attend, "v4-flash", 64, hca, None, False, max_context=8_192
    )
    found["attend v41 draft"] = partial(attend, "v41-flash", 64, window, None, True, joint=True)
    for record in ("fp8_row", "bf16"):
        for chunk in (False, True):
            found[f"attend {record} csa 64" + (" chunk" if chunk else "")] = partial(
                attend, "v4-flash", 64, csa, 512, chunk, entry_format=record
            )
    for case in ("v41", "v41 chunk"):
        shape = test_attend_sm90.CASES[case]
        found[f"attend {case}"] = partial(test_attend_sm90.attend_launch, *shape)
    cut = test_attend_sm90.CASES["v41 chunk"]
    found["attend v41 chunk cut"] = partial(test_attend_sm90.attend_launch, *cut, cut=True)
    for case in test_write_records_sm90.RECORDS:
        found[f"write {case}"] = partial(test_write_records_sm90.launch, case)
    for case, narrow in test_follow_sm90.CASES.items():
        found[f"follow {case}"] = partial(test_follow_sm90.launch, narrow)
    for case in test_gather_sm90.CASES:
        found[f"gather {case}"] = partial(test_gather_sm90.launch, case)
    for case in test_host_entries_sm90.CASES:
        found[f"host entries {case}"] = partial(test_host_entries_sm90.launch, case)
    for record in BF16_INDEX_FORMATS:
        found[f"query {record}"] = partial(test_index_query_sm90.launch, record)
    for case, scored in test_index_scores_sm90.CASES.items():
        found[f"scores {case}"] = partial(test_index_scores_sm90.launch, *scored)
    for case, listed_rows in test_top_k_sm90.CASES.items():
        found[f"top-k {case}"] = partial(test_top_k_sm90.launch, *listed_rows)
    found["top-k columns"] = test_top_k_sm90.columns_launch
    return found


def launches(target: Target, wanted: list[str]) -> Iterator[tuple[str, Launch]]:
    makers = _makers(target)
    with compiling_for(target):
        for name in wanted:
            yield name, makers[name]()


def warmup_launches(target: Target, model: str, heads: int) -> list[tuple[str, Launch]]:
    """One of each kind that a manager can make of its model on a GPU of this target."""
    with no_gpu(hopper=target.is_hopper) as gpu, compiling_for(target):
        schema = CacheSchema.build(ModelSpec.preset(model), max_context=131_072)
        manager = KVCacheManager(schema, num_blocks=8, max_requests=8, max_step_tokens=1024)
        manager.warmup(heads=heads, workers=1, progress=False)
    numbers = Counter[str]()
    found = []
    for launch in gpu.asked:
        kernel = launch.kernel.fn.__name__.strip("_").removesuffix("_kernel")
        numbers[kernel] += 1
        found.append((f"warmup {model} {heads}: {kernel} {numbers[kernel]}", launch))
    return found


def main(arguments: list[str]) -> None:
    if arguments[0] == "--warmup":
        target, model, heads = arguments[1:]
        kinds = warmup_launches(TARGETS[target], model, int(heads))
        print(json.dumps(compiled(TARGETS[target], kinds)))
        return
    write = arguments[0] == "--write"
    target, *wanted = arguments[write:]
    found = rows(TARGETS[target], wanted or names(TARGETS[target]))
    if write:
        table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        kept = table.setdefault(target, {})
        for name, row in found.items():
            kept[name] = {key: row[key] for key in ("instructions", "loops")}
        TABLE.write_text(_lines(table))
    print(json.dumps(found))


def _lines(table: dict[str, dict[str, Any]]) -> str:
    """JSON with a line per launch."""
    targets = []
    for target, kept in sorted(table.items()):
        launched = [f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
        targets.append(f" {json.dumps(target)}: {{\n" + ",\n".join(launched) + "\n }")
    return "{\n" + ",\n".join(targets) + "\n}\n"


if __name__ == "__main__":
    main(sys.argv[1:])

"""transformers' own tests of DeepSeek-V4, run on our caches.

    python tools/transformers_own_tests.py [paged] [fast] [--source DIR] [--list] [--logs DIR]

`paged`: generate makes a PagedCache where it would make its own cache. `fast`: models are
accelerated at their first forward or generate without gradients. Everything else is as transformers
wrote it. Wheels and source distributions have no model tests, so the repository at the installed
version is needed: DIR, or $TRANSFORMERS_SOURCE, or what can be downloaded. Where it cannot be had,
that is said and nothing runs.

One thing is changed in all runs: many of these tests draw masks with padding on the right, which
generate cannot make sense of and we refuse; such a mask is replaced by one without padding.

Tests that also fail without us are left aside. Of the others those of EXPECTED fail, each for the
reason given there; `--list` prints what ran.

Exit code 0: exactly those fail, or nothing could run; 1: another one does, or one of them passes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import types
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
ARCHIVE = "https://github.com/huggingface/transformers/archive/refs/tags/v{version}.tar.gz"
TEST_FILE = "tests/models/deepseek_v4/test_modeling_deepseek_v4.py"
# what a cache can make a difference to; training, saving, exporting and pipelines are left out
CHOSEN = (
    "DeepseekV4ModelTest and (generate or cache or beam or greedy or sample or assisted or lookup "
    "or past or padding or hidden_states or outputs_equivalence or inputs_embeds or batching or "
    "attention_outputs) and not (training or save or load or export or pipeline or tp_ or fsdp or "
    "resize or flash or sdpa or compile or offload or disk or parallel)"
)
TIMEOUT_S = 3600

_PADDED = "rows are padded, which a PagedCache with an unmodified model refuses"
# test -> why it fails
EXPECTED: dict[str, dict[str, str]] = {
    "paged": {
        "test_generate_continue_from_past_key_values": _PADDED,
        "test_generate_from_random_inputs_embeds": _PADDED,
        "test_generate_with_and_without_position_ids": _PADDED,
        "test_eager_padding_matches_padding_free_with_position_ids": (
            "transformers skips it for stateful models; in bf16 its norms, which stay fp32, raise "
            "without any cache of ours"
        ),
    },
    "fast": {
        "test_generate_continue_from_past_key_values": (
            "it compares layers[i].keys of rows that are padded, which have no common shape"
        ),
    },
}


# ---- run by main ---------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("caches", nargs="*", default=list(EXPECTED))
    parser.add_argument("--source", type=Path, default=os.environ.get("TRANSFORMERS_SOURCE"))
    parser.add_argument("--logs", type=Path, help="a directory for pytest's output")
    parser.add_argument("--list", action="store_true", help="print what ran, and how it went")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = find_source(options.source and Path(options.source), Path(scratch))
        if isinstance(source, str):
            print(f"not run: {source}")
            return 0
        places = Path(scratch), options.logs
        own = run(source, "own", *places)
        found = {cache: run(source, cache, *places) for cache in options.caches}
    if options.list:
        for name in sorted(own):
            print(*(f"{each.get(name, 'absent'):8}" for each in (own, *found.values())), name)
    as_expected = [compare(cache, own, ours) for cache, ours in found.items()]
    return 0 if all(as_expected) else 1


def compare(cache: str, own: dict[str, str], ours: dict[str, str]) -> bool:
    """Reports and returns whether exactly the expected tests fail."""
    failed = {name for name, outcome in ours.items() if outcome == "failed"}
    failed -= {name for name, outcome in own.items() if outcome == "failed"}
    expected = EXPECTED[cache]
    ran = sum(outcome != "skipped" for outcome in ours.values())
    print(f"{cache}: {ran} tests ran, {len(failed)} fail, {len(expected)} are expected to")
    for name in sorted(failed - set(expected)):
        print(f"  fails: {name}")
    for name in sorted(set(expected) - failed):
        print(f"  expected to fail, and does not: {name} ({expected[name]})")
    return failed == set(expected)


def find_source(given: Path | None, scratch: Path) -> Path | str:
    """A tree with the tests of the installed version, or why there is none."""
    version = importlib.metadata.version("transformers")
    if importlib.util.find_spec("parameterized") is None:
        return "the package parameterized is missing, which the tests need: pip install it"
    if given is not None:
        return given if (given / TEST_FILE).exists() else f"{given} has no {TEST_FILE}"
    address = ARCHIVE.format(version=version)
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            archive = scratch / "transformers.tar.gz"
            archive.write_bytes(answer.read())
    except OSError as error:
        return f"{address} cannot be read ({error}): give a checkout with --source"
    with tarfile.open(archive) as files:
        files.extractall(scratch, filter="data")
    return scratch / f"transformers-{version}"


def run(source: Path, mode: str, scratch: Path, logs: Path | None = None) -> dict[str, str]:
    """ "passed", "failed" or "skipped" of each chosen test."""
    report = scratch / f"{mode}.xml"
    # one thread each: the models are tiny
    paths = [str(source), str(source / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tools.transformers_own_tests", TEST_FILE),
        *("-k", CHOSEN, "-n", "0", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore"),
        f"--junitxml={report}",
    ]
    done = subprocess.run(
        command,
        cwd=source,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "DSV4_CACHE": mode, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if not report.exists() or "Interrupted" in done.stdout:
        raise RuntimeError(f"the tests cannot be collected:\n{done.stdout[-3000:]}{done.stderr}")
    if logs is not None:
        (logs / f"{mode}.log").write_text(done.stdout)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        outcome = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        outcomes[case.attrib["name"]] = outcome
    return outcomes


# ---- loaded by pytest, in the process that main starts -------------------------------------------


def pytest_configure(config: Any) -> None:
    """Stands in for what the test files import and these tests do not use, and puts our cache into
    the models."""
    sys.modules.setdefault("datasets", _Absent("datasets"))
    _replace_masks()
    mode = os.environ["DSV4_CACHE"]
    if mode == "paged":
        _use_paged_caches()
    elif mode == "fast":
        _use_the_fast_path()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The fast path forms no attention weights: transformers' own switch for such models."""
    if os.environ["DSV4_CACHE"] == "fast":
        for item in items:
            item.cls.has_attentions = False


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _replace_masks() -> None:
    import torch
    from transformers import DeepseekV4ForCausalLM

    from dsv4.integrations.transformers.generate import FastGenerate

    def without_padding(own: Any) -> Any:
        @functools.wraps(own)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            mask = options.get("attention_mask")
            if options.get("position_ids") is not None:
                mask = None  # they count what the mask shows
            if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1]:
                shown = mask.bool()
                if bool((shown[:, :-1] & ~shown[:, 1:]).any()):
                    options["attention_mask"] = torch.ones_like(mask)
            return own(self, *args, **options)

        return call

    for owner, name in (
        *((DeepseekV4ForCausalLM, "forward"), (DeepseekV4ForCausalLM, "generate")),
        (FastGenerate, "__call__"),
    ):
        setattr(owner, name, without_padding(getattr(owner, name)))


def _use_paged_caches() -> None:
    from transformers import DeepseekV4ForCausalLM, DynamicCache

    from dsv4.integrations.transformers import PagedCache

    own = DeepseekV4ForCausalLM._prepare_cache_for_generation

    def prepare(
        self: Any, config: Any, given: dict[str, Any], mode: Any, batch: int, most: int
    ) -> None:
        own(self, config, given, mode, batch, most)
        made = given.get("past_key_values")
        if type(made) is DynamicCache and not getattr(made, "_is_user_defined", False):
            given["past_key_values"] = PagedCache.for_model(
                self,
                max_batch=batch * max(config.num_beams, config.num_return_sequences),
                max_context=self.config.max_position_embeddings,
                max_draft_tokens=4,
            )

    DeepseekV4ForCausalLM._prepare_cache_for_generation = prepare
    DeepseekV4ForCausalLM._is_stateful = False


def _use_the_fast_path() -> None:
    import torch
    from transformers import DeepseekV4ForCausalLM

    from dsv4.integrations.transformers import accelerate
    from dsv4.integrations.transformers.accelerate import is_accelerated

    def ready(self: Any) -> bool:
        """Whether the model has just become accelerated."""
        if self.training or torch.is_grad_enabled() or is_accelerated(self):
            return False
        accelerate(
            self,
            max_batch=32,
            max_context=self.config.max_position_embeddings,
            records="bf16",
            max_draft_tokens=4,
        )
        return True

    own_forward, own_generate = DeepseekV4ForCausalLM.forward, DeepseekV4ForCausalLM.generate

    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        ready(self)
        return own_forward(self, *args, **options)

    @functools.wraps(own_generate)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            if ready(self):
                return self.generate(*args, **options)
            return own_generate(self, *args, **options)

    DeepseekV4ForCausalLM.forward, DeepseekV4ForCausalLM.generate = forward, generate
    DeepseekV4ForCausalLM._is_stateful = False


if __name__ == "__main__":
    sys.exit(main())

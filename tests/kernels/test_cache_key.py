"""Kernels have the same keys in Triton's cache whatever a process has compiled before, and others
when anything is another that their binaries depend on."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiling import environment, run_apart

APPEND = "dsv4.kernels.append._append_kernel"
WRITE = "dsv4.kernels.write_records._write_records_kernel"
ATTEND = "dsv4.kernels.hopper.attend._attend_hopper_kernel"
# calls nothing and asks nothing
EXP = "dsv4.kernels.numerics.exp_nonpositive"


@cache
def found(*case: str) -> Any:
    return run_apart("tests.kernels.test_cache_key", *case)


def test_keys_do_not_depend_on_the_process_nor_on_the_order_in_which_they_are_asked_for() -> None:
    other = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_cache_key", "down"],
        cwd=Path(__file__).parents[2],
        env={**environment(), "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
    )
    assert json.loads(other.stdout)["keys"] == found("up")["keys"]
    assert len(found("up")["keys"]) > 100


def test_keys_do_not_depend_on_those_that_triton_has_made_before() -> None:
    assert found("up", "made before")["keys"] == found("up")["keys"]


def test_no_kernel_knows_two_constants_by_one_name() -> None:
    """Triton puts those of one name into the order of their modules' addresses."""
    assert found("up")["ambiguous"] == []


@pytest.mark.parametrize(
    ("change", "others", "same"),
    [
        ("a fact of a target", {APPEND, WRITE, ATTEND}, {EXP}),
        ("the code that asks for a target", {APPEND, WRITE, ATTEND}, {EXP}),
        ("gluon's dialect", {ATTEND}, {APPEND, WRITE, EXP}),
        ("the barrier of the dialect", {ATTEND}, {APPEND, WRITE, EXP}),
        ("the columns of requests", {APPEND}, {WRITE, EXP}),
    ],
)
def test_keys_are_others_when_what_triton_does_not_look_into_is(
    change: str, others: set[str], same: set[str]
) -> None:
    before, after = found("up")["keys"], found("up", change)["keys"]
    assert before.keys() == after.keys()
    assert {name for name in others | same if before[name] != after[name]} == others


def test_every_kernel_asks_for_its_target() -> None:
    """A kernel waits for the launch in front where the target has launches begin early."""
    before, after = found("up")["keys"], found("up", "a fact of a target")["keys"]
    assert [
        name for name in before if name.endswith("_kernel") and before[name] == after[name]
    ] == []


@pytest.mark.parametrize("change", ["a fact of a target", "options of a target", "a launch"])
def test_notes_of_what_is_compiled_are_others_too(change: str) -> None:
    assert found("up", change)["note"] != found("up")["note"]
    assert found("up")["note"] == found("up", "gluon's dialect")["note"]  # which it does not use


def main(order: str, *changes: str) -> None:
    import torch
    from triton.runtime.jit import JITCallable

    import dsv4.kernels
    from dsv4.kernels import warmup
    from dsv4.kernels.cache_key import cache_key
    from tests.kernels.test_write_records_sm90 import launch

    kernels: dict[str, Any] = {}
    for module in pkgutil.walk_packages(dsv4.kernels.__path__, "dsv4.kernels."):
        for name, value in vars(import_module(module.name)).items():
            if isinstance(value, JITCallable):
                kernels[f"{module.name}.{name}"] = value
    given = launch("entries")
    for change in changes:
        if change == "made before":
            _ = [kernel.cache_key for kernel in kernels.values()]
        elif change == "a launch":  # the same numbers for other options
            options = given.options
            swapped = dict(zip(reversed(options), options.values(), strict=True))
            given = given._replace(options=swapped)
        else:
            _change(change)
    keys = {name: cache_key(kernels[name]) for name in sorted(kernels, reverse=order == "down")}
    torch.cuda.current_device = lambda: 0
    note = warmup.note_path(given, warmup.job_of(given, "sm_90")).name
    ambiguous = [*filter(None, map(_ambiguous, kernels.values()))]
    print(json.dumps({"keys": keys, "note": note, "ambiguous": ambiguous}))


def _change(change: str) -> None:
    from dsv4.kernels import cache_key, target
    from dsv4.kernels.hopper import attend_parts, dialect
    from dsv4.ops.columns import RequestColumns

    def edited(module: Any, before: str, after: str) -> None:
        source = cache_key._source
        texts = {module.__name__: source(module.__name__).replace(before, after)}
        assert texts[module.__name__] != source(module.__name__)
        cache_key._source = lambda name: texts.get(name) or source(name)  # type: ignore[assignment]

    def more_options(self: target.Target, **asked: Any) -> dict[str, Any]:
        return {**asked, "maxnreg": 64}

    changes: dict[str, Callable[[], object]] = {
        "a fact of a target": lambda: target.TARGETS.update(
            sm_90=replace(target.TARGETS["sm_90"], converts_e4m3=False)
        ),
        "options of a target": lambda: setattr(target.Target, "options", more_options),
        "the code that asks for a target": lambda: edited(target, "0x80008000", "0"),
        "gluon's dialect": lambda: edited(dialect, "_semantic=_semantic", ""),
        "the barrier of the dialect": lambda: setattr(
            attend_parts, "thread_barrier", attend_parts.reinterpret
        ),
        "the columns of requests": lambda: setattr(
            RequestColumns, "_fields", ("start", "slot", "count", "first_row")
        ),
    }
    changes[change]()


def _ambiguous(kernel: Any) -> str | None:
    from triton.language.core import constexpr

    seen: dict[str, str] = {}
    for (name, _), (value, _) in kernel.used_global_vals.items():
        if isinstance(value, constexpr) and seen.setdefault(name, str(value)) != str(value):
            return f"{kernel.fn.__name__}: {name}"
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])

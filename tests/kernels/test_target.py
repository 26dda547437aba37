"""What is said of GPUs and Tritons, and which kernel runs where."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.errors import TritonError

from dsv4.backends import load_backend
from dsv4.errors import UnsupportedGpu
from dsv4.kernels import backend, target
from dsv4.kernels.backend import TritonBackend
from dsv4.kernels.codes import e4m3_times_bf16
from dsv4.kernels.target import (
    ATTENTION_TILES,
    TARGETS,
    Target,
    TileRule,
    attention_rule,
    attention_tiles,
    compiling_for,
    named_target,
    target_of,
)
from tests.kernels import every_launch
from tests.reference.test_attend import make_step

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def a_gpu(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    """Which kernels are compiled for."""
    found = SimpleNamespace(**properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(backend, "INTERPRETED", tl.constexpr(False))
    target._target_of.cache_clear()


@pytest.fixture(autouse=True)
def _forget_devices() -> Any:
    yield
    target._target_of.cache_clear()


def test_an_unknown_gpu_is_refused_when_the_backend_is_made(monkeypatch: pytest.MonkeyPatch):
    a_gpu(monkeypatch, name="Tesla V100", major=7, minor=0)
    with pytest.raises(UnsupportedGpu, match=r"Tesla V100 is sm_70: use backend='reference'"):
        TritonBackend(GPU)


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [
        ("Tesla T4", (7, 5)),
        ("Orin", (8, 7)),
        ("NVIDIA Thor", (11, 0)),
        ("NVIDIA GB10", (12, 1)),
        ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-"),
        ("AMD Radeon RX 7900 XTX", "gfx1100"),
    ],
)
def test_whatever_gpu_is_not_listed_is_named_with_what_to_use_instead(
    gpu: str, arch: tuple[int, int] | str, monkeypatch: pytest.MonkeyPatch
):
    if isinstance(arch, str):
        monkeypatch.setattr(torch.version, "hip", "7.0")
        a_gpu(monkeypatch, name=gpu, gcnArchName=arch, major=9, minor=0)
        name = arch.partition(":")[0]
    else:
        a_gpu(monkeypatch, name=gpu, major=arch[0], minor=arch[1])
        name = f"sm_{arch[0]}{arch[1]}"
    for asked in (None, "triton"):
        with pytest.raises(UnsupportedGpu, match=f"{gpu} is {name}: use backend='reference'"):
            load_backend(asked, GPU)  # type: ignore[arg-type]
    assert load_backend("reference", GPU).name == "reference"


def test_two_gpus_have_a_target_each(monkeypatch: pytest.MonkeyPatch):
    a_gpu(monkeypatch, name="", major=0, minor=0)
    found = [
        SimpleNamespace(name="A100", major=8, minor=0),
        SimpleNamespace(name="T4", major=7, minor=5),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
    assert TritonBackend(torch.device("cuda:0"))._attend is None
    with pytest.raises(UnsupportedGpu, match="T4 is sm_75"):
        TritonBackend(torch.device("cuda:1"))


@pytest.mark.parametrize("name", [n for n in TARGETS if n.startswith("sm_")])
def test_a_gpu_is_known_by_its_capability(name: str, monkeypatch: pytest.MonkeyPatch):
    major, minor = divmod(int(name[3:]), 10)
    a_gpu(monkeypatch, name="a GPU", major=major, minor=minor)
    assert target_of(GPU).name == name


def test_an_amd_gpu_is_known_by_the_name_of_its_architecture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    a_gpu(monkeypatch, name="MI300X", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    assert target_of(GPU) is TARGETS["gfx942"]


def test_products_of_bf16_become_fused_where_there_are_none():
    ptx = e4m3_times_bf16("$3", "$4")
    for one in TARGETS.values():
        with compiling_for(one):
            found = target.bf16_products(ptx)
        assert ("mul.rn.bf16x2" in found) == one.multiplies_bf16
        assert found.count("fma.rn.bf16x2") == (0 if one.multiplies_bf16 else 4)


def test_options_that_only_nvidia_has_are_left_out_for_amd():
    asked = {"num_warps": 4, "enable_fp_fusion": True}
    assert named_target("gfx942", gpu="MI300X").options(**asked, maxnreg=64) == asked
    bounded = {**asked, "maxnreg": 64}
    assert TARGETS["sm_80"].options(**bounded) == bounded


class CannotCompile(TritonError):
    pass


@pytest.mark.parametrize(
    ("operation", "own_kernel"),
    [
        ("attend", "_attend"),
        ("attend", "_whole_attend"),
        ("attend", "_wide_attend"),
        ("index_scores", "_index_scores"),
        ("index_scores", "_wide_scores"),
    ],
)
def test_a_kernel_that_cannot_be_compiled_is_replaced_with_one_warning(
    operation: str,
    own_kernel: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    a_gpu(monkeypatch, name="H200", major=9, minor=0)
    made = TritonBackend(GPU)
    own = getattr(made, own_kernel)
    for other in (
        made._attend,
        made._wide_attend,
        made._whole_attend,
        made._index_scores,
        made._wide_scores,
    ):
        if other is not None:
            other.module = SimpleNamespace(supports=lambda _: False)
    calls: list[str] = []

    def fails(_: object) -> None:
        calls.append("own")
        raise CannotCompile("a name is gone")

    own.module = SimpleNamespace(supports=lambda _: True, **{operation: fails})
    portable = getattr(backend, operation)
    monkeypatch.setattr(portable, operation, lambda _: calls.append("portable"))
    with pytest.warns(RuntimeWarning, match=f"Hopper's kernel of {operation}") as warned:
        getattr(made, operation)(None)
    assert len(warned) == 1
    assert not caplog.records  # which would be a second warning, where nobody has set up logging
    told = str(warned[0].message)
    what = {"_wide": " in chunks", "_whol": " of few batch-invariant queries"}.get(
        own_kernel[:5], ""
    )
    other = "the one of other steps, or the portable one," if what else "the portable one"
    assert f"of {operation}{what} (CannotCompile): {other} runs instead" in told
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(made, operation)(None)
    assert calls == ["own", "portable", "portable"]


@pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError])
def test_an_operation_whose_gluon_is_gone_warns_once(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    a_gpu(monkeypatch, name="H200", major=9, minor=0)
    asked = []

    def gone(name: str) -> None:
        asked.append(name.removeprefix("dsv4.kernels.hopper."))
        raise error("a name is gone")

    monkeypatch.setattr(backend, "import_module", gone)
    with pytest.warns(RuntimeWarning) as warned:
        made = TritonBackend(GPU)
    assert asked == ["attend", "index_scores"]
    assert len(warned) == 2
    assert made._attend is not None
    assert made._attend.module is made._wide_attend is made._wide_scores is None


def test_a_batch_invariant_backend_asks_for_whole_queries(monkeypatch: pytest.MonkeyPatch):
    a_gpu(monkeypatch, name="H200", major=9, minor=0)
    step = make_step([(8, 1)], kind="swa")
    call = step.call(out=step.q, lse=step.q)
    seen: list[bool] = []
    for wanted in (False, True):
        made = TritonBackend(GPU, batch_invariant=wanted)
        kernel = SimpleNamespace(
            supports=lambda _: True, attend=lambda c: seen.append(c.batch_invariant)
        )
        assert made._attend is not None
        made._attend.module, made._wide_attend = kernel, None
        made.attend(call)
    assert seen == [False, True]


def test_few_whole_queries_are_not_hopper_s_where_many_are_not(monkeypatch: pytest.MonkeyPatch):
    """The portable kernel has other bits."""
    a_gpu(monkeypatch, name="H200", major=9, minor=0)
    step = make_step([(8, 1)], kind="swa")
    few = step.call(out=step.q, lse=step.q)
    many = replace(few, tokens_per_request=2)
    made = TritonBackend(GPU, batch_invariant=True)
    ran: list[str] = []

    def fails(_: object) -> None:
        raise CannotCompile("too many registers")

    assert made._attend is not None
    assert made._whole_attend is not None
    made._attend.module = SimpleNamespace(supports=lambda _: True, attend=fails)
    made._whole_attend.module = SimpleNamespace(
        supports=lambda call: call.tokens_per_request == 1, attend=lambda _: ran.append("whole")
    )
    monkeypatch.setattr(backend.attend, "attend", lambda _: ran.append("portable"))
    made.attend(few)
    with pytest.warns(RuntimeWarning, match="Hopper's kernel of attend"):
        made.attend(many)
    made.attend(few)
    assert ran == ["whole", "portable", "portable"]


def test_interpreted_kernels_are_the_portable_ones():
    made = TritonBackend(CPU)
    assert made._attend is None
    assert made._index_scores is None


def test_interpreted_kernels_are_the_portable_ones_on_an_h200_too(monkeypatch: pytest.MonkeyPatch):
    a_gpu(monkeypatch, name="H200", major=9, minor=0)
    monkeypatch.setattr(backend, "INTERPRETED", tl.constexpr(True))
    made = TritonBackend(GPU)
    assert made._attend is made._wide_attend is made._index_scores is made._wide_scores is None


def test_the_docs_list_every_target():
    text = (Path(__file__).parents[2] / "docs/gpus.md").read_text()
    for one in TARGETS.values():
        shared = one.shared_bytes // 1024
        e4m3 = "instructions" if one.converts_e4m3 else "integer arithmetic"
        tiles = attention_tiles(one, 64, crowded=False, fp32_scales=False)
        row = f"| {one.name} | {one.gpus} | {shared} KB | {one.products} | {e4m3} | "
        assert f"{row}{tiles.heads} \u00d7 {tiles.keys}" in text


def test_every_rule_for_tiles_is_met_by_a_launch_that_is_compiled(monkeypatch: pytest.MonkeyPatch):
    """With one of the Tritons that are supported: of each target those in every_launch's table, and
    those that a manager of V4.1 with 32 heads makes on sm_100 (both in test_every_target.py)."""
    met: list[TileRule] = []

    def rule(made_for: Target, heads: int, **records: bool) -> TileRule:
        met.append(attention_rule(made_for, heads, **records))
        return met[-1]

    monkeypatch.setattr(target, "attention_rule", rule)
    for triton in ((3, 6), (3, 7), (3, 8), (3, 9)):
        monkeypatch.setattr(target, "TRITON", triton)
        for one in TARGETS.values():
            names = [name for name in every_launch.names(one) if name.startswith("attend")]
            assert list(every_launch.launches(one, names))
        assert every_launch.warmup_launches(TARGETS["sm_100"], "v41-flash", 32)
    for rule_of_tiles in ATTENTION_TILES:
        assert rule_of_tiles in met, rule_of_tiles


def test_tiles_that_a_gpu_has_run_are_hopper_s():
    """The H200 of the tests has Triton 3.6."""
    for rule in ATTENTION_TILES:
        assert rule.why
        assert not rule.was_run or (rule.products == "wgmma" and rule.since <= (3, 6))


# How a program finds out what it runs on. A version and the name of a GPU may be told, but not
# compared.
TOLD = {"__version__", "get_device_name"}
ASKS = {
    *("get_device_capability", "get_device_properties", "gcnArchName"),
    *("get_arch_list", "cuda_capability_geq", "cuda_capability", "is_hip", "is_cuda_backend"),
    *("current_target", "get_current_target", "arch", "hip"),
}
FOLDERS = ("dsv4/**/*.py", "tests/gpu/*.py", "examples/*.py", "benchmarks/*.py", "tools/*.py")
ARCHITECTURE = re.compile(r"(sm_?|gfx|compute_)\d\d")


def asks_for_a_target(tree: ast.AST) -> Iterator[str]:
    """What in a source tests for an architecture or a version, docstrings and messages apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "dsv4.kernels.target":
            yield from (name.name for name in node.names if name.name == "TRITON")
        if isinstance(node, ast.Attribute) and node.attr in ASKS:
            yield node.attr
        if isinstance(node, ast.Name | ast.alias):
            name = node.id if isinstance(node, ast.Name) else node.name.rpartition(".")[2]
            if name in ASKS:
                yield name
        if isinstance(node, ast.Compare | ast.match_case | ast.Subscript):
            inside = list(ast.walk(node))
            yield from (n.attr for n in inside if isinstance(n, ast.Attribute) and n.attr in TOLD)
            yield from (
                n.value
                for n in inside
                if isinstance(n, ast.Constant)
                and isinstance(n.value, str)
                and ARCHITECTURE.match(n.value)
            )


@pytest.mark.parametrize(
    "source",
    [
        "if torch.cuda.get_device_capability()[0] >= 10: pass",
        "if torch.version.hip: pass",
        "wide = target.arch == 90",
        "new = triton.__version__ >= '3.7'",
        "if name == 'sm_100': pass",
        "wide = 'H200' in torch.cuda.get_device_name()",
        "tiles = TILES['gfx942']",
        "found = driver.active.get_current_target()",
        "from dsv4.kernels.target import TRITON",
    ],
)
def test_a_test_for_an_architecture_is_seen(source: str):
    assert list(asks_for_a_target(ast.parse(source)))


def test_nothing_else_tests_for_an_architecture_or_a_version():
    root = Path(target.__file__).parents[2]
    tests = (root / "tests/conftest.py", root / "tests/support/needs.py")
    found = {
        str(path.relative_to(root)): told
        for path in (*(path for folder in FOLDERS for path in root.glob(folder)), *tests)
        if path != Path(target.__file__)
        and (told := sorted(asks_for_a_target(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {}

"""Other libraries in the same run, with stand-ins for them: what they are called with, and that one
that is missing or fails costs nothing but its own figure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import installed, run, timing
from benchmarks.case import Case, Measurement, Work
from benchmarks.registry import SUITES
from benchmarks.timing import Ceilings, Timed
from dsv4.plots.results import SUITES as DRAWN
from tests.support.numbers import Numbers


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    installed._found.cache_clear()
    yield
    installed._found.cache_clear()


def pretend(patch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    """A module that can be imported, with all that it is inside of."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []  # type: ignore[attr-defined]
        patch.setitem(sys.modules, module.__name__, module)
    for key, value in content.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def none_installed(patch: pytest.MonkeyPatch) -> None:
    for peer in installed.PEERS:
        patch.setitem(sys.modules, peer.module.partition(".")[0], None)


def test_every_peer_belongs_to_suites_that_there_are() -> None:
    assert set(installed.SUITES) <= set(SUITES)


def test_a_peer_is_found_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    none_installed(monkeypatch)
    assert installed.modules() == {}
    assert set(installed.missing()) == {peer.name for peer in installed.PEERS}
    installed._found.cache_clear()
    pretend(monkeypatch, "deep_gemm", __version__="2.5.1")
    pretend(monkeypatch, "flash_mla.flash_mla_interface")
    assert [*installed.modules()] == ["FlashMLA", "DeepGEMM fp8"]
    assert [*installed.flash_mla_modules()] == ["FlashMLA"]
    assert installed.version_of("DeepGEMM fp8") == "2.5.1"
    assert installed.version_of("FlashMLA") == "unknown version"
    found = installed.versions(["torch.topk", "DeepGEMM fp8", "not invariant"])
    assert found == "DeepGEMM fp8 2.5.1"


def test_one_whose_build_does_not_load_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    none_installed(monkeypatch)

    def load(name: str) -> ModuleType:
        if name == "deep_gemm":
            raise OSError("libcudart.so.14: cannot open shared object file")
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(installed, "import_module", load)
    assert installed.modules() == {}
    assert "libcudart.so.14" in installed.missing()["DeepGEMM fp8"]


class DeepGemm:
    """Checks what its kernels are called with, and computes the scores."""

    def __init__(self) -> None:
        self.tables = list[torch.Tensor]()

    def get_num_sms(self) -> int:
        return 132

    def get_paged_mqa_logits_metadata(self, lengths: torch.Tensor, page: int, sms: int) -> str:
        assert lengths.dtype == torch.int32
        assert (page, sms) == (64, 132)
        return "schedule"

    def fp8_paged_mqa_logits(
        self, q: Any, keys: Any, weights: Any, lengths: Any, table: Any, schedule: Any, most: int,
        *, clean_logits: bool,
    ) -> torch.Tensor:  # fmt: skip
        requests, one, heads, width = q.shape
        assert (one, schedule, clean_logits, q.dtype) == (1, "schedule", False, torch.float8_e4m3fn)
        assert keys.shape[1:] == (64, 1, width + 4)
        assert (weights.shape, weights.dtype) == ((requests, heads), torch.float32)
        assert int(lengths.max()) == most <= table.shape[1] * 64
        assert table.shape[0] == requests
        assert len(table.unique()) == table.numel()
        self.tables.append(table)
        found = keys[table.long()].flatten(1, 2)[:, :most, 0]
        scales = found[..., width:].contiguous().view(torch.float32)
        assert bool((scales == 1).all())
        values = found[..., :width].contiguous().view(torch.float8_e4m3fn).float() * scales
        assert bool(values.isfinite().all())
        products = torch.einsum("bhd,bkd->bkh", q[:, 0].float(), values).relu()
        return (products * weights[:, None]).sum(-1)


def test_scores_are_asked_of_deep_gemm_as_it_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    none_installed(monkeypatch)
    assert installed.index_score_peers(1, 64, heads=2, width=8, sets=1, device="cpu") == {}
    installed._found.cache_clear()
    kernel = DeepGemm()
    names = ("get_num_sms", "get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits")
    pretend(monkeypatch, "deep_gemm", **{name: getattr(kernel, name) for name in names})
    found = installed.index_score_peers(3, 200, heads=4, width=32, sets=2, device="cpu")
    calls = found["DeepGEMM fp8"]
    assert len(calls) == 2
    for call in calls:
        call()
    first, last = kernel.tables[-2:]
    assert set(first.flatten().tolist()).isdisjoint(last.flatten().tolist())  # keys of their own


def test_top_ks_are_asked_for_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    none_installed(monkeypatch)
    scores = Numbers(0).normal(3, 50)
    assert [*installed.top_k_peers(scores, 4)] == ["torch.topk"]
    installed._found.cache_clear()
    asked = list[str]()

    def sglang(given: torch.Tensor, lengths: torch.Tensor, count: int) -> None:
        assert given is scores
        assert (lengths.tolist(), lengths.dtype, count) == ([50] * 3, torch.int32, 4)
        asked.append("SGLang")

    def vllm(given: Any, lengths: Any, out: Any, workspace: Any, count: int, most: int) -> None:
        assert given is scores
        assert (lengths.tolist(), out.shape, out.dtype) == ([50] * 3, (3, 4), torch.int32)
        assert (workspace.dtype, count, most) == (torch.uint8, 4, 50)
        asked.append("vLLM")

    pretend(monkeypatch, "sgl_kernel", fast_topk_v2=sglang)
    pretend(monkeypatch, "vllm._C")
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(persistent_topk=vllm), raising=False)
    found = installed.top_k_peers(scores, 4)
    assert [*found] == ["torch.topk", "vLLM top-k", "SGLang top-k"]
    assert asked == ["vLLM", "SGLang"]


def test_a_peer_that_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RuntimeError("Only head dim 576 is supported\nmore of it")

    found = installed.working({"FlashMLA": lambda: [fails], "other": lambda: [lambda: None]})
    assert [*found] == ["other"]
    said = capsys.readouterr().out
    assert said == "left out: FlashMLA (RuntimeError: Only head dim 576 is supported)\n"


def test_one_that_cannot_be_captured_does_not_cost_our_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time(calls: Any) -> Timed:
        calls[0]()
        return Timed(microseconds=5.0, launches=1)

    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "time_graph", time)
    work = Work(calls=[lambda: None], must_move_bytes=1, peers={"A": [waits], "B": [lambda: None]})
    found = timing.measure(work)
    assert (found.microseconds, found.peers_us) == (5.0, {"B": 5.0})
    assert "left out: A (RuntimeError: operation not permitted" in capsys.readouterr().out


def test_a_run_of_peers_says_which_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none_installed(monkeypatch)
    assert not run.any_peer(["indexer"])
    said = capsys.readouterr()
    assert "not here: DeepGEMM fp8 (" in said.out
    assert "FlashMLA" not in said.out
    assert "benchmarks/peers.md" in said.err
    installed._found.cache_clear()
    pretend(monkeypatch, "deep_gemm", __version__="2.5.1")
    assert run.any_peer(["indexer", "attention"])
    assert "in the same run: DeepGEMM fp8 2.5.1" in capsys.readouterr().out
    assert not run.any_peer(["attention"])


def test_only_suites_with_peers_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--peers", "--only", "prefill"])
    with pytest.raises(SystemExit):
        run.main()
    assert "choose of attention, indexer" in capsys.readouterr().err


def test_a_result_says_the_version_of_what_it_was_timed_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none_installed(monkeypatch)
    pretend(monkeypatch, "deep_gemm", __version__="2.5.1")
    case = Case(name="a", suite="indexer", series="a", model="tiny", batch=1, measure=lambda: found)
    found = Measurement(
        microseconds=1.0, launches=1, must_move_bytes=1, peers_us={"DeepGEMM fp8": 2.0}
    )
    environment = {"commit": "c", "gpu": "g", "torch": "t", "triton": "t", "python": "p"}
    ceilings = Ceilings(copy_bytes_per_us=1.0, empty_launch_us=1.0)
    assert run.make_result(case, found, ceilings, environment).note == "DeepGEMM fp8 2.5.1"
    noted = run.make_result(case, replace(found, note="error 1e-3"), ceilings, environment)
    assert noted.note == "error 1e-3; DeepGEMM fp8 2.5.1"


def test_what_was_composed_or_published_is_in_no_picture() -> None:
    """Pictures have what was measured here, in the same run or, dashed, in another one."""
    others = {
        name
        for suite in DRAWN
        if run.can_run(suite)
        for case in SUITES[suite]()
        for name in case.anchors_us
    }
    assert others
    assert others.isdisjoint({"peers composed", "DeepSeek's papers"})

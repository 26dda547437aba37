"""`dsv4 demo`: what it reports is true, and it fails when the cache is wrong."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from dsv4.cli import app
from dsv4.demo import alone, prompts, restart
from dsv4.demo import story as demo
from dsv4.demo.bill import flash_bill
from dsv4.demo.events import (
    CacheState,
    DemoReport,
    PartBegins,
    PartResult,
    PrefixResult,
    StepEvent,
)
from dsv4.demo.model import random_prompt, speaking_v4, tiny_v4
from dsv4.demo.prefix import run_twice
from dsv4.demo.prompts import QUESTIONS, Prompts
from dsv4.demo.screen import demo_view, print_report
from dsv4.demo_model.cached import CachedLayer
from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.integrations.transformers.attention import FastAttention
from dsv4.integrations.transformers.layers import PagedLayer

CHECKPOINT = Checkpoint.load()
TEXTS = Prompts(CHECKPOINT)
PROMPTS = {name: TEXTS.asking(asked).tolist() for name, asked in QUESTIONS.items()}
LENGTHS = {name: len(ids) for name, ids in PROMPTS.items()}
NEW = 32
CSA_LAYERS, HCA_LAYERS = 2, 1


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One whole demo: standard output is one JSON object and nothing else."""
    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    result = run("--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same story in a second or two, in one process."""
    for module in (alone, demo):
        monkeypatch.setattr(module, "QUESTIONS", {"A": ("What is HCA?",), "B": ("Hello",)})
        monkeypatch.setattr(module, "NEW_TOKENS", 3)
    monkeypatch.setattr(demo, "SHARED", demo.SHARED[:3])
    monkeypatch.setattr(demo.Story, "restart", lambda story: None)


# ---- what it reports -----------------------------------------------------------------------------


def test_everything_that_must_agree_does(ran: dict[str, Any]) -> None:
    assert ran["passed"] is True
    verdicts = {part["part"]: part["verdict"] for part in ran["parts"]}
    assert verdicts == {
        "engine": "agrees",
        "transformers": "not compared",
        "paged": "agrees",
        "batch": "agrees",
        "prefix": "agrees",
        "restart": "agrees",
    }


def test_another_process_runs_the_question_alone(ran: dict[str, Any]) -> None:
    (part,) = [part for part in ran["parts"] if part["part"] == "restart"]
    # the last token of the answer had not run
    asked = TEXTS.asking(prompts.BEFORE_RESTART).tolist()
    answer = CHECKPOINT.tokenizer.encode(CHECKPOINT.answers[prompts.BEFORE_RESTART[-1]])
    after = TEXTS.following(prompts.AFTER_RESTART).tolist()
    total = len(asked) + len(answer) + 1 + len(after)
    assert part["note"].startswith(f"{1 + len(after)} of {total} prompt tokens computed, ")


def test_tokens_are_those_of_the_model_without_any_cache(ran: dict[str, Any]) -> None:
    (last,) = [s for s in ran["steps"] if s["part"] == "batch" and s["step"] == NEW - 1]
    model = speaking_v4(CHECKPOINT)
    for name in ("B", "D"):
        ids = list(PROMPTS[name])
        for _ in range(NEW):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        assert last["chosen"][name] == ids[LENGTHS[name] :]


@pytest.mark.parametrize("part", ["engine", "transformers", "batch"])
def test_it_says_what_it_was_trained_to_say(ran: dict[str, Any], part: str) -> None:
    said: dict[str, str] = {}
    for step in ran["steps"]:
        if step["part"] == part:
            said |= step["said"]
    assert said == {name: CHECKPOINT.answers[asked[-1]] for name, asked in QUESTIONS.items()}


def test_answers_after_a_cached_prefix_and_a_restart_are_right(ran: dict[str, Any]) -> None:
    said = {question: text for part in ran["parts"] for question, text in part["said"].items()}
    assert set(said) == {prompts.SECOND, prompts.BEFORE_RESTART[-1], prompts.AFTER_RESTART}
    assert said == {question: CHECKPOINT.answers[question] for question in said}


@pytest.mark.parametrize("part", ["engine", "batch"])
def test_blocks_slots_and_groups_follow_from_the_lengths(ran: dict[str, Any], part: str) -> None:
    steps = [s for s in ran["steps"] if s["part"] == part]
    assert len(steps) == NEW
    seen = {"csa": 0, "hca": 0}
    for nth, step in enumerate(steps):
        lengths = {name: tokens + nth for name, tokens in LENGTHS.items()}
        cache = step["cache"]
        assert step["lengths"] == lengths
        assert cache["blocks_live"] == sum(-(-n // 128) for n in lengths.values())
        assert cache["slots_live"] == 4
        csa = CSA_LAYERS * sum(n // 4 for n in lengths.values())
        hca = HCA_LAYERS * sum(n // 128 for n in lengths.values())
        assert cache["entries"] == {"csa": csa, "hca": hca}
        assert cache["closed"] == {"csa": csa - seen["csa"], "hca": hca - seen["hca"]}
        seen = cache["entries"]
    assert sum(s["cache"]["closed"]["hca"] for s in steps[1:]) == 2
    assert sum(s["cache"]["blocks_taken"] for s in steps[1:]) == 2


def test_bytes_are_compared_with_the_same_requests_alone(ran: dict[str, Any]) -> None:
    alone = [s for s in ran["steps"] if s["part"] == "transformers"]
    batch = [s for s in ran["steps"] if s["part"] == "batch"]
    for step in batch:
        theirs = [s["transformers_bytes"] for s in alone if s["step"] == step["step"]]
        assert len(theirs) == 4
        assert step["transformers_bytes"] == sum(theirs)
        cache = step["cache"]
        assert cache["trained_bytes"] < 0.7 * (cache["block_bytes"] + cache["slot_bytes"])


def test_the_second_prompt_runs_only_what_is_new(ran: dict[str, Any]) -> None:
    prefix = ran["prefix"]
    first, second = (
        len(TEXTS.asking([*prompts.SHARED, last])) for last in (prompts.FIRST, prompts.SECOND)
    )
    assert (prefix["first_run_tokens"], prefix["second_run_tokens"]) == (first, second - 384)
    assert prefix["reused_tokens"] == 384 <= prefix["shared_tokens"] < 512
    assert prefix["second_seconds"] < prefix["first_seconds"]


def test_the_tokens_said_to_run_are_those_that_the_model_saw() -> None:
    model, seen = tiny_v4(), []
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: seen.append(args[0].numel())
    )
    first, second = (random_prompt(132, seed=1) for _ in range(2))
    second[128:] += 1
    second %= 128
    result, tokens = run_twice(model, first, second, new_tokens=2, records="bf16")
    assert seen == [result.first_run_tokens, 1, result.second_run_tokens, 1] == [132, 1, 4, 1]
    assert (result.shared_tokens, result.source, len(tokens)) == (128, "snapshot", 2)
    assert result.first_seconds > result.second_seconds > 0


def test_the_real_model_fits_as_often_as_it_says(ran: dict[str, Any]) -> None:
    bill = ran["v4_flash"]
    assert bill["bytes_per_token"] == 3518
    assert bill["bytes_per_request"] == 15_097_856
    assert {(f["memory_bytes"], f["context_tokens"]) for f in bill["fits"]} == {
        (memory, context) for memory in (80 * 10**9, 141 * 10**9) for context in (2**17, 2**20)
    }
    for fit in bill["fits"]:
        one = 3518 * fit["context_tokens"] + 15_097_856
        assert fit["requests"] == fit["memory_bytes"] // one
    assert bill["v41_bytes_per_token"] == 890
    assert bill["v41_bytes_per_request"] == 2_918_400 + 32_768  # a row of the block table
    assert len(bill["v41_fits"]) == len(bill["fits"])
    for fit in bill["v41_fits"]:
        one = 890 * fit["context_tokens"] + 2_951_168
        assert fit["requests"] == fit["memory_bytes"] // one


def test_the_picture_is_a_png(ran: dict[str, Any]) -> None:
    assert Path(ran["plot"]).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_quickstart_shows_what_it_prints(ran: dict[str, Any]) -> None:
    """Line by line, but for the times; "…" stands for lines left out."""
    console = Console(file=io.StringIO(), width=80)
    with demo_view(console) as view:
        for part in ran["parts"]:
            view(PartBegins(part=part["part"], title=part["title"]))
            for step in ran["steps"]:
                if step["part"] == part["part"]:
                    cache = step["cache"] and CacheState(**step["cache"])
                    view(StepEvent(**step | {"cache": cache}))
            view(PartResult(**part))
    parts = [PartResult(**part) for part in ran["parts"]]
    report = DemoReport(parts=parts, prefix=PrefixResult(**ran["prefix"]))
    print_report(console, report, flash_bill())
    assert isinstance(console.file, io.StringIO)
    printed = iter(without_times(console.file.getvalue()))
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    for line in without_times(shown):
        assert line.strip() == "…" or line in printed, line


def without_times(text: str) -> list[str]:
    return re.sub(r"[0-9.]+ s\b", "N s", text).splitlines()


# ---- a cache that is wrong -----------------------------------------------------------------------


@pytest.mark.usefixtures("short")
def test_attention_that_reads_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FastAttention.__call__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = right(self, *args, **kwargs)
        return -out, weights

    monkeypatch.setattr(FastAttention, "__call__", wrong)
    result = run()
    assert result.exit_code == 1
    assert "FAILED: accelerated" in result.stdout
    assert "but transformers generates" in result.stdout
    assert "FAILED: model untouched" not in result.stdout
    assert "FAILED: four conversations" not in result.stdout
    assert "Passed" not in result.stdout


@pytest.mark.usefixtures("short")
def test_attention_that_reads_wrong_fails_without_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = CachedLayer.attention
    monkeypatch.setattr(CachedLayer, "attention", lambda *given: -right(*given))
    monkeypatch.setitem(sys.modules, "transformers.models.deepseek_v4", None)
    result = run()
    assert result.exit_code == 1
    assert "FAILED: four conversations" in result.stdout
    assert "other tokens than without a cache" in result.stdout


@pytest.mark.usefixtures("short")
def test_one_wrong_bit_behind_the_paged_cache_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagedLayer.update

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys, _ = right(self, *args, **kwargs)
        keys = keys * (1 + 2**-22)
        return keys, keys

    monkeypatch.setattr(PagedLayer, "update", wrong)
    result = run("--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["passed"]
    assert [p["part"] for p in found["parts"] if p["verdict"] == "differs"] == ["paged"]


@pytest.mark.usefixtures("short")
def test_a_prefix_that_is_not_reused_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHARED", ())  # shorter than a block
    result = run()
    assert result.exit_code == 1
    assert "nothing was reused" in result.stdout


def test_tokens_may_differ_only_where_logits_tie() -> None:
    logits = torch.tensor([[[0.0, 5.0, 1.0], [2.0, 2.0005, 0.0], [9.0, 0.0, 0.0]]])
    theirs = demo.Generated(tokens=torch.tensor([[1, 1, 0]]), logits=logits)
    assert demo.compare_tokens("x", [1, 1, 0], theirs) == ("agrees", demo.ALL_AGREE)
    verdict, note = demo.compare_tokens("x", [1, 0, 2], theirs)
    assert verdict == "agrees"
    assert "step 1" in note
    verdict, note = demo.compare_tokens("x", [1, 1, 2], theirs)
    assert verdict == "differs"
    assert "token 2 at step 2" in note


# ---- what is missing -----------------------------------------------------------------------------


@pytest.mark.usefixtures("short")
def test_without_transformers_it_answers_on_this_cache_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.deepseek_v4", None)
    result = run()
    assert result.exit_code == 0, result.output
    assert "✓ all tokens as without a cache" in result.stdout
    assert "transformers' own cache" not in result.stdout
    passed = result.stdout.rstrip().splitlines()[-1]
    assert passed == (
        "Passed: 6 tokens compared. For the rest of the demo: pip install 'dsv4[transformers]'"
    )
    found = json.loads(run("--json").stdout)
    assert [part["part"] for part in found["parts"]] == ["engine"]
    assert found["passed"]
    assert found["prefix"] is None


def test_without_matplotlib_there_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--plot", "x")
    assert result.exit_code == 2
    assert result.stderr.startswith("MissingExtra:")
    assert "pip install 'dsv4[plot]'" in result.stderr
    assert result.stdout == ""
    as_json = run("--plot", "x", "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["type"] == "MissingExtra"


def test_a_history_that_is_run_again_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process answers, and leaves nothing on disk."""
    monkeypatch.setattr(demo, "NEW_TOKENS", 3)
    monkeypatch.setattr(
        restart, "answer_and_die", lambda root, prompt, new_tokens: torch.cat((prompt, prompt[:3]))
    )
    story = demo.Story(speaking_v4(CHECKPOINT), TEXTS, lambda event: None)
    story.restart()
    (part,) = story.parts
    asked = len(TEXTS.asking(prompts.BEFORE_RESTART))
    total = asked + 3 + len(TEXTS.following(prompts.AFTER_RESTART))
    assert (part.verdict, part.note) == (
        "differs",
        f"{total} of {total} prompt tokens computed, 0 B loaded from disk; "
        "the conversation was computed again",
    )

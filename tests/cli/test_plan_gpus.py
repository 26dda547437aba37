"""`dsv4 plan --gpus`, models as people name them, and options that belong to others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsv4.cli import app
from tests.cli.test_plan import in_process_without
from tests.planning.test_weights import IN_CONFIG
from tests.test_model import transformers_config

FORMATS = ("expert_dtype", "quantization_config")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def run_json(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    return parsed


def requests(found: dict[str, Any]) -> dict[int, int]:
    return {fit["context_tokens"]: fit["requests"] for fit in found["chosen"]["fits"]}


def test_the_answer_is_the_first_line() -> None:
    found = run_json("v4-flash", "--gpus", "4x80GB")
    result = run("v4-flash", "--gpus", "4x80GB")
    first = result.stdout.splitlines()[0]
    assert first == found["answer"]
    assert first.startswith("4 x 80GB hold v4-flash (156.02 GB of weights in FP4 and FP8) and ")
    (short, few), (middle, some), (long, least) = requests(found).items()
    assert (short, middle, long) == (8192, 131_072, 1_048_576)
    assert f"{few:,} requests of 8k or {some:,} of 128k or {least:,} of 1M tokens" in first
    assert few > some > least > 0
    for word in ("weights", "vLLM", "SGLang", "2026-11-15", "divided by layers", "replicated"):
        assert word in result.stdout
    assert "Activations (--activations)" in result.stdout


@pytest.mark.parametrize(
    "name",
    [
        *("V4-Flash", "V4_Flash", "deepseek-ai/DeepSeek-V4-Flash", "DeepSeek-V4-Flash", "v4-flash"),
        *("v4flash", "v4 flash", "DeepSeek V4 Flash", "DeepSeekV4Flash"),
    ],
)
def test_models_are_known_by_any_of_their_names(name: str) -> None:
    assert run_json(name)["model"] == "v4-flash"


def test_a_directory_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "DeepSeek-V4-Flash"
    folder.mkdir()
    assert run(str(folder)).exit_code == 2  # without a config.json
    (folder / "config.json").write_text(json.dumps(transformers_config(**IN_CONFIG)))
    derived, preset = (run_json(name, "--gpus", "8xH200") for name in (str(folder), "v4-flash"))
    assert derived["weights_bytes"] == preset["weights_bytes"]
    assert requests(derived) == requests(preset)
    monkeypatch.chdir(tmp_path)  # what exists is meant, not the preset of that name
    (folder / "config.json").write_text("{}")
    assert "the config has no" in run("DeepSeek-V4-Flash").stderr


def test_a_config_without_what_weights_are_made_of_asks_for_their_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(transformers_config()))
    result = run(str(path), "--gpus", "4xH200")
    assert result.exit_code == 2
    assert "--weights 150GB" in result.stderr
    found = run_json(str(path), "--gpus", "4xH200", "--weights", "200GB")
    assert found["chosen"]["rank"]["weights"] == 50 * 10**9
    assert "--weights" in run("v41-flash", "--gpus", "4xH200").stderr


def test_the_answer_says_which_weights_it_counts_and_what_would_change_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    plain = {key: value for key, value in IN_CONFIG.items() if key not in FORMATS}
    path.write_text(json.dumps(transformers_config(**plain)))
    told = run_json(str(path), "--gpus", "8xH200")
    assert "GB of weights in bf16)" in told["answer"]
    assert "has neither quantization_config nor dtype and no expert_dtype" in told["answer"]
    assert "--weights 150GB" in told["answer"]
    path.write_text(json.dumps(transformers_config(**{**IN_CONFIG, "expert_dtype": "FP4"})))
    result = run(str(path), "--gpus", "4x80GB")
    first, notes = result.stdout.splitlines()[0], " ".join(result.stdout.split())
    assert "GB of weights in FP4 and FP8) and" in first
    assert "--weights" not in first
    assert "quantization_config.quant_method='fp8' and expert_dtype='FP4'. --weights" in notes
    given = run_json(str(path), "--gpus", "4xH200", "--weights", "200GB")["answer"]
    assert "(200 GB of weights, as given, split evenly)" in given


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_dtype", "int4"),
        ("expert_dtype", "fp3"),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.quant_method", None),
        ("torch_dtype", "int8"),
    ],
)
def test_a_format_whose_size_is_not_known_is_refused(
    tmp_path: Path, key: str, value: str | None
) -> None:
    first, _, inner = key.partition(".")
    config = {**IN_CONFIG, first: {inner: value} if inner else value}
    if first == "torch_dtype":
        del config["quantization_config"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(transformers_config(**config)))
    result = run(str(path), "--gpus", "8xH200")
    assert result.exit_code == 2
    assert f"{key}={value!r}" in result.stderr
    assert "--weights 150GB" in result.stderr
    assert run(str(path), "--gpus", "8xH200", "--weights", "150GB").exit_code == 0


def test_what_does_not_fit_ends_with_3_and_says_what_would() -> None:
    found = run_json("v4-flash", "--gpus", "80G", code=3)
    assert found["fits"] is False
    assert "does not fit on 1 x 80G" in found["answer"]
    assert "3 x 80G would" in found["answer"]
    asked = ("v4-flash", "--gpus", "2xH200", "--context", "128k", "--requests")
    enough = requests(run_json(*asked, "1"))[131_072]
    assert run(*asked, str(enough)).exit_code == 0
    short = run_json(*asked, str(enough + 1), code=3)["answer"]
    assert f"there is room for {enough}" in short
    assert "3 x H200 would" in short


def test_what_activations_leave_no_room_for_names_them() -> None:
    asked = ("v4-flash", "--gpus", "4x80GB", "--activations", "60GB")
    assert "and 60 GB of activations, and has 80 GB" in run_json(*asked, code=3)["answer"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--gpus", "4x80GB", "--context", "0"], "context_tokens=0"),
        (["--gpus", "4x80GB", "--context", "8k", "--requests", "-1"], "requests=-1"),
        (["--gpus", "4x80GB", "--step-tokens", "0"], "step_tokens=0"),
        (["--gpus", "4x80GB", "--snapshots", "-1"], "snapshots=-1"),
        (["--gpus", "4x80GB", "--context", "2M"], "2,097,152 tokens is past the 1,048,576"),
        (["--gpus", "4x80GB", "--requests", "5"], "give --context too"),
        (["--gpus", "80"], "names neither a GPU nor its memory"),  # 80 bytes
        (["--gpus", "4x80"], "did you mean 4x80GB?"),
        (["--gpus", "4x80GB", "--disk", "4"], "a tier of 4 bytes holds no record"),
        (["--disk", "4"], "write its unit too, 4TB"),
    ],
)
def test_a_question_is_not_answered_as_another_one(options: list[str], why: str) -> None:
    result = run("v4-flash", *options)
    assert result.exit_code == 2
    assert why in result.stderr


def test_a_name_that_would_have_to_be_downloaded_says_what_to_give() -> None:
    result = run("deepseek-ai/DeepSeek-V3", "--gpus", "8xH200")
    assert result.exit_code == 2
    assert "Nothing is downloaded: give the path of a config.json" in result.stderr


def test_more_ranks_than_experts(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(transformers_config(**{**IN_CONFIG, "n_routed_experts": 2})))
    result = run(str(path), "--gpus", "4x80GB")
    assert result.exit_code == 2
    assert "has 2 experts: give at most 2 GPUs" in result.stderr


def test_the_unit_of_a_disk_comes_back() -> None:
    """And what it keeps stands with the answer, at the top, once."""
    for asked, line in ((["--gpus", "4x80GB"], 0), ([], 1)):
        result = run("v4-flash", *asked, "--disk", "4TB")
        assert "A tier of 4 TB keeps" in result.stdout.splitlines()[line]
        assert result.stdout.count("A tier of 4 TB") == 1


def test_without_a_question_the_first_line_says_what_a_token_costs() -> None:
    first = run("v4-flash").stdout.splitlines()[0]
    assert first == (
        "v4-flash keeps 3,518 bytes for each token of context, and 15.1 MB for each live request."
    )


def test_tokens_come_back_as_they_were_written() -> None:
    """128000 is a whole number of k = 1,024, which nobody means."""
    for written, told in (("128000", "128,000"), ("128k", "128k"), ("131072", "128k")):
        answer = run_json("v4-flash", "--gpus", "4x80GB", "--context", written)["answer"]
        assert f"requests of {told} tokens" in answer


def test_options_count() -> None:
    plain = requests(run_json("v4-flash", "--gpus", "4xH200"))
    for options in (
        ["--activations", "10GB"],
        ["--step-tokens", "65536"],
        ["--snapshots", "640"],
        ["--tp", "4"],
        ["--draft", "1"],  # its layer's weights, and rings
    ):
        less = requests(run_json("v4-flash", "--gpus", "4xH200", *options))
        assert less[8192] < plain[8192], options
    more = run_json("v4-flash", "--gpus", "4xH200", "--host-memory", "2TB", "--disk", "4TB")
    longest = more["chosen"]["fits"][-1]
    assert longest["with_host_memory"] > longest["requests"]
    assert more["tier"]["tier_bytes"] == 4 * 10**12


def test_several_gpus_as_memory_are_gpus() -> None:
    assert run_json("v4-flash", "--memory", "4x80GB") == run_json("v4-flash", "--gpus", "4x80GB")


@pytest.mark.parametrize(
    ("options", "partner"),
    [
        (["--snapshots", "5"], "--step-tokens or --gpus"),
        (["--answer", "5k"], "--link"),
        (["--prefill-rate", "5"], "--link"),
        (["--snapshot-every", "128"], "--tier"),
        (["--hot-rows", "1024"], "--host-memory"),
        (["--host-memory", "1TB"], "--memory or --gpus"),
        (["--tp", "2"], "--gpus"),
        (["--activations", "2GB"], "--gpus"),
        (["--device", "cuda"], "--step-tokens"),
    ],
)
def test_an_option_without_its_partner_says_so(options: list[str], partner: str) -> None:
    result = run("v4-flash", *options)
    assert result.exit_code == 2
    assert f"{options[0]} has no meaning without {partner}" in result.stderr


def test_questions_about_one_cache_are_not_mixed_with_gpus() -> None:
    result = run("v4-flash", "--gpus", "8xH200", "--link", "400Gb")
    assert result.exit_code == 2
    assert "--link is about one cache" in result.stderr


@pytest.mark.parametrize(
    "options", [["--gpus", "3xH200", "--tp", "2"], ["--gpus", "nothing"], ["--gpus", "4x"]]
)
def test_what_cannot_be_meant_is_refused(options: list[str]) -> None:
    result = run("v4-flash", *options)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["torch", "triton", "transformers"])
def test_it_runs_with_the_base_package(module: str) -> None:
    """The workspace of a GPU too."""
    result = in_process_without(module, "plan", "v4-flash", "--gpus", "4x80GB", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == run_json("v4-flash", "--gpus", "4x80GB")

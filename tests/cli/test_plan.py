"""`dsv4 plan` as users and scripts see it: tables, JSON, errors, plots, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

import dsv4
from dsv4.cache import build
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.records import ENTRY_FORMATS, INDEX_FORMATS
from dsv4.cache.schema import CacheSchema, byte_map
from dsv4.cache.state import StateLayout
from dsv4.cli import app
from dsv4.errors import MissingExtra
from dsv4.model import PRESETS
from dsv4.planner import plan

ROOT = Path(__file__).parents[2]
FLASH = CacheSchema.build(PRESETS["v4-flash"])
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_json(*arguments: str) -> dict[str, Any]:
    result = run("plan", *arguments, "--json")
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    return parsed


# ---- answers --------------------------------------------------------------------------------


def test_json_is_the_plan() -> None:
    found = run_json("v4-flash", "--memory", "80GiB", "--context", "1M")
    expected = plan(FLASH, memory_bytes=80 * 2**30, context_tokens=1_048_576)
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert found["bytes_per_token"] == 3518.0
    assert found["bytes_per_request"] == 15_097_856
    assert found["requests"] == 23


def test_without_memory_only_bytes_are_answered() -> None:
    found = run_json("v4-pro")
    assert found["question"] == "bytes"
    assert found["bytes_per_token"] <= 5_031.4375 * 1.01
    assert (found["requests"], found["fits"], found["budget"]) == (None, None, None)
    result = run("plan", "v4-pro")
    assert result.exit_code == 0
    assert f"{found['bytes_per_token']:,.2f}" in result.stdout
    assert f"{found['bytes_per_request']:,}" in result.stdout
    assert "room" not in result.stdout


def test_with_step_tokens_all_is_counted_that_a_manager_allocates() -> None:
    options = ("--step-tokens", "64", "--snapshots", "3", "--open-plans", "2")
    asked = ("tiny", "--memory", "16MiB", "--context", "1k")
    found, alone = run_json(*asked, *options), run_json(*asked)
    schema = CacheSchema.build(PRESETS["tiny"])
    other = build.other_bytes(
        schema,
        max_requests=found["requests"],
        max_step_tokens=64,
        prefix=PrefixOptions(snapshots=3),
        max_open_plans=2,
    )
    assert found["other_bytes"] == found["budget"]["other_bytes"] == other
    assert found["needed_bytes"] == found["requests"] * found["request_bytes"] + other
    assert found["budget"]["total_bytes"] <= 16 << 20
    assert alone["other_bytes"] == 0
    assert alone["requests"] >= found["requests"]
    shown = run("plan", *asked, *options).stdout
    assert f"{other:,}" in shown
    assert "step buffers, workspace, snapshots" in shown


def test_a_batch_invariant_manager_is_asked_for_its_own_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def other_bytes(_: object, *, batch_invariant: bool, **__: object) -> int:
        asked.append(batch_invariant)
        return 1 << 20

    monkeypatch.setattr(build, "other_bytes", other_bytes)
    question = ("tiny", "--memory", "16MiB", "--context", "1k", "--step-tokens", "64")
    for options in ((), ("--batch-invariant",)):
        asked.clear()
        run_json(*question, *options)
        assert set(asked) == {bool(options)}


def test_a_link_carries_so_many_tokens() -> None:
    found = run_json("v4-flash", "--link", "400Gb", "--context", "128k")["link"]
    (request,) = found["handoffs"]
    layout = StateLayout(FLASH)
    assert found["state_bytes"] == 256 + layout.payload_bytes
    assert request["handoff_bytes"] == 1024 * FLASH.bytes.block + found["state_bytes"]
    assert request["seconds"] == request["handoff_bytes"] / 50e9
    assert found["tokens_per_second"] == 50e9 / 3518
    assert found["prefill_per_decode"] is None
    fed = run_json(
        *("v4-flash", "--link", "400Gb", "--context", "128k", "--answer", "1k"),
        *("--prefill-rate", "16384", "--decode-rate", "2048"),
    )["link"]
    assert fed["prefill_per_decode"] == 16.0  # 8 s of prefill for 0.5 s of decode
    assert fed["link_share"] == pytest.approx(2 * request["seconds"])
    rows = run_json("v4-flash", "--link", "25Gb")["link"]["handoffs"]
    assert [row["context_tokens"] for row in rows] == [1024, 8192, 32_768, 131_072, 1_048_576]
    text = run("plan", "v4-flash", "--link", "25Gb/s").stdout
    assert "128k tokens" in text
    assert "25 Gb/s carry" in text
    assert run("plan", "v4-flash", "--link", "50GB").exit_code == 2
    assert run("plan", "v4-flash", "--link", "1Gb", "--decode-rate", "5").exit_code == 2


def test_a_tier_keeps_so_many_tokens() -> None:
    result = run("plan", "v4-flash", "--tier", "1GiB", "--json")
    found = json.loads(result.stdout)["tier"]
    assert found["block_record_bytes"] == 110 * 4096
    assert found["times_device"] < 1.01
    assert found["snapshot_period_tokens"] == 1024
    whole = found["tokens"] // 128 * found["block_record_bytes"]
    snapshots = found["tokens"] / 1024 * found["snapshot_record_bytes"]
    assert whole + snapshots <= 1 << 30
    assert whole + snapshots > (1 << 30) - 2 * found["snapshot_record_bytes"]
    text = run("plan", "v4-flash", "--tier", "1GiB", "--snapshot-every", "0").stdout
    tokens = (1 << 30) // (110 * 4096) * 128
    assert f"A tier of 1 GiB keeps {tokens:,} tokens without snapshots" in text
    assert run("plan", "v4-flash", "--tier", "1GiB", "--snapshot-every", "100").exit_code == 2


HOST = ("v4-flash", "--memory", "141GB", "--host-memory", "256GB")


def test_entries_in_host_memory_make_room() -> None:
    found = run_json(*HOST, "--context", "1M", "--hot-rows", "1024", "--link-host", "11GB/s")
    assert (found["requests"], found["residency"]["requests"]) == (38, 78)
    assert found["residency"]["hot_rows"] == 1024
    last = found["residency"]["steps"][-1]
    assert last["seconds"] == last["fetched_bytes"] / 11e9
    assert last["fetched_bytes"] == 78 * 21 * 512 * 592
    text = run("plan", *HOST, "--context", "1M").stdout
    assert "have room for 78 requests of 1M tokens at once, 38 without host memory" in text
    assert "host memory is full first" in text
    assert "at 55 GB/s" in text
    assert f"{found['residency']['host_request_bytes']:,}" in text
    assert "not pay" not in text


def test_what_a_longest_request_needs_is_asked_of_both_memories() -> None:
    """Without host memory not one request fits."""
    few = ("v4-flash", "--memory", "2GB", "--context", "1M")
    assert run("plan", *few).exit_code == 3
    found = run_json(*few, "--host-memory", "256GB")["residency"]
    assert (found["requests"], found["requests_without"]) == (3, 0)
    assert found["limited_by"] == "device"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--context", "8k"], "does not pay: below 12,288 tokens a request needs more"),
        (["--context", "1M", "--host-memory", "20GB"], "with this little host memory fewer fit"),
    ],
)
def test_the_planner_says_where_host_memory_does_not_pay(options: list[str], sentence: str) -> None:
    assert sentence in run("plan", *HOST, *options).stdout


@pytest.mark.parametrize(
    "options",
    [
        ["v4-flash", "--host-memory", "256GB"],
        [*HOST, "--link-host", "400Gb/s"],
        [*HOST, "--link-host", "0"],
        [*HOST, "--hot-rows", "511"],
        ["v4-flash", "--memory", "141GB", "--context", "1M", "--host-memory", "3GB"],
    ],
)
def test_two_memories_that_cannot_work_are_refused(options: list[str]) -> None:
    assert run("plan", *options).exit_code == (3 if "3GB" in options else 2)


def test_every_option_reaches_the_schema() -> None:
    found = run_json(
        *("v4-flash", "--draft", "4", "--index-format", "fp8", "--record-format", "fp8_row"),
        *("--block-tokens", "256", "--hca-state", "online"),
    )
    schema = CacheSchema.build(
        PRESETS["v4-flash"],
        max_draft_tokens=4,
        index_format="fp8",
        entry_format="fp8_row",
        block_tokens=256,
        hca_state="online",
    )
    assert found["fingerprint"] == schema.fingerprint
    assert found["max_draft_tokens"] == 4
    assert found["hca_state"] == "online"
    assert found["slot_bytes"] == schema.bytes.slot
    assert found["formats"]["pages"] == "planes"


def test_pages_of_whole_records() -> None:
    asked = ("v41-flash", "--page-form", "records")
    found = run_json(*asked)
    schema = CacheSchema.build(PRESETS["v41-flash"], page_form="records")
    assert found["fingerprint"] == schema.fingerprint
    assert found["formats"]["pages"] == "records"
    assert (found["bytes_per_token"], found["block_bytes"]) == (891, 114_048)
    printed = run("plan", *asked, "--map").stdout
    assert "records whole" in printed
    assert "114,048 bytes, pages aligned to 32, records of entries and windows whole" in printed
    assert "whole" not in run("plan", "v41-flash", "--map").stdout


def test_help_names_every_format_there_is() -> None:
    group: Any = typer.main.get_command(app)
    texts = {option.name: option.help for option in group.commands["plan"].params}
    for option, formats in (("index_format", INDEX_FORMATS), ("record_format", ENTRY_FORMATS)):
        assert all(name in texts[option] for name in formats)


@pytest.mark.parametrize("module", ["dsv4", "dsv4.cli"])
def test_python_runs_the_command_too(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"dsv4 {dsv4.__version__}\n"


def test_python_runs_the_command_by_its_name_and_ends_with_its_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsv4", "plan", "--nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Usage: dsv4 plan" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory", "80GB", "--context", "128k"], "80 GB has room for 167 requests of 128k"),
        (
            ["--memory", "80G", "--context", "128k"],
            "tokens at once: 79.53 GB (79,526,928,384 bytes)",
        ),
        (["--memory", "80GiB"], "80 GiB has room for 23 requests of 1M tokens at once"),
        (["--memory", "80GiB", "--requests", "23"], "23 requests of 1M tokens at once"),
        (["--memory", "80GiB", "--context", "128k"], "180 requests of 128k tokens"),
        (["--context", "1M"], "Memory for 1 request of 1M tokens: 3.45 GiB (3,703,988,224 bytes)"),
        (["--memory", "80GiB", "--context", "1M", "--requests", "2"], "They fit."),
        (
            ["--memory", "80GiB", "--context", "1M", "--requests", "24"],
            "80 GiB has no room for 24 requests of 1M tokens at once. The minimum is 82.79 GiB",
        ),
    ],
)
def test_the_answer_is_a_sentence_and_comes_first(arguments: list[str], sentence: str) -> None:
    result = run("plan", "v4-flash", *arguments)
    assert result.exit_code == (3 if "no room" in sentence else 0)
    assert sentence in result.stdout.splitlines()[0]


def test_what_does_not_fit_says_how_many_would() -> None:
    result = run("plan", "v4-flash", "--memory", "80GiB", "--context", "1M", "--requests", "24")
    assert "23 would fit" in result.stdout.splitlines()[0]


def test_planes_are_details() -> None:
    plain, more = (run("plan", "v4-flash", *options).stdout for options in ([], ["--details"]))
    assert "plane" not in plain
    assert "plane" in more


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "dim": 4096,
                "n_layers": 43,
                "n_heads": 64,
                "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
            }
        )
    )
    assert run_json(str(path))["fingerprint"] == FLASH.fingerprint


def test_a_model_name_with_markup_is_printed_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {
        "model_type": "deepseek_v4",
        "_name_or_path": "[bold]mine[/oops]",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "index_n_heads": 1,
        "index_head_dim": 32,
        "index_topk": 8,
        "sliding_window": 8,
        "max_position_embeddings": 1024,
        "compress_ratios": [4],
    }
    path.write_text(json.dumps(config))
    result = run("plan", str(path), "--block-tokens", "16")
    assert result.exit_code == 0
    assert "[bold]mine[/oops]" in result.stdout


def test_map_prints_every_plane() -> None:
    schema = CacheSchema.build(PRESETS["tiny"])
    result = run("plan", "tiny", "--map")
    assert byte_map(schema, "block") in result.stdout
    assert byte_map(schema, "slot") in result.stdout
    found = run_json("tiny", "--map")["byte_map"]
    assert found["block"] == byte_map(schema, "block").splitlines()
    assert found["slot"] == byte_map(schema, "slot").splitlines()


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"dsv4 {dsv4.__version__}\n")


# ---- errors ---------------------------------------------------------------------------------

ERRORS = [
    (["v4-flush"], "ConfigError", "v4-flash"),
    (["v4.2-flash"], "ConfigError", "unknown preset"),
    (["absent.json"], "ConfigError", "cannot read absent.json"),
    (["v4-flash", "--memory", "lots"], "InvalidInput", "'lots'"),
    (["v4-flash", "--memory", "-5"], "InvalidInput", "'-5'"),
    (["v4-flash", "--memory", "nan"], "InvalidInput", "'nan'"),
    (["v4-flash", "--context", "inf"], "InvalidInput", "'inf'"),
    (["v4-flash", "--context", "2M"], "InvalidInput", "1,048,576"),
    (["v4-flash", "--context", "0"], "InvalidInput", "context_tokens=0"),
    (["v4-flash", "--requests", "0"], "InvalidInput", "requests=0"),
    (["v4-flash", "--memory", "1GiB"], "PoolTooSmall", "3,703,988,224"),
    (["v4-flash", "--block-tokens", "100"], "SchemaError", "multiple of 128"),
    (["v4-flash", "--index-format", "fp3"], "SchemaError", "mxfp4"),
    (["v4-flash", "--record-format", "fp3"], "SchemaError", "fp8_ds"),
    (["v4-flash", "--draft", "-1"], "InvalidInput", "max_draft_tokens=-1"),
    (["v4-flash", "--hca-state", "folded"], "InvalidInput", "choose one of raw, online"),
    (["v4-flash", "--page-form", "rows"], "InvalidInput", "choose one of planes, records"),
    (["v4-flash", "--page-form", "records"], "SchemaError", "v41_fp8 or v41_fp4"),
    (["v4-flash", "--plot", "no/such/folder/plot.png"], "InvalidInput", "no/such/folder"),
    (["v4-flash", "--plot", "plot.nonsense"], "InvalidInput", "plot.nonsense"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), ERRORS)
def test_an_error_is_one_line_on_stderr(arguments: list[str], kind: str, message: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == (3 if kind == "PoolTooSmall" else 2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"{kind}: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("arguments", "kind", "message"), ERRORS)
def test_an_error_in_json_is_an_object_on_stdout(
    arguments: list[str], kind: str, message: str
) -> None:
    result = run("plan", *arguments, "--json")
    assert result.exit_code == (3 if kind == "PoolTooSmall" else 2)
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["type"] == kind
    assert message in report["error"]


def test_too_little_memory_tells_scripts_the_minimum() -> None:
    result = run("plan", "v4-flash", "--memory", "1GiB", "--json")
    assert json.loads(result.stdout)["minimum_bytes"] == 3_703_988_224


# ---- without torch, without matplotlib ------------------------------------------------------


def in_process_without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command where importing `module` fails as if it were not installed."""
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "try:\n"
        f"    import {module}\n"
        "    sys.exit('the blocker does not block')\n"
        "except ModuleNotFoundError:\n"
        "    pass\n"
        "from dsv4.cli import app\n"
        f"app({list(arguments)!r})\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )


def test_plan_runs_without_torch() -> None:
    result = in_process_without(
        "torch", "plan", "v4-flash", "--memory", "80GiB", "--context", "1M", "--json"
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["requests"] == 23


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    result = in_process_without("matplotlib", "plan", "tiny", "--plot", str(path))
    assert result.returncode == 2
    assert "dsv4[plot]" in result.stderr
    assert result.stderr.startswith("MissingExtra: ")
    assert "Traceback" not in result.stderr
    assert not path.exists()
    assert issubclass(MissingExtra, ImportError)


# ---- plots, of which the rest is in tests/plots ------------------------------------------------


def test_plot_is_written_and_named(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    result = run("plan", "v4-flash", "--memory", "80GiB", "--requests", "256", "--plot", str(path))
    assert result.exit_code == 0
    assert f"plot written to {path}" in result.stdout
    assert path.read_bytes().startswith(PNG)

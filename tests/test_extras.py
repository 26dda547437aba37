"""What works with the base package alone, and what is said of an extra that is not installed.

Every entry point runs where nothing can be imported that an extra brings: it works, or it raises
MissingExtra with the name of the extra.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import dsv4
from dsv4.extras import EXTRA_OF

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMES = [name for name in dsv4.__all__ if name != "__version__"]

# Nothing that an extra brings, nor what those packages bring.
BARE = f"""
import importlib, json, sys
from importlib.abc import MetaPathFinder

HIDDEN = {sorted({*EXTRA_OF, "huggingface_hub", "jinja2", "tokenizers", "nixl_cu12", "nixl_cu13"})}

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
TRIED = """
from dsv4.errors import MissingExtra

def tried(what):
    try:
        what()
    except MissingExtra as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

def loaded(module, name):
    home = importlib.import_module(module)
    return getattr(home, name) if name else home

found = {}
for module, name in ASKED:
    found[f"{module}.{name}" if name else module] = tried(lambda: loaded(module, name))
print(json.dumps(found))
"""
COMMANDS = """
import contextlib, io
from dsv4.cli import app

found = {}
for arguments in ASKED:
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(arguments)
        except SystemExit as end:
            code = end.code
    found[" ".join(arguments)] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""


def run_bare(source: str, asked: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", f"{BARE}\nASKED = {asked!r}\n{source}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def named_modules() -> set[str]:
    """Modules of the package that README, pages and examples import from."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages += sorted((ROOT / "examples").glob("*.py"))
    text = "\n".join(page.read_text("utf-8") for page in pages)
    return set(re.findall(r"(?:from|import) (dsv4\.[\w.]+)", text))


@cache
def outcomes() -> dict[str, object]:
    asked = [("dsv4", name) for name in NAMES]
    asked += [(module, "") for module in sorted(named_modules() - {"dsv4.kernels.target"})]
    asked += [("dsv4.serve", ""), ("dsv4.integrations.transformers", "")]
    return run_bare(TRIED, asked)


def extra_of(message: object) -> str | None:
    found = re.search(r"pip install 'dsv4\[([\w-]+)\]'$", str(message))
    return found[1] if found else None


def test_what_cannot_be_loaded_names_an_extra() -> None:
    failed = {name: message for name, message in outcomes().items() if message is not None}
    assert failed, "the block does not work"
    assert {name: m for name, m in failed.items() if extra_of(m) not in EXTRAS} == {}


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("dsv4.Cache", "torch"),
        ("dsv4.KVCacheManager", "torch"),
        ("dsv4.apply_rope", "torch"),
        ("dsv4.DiskTier", "tiers"),
        ("dsv4.EventPublisher", "events"),
        ("dsv4.engine", "torch"),
        ("dsv4.testing", "torch"),
        ("dsv4.demo_model.checkpoint", "torch"),
        ("dsv4.serve", "serve"),
        ("dsv4.integrations.transformers", "transformers"),
    ],
)
def test_the_extra_is_the_one_that_is_needed(name: str, extra: str) -> None:
    assert extra_of(outcomes()[name]) == extra


@pytest.mark.parametrize(
    "name",
    ["CacheSchema", "ModelSpec", "PrefixOptions", "compute_block_budget", "OutOfBlocks", "Stats"],
)
def test_the_base_package_has(name: str) -> None:
    assert outcomes()[f"dsv4.{name}"] is None


@cache
def commands() -> dict[str, object]:
    asked = [["--version"], ["plan", "v4-flash", "--memory", "80GiB", "--context", "1M"]]
    asked += [["plan", "v4-flash", "--memory", "80GiB", "--step-tokens", "8192"]]
    results = str(ROOT / "benchmarks/results/h200.jsonl")
    asked += [["bench", "--compare", results, results]]
    asked += [["simulate", str(ROOT / "tests/data/load.jsonl"), "--memory", "4GB"]]
    asked += [["verify"], ["verify", "--backend", "triton"], ["demo"], ["serve"]]
    asked += [["store", "ls", "."], ["plan", "tiny", "--plot", "x.png"]]
    return run_bare(COMMANDS, asked)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("--version", f"dsv4 {dsv4.__version__}"),
        ("plan v4-flash --memory 80GiB --context 1M", "23 requests"),
        (f"bench --compare {ROOT}/benchmarks/results/h200.jsonl", "B / A"),
        (f"simulate {ROOT}/tests/data/load.jsonl", "40 requests"),
    ],
    ids=["version", "plan", "bench", "simulate"],
)
def test_commands_of_the_base_package(command: str, printed: str) -> None:
    ((code, out, err),) = (each for name, each in commands().items() if name.startswith(command))
    assert (code, err) == (0, "")
    assert printed in out


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("plan v4-flash --memory 80GiB --step-tokens 8192", "torch"),
        ("plan tiny --plot x.png", "plot"),
        ("verify", "torch"),
        ("verify --backend triton", "torch"),
        ("demo", "torch"),
        ("serve", "serve"),
        ("store ls .", "tiers"),
    ],
)
def test_commands_that_need_more_say_which_extra(command: str, extra: str) -> None:
    code, out, err = commands()[command]
    assert (code, out) == (2, "")
    assert err.startswith("MissingExtra: ")
    assert extra_of(err.strip()) == extra


# ---- what pyproject.toml asks for ---------------------------------------------------------------


def spelt_out(asked: list[str]) -> set[str]:
    """Names of packages, with those of the extras that are named."""
    found: set[str] = set()
    for each in asked:
        own = re.fullmatch(r"dsv4\[([\w,]+)\]", each)
        if own is None:
            found.add(re.match(r"[\w.-]+", each)[0])
        else:
            found |= {name for extra in own[1].split(",") for name in spelt_out(EXTRAS[extra])}
    return found


def test_the_base_package_is_small() -> None:
    assert spelt_out(PROJECT["dependencies"]) == {"numpy", "typer", "rich"}


def test_every_extra_that_computes_builds_on_torch() -> None:
    without = {name for name, asked in EXTRAS.items() if "torch" not in spelt_out(asked)}
    assert without <= {"plot", "docs"}


def test_no_extra_replaces_the_torch_of_a_gpu_machine() -> None:
    """pip keeps what satisfies: nothing but a lower bound is asked for, here alone."""
    asked = [each for extra in EXTRAS.values() for each in extra if re.match(r"torch\b", each)]
    assert asked == ["torch>=2.11"]


def test_every_extra_that_is_named_exists() -> None:
    assert set(EXTRA_OF.values()) <= set(EXTRAS)
    for package, extra in EXTRA_OF.items():
        brings = {"zmq": "pyzmq", "mooncake": "mooncake-transfer-engine-non-cuda"}.get(package)
        brings = brings or package.replace("_", "-")
        through = {"starlette": "fastapi"}  # what brings them
        assert through.get(brings, brings) in spelt_out(EXTRAS[extra]), package

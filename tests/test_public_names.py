"""The names of `dsv4` itself: there, the same for programs and for type checkers, and loaded only
when used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import dsv4
from dsv4 import errors

ROOT = Path(__file__).parents[1]
NAMES = [name for name in dsv4.__all__ if name != "__version__"]
TORCH_FREE = (
    *("AttentionType", "BlockBudget", "CacheSchema", "LayerSpec", "ModelSpec", "MemoryBytes"),
    *("PrefixOptions", "PrefixStats", "Resume", "SnapshotPolicy", "Stats"),
    *("compute_block_budget", "full", "periodic", "zero"),
    *(name for name in NAMES if hasattr(errors, name)),
)


def checked_imports() -> dict[str, str]:
    """Name to module, of the `if TYPE_CHECKING:` block."""
    tree = ast.parse(Path(dsv4.__file__).read_text("utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            assert alias.asname is None
            found[alias.name] = node.module
    return found


def run_python(source: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_programs_and_type_checkers_find_the_same_names_in_the_same_modules():
    assert checked_imports() == dsv4._HOME_OF
    assert sorted(NAMES) == sorted(dsv4._HOME_OF)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_defined_where_it_is_said_to_be(name: str):
    assert getattr(dsv4, name).__module__ == dsv4._HOME_OF[name]


def test_every_error_is_there():
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.Dsv4Error)
    }
    assert defined
    assert defined <= set(dsv4.__all__)


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'KVCacheManger'"):
        _ = dsv4.KVCacheManger  # type: ignore[attr-defined]


def test_dir_shows_the_names():
    assert dir(dsv4) == sorted(dsv4.__all__)


def test_completion_shows_no_internal_name():
    """Each that is left out exists, and what the README calls is there."""
    cache = dsv4.Cache("tiny", memory="32MiB", max_context=1024, max_step_tokens=256)
    request = cache.admit_request(3)
    plan = cache.prepare_forward([(request, 3)])
    for shown, names in {
        cache: ("acquire", "admit_request", "commit", "release_request", "stats", "step"),
        cache.memory: ("block_arena", "max_requests", "memory_bytes"),
        request: ("is_torn", "length", "resume"),
        plan: ("batch", "decode", "drafts", "prefill"),
        cache.acquire(0, plan.batch): ("append", "attend", "select"),
    }.items():
        assert {*names} <= {*dir(shown)}
        assert not shown._internal & {*dir(shown)}
        assert all(hasattr(shown, name) for name in shown._internal)


def test_importing_the_package_loads_no_torch():
    run_python("import sys, dsv4; assert 'torch' not in sys.modules, 'torch is loaded'")


def test_importing_the_package_or_a_tier_loads_nothing_that_a_tier_needs():
    """Not torch either. Mooncake and obstore are asked for where a tier of theirs is made."""
    optional = "('torch', 'mooncake', 'obstore')"
    run_python(
        "import sys, dsv4\n"
        "assert not [name for name in sys.modules if name.startswith('dsv4.tiers')]\n"
        "assert 'xxhash' not in sys.modules\n"
        "from dsv4 import DiskTier, HostTier, Limits, MooncakeTier, ObjectTier\n"
        f"loaded = [name for name in {optional} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        "HostTier(1 << 20, limits=Limits(threads=1)).close(1.0)\n"
    )


def test_a_tier_says_which_extra_it_needs_and_the_other_names_need_none():
    run_python(
        "import sys; sys.modules['xxhash'] = None\n"
        "from dsv4 import CacheSchema, KVCacheManager, MissingExtra\n"
        "for name in ('DiskTier', 'HostTier', 'Limits', 'MooncakeTier', 'ObjectTier'):\n"
        "    try:\n"
        "        exec(f'from dsv4 import {name}')\n"
        "    except MissingExtra as error:\n"
        "        assert 'dsv4[tiers]' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(name)\n"
    )


def test_what_planning_needs_works_where_torch_is_not_installed():
    run_python(
        "import sys; sys.modules['torch'] = None\n"
        f"from dsv4 import {', '.join(TORCH_FREE)}\n"
        "schema = CacheSchema.build(ModelSpec.preset('v4-flash'))\n"
        "budget = compute_block_budget(schema, memory_bytes=2 ** 33, max_requests=1)\n"
        "assert budget.num_blocks > 8192"
    )


def test_the_version_is_the_package_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == dsv4.__version__


# ---- what a type checker sees --------------------------------------------------------------------

USER_CODE = """
import dsv4
from dsv4 import CacheSchema, KVCacheManager, ModelSpec

schema = CacheSchema.build(ModelSpec.preset("tiny"))
manager = KVCacheManager(schema, num_blocks=4, max_requests=1, max_step_tokens=8)
request = manager.admit_request(3)
plan = manager.prepare_forward([(request, 3)])
reveal_type(schema)
reveal_type(manager)
reveal_type(request)
reveal_type(plan)
reveal_type(manager.acquire(0, plan.batch))
reveal_type(manager.stats())
reveal_type(manager.memory.memory_bytes())
"""
SEEN = (
    "dsv4.cache.schema.CacheSchema",
    "dsv4.cache.manager.KVCacheManager",
    "dsv4.cache.requests.Request",
    "dsv4.cache.prepare_forward.ForwardPlan",
    "dsv4.cache.handle.LayerCacheHandle",
    "dsv4.cache.stats.Stats",
    "dsv4.cache.stats.MemoryBytes",
)


def mypy(tmp_path: Path, source: str) -> list[str]:
    """What mypy says of a file that uses the package, as strictly as of the package itself."""
    file = tmp_path / "user.py"
    file.write_text(f"{source}# {time.time_ns()}: no other run has cached it\n", "utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(str(file))]


def test_type_checkers_see_types(tmp_path: Path):
    found = mypy(tmp_path, USER_CODE + "".join(f"reveal_type(dsv4.{name})\n" for name in NAMES))
    assert all("note: Revealed type is" in line for line in found), found
    types = [re.findall(r'"(.*)"', line)[0] for line in found]
    assert len(types) == len(SEEN) + len(NAMES)
    for seen, revealed in zip(SEEN, types, strict=False):
        assert revealed == seen
    for name, revealed in zip(NAMES, types[len(SEEN) :], strict=True):
        assert re.match(r"def |Overload\(def ", revealed), (name, revealed)


def test_type_checkers_refuse_a_misspelt_name(tmp_path: Path):
    (found,) = mypy(tmp_path, "from dsv4 import KVCacheManger\n")
    assert 'has no attribute "KVCacheManger"' in found


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "dsv4" / "py.typed").exists()

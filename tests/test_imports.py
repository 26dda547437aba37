"""Who may import whom, read from the sources.

    layout      errors, extras, model, units, cache.records, cache.pages, cache.layout,
                cache.schema and cache.state: which byte is where; without torch
      ↑
    ops         what a layer asks of a backend; imports the layout
      ↑
    reference, kernels    the two backends; import ops and the layout, and not each other
      ↑
    backends    chooses one
      ↑
    tiers       memory below the device: records and who keeps them; without torch but for pin.py
      ↑
    cache       manager, handle, requests, steps, prefixes, transfers to tiers
      ↑
    everything else: integrations, cli, demo, plots, planner, verify, …

Besides: no two modules import each other, however far around; the books of requests, blocks and
prefixes (cache.requests, cache.allocator, cache.prefix.index, …) work without torch. Imports under
TYPE_CHECKING bind no module and are left out of the graph.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYOUT = {
    "dsv4.errors",
    "dsv4.extras",
    "dsv4.model",
    "dsv4.units",
    "dsv4.cache.records",
    "dsv4.cache.layout",
    "dsv4.cache.pages",
    "dsv4.cache.schema",
    "dsv4.cache.state",
}
TORCH_FREE = {
    *LAYOUT,
    "dsv4.cache.allocator",
    "dsv4.cache.changes",
    "dsv4.cache.requests",
    "dsv4.cache.hot_rows",
    "dsv4.cache.prefix.blocks",
    "dsv4.cache.prefix.caching",
    "dsv4.cache.prefix.eviction",
    "dsv4.cache.prefix.index",
    "dsv4.cache.prefix.node",
    "dsv4.cache.prefix.observer",
    "dsv4.cache.prefix.options",
    "dsv4.cache.prefix.pins",
    "dsv4.cache.prefix.prefixes",
    "dsv4.cache.prefix.resume",
    "dsv4.cache.prefix.rows",
    "dsv4.cache.prefix.trail",
    "dsv4.cache.stats",
    "dsv4.cache.step.shape",
    "dsv4.ops.constants",
    "dsv4.cache.handoff.agent",
    "dsv4.cache.handoff.arrival",
    "dsv4.cache.handoff.lease",
    "dsv4.cache.handoff.link",
    "dsv4.cache.handoff.offer",
    "dsv4.cache.handoff.options",
    "dsv4.cache.handoff.probe",
    "dsv4.cache.handoff.rows",
    "dsv4.cache.transfers.worker",
    "dsv4.cache.transfers.labels",
    "dsv4.cache.step.sizes",
    "dsv4.kernels.sizes",
    "dsv4.planner",
    "dsv4.planning.deployment",
    "dsv4.residency_planner",
    "dsv4.routing.names",
    "dsv4.routing.router",
    "dsv4.routing.where",
}
# lower to higher; a module imports its own group and lower ones, but for what SEPARATE says
ORDER = ("layout", "ops", "reference", "kernels", "backends", "tiers", "cache", "above")
SEPARATE = {("reference", "kernels"), ("kernels", "reference")}


def group(module: str) -> str:
    """The layer of the house that a module belongs to."""
    if module in LAYOUT or module in {"dsv4", "dsv4.cache"}:
        return "layout"
    part = module.split(".")[1]
    return part if part in ORDER else "above"


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "dsv4").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(node: ast.AST, *, at_load: bool) -> Iterator[str]:
    """Full names that a piece of source imports; with `at_load` only what loading it runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports in this package are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imports(ast.Module(child.orelse, []), at_load=at_load)
        elif not (at_load and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(child, at_load=at_load)


def target(name: str) -> str:
    """The module that an imported name is in: itself, or the longest prefix that is one."""
    while name not in modules() and "." in name:
        name = name.rpartition(".")[0]
    return name


@cache
def graph(*, at_load: bool) -> dict[str, set[str]]:
    """Which modules of the package each one imports, and outside names by their first part."""
    result = {}
    for module, path in modules().items():
        tree = ast.parse(path.read_text())
        result[module] = {target(name) for name in imports(tree, at_load=at_load)} - {module}
    return result


def reached(starts: Iterable[str], edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(starts)
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(edges.get(module, ()))
    return seen


def test_the_graph_is_read_right():
    edges = graph(at_load=False)
    assert len(edges) > 90
    assert {"dsv4.cache.schema", "dsv4.errors", "numpy"} <= edges["dsv4.cache.requests"]
    assert "torch" in edges["dsv4.cache.memory"]
    assert "dsv4.kernels.append" in reached(["dsv4.cache.manager"], edges)
    assert "dsv4.kernels.append" not in reached(["dsv4.cache.manager"], graph(at_load=True))


def test_imports_only_go_down():
    rank = {name: nth for nth, name in enumerate(ORDER)}
    wrong = [
        f"{module} ({group(module)}) imports {imported} ({group(imported)})"
        for module, found in graph(at_load=False).items()
        for imported in found
        if imported in modules()
        and module != "dsv4"  # the front door, which loads names when they are asked for
        and (
            rank[group(imported)] > rank[group(module)]
            or (group(module), group(imported)) in SEPARATE
        )
    ]
    assert wrong == []


def test_no_module_comes_in_through_the_front_door():
    """`from dsv4 import KVCacheManager` would hide which module is meant."""
    for module, path in modules().items():
        names = imports(ast.parse(path.read_text()), at_load=False)
        through = {name for name in names if target(name) == "dsv4"}
        assert through <= {"dsv4.__version__"}, module


@pytest.mark.parametrize("package", ["kernels", "reference", "ops"])
def test_what_computes_knows_of_the_cache_only_the_layout(package: str):
    for module, found in graph(at_load=False).items():
        if module.startswith(f"dsv4.{package}"):
            of_cache = {name for name in found if name.startswith("dsv4.cache")}
            assert of_cache <= LAYOUT, module


def calls(module: str) -> set[str]:
    """Names of what a module calls, without what they are called on."""
    functions = (
        n.func
        for n in ast.walk(ast.parse(modules()[module].read_text()))
        if isinstance(n, ast.Call)
    )
    return {ast.unparse(function).rpartition(".")[2] for function in functions}


def test_requests_are_made_by_admission_alone():
    makers = {
        name: {m for m in modules() if name in calls(m)} for name in ("Request", "make_request")
    }
    assert makers == {"Request": {"dsv4.cache.requests"}, "make_request": {"dsv4.cache.admission"}}


def test_no_two_modules_import_each_other():
    edges = graph(at_load=False)
    for module in modules():
        below = {name for name in edges[module] if name in modules()}
        assert module not in reached(below, edges), f"{module} imports itself in a circle"


def test_the_planner_loads_without_anything_but_python():
    """It runs in a page of the docs too."""
    loaded = reached(["dsv4.planning.deployment"], graph(at_load=True))
    outside = {name.split(".")[0] for name in loaded} - {"dsv4"}
    assert outside <= set(sys.stdlib_module_names), outside


@pytest.mark.parametrize("module", sorted(TORCH_FREE))
def test_books_and_layout_load_without_torch(module: str):
    loaded = reached([module], graph(at_load=True))
    assert module in modules()
    assert not {"torch", "triton"} & {name.split(".")[0] for name in loaded}

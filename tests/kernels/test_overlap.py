"""Every kernel waits for the launch before it first of all: launches overlap where a GPU lets them.
What was compiled is looked at in test_every_target.py."""

from __future__ import annotations

import ast
import pkgutil
from importlib import import_module
from pathlib import Path

import dsv4.kernels
from dsv4.kernels.target import TARGETS
from tests.kernels import every_launch


def kernels() -> dict[str, ast.FunctionDef]:
    found = {}
    for module in pkgutil.walk_packages(dsv4.kernels.__path__, "dsv4.kernels."):
        path = Path(str(import_module(module.name).__file__))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[f"{module.name}.{node.name}"] = node
    return found


def test_every_kernel_begins_with_it() -> None:
    found = kernels()
    assert len(found) > 15
    for name, kernel in found.items():
        body = kernel.body[1:] if ast.get_docstring(kernel) else kernel.body
        assert ast.unparse(body[0]) == "begin_program()", name


def test_every_kernel_is_compiled_by_tests() -> None:
    hopper = TARGETS["sm_90"]
    launches = every_launch.launches(hopper, every_launch.names(hopper))
    listed = {launch.kernel.fn.__name__ for _, launch in launches}
    assert listed == {name.rpartition(".")[2] for name in kernels()}


def test_launches_begin_early_where_a_gpu_lets_them() -> None:
    asked = {"num_warps": 4, "enable_fp_fusion": False}
    assert TARGETS["sm_90"].options(**asked) == {**asked, "launch_pdl": True}
    whole = {**asked, "launch_pdl": False}
    assert TARGETS["sm_90"].options(**whole) == whole
    for name in ("sm_80", "sm_89", "gfx942"):
        assert TARGETS[name].options(**whole) == asked

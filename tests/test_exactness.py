"""docs/exactness.md is complete: every call whose result may depend on the machine stands there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/exactness.md"
SCANNED = ("reference", "rope.py", "verify.py", "integrations/transformers")

# computed by a vector maths library, or by something that is made of such calls
VECTOR_MATHS = {
    *("sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "ln"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "polar"),
    *("sigmoid", "softmax", "log_softmax", "logsumexp", "logaddexp", "softplus", "silu", "gelu"),
    *("erf", "erfc", "pow", "float_power", "ldexp", "hypot", "norm", "layer_norm", "std", "var"),
    *("scaled_dot_product_attention", "apply_rotary_pos_emb"),
}
# the order of their sums is the library's
SUMS = {
    *("sum", "nansum", "mean", "nanmean", "prod", "cumsum", "cumprod", "matmul", "mm", "bmm", "mv"),
    *("dot", "vdot", "inner", "einsum", "tensordot", "addmm", "addbmm", "baddbmm", "linear"),
}
FUSED = {"addcmul", "addcdiv", "lerp", "fma", "addr"}

Found = tuple[str, str, str]  # file, function, call


def calls_of(path: Path) -> Iterator[Found]:
    """Every suspicious call of a file, with the innermost function that it is in."""
    name = str(path.relative_to(ROOT / "dsv4"))

    def walk(node: ast.AST, function: str) -> Iterator[Found]:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        call = suspicious(node)
        if call is not None:
            yield name, function, call
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "")


def suspicious(node: ast.AST) -> str | None:
    if isinstance(node, ast.BinOp | ast.AugAssign):
        if isinstance(node.op, ast.MatMult):
            return "@"
        if isinstance(node.op, ast.Pow):
            return "**" if any(isinstance(n, ast.Name) for n in ast.walk(node)) else None
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    if isinstance(called, ast.Name):
        return called.id if called.id in VECTOR_MATHS | FUSED else None
    if not isinstance(called, ast.Attribute):
        return None
    # a norm that is a module of the model
    if called.attr.rstrip("_") in VECTOR_MATHS | SUMS | FUSED or called.attr.endswith("_norm"):
        return called.attr
    return None


def scanned_files() -> list[Path]:
    files = []
    for name in SCANNED:
        path = ROOT / "dsv4" / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def table(heading: str) -> list[list[str]]:
    """The rows of the table under a heading of the page, without their back quotes."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [
        [cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows[2:]
    ]


def listed() -> set[Found]:
    return {
        (file, function, call)
        for file, function, calls, _ in table("Calls")
        for call in calls.split(", ")
    }


def test_every_call_is_on_the_list():
    found = {call for path in scanned_files() for call in calls_of(path)}
    assert sorted(found - listed()) == []


def test_nothing_is_on_the_list_that_is_not_there():
    found = {call for path in scanned_files() for call in calls_of(path)}
    assert sorted(listed() - found) == []


def test_every_call_has_a_reason():
    for *place, reason in table("Calls"):
        assert len(reason) > 10, place


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("y = x.sqrt()", "sqrt"),
        ("y = torch.rsqrt(x)", "rsqrt"),
        ("x.exp_()", "exp_"),
        ("y = x @ w", "@"),
        ("y = theta ** x", "**"),
        ("y **= 2", "**"),
        ("y = F.softmax(x, -1)", "softmax"),
        ("y = cos(x)", "cos"),
        ("y = module.kv_norm(x)", "kv_norm"),
        ("y = torch.addcmul(a, b, c)", "addcmul"),
    ],
)
def test_the_scan_sees(source: str, call: str):
    assert call in [suspicious(node) for node in ast.walk(ast.parse(source))]


@pytest.mark.parametrize("source", ["y = 2.0**-126", "y = sum(counts)", "y = exp_nonpositive(x)"])
def test_the_scan_passes_over(source: str):
    assert {suspicious(node) for node in ast.walk(ast.parse(source))} == {None}


# ---- launches -----------------------------------------------------------------------------------


def launchers() -> Iterator[tuple[str, bool]]:
    """Files that launch kernels, and whether they forbid fused multiply-adds."""
    for path in sorted((ROOT / "dsv4/kernels").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        if any(isinstance(node, ast.Call) and launched_kernel(node) for node in nodes):
            yield str(path.relative_to(ROOT / "dsv4")), any(map(forbids_fusion, nodes))


def launched_kernel(call: ast.Call) -> bool:
    """`_a_kernel[grid](…)` or `Launch(_a_kernel, …)`."""
    named = call.func.value if isinstance(call.func, ast.Subscript) else None
    if isinstance(call.func, ast.Name) and call.func.id == "Launch" and call.args:
        named = call.args[0]
    return isinstance(named, ast.Name) and named.id.endswith("_kernel")


def forbids_fusion(node: ast.AST) -> bool:
    """enable_fp_fusion=False in a call, or in a dictionary of options."""
    if isinstance(node, ast.keyword):
        return node.arg == "enable_fp_fusion" and ast.unparse(node.value) == "False"
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return any(
            isinstance(k, ast.Constant)
            and k.value == "enable_fp_fusion"
            and ast.unparse(v) == "False"
            for k, v in pairs
        )
    return False


def test_no_kernel_writes_minus_zero_as_a_number():
    """Triton makes +0 of it: it is written by its bits."""
    for path in sorted((ROOT / "dsv4/kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
            number = ast.unparse(node.operand) if negated else ""
            assert number not in ("0.0", "0"), f"{path.name}:{node.lineno}"


def test_launches_that_may_fuse_are_on_the_list():
    may_fuse = {file for file, forbidden in launchers() if not forbidden}
    assert may_fuse == {file for file, _ in table("Launches that may fuse")}


def test_every_launch_says_whether_it_may_fuse():
    """Triton's default changes in 3.10, and 3.9 warns of it."""
    silent = []
    for path in sorted((ROOT / "dsv4/kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Dict):
                names = [k.value if isinstance(k, ast.Constant) else k for k in node.keys]
                # a key of None is another dictionary, which is looked at too
                if "num_warps" in names and not {"enable_fp_fusion", None} & {*names}:
                    silent.append(f"{path.name}:{node.lineno}")
    assert silent == []


def test_what_stores_records_never_fuses():
    exact = {file for file, forbidden in launchers() if forbidden}
    stores = {"kernels/append.py", "kernels/write_records.py", "kernels/index_query.py"}
    assert stores <= exact

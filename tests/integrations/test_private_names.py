"""The list of private names (private.py) is complete, and the installed versions have them all.

`make test-newest-transformers` runs this on the newest transformers and PEFT. With both unpacked
somewhere: PYTHONPATH=THERE pytest tests/integrations/test_private_names.py.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dsv4.errors import MissingExtra
from dsv4.integrations.transformers import accelerate
from dsv4.integrations.transformers import private as listed
from dsv4.integrations.transformers.private import PLACES, PRIVATE, SEEN, missing, require_names
from tests.integrations.fast_v4 import plain_model

SOURCES = sorted(Path(listed.__file__).parent.glob("*.py"))
LISTED = {name for each in PRIVATE for name in re.findall(r"\w+", each.name)}
# what anybody may import from
PUBLIC_MODULES = {"torch", "torch.nn", "transformers"}
# how the sources call modules of V4, whose attributes have no underscore
V4_VARIABLES = {"module", "compressor", "indexer", "scorer", "rotary", "attention"}
PUBLIC_ATTRIBUTES = {
    *(name for name in dir(torch.nn.Module) if not name.startswith("_")),
    "__dict__",
    "config",
    "training",
    "self_attn",  # a decoder layer without one is refused with a message (model.py)
    *("weight", "bias"),  # of torch's Linear
}
# what layers of PEFT may have, and DTensors always had
OPTIONAL = {"scaling", "merged_adapters"}


def own_names(trees: list[ast.Module]) -> set[str]:
    """What the integration itself defines or assigns."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-z]\w*", name) is not None


def uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names of others that a source uses: attributes and strings that begin with an
    underscore, imports from modules that are not public, and whatever is taken from V4's modules.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in own:
                yield node.attr
            holder = node.value
            last = holder.attr if isinstance(holder, ast.Attribute) else ast.unparse(holder)
            if last in V4_VARIABLES and node.attr not in PUBLIC_ATTRIBUTES | own:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if is_private(node.value) and node.value not in own:
                yield node.value
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            is_theirs = module.split(".")[0] in ("torch", "transformers", "peft")
            if is_theirs and module not in PUBLIC_MODULES:
                yield from (f"{module}.{alias.name}" for alias in node.names)
    for node in ast.walk(tree):  # own["q_a_proj"], compressor._modules.get("indexer")
        keys: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and of_a_module(node.value):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_asked = node.func.attr == "get" and of_a_module(node.func.value)
            keys = node.args[:1] if is_asked else []
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def of_a_module(node: ast.expr) -> bool:
    name = ast.unparse(node)
    return name in ("own", "tuner") or name.endswith(("._modules", "._parameters", "._buffers"))


def unlisted(source: str, own: set[str]) -> set[str]:
    listed_imports = {f"{each.place}.{each.name}" for each in PRIVATE} | {
        # a class that is a place of its own, and modules by their last name
        *PLACES,
        "torch.nn.modules.module",
    }
    known = LISTED | OPTIONAL | PUBLIC_ATTRIBUTES
    return {
        name
        for name in uses(ast.parse(source), own)
        if name not in (listed_imports if "." in name else known)
    }


def sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in SOURCES if path.name != "private.py"}


def owned() -> set[str]:
    return own_names([ast.parse(source) for source in sources().values()])


@pytest.mark.parametrize("name", sorted(sources()))
def test_a_source_uses_no_private_name_that_is_not_listed(name: str) -> None:
    assert unlisted(sources()[name], owned()) == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x = model._private", "_private"),
        ("vars(model)['_is_new'] = 1", "_is_new"),
        ("getattr(model, '_other', None)", "_other"),
        (
            "from transformers.utils import logging",
            "transformers.utils.logging",
        ),
        ("from torch.nn.modules.linear import Bilinear", "torch.nn.modules.linear.Bilinear"),
        ("q = own['q_c_proj']", "q_c_proj"),
        ("x = compressor._modules.get('indexer_2')", "indexer_2"),
        ("scale = scorer.other_scale", "other_scale"),
        ("n = self.attention.rotation", "rotation"),
    ],
)
def test_a_new_use_is_found(source: str, name: str) -> None:
    assert unlisted(source, owned()) == {name}


def test_what_is_listed_is_used() -> None:
    """A name that nobody uses any more leaves the list."""
    text = "\n".join(path.read_text() for path in SOURCES)
    for each in PRIVATE:
        names = [name for name in re.findall(r"\w+", each.name) if name != "or"]
        assert any(len(re.findall(rf"\b{name}\b", text)) > 1 for name in names), each.name


def test_the_installed_versions_have_every_name() -> None:
    lacking = missing(plain_model())
    assert not lacking, "\n".join(map(str, lacking))


def test_an_installed_peft_has_every_name() -> None:
    pytest.importorskip("peft.tuners.tuners_utils")
    lacking = [each for each in missing() if each.package == "peft"]
    assert not lacking, "\n".join(map(str, lacking))


def test_every_name_says_what_it_is_for_and_where_it_was_seen() -> None:
    for each in PRIVATE:
        assert each.place in PLACES
        assert each.purpose
        assert len(SEEN[each.package]) >= 1
        assert f"has no {each.name}" in str(each)


def test_a_module_that_lost_a_name_is_refused_before_anything_changes() -> None:
    model = copy.deepcopy(plain_model())
    scorer = model.model.layers[1].self_attn.compressor.indexer.scorer
    del scorer.weights_scaling
    with pytest.raises(MissingExtra) as error:
        accelerate(model, max_batch=1, max_context=256)
    for part in ("weights_scaling", "a V4 index scorer", transformers.__version__, "weigh", "5.17"):
        assert part in str(error.value)
    assert "forward" not in vars(model.model)


def test_a_version_that_lost_a_name_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.PreTrainedModel, "_is_stateful")
    with pytest.raises(MissingExtra, match=r"_is_stateful in transformers\.PreTrainedModel"):
        require_names()


def test_a_class_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.multiprocessing.reductions, "StorageWeakRef")
    with pytest.raises(MissingExtra, match="StorageWeakRef"):
        require_names()


def test_a_forward_with_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any, position_ids: Any = None) -> None: ...

    modeling: Any = sys.modules["transformers.models.deepseek_v4.modeling_deepseek_v4"]
    monkeypatch.setattr(modeling.DeepseekV4Model, "forward", forward)
    with pytest.raises(MissingExtra, match=r"forward\(input_ids, attention_mask"):
        require_names()


def test_unknown_wrappers_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps then run with whatever is around the forward."""
    monkeypatch.setattr(listed, "_WRAPPERS", ["another.py"])
    require_names()
    assert [each.optional for each in missing()] == [True]

"""Kernels have the same keys in Triton's cache whatever a process has compiled before."""

from __future__ import annotations

import json
import pkgutil
import sys
from importlib import import_module
from typing import Any

from tests.kernels.compiling import run_apart


def test_keys_do_not_depend_on_the_order_in_which_they_are_asked_for() -> None:
    first, last = (run_apart("tests.kernels.test_cache_key", order) for order in ("up", "down"))
    assert first["keys"] == last["keys"]
    assert len(first["keys"]) > 100


def test_no_kernel_knows_two_constants_by_one_name() -> None:
    """Triton puts those of one name into the order of their modules' addresses."""
    assert run_apart("tests.kernels.test_cache_key", "up")["ambiguous"] == []


def main(order: str) -> None:
    import dsv4.kernels
    from dsv4.kernels.cache_key import cache_key

    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(dsv4.kernels.__path__, "dsv4.kernels."):
        for name, value in vars(import_module(module.name)).items():
            if hasattr(value, "cache_key") and hasattr(value, "used_global_vals"):
                found[f"{module.name}.{name}"] = value
    names = sorted(found, reverse=order == "down")
    keys = {name: cache_key(found[name]) for name in names}
    print(json.dumps({"keys": keys, "ambiguous": [*filter(None, map(_ambiguous, found.values()))]}))


def _ambiguous(kernel: Any) -> str | None:
    from triton.language.core import constexpr

    seen: dict[str, str] = {}
    for (name, _), (value, _) in kernel.used_global_vals.items():
        if isinstance(value, constexpr) and seen.setdefault(name, str(value)) != str(value):
            return f"{kernel.fn.__name__}: {name}"
    return None


if __name__ == "__main__":
    main(sys.argv[1])

"""Whether products and sums may be fused is said at every launch, so Triton's own default, which is
a setting and changes in 3.10, changes no binary.

Run as a program (TRITON_INTERPRET unset) this file prints what the compiler is asked for each
launch of a target, or the PTX of some.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import fields

import pytest
from triton.compiler import make_backend

from dsv4.kernels.target import TARGETS, Target
from tests.kernels import every_launch
from tests.kernels.sm90 import compiled, run_apart

SETTING = "TRITON_DEFAULT_FP_FUSION"
# some that store bytes, score or select, and one that may fuse
COMPILED = ["append flash window decode", "query mxfp4", "scores mxfp4 band 1", "gather entries"]


def asked(target: Target) -> dict[str, tuple[bool, str]]:
    """Of every launch: whether it may fuse, and what all its options come to in Triton's cache."""
    backend, found = make_backend(target.triton_target), {}
    for name, launch in every_launch.launches(target, every_launch.names(target)):
        parsed = backend.parse_options(target.options(**launch.options))
        assert "enable_fp_fusion" in {field.name for field in fields(parsed)}
        assert parsed.enable_fp_fusion == launch.options["enable_fp_fusion"]
        found[name] = parsed.enable_fp_fusion, parsed.hash()
    return found


@pytest.mark.parametrize("name", ["sm_90", pytest.param("gfx942", marks=pytest.mark.nightly)])
def test_no_launch_depends_on_the_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for setting in ("0", "1"):
        monkeypatch.setenv(SETTING, setting)
        found.append(run_apart("tests.kernels.test_fp_fusion_sm90", "asked", name))
    assert len(found[0]) > 40
    assert found[0] == found[1]
    assert {fuses for fuses, _ in found[0].values()} == {False, True}


def test_the_same_ptx_under_both_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for setting in ("0", "1"):
        monkeypatch.setenv(SETTING, setting)
        found.append(run_apart("tests.kernels.test_fp_fusion_sm90", *COMPILED))
    assert found[0] == found[1]


def test_a_launch_that_does_not_say_is_refused() -> None:
    with pytest.raises(TypeError, match="enable_fp_fusion"):
        TARGETS["sm_90"].options(num_warps=4)  # type: ignore[call-arg]


if __name__ == "__main__":
    if sys.argv[1] == "asked":
        print(json.dumps(asked(TARGETS[sys.argv[2]])))
    else:
        launches = every_launch.launches(TARGETS["sm_90"], sys.argv[1:])
        ptx = {name: compiled(launch).ptx.encode() for name, launch in launches}
        print(json.dumps({name: hashlib.sha256(text).hexdigest() for name, text in ptx.items()}))

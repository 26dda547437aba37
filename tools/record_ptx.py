"""Keeps the PTX of every kernel that the sm_90 tests compile.

    RECORD_PTX=FOLDER PYTHONPATH=tools pytest -p record_ptx tests/kernels/test_append_sm90.py

As a pytest plugin it has the Python processes that tests start (`python -m MODULE CASE` or
`python FILE`) run by this file, which writes one JSON file per compiled kernel into the folder.
What tests see and assert does not change.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any


def pytest_configure() -> None:
    run = subprocess.run

    def recorded(command: Any, **more: Any) -> Any:
        if command[0] == sys.executable:
            command = [sys.executable, __file__, *command[1:]]
        return run(command, **more)

    subprocess.run = recorded  # type: ignore[assignment]


def main() -> None:
    """Runs the rest of the command line as Python would, and records what it compiles."""
    import triton

    by_name = sys.argv[1] == "-m"
    target, *case = sys.argv[2:] if by_name else sys.argv[1:]
    name = Path(target).stem if not by_name else target.rpartition(".")[2]
    name = name.removeprefix("test_").removesuffix("_sm90")
    folder, compile_source = Path(os.environ["RECORD_PTX"]), triton.compile
    compiled = 0

    def recorded(source: Any, **more: Any) -> Any:
        nonlocal compiled
        binary = compile_source(source, **more)
        compiled += 1
        kept = {
            "case": f"{name}: {' '.join([*case, str(compiled)])}",
            "kernel": source.fn.__name__,
            "shared_bytes": binary.metadata.shared,
            "ptx": binary.asm["ptx"],
        }
        file = folder / f"{kept['case'].replace(': ', '-').replace(' ', '_')}.json"
        file.write_text(json.dumps(kept))
        return binary

    triton.compile = recorded
    sys.argv = [target, *case]
    sys.path[0] = os.getcwd() if by_name else str(Path(target).parent)
    if by_name:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()

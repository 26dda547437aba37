"""Runs `python -m MODULE CASE` many times with one import of torch and Triton: each in a process of
its own, forked from this one. `compiling.run_apart` talks to it, a line of JSON each way."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from typing import IO, NoReturn

import tests.kernels.compiling
import tests.kernels.every_launch
import tests.support.stack  # noqa: F401  what the modules import, once


def run(module: str, case: list[str]) -> tuple[int, str, str]:
    """The exit code of `python -m module case`, and what it printed to stdout and stderr."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            _become(module, case, out, errors)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), errors.read()


def _become(module: str, case: list[str], out: IO[str], errors: IO[str]) -> NoReturn:
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for ours, standard in ((nothing, 0), (out.fileno(), 1), (errors.fileno(), 2)):
            os.dup2(ours, standard)
        sys.argv = [module, *case]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        module, *case = json.loads(line)
        print(json.dumps(run(module, case)), flush=True)


if __name__ == "__main__":
    main()

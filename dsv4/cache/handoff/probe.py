"""Tests in a separate process whether NIXL survives an offer's metadata. Torch-free.

NIXL and UCX end the process at metadata that is not what they wrote: one changed byte is enough,
and nothing else can check it, because only they know its format. So a link connects to a peer only
after another process, with the same libraries and settings, has read 64 bytes from it, the pledge.
If that process dies or hangs, no answer comes, and the link does not connect to the peer.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from multiprocessing.spawn import get_executable
from typing import Any

import numpy as np

from dsv4.cache.handoff.agent import make_agent, meet
from dsv4.cache.handoff.offer import PLEDGE_BYTES

PROBE_S = 30  # then the process ends by itself, even if it was forgotten
_ANSWER = b"read"
_ERROR_BYTES = 300
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dsv4.cache.handoff.probe import main; main()"
)


class Probe:
    """A process that reads an owner's pledge. Raises OSError if it cannot be started."""

    def __init__(self, peer: str, metadata: bytes, pledge_at: int) -> None:
        job = json.dumps([peer, metadata.hex(), pledge_at]).encode()
        path = [each for each in sys.path if isinstance(each, str)]  # Python ignores the rest
        # not a pipe: the process never waits until it is read
        with open(os.memfd_create("dsv4-probe"), "r+b") as given:
            given.write(job)
            given.seek(0)
            self._process = subprocess.Popen(
                [get_executable(), "-S", "-c", _CODE, json.dumps(path)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "UCX_HANDLE_ERRORS": "none"},
            )

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> str | None:
        """Ends it, unless it has finished. Returns why the peer must not be connected to, or
        None."""
        with self._process as process:
            process.kill()
            assert process.stdout is not None
            answer: bytes = process.stdout.read(_ERROR_BYTES)
        if answer == _ANSWER:  # the exit status may be lost if other code reaps children
            return None
        shown = "".join(c if c.isprintable() else "?" for c in answer.decode(errors="replace"))
        return f"NIXL cannot read with its metadata: {shown or _fate(self._process.returncode)}"


def _fate(status: int) -> str:
    if status >= 0:
        return f"the process that tried it exited with {status}"
    return f"the process that tried it ended with signal {-status}"


def main() -> None:
    """Runs in the process: reads, and reports on a channel other than stdout, where UCX and NIXL
    log."""
    where = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # ignored and blocked signals are inherited
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(PROBE_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        peer, metadata, pledge_at = json.load(sys.stdin)
        _read(peer, bytes.fromhex(metadata), pledge_at)
        answer = _ANSWER
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}".encode()[:_ERROR_BYTES]
    os.write(where, answer)
    os._exit(0)


def _read(peer: str, metadata: bytes, pledge_at: int) -> None:
    agent: Any = make_agent(f"probe-{os.urandom(16).hex()}")
    here = np.zeros(PLEDGE_BYTES, np.uint8)
    own = [(here.ctypes.data, PLEDGE_BYTES, 0)]
    agent.register_memory([(*own[0], "")], "DRAM", backends=["UCX"])
    meet(agent, peer, metadata)
    descriptors = [
        agent.get_xfer_descs(each, "DRAM") for each in (own, [(pledge_at, PLEDGE_BYTES, 0)])
    ]
    handle = agent.initialize_xfer("READ", *descriptors, peer, b"")
    state = agent.transfer(handle)
    while state == "PROC":
        time.sleep(0.0005)
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise ValueError("NIXL reports an error")

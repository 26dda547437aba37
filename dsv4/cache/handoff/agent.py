"""NIXL's agent of one process: loading it, making it, connecting it to a peer. Torch-free."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

from dsv4.errors import MissingExtra

MODULES = ("nixl_cu13", "nixl_cu12")
_PROGRESS_US = 500  # how often NIXL's own thread looks, if no event wakes it
_MAKING = threading.Lock()


def load_nixl() -> Any:
    """NIXL's Python side, whichever build of it is installed. Raises MissingExtra."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # the link reports what went wrong
    # UCX loads RDMA drivers of the system, and those the system's libibverbs. Loaded after the one
    # in NIXL's wheel, its libnl binds to the wheel's, and the process ends with SIGSEGV; loaded
    # before, it has its own.
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
    errors = []
    for module in MODULES:
        logging.getLogger(module).setLevel(logging.ERROR)
        try:
            return import_module(f"{module}._api")
        except ImportError as error:
            errors.append(str(error))
    raise MissingExtra(
        f"the hand-off needs NIXL ({'; '.join(errors)}): install it with pip install 'dsv4[nixl]'"
    )


def make_agent(name: str) -> Any:
    """NIXL's agent of one process. Its thread, which answers reads over TCP, spins on a core with
    the delay that the Python side sets, 0; with any other delay it waits for events."""
    nixl = load_nixl()
    bindings = nixl.nixlBind
    plain = bindings.nixlAgentConfig

    class Config(plain):  # type: ignore[misc, valid-type]
        def __setattr__(self, field: str, value: object) -> None:
            super().__setattr__(field, _PROGRESS_US if field == "pthrDelay" else value)

    with _MAKING:
        bindings.nixlAgentConfig = Config
        try:
            return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        finally:
            bindings.nixlAgentConfig = plain


def meet(agent: Any, peer: str, metadata: bytes) -> None:
    """Registers a peer with NIXL. Raises ValueError if the metadata belongs to another peer, and
    NIXL's errors. Bytes that NIXL did not write may end the process: a probe goes first."""
    found = agent.add_remote_agent(metadata)
    found = found.decode() if isinstance(found, bytes) else found
    if found != peer:
        raise ValueError(f"the offer names {peer}, its metadata {found}")

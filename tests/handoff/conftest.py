"""NIXL, over TCP on loopback as between machines."""

from __future__ import annotations

import os

import pytest

from dsv4.cache.handoff.agent import load_nixl
from dsv4.errors import MissingExtra
from tests.support.tiers import unavailable

os.environ["UCX_TLS"] = "tcp"  # before the first agent; on one machine it would take shared memory


@pytest.fixture(scope="session", autouse=True)
def nixl() -> None:
    """NIXL can be loaded."""
    try:
        load_nixl()
    except MissingExtra as error:
        unavailable(str(error))

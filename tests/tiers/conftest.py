"""The real components, started once per test process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.tiers import Memory, free_port, mooncake_master, s3_server, unavailable

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture(scope="session")
def mooncake() -> None:
    """Mooncake's client can be loaded."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        unavailable(
            f"Mooncake does not load ({error}): pip install 'dsv4[mooncake]', "
            "apt-get install libibverbs1 libnuma1"
        )


@pytest.fixture(scope="session")
def master_port(mooncake: None) -> Iterator[int]:
    port = free_port()
    with mooncake_master(port):
        yield port


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        unavailable(f"obstore does not load ({error}): pip install 'dsv4[object]'")
    port = free_port()
    with s3_server(port):
        yield port

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.serve.serving import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One for a module: its tests run one after another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with running() as found:
        yield found
    torch.set_num_threads(threads)

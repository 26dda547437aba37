"""Which life the Triton kernels lead in this process, and which tests that leaves out.

Triton reads TRITON_INTERPRET when a kernel is decorated, so one process has interpreted kernels or
compiled ones, never both. Without a GPU every test process interprets; with one, kernels are
compiled unless the flag was given. Tests that compile for sm_90 start a process of their own.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress

import pytest
import torch

from dsv4.errors import MissingExtra
from tests.support.needs import why_not

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)  # xdist fills the cores; threads that wait for each other waste them
with suppress(MissingExtra):
    from dsv4.tiers.tier import Limits

    # a busy machine is no outage: a tier whose deadline is to pass has limits of its own
    Limits.__init__.__kwdefaults__["deadline_s"] = 120.0


EXHAUSTIVE = "exhaustive: run with -m nightly"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a test that is skipped has failed, unless it is an exhaustive one",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        why = str(report.longrepr)
        if EXHAUSTIVE not in why:
            report.outcome, report.longrepr = "failed", f"skipped, with --no-skips: {why}"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thinned_out = pytest.mark.skip(reason=EXHAUSTIVE)
    for item in items:
        if reason := why_not(item.iter_markers()):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("nightly") and "nightly" not in config.getoption("-m"):
            item.add_marker(thinned_out)

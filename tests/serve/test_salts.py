"""What a client learns of prompts of another salt, through the API: nothing in usage, no token less
to run, and no time beyond noise."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from typing import Any

import numpy as np
import pytest

from tests.serve.serving import Running, running
from tests.support.numbers import Numbers

ASK = {"model": "stand-in", "temperature": 0, "max_tokens": 1}


def post(server: Running, prompt: str, salt: str) -> dict[str, Any]:
    with server.http() as client:
        found = client.post("/v1/completions", json={**ASK, "prompt": prompt, "cache_salt": salt})
    result: dict[str, Any] = found.json()["usage"]
    return result


@pytest.mark.parametrize("explain", [False, True])
def test_a_prompt_of_another_salt_runs_whole_and_reports_the_same(explain: bool) -> None:
    """As one that nobody ever asked. With the same salt, tokens are skipped: the test sees that."""
    ran: list[int] = []
    with running(explain=explain) as server:
        forward = server.engine.model.forward

        def counted(plan: Any, ids: Any, rows: Any) -> Any:
            ran.append(len(ids))
            return forward(plan, ids, rows)

        server.engine.model.forward = counted
        found = []
        for prompt, salt in (
            ("s" * 700, "a"),
            ("s" * 700, "b"),
            ("t" * 700, "b"),
            ("s" * 700, "a"),
        ):
            ran.clear()
            usage = post(server, prompt, salt)
            found.append((sum(ran), len(ran), usage))
    first, other, unheard_of, again = found
    assert first == other == unheard_of
    assert again[0] < first[0]
    assert again[2] != first[2]


def test_the_work_for_a_prompt_is_the_same_whatever_another_salt_has_cached() -> None:
    """Counted in calls of the thread that steps, which no other work on the machine changes."""
    counted: list[int] = []
    with running(max_requests=8) as server:
        runner = server.state.runner
        step = runner._step

        def profiled() -> None:
            def count(_: Any, event: str, __: Any) -> None:
                counted[0] += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                step()
            finally:
                sys.setprofile(None)

        def calls(prompt: str, salt: str) -> int:
            counted[:] = [0]
            post(server, prompt, salt)
            server.wait_until(server.is_idle)
            return counted[0]

        calls("warm" * 200, "mine")
        runner._step = profiled  # type: ignore[method-assign]
        gc.disable()  # what it finalizes would be counted
        try:
            for letter in "ab":
                calls(letter * 700, "their")
            found = [calls(letter * 700, "mine") for letter in ("x", "a", "y", "b")]
            same = calls("x" * 700, "mine")
        finally:
            gc.enable()
    nobody, other, again, another = found
    assert nobody > 1000
    assert other == another == nobody == again
    assert same < nobody


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_time_does_not_say_what_another_salt_has_cached() -> None:
    """Prompts that another salt has cached, and prompts that nobody asked, in random order: their
    times differ by less than noise. Prompts that the same salt has cached are faster, so the test
    would see it."""
    numbers, count = Numbers(1), 150
    with running(max_requests=1) as server:
        times: dict[str, list[float]] = {"other": [], "nobody": [], "same": []}
        for nth in range(count):
            prompts = {name: f"{nth} {name} ".ljust(900, "x") for name in times}
            post(server, prompts["other"], "their")
            post(server, prompts["same"], "mine")
            for name in (list(times)[at] for at in numbers.permutation(len(times))):
                begun = time.perf_counter()
                post(server, prompts[name], "mine")
                times[name].append(time.perf_counter() - begun)
    assert rank_z(times["same"], times["nobody"]) < -5
    assert abs(rank_z(times["other"], times["nobody"])) < 4
    same, other, nobody = (statistics.median(times[name]) for name in ("same", "other", "nobody"))
    assert abs(other - nobody) < (nobody - same) / 10


def rank_z(first: list[float], second: list[float]) -> float:
    """Of Mann and Whitney: how many standard deviations the first are larger than by chance."""
    ranks = np.argsort(np.argsort(np.array(first + second))) + 1
    n, m = len(first), len(second)
    above = ranks[:n].sum() - n * (n + 1) / 2
    return float((above - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12))

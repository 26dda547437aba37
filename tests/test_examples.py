"""The examples run as they stand, and what they show is true."""

from __future__ import annotations

import re
import runpy
import warnings
from collections.abc import Iterator

import pytest
import torch

from dsv4.cache.handoff.agent import load_nixl
from dsv4.errors import MissingExtra
from dsv4.testing import VOCABULARY
from examples import decode_loop, disaggregated, transformers_generate
from tests.support.numbers import Numbers
from tests.support.tiers import unavailable


def prompts() -> list[list[int]]:
    numbers = Numbers(5)
    return [numbers.integers(0, VOCABULARY, n).tolist() for n in (61, 3, 129)]


def test_chunks_drafts_and_company_do_not_change_what_is_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_loop, "NEW_TOKENS", 16)
    together = {
        tuple(g.tokens[: g.prompt_tokens]): g for g in decode_loop.generate(prompts(), (0, 0, 3))
    }
    assert sum(g.drafts_kept for g in together.values()) > 0

    # alone, the prompt in one piece, then token by token
    monkeypatch.setattr(decode_loop, "CHUNK_TOKENS", 1000)
    monkeypatch.setattr(decode_loop, "DRAFT_TOKENS", 0)
    for prompt in prompts():
        (alone,) = decode_loop.generate([prompt], (0,))
        assert len(alone.generated) == 16
        assert alone.generated == together[tuple(prompt)].generated[:16]


def test_wrong_drafts_are_dropped() -> None:
    """The guess is often wrong: were wrong drafts kept, the answers would be copies of it."""

    class Known:
        length = 4

    generation = decode_loop.Generation(
        request=Known(),  # type: ignore[arg-type]
        tokens=[7, 8, 9, 3, 7],
        prompt_tokens=4,
    )
    assert generation.next_input() == [7, 8, 9, 3]  # the newest token, and what followed it before
    assert generation.take([7, 8, 9, 3], chosen=[8, 5, 1, 2]) == 2
    assert generation.tokens == [7, 8, 9, 3, 7, 8, 5]


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    """The examples choose for their own process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run_script(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that `python -m examples.NAME` prints; here, where torch is loaded already."""
    code: object = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'examples", RuntimeWarning)  # imported above
        try:
            runpy.run_module(f"examples.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
    assert not code
    return capsys.readouterr().out.splitlines()


def test_the_decode_loop_runs_as_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_script("decode_loop", capsys)
    prompts_done = sorted(int(line.split()[2]) for line in lines)
    assert prompts_done == sorted(decode_loop.PROMPT_TOKENS)


def test_the_engine_runs_as_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    """All jobs end, those behind a shared beginning skip it, and no block is lost."""
    *jobs, blocks = run_script("engine", capsys)
    assert len(jobs) == 5
    assert [int(line.split()[2]) for line in jobs] == [240, 380, 3, 290, 264]
    assert all("256 not run" in line for line in jobs[3:])
    assert not all(line.endswith("preempted 0 times") for line in jobs)
    free, cached, total = (int(n) for n in re.findall(r"\d+", blocks))
    assert free + cached == total


def test_the_transformers_example_runs_as_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_script("transformers_generate", capsys)
    assert lines[-1] == "as transformers generates them alone: yes"
    for tokens in transformers_generate.PROMPT_TOKENS:
        assert any(f"prompt of {tokens} tokens: [" in line for line in lines)


def test_the_transformers_example_notices_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    right = transformers_generate.padded
    monkeypatch.setattr(transformers_generate, "padded", lambda p: right(p[::-1]))
    assert transformers_generate.main() == 1


def test_the_disaggregated_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three more processes; one request moves in the middle of its answer."""
    try:
        load_nixl()
    except MissingExtra as error:
        unavailable(str(error))
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert disaggregated.main() == 0
    *jobs, last = capsys.readouterr().out.splitlines()
    assert last == "as a single process generates them: yes"
    assert [int(line.split()[2]) for line in jobs] == list(disaggregated.PROMPT_TOKENS)
    assert "prefill → decode 1 → decode 0" in jobs[disaggregated.MOVES]
    assert not any("computed" in line for line in jobs)


def test_the_disaggregated_example_notices_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [disaggregated.Job(prompt=[1, 2, 3], tokens=[1, 2, 3, *[0] * 24])]
    monkeypatch.setattr(disaggregated, "PROMPT_TOKENS", (3,))
    monkeypatch.setattr(disaggregated, "route", lambda prompts: jobs)
    monkeypatch.setattr(
        decode_loop,
        "generate",
        lambda *_: [
            decode_loop.Generation(request=None, tokens=[1, 2, 3, *[1] * 24], prompt_tokens=3)
        ],  # type: ignore[arg-type]
    )
    assert disaggregated.main() == 1

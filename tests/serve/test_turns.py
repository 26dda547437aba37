"""The server's log as a trace of `dsv4 simulate`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.serve.process import JsonLines
from dsv4.serve.turns import TURNS
from dsv4.simulate.cluster import Setup, simulate
from dsv4.simulate.speeds import Speeds
from dsv4.simulate.trace import load_trace
from tests.serve.serving import Running

ASK = {"model": "stand-in", "temperature": 0, "ignore_eos": True}


def test_the_log_is_a_trace_that_finds_what_the_server_found(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    handler = logging.FileHandler(path)
    handler.setFormatter(JsonLines())
    monkeypatch.setattr(TURNS, "disabled", False)
    before = TURNS.level
    TURNS.setLevel(logging.INFO)  # not by hand: loggers remember what they are enabled for
    TURNS.addHandler(handler)
    try:
        with server.http() as client:
            prompt = "the log " * 47
            for salt in ("log one", "log one", "log two"):
                asked = {**ASK, "prompt": prompt, "max_tokens": 12, "cache_salt": salt}
                answer = client.post("/v1/completions", json=asked).json()
                found = answer["choices"][0]["text"]
                prompt = prompt if salt == "log two" else "the log " * 47
            asked = {**ASK, "prompt": "the log " * 48, "max_tokens": 3, "cache_salt": "log two"}
            client.post("/v1/completions", json=asked)
    finally:
        TURNS.removeHandler(handler)
        TURNS.setLevel(before)
        handler.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert found
    assert "the log" not in path.read_text()
    trace = load_trace(path)
    assert [each.input_tokens for each in trace] == [376, 376, 376, 384]
    assert [each.output_tokens for each in trace] == [12, 12, 12, 3]
    # whole blocks of prompt and answer: 376 + 11 tokens have run
    assert [len(each.names) for each in trace] == [3, 3, 3, 3]
    assert trace[0].names == trace[1].names
    assert not {*trace[0].names} & {*trace[2].names}, "of another salt"
    assert trace[2].names[:2] == trace[3].names[:2]
    assert trace[0].session == trace[1].session != trace[2].session
    speeds = Speeds.of("tiny", prefill_rate=1e6, decode_rate=1e6)
    schema = CacheSchema.build(ModelSpec.preset("tiny"))
    result = simulate(trace, Setup(schema=schema, speeds=speeds, untimed=True))
    # 256 of the 376 tokens, twice
    assert sum(result.tokens_hit.values()) == 2 * 256
    assert [line["cached_tokens"] > 0 for line in lines] == [False, True, False, True]


def test_nothing_is_made_unless_the_log_is_wanted(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TURNS, "level", logging.WARNING)
    TURNS.manager._clear_cache()  # type: ignore[attr-defined]
    seen: list[logging.LogRecord] = []
    monkeypatch.setattr(TURNS, "handle", seen.append)
    with server.http() as client:
        client.post("/v1/completions", json={**ASK, "prompt": "q", "max_tokens": 2})
    assert seen == []

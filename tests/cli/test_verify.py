"""`dsv4 verify` as a user calls it; `dsv4 demo` is in tests/demo."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dsv4.cli import app

GOLDEN = Path(__file__).parents[2] / "dsv4" / "data" / "golden_small.npz"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout


def test_what_is_tiny_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of small tensors wait for each other, on a busy machine most of the time."""
    before = torch.get_num_threads()
    monkeypatch.setattr("dsv4.verify.verify", lambda *_, **__: [])
    for name in ("process.listen", "process.run", "process.set_up_logs", "app.make_state"):
        monkeypatch.setattr(f"dsv4.serve.{name}", lambda *_, **__: None)
    monkeypatch.setattr("dsv4.serve.load.load_model", lambda path: None)
    try:
        for command, threads in ((["verify"], 1), (["serve"], 1), (["serve", "a/checkpoint"], 2)):
            torch.set_num_threads(2)
            assert run(*command)[0] == 0, command
            assert torch.get_num_threads() == threads, command
    finally:
        torch.set_num_threads(before)


def test_verify_passes_on_the_shipped_file() -> None:
    code, out = run("verify", "--json")
    report = json.loads(out)
    assert code == 0
    assert {a["array"] for a in report["arrays"]} >= {
        "csa/entries",
        "csa/index_keys",
        "hca/entries",
    }
    assert all(a["passed"] for a in report["arrays"])
    stored = ("kv_quant", "entries", "index_keys", "index_scores")
    assert all(a["differing"] == 0 for a in report["arrays"] if a["array"].endswith(stored))


def test_verify_fails_on_a_changed_expectation(tmp_path: Path) -> None:
    with np.load(GOLDEN) as file:
        arrays = {name: file[name].copy() for name in file.files}
    arrays["csa/entries"][3, 5] ^= 0x100
    np.savez(tmp_path / "changed.npz", **arrays)
    code, out = run("verify", "--golden", str(tmp_path / "changed.npz"), "--json")
    assert code == 1
    (entry,) = [a for a in json.loads(out)["arrays"] if a["array"] == "csa/entries"]
    assert entry["differing"] == 1
    assert not entry["passed"]


def test_verify_fails_on_changed_inputs(tmp_path: Path) -> None:
    with np.load(GOLDEN) as file:
        arrays = {name: file[name].copy() for name in file.files}
    arrays["hca/Z"][7] += 1.0
    np.savez(tmp_path / "changed.npz", **arrays)
    code, _ = run("verify", "--golden", str(tmp_path / "changed.npz"))
    assert code == 1


def test_verify_ends_with_a_sentence_and_cuts_no_name(tmp_path: Path) -> None:
    code, out = run("verify")
    assert code == 0
    last = out.strip().splitlines()[-1]
    assert last.startswith("Passed: 11 arrays; stored bytes and scores are identical to DeepSeek")
    assert "limit 0.002" in last
    assert "csa/index_scores" in out
    with np.load(GOLDEN) as file:
        arrays = {name: file[name].copy() for name in file.files}
    arrays["csa/entries"][3, 5] ^= 0x100
    np.savez(tmp_path / "changed.npz", **arrays)
    code, out = run("verify", "--golden", str(tmp_path / "changed.npz"))
    assert code == 1
    last = out.strip().splitlines()[-1]
    assert last == "Failed: 1 of 11 arrays are not DeepSeek's run: csa/entries (1 of 4,480)."


def test_no_error_advises_to_load_a_file_unsafely(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for content in (b"{}", b"PK", b"\x93NUMPY", b"\x80\x04."):
        path.write_bytes(content)
        result = CliRunner().invoke(app, ["verify", "--golden", str(path)])
        assert result.exit_code == 2
        assert "golden file" in result.stderr
        for word in ("pickle", "trust", "unsafe"):
            assert word not in result.stderr


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_verify_refuses_what_is_no_golden_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.npz"
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other.txt", "hello")
    else:
        path.write_bytes(content)
    code, out = run("verify", "--golden", str(path), "--json")
    assert code == 2
    assert json.loads(out)["type"] == "InvalidInput"

"""What an operator asks of a running server: /cache/explain with `dsv4 explain`, /api/quota."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsv4.cli import app
from tests.serve.serving import KEY, running
from tests.serve.test_cache import usage


def cli(*arguments: str, text: str | None = None) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["explain", *arguments], input=text)
    return found.exit_code, " ".join(found.output.split())


def test_the_command_asks_a_running_server(tmp_path: Path) -> None:
    with running(explain=True, api_key=KEY) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        usage(server, "e" * 300, headers)
        usage(server, "e" * 300, {**headers, "x-tenant-id": "t"}, cache_salt="s")
        at = ("--url", server.url, "--api-key", KEY)
        assert cli("f" * 300, *at)[0] == 0
        code, said = cli("e" * 200 + "f" * 100, *at)
        assert (code, "differs from a cached prompt at token 200" in said) == (0, True)
        code, said = cli("e" * 300, *at, "--tenant", "t", "--salt", "s", "--json")
        assert (code, json.loads(said)["found_tokens"]) == (0, 256)
        code, said = cli("e" * 300, *at, "--tenant", "other", "--json")
        assert json.loads(said)["found_tokens"] == 0
        before = server.state.runner.manager.stats()
        assert before.requests_live == 0  # nothing ran
        body = {"model": "stand-in", "messages": [{"role": "user", "content": "x" * 300}]}
        with server.http(headers=headers) as client:
            client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        chat = tmp_path / "chat.json"
        chat.write_text(json.dumps({**body, "temperature": 1}))
        code, said = cli("--file", str(chat), *at, "--json")
        assert json.loads(said)["found_tokens"] == 256
        code, said = cli("--file", "-", *at, "--json", text=json.dumps([1, 2, 3]))
        assert (json.loads(said)["tokens"], json.loads(said)["kind"]) == (3, "too_short")
        code, said = cli("--file", "-", *at, "--json", text="ee")
        assert json.loads(said)["kind"] == "too_short"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a prompt, or --file"),
        (("x", "--file", "y"), "give a prompt, or --file"),
        (("--file", "/nowhere/at all"), "cannot be read"),
        (("x", "--url", "http://127.0.0.1:9"), "dsv4 serve --explain"),
        (("x", "--url", "nonsense"), "nonsense"),
    ],
)
def test_what_the_command_cannot_ask(arguments: tuple[str, ...], said: str) -> None:
    code, found = cli(*arguments)
    assert (code, said in found) == (2, True), found


def test_what_the_server_refuses() -> None:
    with running(api_key=KEY) as server:
        code, said = cli("x", "--url", server.url)
        assert (code, "answers 401" in said) == (2, True)
        code, said = cli("x", "--url", server.url, "--api-key", KEY)
        assert (code, "start it with --explain" in said) == (2, True)
        code, said = cli("x", "--url", f"{server.url}/v1/models", "--api-key", KEY)
        assert code == 2
        with server.http(headers={"Authorization": f"Bearer {KEY}"}) as client:
            assert client.get("/api/quota/a").status_code == 404  # without --quotas
            for body in ({}, {"prompt": "x", "messages": []}, {"prompt": [-1]}, {"what": 1}):
                assert client.post("/cache/explain", json=body).status_code == 400, body


def test_quotas_are_set_seen_and_kept(tmp_path: Path) -> None:
    with (
        running(quotas=True, host_tier_bytes=16 << 20) as server,
        server.http() as client,
    ):
        size = server.state.runner.manager.schema.bytes.block
        put = client.put("/api/quota/a", json={"device_bytes": 2 * size, "host_bytes": 1 << 20})
        assert put.status_code == 200, put.text
        assert put.json()["quota"] == {
            "device_bytes": 2 * size, "host_bytes": 1 << 20, "disk_bytes": None,
        }  # fmt: skip
        usage(server, "q" * 150, cache_salt="a")
        found: Any = client.get("/api/quota/a").json()
        assert (found["device_bytes"], found["salt"]) == (size, "s:a")
        with server.http(headers={"x-tenant-id": "t"}) as tenant:  # of another tenant
            assert tenant.get("/api/quota/a").json()["device_bytes"] == 0
            assert tenant.put("/api/quota", json={"device_bytes": 0}).status_code == 200
            ask = {"model": "stand-in", "prompt": "x", "max_tokens": 1}
            refused = tenant.post("/v1/completions", json=ask)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "never_fits")
            assert tenant.delete("/api/quota").json()["removed"]
            assert not tenant.delete("/api/quota").json()["removed"]
            assert tenant.post("/v1/completions", json=ask).status_code == 200
        large = {"model": "stand-in", "prompt": "z" * 400, "max_tokens": 1, "cache_salt": "a"}
        refused = client.post("/v1/completions", json=large)
        assert (refused.status_code, "raise the quota" in refused.text) == (400, True)
        assert usage(server, "z" * 400)["prompt_tokens"] == 400
        listed = client.get("/api/quotas").json()["quotas"]
        assert [each["salt"] for each in listed] == ["s:a"]
        assert (
            'dsv4_quota_bytes{place="device",salt="s:a",what="used"}' in client.get("/metrics").text
        )
        for wrong in ({"device_bytes": -1}, {"device_bytes": 1.5}, {"bytes": 1}, {"disk_bytes": 1}):
            assert client.put("/api/quota/a", json=wrong).status_code == 400, wrong
        assert client.get("/api/quota/a").json()["quota"]["device_bytes"] == 2 * size


def test_a_quota_of_host_memory_counts_entries() -> None:
    with running(quotas=True, host_memory_bytes=64 << 20) as server, server.http() as client:
        each = server.state.runner.manager.schema.bytes.entries
        put = client.put("/api/quota/a", json={"host_bytes": 2 * each})
        assert put.status_code == 200, put.text
        usage(server, "q" * 150, cache_salt="a")
        assert client.get("/api/quota/a").json()["host_bytes"] == each
        large = {"model": "stand-in", "prompt": "z" * 400, "max_tokens": 1, "cache_salt": "a"}
        refused = client.post("/v1/completions", json=large)
        assert (refused.status_code, "in host memory, for entries" in refused.text) == (400, True)

"""`dsv4 explain`: asks a running server why a prompt would not be found. Torch-free."""

from __future__ import annotations

import json
import sys
import urllib.error
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import typer

from dsv4.cli.errors import reported_errors
from dsv4.errors import InvalidInput

Text = str | None


def explain_command(
    prompt: Annotated[
        Text,
        typer.Argument(help="The prompt's text. [default: what --file has]", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="A file, or - for standard input: an object with prompt or messages (a body of "
            "the API will do), a list of token ids, or else a text."
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    salt: Annotated[Text, typer.Option(help="The prompt's cache_salt.")] = None,
    tenant: Annotated[Text, typer.Option(help="Its tenant, as in x-tenant-id.")] = None,
    api_key: Annotated[
        Text,
        typer.Option(
            envvar="DSV4_API_KEY", show_envvar=True, help="The server's key.", metavar="KEY"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a running server (`dsv4 serve --explain`) why a prompt would not be found cached."""
    with reported_errors(as_json=as_json):
        body = _body(prompt, file)
        if salt is not None:
            body["cache_salt"] = salt
        headers = {"Content-Type": "application/json"}
        if tenant is not None:
            headers["x-tenant-id"] = tenant
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        found = _asked(f"{url.rstrip('/')}/cache/explain", body, headers)
    typer.echo(json.dumps(found) if as_json else found["text"])


def _body(prompt: str | None, file: Path | None) -> dict[str, Any]:
    """Raises InvalidInput."""
    if (prompt is None) == (file is None):
        raise InvalidInput("give a prompt, or --file with one")
    if file is None:
        return {"prompt": prompt}
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}") from error
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    if isinstance(found, dict):
        names = ("prompt", "messages", "tools", "chat_template_kwargs", "cache_salt")
        return {name: found[name] for name in names if name in found}
    return {"prompt": found if isinstance(found, list) else text}


def _asked(url: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """Raises InvalidInput."""
    try:
        asked = HttpRequest(url, json.dumps(body).encode(), headers)
        with urlopen(asked, timeout=60) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise InvalidInput(f"{url} answers {error.code}: {_message(error)}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise InvalidInput(
            f"{url}: {reason}: start a server with dsv4 serve --explain, or give its --url"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise InvalidInput(f"{url} is not a server of dsv4: it answers {str(found)[:80]!r}")
    return found


def _message(error: urllib.error.HTTPError) -> str:
    try:
        message: str = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)
    return message

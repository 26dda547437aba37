"""`dsv4 serve`: a server that OpenAI's and Anthropic's clients speak to."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4.cli.errors import reported_errors
from dsv4.cli.keys import given_key
from dsv4.errors import InvalidInput
from dsv4.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from dsv4.integrations.ray.options import RayOptions
    from dsv4.serve.options import EventOptions, ServerOptions

LOOPBACK = ("127.0.0.1", "localhost", "::1")
Text = str | None


def serve_command(
    model: Annotated[
        Text,
        typer.Argument(
            metavar="[PATH_OR_REPO]",
            help="A transformers checkpoint of DeepSeek-V4. [default: the demo model]",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")
    ] = 8000,
    memory: Annotated[
        Text, typer.Option(help="Device memory for the cache, like 40GiB. [default: as needed]")
    ] = None,
    host_memory: Annotated[
        Text,
        typer.Option(help="Host memory for entries that do not fit on the device, like 256GiB."),
    ] = None,
    host_tier: Annotated[
        Text, typer.Option(help="Host memory for what is evicted from the device, like 64GiB.")
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(help="A directory in which conversations outlive the server."),
    ] = None,
    disk_size: Annotated[str, typer.Option(help="Most bytes in that directory.")] = "64GiB",
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key of names and records, in hex digits. [default: DSV4_KEY]"
        ),
    ] = None,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt what goes to the disk. Needs a key.")
    ] = False,
    events: Annotated[
        Text,
        typer.Option(help="Publish KV events for routers here, like tcp://127.0.0.1:5557."),
    ] = None,
    events_replay: Annotated[
        Text,
        typer.Option(help="Replay events that routers missed here, like tcp://127.0.0.1:5558."),
    ] = None,
    events_topic: Annotated[str, typer.Option(help="Topic of the events.")] = "",
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say in the usage of each answer why no more of its prompt was cached. Users who "
            "share a salt can find out each other's prompts with that.",
        ),
    ] = False,
    quotas: Annotated[
        bool,
        typer.Option(
            "--quotas",
            help="Let clients see and set how many bytes each salt may have (/api/quota): where "
            "the API key is the operator's.",
        ),
    ] = False,
    context: Annotated[
        Text, typer.Option(help="Most tokens of a request. [default: the model's]")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 8,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a step; a decode waits for one step at most.")
    ] = 512,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; others get 429.")
    ] = 256,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer, if its request sets no limit."),
    ] = None,
    max_body: Annotated[str, typer.Option(help="Most bytes of a request's body.")] = "8MiB",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a request may take.")] = 600.0,
    drain: Annotated[
        float, typer.Option(min=0.001, help="Seconds that running requests have after Ctrl-C.")
    ] = 60.0,
    api_key: Annotated[
        Text,
        typer.Option(
            envvar="DSV4_API_KEY",
            show_envvar=True,
            help="Key that clients must send.",
            metavar="KEY",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of a web page that may call; may be repeated.", metavar="URL"),
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log JSON objects.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve replicas on Ray (docs/ray.md).")
    ] = False,
    ray_address: Annotated[
        Text, typer.Option(help="Address of a Ray cluster. [default: start one on this machine]")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="With --ray: replicas that run prompts and answers.")
    ] = None,
    prefill: Annotated[
        int | None, typer.Option(min=1, help="With --ray: replicas that run prompts.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help="With --ray: replicas that run answers.")
    ] = None,
    routing: Annotated[
        Text,
        typer.Option(
            help="With --ray: route requests by prefix, sticky or round-robin. [default: prefix]"
        ),
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="With --ray: GPUs of each replica. [default: 0]")
    ] = None,
) -> None:
    """Serve a model: OpenAI's and Anthropic's API over the cache."""
    with reported_errors(as_json=False):
        from dsv4.serve.options import ServerOptions

        options = ServerOptions(
            memory_bytes=None if memory is None else parse_bytes(memory),
            host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
            host_tier_bytes=None if host_tier is None else parse_bytes(host_tier),
            cache_key=given_key(key_file),
            encrypt=encrypt,
            events=_events(events, events_replay, events_topic),
            explain=explain,
            quotas=quotas,
            disk=disk,
            disk_bytes=parse_bytes(disk_size),
            api_key=api_key,
            allow_origins=tuple(allow_origin or ()),
            # a page of another site must not reach a server on loopback by a name of its own
            allowed_hosts=("127.0.0.1", "localhost", "[::1]", "::1")
            if host in LOOPBACK
            else ("*",),
            max_requests=max_requests,
            max_context=None if context is None else parse_tokens(context),
            max_step_tokens=step_tokens,
            max_new_tokens=max_tokens,
            max_waiting=max_waiting,
            max_body_bytes=parse_bytes(max_body),
            request_timeout_s=timeout,
            drain_s=drain,
        )
        asked: dict[str, int | float | str | None] = {
            "replicas": replicas,
            "prefill": prefill,
            "decode": decode,
            "routing": routing,
            "num_gpus": gpus,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        if ray:
            of_ray = _ray_options(model, options, given)
            _serve_on_ray(of_ray, host, port, ray_address, as_json=json_logs)
        elif given or ray_address is not None:
            raise InvalidInput("replicas, prefill, decode, routing and GPUs are of --ray: add it")
        else:
            _serve_here(model, options, host, port, as_json=json_logs)


def _serve_here(
    model: Text, options: ServerOptions, host: str, port: int, *, as_json: bool
) -> None:
    from dsv4.serve import process
    from dsv4.serve.app import make_state
    from dsv4.serve.load import load_model

    if model is None:
        import torch

        torch.set_num_threads(1)  # the demo's tensors are small: threads would wait for each other
    listener = process.listen(host, port)
    state = make_state(load_model(model), options)

    def announce(url: str) -> None:
        _announce(url, state.model.name, key=options.api_key is not None, as_json=as_json)

    process.set_up_logs(as_json=as_json)  # last: errors before leave them alone
    with suppress(KeyboardInterrupt):
        process.run(state, listener, announce)


def _ray_options(
    model: Text, server: ServerOptions, given: Mapping[str, int | float | str]
) -> RayOptions:
    """Raises InvalidInput, MissingExtra."""
    from pydantic import ValidationError

    from dsv4.integrations.ray import RayOptions

    try:
        return RayOptions.model_validate({"model": model, "server": server, **given})
    except ValidationError as error:
        found = error.errors()[0]["msg"]
        raise InvalidInput(found.removeprefix("Value error, ")) from error


def _serve_on_ray(
    options: RayOptions, host: str, port: int, address: Text, *, as_json: bool
) -> None:
    from dsv4.integrations.ray import launch
    from dsv4.serve import process
    from dsv4.serve.load import load_model

    name = load_model(options.model).name  # what is wrong with it is said before Ray starts

    def announce(url: str) -> None:
        _announce(url, name, key=options.server.api_key is not None, as_json=as_json)

    process.set_up_logs(as_json=as_json)
    with suppress(KeyboardInterrupt):
        launch.run(options, host=host, port=port, address=address, on_start=announce)


def _events(endpoint: Text, replay: Text, topic: str) -> EventOptions | None:
    """Raises InvalidInput."""
    from dsv4.serve.options import EventOptions

    if endpoint is not None:
        return EventOptions(endpoint=endpoint, replay=replay, topic=topic)
    if replay is not None or topic:
        raise InvalidInput("--events-replay and --events-topic are of events: give --events too")
    return None


def _announce(url: str, name: str, *, key: bool, as_json: bool) -> None:
    """As JSON where logs are, so that both may go into one file."""
    body = {"model": name, "messages": [{"role": "user", "content": "What is an entry?"}]}
    sent = f"-d '{json.dumps(body | {'max_tokens': 64, 'temperature': 0})}'"
    auth = ' -H "Authorization: Bearer $DSV4_API_KEY"' if key else ""
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} {sent}"
    if as_json:
        typer.echo(json.dumps({"message": f"{name} at {url}", "curl": curl}))
    else:
        typer.echo(f"{name} at {url}\n{curl}")
    sys.stdout.flush()

"""The server as a process: its socket, its logs, and how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsv4.errors import InvalidInput
from dsv4.serve import turns
from dsv4.serve.app import make_app
from dsv4.serve.failures import ApiError
from dsv4.serve.state import ServerState

LOGGER = logging.getLogger("dsv4.serve")
BACKLOG = 2048
PATIENCE_S = 30.0


class JsonLines(logging.Formatter):
    """A JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        shown = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("method", "path", "status", "s", *turns.FIELDS):
            if hasattr(record, name):
                shown[name] = getattr(record, name)
        if record.exc_info:
            shown["error"] = self.formatException(record.exc_info)
        return json.dumps(shown)


def set_up_logs(*, as_json: bool) -> None:
    """Logs of the server go to stderr; as JSON with a line for each request that ended."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if as_json else text)
    handler.addFilter(_is_no_cut)
    for name in ("dsv4", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "dsv4" else logging.WARNING)
    turns.TURNS.setLevel(logging.INFO if as_json else logging.WARNING)


def _is_no_cut(record: logging.LogRecord) -> bool:
    """What the server's end cuts is not an error: uvicorn writes requests as one, with a page of
    stack, and its own lifespan, as a text."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    return not record.getMessage().rstrip().endswith("asyncio.exceptions.CancelledError")


def listen(host: str, port: int) -> socket.socket:
    """Raises InvalidInput for an address that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        what = f"{host} port {port} cannot be listened on: {error.strerror or error}"
        raise InvalidInput(f"{what}: choose another one with --port, or 0 for any") from error


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Connection(H11Protocol):
    """Is cut when its client takes longer than `PATIENCE_S` to send the head of a request, or to
    read the rest of a response that is over. (The limit of a request's time begins after its
    head.)"""

    _check: asyncio.TimerHandle | None = None
    _idle_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most, self.limit_concurrency = self.limit_concurrency, None  # uvicorn's answer has no type
        if most is not None and len(self.connections) > most:
            self.app = _too_many
        self._idle_since_s = self.loop.time()
        self._check_later()

    def send_400_response(self, msg: str) -> None:
        """With a typed body, as all errors have. Once a response has begun there cannot
        be another: the connection is cut."""
        if self.cycle is not None:  # its request was broken off: an answer would not be read
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(ApiError(400, msg, code="invalid_http").body(anthropic=False)).encode()
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        head = h11.Response(
            status_code=400, headers=[*headers, (b"connection", b"close")], reason=b"Bad Request"
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def _check_later(self) -> None:
        self._check = self.loop.call_later(PATIENCE_S / 2, self._cut_if_late)

    def _cut_if_late(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        is_late = self.loop.time() - self._idle_since_s >= PATIENCE_S
        if self.transport.is_closing() or (is_idle and is_late):
            self.transport.abort()
        else:
            self._check_later()


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """What a connection above the limit is answered, whatever it asks."""
    message = "too many connections are open: close some, or try again later"
    error = ApiError(503, message, code="too_many_connections", retry_after_s=1)
    response = error.response(scope["path"])
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


class _Server(uvicorn.Server):
    """The first Ctrl-C takes no new requests and lets the others end; the second ends at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        jobs = self._state.runner.engine.jobs
        if self.should_exit:
            LOGGER.info("ending at once: %d requests left", len(jobs))
            self.force_exit = True
            return
        self.should_exit = True
        self._state.runner.drain()
        LOGGER.info("draining: %d requests left", len(jobs))


def run(
    state: ServerState, listener: socket.socket, on_start: Callable[[str], None] | None = None
) -> None:
    """Serves until a signal ends it. Running requests have `drain_s` to end. Raises
    KeyboardInterrupt when Ctrl-C was what ended it. After a second one it does not return: torch
    would take its time to be collected."""
    if on_start is not None:
        on_start(address(listener))
    server = _Server(config(state), state)
    try:
        with listener:
            server.run([listener])
    finally:
        if server.force_exit:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(128 + signal.SIGINT)


def config(state: ServerState) -> uvicorn.Config:
    """How uvicorn runs it: h11 alone limits the head of a request."""
    options = state.options
    return uvicorn.Config(
        make_app(state),
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        limit_concurrency=options.max_connections,
        timeout_graceful_shutdown=max(1, round(options.drain_s)),
        server_header=False,
    )

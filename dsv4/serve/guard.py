"""What a request meets before a route: limits of bytes and time, the host, the key, the log's
line."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4.serve.failures import ApiError
from dsv4.serve.options import ServerOptions

ACCESS = logging.getLogger("dsv4.serve.access")
OPEN = ("/health", "/ready", "/")  # without a key: probes and browsers have none
OPEN_BELOW = "/static/"
ENDLESS = ("/cache/events",)  # runs as long as a client watches
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")  # a name or an address, and a port


class Guard:
    """Around the whole application."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options
        self._key = None if options.api_key is None else _digest(options.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._options.max_body_bytes)
        limit = None if scope["path"] in ENDLESS else self._options.request_timeout_s
        try:
            self._check(scope)
            async with asyncio.timeout(limit):
                await self._app(scope, exchange.receive, exchange.send)
        except ApiError as error:
            await exchange.fail(error)
        except TimeoutError:
            message = f"not finished within {limit:g} s, which is this server's limit"
            await exchange.fail(ApiError(504, message, code="timeout"))
        except Exception:
            if exchange.refused is None:
                raise
            await exchange.fail(exchange.refused)
        finally:
            exchange.log()

    def _check(self, scope: Scope) -> None:
        """Raises ApiError."""
        headers, hosts = Headers(scope=scope), self._options.allowed_hosts
        found = HOST.fullmatch(headers.get("host", ""))
        if "*" not in hosts and (found is None or found[1].lower() not in hosts):
            names = ", ".join(hosts)
            raise ApiError(400, f"the Host header has to be one of {names}", code="unknown_host")
        if self._key is not None and not _is_open(scope["path"]):
            kind, _, given = headers.get("authorization", "").partition(" ")
            key = given if kind.lower() == "bearer" else headers.get("x-api-key", "")
            if not hmac.compare_digest(_digest(key), self._key):
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self._options.max_body_bytes:
            raise _too_large(self._options.max_body_bytes)


class _Exchange:
    """One request and its response: how many bytes came, what was sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._most_bytes, self._bytes = most_bytes, 0
        self._status: int | None = None
        self.refused: ApiError | None = None  # what was wrong with the body
        self._begun_s = time.monotonic()

    async def receive(self) -> Message:
        """Raises ApiError for a body that is too large."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._most_bytes:
            self.refused = _too_large(self._most_bytes)
            raise self.refused
        return message

    async def send(self, message: Message) -> None:
        """Raises the error of `receive`, so that what was made of it is not sent."""
        if self.refused is not None:
            raise self.refused
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Answers with an error. A response that has begun just ends: the connection is cut."""
        self.refused = None
        if self._status is None:
            response = error.response(self._scope["path"])
            response.headers["Connection"] = "close"
            await response(self._scope, self._receive, self.send)

    def log(self) -> None:
        """Method, path, status, seconds: nothing that a client wrote except the path."""
        path = self._scope["path"].encode("ascii", "backslashreplace").decode()[:200]
        status = self._status or 499
        seconds = time.monotonic() - self._begun_s
        ACCESS.info(
            "%s %s %d %.3f s",
            self._scope["method"],
            path,
            status,
            seconds,
            extra={"method": self._scope["method"], "path": path, "status": status, "s": seconds},
        )


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_BELOW)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most_bytes} bytes", code="body_too_large")


def _digest(key: str) -> bytes:
    """Of the same length whatever the key: comparing them says nothing about it."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()

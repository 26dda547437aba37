"""The page: files of this package, which load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Protocol, runtime_checkable

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from dsv4.serve.models import Message, ServedModel

KINDS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/page.css": ("page.css", "text/css; charset=utf-8"),
    "/static/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
INTRODUCTION = "/static/introduction.json"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@runtime_checkable
class Introduced(Protocol):
    """A model with messages that conversations of the page may begin with: they are long enough
    to fill blocks, which all conversations then share."""

    @property
    def introduction(self) -> list[Message]: ...


def routes(model: ServedModel) -> APIRouter:
    """One route for each file, read when this is called, and one for the introduction."""
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in KINDS.items():
        body = (files("dsv4.serve") / "static" / name).read_bytes()
        router.add_api_route(path, _sender(body, kind), methods=["GET"])
    messages = model.introduction if isinstance(model, Introduced) else []

    async def introduction() -> Response:
        return JSONResponse(messages, headers=HEADERS)

    router.add_api_route(INTRODUCTION, introduction, methods=["GET"])
    return router


def _sender(body: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(body, media_type=kind, headers=HEADERS)

    return send

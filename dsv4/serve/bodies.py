"""Bodies of requests, before they are parsed: how many parts a JSON text may have.

Text costs its length. Lists and objects cost a thousand times that: 8 MiB of `[],` keep the event
loop, and with it every stream, for many seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

MOST_PARTS = 32_768  # lists and objects of a body
# a string, or the rest of the text if it does not end; nothing in it is read twice
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


class BoundedRoute(APIRoute):
    """A route whose JSON has at most `MOST_PARTS` lists and objects; another one gets 400."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Bounded(request.scope, request.receive))

        return handle


class _Bounded(Request):
    async def json(self) -> Any:
        """Raises HTTPException, and what is raised for what is not JSON."""
        body = await self.body()
        if not json.detect_encoding(body).startswith("utf-8"):  # with or without a mark
            raise HTTPException(400, "the body is not UTF-8, which JSON has to be")
        parts = count_parts(body)
        if parts > MOST_PARTS:
            raise HTTPException(
                400, f"the body has {parts} lists and objects: at most {MOST_PARTS} may be asked"
            )
        return await super().json()


def count_parts(body: bytes) -> int:
    """How many lists and objects a JSON text has, at most; exactly, where that may be too many."""
    found = brackets(body)
    return found if found <= MOST_PARTS else brackets(STRING.sub(b"", body))


def brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")

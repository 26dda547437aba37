"""Bodies of requests: how many parts a JSON text may have, and what JSON is.

Text costs its length. Lists and objects cost a thousand times that: 8 MiB of `[],` keep the event
loop, and with it every stream, for many seconds. What parsers read in different ways is refused,
so that a proxy before the server has seen the same request: names that come twice, numbers that
JSON does not have, characters that UTF-8 cannot encode.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Never

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

MOST_PARTS = 32_768  # lists and objects of a body
# a string, or the rest of the text if it does not end; nothing in it is read twice
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as an escape: alone it is not a character
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
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """Raises HTTPException, and JSONDecodeError for what is not JSON."""
    if not json.detect_encoding(body).startswith("utf-8"):  # with or without a mark
        raise HTTPException(400, "the body is not UTF-8, which JSON has to be")
    parts = count_parts(body)
    if parts > MOST_PARTS:
        raise HTTPException(
            400, f"the body has {parts} lists and objects: at most {MOST_PARTS} may be asked"
        )
    try:
        found = json.loads(
            body.decode("utf-8-sig"), object_pairs_hook=_named_once, parse_constant=_no_number
        )
        if SURROGATE.search(body):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError as error:  # its text has what was sent
        where = f"the byte at {error.start}" if isinstance(error, UnicodeDecodeError) else "a text"
        raise HTTPException(400, f"{where} is not UTF-8, which JSON has to be") from None
    except RecursionError:
        raise HTTPException(400, "lists and objects are nested too deeply in the body") from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python reads none of more than 4,300
        raise HTTPException(400, "a number of the body has too many digits") from None
    return found


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise HTTPException(400, f"{cut(name)!r} comes twice in one object of the body")
    return found


def _no_number(text: str) -> Never:
    raise HTTPException(400, f"the body has {text}, which is not a number of JSON")


def cut(name: str) -> str:
    """A name that a client sent, as far as a message repeats it."""
    return name if len(name) <= 64 else f"{name[:64]}…"


def count_parts(body: bytes) -> int:
    """How many lists and objects a JSON text has, at most; exactly, where that may be too many."""
    found = brackets(body)
    return found if found <= MOST_PARTS else brackets(STRING.sub(b"", body))


def brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")

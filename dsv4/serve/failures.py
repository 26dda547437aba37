"""Errors as clients read them: OpenAI's shape, or Anthropic's below /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dsv4.errors import (
    ContextOverflow,
    Dsv4Error,
    InvalidInput,
    OutOfBlocks,
    RequestError,
    SchemaError,
)
from dsv4.serve.runner import NeverFits, QueueFull, ShuttingDown

ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s, self.headers = retry_after_s, dict(headers or {})

    def body(self, *, anthropic: bool) -> dict[str, Any]:
        if anthropic:
            kind = ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else None)
            error = {"type": kind or "invalid_request_error", "message": self.message}
            return {"type": "error", "error": error}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        shown = {"message": self.message, "type": OPENAI.get(self.status, kind)}
        return {"error": {**shown, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        headers = {**self.headers}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = self.body(anthropic=path.startswith("/v1/messages"))
        # ASCII: a message may quote text that UTF-8 cannot encode
        return Response(json.dumps(body), self.status, headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """What a client is shown of an error. Details of one that is ours stay in the log."""
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            return ApiError(400, str(error), code="context_length_exceeded")
        case NeverFits():
            return ApiError(400, str(error), code="never_fits")
        case QueueFull():
            after = error.retry_after_s
            return ApiError(429, str(error), code="queue_full", retry_after_s=after)
        case ShuttingDown():
            return ApiError(503, str(error), code="shutting_down", retry_after_s=1)
        case OutOfBlocks():
            if error.never:
                return ApiError(400, str(error), code="never_fits")
            return ApiError(503, str(error), code="out_of_memory", retry_after_s=1)
        case InvalidInput() | SchemaError():
            return ApiError(400, str(error))
        case UnicodeError():
            return ApiError(400, "a text has a character that UTF-8 cannot encode")
        case RequestValidationError():
            return _of_validation(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestError() | Dsv4Error():
            return ApiError(500, f"{type(error).__name__}: {error}")
    return ApiError(500, f"{type(error).__name__}: the server's log has more")


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong. What was sent is not repeated."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "header")]
    where = [part for part in where if not part.startswith("(")]  # a kind, not a name
    if first["type"] == "extra_forbidden":
        where.append(first["msg"])
    param = ".".join(where) or None
    if first["type"] == "json_invalid":
        why = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return ApiError(400, f"the body is not JSON: {why}", code="json_invalid")
    if first["type"] == "extra_forbidden":
        message = "this server does not know it (docs/serve.md says what it knows)"
    elif param is None and first["type"] in ("model_attributes_type", "dict_type"):
        message = "a JSON object is needed, and the header Content-Type: application/json"
    else:
        message = first["msg"]
    return ApiError(400, f"{param or 'body'}: {message}", param=param, code=first["type"])


async def handle(request: Request, error: Exception) -> Response:
    return as_api_error(error).response(request.url.path)

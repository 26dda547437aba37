"""The server as an ASGI application, and as a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from dsv4 import __version__
from dsv4.cache.handoff.options import HandoffOptions
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.errors import Dsv4Error, InvalidInput
from dsv4.serve import anthropic, openai, operator, page
from dsv4.serve.failures import ApiError, handle
from dsv4.serve.guard import Guard
from dsv4.serve.live import WatchedStream
from dsv4.serve.models import Room, ServedModel
from dsv4.serve.options import EventOptions, ServerOptions
from dsv4.serve.runner import Runner
from dsv4.serve.state import Served, ServerState
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from dsv4.tiers.tier import Tier

if TYPE_CHECKING:
    from dsv4.events.publisher import EventPublisher

LOGGER = logging.getLogger("dsv4.serve")
CLOSE_S = 10.0
PROMETHEUS = "text/plain; version=1.0.0; charset=utf-8"
ERRORS = {
    400: "The request cannot be served as it is",
    401: "The API key is missing or wrong",
    404: "The model is not here",
    413: "The body is too large",
    429: "Too many requests wait",
    500: "An error of the server",
    503: "The server is shutting down, or out of memory",
    504: "Not finished in time",
}


def make_state(
    model: ServedModel, options: ServerOptions, handoff: HandoffOptions | None = None
) -> ServerState:
    """A model on a cache, with an engine that does not run yet. Raises InvalidInput, PoolTooSmall
    and what the model raises."""
    longest = options.max_context or model.max_context
    if longest > model.max_context:
        raise InvalidInput(
            f"max_context={longest}: {model.name} has {model.max_context} positions: ask for at "
            f"most that"
        )
    tiers = _tiers(options)
    room = Room(
        max_requests=options.max_requests,
        max_context=longest,
        max_step_tokens=options.max_step_tokens,
        memory_bytes=options.memory_bytes,
        host_memory_bytes=options.host_memory_bytes,
        prefix=PrefixOptions(
            model_id=model.weights_id, key=options.cache_key, encrypt=options.encrypt
        ),
        tiers=tiers,
        handoff=handoff,
    )
    try:
        opened = model.open(room)
        runner = Runner(
            opened,
            most_waiting=options.max_waiting,
            tiers=tiers,
            explains=options.explain,
            publisher=_publisher(opened.manager, options.events),
        )
    except BaseException:
        for tier in tiers:
            tier.close(1.0)
        raise
    return ServerState(model=model, runner=runner, options=options)


def _publisher(manager: KVCacheManager, events: EventOptions | None) -> EventPublisher | None:
    """Raises MissingExtra without the extra `events`, InvalidInput."""
    if events is None:
        return None
    from dsv4.events.publisher import EventPublisher

    return EventPublisher(manager, events.endpoint, replay=events.replay, topic=events.topic)


def _tiers(options: ServerOptions) -> list[Tier]:
    tiers = list[Tier]()
    if options.host_tier_bytes is not None:
        tiers.append(HostTier(options.host_tier_bytes))
    if options.disk is not None:
        options.disk.parent.mkdir(parents=True, exist_ok=True)
        tiers.append(DiskTier(options.disk, options.disk_bytes))
    return tiers


def make_app(state: ServerState) -> Any:
    """The application. Its engine runs while it is served."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.runner.start(asyncio.get_running_loop())
        try:
            yield
        finally:
            state.runner.close(CLOSE_S)

    app = make_api(state, lifespan)

    @app.get("/cache/events")
    async def cache_events() -> Response:
        """The same, and then what changes: server-sent events."""
        if state.live.is_full:
            raise ApiError(429, "as many watch already as may", retry_after_s=10)
        return WatchedStream(state.live.watch())

    app.include_router(operator.routes(state))
    app.include_router(page.routes(state.model))
    return guarded(app, state.options)


def guarded(app: FastAPI, options: ServerOptions) -> ASGIApp:
    """With what every request meets before a route. Pages that may call can read errors too."""
    guard = Guard(app, options)
    if not options.allow_origins:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=[*options.allow_origins],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )


def make_api(
    state: Served, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]
) -> FastAPI:
    """What a server answers wherever its model runs."""
    app = FastAPI(
        title="dsv4",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        responses={code: {"description": text} for code, text in ERRORS.items()},
    )
    for kind in (
        ApiError,
        RequestValidationError,
        HTTPException,
        Dsv4Error,
        UnicodeError,
        Exception,
    ):
        app.add_exception_handler(kind, handle)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the server works."""
        alive = state.asked.is_alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether it takes requests."""
        is_ready = state.asked.is_alive and not state.asked.is_draining
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text."""
        return Response(await state.metrics_text(), media_type=PROMETHEUS)

    @app.get("/cache/state")
    async def cache_state() -> JSONResponse:
        """What the cache holds, between two steps."""
        return JSONResponse(await state.cache_state())

    app.include_router(openai.routes(state))
    app.include_router(anthropic.routes(state))
    return app

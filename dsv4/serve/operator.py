"""What an operator asks of a running server: why a prompt would not be found, and who may keep how
much."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse

from dsv4.cache.prefix.quota import Quota, QuotaUse
from dsv4.cache.quotas import Quotas
from dsv4.serve.answers import read_salt
from dsv4.serve.bodies import BoundedRoute
from dsv4.serve.failures import ApiError
from dsv4.serve.openai import encoded, rendered
from dsv4.serve.schemas import ExplainRequest, QuotaRequest

if TYPE_CHECKING:
    from dsv4.serve.state import ServerState

R = TypeVar("R")
Salt = Annotated[str, Field(max_length=128)]


def routes(state: ServerState) -> APIRouter:
    router = APIRouter(route_class=BoundedRoute)
    runner = state.runner

    async def between_steps(function: Callable[[], R]) -> R:
        return await asyncio.wrap_future(runner.call(function))

    @router.post("/cache/explain")
    async def explain(request: Request, body: ExplainRequest) -> JSONResponse:
        """Why the first block of a prompt that is not cached is not. Runs nothing."""
        explainer = runner.engine.explainer
        if explainer is None:
            raise ApiError(400, "this server explains nothing: start it with --explain")
        salt = read_salt(request, body.cache_salt)

        def read() -> Any:
            ids = rendered(state, body) if body.messages else encoded(state, body.prompt or "")
            return runner.manager.prefix.prompt(ids, salt)

        prompt = await run_in_threadpool(read)
        found = await between_steps(lambda: explainer.explain(prompt))
        return JSONResponse({"text": str(found), **found.to_dict()})

    if not state.options.quotas:
        return router
    quotas = Quotas(runner.manager)

    def shown(use: QuotaUse, name: str | None) -> dict[str, Any]:
        return {**asdict(use), "salt": name}

    # PUT, GET and DELETE of LMCache. Without a salt: of the tenant of the header, or of prompts
    # without one.
    @router.get("/api/quotas")
    async def all_quotas() -> JSONResponse:
        """All salts with a quota, by the names that the server made for them."""
        found = await between_steps(quotas.all)
        return JSONResponse({"quotas": [shown(each, each.salt) for each in found]})

    @router.get("/api/quota")
    @router.get("/api/quota/{salt}")
    async def get_quota(request: Request, salt: Salt = "") -> JSONResponse:
        """What a salt may have, and has."""
        name = read_salt(request, salt)
        return JSONResponse(shown(await between_steps(lambda: quotas.get(name)), name))

    @router.put("/api/quota")
    @router.put("/api/quota/{salt}")
    async def put_quota(request: Request, body: QuotaRequest, salt: Salt = "") -> JSONResponse:
        """From now on this is the quota of a salt."""
        name, quota = read_salt(request, salt), Quota(**body.model_dump())
        return JSONResponse(shown(await between_steps(lambda: quotas.set(name, quota)), name))

    @router.delete("/api/quota")
    @router.delete("/api/quota/{salt}")
    async def delete_quota(request: Request, salt: Salt = "") -> JSONResponse:
        """The salt has no quota any more."""
        name = read_salt(request, salt)
        was_there = await between_steps(lambda: quotas.remove(name))
        return JSONResponse({"salt": name, "removed": was_there})

    return router

"""The ingress: the same API as `dsv4 serve`, over replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from dsv4.integrations.ray.messages import Limits
from dsv4.integrations.ray.metrics import RemoteMetrics
from dsv4.integrations.ray.options import RayOptions
from dsv4.integrations.ray.remote import RemoteRunner
from dsv4.serve.app import guarded, make_api
from dsv4.serve.load import load_model
from dsv4.serve.state import Served

ASK_S = 5.0  # that replicas have to say what they hold


@dataclass(kw_only=True)
class IngressState(Served):
    """A model whose jobs run on replicas."""

    remote: RemoteRunner
    router: DeploymentHandle[Any]
    metrics: RemoteMetrics

    @property
    def asked(self) -> RemoteRunner:
        return self.remote

    async def metrics_text(self) -> bytes:
        """Of this ingress, and what the router has heard of the replicas."""
        return self.metrics.text(await self._heard())

    async def cache_state(self) -> dict[str, Any]:
        """What the router has heard of the replicas; nothing while none answers."""
        return {"model": {"name": self.model.name}, **await self._heard()}

    async def _heard(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ASK_S):
                found: dict[str, Any] = await self.router.state.remote()
                return found
        except Exception:
            return {"routing": None, "replicas": {}}


class Ingress:
    """`__serve_build_asgi_app__` is what Ray Serve asks for the application."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        options: RayOptions,
        router: DeploymentHandle[Any],
        decode: DeploymentHandle[Any],
        prefill: DeploymentHandle[Any] | None,
    ) -> None:
        limits: Limits = await decode.limits.remote()  # once one has started
        model = await asyncio.to_thread(load_model, options.model)
        remote = RemoteRunner(options, limits, router=router, decode=decode, prefill=prefill)
        self.state = IngressState(
            model=model,
            options=options.server,
            remote=remote,
            router=router,
            metrics=RemoteMetrics(remote),
        )

    def __serve_build_asgi_app__(self) -> Any:
        state = self.state

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            state.remote.start(asyncio.get_running_loop())
            try:
                yield
            finally:
                await state.remote.close()

        return guarded(make_api(state, lifespan), state.options)

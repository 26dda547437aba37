"""What an application on Ray may be asked to be."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from dsv4.routing.router import Routing
from dsv4.serve.options import ServerOptions


class RayOptions(BaseModel):
    """Either `replicas` that run prompts and answers, or `prefill` and `decode` replicas, with the
    hand-off between them. `server` has the options of `dsv4 serve`, for each replica."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="A checkpoint; None is the demo model")
    replicas: PositiveInt | None = None
    prefill: PositiveInt | None = None
    decode: PositiveInt | None = None
    ingresses: PositiveInt = 1
    server: ServerOptions = ServerOptions()
    routing: Routing = "prefix"
    num_cpus: float = Field(1.0, ge=0, description="Of a replica, as Ray counts them")
    num_gpus: float = Field(0.0, ge=0, description="Of a replica, as Ray counts them")
    threads: PositiveInt | None = Field(None, description="Of torch, in a replica; None: its own")
    prefill_from: int = Field(
        256, ge=1, description="Tokens that a decode replica lacks, from which a prefill one helps"
    )
    silence_s: PositiveFloat = Field(
        5.0, description="After which a replica that says nothing is given up by its streams"
    )
    deadline_s: PositiveFloat = Field(5.0, description="Of a hand-off: then it is computed")
    events_host: str | None = Field(
        None, description="Where replicas publish their events; None: their node's address"
    )
    drain_s: PositiveFloat = Field(60.0, description="That a replica has for its streams to end")

    @model_validator(mode="after")
    def _one_way(self) -> RayOptions:
        apart = (self.prefill, self.decode)
        if self.replicas is not None and apart != (None, None):
            raise ValueError("replicas run prompts and answers: give them, or prefill and decode")
        if (self.prefill is None) != (self.decode is None):
            raise ValueError("prefill and decode belong together: give both, or replicas")
        if self.server.quotas:
            raise ValueError("on Ray no one call reaches all replicas: leave quotas out")
        if self.server.events is not None:
            raise ValueError("on Ray each replica publishes its events by itself: leave them out")
        return self

    @property
    def decoders(self) -> int:
        """Replicas that run answers."""
        return self.decode or self.replicas or 1

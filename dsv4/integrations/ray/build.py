"""The application of Ray Serve. No postponed annotations here: Ray reads that of `build`."""

from typing import Any

from ray import serve
from ray.serve import Application

from dsv4.integrations.ray.aim import AimedRouter
from dsv4.integrations.ray.ingress import Ingress
from dsv4.integrations.ray.options import RayOptions
from dsv4.integrations.ray.replica import Replica
from dsv4.integrations.ray.router import RouterReplica

HEALTH_S = 2.0  # between two looks at a process
UNHEALTHY_S = 10.0  # without an answer, it is replaced


def build(options: RayOptions) -> Application:
    """The application of these options: an import path for `serve run` and for YAML, whose `args`
    are the fields of `RayOptions`. Nothing runs until Ray Serve deploys it."""
    router: Any = serve.deployment(
        name="router",
        max_ongoing_requests=1024,
        ray_actor_options={"num_cpus": 0},
        **_health(),
    )(RouterReplica).bind(options.routing, options.prefill_from, options.silence_s)
    decode = _replicas(options, "decode", options.decoders).bind(options, "decode", router)
    prefill = None
    if options.prefill is not None:
        prefill = _replicas(options, "prefill", options.prefill).bind(options, "prefill", router)
    ingress: Any = serve.deployment(
        name="ingress",
        num_replicas=options.ingresses,
        max_ongoing_requests=options.server.max_connections,
        ray_actor_options={"num_cpus": 0},
        # its streams end with it, so it has the time of the longest one
        graceful_shutdown_timeout_s=max(options.drain_s, options.server.request_timeout_s),
        **_health(),
    )(serve.ingress()(Ingress))
    application: Application = ingress.bind(options, router, decode, prefill)
    return application


def _replicas(options: RayOptions, name: str, count: int) -> Any:
    server = options.server
    return serve.deployment(
        name=name,
        num_replicas=count,
        max_ongoing_requests=server.max_requests + server.max_waiting + 64,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        graceful_shutdown_timeout_s=options.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config={"request_router_class": AimedRouter},
        **_health(),
    )(Replica)


def _health() -> dict[str, Any]:
    return {"health_check_period_s": HEALTH_S, "health_check_timeout_s": UNHEALTHY_S}

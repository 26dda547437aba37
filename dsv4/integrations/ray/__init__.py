"""Replicas on Ray Serve. docs/ray.md. Needs the extra `dsv4[ray]`.

build      the application: for `serve run`, for YAML and for `dsv4 serve --ray`
options    what it may be asked to be
messages   what its processes send each other
replica    a model on its cache: runs prompts, answers, or both
router     says which replica gets a request, from the replicas' events
aim        sends a request to the replica that was chosen
remote     follows an answer from replica to replica: what the ingress has instead of an engine
ingress    the same API as `dsv4 serve`
launch     what `dsv4 serve --ray` does
"""

from dsv4.extras import needed_by

with needed_by("the integration with Ray", extra="ray"):
    import ray as _ray  # noqa: F401
    import ray.serve as _serve  # noqa: F401

from dsv4.integrations.ray.build import build
from dsv4.integrations.ray.options import RayOptions

__all__ = ["RayOptions", "build"]

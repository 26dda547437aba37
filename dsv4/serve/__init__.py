"""The server of `dsv4 serve`. Needs the extra `dsv4[serve]`."""

from dsv4.extras import needed_by

with needed_by("the server", extra="serve"):
    import fastapi as _fastapi  # noqa: F401
    import llguidance as _llguidance  # noqa: F401
    import prometheus_client as _prometheus_client  # noqa: F401
    import torch as _torch  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
    import xxhash as _xxhash  # noqa: F401

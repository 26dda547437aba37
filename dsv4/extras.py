"""What is installed only with an extra, and the error where it is not.

The package itself needs numpy, typer and rich: the planner, the simulator and the command line run
on these. Everything that computes needs `dsv4[torch]`, and the other extras bring that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dsv4.errors import MissingExtra

# what is imported, and the extra of pyproject.toml that brings it
EXTRA_OF = {
    "torch": "torch",
    "triton": "torch",
    "safetensors": "torch",
    "transformers": "transformers",
    "matplotlib": "plot",
    "prometheus_client": "metrics",
    "xxhash": "tiers",
    "cryptography": "encrypt",
    "msgspec": "events",
    "zmq": "events",
    "mooncake": "mooncake",
    "obstore": "object",
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "llguidance": "serve",
    "ray": "ray",
}


@contextmanager
def needed_by(user: str, *, extra: str | None = None) -> Iterator[None]:
    """Around imports: one that is missing raises MissingExtra, which names the extra to install
    (`extra`, or the one that brings this package) and `user`, who needs it.

    An import that fails for want of anything else passes through.
    """
    try:
        yield
    except ImportError as error:
        missing = missing_extra(error, user, extra=extra)
        if missing is None:
            raise
        raise missing from error


def missing_extra(
    error: ImportError, user: str, *, extra: str | None = None
) -> MissingExtra | None:
    """The typed error for an import that failed; None if no extra brings the package."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingExtra) or package not in EXTRA_OF:
        return None
    return MissingExtra(
        f"{user} needs {package} ({error}): install it with "
        f"pip install 'dsv4[{extra or EXTRA_OF[package]}]'"
    )

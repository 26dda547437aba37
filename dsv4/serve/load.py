"""The model that a server was asked for."""

from __future__ import annotations

from dsv4.serve.models import ServedModel


def load_model(path: str | None) -> ServedModel:
    """A checkpoint of transformers, or the demo model. Raises InvalidInput, ConfigError."""
    if path is None:
        from dsv4.serve.demo import ServedDemo

        return ServedDemo()
    from dsv4.serve.checkpoint import Checkpoint

    return Checkpoint(path)

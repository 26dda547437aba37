"""Requests as if their tokens had been computed."""

from __future__ import annotations

import numpy as np

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request


def set_length(manager: KVCacheManager, request: Request, tokens: int) -> None:
    """Callers read a request's length and cannot write it; steps move it in the manager's table."""
    manager._parts.table.move(np.array([request.slot]), np.array([tokens]))

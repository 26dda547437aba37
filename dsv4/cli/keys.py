"""The key of cached names and records, as commands are given it. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "DSV4_KEY"


def given_key(file: Path | None) -> bytes | None:
    """Of the file, or else of `DSV4_KEY`; None without either. Raises InvalidInput."""
    from dsv4.tiers.secret import read_key

    if file is not None:
        return read_key(file=file)
    return read_key(environment=VARIABLE) if VARIABLE in os.environ else None

"""`python -m dsv4.cli`, where the `dsv4` command is not on the path."""

from __future__ import annotations

from dsv4.cli import app

app()

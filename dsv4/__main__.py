"""`python -m dsv4`: the `dsv4` command, where it is not on the path."""

from __future__ import annotations

from dsv4.cli import app

app(prog_name="dsv4")

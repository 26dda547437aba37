"""How the commands print tables."""

from __future__ import annotations

from rich import box
from rich.table import Table

from dsv4.units import format_bytes


def table_of(*columns: str) -> Table:
    """An empty table: the first column aligned left, the others right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def bytes_of(count_bytes: int) -> tuple[str, str]:
    """A number of bytes as two cells: in full, and in a unit."""
    return f"{count_bytes:,}", format_bytes(count_bytes)

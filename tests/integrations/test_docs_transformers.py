"""The Python blocks of docs/transformers.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text("utf-8")


def test_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "transformers.md", "exec"), {"__name__": "docs"})

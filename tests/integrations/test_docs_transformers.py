"""The Python blocks of docs/transformers.md run as they stand, one after the other, but for those
that say why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TEXT = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text("utf-8")


def test_python_blocks_run() -> None:
    blocks = re.findall(r"(?<!-->\n)```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 5
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, "transformers.md", "exec"), namespace)

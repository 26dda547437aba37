"""Where and when a benchmark ran, and of which commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def current_commit() -> str:
    """The checkout's commit; `unknown` where the tree travelled without its history."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """Day, processor, versions, and what else the machine did: processes that ran before this
    began."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": platform.machine() if found is None else found[1],
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "versions": {name: version(name) for name in packages},
    }

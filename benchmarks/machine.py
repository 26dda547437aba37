"""Where and when a benchmark of the host ran."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


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

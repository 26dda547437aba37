"""The notes of a release: its section of CHANGELOG.md.

    python tools/release_notes.py 0.3.0

Exits with 1 where the version is not that of the package, has no section, or its section has no
date yet. Needs only Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


class NotReady(Exception):
    """Says what is missing."""


def notes(version: str, *, changelog: str, package: str) -> str:
    if version != package:
        raise NotReady(f"the tag says {version}, pyproject.toml {package}")
    found = re.search(
        rf"^## {re.escape(version)}, (?P<date>[^\n]+)\n(?P<text>.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if found is None:
        raise NotReady(f"CHANGELOG.md has no section '## {version}, …'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]):
        raise NotReady(f"CHANGELOG.md says {version} is {found['date']!r}: give it its day")
    return found["text"].strip() + "\n"


def main(version: str) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    try:
        sys.stdout.write(notes(version, changelog=changelog, package=project["version"]))
    except NotReady as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

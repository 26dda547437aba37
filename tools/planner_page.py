"""What the planner's page needs beyond its own files: Python for the browser, and the package.

    python -m tools.planner_page FOLDER

writes both into FOLDER, as `make docs` does. Pyodide comes from the npm registry, of one version
whose digest is known, and is kept under docs/_build for the next build; DSV4_PYODIDE names a file
that is used instead. Only the standard library is taken, and of `dsv4` the modules that the planner
loads.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = "314.0.7"
ADDRESS = f"https://registry.npmjs.org/pyodide/-/pyodide-{VERSION}.tgz"
# the registry's `dist.integrity`
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
KEPT = ROOT / "docs" / "_build" / f"pyodide-{VERSION}.tgz"
FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
ENTRY = "dsv4.planning.page"


class WrongFile(Exception):
    """The archive is not the one whose digest is known."""


def archive() -> bytes:
    """Pyodide's package. Raises OSError where it can be had neither here nor from the registry."""
    given = os.environ.get("DSV4_PYODIDE")
    found = Path(given) if given else KEPT
    if given or found.exists():
        return checked(found.read_bytes(), str(found))
    with urllib.request.urlopen(ADDRESS, timeout=120) as answer:
        data = checked(answer.read(), ADDRESS)
    found.parent.mkdir(parents=True, exist_ok=True)
    part = found.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(found)
    return data


def checked(data: bytes, origin: str) -> bytes:
    digest = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if digest != SHA512:
        raise WrongFile(f"{origin} is not Pyodide {VERSION}: its sha512 is {digest}")
    return data


def modules() -> list[Path]:
    """The files of the package that the planner loads."""
    files = "(m.__file__ for name, m in sys.modules.items() if name[:4] == 'dsv4')"
    code = f"import sys, {ENTRY}\nprint(*{files})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    return sorted(Path(name) for name in done.stdout.split())


def package() -> bytes:
    """The same bytes from the same sources."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in modules():
            info = zipfile.ZipInfo(path.relative_to(ROOT).as_posix())
            packed.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write(folder: Path) -> None:
    """Puts Pyodide and the package into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive())) as packed:
        for name in FILES:
            member = packed.extractfile(f"package/{name}")
            assert member is not None, name
            with (folder / name).open("wb") as target:
                shutil.copyfileobj(member, target)
    (folder / "dsv4.zip").write_bytes(package())


if __name__ == "__main__":
    write(Path(sys.argv[1]))

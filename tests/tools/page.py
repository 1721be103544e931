"""``python -m tests.tools.page OUT NODE_MODULES``: the page on which prepkit is tried without installing it.

A folder of plain files for any web server: the page, Python in WebAssembly from ``NODE_MODULES/pyodide`` (``npm install
pyodide``), and a zip of prepkit with what it imports, as it is installed here. Nothing is fetched when it runs.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ("index.html", "page.mjs")
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
LIBRARIES = ("attrs", "cattrs", "click", "returns", "ruamel.yaml", "tomli-w", "typing_extensions")
"""What the pure half of prepkit imports; all of it Python alone."""


def build(out: Path, modules: Path) -> None:
    """Write the page into a folder, which is made. Raises ``OSError`` where pyodide is not there."""
    (out / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        shutil.copyfile(ROOT / "page" / name, out / name)
    for name in PYODIDE:
        shutil.copyfile(modules / "pyodide" / name, out / "pyodide" / name)
    with zipfile.ZipFile(out / "site.zip", "w", zipfile.ZIP_DEFLATED) as site:
        for file, name in sorted(_site(), key=lambda pair: pair[1]):
            site.write(file, name)


def _site() -> Iterator[tuple[Path, str]]:
    """Each file of the zip, and its name there."""
    yield ROOT / "page" / "page.py", "page.py"
    for file in (ROOT / "prepkit").rglob("*"):
        if file.suffix in (".py", ".json"):
            yield file, str(file.relative_to(ROOT))
    for library in LIBRARIES:
        for one in metadata.files(library) or ():
            if one.suffix in (".so", ".pyd"):
                raise ValueError(f"{library} has {one}, which is no Python")
            if ".." not in one.parts and "__pycache__" not in one.parts:
                yield Path(str(one.locate())), one.as_posix()


if __name__ == "__main__":
    target, given = map(Path, sys.argv[1:3])
    build(target, given)
    print(f"python -m http.server --directory {target}")

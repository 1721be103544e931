"""Writes the pages and parts of pages in ``docs/`` that follow from the code: ``python -m tests.docs.generate``.

A page of ``PAGES`` is written whole. A part of ``PARTS`` stands on a page of its own between two comments,
``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``. ``test_generated.py`` compares both with the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.compat.scripts import report
from tests.docs import behaviour, classes, commands, findings, house, loop
from tests.docs.blocks import DOCS, ROOT
from tests.tools import house as counted

COMMAND = "python -m tests.docs.generate"
HEAD = f"<!-- Made by `{COMMAND}`; do not edit. -->\n\n"

PAGES: dict[str, Callable[[], str]] = {
    "reference/config.md": classes.config_page,
    "reference/steps.md": classes.steps_page,
    "reference/rules.md": findings.rules_page,
    **findings.PAGES,
    "reference/errors.md": findings.errors_page,
    "reference/command-line.md": commands.page,
    "reference/behaviour.md": behaviour.page,
}
"""Page below ``docs/`` to the function that gives its text."""

PARTS: dict[str, Callable[[], str]] = {
    "deviations by row": behaviour.deviations,
    "layers": house.layers,
    "loop events": loop.part,
    "rooms": house.rooms,
    "adding": house.adding,
    "tested versions": house.tested_versions,
    "required versions": house.required_versions,
    "model tables": house.model_tables,
    "checked predictions": house.checked_predictions,
    "ceilings": counted.ceilings,
    "accelerate scripts": report.markdown,
}
"""Name of a part to the function that gives its text."""


def texts() -> dict[Path, str]:
    """Every file that is generated, whole or in part, with the text that it should have."""
    out = {DOCS / name: HEAD + make() for name, make in PAGES.items()}
    for page in sorted(DOCS.rglob("*.md")):
        if page not in out and "<!-- generated: " in page.read_text():
            out[page] = _filled(page)
    return out


def _filled(page: Path) -> str:
    def part(marks: re.Match[str]) -> str:
        name = marks[1]
        return f"<!-- generated: {name} -->\n{PARTS[name]()}\n<!-- end of {name} -->"

    return re.sub(r"<!-- generated: (.*?) -->\n.*?<!-- end of \1 -->", part, page.read_text(), flags=re.DOTALL)


def main() -> None:
    """Writes what is not as it should be, and says so."""
    for path, text in texts().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

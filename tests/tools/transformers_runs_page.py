"""The tables of ``docs/transformers-runs.md``, between their markers, from the rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.resumed_runs import EQUAL, EQUAL_64

if TYPE_CHECKING:
    from tests.tools.transformers_runs import Row

_ORDER = (EQUAL, EQUAL_64)
_SAID = {EQUAL: "equal to 1e-5 in float32", EQUAL_64: "equal to 1e-5 in float64"}


def write(page: Path, found: Sequence[Row]) -> None:
    """Puts counts and rows into the page. Raises ``ValueError`` for a page without the markers."""
    text = page.read_text()
    for name, table in (("counts", counts(found)), ("rows", every(found))):
        begin, end = f"<!-- {name} of a run -->\n", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{page} has no {begin.strip()!r} and {end!r} around the {name}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    page.write_text(text)


def counts(found: Sequence[Row]) -> str:
    """Types by outcome; those of the smaller outcomes by name."""
    outcomes = sorted({row.outcome for row in found}, key=lambda name: (name not in _ORDER, name))
    lines = ["| outcome | types | |", "| --- | --- | --- |"]
    for outcome in outcomes:
        of = [row for row in found if row.outcome == outcome]
        told = _most(of) if outcome == EQUAL else ", ".join(f"`{row.kind}`" for row in of)
        lines.append(f"| {_SAID.get(outcome, outcome)} | {len(of)} | {told} |")
    return "\n".join(lines)


def every(found: Sequence[Row]) -> str:
    """A row per type."""
    lines = ["| type | outcome | loss | norm | weights | s |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join(lines + [str(row) for row in sorted(found, key=lambda row: row.kind)])


def _most(rows: Sequence[Row]) -> str:
    loss, norm, weights = (f"{max(getattr(row, name) for row in rows):.1e}" for name in ("loss", "norm", "weights"))
    return f"loss, norm and weights differ by at most {loss}, {norm} and {weights}"

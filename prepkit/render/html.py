"""Pieces of HTML and SVG for the report: everything is escaped here, and nothing comes from outside the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from prepkit.findings.text import in_bytes
from prepkit.predict.prediction import CATEGORIES

COLOURS: dict[str, str] = dict(
    zip(
        CATEGORIES,
        ("#2f5d8c", "#d9822b", "#6b4c9a", "#3f8f5b", "#b5485d", "#7a7a7a", "#4fa3c7", "#c9b458", "#c78bb0"),
        strict=True,
    )
)
"""Colour of each category; far enough apart for eyes that see few of them, and always named beside."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff; margin: 2rem auto; max-width: 76rem;
  padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.lead { color: #51606f; margin: 0 0 1rem; } .columns { display: grid; gap: 2.5rem; }
.two { grid-template-columns: 1fr 1fr; } table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: #51606f; font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap; }
th, td { padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #e3e8ee; vertical-align: top; }
code, .mono { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; } .dim { color: #6a7886; }
.error { color: #a3242f; } .warning { color: #8a5a00; } .yes { color: #22683c; } svg { display: block; width: 100%; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .45em; border-radius: 2px; }
details { margin: .3rem 0 .3rem 1.1rem; } summary { cursor: pointer; } section { min-width: 0; }
td:nth-child(2) > code, td:first-child { white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def text(value: object) -> str:
    """The value as text with HTML's special characters escaped."""
    return escape(str(value))


def tag(name: str, inside: str, cls: str = "") -> str:
    """An element of this name; ``inside`` is HTML already, and is not escaped."""
    return f"<{name}{f' class={chr(34)}{cls}{chr(34)}' if cls else ''}>{inside}</{name}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of HTML cells; columns of ``numbers`` are set to the right."""

    def line(kind: str, cells: Sequence[str]) -> str:
        return tag("tr", "".join(tag(kind, cell, "n" if i in numbers else "") for i, cell in enumerate(cells)))

    body = "".join(line("td", row) for row in rows)
    return tag("table", line("th", tuple(map(text, head))) + body) if body else tag("p", "none", "dim")


def swatch(category: str) -> str:
    """A little square in the colour of a category, and its name."""
    return f'<span class="swatch" style="background:{COLOURS[category]}"></span>{text(category)}'


Bar = tuple[str, Sequence[tuple[str, int]]]
"""A name, and category and bytes of each part."""


def bars(device: Sequence[Bar], host: Sequence[Bar], budget: int | None, scale: int, width: int = 1000) -> str:
    """Stacked bars on one scale; the budget is a line through those of devices.

    ``scale`` is the bytes of the full width, ``width`` that of the picture in units of its text's size, 14.
    """
    rows = (*device, *host)
    left, height, top = 130, 34, 22
    tall = top + len(rows) * (height + 12) + 6
    room = width - left - 90
    how = 'role="img" aria-label="memory by category" font-size="14" shape-rendering="crispEdges"'
    parts = [f'<svg viewBox="0 0 {width} {tall}" {how}>']
    for index, (name, segments) in enumerate(rows):
        y = top + index * (height + 12)
        parts.append(f'<text x="0" y="{y + 22}" fill="#1c2733">{text(name)}</text>')
        x = float(left)
        for category, size in segments:
            wide = room * size / scale
            title = f"{category}: {in_bytes(size)}"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{height}" fill="{COLOURS[category]}">'
                f"<title>{text(title)}</title></rect>"
            )
            x += wide
        total = in_bytes(sum(size for _, size in segments))
        parts.append(f'<text x="{x + 8:.2f}" y="{y + 22}" fill="#51606f">{text(total)}</text>')
    if budget is not None:
        at = left + room * budget / scale
        end = top + len(device) * (height + 12)
        anchor = "end" if at > left + room / 2 else "start"
        parts.append(
            f'<line x1="{at:.2f}" y1="16" x2="{at:.2f}" y2="{end}" stroke="#a3242f" stroke-width="2" '
            f'stroke-dasharray="5 4"/><text x="{at:.2f}" y="12" fill="#a3242f" text-anchor="{anchor}">'
            f"{text(in_bytes(budget))} of a device</text>"
        )
    return "".join(parts) + "</svg>"


def page(title: str, body: str) -> str:
    """The whole document. Its policy forbids to load anything, and scripts."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{text(title)}</title><style>{STYLE}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'

"""A plan as one self-contained page: steps, structure, memory, traffic, findings; or two plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from attrs import frozen

from prepkit.codec.diff import diff
from prepkit.findings import Finding
from prepkit.findings.text import collapse, count, in_bytes
from prepkit.plan import Plan
from prepkit.plan.step_text import axes, effect
from prepkit.predict import predict
from prepkit.predict.prediction import CATEGORIES, Place, Prediction, RankClass
from prepkit.render.changes import diff_text
from prepkit.render.plan import Node, columns, tree

# --- HTML ------------------------------------------------------------------------------------------------------------


COLOURS: dict[str, str] = dict(
    zip(
        CATEGORIES,
        ("#2f5d8c", "#d9822b", "#6b4c9a", "#3f8f5b", "#b5485d", "#7a7a7a", "#4fa3c7", "#c9b458", "#c78bb0"),
        strict=True,
    )
)
"""Colour of each category; far enough apart for eyes that see few of them, and always named beside."""

MOST_RANKS, MOST_NODES = 16, 16
"""Ranks of a node, and nodes, that the picture of the mesh shows."""

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
pre { white-space: pre-wrap; overflow-wrap: anywhere; } table.mesh { width: auto; } .mesh td { padding: .2rem .5rem; }
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


@frozen(kw_only=True)
class PagePlan:
    """One of the plans that a page shows, with what is said of it."""

    name: str
    plan: Plan
    prediction: Prediction
    memory: int | None
    """Budget of one device."""


def report(plans: Sequence[tuple[str, Plan]], memory: int | None = None, activations: int | None = None) -> str:
    """The page of one or two named plans. ``memory`` None: what the plans' environments say of a device.

    ``activations``: bytes of one micro-batch; None: not counted.

    Uses no network and no script. Raises ``ValueError`` for another number of plans.
    """
    if not 1 <= len(plans) <= 2:
        raise ValueError(f"a report shows one plan or two, not {len(plans)}; give one or two files")
    page_plans = [
        PagePlan(name=n, plan=p, prediction=predict(p, activations), memory=memory or p.facts.env.memory)
        for n, p in plans
    ]
    scale = max(max(_totals(page_plan), default=1) for page_plan in page_plans)
    scale = max(scale, *(page_plan.memory or 0 for page_plan in page_plans), 1)
    parts: tuple[tuple[str, Callable[[PagePlan], str]], ...] = (
        ("Memory", lambda page_plan: _memory(page_plan, scale, 1000 if len(page_plans) == 1 else 560)),
        ("Traffic per optimizer step", _traffic),
        ("What it means", _notes),
        ("Findings", _findings),
        ("Mesh", lambda page_plan: mesh(page_plan.plan)),
        ("Structure", lambda page_plan: _node(tree(page_plan.plan), level=0)),
        ("Steps", _steps),
    )
    body = _columns([_head(page_plan) for page_plan in page_plans])
    if len(page_plans) == 2:
        body += tag("h2", "Differences") + _differences(page_plans[0], page_plans[1])
    for title, part in parts:
        body += tag("h2", title) + _columns([part(page_plan) for page_plan in page_plans])
    return page(" and ".join(page_plan.name for page_plan in page_plans), body)


def _columns(cells: Sequence[str]) -> str:
    return tag("div", "".join(tag("section", cell) for cell in cells), "columns two" if len(cells) == 2 else "columns")


def _totals(page_plan: PagePlan) -> Iterator[int]:
    places: tuple[Place, Place] = ("device", "host")
    yield from (ranks.total(place) for ranks in page_plan.prediction.classes for place in places)


def _head(page_plan: PagePlan) -> str:
    plan = page_plan.plan
    name = plan.facts.model.classes[plan.facts.model.modules[0].cls].name
    engine = type(plan.config.engine).__name__
    lead = f"{name}, {engine} over {count(plan.world_size, 'rank')} ({axes(plan.mesh)}), {plan.facts.env.device}"
    return tag("h1", text(page_plan.name)) + tag("p", text(lead), "lead") + _verdict(page_plan)


def _verdict(page_plan: PagePlan) -> str:
    if not page_plan.prediction.classes:
        return tag("p", text(f"not predicted: {'; '.join(page_plan.prediction.not_predicted)}"), "warning")
    floor, most = max(ranks.floor() for ranks in page_plan.prediction.classes), page_plan.prediction.fullest.total()
    need = f"{in_bytes(floor)} for certain, {in_bytes(most)} at most, {page_plan.prediction.about}"
    if page_plan.memory is None:
        return tag("p", text(f"A rank's device holds {need}. No memory of a device is declared."))
    cls, word = ("yes", "fits") if most <= page_plan.memory else ("warning", "may not fit")
    cls, word = ("error", "does not fit") if floor > page_plan.memory else (cls, word)
    return tag("p", tag("strong", word, cls) + text(f" into {in_bytes(page_plan.memory)}: {need}."))


def _memory(page_plan: PagePlan, scale: int, width: int) -> str:
    if not page_plan.prediction.classes:
        return tag("p", "not predicted", "dim")
    classes = columns(page_plan.prediction)
    device = [(_short(name), _segments(page_plan, ranks, "device")) for name, ranks in classes]
    # A few counters in host memory are no bar; the table has them.
    host = [
        (f"{_short(n)}, host", _segments(page_plan, ranks, "host"))
        for n, ranks in classes
        if ranks.total("host") > scale / 500
    ]
    terms = sorted(page_plan.prediction.fullest.terms, key=lambda term: (CATEGORIES.index(term.category), -term.bytes))
    rows = [
        (swatch(term.category), text(term.what), text(term.place), text(term.label.value), text(in_bytes(term.bytes)))
        for term in terms
        if term.bytes
    ]
    who = tag("p", text("; ".join(name for name, _ in classes)), "dim") if len(classes) > 1 else ""
    picture = bars(device, host, page_plan.memory, int(scale * 1.02), width)
    return picture + who + table(("category", "what, on the fullest rank", "where", "how sure", "bytes"), rows, (4,))


def _short(name: str) -> str:
    return name.partition(":")[0] + (" rank" if ":" in name else "")


def _segments(page_plan: PagePlan, ranks: RankClass, place: Place) -> list[tuple[str, int]]:
    names = dict.fromkeys(category for category, _ in page_plan.prediction.categories())
    return [(name, size) for name in names if (size := ranks.category(name, place))]


def _traffic(page_plan: PagePlan) -> str:
    rows = [
        (
            text(entry.collective), text(entry.what), text(f"{entry.calls:,}"),
            text(f"{entry.axis}, {count(entry.ranks, 'rank')}" if entry.ranks > 1 else ""),
            text(in_bytes(entry.bytes)), text(in_bytes(entry.sent)), text(entry.label.value),
        )
        for entry in page_plan.prediction.traffic
    ]  # fmt: skip
    return table(("collective", "what", "calls", "over", "whole", "sent by a rank", "how sure"), rows, (2, 4, 5))


def mesh(plan: Plan) -> str:
    """A picture of the ranks: a row is a node, ranks of one colour hold a copy of the model between them."""
    if not plan.mesh:
        return tag("p", "one process", "dim")
    world, per_node = plan.world_size, plan.facts.env.per_node or min(plan.world_size, MOST_RANKS)
    shades = tuple(COLOURS.values())
    rows = []
    for first in range(0, min(world, per_node * MOST_NODES), per_node):
        ranks = range(first, min(first + per_node, world))
        cells = ""
        for rank in ranks[:MOST_RANKS]:
            place = dict(zip((axis.name for axis in plan.mesh), _coordinates(plan, rank), strict=True))
            shade = shades[place.get("replicate", 0) % len(shades)]
            said = text(f"rank {rank}: {', '.join(f'{name} {index}' for name, index in place.items())}")
            cells += f'<td class="n" style="background:{shade}33" title="{said}">{rank}</td>'
        more = f'<td class="dim">and {len(ranks) - MOST_RANKS:,} more</td>' if len(ranks) > MOST_RANKS else ""
        head = f"node {first // per_node}" if plan.facts.env.per_node else "ranks"
        rows.append(f"<tr><th>{head}</th>{cells}{more}</tr>")
    hidden = -(-world // per_node) - len(rows)
    what = "A row is a node. " if plan.facts.env.per_node else "Which ranks share a node is not known. "
    what += f"Ranks of one colour hold one copy of the model between them: {axes(plan.mesh)}."
    what += f" {count(hidden, 'more node')} like these." if hidden else ""
    return tag("p", text(what), "dim") + f'<table class="mesh">{"".join(rows)}</table>'


def _coordinates(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return where a rank stands along each axis; the last one counts fastest."""
    at: list[int] = []
    for axis in reversed(plan.mesh):
        rank, index = divmod(rank, axis.size)
        at.append(index)
    return tuple(reversed(at))


def _notes(page_plan: PagePlan) -> str:
    notes = (
        *page_plan.prediction.notes,
        *(f"Not predicted: {phrase}." for phrase in page_plan.prediction.not_predicted),
    )
    return tag("ul", "".join(tag("li", text(note)) for note in notes))


def _findings(page_plan: PagePlan) -> str:
    def item(finding: Finding, accepted: str = "") -> str:
        head = tag("strong", text(f"{finding.severity.value}{accepted} "), finding.severity.value)
        where = tag("code", text(f"{finding.rule} at {finding.where}"))
        return tag("li", f"{head}{where}<br>{text(finding.what)}<br>{tag('span', text('fix: ' + finding.fix), 'dim')}")

    items = [item(finding) for finding in page_plan.plan.warnings]
    items += [item(finding, ", accepted") for finding in page_plan.plan.overridden]
    return tag("ul", "".join(items)) if items else tag("p", "none", "dim")


def _node(node: Node, level: int) -> str:
    where = ", ".join(paths.text or "(root)" for paths in collapse(node.paths)[:4])
    times = f"{len(node.paths)} x " if len(node.paths) > 1 else ""
    sizes = in_bytes(node.whole)
    if node.gathered:
        sizes += f" whole, {in_bytes(node.kept)} a rank, {in_bytes(node.gathered)} gathered"
    name = f"{text(times)}<b>{text(node.cls)}</b> {tag('code', text(where))} {text(sizes)}"
    head = f"{name} {tag('span', text(', '.join(node.marks)), 'dim')}"
    inside = "".join(_node(inner, level + 1) for inner in node.inside)
    return f"<details{' open' if level < 2 else ''}><summary>{head}</summary>{inside}</details>"


def _steps(page_plan: PagePlan) -> str:
    rows = [
        (
            text(number), tag("code", text(type(planned.step).__name__)),
            text(effect(planned.step)) + "<br>" + tag("span", text(f"because {planned.reason}"), "dim"),
            tag("span", text(", ".join(planned.behaviour_ids)), "dim"),
        )
        for number, planned in enumerate(page_plan.plan.steps, start=1)
    ]  # fmt: skip
    return table(("", "step", "what it does, and why", "source"), rows)


def _differences(a: PagePlan, b: PagePlan) -> str:
    numbers = _compared(a.prediction, b.prediction)
    changes = diff(a.plan, b.plan)
    summary = tag("summary", text(count(len(changes), "change"))) + tag("pre", text(diff_text(changes)), "mono")
    details = f"<details open>{summary}</details>" if changes else tag("p", "The plans are equal.", "dim")
    head = ("on the fullest rank", "first plan", "second plan", "difference")
    return table(head, numbers, (1, 2, 3)) + details


def _compared(a: Prediction, b: Prediction) -> list[tuple[str, str, str, str]]:
    if not a.classes or not b.classes:
        return []
    names = dict.fromkeys((*(name for name, _ in a.categories()), *(name for name, _ in b.categories())))
    pairs = [(swatch(name), a.fullest.category(name), b.fullest.category(name)) for name in names]
    pairs += [("all, device", a.fullest.total(), b.fullest.total())]
    pairs += [("all, host", a.fullest.total("host"), b.fullest.total("host")), ("sent per step", a.sent, b.sent)]
    return [(name, text(in_bytes(x)), text(in_bytes(y)), _signed(y - x)) for name, x, y in pairs if x or y]


def _signed(number: int) -> str:
    return "0" if not number else text(f"{'+' if number > 0 else '-'}{in_bytes(abs(number))}")

"""What ranks hold and send, as tables of plain text."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.findings.text import aligned, count, in_bytes
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.predict.prediction import Category, Label, Place, Prediction, RankClass, Traffic

SHOWN = 2
"""Terms of one category that are named."""


def memory_lines(plan: Plan) -> Iterator[str]:
    """The sections ``memory`` and ``traffic`` of a plan's page."""
    made = predict(plan)
    if not made.classes:
        yield f"memory: not predicted ({'; '.join(made.not_predicted)})"
        return
    yield f"memory of a rank, {made.about}{_budget(plan, made)}"
    yield from aligned(tuple(_memory(made)), indent=2)
    yield from (f"  not predicted: {one}" for one in made.not_predicted)
    yield ""
    if made.traffic:
        yield f"traffic of a rank per optimizer step: {in_bytes(made.sent)} sent"
        yield from aligned(tuple(_traffic(one) for one in made.traffic), indent=2)
    else:
        yield "traffic: none"
    yield ""
    yield "what it means"
    yield from (f"  {note}" for note in made.notes)


def _budget(plan: Plan, made: Prediction) -> str:
    memory = plan.facts.env.memory
    floor, most = max(one.floor() for one in made.classes), made.fullest.total()
    needs = f": {in_bytes(floor)} for certain, {in_bytes(most)} at most"
    return needs + (f", of {in_bytes(memory)}" if memory else "")


def columns(made: Prediction) -> tuple[tuple[str, RankClass], ...]:
    """The fullest and the emptiest kind of rank with their names; one where all ranks are alike."""
    most, least = made.fullest, made.emptiest
    if most == least:
        return ((called(made, most), most),)
    return ((f"fullest: {called(made, most)}", most), (f"emptiest: {called(made, least)}", least))


def called(made: Prediction, some: RankClass) -> str:
    """``every rank``, ``rank 511``, ``rank 3 and 63 like it``."""
    if some.ranks == made.world_size:
        return "every rank" if some.ranks > 1 else "the only rank"
    return f"rank {some.first * made.tensor}" + (f" and {some.ranks - 1:,} like it" if some.ranks > 1 else "")


def _memory(made: Prediction) -> Iterator[tuple[str, ...]]:
    shown = columns(made)
    yield ("", *(name for name, _ in shown), "", "")
    for category, place in made.categories():
        cells = tuple(in_bytes(one.category(category, place)) for _, one in shown)
        yield (
            _name(category, place),
            *cells,
            label(shown[0][1], category, place),
            _whats(shown[0][1], category, place),
        )
    places: tuple[Place, Place] = ("device", "host")
    for place in places:
        if any(one.total(place) for _, one in shown):
            yield (f"all, {place}", *(in_bytes(one.total(place)) for _, one in shown), "", "")


def _name(category: Category, place: Place) -> str:
    return category + (" (host)" if place == "host" else "")


def label(some: RankClass, category: Category, place: Place) -> str:
    """The weakest label among the terms of a category."""
    labels = [t.label for t in some.terms if t.category == category and t.place == place and t.bytes]
    return max(labels, key=tuple(Label).index).value if labels else ""


def _whats(some: RankClass, category: Category, place: Place) -> str:
    """What they are, the largest first; the report names them all."""
    terms = [t for t in some.terms if t.category == category and t.place == place and t.bytes]
    terms.sort(key=lambda term: -term.bytes)
    left = f" and {len(terms) - SHOWN} more" if len(terms) > SHOWN else ""
    return "; ".join(term.what for term in terms[:SHOWN]) + left


def _traffic(one: Traffic) -> tuple[str, ...]:
    over = f"over {count(one.ranks, 'rank')}" if one.ranks > 1 else ""
    return (
        one.collective,
        one.what,
        count(one.calls, "call"),
        f"{in_bytes(one.bytes)} whole",
        f"{in_bytes(one.sent)} {'copied' if one.collective == 'host copy' else 'sent'}",
        over,
        one.label.value,
    )

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
    prediction = predict(plan)
    if not prediction.classes:
        yield f"memory: not predicted ({'; '.join(prediction.not_predicted)})"
        return
    yield f"memory of a rank, {prediction.about}{_budget(plan, prediction)}"
    yield from aligned(tuple(_memory(prediction)), indent=2)
    yield from (f"  not predicted: {entry}" for entry in prediction.not_predicted)
    yield ""
    if prediction.traffic:
        yield f"traffic of a rank per optimizer step: {in_bytes(prediction.sent)} sent{_between(plan, prediction)}"
        yield from aligned(tuple(_traffic(entry) for entry in prediction.traffic), indent=2)
    else:
        yield "traffic: none"
    yield ""
    yield "what it means"
    yield from (f"  {note}" for note in prediction.notes)


def _between(plan: Plan, prediction: Prediction) -> str:
    """How much of it goes from node to node; empty where all ranks are on one node, or nodes are not known."""
    per_node = plan.facts.env.per_node
    if per_node is None or plan.world_size <= per_node:
        return ""
    crossing = prediction.crossing(per_node)
    share = "all" if crossing == prediction.sent else in_bytes(crossing) if crossing else "none"
    return f", {share} of it between nodes"


def _budget(plan: Plan, prediction: Prediction) -> str:
    memory = plan.facts.env.memory
    floor, most = max(ranks.floor() for ranks in prediction.classes), prediction.fullest.total()
    needs = f": {in_bytes(floor)} for certain, {in_bytes(most)} at most"
    return needs + (f", of {in_bytes(memory)}" if memory else "")


def columns(prediction: Prediction) -> tuple[tuple[str, RankClass], ...]:
    """The fullest and the emptiest kind of rank with their names; one where all ranks are alike."""
    most, least = prediction.fullest, prediction.emptiest
    if most == least:
        return ((called(prediction, most), most),)
    return ((f"fullest: {called(prediction, most)}", most), (f"emptiest: {called(prediction, least)}", least))


def called(prediction: Prediction, ranks: RankClass) -> str:
    """``every rank``, ``rank 511``, ``rank 3 and 63 like it``."""
    if ranks.ranks == prediction.world_size:
        return "every rank" if ranks.ranks > 1 else "the only rank"
    return f"rank {ranks.first * prediction.tensor}" + (f" and {ranks.ranks - 1:,} like it" if ranks.ranks > 1 else "")


def _memory(prediction: Prediction) -> Iterator[tuple[str, ...]]:
    classes = columns(prediction)
    yield ("", *(name for name, _ in classes), "", "")
    for category, place in prediction.categories():
        cells = tuple(in_bytes(ranks.category(category, place)) for _, ranks in classes)
        yield (
            _name(category, place),
            *cells,
            label(classes[0][1], category, place),
            _whats(classes[0][1], category, place),
        )
    places: tuple[Place, Place] = ("device", "host")
    for place in places:
        if any(ranks.total(place) for _, ranks in classes):
            yield (f"all, {place}", *(in_bytes(ranks.total(place)) for _, ranks in classes), "", "")


def _name(category: Category, place: Place) -> str:
    return category + (" (host)" if place == "host" else "")


def label(ranks: RankClass, category: Category, place: Place) -> str:
    """How sure the sum of a category is: the weakest label among its terms."""
    labels = [t.label for t in ranks.terms if t.category == category and t.place == place and t.bytes]
    return max(labels, key=tuple(Label).index).value if labels else ""


def _whats(ranks: RankClass, category: Category, place: Place) -> str:
    """What they are, the largest first; the report names them all."""
    terms = [t for t in ranks.terms if t.category == category and t.place == place and t.bytes]
    terms.sort(key=lambda term: -term.bytes)
    left = f" and {len(terms) - SHOWN} more" if len(terms) > SHOWN else ""
    return "; ".join(term.what for term in terms[:SHOWN]) + left


def _traffic(entry: Traffic) -> tuple[str, ...]:
    over = f"over {count(entry.ranks, 'rank')}" if entry.ranks > 1 else ""
    return (
        entry.collective,
        entry.what,
        count(entry.calls, "call"),
        f"{in_bytes(entry.bytes)} whole",
        f"{in_bytes(entry.sent)} {'copied' if entry.collective == 'host copy' else 'sent'}",
        over,
        entry.label.value,
    )

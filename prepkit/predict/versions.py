"""Which versions the formulas were compared with, byte for byte: they follow library internals, which may change."""

from __future__ import annotations

import re
from typing import TypeVar

from attrs import evolve

from prepkit.predict.prediction import Label, Prediction, Term, Traffic

T = TypeVar("T", Term, Traffic)

CHECKED: dict[str, dict[str, tuple[str, ...]]] = {
    "Single": {"torch": ("2.13",)},
    "DDP": {"torch": ("2.13",)},
    "FSDP2": {"torch": ("2.13",)},
    "TensorParallel": {"torch": ("2.13",)},
    "FSDP1": {"torch": ("2.13",)},
    "DeepSpeed": {"torch": ("2.13",), "deepspeed": ("0.19",)},
}
"""Engine to library to the releases (first two numbers) with which ``tests/predict`` found a difference of 0 bytes."""


def judged(prediction: Prediction, versions: dict[str, str]) -> Prediction:
    """The prediction as it is for checked libraries; with another one, with every exact number called bounded.

    An empty version, one that is not known, is taken for the newest checked one, and a note says so.
    """
    for library, checked in CHECKED.get(prediction.engine, {}).items():
        prediction = _judged(prediction, library, versions[library], checked)
    return prediction


def _judged(prediction: Prediction, library: str, version: str, checked: tuple[str, ...]) -> Prediction:
    newest = checked[-1]
    if not version:
        note = f"{library} version not known: the formulas are those of {library} {newest}."
        return evolve(prediction, notes=(*prediction.notes, note))
    release = re.match(r"\d+\.\d+", version)
    if release and release.group() in checked:
        return prediction
    note = (
        f"{library} {version} was not compared with these formulas, {library} {newest} was: "
        "what would be exact is called bounded."
    )
    return evolve(bounded(prediction), notes=(*prediction.notes, note))


def bounded(prediction: Prediction) -> Prediction:
    """The prediction with ``Label.BOUNDED`` in the place of every ``Label.EXACT``; no number changes."""
    return evolve(
        prediction,
        classes=tuple(evolve(ranks, terms=tuple(map(_doubted, ranks.terms))) for ranks in prediction.classes),
        traffic=tuple(map(_doubted, prediction.traffic)),
    )


def _doubted(value: T) -> T:
    return evolve(value, label=Label.BOUNDED) if value.label is Label.EXACT else value

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


def judged(prediction: Prediction, torch: str) -> Prediction:
    """The prediction as it is for a checked torch; for another one, with every exact number called bounded.

    An unknown version is taken for the newest checked one, and a note says so.
    """
    checked = CHECKED.get(prediction.engine, {}).get("torch", ())
    newest = checked[-1] if checked else "none"
    if not torch:
        note = f"torch version not known: the formulas are those of torch {newest}."
        return evolve(prediction, notes=(*prediction.notes, note))
    found = re.match(r"\d+\.\d+", torch)
    if found and found.group() in checked:
        return prediction
    note = (
        f"torch {torch} was not compared with these formulas, torch {newest} was: "
        "what would be exact is called bounded."
    )
    return evolve(bounded(prediction), notes=(*prediction.notes, note))


def bounded(prediction: Prediction) -> Prediction:
    """The prediction with every exact number called bounded."""
    return evolve(
        prediction,
        classes=tuple(evolve(one, terms=tuple(_doubted(term) for term in one.terms)) for one in prediction.classes),
        traffic=tuple(_doubted(one) for one in prediction.traffic),
    )


def _doubted(value: T) -> T:
    return evolve(value, label=Label.BOUNDED) if value.label is Label.EXACT else value

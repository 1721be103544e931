"""A picture of what a run has logged."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import prepkit as pk


def plot(ready: pk.Prepared, log: str) -> None:
    """Draws every value of a file of JSON lines over the steps, as a PNG beside it; the main process does."""
    if not ready.ranks.is_main:
        return
    if importlib.util.find_spec("matplotlib") is None:
        ready.ranks.print("no plot: matplotlib is not installed; pip install 'prepkit[examples]'")
        return
    from matplotlib.figure import Figure

    curves: dict[str, dict[int, float]] = {}
    for line in Path(log).read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        for name, value in values.items():
            curves.setdefault(name, {})[step] = value  # of a step that was taken twice the last line counts
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(list(points), list(points.values()), label=name)
    axes.set_xlabel("step")
    axes.legend()
    target = Path(log).with_suffix(".png")
    figure.savefig(target)
    ready.ranks.print(f"plot in {target}")

"""Code that several processes run: one first, all to the same point, and a save before they are stopped."""

from prepkit.later import later

NAMES = {
    "prepkit.ranks.together": ("main_process_first", "together"),
    "prepkit.training.preemption": ("save_on_sigterm",),
}
"""Modules to their public names."""

__getattr__, __dir__ = later(__name__, NAMES)

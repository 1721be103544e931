"""Everything that prepkit raises for a user to catch, and the category of its warnings."""

from prepkit.later import later

NAMES = {
    "prepkit.findings": ("FindingWarning", "PlanRejected", "RunRefused"),
    "prepkit.applying.apply": ("ApplyHalted", "NotAsPlanned"),
    "prepkit.applying.rehearse": ("RehearsalFailed",),
    "prepkit.ranks.agree": ("Disagreement",),
    "prepkit.ranks.peers": ("RankFailed",),
    "prepkit.ranks.world": ("RankZeroFailed",),
    "prepkit.saving.failures": ("CheckpointFailed",),
    "prepkit.training.preemption": ("Preempted",),
}
"""Modules to their public names."""

__getattr__, __dir__ = later(__name__, NAMES)

"""The one look at the gradients before the optimizer first acts, and at what the loop has read till then."""

from __future__ import annotations

from attrs import define
from torch.nn import Module

from prepkit.config import XLA, ShardLoaders
from prepkit.live.data.passes import Passes
from prepkit.live.training import first_step
from prepkit.live.training.gradients import Watched, gradients
from prepkit.plan import Plan
from prepkit.plan.attestation import Check
from prepkit.steps import ShardLoader


@define(kw_only=True)
class FirstLook:
    """Once per run."""

    plan: Plan
    watched: Watched | None = None
    """Notes the gradients of the first window where the engine takes them away as they come."""
    done: bool = False

    def watch(self, model: Module) -> None:
        """From here on gradients are noted as they come."""
        self.watched = Watched(model)
        self.watched.begin()

    def look(self, model: Module, passes: Passes) -> tuple[Check, ...]:
        """The checks of the first step (``training.first_step``); none from the second on. Collective."""
        if self.done or isinstance(self.plan.config.engine, XLA):  # torch knows no group of its processes
            return ()
        self._warn(passes)
        watched = self.watched
        seen = tuple(gradients(model) if watched is None else watched.end())
        scaled = self.plan.owners.loss_scaling != "nobody"
        accepted = self.plan.config.overrides
        checks = first_step.look(model, seen, scaled=scaled, accepted=accepted, reduced=watched is None)
        self.done, self.watched = True, None  # what was noted is kept while it refuses: the story stays the same
        return checks

    def _warn(self, passes: Passes) -> None:
        """On rank 0, where the loop reads what every other rank reads as well."""
        if self.plan.world_size > 1 and any(isinstance(planned.step, ShardLoader) for planned in self.plan.steps):
            passes.warn_unread()
        elif self.plan.data_parallel_size > 1 and isinstance(self.plan.config.loaders, ShardLoaders):
            passes.warn_none(self.plan.data_parallel_size)

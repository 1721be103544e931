"""The checkpoints of one run as its user sees them; what writes and reads them is imported with the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, field
from torch.nn import Module

from prepkit.court import Court
from prepkit.facts.saved_run import Said, SavedModule
from prepkit.ranks.peers import Peers, named
from prepkit.saving import saved_facts
from prepkit.saving.contents import RunParts

if TYPE_CHECKING:
    from prepkit.saving.session import Checkpoints


@define(eq=False, repr=False)
class RunCheckpoints:
    """The checkpoints of one run: ``ready.checkpoints``."""

    _parts: Callable[[], RunParts]
    """The parts of the run as they are now."""
    _peers: Peers | None
    """The other ranks; None: alone."""
    _court: Court
    _modules: tuple[SavedModule, ...]
    _config: Said
    _made: Checkpoints | None = field(default=None, init=False)

    @property
    def run(self) -> Checkpoints:
        """Saves and resumes. Made when first asked for: torch's checkpoints take a tenth of a second to import."""
        if self._made is None:
            from prepkit.saving.session import Checkpoints

            self._made = Checkpoints(modules=self._modules, config=self._config, court=self._court)
        return self._made

    def finish(self) -> None:
        """Wait for a checkpoint that is being written. Raises ``CheckpointFailed`` where it could not be."""
        with named(self._peers, "ready.checkpoints.finish()"):
            if self._made is not None:
                self._made.writer.finish()

    def check(self, folder: str) -> None:
        """Make the folder; raise now for what would keep ``save`` from working, as it would. Collective."""
        with named(self._peers, "ready.checkpoints.check()"):
            self.run.check(self._parts(), folder)

    def close(self, *, failing: bool) -> None:
        """Wait for a checkpoint that is being written, for a minute; where the run is failing leave it."""
        if self._made is not None:
            writer = self._made.writer
            writer.leave() if failing else writer.close()


def of(model: Module, court: Court, parts: Callable[[], RunParts], peers: Peers | None) -> RunCheckpoints:
    """The checkpoints of a model that has just been prepared: settings of its modules are noted as they are now."""
    return RunCheckpoints(parts, peers, court, saved_facts.modules_of(model), saved_facts.config_of(model))

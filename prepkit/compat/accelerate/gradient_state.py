"""Where a script is in its window and in its loader: accelerate's ``GradientState``, to be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from prepkit.loading.loader import Loader
from prepkit.loading.passes import Passes


@frozen
class GradientState:
    """A view of one ``Accelerator``."""

    num_steps: int
    """Micro-batches of a window."""
    _ends_window: Callable[[], bool]
    _passes: Passes

    @staticmethod
    def _reset_state() -> None:
        """Nothing: there is no state that accelerators share."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch ends its window."""
        return self._ends_window()

    @property
    def active_dataloader(self) -> Any:
        """The loader that is being read, the innermost of several; None outside of any."""
        return self._passes.under_way[-1] if self._passes.under_way else None

    @property
    def dataloader_references(self) -> list[Any]:
        """All that are being read, the innermost last."""
        return list(self._passes.under_way)

    @property
    def in_dataloader(self) -> bool:
        """Whether any is."""
        return bool(self._passes.under_way)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in use is the last of its pass."""
        loader = self.active_dataloader
        return isinstance(loader, Loader) and loader.present is not None and loader.present.last

    @property
    def remainder(self) -> int:
        """Samples of this rank in the last batch that are no repeats; -1 before it, and where nobody counts."""
        loader = self.active_dataloader
        if not self.end_of_dataloader or loader.present.counted is None:
            return -1
        return int(loader.present.counted)

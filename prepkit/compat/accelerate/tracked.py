"""What a script logs: trackers of accelerate's own, which ask accelerate's state who this process is."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from attrs import define, field

from prepkit.compat.accelerate.not_offered import NotOffered


@define
class Tracked:
    """The trackers of one ``Accelerator``: named by ``log_with``, started by ``init_trackers``."""

    log_with: list[Any]
    """Names, accelerate's ``LoggerType`` values, and trackers of the script's own."""
    logging_dir: Any
    trackers: list[Any] = field(factory=list)

    @classmethod
    def of(cls, log_with: Any, logging_dir: Any) -> Tracked:
        """Those that can be used here, as accelerate has it. Raises ``ValueError`` as accelerate does."""
        if log_with is None:
            return cls([], logging_dir)
        return cls(list(_tracking().filter_trackers(log_with, logging_dir)), logging_dir)

    def start(self, project: str, config: Any, options: dict[str, Any]) -> None:
        """Makes and starts each of them, and tells it the script's config."""
        tracking = _tracking() if self.log_with else None
        for one in self.log_with:
            if tracking is None or isinstance(one, tracking.GeneralTracker):
                self.trackers.append(one)
                continue
            kind, given = tracking.LOGGER_TYPE_TO_CLASS[str(one)], options.get(str(one), {})
            where = (self.logging_dir,) if kind.requires_logging_directory else ()
            self.trackers.append(kind(project, *where, **given))
        for one in self.trackers:
            one.start()
        for one in self.trackers if config is not None else ():
            one.store_init_configuration(config)

    def log(self, values: dict[str, Any], step: int | None, options: dict[str, Any]) -> None:
        """Each of them hears it; they write on the main process alone."""
        for one in self.trackers:
            one.log(values, step=step, **options.get(one.name, {}))

    def named(self, name: str, *, unwrap: bool, main: bool) -> Any:
        """One of them, or what is inside it. Off the main process one that does nothing. Raises ``ValueError``."""
        if not main:
            return _tracking().GeneralTracker(_blank=True)
        for one in self.trackers:
            if one.name == name:
                return one.tracker if unwrap else one
        raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")

    def finish(self) -> None:
        """Ends each of them."""
        for one in self.trackers:
            one.finish()


def _tracking() -> Any:
    if find_spec("accelerate") is None:
        what = "type pip install accelerate, or write accelerator.ready.log.to(pk.track.TensorBoard(folder))"
        raise NotOffered("log_with without accelerate", what, "accelerate.not-installed")
    return import_module("accelerate.tracking")

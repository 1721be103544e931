"""The output of one run: values for its trackers, lines and bars for a person. The main process writes all of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

import torch
from attrs import define, field
from torch.distributed.tensor import DTensor

from prepkit.codec import to_data
from prepkit.config import Config
from prepkit.loading.loader import Loader
from prepkit.training import trackers
from prepkit.training.trackers import Tracker, TrackerSpec


@define
class RunLog:
    """The trackers of one run. No call is collective; values are checked on every rank, and written on one."""

    main: bool
    """This is the main process."""
    config: Config
    open: list[Tracker] = field(factory=list, init=False)
    given: list[TrackerSpec] = field(factory=list, init=False)
    """Trackers that were given: known on every rank, so that a second time is refused on all of them."""

    def to(self, specs: tuple[TrackerSpec, ...], step: int) -> None:
        """Open trackers, all or none; ``step`` is the optimizer's. Raises as ``Prepared.log_to``."""
        given = list(self.given)
        for spec in specs:
            trackers.check(spec)
            trackers.refuse_second(spec, given)
            given.append(spec)
        if self.main:
            self._open(specs, step)
        self.given = given

    def _open(self, specs: tuple[TrackerSpec, ...], step: int) -> None:
        settings = dict(_flat(to_data(self.config), ""))
        new: list[Tracker] = []
        try:
            for spec in specs:
                tracker = trackers.opened(spec, step, settings)
                trackers.refuse_same(tracker, (*self.open, *new))
                new.append(tracker)
        except BaseException:
            for tracker in new:
                tracker.finish()
            raise
        self.open.extend(new)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Write values at a step. Raises ``TypeError`` and ``ValueError`` on every rank for what is no single value."""
        _check_call(values, step)
        for name, value in values.items():
            _check(name, value)
        if self.open:
            plain = {name: _plain(value) for name, value in values.items() if value is not None}
            for tracker in self.open:
                tracker.log(plain, step=step)

    def finish(self) -> None:
        """Close every tracker."""
        self.given = []
        while self.open:
            self.open.pop().finish()


def _check_call(values: Any, step: Any) -> None:
    """Raise for what are no values under names, or no step."""
    if not isinstance(values, Mapping):
        raise TypeError(f'ready.log takes values under their names, and not {values!r:.60}; write {{"loss": loss}}')
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"step={step!r:.60} is no step; give a whole number, or leave it out for that of the optimizer")
    if wrong := [name for name in values if not isinstance(name, str)]:
        raise TypeError(f'{wrong[0]!r:.60} is no name; write ready.log({{"{wrong[0]!s:.20}": ...}})')
    if "step" in values:
        raise ValueError(
            '"step" is the name under which trackers write the step of the optimizer, which it would replace; write '
            "ready.log({...}, step=...), or give the value another name"
        )


def _check(name: str, value: Any) -> None:
    """Raise for what is no single value: on every rank, as an error of the main one alone would end it alone."""
    if isinstance(value, DTensor):
        raise TypeError(f"{name!r} is a DTensor, which ranks read together; log {name}.full_tensor() on every rank")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(f"{name!r} has shape {list(value.shape)}; log single values, such as its mean()")
    if not isinstance(value, torch.Tensor | int | float | str | None):
        fix = "log numbers, words and tensors of one element"
        raise TypeError(f"{name!r} is of {type(value).__name__}; {fix}")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A config as single values under dotted names."""
    match value:
        case dict():
            for name, part in value.items():
                yield from _flat(part, f"{path}.{name}" if path else name)
        case list():
            for at, part in enumerate(value):
                yield from _flat(part, f"{path}.{at}")
        case None:
            return
        case _:
            yield path, value


def show(main: bool, values: tuple[Any, ...], sep: str, end: str, file: TextIO | None) -> None:
    """Print on the main process, above a bar that is open."""
    if not main:
        return
    text = sep.join(map(str, values))
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        tqdm.write(text, file=file, end=end)
    else:
        (file or sys.stdout).write(f"{text}{end}")
    (file or sys.stdout).flush()


def bar(main: bool, iterable: Iterable[Any], options: dict[str, Any]) -> Any:
    """Show a bar on the main process while the items are iterated. Raises ``TypeError`` for what has no items."""
    from tqdm.auto import tqdm

    if not isinstance(iterable, Iterable):
        raise TypeError(
            f"ready.ranks.progress({iterable!r:.60}): give what is iterated, such as ready.loaders[0] or range(8)"
        )
    if isinstance(iterable, Loader):
        options = {"initial": iterable.batches_read, **options}
    hidden = options.pop("disable", None) if main else True
    options.pop("disable", None)
    return tqdm(iterable, disable=hidden, **options)

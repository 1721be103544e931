"""The output of one run: values for its trackers, lines and bars for a person. The main process writes all of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

import torch
from attrs import define, field
from torch.distributed.tensor import DTensor

from prepkit.codec import settings_of
from prepkit.plan import Plan
from prepkit.training import trackers
from prepkit.training.trackers import Tracker, TrackerSpec


@define(eq=False, repr=False)
class RunLog:
    """The trackers of one run. No call is collective; values are checked on every rank, and written on one."""

    main: bool
    """This is the main process."""
    plan: Plan
    """Its config is given to trackers that are opened."""
    asked: Callable[..., None]
    """Raises ``RunRefused`` for a call after ``close``; with ``counts`` also for a step that is not to be counted."""
    steps: Callable[[], int]
    """Optimizer steps that were taken."""
    open: list[Tracker] = field(factory=list, init=False)
    given: list[TrackerSpec] = field(factory=list, init=False)
    """Trackers that were given: known on every rank, so that a second time is refused on all of them."""

    def to(self, *specs: TrackerSpec) -> None:
        """Write there from here on: ``JsonLines``, ``TensorBoard``, ``WandB``, ``MLflow``, or a function. All or none.

        A function makes a tracker, as ``lambda: wandb.init(project="x")`` does (``training.trackers``). Only the
        main process opens one; after ``resume``, so that it knows the step. Raises on every rank for what is no
        tracker (``TypeError``), is logged to already (``ValueError``), or whose package is not installed
        (``ModuleNotFoundError``); on the main process alone for what a function has made.
        """
        self.asked("ready.log.to()")
        given = list(self.given)
        for spec in specs:
            trackers.check(spec)
            trackers.refuse_second(spec, given)
            given.append(spec)
        if self.main:
            self._open(specs, self.steps())
        self.given = given

    def _open(self, specs: tuple[TrackerSpec, ...], step: int) -> None:
        settings = settings_of(self.plan)
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

    def __call__(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Write numbers, words and tensors of one element on the main process; ``step`` None: the optimizer's.

        They are those of the main process: average over the ranks before. None is left out. Not collective; raises
        ``TypeError`` on every rank that calls it for a value that is no single one, and ``ValueError`` for the name
        ``step``, which is the trackers' own.
        """
        self.asked("ready.log()", step is None and bool(self.open))
        step = self.steps() if step is None else step
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

    from prepkit.loading.loader import Loader

    if not isinstance(iterable, Iterable):
        raise TypeError(
            f"ready.ranks.progress({iterable!r:.60}): give what is iterated, such as ready.loaders[0] or range(8)"
        )
    if isinstance(iterable, Loader):
        options = {"initial": iterable.batches_read, **options}
    hidden = options.pop("disable", None) if main else True
    options.pop("disable", None)
    return tqdm(iterable, disable=hidden, **options)

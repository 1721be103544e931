"""Places to which the values of a run are written: JSON lines, a function's tracker, and three known packages.

A tracker is anything with ``log(values, step=...)`` and ``finish()``, as the ``Run`` of Weights & Biases is by itself.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from math import isfinite, isnan
from pathlib import Path
from typing import Any, Protocol, TextIO

from attrs import define, frozen


class Tracker(Protocol):
    """Something that values are written to, on the main process alone."""

    def log(self, values: dict[str, Any], *, step: int) -> object:
        """Write plain numbers and words under their names; ``step`` is that of the optimizer."""
        ...

    def finish(self) -> object:
        """Write everything that is not written yet."""
        ...


@frozen
class JsonLines:
    """A file with one JSON object per line: ``{"step": 12, "loss": 2.5}``. Needs no package.

    Each line is strict JSON, which has no word for what is no finite number: that is written as ``"NaN"``,
    ``"Infinity"`` or ``"-Infinity"``, as the JSON of protocol buffers does, and ``float()`` reads it back.
    A file that exists is continued. Steps that a killed run took after its last checkpoint are taken again and are in
    it twice; the last line of a step counts.
    """

    path: str

    def open(self, step: int, settings: Mapping[str, Any]) -> Tracker:
        """Open the file, and make its folder; a line that a killed run left unfinished is cut off.

        Raises ``ValueError``, with the file as it was, where the last line is none of JSON.
        """
        del step, settings
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
            kept = text.rfind(b"\n") + 1
            if not text[kept:].startswith(b"{"):
                raise ValueError(
                    f"{path} is no file of JSON lines: it ends with {text[kept:][:40]!r}; name another file"
                )
            with path.open("r+b") as file:
                file.truncate(kept)
        return _OpenJsonLines(path.open("a", encoding="utf-8"))


@frozen(kw_only=True)
class TensorBoard:
    """Event files in a folder (torch ``SummaryWriter``). Needs the package ``tensorboard``.

    A run that goes on hides the steps that it will take again (``purge_step``). What is no number is left out.
    """

    folder: str

    def open(self, step: int, settings: Mapping[str, Any]) -> Tracker:
        """Start an event file, and write the config as a text."""
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(self.folder, purge_step=step + 1 if step else None)
        writer.add_text("config", "\n".join(f"    {name} = {value}" for name, value in settings.items()), step)
        return _OpenTensorBoard(writer)


@frozen(kw_only=True)
class WandB:
    """A run of Weights & Biases. Needs the package ``wandb``.

    Give it an ``id``, so that a run that goes on is the same one there; W&B leaves out steps that it has already. For
    other options of ``wandb.init`` write ``ready.log.to(lambda: wandb.init(...))``.
    """

    project: str
    name: str | None = None
    id: str | None = None

    def open(self, step: int, settings: Mapping[str, Any]) -> Tracker:
        """Start the run with the config, or go on with that of the ``id``."""
        del step
        import wandb

        resume = None if self.id is None else "allow"
        run: Tracker = wandb.init(
            project=self.project, name=self.name, id=self.id, resume=resume, config=dict(settings)
        )
        return run


@frozen(kw_only=True)
class MLflow:
    """A run of MLflow, at its tracking URI. Needs the package ``mlflow``. What is no number is left out.

    ``run_id``: that of a run to go on with; MLflow says it when a run starts.
    """

    experiment: str | None = None
    name: str | None = None
    run_id: str | None = None

    def open(self, step: int, settings: Mapping[str, Any]) -> Tracker:
        """Start the run with the config as parameters, or go on with that of ``run_id``."""
        del step
        import mlflow

        if self.experiment is not None:
            mlflow.set_experiment(self.experiment)
        mlflow.start_run(run_id=self.run_id, run_name=self.name)
        if self.run_id is None:  # MLflow refuses another value for a parameter that a run has
            mlflow.log_params({name: str(value) for name, value in settings.items()})
        return _OpenMLflow(mlflow)


Open = Callable[[], Tracker]
"""A function of the user's that makes a tracker, called on the main process."""

TrackerSpec = JsonLines | TensorBoard | WandB | MLflow | Open
"""A value that ``ready.log.to`` takes."""

PACKAGES = {TensorBoard: "tensorboard", WandB: "wandb", MLflow: "mlflow"}
"""Packages that a tracker needs besides prepkit."""


def check(spec: Any) -> None:
    """Raise where it is no tracker, or its package is not here; on every rank, before the main one opens it."""
    package = PACKAGES.get(type(spec))
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{type(spec).__name__} needs {package}: pip install {package}", name=package)
    if not (callable(spec) or isinstance(spec, JsonLines) or package is not None):
        what = f"{spec!r:.60} cannot be logged to"
        raise TypeError(f'{what}; give pk.track.JsonLines("log.jsonl"), or a function that makes a tracker')


def refuse_second(spec: TrackerSpec, given: Iterable[TrackerSpec]) -> None:
    """Raise ``ValueError`` where the values would be written to one place twice."""
    for other in given:
        if _place(spec) == _place(other):
            what = f"{spec!r:.80} is where ready.log writes already ({other!r:.80})"
            raise ValueError(f"{what}: every value would be there twice; leave it out")


def refuse_same(tracker: Tracker, others: Iterable[Tracker]) -> None:
    """Raise ``ValueError`` where a function has given a tracker that is open already."""
    if any(tracker is other for other in others):
        what = f"{tracker!r:.60}, given by a function, is logged to already"
        raise ValueError(f"{what}: every value would be there twice; leave it out")


def _place(spec: TrackerSpec) -> object:
    """The place that no two trackers share. A process has one run of W&B and one of MLflow: starting again gives it."""
    match spec:
        case JsonLines():
            return JsonLines, Path(spec.path).resolve()
        case TensorBoard():
            return TensorBoard, Path(spec.folder).resolve()
        case WandB() | MLflow():
            return type(spec)
        case _:
            return spec


def opened(spec: TrackerSpec, step: int, settings: Mapping[str, Any]) -> Tracker:
    """Open the tracker; ``step`` is the optimizer's, from which a run goes on.

    Raises ``TypeError`` where a function has made something else.
    """
    if isinstance(spec, JsonLines | TensorBoard | WandB | MLflow):
        return spec.open(step, settings)
    tracker: Any = spec()
    if lacking := [name for name in ("log", "finish") if not callable(getattr(tracker, name, None))]:
        maker = getattr(spec, "__name__", repr(spec))
        raise TypeError(
            f"{maker:.60} gave {tracker!r:.60}, which has no {' and no '.join(lacking)}; let it return a tracker, as "
            'lambda: wandb.init(project="x") does'
        )
    return tracker  # type: ignore[no-any-return]  # seen to have what a tracker has


@define
class _OpenJsonLines:
    file: TextIO

    def log(self, values: dict[str, Any], *, step: int) -> None:
        finite = {name: _strict(value) for name, value in values.items()}
        self.file.write(f"{json.dumps({'step': step, **finite}, allow_nan=False)}\n")
        self.file.flush()  # a run that is killed keeps what it has logged

    def finish(self) -> None:
        self.file.close()


@define
class _OpenTensorBoard:
    writer: Any

    def log(self, values: dict[str, Any], *, step: int) -> None:
        for name, value in _numbers(values).items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


@define
class _OpenMLflow:
    mlflow: Any

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.mlflow.log_metrics(_numbers(values), step=step)

    def finish(self) -> None:
        self.mlflow.end_run()


def _strict(value: Any) -> Any:
    """A value that strict JSON has."""
    if not isinstance(value, float) or isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}

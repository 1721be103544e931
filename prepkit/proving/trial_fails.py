"""What a process of ``pk.prove`` leaves where it fails, and what is raised for it: object, cause, and what to type."""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any, NoReturn

import torch
from attrs import define, frozen
from torch import Tensor, nn

from prepkit.findings import Finding, PlanRejected, RunRefused
from prepkit.observe.given import said
from prepkit.observe.prepared.around import line_of_program
from prepkit.plan import Plan
from prepkit.proving.record_file import TooLarge
from prepkit.steps import ParallelizeModules

FIRST = "failed.bin"
"""What the first process that fails leaves; the others fail because it does."""


class DoesNotFit(Exception):
    """What a process was given is wrong; the text names it, and says what to type."""


class ProcessDied(RuntimeError):
    """A process has ended without a word."""


@frozen
class Failure:
    """Why there is no record."""

    text: str = ""
    findings: tuple[Finding, ...] = ()
    before_apply: bool = False
    """Whether the plan was refused, and nothing has run."""
    unproven: bool = False
    """Whether the window ran, and could not be recorded."""


@define
class Stage:
    """Where a process stands, in a file for the case that it dies."""

    folder: Path
    rank: int

    def enter(self, where: str) -> None:
        """``where`` follows the word "in"."""
        (self.folder / f"stage-{self.rank}.txt").write_text(where)


@contextmanager
def leaving(folder: Path) -> Iterator[None]:
    """Leaves what is raised inside, unless another process has failed before."""
    try:
        yield
    except PlanRejected as error:
        _leave(folder, Failure(findings=error.findings, before_apply=True))
        raise
    except RunRefused as error:
        _leave(folder, Failure(findings=error.findings))
        raise
    except (DoesNotFit, TooLarge) as error:
        _leave(folder, Failure(text=str(error), unproven=isinstance(error, TooLarge)))
        raise


def _leave(folder: Path, failure: Failure) -> None:
    with suppress(FileExistsError), (folder / FIRST).open("xb") as file:
        pickle.dump(failure, file)


@contextmanager
def blaming(what: Callable[[Exception], str]) -> Iterator[None]:
    """Says of what is raised inside what it means, unless prepkit has raised it, which says so itself."""
    try:
        yield
    except (PlanRejected, RunRefused, DoesNotFit, TooLarge):
        raise
    except Exception as error:  # whatever the program's own code raises
        refuse(what(error), error)


def refuse(text: str, cause: Exception | None = None) -> NoReturn:
    """Raise that what a process was given is wrong."""
    raise DoesNotFit(text) from cause


def raised(error: Exception) -> str:
    """An error, the line of the program that it came from, and what was noted of it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    line = line_of_program(reversed(frames))
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f' at {line}' if line else ''}: {text:.300}{notes:.600}"


def looks(value: Any) -> str:
    """A batch or an output as shapes and dtypes."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r:.40}: {looks(one)}" for key, one in [*value.items()][:8]) + "}"
    if isinstance(value, tuple | list):
        return f"({', '.join(looks(one) for one in value[:8])})"
    return said(value)


def of_forward(error: Exception, model: nn.Module, at: int, batch: Any, *, alone: Exception | None, plan: Plan) -> str:
    """Return why a forward has failed. ``alone``: what the same call of ``model``, which no plan has met, raises."""
    stars = "**" if isinstance(batch, Mapping) else "*" if isinstance(batch, tuple | list) else ""
    call = f"model({stars}batches[{at}])"
    what = f"{call} raised {raised(error)}; the model is {type(model).__name__}, the batch {looks(batch)}"
    if alone is not None:
        how = "a mapping's entries are its keywords, a tuple's its arguments"
        return f"{what}. It raises without the plan too: give batches that {_takes(model)}, or mend its forward; {how}"
    return f"{what}. Without the plan it takes this batch: {_blamed(plan)}"


def _takes(model: nn.Module) -> str:
    try:
        asked = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # of a function that shows no signature
        return "the model takes"
    return f"forward({', '.join(str(one.replace(annotation=one.empty)) for one in asked):.160}) takes"


def _blamed(plan: Plan) -> str:
    """Return what to type where a plan makes a forward fail."""
    if any(isinstance(planned.step, ParallelizeModules) for planned in plan.steps):
        part = "under tensor parallelism a process has a part of what a cut layer gives"
        return f"{part}; write -1 for that size in view() and reshape(), or leave the layer out of tp_plan"
    engine, precision = (type(one).__name__ for one in (plan.config.engine, plan.config.precision))
    other = f"{engine} or precision={precision}()" if plan.config.precision is not None else engine
    return f"what fails is what {other} makes of the model; build the plan without it, and prove that one"


def of_outputs(model: nn.Module, outputs: Any, *, tensors: bool) -> str:
    """Return what is wrong with outputs of which no loss can be made. ``tensors``: whether there are any."""
    returned = f"the forward of {type(model).__name__} returned {looks(outputs)}"
    if not tensors:
        return f"{returned}, and no tensor in it: return what the loss is computed from, or the loss"
    how = "without .detach(), .item(), argmax() or no_grad(), from parameters that train"
    return f"{returned}, which has no gradient: compute it {how}, or give loss=, a function of outputs and batch"


def raise_if_died(folder: Path, codes: Sequence[int | None]) -> None:
    """Raises ``ProcessDied`` where one of the processes, which end with these codes, has ended without a word."""
    for rank, code in enumerate(codes):
        told = code in (0, None, -SIGTERM) or (code == 1 and (folder / FIRST).exists())
        if not told and (code != 1 or not (folder / f"stage-{rank}.txt").exists()):
            raise ProcessDied(_died(folder, rank, len(codes), code or 0))


def _died(folder: Path, rank: int, processes: int, code: int) -> str:
    """Return why such a process has ended."""
    which, stage = f"process {rank} of {processes}", folder / f"stage-{rank}.txt"
    if not stage.exists():
        how = "write the call under `if __name__ == '__main__':`, in a file: each process imports it"
        return f"{which} ended with exit code {code} before it began, and has written why to stderr; {how}"
    where = stage.read_text()
    if code >= 0:
        how = "mend what it calls there: os._exit and its like end a process without a word"
        return f"{which} ended with exit code {code} in {where}; {how}"
    if code == -SIGKILL:
        how = "as the system does where memory runs out: give a smaller model or smaller batches, or fewer processes"
        return f"{which} was killed by SIGKILL in {where}, {how}"
    how = "look at the code in C++ that runs there, one process at a time: processes=1"
    return f"{which} was ended by {_signal(-code)} in {where}; {how}"


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(folder: Path) -> Failure | None:
    """Return what the first process that failed has left."""
    left = folder / FIRST
    failure = pickle.loads(left.read_bytes()) if left.exists() else None
    assert failure is None or isinstance(failure, Failure)
    return failure


def raise_it(failure: Failure) -> NoReturn:
    """Raise what a process has left, as its own caller would have got it."""
    if not failure.findings:
        raise ValueError(failure.text)
    raise (PlanRejected if failure.before_apply else RunRefused)(failure.findings)


def alone(model: nn.Module, call: Callable[[nn.Module], object]) -> Exception | None:
    """Return what a call of a model that no plan has met raises; None: nothing."""
    try:
        with torch.no_grad():
            call(model)
    except Exception as error:  # whatever the program's own code raises
        return error
    return None

"""A user's script, run up to its first optimizer step and audited there."""

from __future__ import annotations

import gc
import runpy
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Thread
from types import CodeType
from typing import Any

import torch.distributed as dist
from attrs import define, evolve, field
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.auditing.at_step import audit_step, like
from prepkit.auditing.looks import (
    FIRST,
    Earlier,
    FirstStep,
    ScriptLooks,
    behind_closure,
    everywhere,
)
from prepkit.auditing.outcome import Audit
from prepkit.auditing.window import Window, goes_backward
from prepkit.facts.run import RunFacts
from prepkit.findings import Finding
from prepkit.objects.alive import alive, seen_once
from prepkit.objects.whole_gradients import average_without
from prepkit.observe.prepared.around import wraps_behind
from prepkit.observe.prepared.averaging import left_waiting
from prepkit.observe.prepared.instead import around_calls, by_plain
from prepkit.observe.prepared.loaders import prepared_loader
from prepkit.ranks import end_groups
from prepkit.ranks.arrivals import ANSWER_S, Arrivals, RanksApart
from prepkit.ranks.world import world
from prepkit.rules import by_id
from prepkit.rules.rule import findings_of

PLACE = "its first step"
"""Where ranks meet."""
MOST = 8
"""Optimizers that are looked at: some programs make one for each step."""
SCRIPTS: list[str] = []
"""Those that run under an audit, which proves them where it is asked to: they are not to prove themselves too."""
LISTENS = tuple(str(Path(__file__).parents[1] / room) + "/" for room in ("auditing", "proving"))
"""Rooms of prepkit whose code stands between a script and torch."""
_OURS = str(Path(__file__).parents[1]) + "/"


def audit_script(
    script: str, arguments: tuple[str, ...] = (), gives_up: Callable[[str], object] | None = None, *, steps: int = 1
) -> Audit | None:
    """Return what is wrong in a script at its first optimizer step, which is not taken; None where it takes none.

    ``steps``: of more than one, those before the last are taken, and a watch looks before each behind the first.

    The script runs as ``python script arguments`` would run it, on every rank that a launcher has started. Models,
    scheduler and loaders are found among the live objects: the model whose parameters the optimizer holds or that has
    gradients, those of other optimizers, the scheduler that drives it, and the loaders that are being iterated.
    ``gives_up``: as of ``Arrivals``.
    Raises ``ScriptEnded`` for what the script itself raises before that, and where other ranks do not come to it.
    """
    arrivals = Arrivals(gives_up)
    looks = ScriptLooks(arrivals=arrivals, steps=steps)
    try:
        with as_main(script, arguments):
            _audit(lambda: runpy.run_path(script, run_name="__main__"), looks)
    except RanksApart as apart:
        raise looks.ended(str(apart)) from apart
    except SystemExit as end:
        arrivals.ends("its script has left before")
        if end.code:
            raise looks.ended(f"{script} left with exit code {end.code} before {looks.last}") from end
    except Exception as error:
        arrivals.ends(f"its script has raised {type(error).__name__}: {error!s:.200}")
        raise looks.ended(arrivals.verdict() or told(script, error, looks.last)) from error
    return looks.found


def audit_run(run: Callable[[], object], *, steps: int = 1) -> Audit | None:
    """The same of a function that trains. Raises what it raises before the last of these steps."""
    return _audit(run, ScriptLooks(arrivals=Arrivals(), steps=steps))


def _audit(run: Callable[[], object], looks: ScriptLooks) -> Audit | None:
    try:
        with audited_at_first_step(looks.first, looks.arrivals, looks if looks.steps > 1 else None):
            run()
        looks.arrivals.ends("its script has come to its end")
    except FirstStep:
        pass
    finally:
        looks.close()
    looks.arrivals.lets_go()
    return looks.found


@contextmanager
def audited_at_first_step(
    heard: Callable[[Audit], None],
    arrivals: Arrivals,
    others: ScriptLooks | None = None,
    alone: Callable[[], None] = lambda: None,  # the default of an argument
    later: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[None]:
    """Hands on the audit of what is alive when the first optimizer inside is about to step. Collective there.

    ``others``: takes that of every other optimizer, before its first step, and stale gradients of later steps. Where
    the others wait for a tensor of this rank, as earlier stages of a pipeline do, each rank looks by itself, and hands
    on its own. ``alone``: is called at each step of what this rank trains by itself, while the others wait for it
    before they train; it is not looked at. Nor is what all ranks train alike, each by itself, before the program wraps
    what it trains: ``alone`` is called there too. ``later``: takes what was heard before each step behind the first,
    where no ``others`` do. Raises ``RanksApart`` where not every rank comes.
    """
    later = later if others is None else others.later
    steps = _Steps(heard=heard, arrivals=arrivals, others=others, alone=alone, later=later)
    with steps.window.on():
        handle = register_optimizer_step_pre_hook(steps.begins)  # behind those of the window
        try:
            yield
            steps.ends()
        finally:
            handle.remove()


@define(eq=False, kw_only=True)
class _Steps:
    """Optimizers of a program that are about to step for the first time; fields as of ``audited_at_first_step``."""

    heard: Callable[[Audit], None]
    arrivals: Arrivals
    others: ScriptLooks | None
    alone: Callable[[], None]
    later: Callable[[dict[str, Any]], None] | None
    window: Window = field(init=False)
    _earlier: Earlier = field(factory=Earlier)
    _stepped: dict[int, Any] = field(factory=dict)
    """By their ``id``, which they keep so."""
    _passed: weakref.WeakSet[Any] = field(factory=weakref.WeakSet)
    """Those of what each rank trains by itself before the program wraps a model."""
    _apart: int = 0
    """Steps of this rank while the others wait."""

    def __attrs_post_init__(self) -> None:
        self.window = Window(arrivals=self.arrivals)

    def begins(self, optimizer: Any, arguments: Any, named: Any) -> Any:
        """A step begins; what it is to be given."""
        if not self._stepped and optimizer in self._passed:
            return behind_closure(arguments, named, self._forgets)
        if not self._stepped and self.arrivals.others_rest(PLACE):
            self._apart += 1
            return behind_closure(arguments, named, self.alone)
        if self._stepped and self.later is not None:
            self.later(self.window.told())
        if id(optimizer) in self._stepped or (self._stepped and self.others is None) or len(self._stepped) >= MOST:
            return None
        first, self.window.loads.stepped = not self._stepped, True
        self._stepped[id(optimizer)] = optimizer
        return behind_closure(arguments, named, lambda: self._looks(optimizer, first=first))

    def ends(self) -> None:
        """The program has come to its end, without an exception."""
        if self._stepped and self.others is not None:
            last = {"loaded_itself": tuple(self.window.loads.itself), **self.window.copies.told()}
            self.others.later(last)  # behind the last step
        if self._apart and not self._stepped:
            own = f"Rank {world().rank} has made {self._apart:,} steps"
            self.arrivals.parts(f"{own} while no other rank had called a model, and none has stepped with it")

    def _forgets(self) -> None:
        for name, value in UNHEARD.items():
            setattr(self.window, name, value)
        self.alone()

    def _looks(self, optimizer: Any, *, first: bool) -> None:
        if self._apart or self._passed:
            gc.collect()  # what this rank has trained by itself, where it is gone
        made = not goes_backward()  # in a hook of the backward some gradients are still to come
        self.window.awaited = _awaited(optimizer) if made else ()
        asks = _together(self.arrivals, self.window.awaited)
        with seen_once():
            found = audit_step(optimizer, made=made, window=self.window, ask_ranks=asks, earlier=self._earlier)
        if first and asks and _is_of_each(found.facts, self.window):
            self._passed.add(self._stepped.pop(id(optimizer)))
            self._forgets()
            return
        tell = self.heard if self.others is None or first else partial(self.others.other, heard=self.window)
        tell(everywhere(found) if asks else found)


UNHEARD: dict[str, Any] = {"backwards": 0, "draws": ""}
UNHEARD |= dict.fromkeys(("undivided", "scaled", "clipped_scaled", "clipped_none", "clipped_spent"), False)
"""What a ``Window`` has heard of a training that is over."""


def _is_of_each(facts: RunFacts, window: Window) -> bool:
    """Whether each rank trains the same by itself, as a teacher of its own, before the program wraps a model."""
    found = facts.gradients
    alike = found is not None and bool(found.compared) and not (found.parted or found.on_some_ranks)
    return alike and not window.reduced and not any(one.averaged_by for one in facts.params) and wraps_behind()


def _awaited(optimizer: Any) -> tuple[nn.Parameter, ...]:
    """What DDP waits for on this rank before it has averaged what the optimizer is about to step."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    wrappers = alive(DistributedDataParallel) if world().carries_data else []
    mine = [one for one in wrappers if any(id(param) in held for param in one.parameters())]
    return tuple(param for one in mine for param in left_waiting(one))


def _together(arrivals: Arrivals, awaited: Sequence[nn.Parameter]) -> bool:
    """As of ``Arrivals``. Ranks that do not come as DDP waits there for this one get zeros for what is awaited."""

    def average() -> None:
        with suppress(RuntimeError):  # of a rank that has gone, which is told of whoever does not come
            average_without(awaited)

    averaging = Thread(target=average, daemon=True)  # which may never end
    averaging.start()
    asks = arrivals.together(PLACE)
    averaging.join(ANSWER_S)
    return asks


@contextmanager
def empty_passes() -> Iterator[list[DataLoader[Any]]]:
    """Inside, it collects the likes of loaders of which a pass was over before its first batch."""
    empty: list[DataLoader[Any]] = []

    def reads(plain: Any, reading: Any) -> Any:
        try:
            return plain(reading)
        except StopIteration:
            if not reading._num_yielded:
                empty.append(like(reading))
            raise

    with around_calls(_BaseDataLoaderIter, "__next__", reads):
        yield empty


def without_batches(empty: list[DataLoader[Any]]) -> tuple[Finding, ...]:
    """What is wrong with these, where a script has come to its end without a step."""
    found: dict[Finding, None] = {}
    for one in empty:
        facts = RunFacts(loaders=(evolve(prepared_loader(one), batches=0),))
        (told,) = findings_of((by_id()["run.no-batches"],), facts)
        found[evolve(told, where=f"loader of {type(one.dataset).__name__}")] = None
    return tuple(found)


def told(script: str, error: Exception, step: str = FIRST) -> str:
    """The traceback as Python shows it for the script alone, and what it means."""
    inside = frames = error.__traceback__
    while inside is not None and inside.tb_frame.f_code.co_filename != script:
        inside = inside.tb_next
    shown = "".join(traceback.format_exception(type(error), error, inside or frames))  # none where it does not parse
    if _is_ours([frame.f_code for frame, _ in traceback.walk_tb(frames)], str(error), by_plain(frames)):
        return f"{shown}this was raised by prepkit itself, and not by {script}: report it, please"
    return f"{shown}{script} raised before {step}{', so that there was nothing to audit' * (step == FIRST)}"


def _is_ours(calls: list[CodeType], said: str, plainly: bool) -> bool:
    """Return whether prepkit's look has failed, or what it listens with; not what a script asks of prepkit itself."""
    inmost = takewhile(lambda code: code.co_filename.startswith(_OURS), () if plainly else reversed(calls))
    return audit_step.__code__ in calls or any(own in said or own in str([*inmost]) for own in LISTENS)


@contextmanager
def as_main(script: str, arguments: tuple[str, ...]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as Python sets them for a script."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).resolve().parent)]
    SCRIPTS.append(script)
    try:
        yield
    finally:
        SCRIPTS.pop()
        sys.argv, sys.path[:] = argv, path


def leave() -> None:
    """Ends the script's process group, where it has one, so that torch has nothing to complain of."""
    if "nccl" in world().backend:
        dist.destroy_process_group()
    end_groups.end_with_the_process()  # gloo's last of all: its threads may still hold the last work

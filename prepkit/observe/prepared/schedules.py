"""What the text of a program says of its schedule: whether some line ticks it, and in which loop."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from prepkit.facts.loops import ByPass
from prepkit.observe.optimizer import horizon
from prepkit.observe.prepared.around import is_foreign, is_of_library, known, nodes, nodes_of, own_frames, parsed
from prepkit.observe.prepared.optimizers import end_of_factors, inner, ticks_of

BESIDE = frozenset({"torch", "accelerate", "prepkit", "contextlib", "functools", "runpy", "__main__"})
BESIDE |= {"absl", "click", "fire", "hydra", "typer"}  # by which a program's main function is called
"""Packages whose code between a program and its step ticks no schedule."""
MOST_FILES = 64
"""Files of a program that are read; of larger ones nothing is said."""
_STEPS = re.compile(r"^opt|optim|scaler|^env", re.IGNORECASE)
"""Names of what is stepped and is no schedule."""
_TICKED = re.compile(r"sch|lr|plateau|warm|anneal|cosine|decay", re.IGNORECASE)
_BY_LIGHTNING = frozenset({"lr_schedulers", "lr_scheduler_step"})


def is_idle(scheduler: Any, frames: list[FrameType]) -> bool:
    """Return whether nothing can tick this scheduler: no library whose loop runs, and no line of the program."""
    known_kind = type(scheduler).__module__.startswith("torch.optim.") and isinstance(scheduler, LRScheduler)
    ticked = getattr(scheduler, "_step_count", 0) > 1 or getattr(scheduler, "last_epoch", 0) > 0
    if not known_kind or ticked or _driven(frames):
        return False
    files = _files(frames)
    return 0 < len(files) <= MOST_FILES and not any(_may_tick(scheduler, file, frames) for file in files)


def steps_its_own(scheduler: Any) -> bool:
    """Return whether a line of the functions that run steps the optimizer that it drives, as an outer one."""
    owners = (
        known(frame, node.value)
        for frame in own_frames()
        for node in nodes_of(parsed(frame.f_code.co_filename), ast.Attribute)
        if node.attr == "step"
    )
    return any(one is not None and inner(one) is inner(scheduler.optimizer) for one in owners)


def by_pass(scheduler: Any, frames: list[FrameType]) -> ByPass | None:
    """What it is, where a schedule that is made for the steps of all passes is ticked less often, or more.

    Once by the loop over passes; or by accelerate, once for all micro-batches of a step, or once for each process.
    """
    ticks = horizon(scheduler) or end_of_factors(scheduler)
    loops = list(_loops_around(frames))[:2]
    if ticks is None or len(loops) < 2:
        return None
    (inside, inner), (outside, outer) = loops
    passes = _count(outside, outer.iter) if isinstance(outer, ast.For) else None
    batches = _count(inside, inner.iter) if isinstance(inner, ast.For) else None
    if not passes or not batches or passes < 2 or not _is_all(ticks, passes, batches):
        return None
    told = partial(ByPass, scheduler=type(scheduler).__name__, ticks=ticks, passes=passes)
    for line, ticked in _ticks_in(inner, inside, scheduler):
        if (micros := _micros(ticked)) > 1 and ticks == passes * batches:
            return told(line=f"{Path(inside.f_code.co_filename).name}:{line}", micros=micros)
        if (often := ticks_of(ticked)) > 1 and ticks == passes * batches:
            return told(line=f"{Path(inside.f_code.co_filename).name}:{line}", often=often)
    lines = [line for line, _ in _ticks_in(outer, outside, scheduler)]
    within = range(inner.lineno, (inner.end_lineno or inner.lineno) + 1) if inside is outside else range(0)
    if not lines or any(line in within for line in lines) or _may_tick_in(inner, inside, scheduler):
        return None
    return told(line=f"{Path(outside.f_code.co_filename).name}:{lines[0]}")


def _micros(ticked: Any) -> int:
    """Micro-batches for which accelerate ticks what is ticked for each of them once; 1: it is not accelerate's."""
    module, state = type(ticked).__module__, sys.modules.get("accelerate.state")
    if not module.startswith("accelerate.") or not getattr(ticked, "step_with_optimizer", False) or state is None:
        return 1
    return int((state.GradientState._shared_state.get("plugin_kwargs") or {}).get("num_steps") or 1)


def _driven(frames: list[FrameType]) -> bool:
    """Return whether a library's loop runs that may tick; one of Lightning's does not where the program steps."""
    own = [at for at, one in enumerate(frames) if not is_of_library(one)]
    if not own:
        return True
    selves = (frames[at].f_locals.get("self") for at in own)
    if any(getattr(one, "automatic_optimization", True) is False for one in selves):
        return False
    between = (str(one.f_globals.get("__name__", "")).partition(".")[0] for one in frames[: own[-1]])
    mine = {str(frames[at].f_globals.get("__name__", "")).partition(".")[0] for at in own}
    return any(one not in BESIDE and one not in mine for one in between)


def _files(frames: Iterable[FrameType]) -> list[str]:
    """Files of the program: those whose functions run, and those that it has imported."""
    running = (one.f_code.co_filename for one in frames)
    modules = (getattr(one, "__file__", None) for one in [*sys.modules.values()])
    imported = (one for one in modules if isinstance(one, str) and one.endswith(".py"))
    return list(dict.fromkeys(one for one in (*running, *imported) if not is_foreign(one)))


def _may_tick(scheduler: Any, file: str, frames: list[FrameType]) -> bool:
    """Return whether some line of a file can tick this scheduler."""
    tree = parsed(file)
    if any(_name(one) in _BY_LIGHTNING for one in nodes_of(tree, ast.Attribute, ast.FunctionDef)):
        return True
    if any(one.value == "step" and _is_given(one, tree) for one in nodes_of(tree, ast.Constant)):
        return True
    turns = {name.id for one in nodes(tree) for name in _turned(one)}
    here = [one for one in frames if one.f_code.co_filename == file]
    owners = [one.value for one in nodes_of(tree, ast.Attribute) if one.attr == "step" and _loads(one)]
    return any(not _is_other(one, scheduler, here, turns) for one in owners)


def _loads(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def _name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "name", "")))


def _is_given(constant: ast.Constant, tree: ast.AST) -> bool:
    """Return whether ``getattr`` or another function by which a method is found is given this name."""
    calls = (one for one in nodes_of(tree, ast.Call) if constant in one.args)
    return any(_name_called(one) in ("getattr", "methodcaller") for one in calls)


def _name_called(call: ast.Call) -> str:
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


def _turned(node: ast.AST) -> Iterator[ast.Name]:
    """Names that a loop binds, unless it is over optimizers."""
    if isinstance(node, ast.For | ast.comprehension) and not _STEPS.search(_last(node.iter)):
        yield from (one for one in ast.walk(node.target) if isinstance(one, ast.Name))


def _last(node: ast.AST) -> str:
    """The last name of an expression: ``optimizer`` of ``self.optimizer``, ``zip`` of a call."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _is_other(owner: ast.expr, scheduler: Any, frames: list[FrameType], turns: set[str]) -> bool:
    """Return whether what a line steps is certainly something else than this scheduler."""
    values = [value for one in frames if (value := known(one, owner)) is not None]
    if any(_leads_to(one, scheduler) for one in values):
        return False
    name = _last(owner)
    if name in turns:
        return False
    schedules = [one for one in values if isinstance(one, LRScheduler)]
    if schedules or _TICKED.search(name):
        return bool(schedules) and all(getattr(one, "optimizer", None) is not scheduler.optimizer for one in schedules)
    return bool(values) or bool(_STEPS.search(name)) or name == "self"


def _leads_to(value: Any, scheduler: Any) -> bool:
    """Return whether it is the scheduler, or something that holds it as an attribute, or in a list there."""
    held = [*getattr(value, "__dict__", {}).values()]
    held += [each for one in held if isinstance(one, list | tuple) for each in one]
    return any(one is scheduler for one in (value, *held)) and value is not scheduler.optimizer


ForLoop = ast.For | ast.AsyncFor | ast.While


def _loops_around(frames: Iterable[FrameType]) -> Iterator[tuple[FrameType, ForLoop]]:
    """Loops of the program around the line that runs now, the innermost first."""
    for frame in (one for one in frames if not is_of_library(one)):
        found = [
            one
            for one in nodes_of(parsed(frame.f_code.co_filename), ast.For, ast.AsyncFor, ast.While)
            if _around(one, frame)
        ]
        yield from ((frame, one) for one in sorted(found, key=lambda one: -one.lineno))


def _around(loop: ForLoop, frame: FrameType) -> bool:
    return frame.f_code.co_firstlineno <= loop.lineno <= frame.f_lineno <= (loop.end_lineno or 0)


def _count(frame: FrameType, over: ast.expr) -> int | None:
    """How often a loop over this turns: a ``range``, or what has a length, be it counted or shown."""
    if isinstance(over, ast.Call):
        name, first = _name_called(over), over.args[0] if over.args else None
        if name in ("enumerate", "tqdm", "trange", "range") and first is not None:
            if name in ("range", "trange"):
                return _number(frame, first) if len(over.args) == 1 else None
            return _count(frame, first)
        return None
    try:
        return len(known(frame, over))
    except Exception:  # streams have none, and a length is the program's code
        return None


def _number(frame: FrameType, node: ast.expr) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else known(frame, node)
    if isinstance(node, ast.Call) and _name_called(node) == "len" and node.args:
        return _count(frame, node.args[0])
    return value if type(value) is int else None


def _is_all(ticks: int, passes: int, batches: int) -> bool:
    """Return whether it is for all steps of all passes, each of some micro-batches."""
    several = ticks // passes
    if several < 2 or several > batches:
        return False
    each = range(1, batches + 1)
    return any(
        ticks in (passes * (batches // one), passes * ceil(batches / one), passes * batches // one) for one in each
    )


def _ticks_in(loop: ForLoop, frame: FrameType, scheduler: Any) -> list[tuple[int, Any]]:
    """Lines in a loop that tick this scheduler, and what of it or around it they name."""
    calls = (one for one in ast.walk(loop) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
    owners = [(one.lineno, known(frame, one.func.value)) for one in calls if _name(one.func) == "step"]  # type: ignore[attr-defined]
    return [(line, one) for line, one in owners if scheduler in (one, getattr(one, "scheduler", None))]


def _may_tick_in(loop: ForLoop, frame: FrameType, scheduler: Any) -> bool:
    found = (one.value for one in ast.walk(loop) if isinstance(one, ast.Attribute) and one.attr == "step")
    return any(not _is_other(one, scheduler, [frame], set()) for one in found)

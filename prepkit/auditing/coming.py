"""What lines of a program are still to come behind a step: trainings, optimizers, and what changes both."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

from prepkit.observe.prepared.around import innermost, name_of, nodes_of, outermost, own_frames, parsed

SPLITS = frozenset({"random_split", "train_test_split"})
SEEDS = frozenset({"manual_seed", "seed", "seed_everything", "set_seed", "fork_rng"})


def trains_behind() -> bool:
    """Return whether lines behind all loops that run now call a function that trains, be it the one that does now."""
    running = set[str]()
    for frame in own_frames():
        code, tree = frame.f_code, parsed(frame.f_code.co_filename)
        end = max((line for _, _, line in code.co_lines() if line), default=0)
        _, begin = outermost(code, frame.f_lineno)
        names = {one.name for one in nodes_of(tree, ast.FunctionDef) if any(map(_steps, _calls_in(one)))} | running
        calls = (one for one in nodes_of(tree, ast.Call) if begin < one.lineno <= end)
        if any(name_of(one) in names for one in calls):
            return True
        running.add(code.co_name)
    return False


def makes_optimizer_behind(*, again: bool = True) -> bool:
    """Return whether lines of the program make an optimizer that are still to come, or come ``again`` in a loop."""
    for frame in own_frames():
        code = frame.f_code
        begin = outermost(code, frame.f_lineno)[0] if again else frame.f_lineno
        if any(_doing(frame, begin, lambda one: any(map(_makes, _calls_in(one))))):
            return True
    return False


def changes_behind() -> bool:
    """Return whether lines around this step, or behind it, set what gets gradients, or give an optimizer more to hold.

    Those that each run of the innermost loop comes to have done so.
    """
    done = (0, 0)
    for frame in own_frames():
        begin, _ = outermost(frame.f_code, frame.f_lineno)
        coming = [*_doing(frame, begin, lambda one: any(map(_changes, ast.walk(one))))]
        done = done if any(done) else innermost(frame.f_code, frame.f_lineno)
        branches = [
            one for one in nodes_of(parsed(frame.f_code.co_filename), ast.If) if done[0] < one.lineno <= done[1]
        ]
        chosen = {id(each) for one in branches for each in ast.walk(one)}
        if any(id(one) in chosen or not done[0] <= one.lineno <= done[1] for one in coming):
            return True
    return False


def splits_again() -> str:
    """Return the line that parts samples by chance anew in each run of a loop, and reads all parts; empty: none does.

    Where the loop makes optimizers anew, as for folds, or seeds what draws the parts, that is meant.
    """
    for frame in own_frames():
        code, tree = frame.f_code, parsed(frame.f_code.co_filename)
        begin, end = outermost(code, frame.f_lineno)
        lines = [line for line in _splits(tree) if begin < line <= end]
        if lines and not any(begin < line <= end for line in _anew(tree)):
            return f"{Path(code.co_filename).name}:{lines[0]}"
    return ""


@lru_cache(maxsize=16)  # it is asked before each step
def _splits(tree: ast.AST) -> tuple[int, ...]:
    """Lines that part samples by chance, where each part has a name that is read."""
    read = {one.id for one in nodes_of(tree, ast.Name) if isinstance(one.ctx, ast.Load)}
    found = []
    for one in nodes_of(tree, ast.Assign):
        match one:
            case ast.Assign([ast.Tuple(parts)], ast.Call(keywords=named) as call) if name_of(call) in SPLITS:
                chance = all(word.arg != "random_state" for word in named)
                if chance and all(isinstance(part, ast.Name) and part.id in read for part in parts):
                    found.append(one.lineno)
    return tuple(found)


@lru_cache(maxsize=16)
def _anew(tree: ast.AST) -> tuple[int, ...]:
    """Lines that seed, make an optimizer, or call a function that makes one."""
    makers = {one.name for one in nodes_of(tree, ast.FunctionDef) if any(map(_makes, _calls_in(one)))}
    calls = nodes_of(tree, ast.Call)
    return tuple(one.lineno for one in calls if name_of(one) in SEEDS | makers or _makes(one))


def _doing(frame: FrameType, begin: int, does: Callable[[ast.AST], bool]) -> Iterator[ast.Call | ast.Assign]:
    """Yield what does something in a function from a line on, or calls a function that does."""
    code, tree = frame.f_code, parsed(frame.f_code.co_filename)
    end = max((line for _, _, line in code.co_lines() if line), default=0)
    doers = {one.name for one in nodes_of(tree, ast.FunctionDef) if does(one)}
    for one in nodes_of(tree, ast.Call, ast.Assign):
        called = isinstance(one, ast.Call) and name_of(one) in doers
        if begin <= one.lineno <= end and one.lineno != frame.f_lineno and (called or does(one)):
            yield one


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))


def _steps(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "step")


def _changes(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return name_of(node) in ("requires_grad_", "add_param_group")
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(one, ast.Attribute) and one.attr == "requires_grad" for one in targets)


def _makes(call: ast.Call) -> bool:
    """Return whether it makes an optimizer of torch's by its name, or gives one more to hold."""
    kind = getattr(torch.optim, name_of(call), None)
    optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    return optimizer or name_of(call) == "add_param_group"

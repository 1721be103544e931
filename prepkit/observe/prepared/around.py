"""What can be told of the code around a look: whether it averages over ranks by itself, and how it will save."""

from __future__ import annotations

import ast
import gc
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from prepkit.objects import names
from prepkit.objects.alive import alive
from prepkit.objects.bare_tree import SAVE, is_sharded
from prepkit.observe.prepared import instead

A = TypeVar("A", bound=ast.AST)
B = TypeVar("B", bound=ast.AST)
C = TypeVar("C", bound=ast.AST)

SENDS = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv", "all_to_all", "all_to_all_single"})
"""Calls that hand tensors from one rank to another, which no average does."""
AVERAGES = frozenset({"all_reduce", "all_reduce_coalesced", "average_parameters"})
OF_WEIGHTS = frozenset({"grad", "parameters", "named_parameters", "average_parameters"})
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[2])


def averages_by_hand() -> str:
    """The function of the caller's code that names an all-reduce beside gradients or parameters; empty: none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            for code in (frame.f_code, *codes_of(frame.f_globals)):
                if AVERAGES & (used := _names(code)) and OF_WEIGHTS & used:
                    return f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        frame = frame.f_back
    return ""


def sends_by_hand() -> str:
    """What of the caller's code sends activations by its names, as layers do that are cut by hand; empty: nothing does.

    From rank to rank, or by a collective in a function of autograd.
    """
    for one in own_frames():
        known = one.f_globals
        functions = [value for value in known.values() if _is_kind(value, torch.autograd.Function)]
        inside = [code for value in functions for code in codes_of(vars(value))]
        for code in (one.f_code, *codes_of(known)):
            words = SENDS | ({name for name in _names(code) if name.startswith("all_")} if code in inside else set())
            if any(_of_distributed(name, _names(code), known) for name in words & _names(code)):
                return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return ""


def _is_kind(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


def _of_distributed(name: str, beside: Collection[str], known: Mapping[str, Any]) -> bool:
    """Return whether a name that code uses is that of a function of ``torch.distributed``, as it was imported."""
    imported = str(getattr(known.get(name), "__module__", "")).startswith("torch.distributed")
    return imported or "distributed" in beside or any(known.get(one) is torch.distributed for one in beside)


def local_sgd() -> str:
    """The class of what averages weights by itself, and lets ranks step by their own gradients; empty: none stands."""
    homes = {"accelerate.local_sgd": "LocalSGD"}
    homes |= {"torch.distributed.optim.post_localSGD_optimizer": "PostLocalSGDOptimizer"}
    kinds = tuple(getattr(sys.modules[home], name) for home, name in homes.items() if home in sys.modules)
    standing = (one for one in (alive(*kinds) if kinds else ()) if _stands(one))
    return next((type(one).__name__ for one in standing), "")


def _stands(averager: Any) -> bool:
    """Return whether ranks are inside of it: one of accelerate's that was left has given DDP its averaging back."""
    return isinstance(averager, torch.optim.Optimizer) or (
        averager.enabled and not getattr(averager.model, "require_backward_grad_sync", True)
    )


def names_weights(node: ast.AST, word: str) -> bool:
    """Return whether an expression says that it is about parameters, and not about their gradients."""
    text = ast.unparse(node)
    return word in text and "grad" not in text.replace("requires_grad", "")


def name_of(call: ast.Call) -> str:
    """The name of the function or method that is called; empty: it has none."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def texts_of_program() -> dict[str, str]:
    """The text of the caller's files, and of those of its own that they import, or that these do."""
    own = own_frames()
    files = dict.fromkeys(one.f_code.co_filename for one in own)
    todo: list[Mapping[str, Any]] = [held for one in own for held in (one.f_globals, one.f_locals)]
    todo = todo or [vars(sys.modules["__main__"])]
    for held in todo:  # grows
        for home in {_home(one) for one in [*held.values()]}:
            module = sys.modules.get(home)
            file = getattr(module, "__file__", None) or ""
            if module is not None and file.endswith(".py") and not is_foreign(file) and file not in files:
                files[file] = None
                todo.append(vars(module))
    return {one: Path(one).read_text(encoding="utf-8", errors="replace") for one in files if Path(one).is_file()}


def _home(value: Any) -> str:
    """The name of the module that it is, or that has its code."""
    if isinstance(value, ModuleType):
        return value.__name__
    return str((value if isinstance(value, type | FunctionType) else type(value)).__module__)


def parsed(file: str) -> ast.AST:
    """Of what is no file of Python, or is gone, an empty module. One tree for as long as the file is as it was."""
    try:
        told = Path(file).stat()
    except (OSError, ValueError):
        return ast.Module([], [])
    return _parsed(file, told.st_mtime_ns, told.st_size)


@lru_cache(maxsize=256)
def _parsed(file: str, *_: int) -> ast.AST:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


@lru_cache(maxsize=256)
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree of ``parsed``."""
    return tuple(ast.walk(tree))


@overload
def nodes_of(tree: ast.AST, kind: type[A], /) -> tuple[A, ...]: ...
@overload
def nodes_of(tree: ast.AST, kind: type[A], other: type[B], /) -> tuple[A | B, ...]: ...
@overload
def nodes_of(tree: ast.AST, kind: type[A], other: type[B], third: type[C], /) -> tuple[A | B | C, ...]: ...
def nodes_of(tree: ast.AST, *kinds: type[ast.AST]) -> tuple[ast.AST, ...]:
    """Those of some classes: a look before each step does not walk a whole file."""
    return _nodes_of(tree, kinds)


@lru_cache(maxsize=1024)
def _nodes_of(tree: ast.AST, kinds: tuple[type, ...]) -> tuple[ast.AST, ...]:
    return tuple(one for one in nodes(tree) if isinstance(one, kinds))


def frames_above(file: str) -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first, but for those of a file and of what listens for it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename not in (file, __file__, instead.__file__):
            yield frame
        frame = frame.f_back


def own_frames() -> list[FrameType]:
    """Frames of the caller's files, the innermost first."""
    return [one for one in frames_above(__file__) if not is_foreign(one.f_code.co_filename)]


def line_of_program(frames: Iterable[FrameType]) -> str:
    """The innermost line that is neither of a library nor of prepkit: ``train.py:31``; empty: there is none."""
    found = (one for one in frames if not is_foreign(one.f_code.co_filename))
    return next((f"{Path(one.f_code.co_filename).name}:{one.f_lineno}" for one in found), "")


Line = tuple[CodeType, int]
"""Where a program stands in one of its functions."""


def lines_of_program(frames: Iterable[FrameType]) -> list[Line]:
    """The lines of these frames that are neither of a library nor of prepkit, the innermost first."""
    return [(one.f_code, one.f_lineno) for one in frames if not is_of_library(one)]


def in_one_loop(before: Iterable[Line], now: Iterable[Line]) -> bool:
    """Return whether the innermost loop around the line of ``before``, in a function in which both stand, has both."""
    known = dict(reversed([*before]))
    code, line = next((one for one in now if one[0] in known), (None, 0))
    if code is None:
        return False
    spans = _loops(code.co_filename)
    around = [(begin, end) for begin, end in spans if begin <= known[code] <= end and begin >= code.co_firstlineno]
    return any(begin <= line <= end for begin, end in sorted(around)[-1:])


def loops_have(before: Iterable[Line], now: Iterable[Line]) -> bool:
    """Return whether some loop, in any function in which both stand, has both."""
    known = dict(before)
    shared = [(code, known[code], line) for code, line in now if code in known]
    return any(
        begin <= first <= end and begin <= line <= end
        for code, first, line in shared
        for begin, end in _loops(code.co_filename)
        if begin >= code.co_firstlineno
    )


def _loops(file: str) -> list[tuple[int, int]]:
    """First and last line of each loop."""
    loops = nodes_of(parsed(file), ast.For, ast.AsyncFor, ast.While)
    return [(one.lineno, one.end_lineno or one.lineno) for one in loops]


def reads_gradients() -> bool:
    """Return whether the program reads or writes ``.grad``, in the file whose function steps or in its main one."""
    own = own_frames()
    files = {one.f_code.co_filename for one in (*own[:1], *own[-1:])}
    return any(one.attr == "grad" for file in files for one in nodes_of(parsed(file), ast.Attribute))


def ticked_in_loop(scheduler: Any, frames: Iterable[FrameType]) -> bool:
    """Return whether the innermost loop of the program around the lines that run now ticks this scheduler."""
    for frame in (one for one in frames if scheduler is not None and not is_of_library(one)):
        begin, end = innermost(frame.f_code, frame.f_lineno)
        if begin:
            calls = (one for one in nodes_of(parsed(frame.f_code.co_filename), ast.Call))
            methods = (one.func for one in calls if begin <= one.lineno <= end and isinstance(one.func, ast.Attribute))
            named = [known(frame, one.value) for one in methods if one.attr == "step"]
            return any(one is not None and scheduler in (one, getattr(one, "scheduler", None)) for one in named)
    return False


def innermost(code: CodeType, line: int) -> tuple[int, int]:
    """First and last line of the innermost loop around a line of a function; zeros: there is none."""
    spans = _loops(code.co_filename)
    around = [(begin, end) for begin, end in spans if begin <= line <= end and begin >= code.co_firstlineno]
    return max(around, default=(0, 0))


def outermost(code: CodeType, line: int) -> tuple[int, int]:
    """First and last line of the outermost loop around a line of a function, or that line itself."""
    spans = _loops(code.co_filename)
    return min((one for one in spans if code.co_firstlineno <= one[0] <= line <= one[1]), default=(line, line))


BESIDE_STEPS = frozenset({"step", "update", "unscale_", "clip_grad_norm_", "clip_grad_value_"})
"""Methods and functions that make and clear no gradient."""


def stepped_next(frames: Iterable[FrameType]) -> list[Any]:
    """What the program steps behind the step that begins, with nothing between that makes or clears gradients.

    By the lines behind it, and the loop over several that it stands in. What lines name otherwise than by names and
    attributes is left out.
    """
    frame = next((one for one in frames if not is_of_library(one)), None)
    if frame is None:
        return []
    found: list[Any] = []
    for body, loop in _bodies(parsed(frame.f_code.co_filename), frame.f_lineno):
        at = next(at for at, one in enumerate(body) if one.lineno <= frame.f_lineno <= (one.end_lineno or 0))
        behind = [*takewhile(_is_beside, body[at + 1 :])]
        found += [known(frame, one) for node in behind for one in _receivers(node)]
        if len(behind) < len(body) - at - 1 or not (isinstance(loop, ast.For) and all(map(_is_beside, body))):
            break
        over = [known(frame, one) for one in loop.iter.elts] if isinstance(loop.iter, ast.List | ast.Tuple) else None
        given = over if over is not None else known(frame, loop.iter)
        found += given if isinstance(given, list | tuple) else []
    return [one for one in found if one is not None]


def wraps_behind() -> bool:
    """Return whether the program wraps a model, or has a library wrap it, further on: outside of any branch."""
    for frame in own_frames():
        for body, _ in _bodies(parsed(frame.f_code.co_filename), frame.f_lineno):
            behind = [one for one in body if one.lineno > frame.f_lineno and isinstance(one, ast.Assign | ast.Expr)]
            calls = (one for each in behind for one in ast.walk(each) if isinstance(one, ast.Call))
            if any(_wraps(frame, one) for one in calls):
                return True
    return False


def _wraps(frame: FrameType, call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("prepare", "prepare_model", "setup", "setup_module"):
        return type(known(frame, call.func.value)).__name__ in ("Accelerator", "Fabric")
    function = known(frame, call.func)
    return getattr(function, "__name__", "") in WRAP and str(getattr(function, "__module__", "")).startswith(_WRAPPING)


WRAP = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "parallelize_module"})
WRAP |= {"initialize"}
"""Classes and functions that wrap a model."""
_WRAPPING = ("torch.", "deepspeed")


def _bodies(tree: ast.AST, line: int) -> list[tuple[list[ast.stmt], ast.AST]]:
    """Lists of statements around a line, the innermost first, each with whose body it is; those of its function."""
    blocks = _blocks(tree)
    found = [one for one in blocks if one[0][0].lineno <= line <= (one[0][-1].end_lineno or 0)]
    found.sort(key=lambda one: (one[0][-1].end_lineno or 0) - one[0][0].lineno)
    inside = [*takewhile(lambda one: not isinstance(one[1], ast.FunctionDef | ast.AsyncFunctionDef), found)]
    return [*inside, *found[len(inside) : len(inside) + 1]]


@lru_cache(maxsize=256)
def _blocks(tree: ast.AST) -> tuple[tuple[list[ast.stmt], ast.AST], ...]:
    """All lists of statements of a tree of ``parsed``, each with whose body it is."""
    names = ("body", "orelse", "finalbody")
    every = ((getattr(node, name, None), node if name == "body" else tree) for node in nodes(tree) for name in names)
    return tuple((block, home) for block, home in every if isinstance(block, list) and block)


def _is_beside(node: ast.stmt) -> bool:
    """Return whether a statement is a step, or what stands beside steps, and nothing else."""
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    steps = (one for one in calls if not isinstance(one.func, ast.Attribute) or one.func.attr != "parameters")
    return isinstance(node, ast.Expr) and bool(calls) and all(name_of(one) in BESIDE_STEPS for one in steps)


def _receivers(node: ast.stmt) -> list[ast.expr]:
    """What a statement steps: the object of ``step``, and what is given to it, as to a scaler's."""
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    if call is None or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return []
    return [call.func.value, *call.args]


def known(frame: FrameType, node: ast.expr) -> Any:
    """What a name, or a part of one, stands for in a frame, without a call of its code; None: that is unknown."""
    match node:
        case ast.Name(name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value, name):
            return getattr(known(frame, value), "__dict__", {}).get(name)
        case ast.Subscript(value, ast.Constant(str(name))):
            held = known(frame, value)
            return held.get(name) if type(held) is dict else None
        case ast.Subscript(value, ast.Constant(int(at))):
            held = known(frame, value)
            return held[at] if type(held) in (list, tuple) and -len(held) <= at < len(held) else None
        case _:
            return None


def is_of_library(frame: FrameType) -> bool:
    """Return whether its code is no program's, but a library's or prepkit's."""
    return is_foreign(frame.f_code.co_filename)


def called_by_program(frames: Iterable[FrameType]) -> bool:
    """Return whether the innermost of these frames is of the program, and of no library."""
    return not any(map(is_of_library, islice(frames, 1)))


def accelerate_window(optimizers: Any) -> tuple[bool, bool]:
    """Where accelerate counts micro-batches: whether a raw optimizer steps inside a window, whether there is none."""
    state: Any = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.GradientState._shared_state
    if int((shared.get("plugin_kwargs") or {}).get("num_steps", 1)) < 2:
        return False, False
    first = optimizers[0] if isinstance(optimizers, list | tuple) and optimizers else optimizers
    raw = not type(first).__module__.startswith("accelerate.")
    counting = [
        one for one in gc.get_objects() if type(one).__name__ == "Accelerator" and hasattr(one, "gradient_state")
    ]
    counted = any(getattr(one, "step", 0) for one in counting)
    inside = not shared.get("sync_gradients", True)
    return raw and inside, bool(counting) and not counted and not inside


def saved_in_parts(model: nn.Module) -> tuple[str, ...]:
    """Where the caller's files would write shards of a model."""
    return (*saves_shards(model), *saves_state(model))


def saves_shards(model: nn.Module) -> tuple[str, ...]:
    """Where the caller's files call ``save_pretrained`` of a sharded model, as it seems, without its ``state_dict``.

    By the name of what is saved, unless the name stands for something else already.
    """
    root = names.unwrap_root(model)[-1]
    if not callable(getattr(root, SAVE, None)) or not is_sharded(root):
        return ()
    files, others = _program(root)
    found: dict[str, None] = {}
    for file in files:
        for call in _calls_of(SAVE, file):
            saved = _receiver(call)
            if _seems_model(saved, others) and not _gives_state(call):
                found[f"{Path(file).name}:{call.lineno}: {saved}.{SAVE}(...)"] = None
    return tuple(found)


def saves_state(model: nn.Module) -> tuple[str, ...]:
    """Where the caller's files give ``torch.save`` the ``state_dict()`` of a model of DTensors, as it seems.

    In the call or a dict in it, or by a name that stands for nothing else in the file.
    """
    root = names.unwrap_root(model)[-1]
    if not any(isinstance(param, DTensor) for param in root.parameters()):
        return ()
    files, others = _program(root)
    found: dict[str, None] = {}
    for file in files:
        meant: dict[str, bool] = {}
        for one in nodes_of(parsed(file), ast.Assign):
            for name in ast.walk(ast.Tuple(one.targets, ast.Store())):
                if isinstance(name, ast.Name):
                    meant[name.id] = meant.get(name.id, True) and _is_state(one.value, others)
        for call in _calls_of("save", file):
            given = call.args[0] if call.args and _receiver(call) == "torch" else None
            parts = given.values if isinstance(given, ast.Dict) else [] if given is None else [given]
            if any(_is_state(one, others) or meant.get(getattr(one, "id", ""), False) for one in parts):
                found[f"{Path(file).name}:{call.lineno}: torch.save(...)"] = None
    return tuple(found)


def _program(root: nn.Module) -> tuple[tuple[str, ...], set[str]]:
    """Return the caller's files, and names there that stand for something else than the model."""
    frames = own_frames()
    every = {name: value for one in frames for name, value in (*one.f_globals.items(), *one.f_locals.items())}
    models = {name: one for name, one in every.items() if isinstance(one, nn.Module)}
    roots = {name for name, one in models.items() if names.unwrap_root(one)[-1] is root}
    return tuple(dict.fromkeys(one.f_code.co_filename for one in frames)), every.keys() - roots


def _receiver(call: ast.Call) -> str:
    """Return what a method is called of, as ``_calls_of`` picks calls."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _seems_model(text: str, others: Container[str]) -> bool:
    return bool(_MODEL.search(text)) and not _NO_MODEL.search(text) and text not in others


def _is_state(node: ast.AST | None, others: Container[str]) -> bool:
    """Return whether an expression is ``<model>.state_dict()`` and nothing around it, which may gather it."""
    state = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "state_dict"
    return state and isinstance(node, ast.Call) and _seems_model(_receiver(node), others)


def _calls_of(method: str, file: str) -> Iterator[ast.Call]:
    """Yield calls of a method in a file, but inside a ``with`` that gathers parameters."""
    for node in ungathered(parsed(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
            yield node


GATHERS = re.compile(r"GatheredParameters|summon_full_params")


def ungathered(tree: ast.AST, inside: Callable[[str], Any] = GATHERS.search) -> Iterator[ast.AST]:
    """Yield every node of a tree, but those inside a ``with`` that gathers parameters; ``inside``: by its text."""
    waiting = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.With) and any(inside(ast.unparse(one.context_expr)) for one in node.items):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _gives_state(call: ast.Call) -> bool:
    """Return whether it gives a ``state_dict``, which is the third of its arguments, or may."""
    return len(call.args) > 2 or any(one.arg in (None, "state_dict") for one in call.keywords)


_MODEL = re.compile(r"model|unwrap", re.IGNORECASE)
_NO_MODEL = re.compile(r"token|process|config|optim|sched", re.IGNORECASE)


def is_foreign(file: str) -> bool:
    """Return whether a file is a library's or prepkit's."""
    return file.startswith((*_LIBRARIES, _OURS, "<"))


def codes_of(held_there: dict[str, Any]) -> Iterator[CodeType]:
    """The code of functions and of methods that a module has, imported ones included."""
    for value in [*held_there.values()]:
        held = vars(value).values() if isinstance(value, type) else (value,)
        for one in held:
            function = one.__func__ if isinstance(one, MethodType | staticmethod | classmethod) else one
            if isinstance(function, FunctionType) and not is_foreign(function.__code__.co_filename):
                yield function.__code__


def _names(code: CodeType) -> set[str]:
    """Names that it uses, functions inside it included."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inside))

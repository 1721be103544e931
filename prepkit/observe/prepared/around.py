"""What can be told of the code around a look: whether it averages over ranks by itself, and how it will save."""

from __future__ import annotations

import ast
import gc
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from torch import nn

from prepkit.objects import names
from prepkit.objects.bare_tree import SAVE, is_sharded

AVERAGES = frozenset({"all_reduce", "all_reduce_coalesced", "average_parameters"})
OF_WEIGHTS = frozenset({"grad", "parameters", "named_parameters", "average_parameters"})
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[2])


def averages_by_hand() -> str:
    """The function of the caller's code that names an all-reduce beside gradients or parameters; empty: none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _foreign(frame.f_code.co_filename):
            for code in (frame.f_code, *_of_module(frame.f_globals)):
                if AVERAGES & (used := _names(code)) and OF_WEIGHTS & used:
                    return f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        frame = frame.f_back
    return ""


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


def saves_shards(model: nn.Module) -> tuple[str, ...]:
    """Where the caller's files call ``save_pretrained`` of a sharded model, as it seems, without its ``state_dict``.

    By the name of what is saved, unless the name stands for something else already.
    """
    root = names.unwrap_root(model)[-1]
    if not callable(getattr(root, SAVE, None)) or not is_sharded(root):
        return ()
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _foreign(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    known = {name: value for one in frames for name, value in (*one.f_globals.items(), *one.f_locals.items())}
    others = {name for name, value in known.items() if not isinstance(value, nn.Module) or not _is(value, root)}
    found: dict[str, None] = {}
    for file in dict.fromkeys(one.f_code.co_filename for one in frames):
        for call in _calls_of(SAVE, file):
            saved = ast.unparse(call.func.value)  # type: ignore[attr-defined]  # as ``_calls_of`` picks them
            if _MODEL.search(saved) and not _NO_MODEL.search(saved) and saved not in others and not _gives_state(call):
                found[f"{Path(file).name}:{call.lineno}: {saved}.{SAVE}(...)"] = None
    return tuple(found)


def _is(value: nn.Module, root: nn.Module) -> bool:
    return names.unwrap_root(value)[-1] is root


def _calls_of(method: str, file: str) -> Iterator[ast.Call]:
    """Yield calls of a method in a file, but inside a ``with`` that gathers parameters."""
    try:
        waiting: list[ast.AST] = [ast.parse(Path(file).read_text(encoding="utf-8"))]
    except (OSError, SyntaxError, ValueError):
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.With) and any(_GATHERS.search(ast.unparse(one.context_expr)) for one in node.items):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
            yield node
        waiting += ast.iter_child_nodes(node)


def _gives_state(call: ast.Call) -> bool:
    """Return whether it gives a ``state_dict``, which is the third of its arguments, or may."""
    return len(call.args) > 2 or any(one.arg in (None, "state_dict") for one in call.keywords)


_MODEL = re.compile(r"model|unwrap", re.IGNORECASE)
_NO_MODEL = re.compile(r"token|process|config", re.IGNORECASE)
_GATHERS = re.compile(r"GatheredParameters|summon_full_params")


def _foreign(file: str) -> bool:
    return file.startswith((*_LIBRARIES, _OURS, "<"))


def _of_module(held_there: dict[str, Any]) -> Iterator[CodeType]:
    """The code of functions and of methods that a module has, imported ones included."""
    for value in [*held_there.values()]:
        held = vars(value).values() if isinstance(value, type) else (value,)
        for one in held:
            function = one.__func__ if isinstance(one, MethodType | staticmethod | classmethod) else one
            if isinstance(function, FunctionType) and not _foreign(function.__code__.co_filename):
                yield function.__code__


def _names(code: CodeType) -> set[str]:
    """Names that it uses, functions inside it included."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inside))

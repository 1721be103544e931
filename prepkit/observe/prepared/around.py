"""What can be told of the code around an audit: whether it averages over ranks by itself."""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

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
                if AVERAGES & (names := _names(code)) and OF_WEIGHTS & names:
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


def _foreign(file: str) -> bool:
    return file.startswith((*_LIBRARIES, _OURS, "<"))


def _of_module(names: dict[str, Any]) -> Iterator[CodeType]:
    """The code of functions and of methods that a module has, imported ones included."""
    for value in [*names.values()]:
        held = vars(value).values() if isinstance(value, type) else (value,)
        for one in held:
            function = one.__func__ if isinstance(one, MethodType | staticmethod | classmethod) else one
            if isinstance(function, FunctionType) and not _foreign(function.__code__.co_filename):
                yield function.__code__


def _names(code: CodeType) -> set[str]:
    """Names that it uses, functions inside it included."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*map(_names, inside))

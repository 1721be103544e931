"""Public names that are imported when they are first asked for, so that ``import prepkit`` loads next to nothing."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def later(
    module: str, names: Mapping[str, tuple[str, ...]], hint: Callable[[str], str] = lambda _: ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` of a module.

    ``names``: modules to what is public of them; a module without names is public itself, under the last part of its
    own. ``hint`` ends the message for a name that is not there. The ``.pyi`` file beside the module says the same to
    type checkers, and ``tests/test_face.py`` compares the two.
    """
    homes = {name: home for home, of in names.items() for name in of}
    spaces = {home.rpartition(".")[2]: home for home, of in names.items() if not of}

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(_imported(homes[name], f"{module}.{name}"), name)
        elif name in spaces:
            value = _imported(spaces[name], f"{module}.{name}")
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint(name)}")
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: sorted((*homes, *spaces))


def _imported(home: str, what: str) -> ModuleType:
    with _torch_for(what), old_objects_left():
        return importlib.import_module(home)


def needs_torch(what: str) -> None:
    """Raise ``ModuleNotFoundError`` that says what to type where torch is not installed."""
    with _torch_for(what):
        importlib.import_module("torch")


@contextmanager
def _torch_for(what: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise no_torch(what) from error


def no_torch(what: str) -> ModuleNotFoundError:
    """The error of a call that needs torch where there is none."""
    return ModuleNotFoundError(
        f"{what} needs torch, and it is not installed; type: pip install 'prepkit[torch]'", name="torch"
    )


@contextmanager
def old_objects_left() -> Iterator[None]:
    """Keep Python's collector to its younger generations: a look at all of torch takes 0.2 s, and finds no garbage."""
    usual = gc.get_threshold()
    gc.set_threshold(*usual[:2], 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*usual)

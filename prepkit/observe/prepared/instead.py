"""Functions of torch for which another stands while somebody listens; afterwards all is as before."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from attrs import frozen
from torch import nn


@contextmanager
def around_calls(home: Any, name: str, around: Callable[..., Any], *, also: Any = None) -> Iterator[None]:
    """Inside, ``around`` is called with the function and its arguments in its place; ``also``: where else it stands."""
    own = name in vars(home)
    plain = vars(home)[name] if own else getattr(home, name)

    @wraps(plain)  # some ask which arguments it takes, as accelerate of zero_grad
    def instead(*args: Any, **kwargs: Any) -> Any:
        return around(plain, *args, **kwargs)

    homes = (home,) if also is None else (home, also)
    entry = _Around(homes, name, plain if own else None, instead)
    entry.put_on()
    _ON.append(entry)
    try:
        yield
    finally:
        _ON.remove(entry)
        entry.take_off()


def by_plain(raised: TracebackType | None) -> bool:
    """Return whether the function for which another stands has raised, and has no frame: it is not Python's.

    A listener calls it by the name ``plain``, wherever it does.
    """
    frames = traceback.extract_tb(raised)
    if not frames or frames[-1].lineno is None or frames[-1].colno is None:
        return False
    return linecache.getline(frames[-1].filename, frames[-1].lineno)[frames[-1].colno :].startswith("plain(")


@frozen(eq=False)
class _Around:
    """One function that another stands for."""

    homes: tuple[Any, ...]
    name: str
    plain: Any
    """What stood there; None: it was inherited."""
    instead: Any

    def put_on(self) -> None:
        for one in self.homes:
            setattr(one, self.name, self.instead)

    def take_off(self) -> None:
        for one in self.homes:
            setattr(one, self.name, self.plain) if self.plain is not None else delattr(one, self.name)


_ON: list[_Around] = []
"""Those that stand now, the outermost last."""
BETWEEN = 2
"""Frames between a program and ``torch.jit.script``, which looks names up in the frame of who calls it."""


@contextmanager
def scripts_read_plain() -> Iterator[None]:
    """Inside, ``torch.jit.script`` reads torch's own functions, and not what stands for them."""

    def scripts(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        standing = [*_ON]
        for one in reversed(standing):
            one.take_off()
        try:
            return plain(*args, **{**kwargs, "_frames_up": kwargs.get("_frames_up", 0) + BETWEEN})
        finally:
            for one in standing:
                one.put_on()

    with around_calls(torch.jit, "script", scripts):
        yield


@contextmanager
def called_first(tell: Callable[[nn.Module, Any, dict[str, Any]], Callable[[Any], None] | None]) -> Iterator[None]:
    """Inside, ``tell`` hears of modules that are called from outside of any other, and how, before they are.

    It may return what hears of their outputs.
    """
    plain, listens = nn.Module.__call__, True

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not listens:  # torch.compile keeps what it finds here, and traces it
            return plain(module, *args, **kwargs)
        leaves = tell(module, args, kwargs)
        nn.Module.__call__ = plain  # type: ignore[method-assign]  # inside, all is as it was, also for compilers
        try:
            result = plain(module, *args, **kwargs)
        finally:
            if listens:  # else it has ended inside
                nn.Module.__call__ = call  # type: ignore[method-assign]
        if leaves is not None:
            leaves(result)
        return result

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__, listens = plain, False  # type: ignore[method-assign]

"""What is put around a program while it is recorded: functions of torch, calls of modules, gradients of outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from prepkit.objects.local_part import local

HOME = str(Path(__file__).parents[1])
"""The folder of prepkit's own frames."""
LIBRARIES = frozenset({"site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}"})
"""Folders of what a program has not written itself."""
CLIPS = "clip_grads_with_norm_"
"""The public name of torch's function, under which modules have imported it."""


def that_clip() -> list[Any]:
    """Modules that hold torch's function by its public name."""
    plain = clip_grad._clip_grads_with_norm_
    return [one for one in list(sys.modules.values()) if getattr(one, "__dict__", {}).get(CLIPS) is plain]


def adding(arrived: dict[int, Tensor], place: int) -> Callable[[Tensor], None]:
    """A hook that keeps the gradient of an output; one that arrives again adds up."""

    def hook(grad: Tensor | None) -> None:
        if grad is None:  # as DDP gives to outputs that no loss has used
            return
        kept = local(grad).detach().cpu().clone()
        arrived[place] = arrived[place] + kept if place in arrived else kept

    return hook


@contextmanager
def around(home: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``around`` is called with the function and its arguments instead of it."""
    plain = vars(home)[name]

    def instead(*args: Any, **kwargs: Any) -> Any:
        return around(plain, *args, **kwargs)

    setattr(home, name, instead)
    try:
        yield
    finally:
        setattr(home, name, plain)


@contextmanager
def called_first(tell: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, ``tell`` is told of modules that are called from outside of any other, before they are."""
    plain = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tell(module)
        nn.Module.__call__ = plain  # type: ignore[method-assign]  # inside, all is as it was, also for compilers
        try:
            return plain(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def line_of(what: str) -> Iterator[str]:
    """The line of the program, outside of installed packages and of prepkit, that has led here."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((HOME, "<")) or LIBRARIES.intersection(Path(file).parts)):
            yield f"{what} at {Path(file).name}:{frame.f_lineno}"
            return
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none

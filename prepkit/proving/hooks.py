"""What a recorder hangs into a program: gradients of outputs, torch's clipping, the line that has led here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
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


def line_of(what: str) -> Iterator[str]:
    """The line of the program, outside of installed packages and of prepkit, that has led here."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((HOME, "<")) or LIBRARIES.intersection(Path(file).parts)):
            yield f"{what} at {Path(file).name}:{frame.f_lineno}"
            return
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none

"""What a user may pass as optimizer and scheduler: none, one, or a list of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from prepkit.objects.joint_optimizer import JointScheduler, joined, members


def one_optimizer(given: object) -> Optimizer | None:
    """The optimizer, or one that stands for all that are in a list; None for none. Raises ``TypeError``."""
    listed: list[Any] = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for index, one in enumerate(listed):
        if not isinstance(one, Optimizer):
            where = f"optimizer[{index}]" if isinstance(given, list | tuple) else "optimizer"
            raise TypeError(f"{where} is {said(one)}; pass a torch.optim.Optimizer over the model's parameters")
    flat = [member for one in listed for member in members(one)]
    if len({id(one) for one in flat}) < len(flat):
        raise TypeError("optimizer lists one object twice; give each optimizer once")
    return joined(flat)


def one_scheduler(given: Any) -> Any:
    """The scheduler, or one that steps all that are in a list; None for none. Raises ``TypeError``."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return given
    for index, one in enumerate(given):
        if isinstance(one, type) or not callable(getattr(one, "step", None)):
            raise TypeError(f"scheduler[{index}] is {said(one)}; pass one of torch's, or any object with step()")
    if len(given) < 2:
        return given[0] if given else None
    return JointScheduler(given)


def said(given: object) -> str:
    """Return what was given, as a person would say it."""
    if isinstance(given, type):
        return f"the class {given.__name__} itself, not an instance of it"
    return f"{' '.join(repr(given).split()):.60} ({type(given).__name__})"

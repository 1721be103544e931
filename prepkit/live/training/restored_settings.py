"""What a resume has put into the place of the settings that the optimizer was built with.

An optimizer's state has its groups in it, rates and all (``torch.optim.Optimizer.load_state_dict``): who resumes with
another learning rate trains on with the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SETTINGS = ("weight_decay", "betas", "momentum", "eps")


def settings(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Of each group; the rate is that which a scheduler starts from, where there is one."""
    groups = [group for one in optimizers for group in one.param_groups]
    return [_of(group) for group in groups]


def _of(group: dict[str, Any]) -> dict[str, Any]:
    rate = group.get("initial_lr", group.get("lr"))
    kept = {name: group[name] for name in _SETTINGS if name in group}
    return kept if rate is None else {"lr": float(rate), **kept}


def replaced(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    """What to say of settings that are no longer those before; empty: all are."""
    apart = [
        f"{name} {new[name]} of group {number} in the place of {old[name]}"
        for number, (old, new) in enumerate(zip(before, now, strict=False))
        for name in old
        if name in new and new[name] != old[name]
    ]
    if not apart:
        return ""
    return (
        f"ready.resume() has put back settings of the checkpoint's optimizer: {'; '.join(apart[:3])}. To train on with "
        "yours, set them behind it in ready.optimizer.param_groups (a rate that a scheduler sets: in its base_lrs "
        "too), or write ready.resume(folder, only_model=True), which leaves optimizer and scheduler as they were built"
    )

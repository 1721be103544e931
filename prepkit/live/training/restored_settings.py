"""What a resume has put into the place of the settings that optimizer and scheduler were built with.

Their state has the settings in it, rates and horizons and all (``load_state_dict`` of both): who resumes with another
learning rate trains on with the old one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SETTINGS = ("weight_decay", "betas", "momentum", "eps")
_CYCLED = ("betas", "momentum")
"""What a scheduler sets that cycles momentum."""
_COUNTED = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "mode_worse", "T_cur"})
"""What a scheduler counts or works out, and a resume is to put back."""


def settings(optimizers: Sequence[Any], scheduler: Any) -> dict[str, Any]:
    """Where a setting stands to its value; the rate of a group is that which a scheduler starts from."""
    groups = [group for one in optimizers for group in one.param_groups]
    cycled = _CYCLED if _cycles_momentum(scheduler) else ()
    found = {
        f"{name} of group {at}": value
        for at, group in enumerate(groups)
        for name, value in _of(group).items()
        if name not in cycled
    }
    if type(scheduler).__module__.partition(".")[0] in ("torch", "transformers"):
        state = scheduler.state_dict()
        found |= {f"the scheduler's {name}": value for name, value in state.items() if _is_setting(name, value)}
    return found


def _cycles_momentum(scheduler: Any) -> bool:
    """Whether a step of it sets momentum or betas as well (torch ``OneCycleLR``, ``CyclicLR``), also one inside it."""
    inside = [one for name in ("_schedulers", "schedulers", "members") for one in getattr(scheduler, name, ())]
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(map(_cycles_momentum, inside))


def _of(group: Mapping[str, Any]) -> dict[str, Any]:
    rate = group.get("initial_lr", group.get("lr"))
    kept = {name: group[name] for name in _SETTINGS if name in group}
    return kept if rate is None else {"lr": float(rate), **kept}


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("_") and name not in _COUNTED and isinstance(value, int | float | str)


def replaced(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What to say of settings that are no longer those before; empty: all are."""
    apart = [f"{name}: {now[name]} for {old}" for name, old in before.items() if name in now and now[name] != old]
    if not apart:
        return ""
    return (
        f"ready.resume() has put back what the checkpoint's optimizer and scheduler had: {'; '.join(apart[:3])}. To "
        "train on with yours, set them behind it in ready.optimizer.param_groups and ready.scheduler (of a rate that "
        "it sets, base_lrs too), or write ready.resume(folder, only_model=True), which leaves both as they were built"
    )

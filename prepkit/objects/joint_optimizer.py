"""Several optimizers, or schedulers, over one model as one object, like torchtitan's ``OptimizersContainer``.

The groups and the state of the optimizer are those of its members, not copies, so that a change to it is a change to
them. Everything that takes an optimizer takes it: handlers, the grad scaler, torch's distributed checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer


class JointState(MutableMapping[Any, Any]):
    """Parameter to its state, wherever that is: in the member that has it, or else in the one that steps it."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = members

    def __getitem__(self, key: Any) -> Any:
        return self._state_with(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        held = next((member.state for member in self.members if key in member.state), None)
        (self._stepping(key) if held is None else held)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._state_with(key)[key]

    def __iter__(self) -> Iterator[Any]:
        for member in self.members:
            yield from member.state

    def __len__(self) -> int:
        return sum(len(member.state) for member in self.members)

    def _state_with(self, key: Any) -> dict[Any, Any]:
        for member in self.members:
            if key in member.state:  # ``state`` is a defaultdict: asking it would make an entry
                return member.state
        raise KeyError(key)

    def _stepping(self, key: Any) -> dict[Any, Any]:
        for member in self.members:
            if any(param is key for group in member.param_groups for param in group["params"]):
                return member.state
        raise KeyError("no optimizer steps this parameter, so there is no place for its state")


class JointOptimizer(Optimizer):
    """Steps and clears all of its members, in their order."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)
        self.__setstate__({"defaults": {}})  # torch's way to an optimizer without groups of its own: hooks and no more

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": {}, "members": self.members}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # of the members, whatever becomes of them
        """The groups of all members, one after the other: the very dicts."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]  # likewise
        """The state of all members, as one mapping."""
        return JointState(self.members)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every member. ``closure`` makes the gradients, once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every member's parameters."""
        for member in self.members:
            member.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """One state dict, as an optimizer with all of their groups would have it: parameters are counted through."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in self.members:
            own, first = member.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {key + first if isinstance(key, int) else key: value for key, value in own["state"].items()}
            groups += [
                group | {"params": [index + first for index in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives every member its part. Raises ``ValueError`` where there are more groups, or fewer, than they have."""
        groups, held = list(state_dict["param_groups"]), len(self.param_groups)
        if len(groups) != held:
            raise ValueError(f"the state dict has {len(groups)} parameter groups, the optimizers have {held}")
        for member in self.members:
            own, groups = groups[: len(member.param_groups)], groups[len(member.param_groups) :]
            params = {key for group in own for key in group["params"]}  # numbers, or names in torch's checkpoints
            state = {key: value for key, value in state_dict["state"].items() if key in params}
            member.load_state_dict({"state": state, "param_groups": own})


def joined(optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """None for none, the optimizer itself for one, and for several one object that stands for all."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    return JointOptimizer(optimizers)


def members(optimizer: Optimizer | None) -> tuple[Optimizer, ...]:
    """The optimizers that it stands for: itself, unless it is a joint one; none for None."""
    if optimizer is None:
        return ()
    return optimizer.members if isinstance(optimizer, JointOptimizer) else (optimizer,)


class JointScheduler:
    """Steps all of its members, in their order."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = tuple(members)

    def step(self, *args: Any) -> None:
        """Steps every member."""
        for member in self.members:
            member.step(*args)

    def get_last_lr(self) -> list[float]:
        """The last learning rates of all groups, those of the first member first."""
        return [rate for member in self.members for rate in member.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by its place."""
        return {str(index): member.state_dict() for index, member in enumerate(self.members)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` where it is the state of more or fewer."""
        if len(state) != len(self.members):
            raise ValueError(f"the state is that of {len(state)} schedulers, and there are {len(self.members)}")
        for index, member in enumerate(self.members):
            member.load_state_dict(state[str(index)])


def held(optimizer: Any) -> list[Parameter]:
    """All that it holds, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def scheduler_members(scheduler: Any) -> tuple[Any, ...]:
    """The schedulers that it stands for: itself, unless it is a joint one."""
    return scheduler.members if isinstance(scheduler, JointScheduler) else (scheduler,)


def ticks_left(scheduler: Any) -> int | None:
    """Ticks until the next one would raise, as after ``OneCycleLR(total_steps=...)``; None: no end is known.

    One inside a ``SequentialLR`` ends it only as the last, which is the one that goes on.
    """
    if (total := getattr(scheduler, "total_steps", None)) is not None:
        return max(0, int(total) - int(scheduler.last_epoch))
    inside: tuple[Any, ...] = getattr(scheduler, "members", None) or tuple(getattr(scheduler, "_schedulers", ()))
    if isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR):
        until = scheduler._milestones[-1] - scheduler.last_epoch
        left = ticks_left(inside[-1])
        return left if left is None or until <= 0 else until + int(inside[-1].total_steps)
    return min((left for one in inside if (left := ticks_left(one)) is not None), default=None)


def tick(scheduler: Any, times: int) -> None:
    """Step it so often, and not past its end."""
    for _ in range(times):
        if ticks_left(scheduler) != 0:
            scheduler.step()


def unstepped(state: Mapping[str, Any]) -> bool:
    """True for the state of a parameter that no step has made, such as the sums that torch's Adagrad begins with.

    State that counts no steps is taken for that of a step.
    """
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        return not step.is_meta and step.numel() == 1 and not step.item()
    return bool(step == 0)

"""Several schedulers as one object: each steps one of several optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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


def members(scheduler: Any) -> tuple[Any, ...]:
    """The schedulers that it stands for: itself, unless it is a joint one."""
    return scheduler.members if isinstance(scheduler, JointScheduler) else (scheduler,)

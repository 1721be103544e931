"""Parameters that are used while the unit that holds them is sharded: one forward without data, watched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prepkit.applying.rehearse.activations import NeedsValues, without_data
from prepkit.findings import Finding
from prepkit.objects import names
from prepkit.plan import Plan
from prepkit.rules.forward import FORWARD_RULES, Use
from prepkit.rules.rule import findings_of
from prepkit.steps import ShardUnits, WrapFSDP1


def foreign_uses(plan: Plan, model: Module, *args: Any, **kwargs: Any) -> tuple[Finding, ...]:
    """One finding per parameter of a unit that something outside the unit's forward computes with.

    Runs ``model(*args, **kwargs)`` on a copy without data, as the plan computes. Nothing under an engine without units.
    Raises ``RuntimeError`` for a forward that fails, and where there are units for one that needs values.
    """
    keeps = _units(plan)
    try:
        return _uses(plan, model, (args, kwargs), keeps)
    except NeedsValues:
        if keeps:
            raise
        return ()


def _uses(plan: Plan, model: Module, given: tuple[Any, Any], keeps: dict[str, bool]) -> tuple[Finding, ...]:
    unit_of = {layout.name: layout.unit for layout in plan.layout}
    with without_data(plan, model, given) as (twin, inputs):
        owners = {
            id(param): (name, unit_of[name])
            for name, param in names.named_parameters(twin).items()
            if unit_of.get(name) in keeps
        }
        watch = Watch(owners, keeps)
        with _followed(twin, watch), watch, torch.no_grad():
            twin(*inputs[0], **inputs[1])
    return findings_of(FORWARD_RULES, tuple(Use(name, unit, user) for (name, unit), user in watch.uses.items()))


def _units(plan: Plan) -> dict[str, bool]:
    """Path of every unit below the root to whether it stays gathered after its forward."""
    for one in plan.steps:
        match one.step:
            case ShardUnits(units=units):
                return {unit.path: unit.reshard_after_forward is False for unit in units if unit.path}
            case WrapFSDP1(units=flat, sharding=sharding):
                stays = sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD")
                return {unit.path: stays for unit in flat if unit.path} if sharding != "NO_SHARD" else {}
    return {}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every parameter that an operation gets while its unit is not gathered."""

    def __init__(self, owners: dict[int, tuple[str, str]], keeps: dict[str, bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owners, self.keeps = owners, keeps
        self.open: list[str] = []
        """Paths of the modules whose forward runs, outermost first."""
        self.gathered: set[str] = set()
        """Units that have run and stay gathered."""
        self.uses: dict[tuple[str, str], str] = {}
        """Parameter and unit to the module whose forward has used it first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def note(self, leaves: Iterable[Any]) -> None:
        """Holds what an operation gets against the units that are gathered now."""
        for leaf in leaves:
            name, unit = self.owners.get(id(leaf), ("", ""))
            if unit and unit not in self.open and unit not in self.gathered:
                self.uses.setdefault((name, unit), self.open[-1] if self.open else "")

    def enter(self, path: str) -> None:
        """A module's forward begins."""
        self.open.append(path)

    def leave(self, path: str) -> None:
        """A module's forward ends."""
        self.open.pop()
        if self.keeps.get(path):
            self.gathered.add(path)


@contextmanager
def _followed(model: Module, watch: Watch) -> Iterator[None]:
    hooks = []
    for path, module in names.named_modules(model).items():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: watch.enter(path)))
        hooks.append(module.register_forward_hook(lambda *_, path=path: watch.leave(path), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

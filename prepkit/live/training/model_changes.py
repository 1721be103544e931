"""What has become of a prepared model since apply: layers put in, parameters frozen or unfrozen, casts, weights loaded.

Optimizers, DDP's buckets and ZeRO's master weights hold what the model had when it was prepared. torch and DeepSpeed
train on with that, and say nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import Module, Parameter

from prepkit.config import DDP, FSDP1, FSDP2, XLA, Single
from prepkit.findings.text import count, some
from prepkit.live.model import names
from prepkit.live.training.engine_steps import kept_apart
from prepkit.live.training.looks import due
from prepkit.plan import Plan

_ANEW = (
    "Change the model before build_plan. In the middle of a run: ready.save(folder), ready.close(), change the model, "
    "then build_plan, apply and ready.resume(folder, only_model=True)"
)


class ModelChanged(RuntimeError):
    """The model is no longer the one that was prepared, and would train wrongly. Raised with nothing stepped."""


@frozen(eq=False)
class _Stood:
    """A parameter as it was when the model was prepared."""

    param: Parameter
    trained: bool
    dtype: torch.dtype


@define(eq=False)
class ModelChanges:
    """Compares what stands in the model with what was prepared, before an optimizer acts."""

    plan: Plan
    model: Module
    optimizers: tuple[Any, ...]
    """All that step."""
    _stood: dict[str, _Stood] = field(init=False)
    _masters: bool = field(init=False)
    """Whether the weights in the model are copies, which DeepSpeed makes anew from its own in each step."""
    _written: int = field(init=False)
    """How often trained weights have been written in place: DeepSpeed's own steps do not count (0.16 to 0.19)."""
    _windows: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        found = names.named_parameters(self.model)
        self._stood = {name: _Stood(param, param.requires_grad, param.dtype) for name, param in found.items()}
        self._masters = any(kept_apart(one) for one in self.optimizers)
        self.settle()

    def settle(self) -> None:
        """The weights that lie in the model now are those that are trained: ``resume`` has put them there."""
        self._written = self._writes()

    def let_go(self, model: Module) -> None:
        """The engine is gone: what lies in the model is all there is."""
        self.model, self._masters = model, False
        self.settle()

    def before_step(self) -> None:
        """Raises ``ModelChanged`` for what would train wrongly. Looks at weights each time, at the rest now and then.

        Nothing is asked of the other ranks.
        """
        self._windows += 1
        self.before_reading("the next step would undo that")
        if not due(self._windows) or isinstance(self.plan.config.engine, XLA):
            return
        held = {id(param) for one in self.optimizers for group in one.param_groups for param in group["params"]}
        found = names.named_parameters(self.model)
        problems = [*self._put_in(found, held), *self._switched(found, held), *self._cast(found)]
        if problems:
            raise ModelChanged(f"the model is no longer the one that was prepared: {'; '.join(problems)}. {_ANEW}")

    def before_reading(self, otherwise: str) -> None:
        """Raises ``ModelChanged`` where weights were put into the model and DeepSpeed's master weights were not."""
        if self._written != self._writes():
            raise ModelChanged(
                "weights were put into the model in place, by load_state_dict() or by hand, and DeepSpeed's master "
                f"weights are what they were: {otherwise}. Load weights before build_plan, or by "
                "ready.resume(folder, only_model=True) from what ready.save(folder) has written, which fills both"
            )

    def _writes(self) -> int:
        trained = (one.param for one in self._stood.values() if one.trained) if self._masters else ()
        return sum(param._version for param in trained if isinstance(param, Tensor))  # MS-AMP's weights are none

    def _put_in(self, found: dict[str, Parameter], held: set[int]) -> list[str]:
        """Trained parameters that were not there, as of a layer that was replaced or a tie that was broken."""
        known = {id(one.param) for one in self._stood.values()}
        alone = isinstance(self.plan.config.engine, Single)
        new = [
            name
            for name, param in found.items()
            if param.requires_grad and id(param) not in known and not (alone and id(param) in held)
        ]
        return [f"{count(len(new), 'trained parameter')} that nothing trains stands in it: {some(new)}"] if new else []

    def _switched(self, found: dict[str, Parameter], held: set[int]) -> list[str]:
        """Parameters that were frozen or unfrozen where the engine would not follow."""
        engine = self.plan.config.engine
        follows = isinstance(engine, Single | FSDP2)
        loose, stuck = [], []
        for name, one in self._stood.items():
            if found.get(name) is not one.param or one.param.requires_grad == one.trained:
                continue
            if not one.trained and not (follows and id(one.param) in held):
                loose.append(name)
            if one.trained and (self._masters or isinstance(engine, FSDP1)):
                stuck.append(name)
        why = "no rank averages their gradients" if isinstance(engine, DDP) else "nothing trains them"
        told = [f"{count(len(loose), 'parameter')} unfrozen since, and {why}: {some(loose)}"] if loose else []
        if stuck:
            told.append(f"{count(len(stuck), 'parameter')} frozen since, and trained all the same: {some(stuck)}")
        return told

    def _cast(self, found: dict[str, Parameter]) -> list[str]:
        """Trained parameters of a dtype of 16 bits, as after ``model.to(torch.bfloat16)``, that had more.

        Some models widen a layer of their own in their first forward, as routers of experts do.
        """
        cast = [
            f"{name} ({str(one.dtype).removeprefix('torch.')})"
            for name, one in self._stood.items()
            if one.trained and found.get(name) is one.param and one.param.dtype.itemsize < min(4, one.dtype.itemsize)
        ]
        return (
            [f"{count(len(cast), 'trained parameter')} cast to 16 bits since, without master weights: {some(cast)}"]
            if cast
            else []
        )

"""What one ``Accelerator`` has prepared so far, and what another ``prepare`` adds to it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakSet

import torch
from attrs import define, evolve, field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from prepkit.api import apply, build_plan
from prepkit.compat.accelerate import operations
from prepkit.compat.accelerate.loaders import as_accelerate, prepared_alone, share_generators
from prepkit.compat.accelerate.loop import AcceleratedLoop
from prepkit.compat.accelerate.not_offered import BEFORE, NotOffered
from prepkit.config import Config, Intent
from prepkit.loading.loader import Loader
from prepkit.loading.passes import Passes
from prepkit.objects.joint_optimizer import ticks_left
from prepkit.objects.unwrap import PREPARED, unwrap
from prepkit.resolve.entry_points import through
from prepkit.training.prepared import Prepared

KINDS = {
    "model": torch.nn.Module,
    "optimizer": Optimizer,
    "scheduler": LRScheduler | ReduceLROnPlateau,
    "loader": DataLoader,
}
"""What a script gives to ``prepare``, told by what it is."""


@define(eq=False)
class Preparation:
    """Models with their loop, and loaders; those that come alone count as the model's once it is there."""

    ticks: int | None = 1
    """Ticks of a scheduler per step; None: whenever the script says so."""
    started_loop: AcceleratedLoop | None = None
    """None: no model yet."""
    only_loaders: Prepared | None = None
    """What came before a model; None: nothing."""
    let_go: Collection[torch.nn.Module] = ()
    """Models of an earlier preparation, which may be given again."""
    beside: list[Any] = field(factory=list)
    """Optimizers and schedulers that no plan holds, so that whoever saves asks them for their state."""
    optimizers: list[SteppedOptimizer] = field(factory=list)
    passes: Passes = field(factory=lambda: Passes(()))
    """Over all loaders."""
    made: dict[str, list[Any]] = field(factory=lambda: {kind: [] for kind in KINDS})
    """What scripts were given, by its kind."""
    heard: WeakSet[Any] = field(factory=WeakSet)
    """Loaders whose batches may be in use, be they of an earlier preparation."""

    def anew(self, ticks: int | None, let_go: Collection[torch.nn.Module]) -> Preparation:
        """Another one: nothing is prepared, and loaders of this one that the script still reads are heard."""
        other = Preparation(ticks, let_go=let_go, heard=self.heard)
        other.passes.hear(self.heard, self.passes)
        return other

    @property
    def loop(self) -> AcceleratedLoop:
        """The model's. Raises ``NotOffered`` before there is one."""
        if self.started_loop is None:
            raise NotOffered("this before prepare", "call accelerator.prepare(model, ...) first", BEFORE)
        return self.started_loop

    @property
    def ready(self) -> Prepared:
        """What ``apply`` has returned for the first model; for loaders as long as only these are prepared."""
        if self.started_loop is None and self.only_loaders is not None:
            return self.only_loaders
        return self.loop.ready

    @property
    def models(self) -> tuple[Prepared, ...]:
        """Each model that was prepared."""
        return () if self.started_loop is None else self.started_loop.models

    @property
    def all_ready(self) -> list[Prepared]:
        """Each that is there."""
        return [*self.models, *([] if self.only_loaders is None else [self.only_loaders])]

    def of(self, model: Any) -> Prepared | None:
        """The one whose model this is, in its wrapper or out of it; None: it was not prepared."""
        return next((ready for ready in self.models if model is ready.model or model is ready.unwrap()), None)

    def gather(self, value: Any, *, pickled: bool) -> Any:
        """``gather_for_metrics`` of the loader in use; outside a loop all that the ranks give. Collective.

        Rows that are not the samples of the batch, such as a mean repeated so often, are cut as accelerate cuts them:
        at the end of a pass to what is left of the data beyond whole batches of all ranks.
        """
        leaves = pytree.tree_leaves(value)
        tensors = bool(leaves) and all(operations.is_tensor(leaf) for leaf in leaves)
        present = self.passes.under_way[-1].present if self.passes.under_way else None
        if present is None:
            return operations.gather(value) if tensors and not pickled else operations.gather_object(value)
        rows = {leaf.shape[0] for leaf in leaves if leaf.ndim} if tensors and not pickled else set()
        if not tensors or pickled or present.size is None or operations.everywhere(rows <= {present.size}):
            return self.passes.gather(value)
        gathered = operations.gather(value)
        left = self.passes.under_way[-1].remainder if present.last else 0
        return pytree.tree_map(lambda leaf: leaf[:left], gathered) if left > 0 else gathered

    def add(self, config: Config, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """The objects, prepared, in their order; what is prepared already, or is none of them, stays as it is."""
        places = [self._place(given) for given in objects]
        by_kind: dict[str, list[Any]] = {kind: [] for kind in ("", "model", "optimizer", "scheduler", "loader")}
        for given, place in zip(objects, places, strict=True):
            by_kind[place].append(given)
        loaders = by_kind["loader"]
        made: dict[str, list[Any]] = {"": by_kind[""], "model": [], "optimizer": [], "scheduler": []}
        made["loader"] = (
            [*self._add_models(config, by_kind, made)] if by_kind["model"] else self._alone(config, loaders)
        )
        for optimizer in by_kind["optimizer"] if not made["optimizer"] else ():
            made["optimizer"].append(self._by_hand(optimizer))
        for scheduler in by_kind["scheduler"] if not made["scheduler"] else ():
            made["scheduler"].append(SteppedScheduler(scheduler, self.loop, self.optimizers, self.ticks))
            self.beside.append(scheduler)
        following = {kind: iter(values) for kind, values in made.items()}
        outcome = tuple(next(following[place]) for place in places)
        for place, one in zip(places, outcome, strict=True):
            self.made.get(place, []).append(one)
        return outcome

    def _place(self, given: Any) -> str:
        return "" if is_prepared(given) or any(given is ready.model for ready in self.models) else place_of(given)

    def _by_hand(self, optimizer: Optimizer) -> SteppedOptimizer:
        """An optimizer that was given without its model, or with several."""
        self.loop.step_by_hand()
        stepped = SteppedOptimizer(optimizer, self.loop)
        self.optimizers.append(stepped)
        self.beside.append(optimizer)
        return stepped

    def _add_models(self, config: Config, given: dict[str, list[Any]], made: dict[str, list[Any]]) -> tuple[Any, ...]:
        """The loaders; the other objects that a plan holds are in ``made``."""
        optimizers, schedulers = given["optimizer"], given["scheduler"]
        driven = self.started_loop is None and belong(given["model"], optimizers)
        loaders = tuple(given["loader"])
        share_generators(config, loaders)
        prepared: tuple[Any, ...] = ()
        for model in given["model"]:
            self._unprepare(model, config)
            trained = any(param.requires_grad for param in model.parameters())
            how = _methods_alone(config)
            how = how if trained or driven else evolve(how, intent=Intent.INFERENCE)
            planned = schedulers[0] if driven and _of(schedulers, optimizers[0]) else None
            with warnings.catch_warnings():
                if not driven:  # it comes by itself, or with several models
                    warnings.filterwarnings("ignore", message=r"[\s\S]*optimizer\.none")
                if how.entry_points != config.entry_points:
                    warnings.filterwarnings("ignore", message=r"[\s\S]*entry-points\.left-out")
                plan = build_plan(
                    how, model, optimizer=optimizers[0] if driven else None, scheduler=planned, loaders=loaders
                )
                ready = apply(plan)
            self._take(ready, config, driven)
            made["model"].append(ready.model)
            prepared, loaders = (ready.loaders, ()) if loaders else (prepared, ())
        if driven:
            assert self.ready.optimizer is not None, "what is driven has one"
            self.optimizers.append(SteppedOptimizer(self.ready.optimizer, self.loop))
            made["optimizer"].append(self.optimizers[-1])
            if self.ready.scheduler is not None:
                stepped = SteppedScheduler(self.ready.scheduler, self.loop, self.optimizers, self.ticks)
                made["scheduler"].append(stepped)
        return prepared

    def _unprepare(self, model: torch.nn.Module, config: Config) -> None:
        """Take what a ``prepare`` has left on a model off again, once ``free_memory`` has let it go.

        Raises ``NotOffered`` for one that is in use, or whose parameters have been divided in place.
        """
        if model in self.let_go:
            unwrap(model, keep_autocast=False, keep_compiled=False)
        if PREPARED in vars(model) and (rule := "model.already-wrapped") not in config.overrides:
            what = (
                "use what the first prepare gave, or let it go before: accelerator.free_memory(). Where an engine has "
                "divided it build the model anew, and load what accelerator.get_state_dict(model) gave before"
            )
            raise NotOffered("prepare of a model that is prepared already", what, rule)

    def _take(self, ready: Prepared, config: Config, driven: bool) -> None:
        if self.started_loop is not None:
            self.loop.add(ready)
            _adopt(self.ready, ready.loaders)
        else:
            self.started_loop = AcceleratedLoop(ready, config.accumulation or 1, self._at_last_batch, driven)
            if self.only_loaders is not None:
                _adopt(ready, self.only_loaders.loaders)
        as_accelerate(ready.loaders)
        self._hears(ready.loaders)

    def _hears(self, loaders: tuple[Any, ...]) -> None:
        self.passes.add(loaders)
        self.heard.update(one for one in loaders if isinstance(one, Loader))

    def _at_last_batch(self) -> bool:
        """Whether windows end with the batch in use of the loader that was begun last."""
        return bool(self.passes.under_way) and self.passes.under_way[-1].at_window_end

    def _alone(self, config: Config, loaders: list[Any]) -> list[Any]:
        if not loaders:
            return []
        alone = prepared_alone(config, loaders)
        self._hears(alone.loaders)
        if self.all_ready:
            _adopt(self.ready, alone.loaders)
        else:
            self.only_loaders = alone
        return [*alone.loaders]


def _methods_alone(config: Config) -> Config:
    """Methods beside ``forward`` stay as they are, out of its precision, where no engine asks for more (accelerate)."""
    alone = config.entry_points is None and through(config) == "forward"
    return evolve(config, entry_points=()) if alone else config


def _of(schedulers: list[Any], optimizer: Optimizer) -> bool:
    """Return whether there is one scheduler, and it is made from this optimizer."""
    return len(schedulers) == 1 and getattr(schedulers[0], "optimizer", None) is optimizer


def _adopt(ready: Prepared, loaders: tuple[Any, ...]) -> None:
    """Loaders that were prepared at another time end windows, are saved and resumed as its own are."""
    ready.loaders = (*ready.loaders, *loaders)
    ready.loop.passes.add(loaders)


def place_of(given: Any) -> str:
    """``model``, ``optimizer``, ``scheduler`` or ``loader``; empty for anything else, which stays as it is.

    Raises ``NotOffered`` for what only accelerate's ``prepare`` knows.
    """
    if type(given).__name__ in ("DummyOptim", "DummyScheduler", "MegatronLMDummyScheduler"):
        what = "give a torch.optim.AdamW and a scheduler of torch, or Accelerator(config=pk.Config(optimizer=...))"
        raise NotOffered(f"prepare({type(given).__name__})", what)
    return next((place for place, kind in KINDS.items() if isinstance(given, kind)), "")


def is_prepared(given: Any) -> bool:
    """Return whether it comes from a ``prepare``; a model says nothing of that."""
    return isinstance(given, Loader | SteppedOptimizer | SteppedScheduler)


def belong(models: Sequence[Any], optimizers: Sequence[Any]) -> bool:
    """Return whether there is one model, and one optimizer that holds parameters of it alone."""
    if len(models) != 1 or len(optimizers) != 1:
        return False
    own = {id(param) for param in models[0].parameters()}
    return all(id(param) in own for group in optimizers[0].param_groups for param in group["params"])


class SteppedOptimizer(Optimizer):
    """An optimizer of a script; everything but ``step``, ``zero_grad`` and its mode is the optimizer's own.

    One of torch's by its class, so that schedulers can be made from it, though nothing of it is held twice. A copy, and
    what comes out of a pickle, is a plain one that steps at once.
    """

    def __init__(self, optimizer: Optimizer, loop: AcceleratedLoop | None) -> None:
        vars(self).update(optimizer=optimizer, loop=loop)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "loop"):  # before there is one, as while it is copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "loop": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> SteppedOptimizer:
        return SteppedOptimizer(deepcopy(self.optimizer, memo), None)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last window ended without a step, because a gradient overflowed."""
        return self.loop is not None and self.loop.skipped

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch gives the loss
        """Ends the micro-batch: clips and steps where the window ends, and counts where it does not."""
        if self.loop is None:
            self.optimizer.step(closure)
        else:
            self.loop.step_of(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # as torch has it
        """Clears the gradients where the window ends; inside a window they are kept."""
        if self.loop is None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            self.loop.zero_grad(self.optimizer, set_to_none)

    def train(self) -> None:
        """Puts an optimizer with a mode, such as a schedule-free one, into that of training."""
        self._switch("train")

    def eval(self) -> None:
        """Likewise into that of evaluation."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for one in (self.optimizer, getattr(self.optimizer, "optimizer", None)):  # DeepSpeed's has another inside
            if callable(switch := getattr(one, mode, None)):
                switch()
                return


def _own(name: str) -> Any:
    def given(self: SteppedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    given.__name__ = name
    return given


def _field(name: str) -> property:
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


for _name in ("state", "param_groups", "defaults"):
    setattr(SteppedOptimizer, _name, _field(_name))
for _name in (
    *("state_dict", "load_state_dict", "add_param_group", "register_step_pre_hook", "register_step_post_hook"),
    *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
    *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
):
    setattr(SteppedOptimizer, _name, _own(_name))


class SteppedScheduler:
    """A scheduler of a script, stepped where the optimizer was; everything else is its own (behaviour W-16)."""

    def __init__(self, scheduler: Any, loop: AcceleratedLoop, optimizers: Sequence[Any], ticks: int | None) -> None:
        """``ticks`` per step: as many as processes, as accelerate has it; None: whenever the script says so."""
        vars(self).update(scheduler=scheduler, loop=loop, optimizers=tuple(optimizers), ticks=ticks)

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "loop"):  # before there is one, as while it is copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Ticks where the window has ended with a step, and never past its end."""
        if self.ticks is None:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.loop.boundary or any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.ticks):
            if ticks_left(self.scheduler) != 0:
                self.scheduler.step(*args, **kwargs)

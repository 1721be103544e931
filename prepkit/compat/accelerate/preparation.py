"""What one ``Accelerator`` has prepared so far, and what another ``prepare`` adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field
from torch.utils import _pytree as pytree

from prepkit.api import apply, build_plan
from prepkit.compat.accelerate import operations
from prepkit.compat.accelerate.loaders import prepared_alone
from prepkit.compat.accelerate.loop import AcceleratedLoop
from prepkit.compat.accelerate.not_offered import NotOffered
from prepkit.compat.accelerate.objects import is_prepared, only, place_of
from prepkit.compat.accelerate.stepped import SteppedOptimizer, SteppedScheduler
from prepkit.config import Config
from prepkit.loading.passes import Passes
from prepkit.training.prepared import Prepared


@define(eq=False)
class Preparation:
    """A model with its loop, and loaders; those that come alone count as the model's once it is there."""

    started_loop: AcceleratedLoop | None = None
    """None: no model yet."""
    only_loaders: Prepared | None = None
    """What came before a model; None: nothing."""
    passes: Passes = field(factory=lambda: Passes(()))
    """Over all loaders."""

    @property
    def loop(self) -> AcceleratedLoop:
        """The model's. Raises ``NotOffered`` before there is one."""
        if self.started_loop is None:
            raise NotOffered("this before prepare", "call accelerator.prepare(model, ...) first")
        return self.started_loop

    @property
    def ready(self) -> Prepared:
        """What ``apply`` has returned for the model; for loaders as long as only these are prepared."""
        if self.started_loop is None and self.only_loaders is not None:
            return self.only_loaders
        return self.loop.ready

    @property
    def all_ready(self) -> list[Prepared]:
        """Each of the two that is there."""
        model = None if self.started_loop is None else self.started_loop.ready
        return [ready for ready in (model, self.only_loaders) if ready is not None]

    def gather(self, value: Any, *, pickled: bool) -> Any:
        """``gather_for_metrics`` of the loader in use; outside a loop all that the ranks give. Collective."""
        if not self.passes.under_way:
            return operations.gather_object(value) if pickled else operations.gather(value)
        present = self.passes.under_way[-1].present
        size = None if present is None else present.size
        return self.passes.gather(pytree.tree_map(lambda leaf: _without_row(leaf, size), value))

    def add(self, config: Config, objects: tuple[Any, ...], ranks: int) -> tuple[Any, ...]:
        """The objects, prepared, in their order; what is prepared already stays as it is."""
        known = [self._is_prepared(given) for given in objects]
        new = [given for given, is_known in zip(objects, known, strict=True) if not is_known]
        places = [place_of(given) for given in new]
        if set(places) <= {"loader"}:
            made = self._add_loaders(prepared_alone(config, new)) if new else ()
        else:
            made = self._add_model(config, new, places, ranks)
        following = iter(made)
        return tuple(given if is_known else next(following) for given, is_known in zip(objects, known, strict=True))

    def _is_prepared(self, given: Any) -> bool:
        return is_prepared(given) or (self.started_loop is not None and given is self.started_loop.ready.model)

    def _add_model(self, config: Config, objects: list[Any], places: list[str], ranks: int) -> tuple[Any, ...]:
        if self.started_loop is not None:
            raise NotOffered("a second prepare", "give all objects to one call; another model has its Accelerator")
        model, optimizer, scheduler = (only(objects, places, kind) for kind in ("model", "optimizer", "scheduler"))
        if model is None:
            raise NotOffered("prepare without a model", "give model, optimizer and scheduler to one call")
        given = [one for one, place in zip(objects, places, strict=True) if place == "loader"]
        ready = apply(build_plan(config, model, optimizer=optimizer, scheduler=scheduler, loaders=given))
        loop = self.started_loop = AcceleratedLoop(ready, ready.plan.owners.clip)
        self.passes.add(ready.loaders)
        split = bool(getattr(config.loaders, "split_batches", False))
        prepared = iter(ready.loaders)
        made: dict[str, Callable[[], Any]] = {
            "model": lambda: ready.model,
            "optimizer": lambda: SteppedOptimizer(loop),
            "scheduler": lambda: SteppedScheduler(loop, 1 if split else ranks),
            "loader": prepared.__next__,
        }
        outcome = tuple(made[place]() for place in places)
        if self.only_loaders is not None:
            _adopt(ready, self.only_loaders.loaders)
        return outcome

    def _add_loaders(self, alone: Prepared) -> tuple[Any, ...]:
        added = alone.loaders
        self.passes.add(added)
        if self.all_ready:
            _adopt(self.ready, added)
        else:
            self.only_loaders = alone
        return added


def _adopt(ready: Prepared, loaders: tuple[Any, ...]) -> None:
    """Loaders that were prepared at another time end windows, are saved and resumed as its own are."""
    ready.loaders = (*ready.loaders, *loaders)
    ready.loop.passes.add(loaders)


def _without_row(leaf: Any, size: int | None) -> Any:
    """A scalar, where one value stands for a batch of several samples; it counts as one row per rank."""
    alone = isinstance(leaf, torch.Tensor) and leaf.shape == (1,) and size not in (None, 1)
    return leaf.reshape(()) if alone else leaf

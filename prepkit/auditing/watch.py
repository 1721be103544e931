"""Drift looked for while a loop runs: a hook on the optimizer, hung up by hand or by a Trainer's callback."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from attrs import define, evolve, field
from torch import nn

from prepkit.auditing.course import KeptGradients, RefusedSteps, SampledEpochs, Ticks
from prepkit.auditing.running import RunningLook, replaced, taken_over
from prepkit.court import report
from prepkit.facts.run import RunFacts
from prepkit.findings import Finding
from prepkit.observe.given import said
from prepkit.observe.prepared.look import look, optimizers_of
from prepkit.observe.prepared.optimizers import LastSteps, engines, inner
from prepkit.rules import by_id, due
from prepkit.rules.rule import Moment, Need, findings_of

IDLE = 32
"""Forwards that train without a step of the optimizer, or steps without a tick of the scheduler: fewer say nothing."""

Act = Callable[[tuple[Finding, ...]], None]
"""What is done with the findings of a look, where there are any."""


@define(kw_only=True)
class DriftWatch:
    """What ``pk.watch`` gives: what was found, and what it took. Nothing is looked at before the first step."""

    every: int
    share: float
    act: Act | None = None
    findings: tuple[Finding, ...] = field(default=(), init=False)
    """Everything found so far, each rule and place once."""
    steps: int = field(default=0, init=False)
    """Optimizer steps that were begun."""
    looks: int = field(default=0, init=False)
    """Of them, how many were looked at."""
    _look: RunningLook | None = field(default=None, init=False, repr=False)
    _engine: Any = field(default=None, init=False, repr=False)
    _counted: int | None = field(default=None, init=False, repr=False)
    _handles: list[Any] = field(factory=list, init=False, repr=False)
    _forwards: int = field(default=0, init=False, repr=False)
    """That have trained since the optimizer stepped last."""
    _most: int = field(default=0, init=False, repr=False)
    """That came before a step so far."""
    _refused: RefusedSteps | None = field(default=None, init=False, repr=False)
    _ticks: Ticks | None = field(default=None, init=False, repr=False)
    _others: bool = field(default=False, init=False, repr=False)
    """Whether the scheduler drives another optimizer than the one whose steps are counted."""
    _last: LastSteps = field(factory=LastSteps, init=False, repr=False)
    _given: tuple[Finding, ...] = field(default=(), init=False, repr=False)
    """What is wrong with the scheduler that was given: told at the first look."""
    _kept: KeptGradients | None = field(default=None, init=False, repr=False)

    @property
    def seconds(self) -> float:
        """What all looks have taken on this rank."""
        return 0.0 if self._look is None else self._look.seconds

    def start(self, model: nn.Module, optimizer: Any, scheduler: Any = None, *, apart: tuple[str, ...] = ()) -> None:
        """From here on, every step of the optimizer is counted. A second call begins anew, as a second ``fit`` does.

        ``apart``: parameters of which ranks have held other values from the first.
        """
        self.close()
        known = optimizers_of(optimizer)
        facts = evolve(look(model, known, scheduler, needs={Need.OPTIMIZERS}), parted=apart)
        self._look = RunningLook(model=model, optimizers=known, scheduler=scheduler, facts=facts, share=self.share)
        self._look.steps, self._look.passes = self.steps, SampledEpochs()
        self._look.passes.listen()
        asked = (rule for rule in due(Moment.DRIFT) if rule.id == "run.scheduler-elsewhere")
        self._given = findings_of(asked, facts)
        self._engine = next(iter(engines(model)), None)
        self._ticks = self._look.ticks = None
        if facts.scheduler is not None:
            self._ticks = self._look.ticks = Ticks(inner(scheduler), facts.scheduler.by_batch)
            self._ticks.listen()
            driven = inner(getattr(inner(scheduler), "optimizer", None))
            self._others = any(inner(one) is driven for one in known[1:])
        steps = stepping(known[0])
        self._refused = RefusedSteps(steps, made=self.steps)
        self._refused.listen()
        self._handles.append(steps.register_step_pre_hook(self._before_step))
        each = known if self._engine is None else ()  # DeepSpeed steps part by part, and keeps gradients to itself
        own = [one for one in map(inner, each) if isinstance(one, torch.optim.Optimizer)]
        self._kept = KeptGradients(own, self._due, self._told)
        self._kept.listen()
        self._handles += [one.register_step_pre_hook(self._over) for one in own]
        if not isinstance(model, torch.jit.ScriptModule):  # which takes none any more
            self._handles.append(model.register_forward_pre_hook(_Listener(weakref.ref(self))))

    def close(self) -> None:
        """Looks no more."""
        while self._handles:
            self._handles.pop().remove()
        for one in (self._refused, self._kept, self._ticks):
            if one is not None:
                one.close()
        if self._look is not None and self._look.passes is not None:
            self._look.passes.close()

    def _before_step(self, *_: Any) -> None:
        """What the last step left is whole here; inside DeepSpeed's step it is not, whose groups step one by one."""
        if self._engine is not None and self._engine.global_steps == self._counted:
            return
        self._counted = None if self._engine is None else self._engine.global_steps
        self.steps += 1
        self._most, self._forwards = max(self._most, self._forwards), 0
        if self._refused is not None:
            self._refused.made = self.steps
        if (
            self._look is not None
            and self._ticks is not None
            and not self._others
            and self._ticks.step(IDLE)
            and not taken_over(self._look.scheduler)
        ):
            self._tell(self._look.idle("run.drift-ticks", unticked=self._ticks.since - 1))
        if not self.steps % self.every:
            self.look()

    def look(self) -> None:
        """Looks before the step that begins."""
        if self._look is None:
            return
        self.looks += 1
        self._look.steps = self.steps + (0 if self._refused is None else self._refused.refused)
        self._tell(self._given + self._look.look())

    def _over(self, optimizer: Any, *_: Any) -> None:
        if self._last.again(optimizer):
            over = RunFacts(restepped=type(optimizer).__name__)
            self._tell(findings_of((by_id()["run.stepped-again"],), over))

    def _due(self) -> bool:
        """Whether gradients that are stepped now are followed: of the first step, and of each that is looked at."""
        return self.steps == 1 or (self.steps > 0 and self.steps % self.every == 0)

    def _told(self, rule: str, **seen: Any) -> None:
        if self._look is not None:
            self._tell(self._look.idle(rule, **{name: self._look.named(value) for name, value in seen.items()}))

    def before_forward(self, model: nn.Module) -> None:
        """Counts a forward that trains; one that is many more than ever came before a step tells that none comes."""
        if not (model.training and torch.is_grad_enabled()):
            return
        self._forwards += 1
        many = self.steps and self._look is not None and self._forwards == max(IDLE, 4 * self._most)
        if many and self._look is not None and replaced(self._look.optimizers):
            self._tell(self._look.idle("run.drift-unstepped", unstepped=self._forwards))

    def _tell(self, looked: tuple[Finding, ...]) -> None:
        """Notes what is new, and acts on it."""
        seen = {(one.rule, one.where) for one in self.findings}
        found = tuple(one for one in looked if (one.rule, one.where) not in seen)
        self.findings += found
        if found and self.act is not None:
            self.act(found)
        elif found:
            report((evolve(one, what=f"In step {self.steps}: {one.what}") for one in found), every_rank=True)


@define(eq=False)
class _Listener:
    """Hangs on a model that is watched. In a copy of the model, or where it is pickled whole, it listens for nobody."""

    to: Callable[[], DriftWatch | None]

    def __call__(self, model: nn.Module, _: Any) -> None:
        if (watching := self.to()) is not None:
            watching.before_forward(model)

    def __reduce__(self) -> tuple[Callable[[], _Listener], tuple[()]]:
        return _deaf, ()


def _deaf() -> _Listener:
    return _Listener(_nobody)


def _nobody() -> None:
    return None


def watch(model: Any, optimizer: Any, scheduler: Any, *, every: int, share: float, act: Act | None) -> DriftWatch:
    """See ``pk.watch``."""
    if type(every) is not int or every < 1:
        raise ValueError(f"every is {every!r}; give how many optimizer steps lie between two looks, such as every=100")
    if not 0 < share <= 1:
        raise ValueError(f"share is {share!r}; give the part of the time that looks may take, such as share=0.001")
    made = DriftWatch(every=every, share=share, act=act)
    roots = {base.__module__.partition(".")[0] for base in type(model).__mro__ if base.__name__.endswith("Trainer")}
    if "transformers" in roots and not isinstance(model, nn.Module):
        _alone(optimizer, scheduler)
        model.add_callback(_of_transformers(made, model))
    elif (lightning := roots & {"lightning", "pytorch_lightning"}) and not isinstance(model, nn.Module):
        _alone(optimizer, scheduler)
        model.callbacks.append(
            _of_lightning(made, "lightning.pytorch" if "lightning" in lightning else lightning.pop())
        )
    elif not isinstance(model, nn.Module):
        raise TypeError(f"model is {said(model)}; pass the prepared torch.nn.Module, or a Trainer alone")
    elif optimizer is None:
        raise TypeError("optimizer is None; pass the one that steps: pk.watch(model, optimizer)")
    else:
        made.start(model, optimizer, scheduler)
    return made


def _alone(*given: Any) -> None:
    if any(one is not None for one in given):
        raise TypeError("a Trainer brings its own optimizer and scheduler; write pk.watch(trainer)")


def stepping(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch that steps: inside accelerate's wrapper, DeepSpeed's, or the first of several."""
    known = inner(optimizer)
    while not isinstance(known, torch.optim.Optimizer):
        if (inside := getattr(known, "optimizer", None)) is None:
            raise TypeError(
                f"optimizer is {said(optimizer)}, and no optimizer of torch stands inside; call audit.drift()"
            )
        known = inside
    return known


def _of_transformers(made: DriftWatch, trainer: Any) -> Any:
    """A ``TrainerCallback``: the model is prepared when training begins."""
    from transformers import TrainerCallback

    class DriftCallback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            made.start(trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            made.close()

    return DriftCallback()


def _of_lightning(made: DriftWatch, package: str) -> Any:
    """A ``Callback`` of the package that the Trainer comes from."""

    class DriftCallback(import_module(package).Callback):  # type: ignore[misc]  # known when it runs
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            configs = trainer.lr_scheduler_configs
            scheduler = configs[0].scheduler if len(configs) == 1 else None
            made.start(trainer.strategy.model or pl_module, list(trainer.optimizers), scheduler)

        def on_train_end(self, *_: Any) -> None:
            made.close()

    return DriftCallback()

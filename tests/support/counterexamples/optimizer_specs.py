"""Configs with facts on which rules fire: optimizers under their engine, schedulers, and what the config asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from prepkit.config import DDP, FSDP2, SGD, AdamW, Config, DeepSpeed, Group, Muon, OptimizerSpec
from prepkit.facts import SchedulerFacts
from prepkit.testing.tiny import tiny_facts, tiny_loader
from tests.support.counterexamples.build import Counterexample, optimized, ranks

_SGD_TOO = (SGD(names=("layers.*",)), AdamW())
_TWO = (Muon(names=("layers.*",)), AdamW())


def _asked(*specs: OptimizerSpec) -> Counterexample:
    return ranks(Config(optimizer=specs if len(specs) > 1 else specs[0]), world=1, optimizer=None)


def _on_old_torch(cfg: Config) -> Counterexample:
    facts = tiny_facts(optimizer=False)
    return cfg, evolve(facts, env=evolve(facts.env, torch="2.8.0"))


def _scheduled(name: str = "CosineAnnealingLR", **options: Any) -> Counterexample:
    scheduler = SchedulerFacts(name=name, drives_optimizer=True, **options)
    return ranks(Config(scheduler_ticks=4, total_steps=1000), world=1, scheduler=scheduler)


def _made_for(ticks: int) -> Counterexample:
    """A schedule of so many ticks beside a loader of 8 batches, on two ranks."""
    scheduler = SchedulerFacts(name="OneCycleLR", drives_optimizer=True, horizon=ticks)
    seen = tiny_facts(world=2, loader=tiny_loader(length=32, batch_size=4))
    return Config(engine=DDP()), evolve(seen, scheduler=scheduler)


COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "optimizer.under-engine": lambda: optimized(
        Config(engine=FSDP2()), name="Adafactor", module="transformers.optimization"
    ),
    "optimizer.closure": lambda: optimized(Config(accumulation=2), name="LBFGS", module="torch.optim.lbfgs"),
    "optimizer.newer-torch": lambda: _on_old_torch(Config(optimizer=_TWO)),
    "scheduler.metric": lambda: _scheduled("ReduceLROnPlateau", needs_metric=True),
    "scheduler.runs-out": lambda: _scheduled(horizon=1000),
    "scheduler.never-ends": lambda: _scheduled(horizon=16000),
    "scheduler.undivided": lambda: _made_for(16),
    "optimizer.several": lambda: ranks(
        Config(engine=DeepSpeed(stage=2, micro_batch=1), optimizer=_SGD_TOO), world=2, optimizer=None
    ),
    "optimizer.pattern": lambda: _asked(AdamW(groups=(Group(names=("*.bias", "*norm*"), weight_decay=0.0),))),
    "optimizer.matched-twice": lambda: _asked(
        AdamW(groups=(Group(names=("layers.*",), lr=1e-4), Group(names=("*.mlp.weight",), weight_decay=0.0)))
    ),
    "optimizer.empty": lambda: _asked(AdamW(), Muon()),
    "optimizer.unclaimed": lambda: _asked(Muon()),
    "optimizer.group-option": lambda: _asked(AdamW(groups=(Group(names=("norm.*",), momentum=0.9),))),
}
"""Rule id to a config and facts on which the rule fires."""

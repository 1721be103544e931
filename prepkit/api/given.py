"""Arguments of the public calls, checked before anything is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen

from prepkit import codec
from prepkit.config import Config, LoadWeights, OptimizerSpec
from prepkit.facts import Env, Facts
from prepkit.findings import PlanRejected
from prepkit.later import needs_torch
from prepkit.plan import Plan
from prepkit.rules import found
from prepkit.rules.rule import Rule


@frozen(kw_only=True, eq=False)
class Given:
    """Objects that a plan was built from."""

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    loaders: tuple[Any, ...] = ()


def a_plan(given: Any) -> Plan:
    """Return the plan. Raises ``TypeError`` for anything else."""
    if not isinstance(given, Plan):
        raise TypeError(f"plan is {given!r:.60}; give what pk.build_plan or pk.load returned")
    return given


def rules_of(given: Any) -> tuple[Rule, ...]:
    """Return the rules as a tuple. Raises ``TypeError`` for anything else."""
    if not isinstance(given, list | tuple) or not all(isinstance(rule, Rule) for rule in given):
        raise TypeError(f"rules is {given!r:.60}; give rules, such as rules=(*pk.rules.RULES, mine)")
    return tuple(given)


def loaders_of(given: Sequence[Any]) -> tuple[Any, ...]:
    """Return the loaders as a tuple. Raises ``TypeError`` for anything but a list or a tuple."""
    if not isinstance(given, list | tuple):
        raise TypeError(f"loaders is {type(given).__name__}; pass a list of loaders, such as loaders=[loader]")
    return tuple(given)


def with_spec(cfg: Config, optimizer: Any) -> tuple[Config, Any]:
    """Return the config, with the optimizer if that is a spec, and the live optimizer, if any. Checks the types."""
    cfg = codec.from_data(
        codec.to_data(cfg), Config, "config", "python"
    )  # types are checked here, so that rules can trust them
    asked = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not any(isinstance(one, OptimizerSpec) for one in asked):
        return cfg, optimizer
    if not all(isinstance(one, OptimizerSpec) for one in asked):
        raise TypeError("optimizer is a list of specs and optimizers; give specs alone, or optimizers alone")
    specs = asked if isinstance(optimizer, list | tuple) else optimizer
    if cfg.optimizer not in (None, specs):
        what = f"config says {cfg.optimizer}, the call says {specs}"
        raise PlanRejected((found("optimizer.two-places", "config.optimizer", what),))
    return evolve(cfg, optimizer=specs), None


def facts_of(
    cfg: Config, model: Any, optimizer: Any, scheduler: Any, loaders: tuple[Any, ...], env: Env | None
) -> Facts:
    """Observe the objects, or return the facts that were given instead of them."""
    if env is not None and not isinstance(env, Env):
        raise TypeError(f"env is {env!r:.60}; give pk.Env.declare(world_size=8, ...), or leave it out")
    if isinstance(model, Facts):
        if optimizer is not None or scheduler is not None or loaders:
            raise TypeError("facts already say what the optimizer, scheduler and loaders are; pass facts alone")
        return model if env is None else evolve(model, env=env)
    needs_torch("a plan for live objects")
    from prepkit.observe import observe

    how = cfg.weights if isinstance(cfg.weights, LoadWeights) else None
    return observe(model, optimizer=optimizer, scheduler=scheduler, loaders=loaders, env=env, checkpoint=how).facts

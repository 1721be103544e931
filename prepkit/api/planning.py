"""From a config and objects to findings and a plan; nothing is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from prepkit import codec, planner
from prepkit import rules as rule_table
from prepkit.api.given import Given, a_plan, facts_of, loaders_of, rules_of, with_spec
from prepkit.config import Config
from prepkit.facts import Env, Facts, parse_bytes
from prepkit.findings import Finding, PlanRejected
from prepkit.later import needs_torch
from prepkit.plan import Plan
from prepkit.planner.budget import Fit
from prepkit.rules import RULES
from prepkit.rules.rule import Rule


class ExampleInputs:
    """The inputs of one micro-batch, as the model is called: ``ExampleInputs(batch)``, ``ExampleInputs(**batch)``.

    On any device.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def inputs_of(given: Any) -> ExampleInputs:
    """Return the inputs. Raises ``TypeError`` for a batch that is not wrapped."""
    if not isinstance(given, ExampleInputs):
        name = type(given).__name__
        raise TypeError(
            f"example is {name}; write pk.ExampleInputs(batch), or ExampleInputs(**batch), as the model is called"
        )
    return given


def build_plan(
    cfg: Config,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    env: Env | None = None,
    rules: tuple[Rule, ...] = RULES,
    example: ExampleInputs | None = None,
) -> Plan:
    """Plan for a model; touches nothing.

    ``model`` is an ``nn.Module``, also on the meta device, or ``Facts``. ``optimizer`` is a torch optimizer, or a spec
    such as ``AdamW(lr=1e-3)`` that is created after wrapping; or a list of several, as ``scheduler`` may be.
    ``env`` None: the environment that is here. With an ``example``, the forward runs once on a copy without data, and
    what it does with sharded parameters is found too (``foreign_uses``).

    Raises ``PlanRejected`` with every finding, ``TypeError`` for objects of the wrong kind, and ``RuntimeError`` for a
    model whose forward cannot run on the example without values.

    >>> from prepkit.config import FSDP2, Mesh
    >>> from prepkit.testing.tiny import tiny_facts
    >>> plan = build_plan(Config(engine=FSDP2()), tiny_facts(world=4))
    >>> [type(planned.step).__name__ for planned in plan.steps][3:]
    ['ReleaseOptimizer', 'ShardUnits', 'RebindOptimizer']
    >>> try:
    ...     build_plan(Config(engine=FSDP2(), mesh=Mesh(shard=3)), tiny_facts(world=4))
    ... except PlanRejected as refused:
    ...     print(refused.findings[0])
    error mesh.not-world-size at config.mesh: replicate 1 x shard 3 = 3, but the world size is 4.
      fix: Write mesh=Mesh(replicate=1, shard=4) or Mesh(replicate=2, shard=2), or start as many processes ...
    """
    cfg, optimizer = with_spec(cfg, optimizer)
    rules = rules_of(rules)
    facts = facts_of(cfg, model, optimizer, scheduler, loaders_of(loaders), env)
    made = planner.plan(cfg, facts, rules).lash(_reject).unwrap()
    if example is not None:
        made = _tried(made, model, rules, example)
    if isinstance(model, Facts):
        return made
    codec.prepare(made)  # here, while no rank waits for another
    return evolve(
        made, target=Given(model=model, optimizer=optimizer, scheduler=scheduler, loaders=loaders_of(loaders))
    )


def check(
    cfg: Config,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    env: Env | None = None,
    rules: tuple[Rule, ...] = RULES,
) -> tuple[Finding, ...]:
    """List every finding, also those that ``cfg.overrides`` accepts. Arguments as in ``build_plan``.

    Findings about memory are added only if there is a plan: bytes are not known before.

    >>> from prepkit.config import FSDP2, Single
    >>> from prepkit.testing.tiny import tiny_facts
    >>> check(Config(engine=FSDP2()), tiny_facts(world=4))
    ()
    >>> [finding.rule for finding in check(Config(engine=Single()), tiny_facts(world=4))]
    ['mesh.single-many-ranks']
    """
    cfg, optimizer = with_spec(cfg, optimizer)
    facts = facts_of(cfg, model, optimizer, scheduler, loaders_of(loaders), env)
    rules = rules_of(rules)
    found = rule_table.check(cfg, facts, rules)
    return (*found, *planner.over_budget(cfg, facts, rules))


def fits(plan: Plan, memory: str | int, activations: str | int | None = None) -> Fit:
    """Check that the plan fits into ``memory`` per device, such as ``"80GiB"``; else find the smallest changes.

    ``activations`` is what one micro-batch takes, as ``pk.activations`` estimates it; None: it is not counted.

    >>> from prepkit.config import DDP
    >>> from prepkit.testing.tiny import tiny_facts
    >>> plan = build_plan(Config(engine=DDP()), tiny_facts(world=4))
    >>> bool(fits(plan, "80GiB"))
    True
    >>> fit = fits(plan, "3KB")
    >>> fit.verdict, fit.options[0].diff
    ('does not fit', ('engine=FSDP2() instead of DDP()',))
    """
    return planner.fits(a_plan(plan), parse_bytes(memory), None if activations is None else parse_bytes(activations))


def activations(plan: Plan, model: Any, example: ExampleInputs) -> int:
    """Estimate the bytes of one micro-batch on a rank, beside the model's states, without data or a device.

    Runs the model on the example, and its backward, on a copy without data, in the plan's dtypes and with its
    checkpointing. Raises ``RuntimeError`` for a model that cannot run without values, ``TypeError`` for bare inputs.
    """
    a_plan(plan)
    inputs_of(example)
    needs_torch("pk.activations")
    from prepkit.applying.rehearse.activations import activations as estimate

    return estimate(plan, model, *example.args, **example.kwargs)


def foreign_uses(plan: Plan, model: Any, example: ExampleInputs) -> tuple[Finding, ...]:
    """Find parameters of units that something outside the unit's forward computes with, where torch would fail.

    Runs the model on the example, on a copy without data. Empty where all is well, and under engines without units.
    Raises ``RuntimeError`` for a forward that fails, as one that multiplies unlike dtypes does (kernels that take any
    on the copy are not noticed), and where there are units for one that cannot run without values; ``TypeError`` for
    bare inputs.
    """
    inputs_of(example)
    needs_torch("pk.foreign_uses")
    from prepkit.applying.rehearse.activations import foreign_uses as find

    return find(plan, model, *example.args, **example.kwargs)


def _tried(made: Plan, model: Any, rules: tuple[Rule, ...], example: ExampleInputs) -> Plan:
    """Add findings of the forward that the config accepts. Raises ``PlanRejected`` for the others."""
    if isinstance(model, Facts):
        raise TypeError("facts have no forward to run the example through; give the model, or leave out the example")
    findings = foreign_uses(made, model, example)
    standing, overridden = rule_table.split(made.config, findings, rules)
    if standing:
        raise PlanRejected((*made.warnings, *standing))
    return evolve(made, overridden=(*made.overridden, *overridden)) if overridden else made


def _reject(findings: tuple[Finding, ...]) -> Any:
    raise PlanRejected(findings)

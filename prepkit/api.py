"""The public calls: thin over the planner and over ``live``, which is imported only when something live is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from attrs import evolve, frozen

from prepkit import codec, planner, rules
from prepkit.budget import Fit
from prepkit.codec import files
from prepkit.codec.diff import Change
from prepkit.codec.diff import diff as value_diff
from prepkit.config import Config, LoadWeights, OptimizerSpec
from prepkit.diagnosis import Audit
from prepkit.facts import Env, Facts, parse_bytes
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.rules import RULES
from prepkit.rules.rule import Rule

if TYPE_CHECKING:
    from prepkit.live.rehearse import Rehearsal
    from prepkit.live.training.prepared import Prepared

T = TypeVar("T", Plan, Attestation)


@frozen(kw_only=True, eq=False)
class Given:
    """The live objects that a plan was built from."""

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    loaders: tuple[Any, ...] = ()


class Example:
    """What the model is called with for one micro-batch: ``Example(batch)``, ``Example(**batch)``. On any device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def build_plan(
    cfg: Config,
    model: Any,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    env: Env | None = None,
    rules: tuple[Rule, ...] = RULES,
    example: Example | None = None,
) -> Plan:
    """The plan for a model; touches nothing.

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
    cfg, optimizer = _spec(cfg, optimizer)
    rules = _rules(rules)
    facts = _facts(cfg, model, optimizer, scheduler, _loaders(loaders), env)
    made = planner.plan(cfg, facts, rules).lash(_reject).unwrap()
    if example is not None:
        made = _tried(made, model, rules, example)
    if isinstance(model, Facts):
        return made
    codec.prepare(made)  # here, while no rank waits for another
    return evolve(made, target=Given(model=model, optimizer=optimizer, scheduler=scheduler, loaders=_loaders(loaders)))


def check(
    cfg: Config,
    model: Any,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    env: Env | None = None,
    rules: tuple[Rule, ...] = RULES,
) -> tuple[Finding, ...]:
    """Every finding, errors and warnings, also those that ``cfg.overrides`` accepts. Arguments as in ``build_plan``.

    What the rules about memory say comes only where there is a plan: bytes are not known before.

    >>> from prepkit.config import FSDP2, Single
    >>> from prepkit.testing.tiny import tiny_facts
    >>> check(Config(engine=FSDP2()), tiny_facts(world=4))
    ()
    >>> [finding.rule for finding in check(Config(engine=Single()), tiny_facts(world=4))]
    ['mesh.single-many-ranks']
    """
    cfg, optimizer = _spec(cfg, optimizer)
    facts = _facts(cfg, model, optimizer, scheduler, _loaders(loaders), env)
    rules = _rules(rules)
    found = _check(cfg, facts, rules)
    return (*found, *planner.over_budget(cfg, facts, rules))


def apply(
    plan: Plan,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] | None = None,
) -> Prepared:
    """Does what the plan says to the objects that it was built from, or to those given here, and verifies the outcome.

    Raises ``PlanRejected`` before anything is touched when the objects are not those of the plan, and
    ``live.ApplyHalted`` when a step fails: its ``halted`` says what stands and what was undone.
    """
    _plan(plan)
    from prepkit.live.apply import apply as act

    given = plan.target or Given(model=None)
    return act(
        plan,
        model=given.model if model is None else model,
        optimizer=given.optimizer if optimizer is None else optimizer,
        scheduler=given.scheduler if scheduler is None else scheduler,
        loaders=given.loaders if loaders is None else _loaders(loaders),
    )


def audit(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    env: Env | None = None,
) -> Audit:
    """What is wrong with objects that are ready to be trained, whoever has prepared them. Changes nothing.

    ``model`` is what the loop calls, wrappers included: DDP, FSDP, a DeepSpeed engine, what accelerate or a Trainer has
    made. ``optimizer`` may be a list. Call it on every rank, before the first step: ranks tell each other a few
    digests. ``env`` None: the process group that is here; with one the rules see that many ranks.

    Raises ``TypeError`` for objects of the wrong kind.
    """
    from prepkit.live.audit import audit as look

    return look(model, optimizer, scheduler, _loaders(loaders), env=env)


def rehearse(plan: Plan, model: Any, *, rank: int = 0) -> Rehearsal:
    """What real torch makes of the plan on one rank, on a meta copy in a process of its own."""
    _plan(plan)
    from prepkit.live.rehearse import rehearse as run

    return run(plan, model, rank=rank)


def fits(plan: Plan, memory: str | int, *, activations: str | int | None = None) -> Fit:
    """Whether the plan fits into ``memory`` per device, such as ``"80GiB"``; else the smallest changes that do.

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
    return planner.fits(_plan(plan), parse_bytes(memory), None if activations is None else parse_bytes(activations))


def activations(plan: Plan, model: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes that one micro-batch takes on a rank beside the model's states, estimated without data or a device.

    Runs ``model(*args, **kwargs)`` and its backward on a copy without data, in the plan's dtypes and with its
    checkpointing.
    Raises ``RuntimeError`` for a model that cannot run without values.
    """
    _plan(plan)
    from prepkit.live.rehearse.activations import activations as estimate

    return estimate(plan, model, *args, **kwargs)


def foreign_uses(plan: Plan, model: Any, *args: Any, **kwargs: Any) -> tuple[Finding, ...]:
    """Parameters of units that something outside the unit's forward computes with, where torch would fail.

    Runs ``model(*args, **kwargs)`` on a copy without data. Empty where all is well, and under engines without units.
    Raises ``RuntimeError`` for a model that cannot run without values.
    """
    from prepkit.live.rehearse.foreign_use import foreign_uses as find

    return find(plan, model, *args, **kwargs)


def save(value: Plan | Attestation, path: str) -> None:
    """Writes a plan or an attestation into a file, whole or not at all.

    Raises ``OSError`` where the folder cannot be written, and ``TypeError`` for anything else.

    >>> from prepkit.config import DDP
    >>> from prepkit.testing.tiny import tiny_facts
    >>> plan = build_plan(Config(engine=DDP()), tiny_facts(world=4))
    >>> save(plan, f"{folder}/plan.json")
    >>> load(f"{folder}/plan.json") == plan
    True
    >>> save(plan.facts, f"{folder}/facts.json")
    Traceback (most recent call last):
    TypeError: Facts has no file of its own; give a plan or an attestation
    """
    files.save(value, path)


def load(path: str) -> Any:
    """The ``Plan`` or ``Attestation`` in a file, whichever the file says it holds.

    Raises ``PlanRejected`` with the place for a damaged, foreign, newer or edited file.

    >>> try:
    ...     load(f"{folder}/absent.json")
    ... except PlanRejected as refused:
    ...     print(refused.findings[0].rule, "-", refused.findings[0].fix)
    codec.unreadable - give the path of a plan file
    """
    return files.load(path)


def show(
    value: Plan | Attestation | Audit | tuple[Finding, ...] | tuple[Change, ...], *, file: TextIO | None = None
) -> None:
    """Prints the whole page of a plan: steps, layout, tree, memory, traffic; or another of the values named.

    ``file`` None: to standard output. Raises ``TypeError`` for anything else.

    >>> from prepkit.config import Single
    >>> from prepkit.testing.tiny import tiny_facts
    >>> show(check(Config(engine=Single()), tiny_facts(world=4)))
    error mesh.single-many-ranks at env.world_size: 4 processes run, and Single() would train a copy in each ...
      fix: Write engine=DDP() or engine=FSDP2(), or start one process.
    1 error
    >>> show(42)
    Traceback (most recent call last):
    TypeError: int cannot be shown; give a plan, an attestation, an audit, findings, or the changes of pk.diff
    """
    from prepkit.render.text import text_of

    (file or sys.stdout).write(f"{text_of(value)}\n")


def diff(a: T, b: T) -> tuple[Change, ...]:
    """What turns plan ``a`` into plan ``b``, or attestation ``a`` into ``b``; empty when they are equal.

    Raises ``TypeError`` for a plan and an attestation.

    >>> from prepkit.config import FSDP2
    >>> from prepkit.testing.tiny import tiny_facts
    >>> a, b = (build_plan(Config(engine=FSDP2(reshard_after_forward=x)), tiny_facts(world=4)) for x in (True, False))
    >>> diff(a, a)
    ()
    >>> print(diff(a, b)[0])
    config.engine.reshard_after_forward: True -> False
    """
    if type(a) is not type(b):
        raise TypeError(f"{type(a).__name__} and {type(b).__name__} cannot be compared; give two of a kind")
    return value_diff(a, b)


_split = rules.split
_check: Callable[[Config, Facts, tuple[Rule, ...]], tuple[Finding, ...]] = rules.check


def _tried(made: Plan, model: Any, rules: tuple[Rule, ...], example: Example) -> Plan:
    """The plan, with what its forward has shown and the config accepts; ``PlanRejected`` for what it does not."""
    if isinstance(model, Facts):
        raise TypeError("facts have no forward to run the example through; give the model, or leave out the example")
    if not isinstance(example, Example):
        raise TypeError(f"example is {type(example).__name__}; write example=pk.Example(batch), as the model is called")
    findings = foreign_uses(made, model, *example.args, **example.kwargs)
    standing, overridden = _split(made.config, findings, rules)
    if standing:
        raise PlanRejected((*made.warnings, *standing))
    return evolve(made, overridden=(*made.overridden, *overridden)) if overridden else made


def _reject(findings: tuple[Finding, ...]) -> Any:
    raise PlanRejected(findings)


def _plan(given: Any) -> Plan:
    if not isinstance(given, Plan):
        raise TypeError(f"plan is {given!r:.60}; give what pk.build_plan or pk.load returned")
    return given


def _rules(given: Any) -> tuple[Rule, ...]:
    if not isinstance(given, list | tuple) or not all(isinstance(rule, Rule) for rule in given):
        raise TypeError(f"rules is {given!r:.60}; give rules, such as rules=(*pk.RULES, mine)")
    return tuple(given)


def _loaders(given: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(given, list | tuple):
        raise TypeError(f"loaders is {type(given).__name__}; pass a list of loaders, such as loaders=[loader]")
    return tuple(given)


def _spec(cfg: Config, optimizer: Any) -> tuple[Config, Any]:
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
        fix = "give the optimizer in one place"
        raise PlanRejected(
            (
                Finding(
                    rule="optimizer.two-places", severity=Severity.ERROR, where="config.optimizer", what=what, fix=fix
                ),
            )
        )
    return evolve(cfg, optimizer=specs), None


def _facts(cfg: Config, model: Any, optimizer: Any, scheduler: Any, loaders: tuple[Any, ...], env: Env | None) -> Facts:
    if env is not None and not isinstance(env, Env):
        raise TypeError(f"env is {env!r:.60}; give pk.Env.declare(world_size=8, ...), or leave it out")
    if isinstance(model, Facts):
        if optimizer is not None or scheduler is not None or loaders:
            raise TypeError("facts already say what the optimizer, scheduler and loaders are; pass facts alone")
        return model if env is None else evolve(model, env=env)
    from prepkit.live.observe import observe

    how = cfg.weights if isinstance(cfg.weights, LoadWeights) else None
    return observe(model, optimizer=optimizer, scheduler=scheduler, loaders=loaders, env=env, checkpoint=how).facts

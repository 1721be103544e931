"""Runs a plan on a meta copy of the model, as any rank of any number of ranks, in one process on a laptop.

The handlers are the real ones and so is torch; only the process group is torch's fake one, which carries no data.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import debug
from torch.nn import Module, Parameter
from torch.optim import SGD, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public door to its fake group

from prepkit.applying.handlers import ddp
from prepkit.applying.rehearse.meta import fake_twin, meta_copy, zero_twin
from prepkit.applying.step_kinds import KINDS, handlers
from prepkit.applying.verification import verify
from prepkit.codec import plan_from_text, plan_to_text
from prepkit.court import Court
from prepkit.findings import Finding
from prepkit.interpreter import Halted, Handler, interpret
from prepkit.objects import deepspeed
from prepkit.objects.state import LiveModel, TensorLayout, actual_layout, inspect
from prepkit.objects.target import Target
from prepkit.plan import Plan, Planned
from prepkit.plan.layout import ParamLayout
from prepkit.ranks import launcher
from prepkit.ranks.world import world
from prepkit.steps import BuildMesh, InitializeDeepSpeed, InitializeMSAMP, UpcastParameters, WrapDDP, WrapFSDP1


@frozen(kw_only=True)
class Rehearsal:
    """What torch made of the plan, as one rank sees it. Plain data."""

    rank: int
    world_size: int
    params: tuple[tuple[str, TensorLayout], ...]
    """Name and form of every parameter, in the order of the plan; names the plan does not know come last."""
    units: tuple[str, ...]
    """Paths of the modules that ``fully_shard`` made units, in module order."""
    slots: tuple[tuple[str, ...], ...]
    """Per group of the optimizer the names that its slots hold; ``""``: not a parameter of the model."""
    omitted: tuple[Skipped, ...]
    differences: tuple[Finding, ...]
    """What is not as the plan predicts; empty is the normal result."""
    halted: str = ""
    """The story of the step that failed; empty when all were done."""

    @property
    def fine(self) -> bool:
        """True if every step that can be rehearsed was done, and led to what the plan predicts."""
        return not self.halted and not self.differences

    def __str__(self) -> str:
        count = len(self.differences)
        what = "as planned" if self.fine else self.halted or f"{count} difference{'s' * (count > 1)} from the plan"
        head = f"rehearsed as rank {self.rank} of {self.world_size}: {what}"
        return "\n".join((head, *(f"  {line}" for line in (*self.differences, *self.omitted))))


class RehearsalFailed(RuntimeError):
    """The rehearsal itself could not be held; it says nothing about the plan."""


def rehearse(
    plan: Plan, model: Module, *, rank: int = 0, optimizer: Optimizer | None = None, timeout_s: float = 600.0
) -> Rehearsal:
    """Rehearses in a process of its own, so that neither the objects nor the process of the caller are touched.

    The model travels pickled, without data: its classes must be importable, and a script must have the usual
    ``if __name__ == "__main__"``. Raises ``RehearsalFailed`` where the model cannot travel, or the process dies or is
    not done after ``timeout_s`` seconds; ``ValueError`` for a rank that the plan does not have, or a model that arrives
    sharded.
    """
    _check_rank(plan, rank)
    request = _packed(plan, model, optimizer, rank)
    context = multiprocessing.get_context("spawn")  # a fork would inherit the caller's groups and locks
    ours, theirs = context.Pipe()
    process = context.Process(target=_stage, args=(theirs, request), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise RehearsalFailed(f"the rehearsal was not done after {timeout_s:.0f} s; give it more with timeout_s")
        result: Rehearsal | str = pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        raise RehearsalFailed(
            f"the rehearsal's process ended with exit code {process.exitcode} before it could answer; "
            "what it wrote to stderr says why"
        ) from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(result, str):
        raise RehearsalFailed(f"the rehearsal raised:\n{result}")
    return result


def _packed(plan: Plan, model: Module, optimizer: Optimizer | None, rank: int) -> bytes:
    try:
        return pickle.dumps((plan_to_text(plan), *meta_copy(model, optimizer), rank))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise RehearsalFailed(
            f"{type(model).__name__} cannot travel to a process of its own: {error}; define its classes and hooks at "
            "the top of a module, or call prepkit.applying.rehearse.rehearse_here in a process without a process group"
        ) from error


def _stage(wire: Connection, request: bytes) -> None:
    """Main function of the process that ``rehearse`` starts."""
    answer: Rehearsal | str
    try:
        text, model, optimizer, rank = pickle.loads(request)
        answer = rehearse_here(plan_from_text(text), model, rank=rank, optimizer=optimizer)
    except Exception:
        answer = traceback.format_exc()
    wire.send_bytes(pickle.dumps(answer))


def _check_rank(plan: Plan, rank: int) -> None:
    world = plan.world_size
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in a plan for {world} ranks; give one of 0 to {world - 1}")


def rehearse_here(plan: Plan, model: Module, *, rank: int = 0, optimizer: Optimizer | None = None) -> Rehearsal:
    """Rehearses in this process, which must have no process group: for many rehearsals in a row.

    Works on a meta copy; starts a fake default group and ends it. Raises ``RehearsalFailed`` where a group runs, and
    ``ValueError`` for a rank that the plan does not have, or a model that arrives sharded.
    """
    with staged(plan, model, rank=rank, optimizer=optimizer) as stage:
        differences = () if stage.halted else verify(stage.plan, stage.target, rehearsed=True).failed
        return _seen(plan, rank, inspect(stage.target), stage.omitted, differences, stage.halted)


@frozen(kw_only=True, eq=False)
class Staged:
    """What the steps of a rehearsal have made, while its fake group runs."""

    target: Target
    plan: Plan
    """The plan whose steps were done, each as it can be rehearsed."""
    omitted: tuple[Skipped, ...]
    halted: str
    """The story of the step that failed; empty when all were done."""


@contextmanager
def staged(plan: Plan, model: Module, *, rank: int = 0, optimizer: Optimizer | None = None) -> Iterator[Staged]:
    """Does the steps on a meta copy in this process, under a fake default group that ends with the block.

    Raises as ``rehearse_here`` does.
    """
    _check_rank(plan, rank)
    if world().running:
        raise RehearsalFailed("a process group runs in this process; call rehearse, which uses a process of its own")
    substituted, omitted = rehearsable(plan)
    flattens = any(isinstance(planned.step, WrapFSDP1) for planned in plan.steps)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if flattens else None
    real = any(isinstance(one.step, InitializeDeepSpeed) for one in plan.steps)  # DeepSpeed flattens real memory
    twin, follower = meta_copy(model, optimizer, zero_twin if real else fake_twin(mode) if mode else None)
    if plan.facts.optimizer is not None and follower is None:
        follower = _stand_in(plan, twin)
        why = f"SGD stands in for {plan.facts.optimizer.name}, which was not given"
        omitted = (*omitted, Skipped(index=-1, step="optimizer", why=why))
    target = Target(model=twin, optimizer=follower)
    _forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        table = _faked(mode) if mode else {**handlers(), WrapDDP: ddp.WITHOUT_VALUES}
        with launcher.same_local_rank():
            steps, court = tuple(planned.step for planned in substituted.steps), Court(accepted=plan.run.accepted)
            outcome = interpret(steps, table, target, judge=court.judged)
        halted = str(outcome) if isinstance(outcome, Halted) else ""
        yield Staged(target=target, plan=substituted, omitted=omitted, halted=halted)
    finally:
        dist.destroy_process_group()
        _forget_meshes()
        if real:
            deepspeed.forget_groups()
            deepspeed.give_back_linear()


def _forget_meshes() -> None:
    """Drops the layouts that torch has kept of DTensors: one mesh stands for all equal ones, also of other ranks."""
    for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        if clear := getattr(debug, name, None):  # the second kind is newer than torch 2.6
            clear()


def _faked(mode: FakeTensorMode) -> dict[type, Handler[Any, Target, Any]]:
    """The handlers, each acting on tensors without data; a mesh is made of real ones."""

    def within(do: Callable[[Any, Target], Any]) -> Callable[[Any, Target], Any]:
        def act(step: Any, target: Target) -> Any:
            with mode:
                return do(step, target)

        return act

    return {kind: own if kind is BuildMesh else evolve(own, do=within(own.do)) for kind, own in handlers().items()}


def _stand_in(plan: Plan, model: Module) -> Optimizer:
    """An optimizer whose slots hold what the plan's optimizer facts say, with state where there was some."""
    assert plan.facts.optimizer is not None, "the caller has asked"
    params = inspect(Target(model=model)).params
    groups = [
        {"params": [params[name] if name else Parameter(torch.empty(1, device="meta")) for name in group.slots]}
        for group in plan.facts.optimizer.groups
    ]
    made = SGD(groups, lr=0.0)
    for name in plan.facts.optimizer.stateful:
        made.state[params[name]] = {"momentum_buffer": torch.empty_like(params[name])}
    return made


def _seen(
    plan: Plan,
    rank: int,
    live: LiveModel,
    omitted: tuple[Skipped, ...],
    differences: tuple[Finding, ...],
    halted: str,
) -> Rehearsal:
    order = [layout.name for layout in plan.layout if layout.name in live.params]
    aliases = {name for group in plan.facts.model.ties for name in group}
    unknown = [name for name in live.params if name not in {*order, *aliases}]
    names = {id(live.params[name]): name for name in reversed((*order, *unknown))}
    optimizer = live.target.optimizer
    return Rehearsal(
        rank=rank,
        world_size=plan.world_size,
        params=tuple((name, actual_layout(live.params[name])) for name in (*order, *unknown)),
        units=live.units,
        slots=tuple(
            tuple(names.get(id(param), "") for param in group["params"])
            for group in (optimizer.param_groups if optimizer else ())
        ),
        omitted=omitted,
        differences=differences,
        halted=halted,
    )


@frozen(kw_only=True)
class Skipped:
    """A step of the plan that a rehearsal cannot run, or does not run as written."""

    index: int
    """Position among the plan's steps, from 0; -1: the optimizer, which is no step."""
    step: str
    """Step kind."""
    why: str

    def __str__(self) -> str:
        return f"not rehearsed: {self.step}: {self.why}"


def rehearsable(plan: Plan) -> tuple[Plan, tuple[Skipped, ...]]:
    """The plan with every step that a rehearsal can run, as it runs it, and what was left out or changed.

    Its layout is what that plan leads to: without the classes of packed weights, and without MS-AMP's dtypes.
    """
    kept: list[Planned] = []
    skipped: list[Skipped] = []
    for index, planned in enumerate(plan.steps):
        step, why = KINDS[type(planned.step)].rehearse(planned.step)
        if why:
            skipped.append(Skipped(index=index, step=type(planned.step).__name__, why=why))
        if step is not None:
            kept.append(evolve(planned, step=step))
    scaled = any(skip.step == InitializeMSAMP.__name__ for skip in skipped)
    # Packed weights lose their class on meta, where there are no bytes to unpack.
    layout = (
        param if param.cls == "DTensor" else evolve(param, cls="Parameter")
        for param in (_unscaled(plan) if scaled else plan.layout)
    )
    return evolve(plan, steps=tuple(kept), layout=tuple(layout)), tuple(skipped)


def _unscaled(plan: Plan) -> tuple[ParamLayout, ...]:
    """The layout as it is before MS-AMP, whose step is not rehearsed."""
    steps = (planned.step for planned in plan.steps)
    upcast = {name for step in steps if isinstance(step, UpcastParameters) for name in step.names}
    stored = {fact.name: "float32" if fact.name in upcast else fact.dtype for fact in plan.facts.model.params}
    return tuple(
        evolve(param, cls="Parameter", dtype=stored[param.name]) if param.cls == "ScalingParameter" else param
        for param in plan.layout
    )

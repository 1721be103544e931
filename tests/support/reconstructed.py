"""Steps of two plans, of which the second was told by an audit of what the first has prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve

from prepkit.config import FSDP1
from prepkit.plan import Plan
from prepkit.plan.layout import ParamLayout
from prepkit.resolve.units import ignored_params
from prepkit.steps import (
    Axis,
    BuildMesh,
    CheckpointModules,
    CreateOptimizer,
    DDPCommHook,
    MoveModel,
    ParallelizeModules,
    ParallelStyle,
    PowerSGDOptions,
    RegisterEntryPoints,
    ShardLoader,
    StartProcessGroup,
    Step,
    UpcastParameters,
    WrapDDP,
    WrapFSDP1,
    WrapLoader,
)

TRACELESS = (StartProcessGroup, UpcastParameters, MoveModel, RegisterEntryPoints, ShardLoader, WrapLoader)
"""Steps whose time-outs, values and patches no fact of a prepared model tells, or that change nothing twice."""


def differences(plan: Plan, told: Plan) -> str:
    """Steps, mesh and layout of the one that the other has not; empty: they are alike."""
    mine, theirs = ([*_steps(one), one.mesh if one.world_size > 1 else (), *_layout(one)] for one in (plan, told))
    return "" if mine == theirs else f"planned\n{_lines(mine)}\ntold\n{_lines(theirs)}"


def _layout(plan: Plan) -> Iterator[ParamLayout]:
    """How every parameter lies; the parameters of a rehearsal are torch's stand-ins."""
    for layout in plan.layout:
        yield evolve(layout, cls="Parameter") if layout.cls == "FakeTensor" else layout


def _lines(steps: list[Any]) -> str:
    return "\n".join(f"  {step}" for step in steps)


def _steps(plan: Plan) -> Iterator[Any]:
    for planned in plan.steps:
        step: Step = planned.step
        match step:
            case CreateOptimizer():
                yield _optimizer(step)
            case ParallelizeModules(styles=styles):
                yield sorted((path, *_style(one)) for one in styles for path in one.paths)
            case CheckpointModules(paths=paths):
                yield evolve(step, paths=tuple(sorted(paths)))
            case WrapFSDP1():
                engine = plan.config.engine
                assert isinstance(engine, FSDP1), "only its plan has the step"
                ignored = tuple(sorted(ignored_params(engine, plan.facts.model)))  # of tied ones either module says it
                yield evolve(step, sync_module_states=False, ignored=ignored)
            case WrapDDP(hook=DDPCommHook(options=PowerSGDOptions() as options) as hook):
                yield evolve(step, hook=evolve(hook, options=evolve(options, random_seed=0)))
            case BuildMesh(axes=(Axis(size=1),)):
                continue  # of either name
            case _ if not isinstance(step, TRACELESS):
                yield step


def _style(one: ParallelStyle) -> tuple[str, str, str]:
    """``replicate`` of an input that is divided along the sequence does what ``sequence`` does."""
    alike = one.style == "replicate" and one.input_layout == "sequence"
    return ("sequence" if alike else one.style), one.input_layout, one.output_layout


def _optimizer(step: CreateOptimizer) -> Any:
    """Class, and per parameter its options: which group says them is one."""
    base = {one.name: one.value for one in step.options}
    said = dict.fromkeys(step.names, base)
    for group in step.groups:
        said |= {name: base | {one.name: one.value for one in group.options} for name in group.names}
    return step.algorithm, step.index, sorted((name, sorted(options.items())) for name, options in said.items())

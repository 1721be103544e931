"""A config's setting followed into the call of a library: planned from facts, done on a real model, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from attrs import NOTHING, frozen
from returns.result import Failure
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from prepkit import planner, steps
from prepkit.applying.step_kinds import handlers
from prepkit.facts import ModelFacts
from prepkit.objects.target import Target
from prepkit.plan import Plan
from prepkit.ranks import launcher
from prepkit.steps import Step
from tests.support import library_doubles
from tests.support.dropped_setting import NotPlannedError, Setting
from tests.support.single_step import fake_group

# --- the model that the facts of the settings are about ---


def built(facts: ModelFacts) -> nn.Module:
    """Modules and parameters of ``tiny_model``, for real."""
    root = nn.Module()
    made = {"": root}
    for module in facts.modules[1:]:
        parent, _, name = module.path.rpartition(".")
        shapes = {param.name: param.shape for param in facts.params}
        made[module.path] = layer(facts.classes[module.cls].name, shapes.get(f"{module.path}.weight", ()))
        made[parent].add_module(name, made[module.path])
    for param in facts.params:
        root.get_parameter(param.name).requires_grad_(param.requires_grad)
        root.get_parameter(param.name).data = root.get_parameter(param.name).data.to(getattr(torch, param.dtype))
    return root


def layer(kind: str, shape: tuple[int, ...]) -> nn.Module:
    match kind:
        case "Embedding":
            return nn.Embedding(*shape)
        case "Linear":
            return nn.Linear(shape[1], shape[0], bias=False)
        case "LayerNorm":
            return nn.LayerNorm(shape)
        case "ModuleList":
            return nn.ModuleList()
        case _:
            return nn.Module()


# --- what a library is given ---


@frozen
class Library:
    """The call that a handler makes: recorded, and answered by what ``gives`` makes of its arguments."""

    module: str
    name: str
    positional: tuple[str, ...] = ("module",)
    gives: Callable[[list[dict[str, Any]]], Any] = lambda calls: calls[-1]["module"]
    group: bool = True
    """Whether a process group runs."""


class Hooked(nn.Module):
    """In the place of a DDP wrapper: records the hook that it is given."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.calls.append({"state": state, "hook": hook})


HERE = "prepkit.applying.handlers."
LIBRARIES: dict[type[Step], Library] = {
    steps.ShardUnits: Library(HERE + "fsdp2", "fully_shard"),
    steps.WrapFSDP1: Library(HERE + "fsdp1", "FullyShardedDataParallel"),
    steps.WrapDDP: Library("torch.nn.parallel", "DistributedDataParallel", gives=Hooked),
    steps.CreateGradScaler: Library(HERE + "gradients", "GradScaler", (), lambda calls: None),
    steps.CompileModules: Library("torch.nn.Module", "compile"),
    steps.CheckpointModules: Library(HERE + "checkpointing", "checkpoint_wrapper", ("module", "impl")),
    steps.ConvertFP8Linears: Library("torchao.float8", "convert_to_float8_training"),
    steps.ParallelizeModules: Library(HERE + "tensor_parallel", "parallelize_module", ("module", "mesh", "style")),
    steps.BuildMesh: Library(HERE + "process_group", "init_device_mesh", ("device", "sizes"), lambda calls: None),
    steps.StartProcessGroup: Library(
        "torch.distributed", "init_process_group", ("backend",), lambda calls: None, group=False
    ),
    steps.InitializeMSAMP: Library(
        "msamp", "initialize", ("model", "optimizer"), lambda calls: (calls[-1]["model"], calls[-1]["optimizer"])
    ),
    steps.MoveModel: Library(
        "prepkit.ranks.launcher", "bind", ("device",), lambda calls: torch.device("cpu"), group=False
    ),
    steps.InitializeDeepSpeed: Library(
        "deepspeed", "initialize", (), lambda calls: (calls[-1]["model"], None, None, None)
    ),
}
"""By kind of step."""


def given(setting: Setting, kind: type[Step]) -> list[dict[str, Any]]:
    """Arguments of each call of the library, with modules and parameters as their names."""
    plan = planned(setting)
    step: Any = next((one.step for one in plan.steps if type(one.step) is kind), None)
    if step is None:
        raise NotPlannedError(f"the plan has no {kind.__name__}")
    library, calls, model = LIBRARIES[kind], [], built(plan.facts.model)  # type: ignore[var-annotated]  # a list of calls
    named = {id(thing): name for name, thing in (*model.named_modules(), *model.named_parameters())}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def record(*args: Any, **options: Any) -> Any:
        calls.append(dict(zip(library.positional, args, strict=True)) | options)
        return library.gives(calls)

    world = plan.facts.env.world_size
    with fake_group(world) if library.group else nullcontext(), pytest.MonkeyPatch.context() as patch:
        mesh = mesh_of(plan)
        if kind is steps.InitializeMSAMP:
            library_doubles.msamp(patch)
        patch.setattr(launcher, "bind", lambda device: torch.device("cpu"))
        if kind is steps.ShardUnits:  # torch pins host memory only beside an accelerator
            patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(owner(library.module), library.name, record)
        handlers()[kind].do(step, Target(model=model, optimizer=optimizer, mesh=mesh))
    return [{name: by_name(value, named) for name, value in call.items()} for call in calls]


def done(setting: Setting, *kinds: type[Step]) -> Target:
    """The target after the steps of these kinds, with a shuffled loader of 63 samples in batches of 4."""
    plan, model = planned(setting), built(setting.facts.model)
    data = DataLoader(TensorDataset(torch.arange(63.0)), batch_size=4, shuffle=True)
    target = Target(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loaders=[data])
    with fake_group(plan.facts.env.world_size):
        for one in plan.steps:
            if type(one.step) in kinds:
                handlers()[type(one.step)].do(one.step, target)
    return target


def planned(setting: Setting) -> Plan:
    made = planner.plan(setting.asked, setting.facts)
    if isinstance(made, Failure):
        raise NotPlannedError("\n".join(str(one) for one in made.failure()))
    return made.unwrap()


def mesh_of(plan: Plan) -> Any:
    axes = next((one.step.axes for one in plan.steps if isinstance(one.step, steps.BuildMesh)), ())
    running = torch.distributed.is_initialized()
    sizes, names = tuple(axis.size for axis in axes), tuple(axis.name for axis in axes)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names) if axes and running else None


def owner(name: str) -> Any:
    """A module, or a class in one."""
    return nn.Module if name == "torch.nn.Module" else import_module(name)


def by_name(value: Any, named: dict[int, str]) -> Any:
    if isinstance(value, list | set | tuple):
        return [by_name(one, named) for one in value]
    return named.get(id(value), value)


def at(value: Any, place: str) -> Any:
    """Follow indices, keys and attributes; ``NOTHING`` where there is none."""
    for name in place.split("."):
        if isinstance(value, list | tuple):
            value = value[int(name)] if int(name) < len(value) else NOTHING
        else:
            value = value.get(name, NOTHING) if isinstance(value, dict) else getattr(value, name, NOTHING)
    return value

"""torch ``parallelize_module``: layers divided over the tensor-parallel ranks, one axis of the mesh."""

from __future__ import annotations

import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Embedding, Linear, Module, Parameter

from prepkit.applying.handlers import problems
from prepkit.court import refused
from prepkit.findings import RunRefused
from prepkit.interpreter import Handler
from prepkit.objects import names, param_extras
from prepkit.objects.activation_placements import PLACEMENTS
from prepkit.objects.target import Target
from prepkit.ranks.agree import Disagreement, agree
from prepkit.steps import ParallelizeModules, ParallelStyle

SENDS_NOTHING: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in inspect.signature(parallelize_module).parameters else {}
)
"""What tells torch that every rank has the values. torch 2.6 cannot be told, and sends rank 0's, which are the same."""

SAMPLE = 1024
"""Elements of each parameter that ranks compare."""


def parallelize_ready(step: ParallelizeModules, target: Target) -> problems.Problems:
    """Everything that torch's styles refuse must be found here: there is no way back."""
    modules, params = names.named_modules(target.model), names.named_parameters(target.model)
    paths = [path for style in step.styles for path in style.paths]
    layers = [path for style in step.styles if style.style in ("colwise", "rowwise") for path in style.paths]
    odd = (path for path in layers if path in modules and not isinstance(modules[path], Linear | Embedding))
    what = "neither a Linear nor an Embedding, so it has no rows and columns to cut"
    return (
        *problems.absent("module", paths, modules),
        *problems.told("tensor.not-a-layer", odd, what),
        *problems.sharded(params, "cut or sharded already"),
        *problems.with_gradient(params, params),
    )


def parallelize_do(step: ParallelizeModules, target: Target) -> None:
    """Every rank keeps its shard of the weights that it has: nothing is sent, but for a comparison of samples.

    Raises ``RuntimeError`` where the ranks hold different weights, before anything is changed, and where a module
    cannot be parallelized, with the number of those that are.
    """
    mesh = _axis(step, target)
    target.together()  # the comparison is a collective
    _compare(target)
    ties, kept = _ties(target.model), param_extras.every_attribute(target.model)
    modules, done = names.named_modules(target.model), 0
    for style in step.styles:
        for path in style.paths:
            try:
                _parallelize(modules[path], style, mesh)
            except Exception as error:
                what = f"could not be cut {style.style} ({done} cut before it)"
                raise problems.step_refused(f"module {problems.listed([path])}", what, error) from error
            done += 1
    _tie(target.model, ties)
    param_extras.carry_over(target.model, kept)


def _axis(step: ParallelizeModules, target: Target) -> DeviceMesh:
    mesh = target.mesh
    if mesh is None or step.axis not in (mesh.mesh_dim_names or ()):
        raise problems.no_mesh(f"cut over, with an axis {step.axis!r}")
    return mesh[step.axis]


def _parallelize(module: Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    input_layout, output_layout = PLACEMENTS[style.input_layout], PLACEMENTS[style.output_layout]
    match style.style:
        case "colwise":
            colwise = ColwiseParallel(input_layouts=input_layout, output_layouts=output_layout)
            parallelize_module(module, mesh, colwise, **SENDS_NOTHING)
        case "rowwise":
            rowwise = RowwiseParallel(input_layouts=input_layout, output_layouts=output_layout)
            parallelize_module(module, mesh, rowwise, **SENDS_NOTHING)
        case "sequence" | "replicate":
            inside = PLACEMENTS["sequence"] if style.style == "sequence" else input_layout
            before, after = partial(_distribute_input, input_layout, inside), partial(_collect_output, output_layout)
            distribute_module(module, mesh, _replicate, _hook(before), _hook(after))
    if isinstance(module, Embedding):
        module.register_forward_hook(_wait_for_output)
    for param in module.parameters(recurse=False):
        if isinstance(param, DTensor) and param.requires_grad:
            param.register_hook(partial(_place_gradient, tuple(param.placements)))  # type: ignore[no-untyped-call]  # torch


def _replicate(name: str, module: Module, mesh: DeviceMesh) -> None:
    """Sends nothing and leaves frozen what is frozen; torch's ``SequenceParallel`` would make it trainable."""
    del name
    for key, param in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(param.detach(), mesh, [Replicate()], **SENDS_NOTHING)
        module.register_parameter(key, Parameter(whole, requires_grad=param.requires_grad))


def _hook(act: Callable[[Any, DeviceMesh], Any]) -> Callable[[Module, Any, DeviceMesh], Any]:
    """With the three parameters by which ``distribute_module`` knows how to call it."""

    def hook(module: Module, values: Any, mesh: DeviceMesh) -> Any:
        del module
        return act(values, mesh)

    return hook


def _distribute_input(
    arriving: Placement, inside: Placement, inputs: tuple[Any, ...], mesh: DeviceMesh
) -> tuple[Any, ...]:
    first, *others = inputs
    if not isinstance(first, DTensor):
        first = DTensor.from_local(first, mesh, [arriving], run_check=False)
    return (first.redistribute(placements=[inside]), *others)


def _collect_output(leaving: Placement, output: Any, mesh: DeviceMesh) -> Any:
    del mesh
    return output.redistribute(placements=[leaving]).to_local() if isinstance(output, DTensor) else output


def _wait_for_output(module: Module, inputs: Any, output: Any) -> Any:
    """A plain tensor for the block behind: what torch still waits for, a block compiled by itself cannot take."""
    del module, inputs
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def _place_gradient(placements: tuple[Placement, ...], grad: Tensor) -> Tensor:
    """The gradient as its parameter lies: torch leaves a sharded vocabulary's whole, and a norm's as partial sums."""
    if isinstance(grad, DTensor) and tuple(grad.placements) != placements:
        return grad.redistribute(placements=placements)
    return grad


def _ties(model: Module) -> list[list[str]]:
    """All names of each parameter."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, param in names.all_parameter_names(model).items():
        names_of[id(param)].append(name)
    return list(names_of.values())


def _tie(model: Module, ties: Iterable[list[str]]) -> None:
    """One parameter again under all names of each tie: torch has given every module a shard of its own."""
    modules = {site.path: site.module for site in names.sites(model)}
    params = names.all_parameter_names(model)
    for first, *others in ties:
        for name in others:
            path, _, key = name.rpartition(".")
            if params[name] is not params[first] and _placements(params[name]) != _placements(params[first]):
                raise refused("tensor.tie-broken", name, f"was one parameter with {first}, and is cut differently")
            modules[path].register_parameter(key, params[first])


def _placements(param: Tensor) -> tuple[Placement, ...] | None:
    return tuple(param.placements) if isinstance(param, DTensor) else None


def _compare(target: Target) -> None:
    """Shards of different weights would make a model that nobody has trained (pain 11)."""
    params = names.named_parameters(target.model).items()
    digests = tuple((name, _digest(param)) for name, param in params if not param.is_meta)
    try:
        agree(digests)
    except Disagreement as error:
        differing = [difference.name for difference in error.differences]
        told = problems.told("run.ranks-values", differing, "the ranks hold different weights")
        if standing := target.judge(told):
            raise RunRefused(standing) from None


def _digest(param: Tensor) -> str:
    flat = param.detach().flatten()
    sample = flat[:: max(1, flat.numel() // SAMPLE)].contiguous().cpu()
    return hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest()


PARALLELIZE: Handler[ParallelizeModules, Target, None] = Handler(ready=parallelize_ready, do=parallelize_do)

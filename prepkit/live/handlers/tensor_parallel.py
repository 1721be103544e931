"""torch ``parallelize_module``: layers cut over one axis of the mesh."""

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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Embedding, Linear, Module, Parameter

from prepkit.live.handlers import messages
from prepkit.live.interpreter import Handler
from prepkit.live.model import names
from prepkit.live.model.target import Target
from prepkit.live.ranks.agree import Disagreement, agree
from prepkit.steps import ParallelizeModules, ParallelStyle

PLACES: dict[str, Placement] = {
    "replicate": Replicate(),
    "features": Shard(-1),
    "heads": Shard(-2),
    "sequence": Shard(1),
}
"""How an activation is cut, in torch's words."""

SENDS_NOTHING: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in inspect.signature(parallelize_module).parameters else {}
)
"""What tells torch that every rank has the values. torch 2.6 cannot be told, and sends rank 0's, which are the same."""

SAMPLE = 1024
"""Elements of each parameter that ranks compare."""


def parallelize_ready(step: ParallelizeModules, target: Target) -> tuple[str, ...]:
    """Everything that torch's styles refuse must be found here: there is no way back."""
    there, held = names.named_modules(target.model), names.named_parameters(target.model)
    paths = [path for cut in step.styles for path in cut.paths]
    found = messages.absent("module", paths, there)
    layers = [path for cut in step.styles if cut.style in ("colwise", "rowwise") for path in cut.paths]
    if odd := [path for path in layers if path in there and not isinstance(there[path], Linear | Embedding)]:
        found += (f"{messages.listed(odd)}: neither a Linear nor an Embedding, so it has no rows and columns to cut",)
    if cut := [name for name, param in held.items() if isinstance(param, DTensor)]:
        found += (f"{messages.listed(cut)}: cut or sharded already; apply to a model that was not prepared",)
    return found + messages.with_gradient(held, held)


def parallelize_do(step: ParallelizeModules, target: Target) -> None:
    """Every rank keeps its part of the weights that it has: nothing is sent, but for a comparison of samples.

    Raises ``RuntimeError`` where the ranks hold different weights, before anything is changed, and where a module
    cannot be cut, with the number of those that are.
    """
    mesh = _axis(step, target)
    target.together()  # the comparison is a collective
    _compare(target.model)
    ties = _ties(target.model)
    there, done = names.named_modules(target.model), 0
    for cut in step.styles:
        for path in cut.paths:
            try:
                _cut(there[path], cut, mesh)
            except Exception as error:
                raise RuntimeError(
                    f"module {messages.listed([path])} could not be cut {cut.style} ({done} cut before it): {error}"
                ) from error
            done += 1
    _tie(target.model, ties)


def _axis(step: ParallelizeModules, target: Target) -> DeviceMesh:
    mesh = target.mesh
    if mesh is None or step.axis not in (mesh.mesh_dim_names or ()):
        raise RuntimeError(f"there is no device mesh with an axis {step.axis!r}; BuildMesh has to come before")
    return mesh[step.axis]


def _cut(module: Module, cut: ParallelStyle, mesh: DeviceMesh) -> None:
    takes, gives = PLACES[cut.input_layout], PLACES[cut.output_layout]
    match cut.style:
        case "colwise":
            style = ColwiseParallel(input_layouts=takes, output_layouts=gives)
            parallelize_module(module, mesh, style, **SENDS_NOTHING)
        case "rowwise":
            parallelize_module(
                module, mesh, RowwiseParallel(input_layouts=takes, output_layouts=gives), **SENDS_NOTHING
            )
        case "sequence" | "replicate":
            works = PLACES["sequence"] if cut.style == "sequence" else takes
            arrive, leave = partial(_arrive, takes, works), partial(_leave, gives)
            distribute_module(module, mesh, _replicate, _hook(arrive), _hook(leave))
    if isinstance(module, Embedding):
        module.register_forward_hook(_wait)
    for param in module.parameters(recurse=False):
        if isinstance(param, DTensor) and param.requires_grad:
            param.register_hook(partial(_settle, tuple(param.placements)))  # type: ignore[no-untyped-call]  # torch


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


def _arrive(takes: Placement, works: Placement, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    first, *others = inputs
    if not isinstance(first, DTensor):
        first = DTensor.from_local(first, mesh, [takes], run_check=False)
    return (first.redistribute(placements=[works]), *others)


def _leave(gives: Placement, output: Any, mesh: DeviceMesh) -> Any:
    del mesh
    return output.redistribute(placements=[gives]).to_local() if isinstance(output, DTensor) else output


def _wait(module: Module, inputs: Any, output: Any) -> Any:
    """A plain tensor for the block behind: what torch still waits for, a block compiled by itself cannot take."""
    del module, inputs
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def _settle(placements: tuple[Placement, ...], grad: Tensor) -> Tensor:
    """The gradient as its parameter lies: torch leaves that of a cut vocabulary whole, and that of a norm in parts."""
    if isinstance(grad, DTensor) and tuple(grad.placements) != placements:
        return grad.redistribute(placements=placements)
    return grad


def _ties(model: Module) -> list[list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for name, param in names.all_parameter_names(model).items():
        found[id(param)].append(name)
    return [group for group in found.values() if len(group) > 1]


def _tie(model: Module, ties: Iterable[list[str]]) -> None:
    """One parameter again under all names of each tie: torch has given every module a part of its own."""
    there = {site.path: site.module for site in names.sites(model)}
    every = names.all_parameter_names(model)
    for first, *others in ties:
        for name in others:
            path, _, key = name.rpartition(".")
            if every[name] is not every[first] and _lies(every[name]) != _lies(every[first]):
                raise RuntimeError(f"{name} and {first} were one parameter and are cut differently; plan again")
            there[path].register_parameter(key, every[first])


def _lies(param: Tensor) -> tuple[Placement, ...] | None:
    return tuple(param.placements) if isinstance(param, DTensor) else None


def _compare(model: Module) -> None:
    """Parts of different weights would make a model that nobody has trained (pain 11)."""
    held = names.named_parameters(model).items()
    digests = tuple((name, _digest(param)) for name, param in held if not param.is_meta)
    try:
        agree(digests)
    except Disagreement as error:
        odd = messages.listed([difference.name for difference in error.differences])
        raise RuntimeError(
            f"the ranks hold different weights in {odd}; seed them alike before building the model, "
            "or load the same checkpoint on all of them"
        ) from None


def _digest(param: Tensor) -> str:
    flat = param.detach().flatten()
    some = flat[:: max(1, flat.numel() // SAMPLE)].contiguous().cpu()
    return hashlib.sha256(some.view(torch.uint8).numpy().tobytes()).hexdigest()


PARALLELIZE: Handler[ParallelizeModules, Target, None] = Handler(ready=parallelize_ready, do=parallelize_do)

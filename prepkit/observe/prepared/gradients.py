"""Gradients as an optimizer is about to step them: one look and one verdict, for the audit and for the first step.

Each gradient is seven numbers on a rank. How they travel is the caller's affair: the loop sends the smallest and the
largest over the ranks with its one exchange, the audit those of every rank with its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Module, ModuleDict, ModuleList, Parameter
from torch.nn.parallel import DistributedDataParallel

from prepkit.facts.window import GradientFacts
from prepkit.objects import fsdp1_flat, names
from prepkit.objects.deepspeed import zero_stage
from prepkit.objects.local_part import local
from prepkit.observe.prepared.averaging import prepared_params
from prepkit.observe.prepared.optimizers import inner
from prepkit.ranks.world import ranks_of, world

TOLERANCE = 1e-2
"""Relative difference between gradients of replicas that sums in another order may make."""

HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""Where numbers are told, whatever the defaults of the process are."""
NUMBERS = 7
"""Of each gradient: missing, there, not finite, misplaced, its largest absolute value, its ``tilt``, and whether this
rank steps the parameter."""

_WHOLE = frozenset({"ddp", "hook"})
"""What averages a gradient and leaves it whole on every rank."""

Replicas = list[tuple[Any, frozenset[str]]]
"""Groups of ranks, None for all, with the parameters of which each rank of the group holds the same."""

Spread = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""A group of ranks and this rank's rows, to the smallest and the largest of each number over the group."""


@frozen(kw_only=True)
class Gradient:
    """What this rank knows of the gradient of one parameter."""

    name: str
    """Canonical name of the parameter."""
    missing: bool
    """True if it has none, though this rank holds some of the parameter's elements."""
    largest: Tensor | None
    """The largest absolute value of this rank's part, a scalar; None where there is no part, or it was not seen."""
    tilt: Tensor | None = None
    """The sum of this rank's part, divided by the root of its number of elements; None: it was not seen."""
    misplaced: bool = False
    """True if it has not the parameter's dtype.

    An optimizer takes its part of one that is whole, as torch gives it of an embedding that is cut by rows.
    """
    optimizer: int | None = 0
    """Number of the optimizer that steps the parameter; None: nobody does."""


def gradients(model: Module, optimizers: Iterable[Any], *, values: bool = True) -> Iterator[Gradient]:
    """The gradients of all trained parameters, in the order of the model; ``values``: else only whether they are there.

    Under FSDP1 a rank holds a shard of each flat parameter, in which a named one may have no element.
    """
    steps: dict[int, int] = {}
    for at, one in enumerate(map(inner, optimizers)):
        for param in (param for group in one.param_groups for param in group["params"]):
            steps.setdefault(id(param), at)
    sharded = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    shards = fsdp1_flat.flat_shards(model) if sharded else {}
    for name, param in names.named_parameters(model).items():
        shard = shards.pop(name, None)
        holder = param if shard is None or shard.original else shard.flat
        if "_flat_param" not in name and holder.requires_grad:
            here = shard is None or shard.last > shard.first
            yield _of(name, holder, steps.get(id(holder)), here=here, values=values)
    for name, shard in shards.items():  # of which nothing but the flat parameter is left
        if shard.flat.requires_grad:
            yield _of(name, shard.flat, steps.get(id(shard.flat)), here=shard.last > shard.first, values=values)


def as_they_came(found: Iterable[Gradient], awaited: Container[str]) -> Iterator[Gradient]:
    """The gradients as backward has left them, before DDP was given zeros for those that it waited for."""
    return (evolve(one, missing=True, largest=None, tilt=None) if one.name in awaited else one for one in found)


def _of(name: str, param: Parameter, optimizer: int | None, *, here: bool, values: bool) -> Gradient:
    grad = param.grad
    if grad is None:
        return Gradient(name=name, missing=here and local(param).numel() > 0, largest=None, optimizer=optimizer)
    if not values:
        there = torch.zeros((), **HOST) if here and local(param).numel() else None
        return Gradient(name=name, missing=False, largest=there, optimizer=optimizer)
    part = _values(local(grad).detach())
    misplaced = grad.dtype != param.dtype
    summed = not isinstance(grad, DTensor) or not any(one.is_partial() for one in grad.placements)
    if not (summed and part.numel()) or part.is_meta:  # the optimizer adds up what ranks have of it
        return Gradient(name=name, missing=False, largest=None, misplaced=misplaced, optimizer=optimizer)
    real = torch.view_as_real(part) if part.is_complex() else part
    return Gradient(
        name=name,
        missing=False,
        largest=part.abs().max().float(),
        tilt=real.sum(dtype=torch.float32) / math.sqrt(part.numel()),
        misplaced=misplaced,
        optimizer=optimizer,
    )


def _values(gradient: Tensor) -> Tensor:
    """The numbers that are there: of a sparse gradient (``nn.Embedding(sparse=True)``) those of its rows."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def rows(looked: Sequence[Gradient]) -> Tensor:
    """What a rank tells of its gradients: ``NUMBERS`` rows of float32 on the host. Each device is waited for once."""
    found = torch.zeros(NUMBERS, len(looked), **HOST)
    seen = [at for at, one in enumerate(looked) if one.largest is not None]
    pairs = [(one.largest, one.tilt) for one in looked if one.largest is not None]
    if seen:
        none = torch.zeros_like(pairs[0][0])
        flat = [none if value is None else value for pair in pairs for value in pair]
        largest, tilt = torch.stack(flat).float().cpu().view(-1, 2).unbind(1)
        found[1, seen], found[2, seen] = 1.0, (~torch.isfinite(largest)).float()
        found[4, seen], found[5, seen] = largest.nan_to_num(0, 0, 0), tilt.nan_to_num(0, 0, 0)
    found[0] = torch.tensor([float(one.missing) for one in looked], **HOST)
    found[3] = torch.tensor([float(one.misplaced) for one in looked], **HOST)
    found[6] = torch.tensor([float(one.optimizer is not None) for one in looked], **HOST)
    return found


def told(looked: Sequence[Gradient]) -> dict[str, list[float]]:
    """Name to its numbers, as they are gathered."""
    return dict(zip((one.name for one in looked), rows(looked).T.tolist(), strict=True))


def judged_alike(
    looked: Sequence[Gradient], model: Module, everyone: Sequence[dict[str, list[float]]], *, scaled: bool
) -> GradientFacts:
    """As ``judged``, from what every rank has told. What one of them does not train is compared with nothing.

    Where some ranks step a parameter and others do not, as where each owns a part of the optimizer, gradients count on
    those that step it alone.
    """
    absent = [0.0] * NUMBERS
    table = torch.tensor([[own.get(one.name, absent) for one in looked] for own in everyone], **HOST)
    table = table.reshape(len(everyone), len(looked), NUMBERS).transpose(1, 2)
    steps = table[:, 6]
    divided = steps.amin(0) < steps.amax(0)
    table[:, 0] *= torch.where(divided, steps, torch.ones_like(steps))
    own = rows(looked)
    own[0] *= torch.where(divided, own[6], torch.ones_like(own[6]))
    apart = _named(looked, divided)
    common = frozenset(one.name for one in looked if all(one.name in told for told in everyone)) - set(apart)

    def spread(group: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        ranks = ranks_of(group)
        chosen = table[list(ranks.members)] if ranks.size < len(everyone) else table
        return chosen.amin(0), chosen.amax(0)

    found = [*replicas(model), (None, _bare(model))]  # which somebody may have averaged by hand
    groups = [(group, alike & common) for group, alike in found] if len(everyone) > 1 else []
    lacks = tuple(rank for rank, yes in enumerate(table[:, 0].any(1).tolist()) if yes)
    return evolve(judged(looked, own, model, groups, spread, scaled=scaled), divided=apart, awaited_on=lacks)


def judged(
    looked: Sequence[Gradient],
    own: Tensor,
    model: Module,
    groups: Replicas,
    spread: Spread,
    *,
    reduced: bool = True,
    scaled: bool,
) -> GradientFacts:
    """Return what the rows of all ranks say of the gradients; ``own`` are this rank's. The same on every rank.

    ``reduced``: replicas hold what is averaged already, and so the same. ``scaled``: an overflow of float16 is
    expected, and the scaler's affair. Collective where replicas are some of the ranks, which tell the others.
    """
    _, most = spread(None, own)
    missing, there, spoiled, misplaced, largest, _, _ = most.reshape(NUMBERS, -1)
    some = missing * there if zero_stage(model) != 0 else missing * 0  # stage 0 puts zeros where there is none
    far = torch.zeros(len(looked), dtype=torch.bool)
    compared: set[str] = set()
    for group, alike in groups if reduced else ():
        chosen = torch.tensor([one.name in alike for one in looked], dtype=torch.bool)
        if chosen.any():
            compared |= {one.name for one in looked if one.name in alike}
            far |= chosen & _far(*spread(group, own))
    stepped = torch.tensor([one.optimizer is not None for one in looked], dtype=torch.bool)
    far &= ~some.bool() & stepped
    parted = _named(looked, far)
    if reduced and any(ranks_of(group).size < world().size for group, _ in groups):
        parted = tuple(dict.fromkeys(name for told in world().gather(parted) for name in told))
    missed = {one.name: one for one, yes in zip(looked, missing.tolist(), strict=True) if yes}
    return GradientFacts(
        stepped=int(stepped.sum()),
        missing=_named(looked, missing * stepped),
        awaited=tuple(missed),
        spoiled=() if scaled else _named(looked, spoiled),
        zero=bool(there[stepped].any()) and not bool((largest + spoiled)[stepped].any()),
        misplaced=_named(looked, misplaced * stepped),
        on_some_ranks=_named(looked, some),
        compared=tuple(one.name for one in looked if one.name in compared),
        parted=parted,
        not_chosen=_not_chosen(model, [one for one in looked if one.name not in missed], missed) if missed else (),
        by=reducer(model),
    )


def reducer(model: Module) -> str:
    """What reduces the gradients of a model, as ``GradientFacts.by`` has it."""
    if (stage := zero_stage(model)) is not None:
        return f"ZeRO {stage}"
    return "FSDP2" if isinstance(model, FSDPModule) else "FSDP1" * isinstance(model, FullyShardedDataParallel)


def _not_chosen(model: Module, given: Sequence[Gradient], missing: Mapping[str, Gradient]) -> tuple[str, ...]:
    """Of what has no gradient, what a batch may leave out, as others beside it have one.

    Members of a ModuleList or ModuleDict, such as experts; and all that an optimizer steps, as in the turns of a GAN.
    """
    acting = {one.optimizer for one in given}
    found = {name for name, one in missing.items() if acting - {None} and one.optimizer not in acting}
    for path, module in names.named_modules(model).items():
        if isinstance(module, ModuleList | ModuleDict):
            beneath = f"{path}." if path else ""

            def member(name: str, beneath: str = beneath) -> str:
                return name[len(beneath) :].partition(".")[0]

            used = {member(one.name) for one in given if one.name.startswith(beneath)}
            found |= {name for name in missing if name.startswith(beneath) and used and member(name) not in used}
    return tuple(name for name in missing if name in found)


def _far(least: Tensor, most: Tensor) -> Tensor:
    """Further apart than rounding brings it: in the largest value or, as of gradients with other signs, in the sum.

    n elements that are each off by a share of the largest make a sum that is off by the root of n times as much.
    """
    low, high = least.reshape(NUMBERS, -1), most.reshape(NUMBERS, -1)
    return ((high - low)[4:6] > TOLERANCE * high[4]).any(dim=0)


def _named(looked: Sequence[Gradient], row: Tensor) -> tuple[str, ...]:
    return tuple(one.name for one, yes in zip(looked, row.tolist(), strict=True) if yes)


def replicas(model: Module) -> Replicas:
    """Who replicates what: by the wrapper, by the placements of DTensors, or by hooks, which may reduce over all."""
    if not world().running:
        return []
    named = names.named_parameters(model)
    if isinstance(model, FullyShardedDataParallel):
        whole = model.sharding_strategy is ShardingStrategy.NO_SHARD
        between = model.process_group if whole else getattr(model, "_inter_node_pg", None)  # the hybrid strategies'
        return [(between, frozenset(named) | frozenset(fsdp1_flat.flat_shards(model)))] if between is not None else []
    by = {param.name: set(param.averaged_by) for param in prepared_params(model, named)}
    whole_here = {name for name, param in named.items() if by[name] and by[name] <= _WHOLE}
    meshes = [param.device_mesh for param in named.values() if isinstance(param, DTensor)]
    root = next((mesh for mesh in meshes if mesh.ndim == max(m.ndim for m in meshes)), None)
    axes = (root.mesh_dim_names or ()) if root is not None else ()
    found: Replicas = [(root[axis].get_group(), _replicated(named, axis)) for axis in axes if root is not None]
    if whole_here and not found:
        group = model.process_group if isinstance(model, DistributedDataParallel) else None
        found = [(group, frozenset(name for name in whole_here if not isinstance(named[name], DTensor)))]
    return found


def _bare(model: Module) -> frozenset[str]:
    """Parameters that nothing wraps, shards or averages."""
    return frozenset(
        param.name for param in prepared_params(model, names.named_parameters(model)) if not param.averaged_by
    )


def _replicated(params: dict[str, Any], axis: str) -> frozenset[str]:
    """Parameters of which every rank on the axis holds the same."""
    return frozenset(
        name
        for name, param in params.items()
        if not isinstance(param, DTensor)
        or axis not in (param.device_mesh.mesh_dim_names or ())
        or isinstance(param.placements[(param.device_mesh.mesh_dim_names or ()).index(axis)], Replicate)
    )


@define(eq=False, repr=False)
class Watched:
    """The gradients of an engine that takes them away as they come, such as DeepSpeed's.

    Their values are noted in the first window, and in every one whether there are any. The hooks that note the latter
    are functions of C, so that a micro-batch costs no call of Python: ``dict.pop`` gives None for what it has found,
    and else the gradient that it was called with, neither of which changes the gradient.
    """

    model: Module
    seen: dict[str, Tensor] = field(factory=dict)
    """Name to the largest absolute value among the gradients of this rank's micro-batches, before any reduction."""
    left: dict[str, None] = field(factory=dict)
    """Names without a gradient in this micro-batch, on this rank."""
    absent: frozenset[str] = frozenset()
    """Names without one in the micro-batches of this window before it."""
    parts: int = 0
    """How many those were."""
    earlier: set[str] = field(factory=set)
    """Names with one in an earlier window."""
    keeps: bool = False
    """Whether the engine steps with a gradient of an earlier window where there is none in this one."""
    mixes: bool = False
    """Whether gradients of ranks that have other ones are added up."""
    hooks: list[Any] = field(factory=list)
    """Those of the first window."""
    lasting: list[Any] = field(factory=list)
    """Those of every window."""
    _hooked: tuple[str, ...] = ()

    def begin(self) -> None:
        """Hooks every trained parameter (``Tensor.register_hook``), which changes no gradient."""
        stage = zero_stage(self.model)
        self.keeps, self.mixes = stage == 3, stage != 0
        for name, param in self._trained():
            if hasattr(param, "register_hook"):  # MS-AMP's scaled weights have none
                self.hooks.append(param.register_hook(self._note(name)))
                self.lasting.append(param.register_hook(partial(self.left.pop, name)))
                self._hooked += (name,)
        self.left.update(dict.fromkeys(self._hooked))

    def gradients(self, *, values: bool) -> Iterator[Gradient]:
        """What the hooks saw in this window; of every one but the first only whether there is a gradient."""
        there = torch.zeros((), **HOST)
        for name, param in self._trained():
            known, missing = hasattr(param, "register_hook"), self._misses(name)
            largest = self.seen.get(name) if values else there if known and not missing else None
            yield Gradient(name=name, missing=missing, largest=largest)

    def there(self) -> bytes:
        """Which parameters have a gradient in this micro-batch, where ranks that differ in it reduce unlike rows."""
        return bytes([name in self.left for name in self._hooked]) if self.left and self.mixes else b""

    def stale(self) -> tuple[str, ...]:
        """What trains, has no gradient in the first micro-batch on this rank, and has an old one that would be stepped.

        With another added to it where a later micro-batch brings one: the first alone writes over what was there.
        """
        if self.parts or not (self.keeps and self.left and self.earlier):
            return ()
        trained = dict(self._trained())
        return tuple(name for name in self.left if name in self.earlier and name in trained)

    def part(self) -> None:
        """Goes on to the next micro-batch of the window."""
        self.absent = frozenset(self.left if not self.parts else self.absent & self.left.keys())
        self.parts += 1
        self.left.update(dict.fromkeys(self._hooked))

    def turn(self) -> None:
        """Goes on to the next window, of which no values are noted."""
        self._forget(self.hooks)
        self.earlier.update(name for name in self._hooked if not self._misses(name))
        self.parts = 0
        self.left.update(dict.fromkeys(self._hooked))

    def end(self) -> None:
        """Takes all hooks away."""
        self._forget(self.hooks)
        self._forget(self.lasting)

    def _misses(self, name: str) -> bool:
        return name in self.left and (not self.parts or name in self.absent)

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return ((name, param) for name, param in names.named_parameters(self.model).items() if param.requires_grad)

    def _forget(self, hooks: list[Any]) -> None:
        while hooks:
            hooks.pop().remove()

    def _note(self, name: str) -> Any:
        def note(grad: Tensor) -> None:
            if grad.numel():
                largest = _values(grad.detach()).abs().max().float()
                before = self.seen.get(name)
                self.seen[name] = largest if before is None else torch.maximum(before, largest)
            else:
                self.seen.setdefault(name, torch.zeros((), dtype=torch.float32, device=grad.device))

        return note

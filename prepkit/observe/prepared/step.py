"""What is about to be stepped, as all ranks see it: gradients, options, draws, and what has become of the model.

One exchange, whatever is looked at: an all-reduce of a few numbers, and of five per parameter where gradients are.
Ranks that replicate a parameter without being all ranks, as under hybrid sharding, compare it in one more each.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from prepkit.facts.run import DDPFacts, GradientFacts, LoopFacts, RunFacts, RunningFacts, RunningParam, Unlike
from prepkit.findings.text import spans
from prepkit.objects import names
from prepkit.objects.deepspeed import keeps_masters
from prepkit.observe.model import dtype_name
from prepkit.observe.prepared.modules import drops
from prepkit.observe.prepared.own_gradients import Gradient
from prepkit.plan import Plan
from prepkit.ranks.world import ranks_of, world
from prepkit.rules.rule import Need

TOLERANCE = 1e-2
"""Relative difference of the largest value of a gradient that reordered sums may make between replicas."""

GROUPS = 8
"""Groups of optimizers whose options are compared."""

OPTIONS = ("lr", "weight_decay")
"""What is compared of each."""

Replicas = list[tuple[Any, frozenset[str] | None]]
"""Groups of ranks that replicate parameters, and the names of those; None: all of them."""


@frozen(eq=False)
class _Stood:
    """A parameter as it was when the model was prepared."""

    param: Parameter
    trained: bool
    dtype: str


@define(eq=False, kw_only=True)
class StepLook:
    """Looks at a prepared model before an optimizer acts. Reads only."""

    plan: Plan
    model: Module
    optimizers: tuple[Any, ...]
    """All that step."""
    _stood: dict[str, _Stood] = field(init=False)
    _masters: bool = field(init=False)
    """Whether the weights in the model are copies, which DeepSpeed makes anew from its own in each step."""
    _written: int = field(init=False)
    """How often trained weights were written in place; DeepSpeed's own steps do not count (0.16 to 0.19)."""

    def __attrs_post_init__(self) -> None:
        found = names.named_parameters(self.model)
        self._stood = {
            name: _Stood(param, param.requires_grad, dtype_name(param.dtype)) for name, param in found.items()
        }
        self._masters = any(keeps_masters(one) for one in self.optimizers)
        self.settle()

    def settle(self) -> None:
        """Takes the weights in the model for those that are trained, as after ``resume``, which fills both."""
        self._written = self._writes()

    def let_go(self, model: Module) -> None:
        """Takes the model for all there is: the engine is gone."""
        self.model, self._masters = model, False
        self.settle()

    @property
    def written(self) -> bool:
        """Whether weights were written of which DeepSpeed keeps master weights. Facts are a few microseconds more."""
        return self._masters and self._written != self._writes()

    def overwritten(self) -> RunFacts:
        """Only whether such weights were written."""
        return RunFacts(overwritten=self.written)

    def changes(self) -> RunFacts:
        """What has become of the model since it was prepared, by identity of its parameters. Local."""
        held = {id(param) for one in self.optimizers for group in one.param_groups for param in group["params"]}
        found = names.named_parameters(self.model)
        known = {id(one.param) for one in self._stood.values()}
        run = self.plan.run
        before = RunningFacts(
            params=tuple(
                RunningParam(name=name, dtype=one.dtype, device="", requires_grad=one.trained)
                for name, one in self._stood.items()
            )
        )
        now = RunningFacts(
            params=tuple(
                RunningParam(
                    name=name,
                    dtype=dtype_name(param.dtype),
                    device="",
                    requires_grad=param.requires_grad,
                    known=id(param) in known,
                    served=id(param) in held
                    and (run.follows_unfrozen if id(param) in known else run.follows_new_params),
                    stuck=self._masters or run.steps_frozen,
                )
                for name, param in found.items()
            )
        )
        return evolve(self.overwritten(), running=((before, now),), ddp=self._ddp())

    def over_ranks(
        self,
        needs: Collection[Need],
        loop: LoopFacts,
        gradients: Sequence[Gradient] = (),
        *,
        own_pass: int = 0,
        reduced: bool = True,
        scaled: bool = False,
    ) -> RunFacts:
        """Options, draws, losses and, with ``Need.GRADIENTS``, gradients, over all ranks.

        Collective, and waits for the device.
        ``reduced``: replicas hold what is averaged already. ``scaled``: an overflow of float16 is expected, and the
        scaler's affair.
        """
        looked = gradients if Need.GRADIENTS in needs else ()
        rates, draws = _options(self.optimizers), _generator(self.plan.facts.env.device)
        replicas = _replicas(self.model) if looked and reduced else []
        everywhere = _joint(one for group, one in replicas if _all(group))
        alone = [float(own_pass), float(loop.own_loss_finite), draws, float(loop.own_order)]
        own = _numbers([*alone, *rates], looked, everywhere, scaled=scaled)
        least, most = world().spread(own)
        first = len(alone) + len(rates)
        unlike = _unlike(rates, least[len(alone) : first].tolist(), most[len(alone) : first].tolist())
        apart = self.plan.data_parallel_size > 1 and world().carries_data
        facts = RunFacts(
            world_size=self.plan.world_size,
            ddp=self._ddp(),
            drops=drops(self.model),
            drawn_alike=bool(draws) and apart and bool(least[2] == most[2]),
            alike_for=self.plan.world_size // self.plan.data_parallel_size,
            unlike=unlike,
            loop=evolve(
                loop,
                passes=(int(least[0]), int(most[0])),
                orders=(int(least[3]), int(most[3])),
                loss_finite=bool(least[1]),
            ),
        )
        if Need.GRADIENTS not in needs:
            return facts
        return evolve(facts, gradients=self._seen(looked, replicas, least[first:], most[first:], reduced=reduced))

    def _seen(
        self, looked: Sequence[Gradient], replicas: Replicas, least: Tensor, most: Tensor, *, reduced: bool
    ) -> GradientFacts:
        """What the numbers of ``_numbers`` over all ranks say of the gradients."""
        missing, held, spoiled, misplaced, largest = most.reshape(5, -1)
        finds = isinstance(self.model, DistributedDataParallel) and not any(one.waits for one in self._ddp())
        everywhere = _joint(one for group, one in replicas if _all(group))
        compared = [one.name for one in looked if everywhere is None or one.name in everywhere]
        smallest = least.reshape(5, -1)[4]
        parted = [one for one in _far(looked, smallest, largest) if one in set(compared)]
        parted += _parted(looked, [(group, one) for group, one in replicas if not _all(group)])
        return GradientFacts(
            stepped=len(looked),
            missing=() if finds else _named(looked, missing),  # DDP counts as zeros what it finds unused
            spoiled=_named(looked, spoiled),
            misplaced=_named(looked, misplaced),
            on_some_ranks=_named(looked, missing * held) if reduced and not finds else (),
            compared=tuple(compared),
            parted=tuple(dict.fromkeys(parted)),
        )

    def _ddp(self) -> tuple[DDPFacts, ...]:
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            return ()
        finds = model.find_unused_parameters or model.static_graph
        return (DDPFacts(path="", reduced=None, known=0, waits=not finds),)

    def _writes(self) -> int:
        trained = (one.param for one in self._stood.values() if one.trained) if self._masters else ()
        return sum(param._version for param in trained if isinstance(param, Tensor))  # MS-AMP's weights are none


def _all(group: Any) -> bool:
    return ranks_of(group).size == world().size


def _joint(sets: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """All names of the sets; None: every parameter."""
    found: frozenset[str] = frozenset()
    for one in sets:
        if one is None:
            return None
        found |= one
    return found


def _numbers(
    own: list[float], gradients: Sequence[Gradient], compared: frozenset[str] | None, *, scaled: bool
) -> Tensor:
    """One row: ``own``, then for each gradient whether it is missing, there, not finite, misplaced, and how large."""
    rows = torch.zeros(5, len(gradients))
    seen = [one.largest for one in gradients if one.largest is not None]
    largest = iter(torch.stack(seen).cpu() if seen else ())
    for index, one in enumerate(gradients):
        rows[0, index], rows[3, index] = one.missing, one.misplaced
        if one.largest is None:
            continue
        size = next(largest)
        rows[1, index] = 1
        rows[2, index] = not torch.isfinite(size) and not scaled
        if compared is None or one.name in compared:
            rows[4, index] = size.nan_to_num(0, 0, 0)
    return torch.cat((torch.tensor(own, dtype=torch.float32).nan_to_num(), rows.reshape(-1)))


def _named(gradients: Sequence[Gradient], row: Tensor) -> tuple[str, ...]:
    return tuple(one.name for one, yes in zip(gradients, row.tolist(), strict=True) if yes)


def _parted(gradients: Sequence[Gradient], replicas: Replicas) -> list[str]:
    """Names of parameters whose gradients differ over ranks that hold the same of them, where those are not all."""
    found: list[str] = []
    for group, alike in replicas:
        held = [one for one in gradients if alike is None or one.name in alike]
        if not held:
            continue
        zero = torch.zeros(())
        values = torch.stack([(zero if one.largest is None else one.largest.cpu()).nan_to_num(0, 0, 0) for one in held])
        found += _far(held, *ranks_of(group).spread(values))
    return found


def _far(gradients: Sequence[Gradient], least: Tensor, most: Tensor) -> list[str]:
    far = (most - least > TOLERANCE * most).tolist()
    return [one.name for one, yes in zip(gradients, far, strict=True) if yes]


def _replicas(model: Module) -> Replicas:
    """By the wrapper, or by the placements of DTensors."""
    if not world().running:
        return []
    if isinstance(model, DistributedDataParallel):
        return [(model.process_group, None)]
    if isinstance(model, FullyShardedDataParallel):
        whole = model.sharding_strategy is ShardingStrategy.NO_SHARD
        between = model.process_group if whole else getattr(model, "_inter_node_pg", None)  # the hybrid strategies'
        return [(between, None)] if between is not None else []
    params = {name: param for name, param in names.named_parameters(model).items() if param.requires_grad}
    meshes = [param.device_mesh for param in params.values() if isinstance(param, DTensor)]
    root = next((mesh for mesh in meshes if mesh.ndim == max(m.ndim for m in meshes)), None)
    axes = (root.mesh_dim_names or ()) if root is not None else ()
    return [(root[axis].get_group(), _replicated(params, axis)) for axis in axes if root is not None]


def _replicated(params: dict[str, Any], axis: str) -> frozenset[str]:
    """Parameters of which every rank on the axis holds the same."""
    return frozenset(
        name
        for name, param in params.items()
        if not isinstance(param, DTensor)
        or axis not in (param.device_mesh.mesh_dim_names or ())
        or isinstance(param.placements[(param.device_mesh.mesh_dim_names or ()).index(axis)], Replicate)
    )


def _options(optimizers: Sequence[Any]) -> list[float]:
    """Of the first groups of all optimizers, as many numbers on every rank; 0 where there is none."""
    groups = [group for one in optimizers for group in one.param_groups][:GROUPS]
    values = [float(group.get(name, 0.0)) for group in groups for name in OPTIONS]
    return values + [0.0] * (len(OPTIONS) * GROUPS - len(values))


def _unlike(own: list[float], least: list[float], most: list[float]) -> tuple[Unlike, ...]:
    """Options that differ, with who has which. Collective only where some do, which every rank has found alike."""
    places = [place for place, (low, high) in enumerate(zip(least, most, strict=True)) if low != high]
    if not places:
        return ()
    everyone = world().gather(own)
    called = [f"{name} of group {group}" for group in range(GROUPS) for name in OPTIONS]
    return tuple(
        Unlike(name=called[place], held=_holders([values[place] for values in everyone])) for place in places[:3]
    )


def _holders(values: list[float]) -> str:
    """Values with the ranks that hold them, as ``0.1 on rank 0, 0.2 on ranks 1-3``; the first few."""
    holders: dict[float, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    shown = [f"{value:g} on rank{'s' * (len(at) > 1)} {spans(tuple(at))}" for value, at in list(holders.items())[:4]]
    return ", ".join(shown) + ", ..." * (len(holders) > 4)


def _generator(kind: str) -> float:
    """The state of the generator that dropout draws from, as a number below 2**24, which float32 holds; 0: not known.

    5 to 20 microseconds, and nothing waits for the device (torch ``get_rng_state``).
    """
    if kind == "cpu":
        state: Tensor = torch.get_rng_state()
    else:
        try:
            module = torch.get_device_module(kind)
        except RuntimeError:
            return 0.0
        if not (hasattr(module, "get_rng_state") and module.is_available()):
            return 0.0
        state = module.get_rng_state()
    return float(zlib.crc32(state.cpu().numpy().tobytes()) & 0xFFFFFF)

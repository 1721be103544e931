"""What is about to be stepped, as all ranks see it: gradients, options, draws, and what has become of the model.

One exchange, whatever is looked at: an all-reduce of a few numbers, and of six per parameter where gradients are.
Ranks that replicate a parameter without being all ranks, as under hybrid sharding, compare it in one more each, and
tell the others in a last one what differs, so that all ranks refuse the step or none does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from prepkit.facts.loop import LoopFacts
from prepkit.facts.run import DDPFacts, RunFacts, RunningFacts, RunningParam
from prepkit.facts.window import CourseFacts, Groups, SharersFacts
from prepkit.objects import names
from prepkit.objects.deepspeed import keeps_masters
from prepkit.objects.local_part import local
from prepkit.observe.fingerprints import sums_of_whole
from prepkit.observe.model import dtype_name
from prepkit.observe.prepared.averaging import ddp_state
from prepkit.observe.prepared.gradients import Gradient, gradients, judged, replicas, rows
from prepkit.observe.prepared.modules import drops, generator
from prepkit.observe.prepared.optimizers import grouped, options, short_digest, unlike
from prepkit.observe.prepared.ranks import other_values
from prepkit.observe.prepared.reading import digest_of
from prepkit.plan import Plan
from prepkit.ranks.world import ranks_of, world
from prepkit.rules.rule import Need


@frozen(eq=False, repr=False)
class _Stood:
    """A parameter as it was when the model was prepared."""

    param: Parameter
    trained: bool
    dtype: str


@define(eq=False, kw_only=True, repr=False)
class StepLook:
    """Looks at a prepared model before an optimizer acts. Reads only."""

    plan: Plan
    model: Module
    optimizers: tuple[Any, ...]
    """All that step."""
    _stood: dict[str, _Stood] = field(init=False)
    sharded: tuple[Parameter, ...] = field(init=False)
    """What FSDP2 shards, of what trained when the model was prepared."""
    _masters: bool = field(init=False)
    """Whether the weights in the model are copies, which DeepSpeed makes anew from its own in each step."""
    _written: int = field(init=False)
    """How often trained weights had been written in place when the engine had last stepped."""
    _groups: Groups = field(init=False)
    """Those of the optimizers, with their options."""
    _entered: tuple[Any, float] = field(default=(None, 0.0), init=False)
    """What the last forward was given, and the state of the generator then, where ranks share layers."""

    def __attrs_post_init__(self) -> None:
        found = names.named_parameters(self.model)
        self._stood = {
            name: _Stood(param, param.requires_grad, dtype_name(param.dtype)) for name, param in found.items()
        }
        self.sharded = tuple(param for param in found.values() if isinstance(param, DTensor) and param.requires_grad)
        self._masters = any(keeps_masters(one) for one in self.optimizers)
        self._groups = grouped(self.optimizers, self.known())
        self.settle()

    def settle(self) -> None:
        """Takes the weights in the model for those that are trained, as after ``resume``, which fills both.

        A step of DeepSpeed's counts as a write to parameters that are a small group of their own (0.19), not to others.
        """
        self._written = self._writes()

    def let_go(self, model: Module) -> None:
        """Takes the model for all there is: the engine is gone."""
        self.model, self._masters = model, False
        self.settle()

    def enters(self, given: Any) -> None:
        """A forward begins, where ranks share layers; None: nobody asks any more."""
        self._entered = given, 0.0 if given is None else generator(self.plan.facts.env.device)

    def known(self) -> dict[int, str]:
        """Names of the parameters as the model was prepared, by their identity."""
        return {id(one.param): name for name, one in self._stood.items()}

    @property
    def written(self) -> bool:
        """Whether weights were written of which DeepSpeed keeps master weights. Facts are a few microseconds more."""
        return self._masters and self._written != self._writes()

    def overwritten(self) -> RunFacts:
        """Only whether such weights were written."""
        return RunFacts(overwritten=self.written)

    def changes(self) -> RunFacts:
        """Return what has become of the model since it was prepared, by identity of its parameters. Local."""
        held = {id(param) for one in self.optimizers for group in one.param_groups for param in group["params"]}
        found = names.named_parameters(self.model)
        known = {id(one.param) for one in self._stood.values()}
        run, ddp = self.plan.run, self._ddp()
        waits = any(one.waits for one in ddp)
        before = RunningFacts(
            params=tuple(
                RunningParam(name=name, dtype=one.dtype, device="", requires_grad=one.trained)
                for name, one in self._stood.items()
            ),
            course=CourseFacts(groups=self._groups),
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
                    awaited=waits,
                )
                for name, param in found.items()
            ),
            course=CourseFacts(groups=grouped(self.optimizers, self.known())),
        )
        return evolve(self.overwritten(), running=((before, now),), ddp=ddp)

    def gradients(self, *, values: bool = True) -> tuple[Gradient, ...]:
        """The gradients of all that trains, on this rank; stepped, where an optimizer holds tensors of its own."""
        found = tuple(gradients(self.model, self.optimizers, values=values))
        masters = all(one.optimizer is None for one in found)
        return tuple(evolve(one, optimizer=0) for one in found) if masters else found

    def there(self) -> bytes:
        """Which shards of FSDP2 have a gradient: as on all ranks, or ranks reduce unlike rows of them."""
        return bytes([param.grad is None for param in self.sharded])

    def apart(self, digest: int) -> bool:
        """Whether ranks have other ones. Collective."""
        least, most = world().spread(torch.tensor([float(digest & 0xFFFFFF)], dtype=torch.float32, device="cpu"))
        return bool(least != most)

    def streams(self, own: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The least and the greatest digest of each stream over the ranks. Collective."""
        least, most = world().spread(torch.tensor(own, device="cpu"))
        return tuple(zip(map(int, least), map(int, most), strict=True))

    def over_ranks(
        self,
        needs: Collection[Need],
        loop: LoopFacts,
        seen: Sequence[Gradient] = (),
        *,
        own_pass: int = 0,
        given: int = 0,
        reduced: bool = True,
        scaled: bool = False,
    ) -> RunFacts:
        """Options, draws, losses and, with ``Need.GRADIENTS``, gradients, over all ranks.

        Collective, and waits for the device.
        ``given``: a digest of which parameters had gradients lately. ``reduced``: replicas hold what is averaged
        already, and are compared. ``scaled``: an overflow of float16 is expected, and the scaler's affair.
        """
        looked = seen if Need.GRADIENTS in needs else ()
        held, draws = options(self.optimizers), generator(self.plan.facts.env.device)
        weights = self._replicas()
        alone = [float(own_pass), float(loop.own_loss_finite), draws, float(loop.own_order), short_digest(held)]
        alone += [short_digest(weights), float(given & 0xFFFFFF)]  # what float32 holds
        known = list(self._stood)
        alone += [float(max((known.index(name) + 1 for name in loop.written if name in known), default=0))]
        alone += map(float, loop.own_streams)
        own = rows(looked)
        least, most = world().spread(
            torch.cat((torch.tensor(alone, dtype=torch.float32, device="cpu"), own.reshape(-1)))
        )
        first = len(alone)
        streams = zip(least[8:first].tolist(), most[8:first].tolist(), strict=True)
        apart = self.plan.data_parallel_size > 1 and world().carries_data
        facts = RunFacts(
            world_size=self.plan.world_size,
            ddp=self._ddp(),
            drops=drops(self.model),
            drawn_alike=bool(draws) and apart and bool(least[2] == most[2]),
            alike_for=self.plan.world_size // self.plan.data_parallel_size,
            unlike=unlike(world().gather(held)) if least[4] != most[4] else (),
            parted=other_values(weights) if least[5] != most[5] else (),
            loop=evolve(
                loop,
                passes=(int(least[0]), int(most[0])),
                orders=(int(least[3]), int(most[3])),
                streams=tuple((int(low), int(high)) for low, high in streams),
                loss_finite=bool(least[1]),
                written=loop.written or tuple(known[int(most[7]) - 1 : int(most[7])]),  # or on another rank alone
            ),
        )
        if Need.GRADIENTS not in needs:
            return facts

        def spread(group: Any, values: Tensor) -> tuple[Tensor, Tensor]:
            ranks = ranks_of(group)
            return (least[first:], most[first:]) if ranks.size == world().size else ranks.spread(values)

        same = replicas(self.model) if reduced else []
        found = judged(looked, own, self.model, same, spread, reduced=reduced, scaled=scaled)
        if found.awaited and any(one.waits for one in facts.ddp):  # as every rank has found
            lacks = world().gather(bool(own[0].any()))
            found = evolve(found, awaited_on=tuple(rank for rank, yes in enumerate(lacks) if yes))
        sharers = (
            self._sharers(facts.alike_for, found.compared, draws) if found.parted and facts.alike_for > 1 else None
        )
        return evolve(facts, gradients=evolve(found, apart_before=bool(least[6] != most[6])), sharers=sharers)

    def _sharers(self, size: int, alike: Collection[str], draws: float) -> SharersFacts:
        """What neighbours that share layers have otherwise, of what they should have alike. Collective."""
        named, (given, began) = names.named_parameters(self.model), self._entered
        held = {name: digest_of(local(named[name]).detach()) for name in alike if name in named}
        every = world().gather((held, digest_of(given), began if draws != began else 0.0))
        apart = [(one, every[rank - rank % size]) for rank, one in enumerate(every)]
        weights = dict.fromkeys(name for one, first in apart for name in one[0] if one[0][name] != first[0].get(name))
        samples, drawn = (any(one[at] != first[at] for one, first in apart) for at in (1, 2))
        return SharersFacts(weights=tuple(weights), samples=samples, draws=drawn)

    def _replicas(self) -> dict[str, int]:
        """Sums of the weights that DDP holds alike on every rank, and steps alike; without those it was told to ignore.

        Shards have no other holder to part from, and what is whole beside them is averaged as gradients are.
        """
        if (wrapper := self._wrapper()) is None or not world().carries_data:
            return {}
        own = set(getattr(wrapper, "parameters_to_ignore", ()))
        ignored = {id(param) for name, param in wrapper.module.named_parameters() if name in own}
        left = {name for name, param in names.named_parameters(self.model).items() if id(param) in ignored}
        return {name: value for name, value in sums_of_whole(self.model).items() if name not in left}

    def _ddp(self) -> tuple[DDPFacts, ...]:
        return () if (wrapper := self._wrapper()) is None else (ddp_state("", wrapper),)

    def _wrapper(self) -> DistributedDataParallel | None:
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    def _writes(self) -> int:
        trained = (one.param for one in self._stood.values() if one.trained) if self._masters else ()
        return sum(param._version for param in trained if isinstance(param, Tensor))  # MS-AMP's weights are none

"""A model that trains, looked at again: what has changed since the last look, at a cost that stays small."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from math import inf, isqrt
from typing import Any

import torch
from attrs import define, evolve, field
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.optim.lr_scheduler import LRScheduler

from prepkit.auditing.course import (
    Moves,
    SampledEpochs,
    Ticks,
    at_zero,
    course,
    gradients_there,
    highest_in_buffers,
    not_finite,
)
from prepkit.facts.run import RunFacts, RunningFacts, RunningParam, Unlike
from prepkit.facts.window import WindowFacts
from prepkit.findings import Finding
from prepkit.objects.alive import alive
from prepkit.objects.names import Site, first_names, parameters_at, sites
from prepkit.observe.fingerprints import summed
from prepkit.observe.fingerprints.parts import Part, as_computed
from prepkit.observe.model import dtype_name
from prepkit.observe.prepared.around import local_sgd
from prepkit.observe.prepared.averaging import averages_weights
from prepkit.observe.prepared.optimizers import as_rate, inner, options, prepared_optimizer, short_digest, unlike
from prepkit.ranks.world import world
from prepkit.rules import due
from prepkit.rules.rule import Moment, findings_of

ROUND = 16
"""Looks within which every weight is compared, whatever its share of the time."""
SMALL = 2**16
"""Elements of the largest buffer that a watch reads at each look."""
PAST = 5
"""Looks that are remembered, as those before each step."""
OPTIONS = "options of the optimizers"
"""Name under which they travel beside the parameters."""


@define(kw_only=True)
class Rotation:
    """Which weights are read at a look, and compared over ranks. Every rank counts alike: all send the same names."""

    names: tuple[str, ...] | None = None
    """Of parameters that are compared; None: not asked yet. Those of one replica alone leave."""
    sizes: dict[str, int] = field(factory=dict)
    """Elements of each."""
    at: int = 0
    """The first of the next look."""
    allowed: float = 0.0
    """Elements that may still be read; negative after a look that read more, until later looks have read less."""
    read: int = 0
    """Elements of the last look."""
    speed: float = 0.0
    """Elements per second; 0: not known yet."""

    def take(self, *, every: bool) -> tuple[str, ...]:
        """Names for this look; all of them with ``every``. The first look takes the smallest, to learn its speed."""
        names = self.names or ()
        order = (*names[self.at :], *names[: self.at])
        if every or not names:
            return order
        if not self.speed:
            return (min(order, key=lambda name: self.sizes[name]),)
        taken, left = 0, max(self.allowed, sum(self.sizes[name] for name in names) / ROUND)
        while taken < len(order) and left > 0:
            left -= self.sizes[order[taken]]
            taken += 1
        self.at = (self.at + taken) % len(names)
        return order[:taken]

    def account(self, taken: tuple[str, ...], between: float, spent: float, share: float) -> None:
        """``between``: seconds since the look before, ``spent``: what that one took. The same on every rank."""
        self.speed = self.read / max(spent, 1e-6) if self.read else self.speed
        self.read = sum(self.sizes[name] for name in taken)
        most = sum(self.sizes[name] for name in self.names or ())
        self.allowed = min(self.allowed + self.speed * between * share - self.read * (self.speed > 0), most)

    def drop(self, single: set[str]) -> None:
        """Leaves out what has one replica, and so nothing to be compared with."""
        if single:
            names = self.names or ()
            kept = [name for name in (*names[self.at :], *names[: self.at]) if name not in single]
            self.names, self.at = tuple(kept), 0


@define(kw_only=True)
class RunningLook:
    """What ``Audit.drift`` and ``pk.watch`` look with: it remembers the last look."""

    model: nn.Module
    optimizers: list[Any]
    scheduler: Any
    facts: RunFacts
    asks_ranks: bool = True
    share: float | None = None
    """Of the time between two looks, how much a look may take; None: each compares all weights."""
    before: RunningFacts = field(init=False)
    unlike: tuple[Unlike, ...] = field(default=(), init=False)
    """Options in which ranks differ at the present look."""
    rotation: Rotation = field(factory=Rotation, init=False)
    seconds: float = field(default=0.0, init=False)
    """That all looks have taken."""
    last_seconds: float = field(default=0.0, init=False)
    """That the last one has taken."""
    steps: int | None = field(default=None, init=False)
    """Optimizer steps that whoever looks has counted."""
    passes: SampledEpochs | None = field(default=None, init=False)
    ticks: Ticks | None = field(default=None, init=False)
    _ended: float = field(factory=time.perf_counter, init=False)
    _changed: dict[str, str] = field(factory=dict, init=False)
    """Options that were other at the look before the last, with what they were."""
    _nonzero: set[str] = field(factory=set, init=False)
    _finite: set[str] = field(factory=set, init=False)
    """Buffers that were finite at a look; others may be infinite on purpose, as masks are."""
    _moves: Moves = field(factory=Moves, init=False)
    _past: deque[tuple[int, int, int | None, float | None]] = field(factory=lambda: deque(maxlen=PAST), init=False)
    """Steps, ticks and rate at the last looks."""

    def __attrs_post_init__(self) -> None:
        self.before = self._seen()

    @torch.no_grad()
    def look(self) -> tuple[Finding, ...]:
        """Findings since the last look. Collective where ranks are asked."""
        begun = time.perf_counter()
        now, self.unlike = self._seen(), ()
        now = evolve(
            now, hooks=tuple((Counter(now.hooks) & Counter(self.before.hooks)).elements())
        )  # what came later may go
        held = {name: part for name, part in as_computed(self.model) if not part.values.is_meta}
        chosen = self._chosen(held)
        now = self._read(self._beside(now), held, chosen)
        if self.asks_ranks and world().carries_data and not joins(self.model):
            now = self._compared(now, begun, held, chosen)
        else:
            self.rotation.account(chosen, begun - self._ended, self.last_seconds, self.share or 1.0)
        facts = evolve(self.facts, running=((self.before, now),), unlike=self.unlike, ranks=())
        if now.parted or now.course.unaveraged:
            weights = WindowFacts(averages_weights=averages_weights(()))
            facts = evolve(facts, local_sgd=local_sgd(), window=weights)
        found = findings_of(due(Moment.DRIFT), facts)
        self.before = now
        self._ended = time.perf_counter()
        self.last_seconds = self._ended - begun
        self.seconds += self.last_seconds
        return found

    def idle(self, told_by: str, **seen: Any) -> tuple[Finding, ...]:
        """What one rule says of what was seen between two looks, such as so many forwards without a step.

        Asks no other rank: these may have stepped.
        """
        now = evolve(self.before, course=evolve(self.before.course, **seen))
        asked = [rule for rule in due(Moment.DRIFT) if rule.id == told_by]
        return findings_of(asked, evolve(self.facts, running=((self.before, now),), unlike=(), ranks=()))

    def named(self, values: Iterable[Any]) -> tuple[str, ...]:
        """Names of parameters, those that the model does not have by their shapes; of words the words."""
        first = first_names(parameters_at(sites(self.model)))
        return tuple(one if isinstance(one, str) else first.get(id(one), f"{[*one.shape]}") for one in values)

    def _seen(self) -> RunningFacts:
        places = sites(self.model)
        named = parameters_at(places)
        first = first_names(named)
        params = {first[id(param)]: param for _, param in named}
        known = [prepared_optimizer(one, self.model, first, state=False) for one in self.optimizers]
        rates, scheduled = _rates(self.scheduler, self.optimizers)
        return RunningFacts(
            params=tuple(map(_param, params, params.values())),
            ties=_ties(named),
            hooks=tuple(_hooks(places)),
            held=tuple(one.held for one in known),
            orphans=tuple(len(one.orphans) for one in known),
            stateful=tuple(tuple(_stateful(inner(one), first)) for one in self.optimizers),
            rates=rates,
            scheduled=scheduled,
            recompiled=recompiled(),
            course=course(places, self.optimizers, self.scheduler),
        )

    def _beside(self, now: RunningFacts) -> RunningFacts:
        """With what others of the loop do, who are looked for only where something would be told without them."""
        held = {name for names in now.held for name in names}
        trained = {one.name for one in self.before.params if one.requires_grad}
        loose = {one.name for one in now.params if one.requires_grad} - trained - held
        if loose:
            first = first_names(parameters_at(sites(self.model)))
            groups = (group for one in alive(torch.optim.Optimizer) for group in one.param_groups)
            loose -= {first.get(id(param), "") for group in groups for param in group["params"]}
            now = evolve(now, params=tuple(evolve(one, stepped=one.name not in loose) for one in now.params))
        return evolve(now, scheduled=()) if taken_over(self.scheduler) else now

    def _chosen(self, held: dict[str, Part]) -> tuple[str, ...]:
        """Names to be read now. The first look asks the ranks whether they have the same parameters."""
        if self.rotation.names is None:
            self.asks_ranks = self.asks_ranks and world().carries_data and world().same(sorted(held))
            self.rotation.names = tuple(sorted(held))  # without ranks: stages of a pipeline, which the audit tells
            own = set(self.facts.parted)  # in a shape of each rank's own, it may be
            self.rotation.sizes = {name: 1 if name in own else part.numel for name, part in held.items()}
        return self.rotation.take(every=self.share is None)

    def _read(self, now: RunningFacts, held: dict[str, Part], chosen: tuple[str, ...]) -> RunningFacts:
        """With what the chosen weights and their moments hold, and the smallest weight's at each look."""
        sizes = self.rotation.sizes
        names = {*chosen, *sorted(sizes, key=lambda name: (sizes[name], name))[:1]}
        places = sites(self.model)
        first = first_names(parameters_at(places))
        moments = at_zero(self.optimizers, first, names)
        zeroed = tuple(name for name, zero in moments.items() if zero and name in self._nonzero)
        self._nonzero = (self._nonzero | {name for name, zero in moments.items() if not zero}) - set(zeroed)
        options, before = dict(now.course.options), dict(self.before.course.options)
        changed = {name: before[name] for name in options if options[name] != before.get(name, options[name])}
        rested = [name for name in self._changed if name in options and name not in changed]
        course = evolve(
            now.course,
            not_finite=not_finite(held, sorted(names)),
            **self._buffers(places),
            zeroed=zeroed,
            altered=tuple((name, self._changed[name], options[name]) for name in rested),
            steps=self.steps,
            repeated=tuple(self.passes.repeated) if self.passes is not None else (),
            **self._moved(now, held),
            **self._since(now),
        )
        self._changed = changed
        return evolve(now, course=course)

    def _since(self, now: RunningFacts) -> dict[str, Any]:
        """Steps and ticks since the oldest of the last looks, and whether the rate was 0 at all of them."""
        stretches = self.ticks.stretches if self.ticks is not None else 0
        self._past.append((self.steps or 0, stretches, now.course.ticked, now.course.rate))
        steps, stretched, ticked, _ = self._past[0]
        ticks = (now.course.ticked or 0) - (ticked or 0)
        return {
            "lately": (max((self.steps or 0) - steps, stretches - stretched), ticks),
            "stretches": stretches,
            "at_zero": len(self._past) == PAST and all(rate == 0 for *_, rate in self._past),
        }

    def _buffers(self, places: list[Site]) -> dict[str, Any]:
        """Those that have come to hold NaN, and those that are infinite."""
        highest = highest_in_buffers(places, inf if self.share is None else SMALL)
        bad = {name: one for name, one in highest.items() if not one < inf}
        told = [name for name in bad if name in self._finite]
        self._finite |= highest.keys() - bad.keys()
        infinite = tuple(name for name in told if bad[name] == inf)
        return {"spoiled": tuple(name for name in told if name not in infinite), "unbounded": infinite}

    def _moved(self, now: RunningFacts, held: dict[str, Part]) -> dict[str, Any]:
        """Whether weights move that are trained by what keeps no masters, which gather what is too little for them."""
        plain = [
            names for names, one in zip(now.held, self.facts.optimizers, strict=False) if not (one.engine or one.rounds)
        ]
        trained = {one.name for one in now.params if one.requires_grad} & {name for names in plain for name in names}
        counted = [one for one in now.course.counts if one is not None]
        steps = self.steps if self.steps is not None else max(counted, default=0)
        here = {name: part for name, part in held.items() if name in trained and part.values.numel()}
        moved, still = self._moves.look(here, steps)
        return {"moved": moved, "still": still if still and gradients_there(self.optimizers) else 0}

    def _compared(
        self, now: RunningFacts, begun: float, held: dict[str, Part], chosen: tuple[str, ...]
    ) -> RunningFacts:
        """With what ranks differ in: one all-reduce."""
        sent = {name: held.get(name, _nothing()) for name in chosen if name not in self.facts.parted}
        # what is gone here must not stop the others
        own = options(self.optimizers)
        sent[OPTIONS] = Part(
            values=torch.tensor([short_digest(own)], dtype=torch.float32, device="cpu"), numel=1, replica=world().rank
        )
        found = summed(sent, (begun - self._ended, self.last_seconds))
        between, spent = found.told
        self.rotation.account(chosen, between, spent, self.share or 1.0)
        self.rotation.drop(set(chosen) - set(found.replicated))
        parted = tuple(name for name in found.parted if name != OPTIONS)
        if OPTIONS in found.parted:  # which every rank has found alike
            self.unlike = unlike(world().gather(own))
        return evolve(now, parted=parted)


def joins(model: nn.Module) -> bool:
    """Return whether this is inside of torch's ``Join``, where ranks that are at their end answer no question."""
    return any(isinstance(one, Joinable) and one._join_config.enable for one in model.modules())


def _nothing() -> Part:
    return Part(values=torch.empty(0, dtype=torch.float32, device="cpu"), numel=0, replica=world().rank)


def _param(name: str, param: Any) -> RunningParam:
    local = getattr(param, "ds_tensor", param)
    return RunningParam(
        name=name, dtype=dtype_name(param.dtype), device=local.device.type, requires_grad=param.requires_grad
    )


def _ties(named: list[tuple[str, nn.Parameter]]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, param in named:
        groups.setdefault(id(param), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _hooks(places: list[Site]) -> Iterator[tuple[str, str]]:
    """Those of ``HANG_ON`` on modules and on parameters; from step to step there may only be more of them.

    By the file that they are from, which may put one in another's place, as pruning does. A program takes off its own.
    """
    for site in places:
        for module in site.stack if site.first else ():
            for kind, hooks in vars(module).items():
                if kind.endswith("_hooks") and isinstance(hooks, dict):  # transformers has a list of that name
                    yield from ((site.path, f"{kind.strip('_')}: {home}") for home in _homes(hooks))
            for name, param in module._parameters.items():
                where = f"{site.path}.{name}" if site.path else name
                hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
                yield from ((where, f"post_accumulate_grad_hooks: {home}") for home in _homes(hooks))


HANG_ON = (
    "torch.nn.",
    "torch.distributed.",
    "accelerate.",
    "deepspeed.",
    "peft.",
    "transformers.",
    "prepkit.applying.",
)
"""Modules of Python whose hooks compute, average or place something."""


def _homes(hooks: dict[Any, Any]) -> Iterator[str]:
    homes = (str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks.values())
    return (home for home in homes if home.startswith(HANG_ON))


def taken_over(scheduler: Any) -> bool:
    """Return whether another living scheduler has set the rates that are not its own, as torch's ``SWALR`` does."""
    known = inner(scheduler) if scheduler is not None else None
    optimizer = inner(getattr(known, "optimizer", None))
    rates = [as_rate(group.get("lr")) for group in getattr(optimizer, "param_groups", None) or ()]
    if not rates or _last(known) in ([], rates):
        return False
    return any(inner(one.optimizer) is optimizer and _last(one) == rates for one in alive(LRScheduler))


def replaced(optimizers: list[Any]) -> bool:
    """Return whether another living optimizer, and none that shares their groups, holds what one of them holds."""
    known = [inner(one) for one in optimizers]
    groups = {id(group) for one in known for group in one.param_groups}
    held = {id(param) for one in known for group in one.param_groups for param in group["params"]}
    others = (group for one in alive(torch.optim.Optimizer) for group in one.param_groups if id(group) not in groups)
    return any(id(param) in held for group in others for param in group["params"])


def _last(scheduler: Any) -> list[float | None]:
    """The rates that it has set last; empty: it does not say."""
    return [as_rate(one) for one in getattr(scheduler, "_last_lr", None) or ()]


def _stateful(optimizer: Any, first: dict[int, str]) -> Iterator[str]:
    state = getattr(optimizer, "state", {})
    slots = (param for group in optimizer.param_groups for param in group["params"])
    for at, param in enumerate(slots):
        if state.get(param):
            yield first.get(id(param), f"slot {at}")


def recompiled() -> tuple[tuple[str, int], ...]:
    """Functions that torch has compiled as often as it may, and how often: each look at a code fails all its guards."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return ()
    failed = getattr(dynamo.utils, "guard_failures", {})
    times = {code.co_name: (isqrt(8 * len(failures) + 1) - 1) // 2 for code, failures in [*failed.items()]}
    return tuple(sorted((name, many) for name, many in times.items() if many >= dynamo.config.recompile_limit))


def _rates(scheduler: Any, optimizers: list[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Learning rates as they are, and as the scheduler has set them last (``LRScheduler._last_lr``)."""
    known = inner(scheduler) if scheduler is not None else None
    driven = getattr(inner(getattr(known, "optimizer", None)), "param_groups", None)
    groups = driven if driven is not None else [group for one in optimizers for group in inner(one).param_groups]
    rates = [as_rate(group.get("lr")) for group in groups]
    wanted = _last(known) if driven is not None else []
    both = [(rate, one) for rate, one in zip_longest(rates, wanted) if rate is not None]
    return tuple(rate for rate, _ in both), tuple(one for _, one in both if one is not None)

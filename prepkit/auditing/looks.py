"""The looks of an audit at a script that runs, before its first step and some behind it, and what is alive there."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.auditing.coming import changes_behind, makes_optimizer_behind, trains_behind
from prepkit.auditing.course import lets_go, stand
from prepkit.auditing.outcome import Audit
from prepkit.auditing.phases import elsewhere, stands
from prepkit.auditing.running import joins
from prepkit.auditing.watch import DriftWatch, stepping
from prepkit.facts.phases import PhaseFacts
from prepkit.facts.run import RunFacts
from prepkit.facts.window import WindowFacts
from prepkit.findings import Finding, Severity
from prepkit.objects.alive import alive_of
from prepkit.observe.prepared.optimizers import as_rate, inner
from prepkit.ranks.arrivals import Arrivals
from prepkit.ranks.world import world
from prepkit.rules import by_id, due
from prepkit.rules.rule import Moment, Need, findings_of

if TYPE_CHECKING:  # which reads frames, and is large
    from prepkit.auditing.window import Window
    from prepkit.observe.prepared.around import Line

LOOKED = "the end of its look"
FIRST = "its first optimizer step"
ALONE = "before its first step alone"
BEHIND = "Behind the first step"
NEVER = 1 << 62
WAITS_S = 20.0
"""Time that the rest of a first training may take, where another is to be looked at behind it."""
LATER = (
    *("others-gradients", "backward-wasted", "optimizer-anew", "loaded-itself", "state-carried", "ratio-one"),
    *("loss-divided", "clipped-late", "clipped-between", "gathered-apart", "unwaited", "loss-kept"),
    *("average-follows", "evaluated-training"),
    *("skip-kept", "new-tokens-frozen", "judged-alike", "reseeded-steps", "sums-lost", "target-trains"),
    *("drawn-without-graph", "scheduler-elsewhere", "average-itself", "average-buffers", "average-rounds"),
    *("unfrozen-unheld", "merged-trained", "average-stays", "written-away", "rows-alike", "not-averaged"),
    *("resumed-state", "resumed-samples", "scaled-stepped"),
    *("average-often", "autocast-stale", "adapter-idle", "cut-otherwise"),
)
"""Rules over what a window hears behind the first step too."""
NOTHING = "run.steps-nothing"
LINE = re.compile(r"[^:]+\.py:\d+")
"""Where a finding stands that names a line of the program."""
OF_GRADIENTS = frozenset(rule.id for rule in due(Moment.AUDIT) if Need.GRADIENTS in rule.needs)


class FirstStep(BaseException):
    """Ends the script where its first step would begin; no ``except Exception`` of the script holds it up."""


class ScriptEnded(Exception):
    """The script raised before the last step that is looked at, or left with an exit code.

    ``str`` is what Python shows.
    """

    audit: Audit | None = None
    """What was found before, where it had come to its first step."""


@define(eq=False)
class Reading:
    """A pass of a loader that is being read."""

    of: Callable[[], Any] = lambda: None  # the default of a field
    yielded: int = 0

    @classmethod
    def now(cls) -> Reading:
        """One that has given batches, the one that has most of them left."""
        alive = [one for one in alive_of(lambda kind: issubclass(kind, _BaseDataLoaderIter)) if one._num_yielded]
        one = max((one for one in alive if _left(one) >= 0), key=_left, default=None)
        return cls() if one is None else cls(weakref.ref(one), one._num_yielded)

    def is_over(self) -> bool:
        """Whether there was one, and it has come to its end or begun anew."""
        one = self.of()
        return bool(self.yielded) and (one is None or one._num_yielded < self.yielded or _left(one) == 0)

    def ends_within(self, seconds: float, since: float) -> bool:
        """Whether it is likely to, where it was read for so long."""
        one = self.of()
        return one is not None and since / self.yielded * max(0, _left(one)) < seconds


def _left(reading: Any) -> int:
    """Batches that a loader has still to give; -1: nobody knows."""
    try:
        return max(0, len(reading) - int(reading._num_yielded))
    except TypeError:  # of a stream
        return -1


@define(eq=False)
class _Stand:
    """Where a program stands, and what trains there."""

    stands: tuple[Line, ...] = ()
    trained: tuple[Any, ...] = ()
    """Parameters, whether each gets gradients, and those that each group of an optimizer holds."""
    rates: tuple[float | None, ...] = ()
    """Of the groups."""
    apart: bool = False
    """Whether these are other ones on some rank."""
    reading: Reading = field(factory=Reading)


@define(kw_only=True, eq=False)
class ScriptLooks:
    """The audit of a first step, and what a watch finds before the steps behind it."""

    arrivals: Arrivals
    steps: int
    """The last one, which is not taken."""
    ends: bool = True
    """Whether the script ends at its last look; else it goes on, and is looked at no more."""
    found: Audit | None = None
    watched: DriftWatch = field(init=False)
    _behind: dict[str, DriftWatch] = field(factory=dict, init=False)
    """Watches over trainings that have begun behind the first, by what they train."""
    _began: float = field(default=0.0, init=False)
    """When it looked first."""
    _until: float = field(default=0.0, init=False)
    """How long it waits behind its last step for another training to begin; 0: it does not."""
    _before: _Stand = field(factory=_Stand, init=False)
    """How all stood as it began to wait, or has looked again."""
    _last: int = field(default=0, init=False)
    """The step of the first optimizer at which nothing more is waited for, where it trains again; 0: it does not."""
    _taken_over: bool = field(default=False, init=False)
    """Whether another optimizer steps what the first one did."""

    def __attrs_post_init__(self) -> None:
        self.watched = DriftWatch(every=1, share=1.0, act=self._adds)
        if self.steps > 1:
            stand()

    def close(self) -> None:
        """Looks no more."""
        for one in (self.watched, *self._behind.values()):
            one.close()
        if self.found is not None and self._behind:
            seen = {what: min(one.steps, self.steps) for what, one in self._behind.items()}
            told = (f"{what}, {f'up to its step {at}' if at > 1 else ALONE}" for what, at in seen.items())
            self.found = evolve(self.found, beside=tuple(told))
        lets_go()

    @property
    def last(self) -> str:
        """The step before which it ends, in words."""
        return FIRST if self.steps == 1 else f"step {self.steps} of its optimizer"

    def first(self, found: Audit) -> None:
        """Takes the audit, and watches on where ranks can be asked together."""
        self.found, live, self._began = found, found.live, time.monotonic()
        apart = live is None or joins(live.model) or not (live.asks_ranks or world().size == 1)
        if self.steps == 1 or live is None or apart:
            self._leaves()
            return
        own = found.facts.parted + found.facts.own_sizes
        own += found.facts.window.cut if found.facts.window is not None else ()
        steps = stepping(live.optimizers[0])
        steps.register_step_pre_hook(self._meets)
        self.watched.start(live.model, live.optimizers, live.scheduler, apart=own)
        steps.register_step_pre_hook(self._counts)

    def other(self, found: Audit, *, heard: Window) -> None:
        """Takes what is wrong with the gradients of another optimizer, before its own first step.

        Of several that step behind one backward some may have no part in its batch. Where a training of its own
        begins, all is taken.
        """
        assert self.found is not None
        led, anew = heard.ledger.led, heard.phases.begins_anew
        root = found.facts.model.classes[found.facts.model.modules[0].cls].name
        told = [one for one in found.findings if one.rule in OF_GRADIENTS and (led or one.rule != NOTHING)]
        if anew:
            known = {(one.rule, one.where, one.what) for one in self.found.findings}
            told = [one for one in found.findings if (one.rule, one.where, one.what) not in known]
            told = [one for one in told if one.severity is not Severity.NOTE]
            self._goes_behind(found, root)
        when = f"Before its first step, behind step {self.watched.steps}" if anew else ""
        self._adds(tuple(map(partial(_of_root, root), told)), when)

    def _goes_behind(self, found: Audit, root: str) -> None:
        """Watches a training that begins behind the first, for as many steps of its own: on one rank, as it began."""
        live, trainer = found.live, found.facts.optimizers[0].name
        what = f"{root}, which {trainer} trains behind it"
        alike = sum(one.startswith(what) for one in self._behind)
        watch = DriftWatch(every=1, share=1.0)
        self._behind[f"{what} ({alike + 1})" if alike else what] = watch

        def adds(findings: tuple[Finding, ...]) -> None:
            named = tuple(map(partial(_of_root, root), findings))
            self._adds(named, f"In step {watch.steps} of {trainer}", None if live is None else live.scheduler)

        def counts(*_: Any) -> None:
            if watch.steps >= self.steps:
                watch.every = NEVER  # a hook cannot be taken off inside of a step
                if self._until:
                    self._leaves()

        watch.act = adds
        if live is not None and world().size == 1 and not joins(live.model):
            watch.start(live.model, live.optimizers, live.scheduler)
            stepping(live.optimizers[0]).register_step_pre_hook(counts)

    def later(self, told: dict[str, Any]) -> None:
        """Takes what a window has heard before a later step of any optimizer."""
        assert self.found is not None
        self._taken_over = told.get("phases", PhaseFacts(taken_over=self._taken_over)).taken_over
        if any(one.rule == NOTHING for one in self.found.findings):
            told = {**told, "unled": ()}
        self._adds(heard_behind(told))

    def ended(self, why: str) -> ScriptEnded:
        """What is raised where the script does not come so far."""
        error = ScriptEnded(why)
        error.audit = self.found
        return error

    def _meets(self, *_: Any) -> None:
        """All ranks come to a step before any is asked of it: one that has left a step out is behind by then."""
        if self.watched.steps and (self.ends or self.watched.every != NEVER):
            self.arrivals.steps()
            self.arrivals.meet(f"step {self.watched.steps + 1}")

    def _counts(self, *_: Any) -> None:
        assert self.found is not None
        self.found = evolve(self.found, steps=min(self.watched.steps, self.steps))
        if self.watched.steps >= max(self.steps, self._last) and not (self.ends and self._waits()):
            self._leaves()

    def _waits(self) -> bool:
        """Whether another training, or a change of what trains, may come soon. Collective where ranks are several.

        Where one has come, it is looked at as long as the first was.
        """
        if not self._until:
            if self.watched.every == NEVER or not any(world().gather(self._may_change())):
                return False
            self._until, self._before = time.monotonic() + WAITS_S, self._now()
            self._before.reading = Reading.now()
        self.watched.every, now = NEVER, self._now()
        over = time.monotonic() >= self._until or bool(self._behind)
        changed = (
            now.trained != self._before.trained or elsewhere(self._before.stands) or self._before.reading.is_over()
        )
        each = world().gather((over, changed, now.rates))
        now.apart = len({rates for *_, rates in each}) > 1
        if any(over for over, *_ in each):
            return False
        if any(changed for _, changed, _ in each) or now.apart > self._before.apart:
            self.watched.every, self._last, self._before = 1, self.watched.steps + self.steps - 1, now
            self.watched.look()
        return True

    def _may_change(self) -> bool:
        behind = changes_behind() or Reading.now().ends_within(WAITS_S, time.monotonic() - self._began)
        if world().size > 1:
            live = None if self.found is None else self.found.live
            return behind or (live is not None and isinstance(inner(live.scheduler), ReduceLROnPlateau))
        return not self._behind and (behind or makes_optimizer_behind(again=False) or trains_behind())

    def _now(self) -> _Stand:
        assert self.found is not None
        assert self.found.live is not None
        live = self.found.live
        groups = [group for one in live.optimizers for group in inner(one).param_groups]
        held = (tuple(map(id, group["params"])) for group in groups)
        params = ((id(param), param.requires_grad) for param in live.model.parameters())
        return _Stand(stands(), (*params, *held), tuple(as_rate(group.get("lr")) for group in groups))

    def _adds(self, findings: tuple[Finding, ...], when: str = "", scheduler: Any = None) -> None:
        assert self.found is not None
        known = {(one.rule, one.where) for one in self.found.findings}
        driven = scheduler or (None if self.found.live is None else self.found.live.scheduler)
        rests = driven is None  # nothing drives an optimizer that rests
        alone = rests or self._taken_over
        new = (one for one in findings if (one.rule, one.where) not in known)
        new = (one for one in new if not (alone and one.rule == "run.drift-unstepped"))
        watched = any(one.rule == "run.drift-trained" for one in self.found.findings)  # of the first model
        new = (one for one in new if not (watched and one.rule == "run.unfrozen-unheld"))
        at = when or (f"In step {self.watched.steps}" if self.watched.steps else BEHIND)
        told = tuple(evolve(one, what=f"{at}: {one.what}") for one in new)
        self.found = evolve(self.found, findings=self.found.findings + told)

    def _leaves(self) -> None:
        if self.ends:
            self.arrivals.leaves(LOOKED, self._stop)
        else:
            self.watched.every = NEVER

    def _stop(self) -> None:
        if self.found is not None and (self.arrivals.alone or self.steps > 1):
            self.found = everywhere(self.found)
        raise FirstStep


def _of_root(root: str, found: Finding) -> Finding:
    """A finding that says of which model it is, where it does not name a line of the program."""
    return found if LINE.fullmatch(found.where) else evolve(found, where=f"{root}: {found.where}")


def heard_behind(told: dict[str, Any]) -> tuple[Finding, ...]:
    """What is wrong with what a window has heard before a step behind the first."""
    rules = [by_id()[f"run.{name}"] for name in LATER] if any(told.values()) else []
    return findings_of(rules, RunFacts(window=WindowFacts(**told)))


@define(eq=False)
class HeardBehind:
    """The same of all steps behind the first, each once."""

    found: dict[tuple[str, str], Finding] = field(factory=dict)

    def later(self, told: dict[str, Any]) -> None:
        """As of ``ScriptLooks``."""
        for one in heard_behind(told):
            self.found.setdefault((one.rule, one.where), evolve(one, what=f"{BEHIND}: {one.what}"))

    def beside(self, found: Audit) -> tuple[Finding, ...]:
        """Those that the audit of the first step has not told."""
        known = {(one.rule, one.where) for one in found.findings}
        return tuple(one for key, one in self.found.items() if key not in known)


PUT_AROUND: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""What an audit has put around the models of a program; none of that is a model."""


def put_around(module: nn.Module) -> nn.Module:
    """The module, which is of these from now on."""
    PUT_AROUND.add(module)
    return module


def everywhere(found: Audit) -> Audit:
    """The audit with the findings of every rank, each once. Collective where there are several."""
    each = dict.fromkeys(finding for findings in world().gather(found.findings) for finding in findings)
    return evolve(found, findings=tuple(each))


def behind_closure(arguments: Any, named: Any, look: Callable[[], None]) -> Any:
    """Looks once the closure of a step has made its gradients, or now where it has none; what the step is to be given.

    Of an LBFGS, which calls its closure several times, behind the first call.
    """
    given = [one for one in (*arguments[1:], *named.values()) if callable(one)]
    if not given:
        look()
        return None
    looked = list[None]()

    def closure(*inside: Any, **options: Any) -> Any:
        result = given[0](*inside, **options)
        if not looked:
            looked.append(None)
            look()
        return result

    def replaced(one: Any) -> Any:
        return closure if one is given[0] else one

    return tuple(map(replaced, arguments)), {name: replaced(one) for name, one in named.items()}


_KINDS = (nn.Module, torch.optim.Optimizer, LRScheduler, DataLoader, _BaseDataLoaderIter)
"""Classes of what a loop has. The wrapper of accelerate's schedulers is none of them, and is found from inside."""


@cache
def is_of_a_loop(cls: type) -> bool:
    """Loaders of accelerate are torch's by ``__class__`` only, and not by ``type``."""
    return issubclass(cls, _KINDS) or any(base.__name__ == "DataLoaderAdapter" for base in cls.__mro__)


def alive_now() -> list[Any]:
    """Everything alive that a loop has."""
    return alive_of(is_of_a_loop)


class Earlier:
    """What was alive before a program began, as in other cells of a notebook; nothing of it is kept alive."""

    def __init__(self) -> None:
        alive = alive_now()
        self._things = {id(one): (weakref.ref(one), _read_of(one)) for one in alive}
        grads = [param.grad for one in alive for param in _params_of(one) if param.grad is not None]
        self._grads = {id(one): (weakref.ref(one), one._version) for one in grads}

    def used(self, alive: list[Any], optimizer: Any, called: Iterable[nn.Module]) -> list[Any]:
        """What is alive, without what was before and the program does not use: it calls, steps or reads nothing of it.

        ``called``: modules that were called from outside of any other.
        """
        mine = {id(param) for one in called for param in one.parameters()} | _held(optimizer)
        mine |= {id(one) for thing in alive for one in _params_of(thing) if self._is_new(one.grad)}
        return [one for one in alive if not self._knows(one) or self._uses(one, mine)]

    def _knows(self, thing: Any) -> bool:
        return thing is self._things.get(id(thing), (lambda: None,))[0]()

    def _is_new(self, grad: Tensor | None) -> bool:
        """Whether something has made it, or added to it, since then."""
        known, version = self._grads.get(id(grad), (lambda: None, 0))
        return grad is not None and (known() is not grad or version != grad._version)

    def _uses(self, thing: Any, mine: set[int]) -> bool:
        match thing:
            case nn.Module():
                return not mine.isdisjoint(map(id, thing.parameters()))
            case torch.optim.Optimizer():
                return not mine.isdisjoint(_held(thing))
            case LRScheduler():
                return not mine.isdisjoint(_held(inner(thing.optimizer)))
        return _read_of(thing) != self._things[id(thing)][1] or isinstance(thing, DataLoader)


def _read_of(thing: Any) -> int:
    """Batches that a pass over a loader has given."""
    return int(thing._num_yielded) if isinstance(thing, _BaseDataLoaderIter) else 0


def _params_of(thing: Any) -> list[nn.Parameter]:
    params = thing._parameters.values() if isinstance(thing, nn.Module) else ()
    return [one for one in params if one is not None]


def _held(optimizer: Any) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}

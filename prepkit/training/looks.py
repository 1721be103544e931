"""What is asked of a prepared model before its optimizer acts: each time, in the windows that are due, and once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.court import Court
from prepkit.facts.loop import LoopFacts
from prepkit.facts.run import RunFacts
from prepkit.facts.window import GradientFacts
from prepkit.findings import Finding
from prepkit.loading.passes import STREAMS, Passes
from prepkit.objects import fsdp1_flat
from prepkit.objects.fsdp2_units import rewritten
from prepkit.objects.local_part import local
from prepkit.objects.whole_gradients import average_without
from prepkit.observe.prepared.around import saved_in_parts
from prepkit.observe.prepared.averaging import awaited, reduced
from prepkit.observe.prepared.gradients import Watched, as_they_came, reducer
from prepkit.observe.prepared.mixing import mixes_empty, writes_lost
from prepkit.observe.prepared.optimizers import LastSteps
from prepkit.observe.prepared.ranks import buffers_apart
from prepkit.observe.prepared.step import StepLook
from prepkit.plan import Plan
from prepkit.plan.attestation import Asked
from prepkit.ranks.world import world
from prepkit.rules import by_id
from prepkit.rules import due as rules_due
from prepkit.rules.rule import Moment, Need, Rule, answers, findings_of
from prepkit.steps import ShardLoader
from prepkit.training.failed_forward import compiled_whole
from prepkit.training.left_out import groups

if TYPE_CHECKING:
    from prepkit.training.token_loss import Count

OFTEN = 64
"""Windows between two looks, once the first few are over."""


def due(window: int) -> bool:
    """Whether a window is looked at: the first, second, fourth, eighth ... and each 64th; the same on every rank.

    >>> [window for window in range(1, 200) if due(window)]
    [1, 2, 4, 8, 16, 32, 64, 128, 192]
    """
    return not window & (window - 1) or not window % OFTEN


Loss = tuple[torch.Tensor, "Count | None"]
"""A loss, and the number of tokens that it is a mean over; None: none was given."""


@define(eq=False, kw_only=True, repr=False)
class Looks:
    """Asks the rules of ``Moment.STEP``, ``DUE``, ``FIRST_STEP`` and ``SAVE``, with one look and one exchange."""

    plan: Plan
    court: Court
    look: StepLook
    beside: Callable[[], int]
    """Number of open models that loaders were prepared with, which this one's loop may read."""
    divided: bool = field(default=False, init=False)
    """Whether what the loop reads is known to be divided over the ranks."""
    _watched: Watched | None = field(default=None, init=False)
    """Notes gradients where the engine takes them away as they come."""
    _entered: bool = field(default=False, init=False)
    """Whether there was a forward."""
    _units: list[RemovableHandle] = field(factory=list, init=False)
    """Hooks that look at what units have gathered, in the first windows."""
    _written: dict[str, torch.Tensor] = field(factory=dict, init=False)
    """Name of what was gathered, and whether a forward of this window has written it."""
    _done: bool = field(default=False, init=False)
    """Whether the first step was looked at, and nothing refused it."""
    _alone: int = field(default=0, init=False)
    """Windows before whose step this rank was looked at by itself."""
    _together: int = field(default=0, init=False)
    """Windows before whose step all ranks were; a loop of the user's own has none."""
    _notes: bool = field(default=False, init=False)
    """Whether ranks add up gradients of other parameters where they have other ones, so that these are noted."""
    _given: int = field(default=0, init=False)
    """A digest of which parameters had gradients in each window since ranks were asked last."""
    _compared: tuple[int, ...] = field(default=(0,) * STREAMS, init=False)
    """What this rank's streams had begun with when ranks were asked last."""

    _reduced: tuple[Parameter, ...] = field(default=(), init=False)
    """What DDP reduces, as its reducer numbers it."""
    _last: LastSteps = field(factory=LastSteps, init=False)
    _awaited: frozenset[str] = field(default=frozenset(), init=False)
    """Names of what DDP waited for on this rank when the window ended."""

    def __attrs_post_init__(self) -> None:
        if isinstance(self.look.model, DistributedDataParallel):
            self._reduced = reduced(self.look.model)
        self._notes = self.plan.world_size > 1 and self._collective and bool(self.look.sharded)

    @property
    def _collective(self) -> bool:
        """Whether the ranks can be asked: torch knows no group of XLA's processes."""
        return self.plan.run.collectives != "xla"

    def watch(self, model: Module) -> None:
        """Notes gradients from now on, as they come."""
        self._watched = Watched(model)
        self._watched.begin()
        self._notes = self.plan.world_size > 1 and self._collective and self._watched.mixes

    def unwatch(self) -> None:
        """Notes none from now on."""
        if self._watched is not None:
            self._watched.end()

    def before_forward(self, model: Module) -> Iterator[RemovableHandle]:
        """Ask before the first forward what FSDP2 undoes in it: it puts its own parameters back into their places.

        Not where the whole model is compiled: its hooks would be. Nor where something has gathered the parameters
        already, as an entry point does. The hook raises ``RunRefused``. Where ranks share layers, another keeps what
        the model was given before the first step.
        """
        if compiled_whole(self.plan):
            return
        if self.plan.data_parallel_size < self.plan.world_size:
            yield model.register_forward_pre_hook(_untraced(self._enters), with_kwargs=True)
        if not isinstance(model, FSDPModule):
            return
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]

        def ask(*_: Any) -> None:
            first, self._entered = not self._entered, True
            if first and all(group.is_sharded for unit in units for group in groups(unit)):
                self.court.hear(findings_of(_local(Moment.DUE), self.look.changes()))

        yield model.register_forward_pre_hook(_untraced(ask), prepend=True)

    def _enters(self, _: Module, *given: Any) -> None:
        self.look.enters(None if self._done else given)

    def around_units(self, model: Module) -> Iterator[RemovableHandle]:
        """Note in the first two windows what a forward writes into gathered weights: a copy may be like its model once.

        Not where the whole model or a unit is compiled: its hooks would be.
        """
        known = self.look.known()
        of_fsdp1 = {id(unit): path for path, unit in fsdp1_flat.units(model).items()}

        def look(unit: Module) -> None:
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                for name, written in _rewritten(model, unit, known, of_fsdp1):
                    self._written[name] = written | self._written.get(name, written)

        for unit in () if compiled_whole(self.plan) else model.modules():
            if isinstance(unit, FSDPModule | FullyShardedDataParallel):
                inner = unit.module if isinstance(unit, FullyShardedDataParallel) else unit
                if inner._compiled_call_impl is None:
                    self._units.append(inner.register_forward_hook(_untraced(partial(_call, look, unit)), prepend=True))
        yield from self._units

    def _lost(self) -> tuple[str, ...]:
        """What was written, on this rank; nothing more is noted after the second window. Waits for the device."""
        found = tuple(name for name, written in self._written.items() if written)
        self._written.clear()
        while self._together > 1 and self._units:
            self._units.pop().remove()
        return found

    def finish_averaging(self) -> None:
        """Have DDP end what it waits for on this rank alone, before anything is asked of ranks that wait for this one.

        What it has waited for is told by ``before_step``. Raises ``RunRefused`` where the model was changed.
        """
        if isinstance(self.look.model, DistributedDataParallel) and self._collective:
            missing = awaited(self.look.model, self._reduced)
            if missing:
                self.court.hear(findings_of(_local(Moment.DUE), self.look.changes()))
                known = self.look.known()
                self._awaited = frozenset(known[id(param)] for param in missing)
                if all(param.requires_grad for param in missing):  # else one was frozen since, on every rank
                    average_without(missing)

    def before_averaging(self) -> None:
        """Raises ``RunRefused`` where the model is not the one that was prepared. Nothing is asked of other ranks."""
        self._alone += 1
        if self.look.written:
            self.court.ask(Moment.STEP, self.look.overwritten())
        if self._watched is not None:
            self._ask_stale(self._watched)
        if due(self._alone) and self._collective:
            self.court.hear(findings_of(_local(Moment.DUE), self.look.changes()))

    def after_micro_batch(self) -> None:
        """Raises ``RunRefused`` where the engine would add to gradients of an earlier window; inside a window."""
        if self._watched is not None:
            self._ask_stale(self._watched)
            if self._notes:
                self._note()
            self._watched.part()

    def _ask_stale(self, watched: Watched) -> None:
        if stale := watched.stale():
            self.court.ask(Moment.STEP, RunFacts(gradients=GradientFacts(stepped=len(stale), stale=stale)))

    def _note(self) -> None:
        there = self.look.there() if self._watched is None else self._watched.there()
        self._given = zlib.crc32(there, self._given)

    def before_saving(self, passes: Passes | None = None) -> None:
        """Raises ``RunRefused`` where a checkpoint or an export would hold other weights than those in the model.

        Warns where ``passes`` could not be gone on with, and where ranks hold other buffers than rank 0, whose are
        written. Collective.
        """
        lost = () if passes is None else passes.unrepeatable()
        apart = buffers_apart(self.look.model) if self._collective else ()
        self.court.ask(Moment.SAVE, evolve(self.look.overwritten(), unrepeatable=lost, buffers_apart=apart))

    def before_step(self, loss: Loss | None, epoch: int, passes: Passes) -> tuple[Asked, ...]:
        """Raises ``RunRefused`` on every rank, or on none; gives what was asked of the first step, nothing after that.

        ``loss`` is that of the last micro-batch. Collective in the windows that are due, which wait for the device.
        """
        self._together += 1
        passes.stepping()
        if self._notes:
            self._note()
        self.finish_averaging()
        try:
            asked = self._asked_before_step(loss, epoch, passes)
        finally:
            self._awaited = frozenset()  # it has come by now, as zeros
        if self._watched is not None:  # what was noted is kept while it refuses: the story stays the same
            self._watched.turn()
        return asked

    def _asked_before_step(self, loss: Loss | None, epoch: int, passes: Passes) -> tuple[Asked, ...]:
        first = not self._done
        once = _over_ranks(Moment.FIRST_STEP) if first else ()
        often: tuple[Rule, ...] = ()
        if self._collective and due(self._together):
            often = tuple(rule for rule in _over_ranks(Moment.DUE) if rule not in once)
        if not ((first and self._collective) or often):
            self._ask_awaited()
            return ()
        self._compared = passes.streams
        watched = self._watched
        look = self.look.gradients if watched is None else watched.gradients
        facts = self.look.over_ranks(
            {need for rule in (*often, *once) for need in rule.needs},
            self._loop(loss, passes),
            tuple(as_they_came(look(values=first), self._awaited)),
            own_pass=epoch,
            given=self._given,
            reduced=watched is None and first,  # later on only whether they are there is asked
            scaled=self.plan.owners.loss_scaling != "nobody",
        )
        if first:
            model = self.look.model
            facts = evolve(
                facts,
                saves_shards=saved_in_parts(model),
                mixes_empty=mixes_empty(model),
                writes_lost=writes_lost(model),
            )
        asked = answers(once, Moment.FIRST_STEP, facts)
        self.court.hear((*findings_of(often, facts), *(found for one in asked for found in one.found)))
        self._given = 0
        if not first:
            return ()
        self._done = True
        return asked

    def _ask_awaited(self) -> None:
        """Raises ``RunRefused`` on the rank alone on which DDP has waited: others have ended their windows."""
        if self._awaited:
            names = tuple(filter(self._awaited.__contains__, self.look.known().values()))
            found = GradientFacts(stepped=len(self._reduced), missing=names, awaited=names, awaited_on=(world().rank,))
            facts = evolve(self.look.changes(), gradients=found, world_size=self.plan.world_size)
            self.court.ask(Moment.STEP, facts)

    def before_close(self, passes: Passes) -> tuple[Finding, ...]:
        """What there is to say of streams begun, and of gradients, since ranks were asked last.

        Collective where there are any streams, or gradients that ranks could have mixed.
        """
        apart = self._notes and self.look.apart(self._given)
        facts = RunFacts(gradients=GradientFacts(stepped=0, apart_before=apart, by=reducer(self.look.model)))
        mixed = findings_of((by_id()["run.gradients-on-some-ranks"],), facts) if apart else ()
        if not (self._collective and passes.divides_streams):
            return mixed
        since = zip(passes.streams, self._compared, strict=True)
        own = tuple(now if now != before else 0 for now, before in since)
        loop = evolve(self._loop(None, passes), streams=self.look.streams(own))
        return (*mixed, *findings_of((by_id()["run.orders-apart"],), RunFacts(loop=loop)))

    def before_hand(self, optimizer: Optimizer | None) -> None:
        """Warn of a step of somebody else's over the gradients of the one before; None: of an engine's."""
        if optimizer is not None and self._last.again(optimizer):
            self.court.ask(Moment.STEP, RunFacts(restepped=type(optimizer).__name__))

    def before_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Raises ``RunRefused`` for state that is whole where the parameter is sharded; torch would fail later."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        held = [index for group in state.get("param_groups", ()) for index in group["params"]]
        whole = sum(
            isinstance(param, DTensor) and any(map(_is_whole, state.get("state", {}).get(index, {}).values()))
            for index, param in zip(held, params, strict=False)
        )
        if whole:
            self.court.ask(Moment.LOAD, RunFacts(whole_state=whole))

    def before_weights(self, model: Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Raises ``RunRefused`` for weights that are whole where the parameter is sharded."""
        params = () if prefix else model.named_parameters()
        whole = [name for name, param in params if isinstance(param, DTensor) and _is_whole(state.get(name))]
        if whole:
            self.court.ask(Moment.LOAD, RunFacts(whole_weights=tuple(whole)))

    def _loop(self, loss: Loss | None, passes: Passes) -> LoopFacts:
        fine = _finite(loss)
        given = any(isinstance(planned.step, ShardLoader) for planned in self.plan.steps)
        nobody = self.plan.run.divides_loaders and not (self.divided or self.beside())
        return LoopFacts(
            window=self._together,
            loss_finite=fine,
            own_loss_finite=fine,
            own_order=passes.began,
            own_streams=passes.streams,
            written=self._lost(),
            gathers="FSDP2" if isinstance(self.look.model, FSDPModule) else "FSDP1",
            loaders=len(passes.loaders),
            read=passes.read,
            apart=passes.apart if self.beside() < 2 else 0,
            divides="given" if given else "nobody" if nobody else "",
            readers=self.plan.world_size if given else self.plan.data_parallel_size,
        )


def _untraced(hook: Any) -> Any:
    """A user's torch.compile(ready.model) takes hooks in: what looks at Python objects is nothing to trace."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # torch has no types


def _call(look: Callable[[Module], None], unit: Module, *_: Any) -> None:
    look(unit)


def _rewritten(
    model: Module, unit: Module, known: Mapping[int, str], paths: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of what a unit has gathered, of the outermost one what any has, and whether it was written since."""
    if isinstance(unit, FullyShardedDataParallel):
        if unit._handle is not None:
            yield from fsdp1_flat.rewritten(paths[id(unit)], unit._handle)
        return
    for one in model.modules() if unit is model else (unit,):
        for group in groups(one) if isinstance(one, FSDPModule) else ():
            yield from ((known.get(id(param), ""), written) for param, written in rewritten(group))


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() > 0


def _finite(loss: Loss | None) -> bool:
    """A mean over no tokens is no number, and counts nothing (``training.token_loss``)."""
    if loss is None or bool(torch.isfinite(local(loss[0])).all()):
        return True
    return loss[1] is not None and not bool(loss[1])


def _local(moment: Moment) -> tuple[Rule, ...]:
    """Rules that one rank answers by itself, from an earlier look."""
    return tuple(rule for rule in rules_due(moment) if Need.BEFORE in rule.needs and Need.RANKS not in rule.needs)


def _over_ranks(moment: Moment) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules_due(moment) if Need.BEFORE not in rule.needs or Need.RANKS in rule.needs)

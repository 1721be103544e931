"""What is asked of a prepared model before its optimizer acts: each time, in the windows that are due, and once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.court import Court
from prepkit.facts.run import LoopFacts, RunFacts
from prepkit.findings import Finding
from prepkit.loading.passes import STREAMS, Passes
from prepkit.objects.local_part import local
from prepkit.observe.prepared.around import saved_in_parts
from prepkit.observe.prepared.gradients import Watched
from prepkit.observe.prepared.ranks import buffers_apart
from prepkit.observe.prepared.step import StepLook
from prepkit.plan import Plan
from prepkit.plan.attestation import Asked
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


@define(eq=False, kw_only=True)
class Looks:
    """Asks the rules of ``Moment.STEP``, ``DUE``, ``FIRST_STEP`` and ``SAVE``, with one look and one exchange."""

    plan: Plan
    court: Court
    look: StepLook
    beside: Callable[[], bool]
    """Whether loaders were prepared with another model, which this one's loop may read."""
    divided: bool = field(default=False, init=False)
    """Whether what the loop reads is known to be divided over the ranks."""
    _watched: Watched | None = field(default=None, init=False)
    """Notes the gradients of the first window where the engine takes them away as they come."""
    _entered: bool = field(default=False, init=False)
    """Whether there was a forward."""
    _done: bool = field(default=False, init=False)
    """Whether the first step was looked at, and nothing refused it."""
    _alone: int = field(default=0, init=False)
    """Windows before whose step this rank was looked at by itself."""
    _together: int = field(default=0, init=False)
    """Windows before whose step all ranks were; a loop of the user's own has none."""

    _compared: tuple[int, ...] = field(default=(0,) * STREAMS, init=False)
    """What this rank's streams had begun with when ranks were asked last."""

    @property
    def _collective(self) -> bool:
        """Whether the ranks can be asked: torch knows no group of XLA's processes."""
        return self.plan.run.collectives != "xla"

    def watch(self, model: Module) -> None:
        """Notes gradients from now on, as they come."""
        self._watched = Watched(model)
        self._watched.begin()

    def before_forward(self, model: Module) -> Iterator[RemovableHandle]:
        """Ask before the first forward what FSDP2 undoes in it: it puts its own parameters back into their places.

        Not where the whole model is compiled: its hooks would be. Nor where something has gathered the parameters
        already, as an entry point does. The hook raises ``RunRefused``.
        """
        if not isinstance(model, FSDPModule) or compiled_whole(self.plan):
            return
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]

        def ask(*_: Any) -> None:
            first, self._entered = not self._entered, True
            if first and all(group.is_sharded for unit in units for group in groups(unit)):
                self.court.hear(findings_of(_local(Moment.DUE), self.look.changes()))

        # a user's torch.compile(ready.model) takes hooks in: what looks at Python objects is nothing to trace
        untraced = torch.compiler.disable(ask)  # type: ignore[no-untyped-call]  # torch has no types
        yield model.register_forward_pre_hook(untraced, prepend=True)

    def before_averaging(self) -> None:
        """Raises ``RunRefused`` where the model is not the one that was prepared. Nothing is asked of other ranks."""
        self._alone += 1
        if self.look.written:
            self.court.ask(Moment.STEP, self.look.overwritten())
        if due(self._alone) and self._collective:
            self.court.hear(findings_of(_local(Moment.DUE), self.look.changes()))

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
        first = not self._done
        often: tuple[Rule, ...] = ()
        if self._collective and (due(self._together) or self._waits()):
            often = _over_ranks(Moment.DUE)
        if not ((first and self._collective) or often):
            return ()
        self._compared = passes.streams
        once = _over_ranks(Moment.FIRST_STEP) * first
        watched = self._watched
        seen = () if not first else tuple(self.look.gradients() if watched is None else watched.end())
        facts = self.look.over_ranks(
            {need for rule in (*often, *once) for need in rule.needs},
            self._loop(loss, passes),
            seen,
            own_pass=epoch,
            reduced=watched is None,
            scaled=self.plan.owners.loss_scaling != "nobody",
        )
        facts = evolve(facts, saves_shards=saved_in_parts(self.look.model)) if first else facts
        asked = answers(once, Moment.FIRST_STEP, facts)
        self.court.hear((*findings_of(often, facts), *(found for one in asked for found in one.found)))
        if not first:
            return ()
        self._done, self._watched = True, None  # what was noted is kept while it refuses: the story stays the same
        return asked

    def _waits(self) -> bool:
        """Whether DDP waits for gradients still, and has not averaged what is about to be stepped; as on all ranks.

        torch says so in the next forward, when the step was taken. Raises ``RunRefused`` where the model was changed.
        """
        try:
            if isinstance(self.look.model, DistributedDataParallel):
                self.look.model._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError:
            self.court.hear(findings_of(_local(Moment.DUE), self.look.changes()))
            return True
        return False

    def before_close(self, passes: Passes) -> tuple[Finding, ...]:
        """What there is to say of streams begun since ranks were asked last. Collective where there are any."""
        if not (self._collective and passes.divides_streams):
            return ()
        since = zip(passes.streams, self._compared, strict=True)
        own = tuple(now if now != before else 0 for now, before in since)
        loop = evolve(self._loop(None, passes), streams=self.look.streams(own))
        return findings_of((by_id()["run.orders-apart"],), RunFacts(loop=loop))

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
            loaders=len(passes.loaders),
            read=passes.read,
            divides="given" if given else "nobody" if nobody else "",
            readers=self.plan.world_size if given else self.plan.data_parallel_size,
        )


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

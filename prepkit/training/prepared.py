"""What apply returns: the prepared objects, and the same two lines for every engine."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import Factory, define, evolve, field
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.applying.apply import Applied
from prepkit.config.engines import SAME_DATA
from prepkit.court import Court, refused, report
from prepkit.facts import loop as events
from prepkit.facts.loop import LoopPlan
from prepkit.findings.text import spans
from prepkit.loading.arguments import check_count, check_folder, check_names
from prepkit.loading.passes import Passes
from prepkit.loop import learned
from prepkit.objects import joint_optimizer
from prepkit.objects.bare_tree import guard_save
from prepkit.objects.deepspeed import give_back_linear
from prepkit.objects.unwrap import unwrap
from prepkit.observe.prepared.step import StepLook
from prepkit.plan import Plan
from prepkit.plan.attestation import Asked, Attestation
from prepkit.ranks import end_groups
from prepkit.ranks.long_waits import LongWaits, tell_long_waits
from prepkit.ranks.peers import Peers, named, names_lost_rank
from prepkit.ranks.world import world
from prepkit.rules.run.loop import RULES
from prepkit.saving import run as saving
from prepkit.saving.contents import RunParts
from prepkit.training import owned_optimizers, token_loss
from prepkit.training.drivers import driver
from prepkit.training.evaluation import in_eval_mode, swaps_weights
from prepkit.training.failed_forward import explain
from prepkit.training.looks import Looks
from prepkit.training.loop import Closure, Loop
from prepkit.training.run_log import RunLog
from prepkit.training.run_ranks import RunRanks
from prepkit.training.token_loss import Count

if TYPE_CHECKING:
    from prepkit.objects.whole_gradients import WholeGradients
    from prepkit.objects.xla_gradients import XLAGradients

MOVED = {
    "barrier": "ready.ranks.barrier(name)",
    "check_saving": "ready.checkpoints.check(folder)",
    "ema": "pk.Ema(ready, decay)",
    "finish_saving": "ready.checkpoints.finish()",
    "gather": "ready.ranks.gather(value)",
    "gather_for_metrics": "ready.ranks.gather_for_metrics(value)",
    "history": "ready.loop.history",
    "is_main_process": "ready.ranks.is_main",
    "log_to": "ready.log.to(tracker)",
    "optimizers": "ready.loop.optimizers",
    "pending": "ready.loop.pending",
    "print": "ready.ranks.print(...)",
    "progress": "ready.ranks.progress(iterable)",
    "reduce": "ready.ranks.reduce(value)",
    "set_epoch": "ready.loop.passes.set_epoch(epoch)",
}
"""Members that are no longer here, to what to write now."""
_OPEN: weakref.WeakValueDictionary[int, Prepared] = weakref.WeakValueDictionary()
"""Those that were not closed, by identity."""


@define(kw_only=True)
class Prepared:
    """Model, optimizer, scheduler and loaders as the plan said, with a count of micro-batches.

    One micro-batch is ``loss = ...; ready.backward(loss); ready.step()``, whatever the engine and the accumulation.
    """

    model: Module
    optimizer: Optimizer | None = None
    scheduler: Any = None
    loaders: tuple[Any, ...] = ()
    plan: Plan = field(repr=False)
    _attestation: Attestation | None = field(default=None, repr=False)
    """All that was looked at after apply and before the first step; None: not verified."""
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss of float16 training; None for every other precision. Save its ``state_dict()`` with the rest."""
    loop: Loop = field(init=False, repr=False)
    """Where the loop is, such as ``ready.loop.pending``; what faces of other libraries drive it by."""
    ranks: RunRanks = field(init=False, repr=False)
    """What one rank does for all, such as ``ready.ranks.print(...)``, and where all meet."""
    _whole_gradients: WholeGradients | XLAGradients | None = field(default=None, repr=False)
    """Averages what every rank holds whole beside sharded parameters; None: there is nothing of that kind."""
    _peers: Peers | None = field(default=None, repr=False)
    """The other ranks: where one is lost while training, what is raised names it. None: alone."""
    _started: bool = False
    """Apply has started the process group, so that ``close`` ends it, unless others that are open train in it."""
    _group: int = field(factory=lambda: id(dist.group.WORLD), init=False, repr=False)
    """The identity of the process group that was there."""
    _court: Court = field(
        default=Factory(lambda self: Court(accepted=self.plan.run.accepted), takes_self=True), repr=False
    )
    """Refuses and warns."""
    _looks: Looks = field(init=False, repr=False)
    """Asks the rules about what is about to be stepped."""
    _watch: RemovableHandle | None = field(default=None, init=False, repr=False)
    """Hears of optimizers that the plan does not know, until ``close``."""
    _around: list[RemovableHandle] = field(factory=list, init=False, repr=False)
    """Hooks of the forward, until ``close``: what says more where it fails, and what looks before the first one."""
    checkpoints: saving.RunCheckpoints = field(init=False, repr=False)
    """What there is to checkpoints beside ``save`` and ``resume``, such as ``ready.checkpoints.finish()``."""
    log: RunLog = field(init=False, repr=False)
    """Writes values to the trackers of ``ready.log.to(...)``: ``ready.log({"loss": loss})``."""
    _waits: LongWaits | None = field(default=None, init=False, repr=False)
    _ended: list[Any] = field(factory=list, init=False, repr=False)
    """The groups that ``close`` has ended: threads of gloo may still use them."""

    def __attrs_post_init__(self) -> None:
        _OPEN[id(self)] = self
        plan, engine = self.plan, driver(self.model)
        look = StepLook(plan=plan, model=self.model, optimizers=joint_optimizer.members(self.optimizer))
        self._looks = Looks(plan=plan, court=self._court, look=look, beside=_dividing_loaders)
        loop = self.loop = Loop(
            plan=loop_plan(plan, self.model, self.optimizer, self.scaler, self.scheduler),
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            engine=engine,
            court=self._court,
            clip=plan.owners.clip,
            whole_gradients=self._whole_gradients,
            finish_averaging=self._looks.finish_averaging,
            before_averaging=self._looks.before_averaging,
            after_micro_batch=self._looks.after_micro_batch,
            before_step=_asking(self),
            after_engine_step=self._looks.look.settle,
            before_hand=self._looks.before_hand,
            before_state=self._looks.before_state,
            before_weights=self._looks.before_weights,
            passes=Passes(self.loaders),
        )
        guard_save(self.model)
        self._around += (*explain(self.model, plan), *self._looks.before_forward(self.model))
        self._around += self._looks.around_units(self.model)
        self.checkpoints = saving.of(self.model, self._court, _parting(self), self._peers)
        if engine.step is not None and self.optimizer is not None:
            self._looks.watch(self.model)
        self.loop.watch()
        called = lambda call, counts=False: loop.do(events.Called(call, counts=counts))  # noqa: E731
        self.ranks = RunRanks(self._peers, called, loop.passes, _same_data(plan))
        self.log = RunLog(self.ranks.is_main, plan, called, lambda: loop.steps)
        if self._peers is not None:
            self._peers.report_end()
            self._waits = tell_long_waits(self._peers, partial(report, every_rank=True))
        self.loop.average(forced=None)

    @property
    def attestation(self) -> Attestation | None:
        """All that was looked at after apply and before the first step; errors accepted and warnings told so far."""
        seen = self._attestation
        if seen is None:
            return None
        later = (rule for rule in self._court.overridden if rule not in seen.overridden)
        return evolve(seen, overridden=(*seen.overridden, *later), warned=tuple(self._court.warned.values()))

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken, those before a ``resume`` included."""
        return self.loop.steps

    @property
    def epoch(self) -> int:
        """The first epoch that has batches left: that of the first loader of training data, which ``resume`` puts back.

        Where no such loader was prepared it is what ``ready.loop.passes.set_epoch`` was given last.
        """
        counted = self.loop.passes.epoch
        return self.loop.passes.given_epoch if counted is None else counted

    @property
    def skipped(self) -> bool:
        """True where the last window ended without an optimizer step, because a gradient overflowed."""
        return self.loop.skipped

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of all gradients at the last optimizer step, before clipping.

        None where nothing counts it: no plan that clips by norm, and no engine that steps.
        """
        return self.loop.grad_norm

    @names_lost_rank
    def backward(self, loss: torch.Tensor, *, more: bool = False, mean_over: Count | None = None) -> None:
        """Add the gradients of one micro-batch. Divides the loss by the plan's number of micro-batches.

        A window that ``accumulate(last=True)`` cuts short is divided by the full number as well. With ``mean_over`` the
        loss is a mean over so many tokens, and counts as many: the gradients of the window are those of the mean over
        all of its tokens, on all ranks (``training.token_loss``). Once per micro-batch;
        ``more`` says that another loss of the same micro-batch follows, with a forward of its own; DeepSpeed takes one.
        Raises ``RunRefused`` for what would train wrongly, such as a ``step`` that was forgotten.
        """
        self.loop.backward(loss, more=more, mean_over=mean_over)

    @names_lost_rank
    def step(self, closure: Closure | None = None) -> bool:
        """End one micro-batch; True when it was the window's last and the optimizer has stepped.

        Then clips, steps the optimizer, ticks the scheduler and clears the gradients, in this order. Where float16
        gradients overflowed neither optimizer nor scheduler steps, ``skipped`` is True and the loss scale goes down
        (behaviour W-5, W-14). ``closure``, for LBFGS, computes the loss, calls ``backward`` with it and returns it.
        Raises ``RunRefused``, with nothing stepped, for what would train wrongly; on every rank where the gradients of
        the first window would (``training.looks``).
        """
        return self.loop.step(closure)

    @names_lost_rank
    def skip(self) -> None:
        """Leave the micro-batch under way out: the next one begins as if it had not been, and no ``step`` is called.

        For a loss that is not finite, or a batch that has failed in the forward; its gradients are thrown away. Raises
        ``RunRefused`` after a ``backward`` that has added them to those of earlier micro-batches of the window.
        Every rank calls it, or none: it waits for the others, and raises ``RunRefused`` with nothing left out where one
        does not come within half of what ``apply`` waits for a rank (``Config.timeout_s``).
        """
        if self._peers is not None and (elsewhere := self._peers.meet(self.plan.run.timeout_s / 2)):
            who = f"rank{'s' * (len(elsewhere) > 1)} {spans(elsewhere)}"
            what = f"This rank leaves a micro-batch out, and {who} did not: all ranks average the same micro-batches."
            raise refused("run.ranks-skips", "ready.skip()", what)
        self.loop.skip()

    def accumulate(self, *, last: bool = False) -> AbstractContextManager[None]:
        """One micro-batch: forward, ``backward`` and ``step`` inside. Needed only to end a window early.

        ``last=True``, as for the last batch of a loader, makes ``step`` step the optimizer whatever the count.
        """
        self.loop.do(events.Called("ready.accumulate()"))
        return self._accumulating(last=last)

    @contextmanager
    def _accumulating(self, *, last: bool) -> Iterator[None]:
        with self.loop.accumulating(last=last), named(self._peers):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, modules are in eval mode and nothing has a gradient; afterwards all is as before. On every rank.

        Collective at its start where DDP has buffers. ``backward`` and ``step`` raise ``RunRefused`` inside, and where
        eval mode may put other weights into the model ``save`` and ``resume`` do; it raises between ``backward`` and
        ``step`` where the engine may lose gradients in a forward.
        """
        with named(self._peers, "ready.evaluating()"):
            self.loop.do(events.EvaluationEntered())
            try:
                engine = self.loop.engine
                forget = partial(engine.left_out, self.model, drop=False, failed=False)
                with in_eval_mode(self.model, joint_optimizer.members(self.optimizer), engine.settle, forget):
                    yield
            finally:
                self.loop.do(events.EvaluationLeft())

    def unwrap(self, *, keep_autocast: bool = True, keep_compiled: bool = True) -> Module:
        """The module that was given, out of its wrappers. What is sharded in place stays sharded."""
        return unwrap(self.model, keep_autocast=keep_autocast, keep_compiled=keep_compiled)

    @names_lost_rank
    def save(self, folder: str, *, keep: int = 1, wait: bool = True) -> None:
        """Write all that another run needs to go on, every rank its shards. Collective; see ``saving``.

        The checkpoints that were in the folder count until the new one is whole; then all but the last ``keep`` go.
        Without ``wait`` it returns once all is copied to host memory, and training goes on; what goes wrong then is
        raised by the next ``save``, ``checkpoints.finish`` or ``close``. Raises on every rank: ``RunRefused`` for a
        folder that is none or differs over them, inside an accumulation window, whose gradients are in no checkpoint,
        and inside ``evaluating()``, where other weights may be in the place of the trained ones;
        ``CheckpointFailed`` where it cannot be written.
        """
        check_count("keep", keep, least=1)
        self.loop.do(events.Saved())
        self._looks.before_saving(self.loop.passes)
        with self.loop.allowed():
            self.checkpoints.run.save(self._parts(), folder, keep=keep, wait=wait)

    @names_lost_rank
    def resume(
        self, folder: str, *, accept: str | Collection[str] = (), only_model: bool = False, missing_ok: bool = False
    ) -> bool:
        """Go on from the newest whole checkpoint in the folder, on any number of ranks, mesh and engine. Collective.

        Raises on every rank: ``RunRefused`` with all that does not fit, before anything is changed, also for a folder
        that is none or differs over them, and inside a window; ``accept`` has the id or ids of errors that may pass.
        ``CheckpointFailed`` where it cannot be read. ``only_model`` reads weights alone. ``missing_ok``: returns False
        where no checkpoint was finished in the folder yet, or there is no such folder; a warning on rank 0 says that
        training begins at step 0, with the folder's whole path.
        """
        check_names("accept", accept)
        self.loop.do(events.Resuming())
        with self.loop.allowed():
            resumed = self.checkpoints.run.resume(
                self._parts(), folder, accept=accept, only_model=only_model, missing_ok=missing_ok
            )
        if resumed is None:
            return False
        self._looks.look.settle()
        self.loop.resumed(self.steps if resumed.steps is None else resumed.steps, resumed.batches)
        return True

    def _parts(self) -> RunParts:
        """The parts of this run that a checkpoint is made of."""
        return RunParts(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            loaders=self.loaders,
            plan=self.plan,
            attestation=self.attestation,
            steps=self.steps,
            epoch=self.epoch,
            batches=learned(self.loop.state),
            set_epoch=self.loop.passes.set_epoch,
        )

    @names_lost_rank
    def export(self, folder: str) -> None:
        """Write the whole model as safetensors, for ``from_pretrained``. Collective; rank 0 holds all of it.

        Raises ``CheckpointFailed`` on every rank where it cannot be written, or does not hold what was trained.
        """
        from prepkit.training.export import export  # late, as torch's checkpoints are

        check_folder("ready.export", folder)
        self._looks.before_saving()
        export(folder, self.model, masters=not self.loop.state.averages)  # averages are in the model alone

    @names_lost_rank
    def close(self, *, keep_group: bool = False) -> list[Any]:
        """Let go of the wrapper, then end the process group if apply has started it. For the end of training.

        Afterwards ``model`` is the module that was given, and what trains, saves, logs or asks other ranks raises
        ``RunRefused``; keep no other reference to the wrapper. Collective where the group is ended: every rank waits
        for the others, so that none loses its last collective. Of several that were prepared the last one that is
        closed ends the group. A group that a wrapper of another model still uses is left to the process, with a
        warning. While an exception is under way, as in a ``finally:``, it waits for nobody: the others are told by
        their next collective. A checkpoint that is being written has a minute then. Raises ``RunRefused`` in the end
        where a stream was read last of which each rank has other samples. ``keep_group`` leaves it for another run.
        Returns what ended groups leave, to be kept until the process ends where it ends at once: a thread of gloo may
        still use it.
        """
        failing = sys.exc_info()[1] is not None
        _OPEN.pop(id(self), None)
        meets = self._started and not keep_group and not failing and world().running
        late = self._looks.before_close(self.loop.passes) if meets else ()
        self.checkpoints.close(failing=failing)
        self.log.finish()
        self.loop.passes.rest()
        while self._around:
            self._around.pop().remove()
        if self.loop.plan.engine_steps:
            give_back_linear()
        owned_optimizers.release(self, joint_optimizer.members(self.optimizer), self._watch)
        self.model = unwrap(self.model)
        self.loop.close(self.model, driver(self.model), failing=failing)
        self._looks.look.let_go(self.model)
        self._looks.unwatch()
        if self._whole_gradients is not None:
            self._whole_gradients.unwatch()
            self._whole_gradients = None
        gc.collect()  # a DDP wrapper refers to itself; one that outlives its group can deadlock when it goes
        if self._started and not keep_group and world().running:
            if failing:
                end_groups.disconnect(None)
            else:
                heirs = [one for one in _OPEN.values() if one._group == id(dist.group.WORLD)]
                self._ended += end_groups.end_unless_used(self.model, self._court.hear, others=len(heirs))
                for heir in heirs[:1]:
                    heir._started = True
        if self._peers is not None and not failing:
            self._peers.retract()
        if self._waits is not None:
            self._waits.stop()
        self._court.hear(late)
        return self._ended

    if not TYPE_CHECKING:  # a checker knows the members, and would take any name for one of them

        def __getattr__(self, name: str) -> Any:
            """Say what to write for a member that has moved."""
            now = f"; write {MOVED[name]}" if name in MOVED else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{now}", name=name, obj=self)

    def _attest(self, asked: tuple[Asked, ...]) -> None:
        """Put what was asked before the first step into the attestation."""
        if self._attestation is not None and asked:
            self._attestation = evolve(self._attestation, asked=(*self._attestation.asked, *asked))


def _dividing_loaders() -> int:
    """Return how many models that are open were prepared with loaders, as one of the two of a GAN, or both."""
    return sum(bool(one.loaders) for one in _OPEN.values())


def _asking(ready: Prepared) -> Callable[[], None]:
    """Ask the rules that are due before the optimizer acts. Collective in the windows that are due."""
    weak = weakref.ref(ready)

    def ask() -> None:
        if (own := weak()) is not None:
            own._attest(own._looks.before_step(own.loop.loss, own.epoch, own.loop.passes))

    return ask


def _parting(ready: Prepared) -> Callable[[], RunParts]:
    """Give the parts of a run as they are when they are asked for, without keeping the run alive."""
    weak = weakref.proxy(ready)

    def parts() -> RunParts:
        found: RunParts = weak._parts()
        return found

    return parts


def _same_data(plan: Plan) -> int:
    """Neighbouring ranks that read the same samples: those that differ on the last axes of the mesh alone."""
    return prod(axis.size for axis in plan.mesh if axis.name in SAME_DATA)


def loop_plan(plan: Plan, model: Any, optimizer: Any, scaler: Any, scheduler: Any) -> LoopPlan:
    """The constants that the loop of a prepared model asks for."""
    owners, run = plan.owners, plan.run
    engine_ticks = run.engine_steps and owners.scheduler != "prepkit"
    several = optimizer is not None and any(isinstance(one, LBFGS) for one in joint_optimizer.members(optimizer))
    return LoopPlan(
        accumulation=owners.accumulation_steps,
        optimizer="" if optimizer is None else type(optimizer).__name__,
        wants_closure="LBFGS" if several else "",
        engine=run.engine,
        engine_steps=run.engine_steps,
        averages=plan.data_parallel_size > 1 and run.collectives == "torch",
        wrapper_averages=isinstance(model, DistributedDataParallel),
        loses_gradients=isinstance(model, FullyShardedDataParallel),
        swaps_weights=swaps_weights(model, () if optimizer is None else joint_optimizer.members(optimizer)),
        shows_gradients=run.shows_gradients,
        average_each=run.average_each,
        loss_scaled=scaler is not None,
        clips="" if owners.clip is None else str(owners.clip),
        ticks=0 if engine_ticks or scheduler is None else owners.scheduler_ticks,
        global_batch=run.global_batch is not None,
        no_mean_over=token_loss.without_effect(plan, model),
        accepted=frozenset(rule.id for rule in RULES if rule.overridable and rule.id in run.accepted),
    )


def prepared(applied: Applied) -> Prepared:
    """The objects of an applied plan with the loop around them: what ``pk.apply`` returns."""
    target = applied.target
    ready = Prepared(
        model=target.model,
        optimizer=target.optimizer,
        scheduler=target.scheduler,
        loaders=tuple(target.loaders),
        scaler=target.scaler,
        plan=applied.plan,
        attestation=applied.attestation,
        peers=applied.peers,
        started=applied.started,
        court=applied.court,
        whole_gradients=target.whole_gradients,
    )
    ready._watch = owned_optimizers.own(ready, ready.loop, applied.params)
    return ready

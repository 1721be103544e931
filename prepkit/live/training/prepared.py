"""What apply returns: the prepared objects, and the same two lines for every engine."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, TextIO

import torch
import torch.distributed as dist
from attrs import define, evolve, field
from torch.nn import Module
from torch.optim import Optimizer

from prepkit.config import FSDP1, XLA
from prepkit.config.mesh import SAME_DATA
from prepkit.live.checkpoints import session
from prepkit.live.data.passes import Passes
from prepkit.live.data.reduce import How, gather_over_ranks, reduce_over_ranks
from prepkit.live.model import joint_optimizer
from prepkit.live.model.bare_tree import guard_save
from prepkit.live.model.deepspeed import give_back_linear
from prepkit.live.model.unwrap import unwrap
from prepkit.live.model.whole_gradients import WholeGradients
from prepkit.live.model.xla_gradients import XLAGradients
from prepkit.live.ranks import end_groups, last_words, launcher, named_barrier
from prepkit.live.ranks.long_waits import LongWaits, tell_long_waits
from prepkit.live.ranks.peers import Peers, named, names_lost_rank
from prepkit.live.ranks.within import check_limit
from prepkit.live.training import closures, export, owned_optimizers, restored_settings, terminal, token_loss
from prepkit.live.training.arguments import check_count, check_folder, check_names
from prepkit.live.training.closures import Closure
from prepkit.live.training.drivers import Driver, driver
from prepkit.live.training.ema import Ema
from prepkit.live.training.evaluation import Evaluation
from prepkit.live.training.first_look import FirstLook
from prepkit.live.training.loop_order import LoopOrder
from prepkit.live.training.losses import check_loss
from prepkit.live.training.model_changes import ModelChanges
from prepkit.live.training.open_run import while_open
from prepkit.live.training.optimizer_step import OptimizerStep, parameters
from prepkit.live.training.ranks_alike import Loss, RanksAlike
from prepkit.live.training.run_log import RunLog
from prepkit.live.training.token_loss import Count, TokenWindow
from prepkit.live.training.trackers import TrackerSpec
from prepkit.plan import Plan
from prepkit.plan.drift import Drift


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
    attestation: Any = None
    """What ``verify`` found; None: not verified."""
    drift: tuple[Drift, ...] = field(default=(), repr=False)
    """Facts that were not as planned and do no harm, such as another library version."""
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss of float16 training; None for every other precision. Save its ``state_dict()`` with the rest."""
    whole_gradients: WholeGradients | XLAGradients | None = field(default=None, repr=False)
    """Averages what every rank holds whole beside sharded parameters; None: there is nothing of that kind."""
    peers: Peers | None = field(default=None, repr=False)
    """The other ranks: where one is lost while training, what is raised names it. None: alone."""
    started: bool = False
    """Whether apply has started the process group, so that ``close`` ends it."""
    _end: OptimizerStep = field(init=False, repr=False)
    """Clips, steps and ticks."""
    _first: FirstLook = field(init=False, repr=False)
    """Looks at the gradients of the first window."""
    _changes: ModelChanges = field(init=False, repr=False)
    """Looks whether the model is still the one that was prepared."""
    _alike: RanksAlike = field(init=False, repr=False)
    """Looks whether the ranks still train alike."""
    _loss: Loss | None = field(default=None, init=False, repr=False)
    """Of the last backward, and what it is a mean over."""
    _seen: int = field(default=0, init=False, repr=False)
    """Micro-batches since the last optimizer step."""
    _last: bool = field(default=False, init=False, repr=False)
    """Whether the present micro-batch ends the window before it is full."""
    _order: LoopOrder = field(factory=LoopOrder, init=False, repr=False)
    """Whether forward, backward and step follow each other."""
    _tokens: TokenWindow = field(factory=TokenWindow, init=False, repr=False)
    """What the losses of the window under way are means over."""
    _evaluation: Evaluation = field(factory=Evaluation, init=False, repr=False)
    """Whether ``evaluating()`` is open."""
    _watch: Any = field(default=None, init=False, repr=False)
    """Refuses optimizers that the plan does not know, until ``close``."""
    steps: int = field(default=0, init=False)
    """Optimizer steps that were taken, those before a ``resume`` included."""
    _told_epoch: int = field(default=0, init=False, repr=False)
    """What ``set_epoch`` was told last; ``resume`` puts it back."""
    at_window: Callable[[], None] | None = field(default=None, init=False, repr=False)
    """Called by ``step`` on every rank, whenever a window has ended; see ``training.preemption``."""
    _checkpoints: session.Checkpoints = field(init=False, repr=False)
    _passes: Passes = field(init=False, repr=False)
    _log: RunLog = field(init=False, repr=False)
    closed: bool = field(default=False, init=False)
    """Whether ``close`` was called."""
    _waits: LongWaits | None = field(default=None, init=False, repr=False)
    _ended: list[Any] = field(factory=list, init=False, repr=False)
    """The groups that ``close`` has ended."""

    def __attrs_post_init__(self) -> None:
        self._changes = ModelChanges(plan=self.plan, model=self.model, optimizers=self.optimizers)
        self._alike = RanksAlike(plan=self.plan, optimizers=self.optimizers)
        self._end = OptimizerStep(
            plan=self.plan,
            driver=driver(self.model),
            order=self._order,
            changes=self._changes,
            clip=self.plan.owners.clip,
            scheduler=self.scheduler,
            scaler=self.scaler,
        )
        self._first = FirstLook(plan=self.plan)
        self._order.shows_gradients = not (self.engine_steps or isinstance(self.plan.config.engine, FSDP1))
        self._order.watch(self.model)
        guard_save(self.model)
        self._checkpoints = session.of(self.model)
        if self._driver.step is not None and self.optimizer is not None:
            self._first.watch(self.model)
        self._end.watch(self.model, self.optimizers)
        self._passes = Passes(self.loaders, self._sync)
        self._log = RunLog(self.is_main_process, self.plan.config)
        if self.peers is not None:
            last_words.leave_at_exit(self.peers)
            self._waits = tell_long_waits(self)
        self._sync()

    @property
    def skipped(self) -> bool:
        """Whether the last window ended without an optimizer step, because a gradient overflowed."""
        return self._end.skipped

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of all gradients at the last optimizer step, before clipping; None unless the plan clips by norm."""
        return self._end.grad_norm

    @property
    def _driver(self) -> Driver:
        return self._end.driver

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Each of the optimizers that ``step`` steps; ``optimizer`` stands for all of them where there are several."""
        return joint_optimizer.members(self.optimizer)

    @property
    def epoch(self) -> int:
        """The first epoch that has batches left: that of the first loader of training data, which ``resume`` puts back.

        Where no such loader was prepared it is what ``set_epoch`` was told last.
        """
        counted = self._passes.epoch
        return self._told_epoch if counted is None else counted

    @property
    def engine_steps(self) -> bool:
        """Whether the engine clips, steps and clears by itself, as DeepSpeed's does."""
        return self._driver.step is not None

    @property
    def in_step(self) -> bool:
        """Whether ``step`` is under way, as inside a closure."""
        return self._end.acting

    @property
    def in_use(self) -> bool:
        """Whether ``backward`` was ever called: a trainer with a loop of its own never does."""
        return self._order.used

    @property
    def in_micro_batch(self) -> bool:
        """Whether ``backward`` has been called, and the ``step`` that ends its micro-batch has not."""
        return self._order.begun

    @property
    def ends_window(self) -> bool:
        """Whether the micro-batch that runs now is the last of its window, so that ``step`` will step the optimizer."""
        return self._at_boundary()

    @property
    def pending(self) -> int:
        """Micro-batches since the last optimizer step: those whose gradients wait for the end of their window."""
        return self._seen + self._order.begun

    @while_open
    @names_lost_rank
    def backward(self, loss: torch.Tensor, *, more: bool = False, mean_over: Count | None = None) -> None:
        """Adds the gradients of one micro-batch. Divides the loss by the plan's number of micro-batches.

        A window that ``accumulate(last=True)`` cuts short is divided by the full number as well. With ``mean_over`` the
        loss is a mean over so many tokens, and counts as many: the gradients of the window are those of the mean over
        all of its tokens, on all ranks (``training.token_loss``). Once per micro-batch;
        ``more`` says that another loss of the same micro-batch follows, with a forward of its own; DeepSpeed takes one.
        Raises ``LoopOutOfOrder`` where ``step`` was forgotten, or DDP's forward has not run.
        """
        self._evaluation.refuse("ready.backward()")
        check_loss(loss)
        taken = self._driver.backward is not None
        if more and taken:
            raise RuntimeError("DeepSpeed counts micro-batches by their backward; add the losses up for one")
        self._tokens.check(self, loss, mean_over, more=more)
        if self._end.clears:
            self._order.before_window(param for one in self.optimizers for param in parameters(one))
        self._order.before_backward(self.model, more=more, keeps=not taken)
        self._loss = loss.detach(), mean_over
        loss = self._tokens.weighed(loss, mean_over)
        if self._driver.backward is not None:
            self._driver.backward(self.model, loss)
            return
        loss = loss / self.plan.owners.accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types
        self._order.after_backward(self.model)

    @while_open
    @names_lost_rank
    def step(self, closure: Closure | None = None) -> bool:
        """Ends one micro-batch; True when it was the window's last and the optimizer has stepped.

        Then clips, steps the optimizer, ticks the scheduler and clears the gradients, in this order. Where float16
        gradients overflowed neither optimizer nor scheduler steps, ``skipped`` is True and the loss scale goes down
        (behaviour W-5, W-14). ``closure``, for LBFGS, computes the loss, calls ``backward`` with it and returns it.
        Raises ``RuntimeError`` without an optimizer; and ``FirstStepRefused`` on every rank, with nothing stepped,
        where the gradients of the first window would train wrongly (``training.first_step``). ``LoopOutOfOrder``
        without a ``backward`` in this micro-batch.
        """
        self._evaluation.refuse("ready.step()")
        optimizer = closures.stepped(self, closure)
        ended = self._at_boundary()
        if closure is None:
            self._order.before_step(self.model, ended=ended)
            if ended:
                self._order.before_window_end(self.model, scaled=self.scaler is not None)
        self._passes.warn_windows(self.plan.owners.accumulation_steps)
        factor = self._tokens.end(self.plan.owners.accumulation_steps) if ended else None
        if closure is None and ended:
            self._order.before_tick(self._end.ticked_here)
            if factor is not None and not self.engine_steps:
                token_loss.multiply_gradients(parameters(optimizer), factor)
            self._look_at_gradients()
        if self._driver.step is not None:
            with token_loss.multiplied_by_engine(self.model, factor):
                self._end.by_engine(self.model, ended=ended)
        elif ended:
            self._end.by_optimizer(self.model, optimizer, closure, self._look_at_gradients)
        self._seen = 0 if ended else self._seen + 1
        self._passes.trained(ended=ended)
        self._last = False
        self._order.after_step(self.model, ended=ended)
        self._sync()
        stepped = ended and not self.skipped
        self.steps += stepped
        if ended and self.at_window is not None:
            self.at_window()
        return stepped

    def _look_at_gradients(self) -> None:
        """Averages those of whole parameters; looks once, before the first step, and puts it into the attestation."""
        self._driver.settle(self.model)
        self._changes.before_step()
        if not isinstance(self.plan.config.engine, XLA):  # torch knows no group of its processes
            self._alike.before_step(self.model, self._loss, self.epoch)
        if self.whole_gradients is not None:
            self.whole_gradients.average()
        checks = self._first.look(self.model, self._passes)
        if self.attestation is not None and checks:
            self.attestation = evolve(self.attestation, checks=(*self.attestation.checks, *checks))

    def unwrap(self, *, keep_autocast: bool = True, keep_compiled: bool = True) -> Module:
        """The module that was given, out of its wrappers (``live.unwrap``). What is sharded in place stays sharded."""
        return unwrap(self.model, keep_autocast=keep_autocast, keep_compiled=keep_compiled)

    def ema(self, decay: float = 0.999) -> Ema:
        """A moving average of the trained parameters from here on, in the parts that each rank holds; see ``Ema``."""
        return Ema(self.model, decay, self._evaluation)

    @while_open
    @names_lost_rank
    def save(self, folder: str, *, keep: int = 1, wait: bool = True) -> None:
        """Writes all that another run needs to go on, every rank its shards. Collective; see ``live.checkpoints``.

        The checkpoints that lay in the folder count until the new one is whole; then all but the last ``keep`` go.
        Without ``wait`` it returns once all is copied to host memory, and training goes on; what goes wrong then is
        raised by the next ``save``, ``finish_saving`` or ``close``. Raises ``CheckpointFailed`` on every rank, also for
        a folder that differs over them; ``RuntimeError`` inside an accumulation window, whose gradients are in no
        checkpoint; and ``LoopOutOfOrder`` inside ``evaluating()``, where other weights than the trained ones may lie.
        """
        check_count("keep", keep, least=1)
        self._evaluation.refuse_saving("ready.save()")
        self._between_windows("a checkpoint holds no gradients; save after a step() that returned True")
        self._changes.before_reading("a checkpoint would hold those")
        self._end.own_loop.before_count("ready.save()", used=self.in_use, stacklevel=5)
        with self._end.allowed():
            self._checkpoints.save(self, folder, keep=keep, wait=wait)

    @names_lost_rank
    def finish_saving(self) -> None:
        """Waits for a checkpoint that is being written. Raises ``CheckpointFailed`` where it could not be."""
        self._checkpoints.writer.finish()

    @names_lost_rank
    def check_saving(self, folder: str) -> None:
        """Makes the folder; raises ``CheckpointFailed`` now for what would keep ``save`` from working. Collective."""
        self._checkpoints.check(self, folder)

    @while_open
    @names_lost_rank
    def resume(
        self, folder: str, *, accept: str | Collection[str] = (), only_model: bool = False, missing_ok: bool = False
    ) -> bool:
        """Goes on from the newest whole checkpoint in the folder, on any number of ranks, mesh and engine. Collective.

        Raises ``CheckpointFailed`` on every rank with all that does not fit, before anything is changed; ``accept``
        has the id or ids of what may pass (``checkpoints.fits``). ``only_model`` reads weights alone. ``missing_ok``:
        returns False where no checkpoint was finished in the folder yet, or there is no such folder; rank 0 logs a
        warning that training begins anew, with the folder's whole path. Likewise ``CheckpointFailed`` for what is no
        path, and for a folder that is not the same on every rank.
        """
        check_names("accept", accept)
        self._evaluation.refuse_saving("ready.resume()")
        what = "their gradients belong to what is replaced; resume before the first backward, or after a step() that"
        self._between_windows(f"{what} returned True")
        before = restored_settings.settings(self.optimizers, self.scheduler)
        with self._end.allowed():
            resumed = self._checkpoints.resume(
                self, folder, accept=accept, only_model=only_model, missing_ok=missing_ok
            )
        if resumed:
            told = restored_settings.replaced(before, restored_settings.settings(self.optimizers, self.scheduler))
            if told and self.is_main_process:
                warnings.warn(told, stacklevel=4)
            self._changes.settle()
            self._order.after_resume()
        return resumed

    def _between_windows(self, otherwise: str) -> None:
        if self.pending:
            begun = f"{self.pending} of {self.plan.owners.accumulation_steps} micro-batches of this window have run"
            raise RuntimeError(f"{begun}, and {otherwise}")

    @names_lost_rank
    def export(self, folder: str) -> None:
        """Writes the whole model as safetensors, for ``from_pretrained``. Collective; rank 0 holds all of it."""
        check_folder("ready.export", folder)
        self._changes.before_reading("they alone are exported")
        export.export(folder, self.model, masters=not self._evaluation.averages)  # averages lie in the model alone

    @names_lost_rank
    def close(self) -> None:
        """Lets go of the wrapper, then ends the process group if apply has started it. For the end of training.

        Afterwards ``model`` is the module that was given, and what trains, saves, logs or asks other ranks raises
        ``RuntimeError``; keep no other reference to the wrapper. Collective where
        the group is ended: every rank waits for the others, so that none loses its last collective.
        """
        self._checkpoints.writer.close()
        self._log.finish()
        self.closed = True
        if self.engine_steps:
            give_back_linear()
        owned_optimizers.release(self)
        self._end.release()
        self.model = unwrap(self.model)
        self._end.driver = driver(self.model)
        self._changes.let_go(self.model)
        if self.whole_gradients is not None:
            self.whole_gradients.unwatch()
            self.whole_gradients = None
        gc.collect()  # a DDP wrapper refers to itself; one that outlives its group can deadlock when it goes
        if self.started and dist.is_initialized():
            dist.barrier()
            self._ended += end_groups.end()
        if self.peers is not None:
            last_words.take_back(self.peers)
        if self._waits is not None:
            self._waits.stop()

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which prints and writes what stands once."""
        return launcher.rank() == 0

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """``print`` on the main process alone, above a bar of ``progress`` that is open."""
        terminal.show(self.is_main_process, values, sep, end, file)

    def progress(self, iterable: Iterable[Any], **options: Any) -> Any:
        """The items, with a bar of tqdm on the main process where a person looks; ``options`` are tqdm's.

        A loader that goes on inside a pass begins its bar there. ``disable=False`` shows the bar in a file as well.
        """
        return terminal.bar(self.is_main_process, iterable, options)

    @while_open
    def log_to(self, *specs: TrackerSpec) -> None:
        """``log`` writes there from here on: ``JsonLines``, ``TensorBoard``, ``WandB``, ``MLflow``, or a function.

        A function makes a tracker, as ``lambda: wandb.init(project="x")`` does (``live.training.trackers``). Only the
        main process opens one; after ``resume``, so that it knows the step. Raises on every rank for what is no
        tracker (``TypeError``), is logged to already (``ValueError``), or whose package is not installed
        (``ModuleNotFoundError``); on the main process alone for what a function has made.
        """
        self._log.to(specs, self.steps)

    @while_open
    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Writes numbers, words and tensors of one element on the main process; ``step`` None: ``steps``.

        They are those of the main process: average over the ranks before. None is left out. Not collective; raises
        ``TypeError`` on every rank that calls it for a value that is no single one, and ``ValueError`` for the name
        ``step``, which is the trackers' own.
        """
        if step is None and self._log.open:
            self._end.own_loop.before_count("ready.log()", used=self.in_use, stacklevel=4)
        self._log.log(values, self.steps if step is None else step)

    @while_open
    @names_lost_rank
    def barrier(self, name: str = "", *, timeout_s: float = 600.0) -> None:
        """Returns when every rank is here, with the same ``name``; host threads meet, devices are not waited for.

        Raises ``RankFailed`` on every rank, naming those that are not there in time, have ended, or came to a barrier
        of another name. Nobody hangs: no process group is asked. Raises ``TypeError`` for a name that is no text, and
        where ``timeout_s`` is no number; ``ValueError`` where it is not above 0 and finite.
        """
        named_barrier.check_name(name)
        check_limit(timeout_s)
        if self.peers is not None:
            named_barrier.barrier(self.peers, name, timeout_s)

    @while_open
    @contextmanager
    def accumulate(self, *, last: bool = False) -> Iterator[None]:
        """One micro-batch: forward, ``backward`` and ``step`` inside. Needed only to end a window early.

        ``last=True``, as for the last batch of a loader, makes ``step`` step the optimizer whatever the count.
        """
        self._last = last
        self._sync()
        try:
            with named(self.peers):
                yield
        finally:
            self._last = False
            self._sync()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, modules are in eval mode and nothing has a gradient; behind it all is as before. On every rank.

        ``backward``, ``step``, ``save`` and ``resume`` raise ``LoopOutOfOrder`` inside (``training.evaluation``).
        """
        with named(self.peers, "ready.evaluating()"), self._evaluation.running(self, self._driver.settle):
            yield

    def set_epoch(self, epoch: int) -> None:
        """The next pass over each loader has this number, which gives its order. They advance by themselves too."""
        check_count("epoch", epoch, least=0)
        self._told_epoch = epoch
        self._passes.set_epoch(epoch)

    @while_open
    @names_lost_rank
    def reduce(self, value: Any, how: How = "mean") -> Any:
        """Numbers and tensors, nested or not, as mean, sum, max or min over the data ranks. Collective."""
        return reduce_over_ranks(value, how, _same_data(self.plan))

    @while_open
    @names_lost_rank
    def gather(self, value: Any) -> list[Any]:
        """What each data rank gives, as a list with an item per rank; for what is small. Collective."""
        return gather_over_ranks(value, _same_data(self.plan))

    def before_batch(self, act: Callable[[], None] | None) -> bool:
        """``act`` is called before a batch of the training loaders is read. False: there are none."""
        return self._passes.before_batch(act)

    @while_open
    @names_lost_rank
    def gather_for_metrics(self, value: Any) -> Any:
        """What all ranks have made of the batches in use, each sample once (``live.data.gather``). Collective."""
        return self._passes.gather(value)

    @property
    def _averages_each(self) -> bool:
        return self.plan.config.average_each and not self.engine_steps

    def _at_boundary(self) -> bool:
        return self._last or self._passes.end_window or self._seen + 1 >= self.plan.owners.accumulation_steps

    def _sync(self) -> None:
        """Gradients are averaged in a window's last backward, or in each; DDP wants to know before the forward."""
        self._driver.sync(self.model, self._at_boundary() or self._averages_each)


def _same_data(plan: Plan) -> int:
    """Neighbouring ranks that read the same samples: those that differ on the last axes of the mesh alone."""
    return prod(axis.size for axis in plan.mesh if axis.name in SAME_DATA)

"""The driver of a training loop: turns what happens into events, and carries out the orders that follow.

``prepkit.loop.advance`` decides; nothing is decided here. What this file adds is what a value cannot do: look at
tensors, hear hooks of torch, run backward and step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from prepkit.config import Clip
from prepkit.court import Court
from prepkit.facts import loop as events
from prepkit.facts.loop import Event, Gradients, LoopPlan, LoopState
from prepkit.findings import RunRefused
from prepkit.loading.passes import Passes
from prepkit.loop import History, Junction, Refused, advance, orders
from prepkit.loop.orders import Order
from prepkit.objects.joint_optimizer import held, members, tick, ticks_left
from prepkit.ranks.world import world
from prepkit.training import token_loss
from prepkit.training.drivers import Driver
from prepkit.training.failed_forward import explain_backward
from prepkit.training.marks import Marks
from prepkit.training.token_loss import Count, TokenWindow
from prepkit.training.watching import Removable, averages_nothing, watched

if TYPE_CHECKING:
    from prepkit.objects.whole_gradients import WholeGradients
    from prepkit.objects.xla_gradients import XLAGradients

Closure = Callable[[], Any]

KNOWN = 512
"""Turns of the loop that are looked up and not worked out again: those of a loop that goes on as before."""
QUOTED = 3
"""Lines of the history that a refusal quotes."""


@define(eq=False, kw_only=True, repr=False)
class Loop:
    """Where the loop of one prepared model is, what has happened lately, and who carries out what follows."""

    plan: LoopPlan
    model: Module
    optimizer: Any
    """One that stands for all where there are several; None: nothing is stepped."""
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    engine: Driver
    court: Court
    clip: Clip
    """The plan's; a loop that says it per window, as accelerate's does, puts another here."""
    passes: Passes
    """The loaders, as they are gone through."""
    whole_gradients: WholeGradients | XLAGradients | None = None
    finish_averaging: Callable[[], None] = lambda: None
    """Has the engine end what it waits for on this rank alone."""
    before_averaging: Callable[[], None] = lambda: None
    """Asks on this rank alone whether the model is still the one that was prepared."""
    after_micro_batch: Callable[[], None] = lambda: None
    """Asks on this rank alone inside a window, where the engine takes gradients away as they come."""
    before_step: Callable[[], None] = lambda: None
    """Asks on all ranks what is due before the optimizer acts."""
    after_engine_step: Callable[[], None] = lambda: None
    """Told that the engine has written weights by its own step."""
    before_hand: Callable[[Optimizer | None], None] = lambda _: None
    """Asked before somebody else steps an optimizer of this run."""
    before_state: Callable[..., None] = lambda *_: None
    """Asked before an optimizer takes a state."""
    before_weights: Callable[..., None] = lambda *_: None
    """Asked before the model takes weights."""
    at_window: Callable[[], None] | None = field(default=None, init=False)
    """Called on every rank when a window has ended; see ``training.preemption``."""
    proven: Callable[[LoopState], None] | None = field(default=None, init=False)
    """Likewise, and before, with the state in which the window was ended; see ``proving.live``."""
    state: LoopState = field(factory=LoopState, init=False)
    history: History = field(factory=History, init=False)
    steps: int = field(default=0, init=False)
    """Optimizer steps that were taken, those before a resume included."""
    skipped: bool = field(default=False, init=False)
    """The last window ended without an optimizer step, because a gradient overflowed."""
    grad_norm: torch.Tensor | None = field(default=None, init=False)
    """Norm of all gradients at the last step, before clipping."""
    loss: tuple[torch.Tensor, Count | None] | None = field(default=None, init=False)
    """Of the last backward, and what it is a mean over."""
    _tokens: TokenWindow = field(factory=TokenWindow, init=False)
    _marks: Marks = field(init=False)
    _place: Junction = field(init=False)
    """Where ``state`` is, with the turns that were made from there."""
    _places: dict[LoopState, Junction] = field(factory=dict, init=False)
    _turns: int = field(default=0, init=False)
    """How many turns all places hold."""
    _hooks: list[Removable] = field(factory=list, init=False)
    _acting: bool = field(default=False, init=False)
    """The optimizer steps and clears because the loop does, or torch makes room for state that is read."""
    _acted: bool = field(default=False, init=False)
    """The optimizer has begun to act on the gradients of the window that ends."""
    _compared: bool = field(default=False, init=False)
    """The ranks have compared whether they weigh losses: once, at the first loss of all."""
    _ticked: int | None = field(default=None, init=False)
    """Where the last window left the scheduler; None: it may be anywhere."""

    def __attrs_post_init__(self) -> None:
        self._marks = Marks(self.plan, self.model, self.trained, self.engine.holds)
        self._forget_turns()
        self.passes.on_batch = self.do

    # --- what a loop may ask ---

    @property
    def pending(self) -> int:
        """Micro-batches since the last optimizer step: those whose gradients wait for the end of their window."""
        return self.state.pending

    @property
    def ends_window(self) -> bool:
        """The micro-batch in use is the last of its window, so that ``step`` steps the optimizer."""
        return self._place.ends

    def norm(self, power: float) -> torch.Tensor:
        """The joint p-norm of the gradients that are there, unscaled and averaged. Collective where sharded."""
        if self.whole_gradients is not None:
            self.whole_gradients.average()
        found = self.engine.norm(self.model, [one for one in self.trained() if one.grad is not None], power)
        return found if self.scaler is None else found / self.scaler.get_scale()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Each of the optimizers that a step steps; ``optimizer`` is one for all of them where there are several."""
        return members(self.optimizer)

    def trained(self) -> list[Parameter]:
        """All parameters that the optimizers hold."""
        return held(self.optimizer) if self.optimizer is not None else []

    def leave_gradients(self) -> None:
        """From here on gradients are the script's to add to, to write and to clear, as in scripts for accelerate."""
        self.plan = self._marks.plan = evolve(self.plan, clears=False)
        self._forget_turns()

    def expect_scheduler(self) -> None:
        """The scheduler may be where it is now; it is looked for there at the end of the next window."""
        self._ticked = getattr(self.scheduler, "last_epoch", None)

    # --- events ---

    def happens(self, event: Event) -> tuple[Order, ...]:
        """Take an event in and give the orders that follow; raise ``RunRefused`` for one that is refused."""
        self._place, todo = self._place.turns.get((type(event), event)) or self._worked_out(event)
        self.state = self._place.state
        self.history.events.append(event)
        return todo

    def _worked_out(self, event: Event) -> tuple[Junction, tuple[Order, ...]]:
        done = advance(self.plan, self.state, event)
        if isinstance(done, Refused):
            raise RunRefused(done.findings, self.history.lines()[-QUOTED:])
        self.court.hear(done.findings)
        if self._turns >= KNOWN:
            self._forget_turns()
        self._turns += 1
        place = self._places.setdefault(done.state, Junction.of(self.plan, done.state))
        turn = self._place.turns[type(event), event] = place, done.orders
        return turn

    def _forget_turns(self) -> None:
        for place in self._places.values():
            place.turns.clear()  # places lead to each other in circles
        self._place = Junction.of(self.plan, self.state)
        self._places, self._turns = {self.state: self._place}, 0

    def do(self, event: Event) -> None:
        """Take an event in, and carry out what follows."""
        for order in self.happens(event):
            self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        match order:
            case orders.Average(on=on):
                self.engine.sync(self.model, on)
            case orders.Settle():
                self.engine.settle(self.model)
                self.before_averaging()
            case orders.AverageWhole():
                if self.whole_gradients is not None:
                    self.whole_gradients.average()
            case orders.Look():
                self.before_step()
            case orders.Clip():
                self._clip()
            case orders.Tick(times=times):
                tick(self.scheduler, times)
                self.expect_scheduler()
            case orders.Recover():
                with self.allowed():
                    self.engine.left_out(self.model, **order._asdict())
            case orders.Clear():
                self._clear()
            case _:
                raise TypeError(f"{order} wants what only its event has")

    def _clear(self) -> None:
        self._tokens.forget()
        with self.allowed():
            self.optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)  # a norm of scaled gradients would be clipped to nothing
        self.grad_norm = self.engine.clip(self.model, self.clip, held(self.optimizer))

    def backward(
        self, loss: torch.Tensor, *, more: bool = False, mean_over: Count | None = None, retain_graph: bool = False
    ) -> None:
        """One backward; see ``Prepared.backward``. ``retain_graph`` is torch's, for faces; an engine takes none."""
        check_loss(loss)
        alike = True
        if mean_over is not None:
            token_loss.check_number(mean_over)
        if not self._compared and not (self.state.closed or self.state.evaluating or self.state.averages):
            self._compared = True
            alike = token_loss.weighed_alike(loss.device, weighs=mean_over is not None)
        seen = self._marks.before_backward(self.state)
        reads = self.engine.averages
        averages = bool(self.state.averaging) if reads is None else reads(self.model)
        event = events.Backward(bool(more), mean_over is not None, alike, loss.requires_grad, averages, seen)
        (run,) = self.happens(event)
        assert isinstance(run, orders.RunBackward), "a backward is run"
        self.loss = loss.detach(), mean_over.clone() if isinstance(mean_over, torch.Tensor) else mean_over
        try:
            loss = self._tokens.weighed(loss, mean_over)
            if run.by_engine:
                assert self.engine.backward is not None, "an engine that takes backward"
                self.engine.backward(self.model, loss)
                return
            loss = loss / run.divide_by
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]  # torch has no types
        except BaseException as error:
            self.happens(events.BackwardFailed())
            explain_backward(error)
            raise
        self._marks.after_backward()

    def step(self, closure: Closure | None) -> bool:
        """End one micro-batch; see ``Prepared.step``."""
        if closure is not None and not callable(closure):
            raise TypeError(f"ready.step({closure!r:.60}): a step takes nothing, or a function that computes the loss")
        ended, seen, moved, last = self._place.ends, Gradients.UNKNOWN, None, False
        if ended and closure is None and self.state.backwards and not self.state.cleared:
            seen = self._marks.before_step()
            moved = self._moved()
            last = (left := ticks_left(self.scheduler)) is not None and left < self.plan.ticks
        window = self.state
        todo = self.happens(events.Step(closure is not None, seen, moved, last))
        if not ended:
            self._after_micro_batch(todo)
            return False
        try:
            self.skipped = not self._end_window(todo, closure)
        except BaseException:
            self.do(events.StepFailed(self._acted))
            raise
        self._marks.after_step(ended=True)
        self.steps += not self.skipped
        self.do(events.Stepped(not self.skipped))
        if self.proven is not None:
            self.proven(window)
        if self.at_window is not None:
            self.at_window()
        return not self.skipped

    def _after_micro_batch(self, todo: Sequence[Order]) -> None:
        self._marks.after_step(ended=False)
        for order in todo:
            if isinstance(order, orders.StepEngine):
                self._step_engine(order, None)
                self.after_micro_batch()
            else:
                self._carry_out(order)

    def _moved(self) -> tuple[int, int] | None:
        at = getattr(self.scheduler, "last_epoch", None) if self.plan.ticks else None
        return None if at is None or self._ticked in (None, at) else (self._ticked, at)

    def _end_window(self, todo: Sequence[Order], closure: Closure | None) -> bool:
        """Carry out the orders of a step; False where an overflow of float16 skipped it, on every rank alike."""
        applied, factor, self._acted = True, None, False
        for order in todo:
            match order:
                case orders.DivideByTokens(micro_batches=whole):
                    self.finish_averaging()
                    factor = self._tokens.end(whole)
                    if factor is not None and not self.plan.engine_steps:
                        token_loss.multiply_gradients(held(self.optimizer), factor)
                case orders.StepEngine():
                    applied = self._step_engine(order, factor)
                case orders.StepOptimizer(each=each):
                    applied = self._step_optimizer(each, closure)
                case _:
                    self._carry_out(order)
        return applied

    def _step_engine(self, order: orders.StepEngine, factor: torch.Tensor | None) -> bool:
        assert self.engine.step is not None, "an engine that steps"
        self._acted = order.last
        with token_loss.multiplied_by_engine(self.model, factor), self.allowed():
            done = self.engine.step(self.model, order.last)
        if order.last:
            self.after_engine_step()
            self.grad_norm = done.norm  # which the engine counts whether it clips or not
        return done.applied

    def _step_optimizer(self, each: Sequence[Order], closure: Closure | None) -> bool:
        optimizer, scaler = self.optimizer, self.scaler
        with self.allowed():
            if closure is not None:
                optimizer.step(lambda: self._evaluated(closure, each))
                return True
            self._acted = True
            if scaler is None:
                optimizer.step()
                return True
            scale = scaler.get_scale()
            try:
                scaler.step(optimizer)
            finally:
                scaler.update()
            return scaler.get_scale() >= scale  # it goes down after an overflow only; torch has no other public sign

    def _evaluated(self, closure: Closure, each: Sequence[Order]) -> torch.Tensor:
        """Make gradients anew, look at them and clip them, as an optimizer such as LBFGS asks for several times.

        Its loss is the mean over all ranks: LBFGS decides by it whether to go on, and ranks that decide otherwise
        would wait for each other for ever.
        """
        self.happens(events.Cleared())
        self.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = closure()
        check_loss(loss)
        for order in each:
            self._carry_out(order)
        self._acted = True
        ranks, own = world(), loss.detach()
        return own if ranks.size == 1 else ranks.total(own) / ranks.size

    def skip(self) -> None:
        """Leave a micro-batch out; see ``Prepared.skip``."""
        self.do(events.LeftOut())
        self._marks.forget()

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """One micro-batch; see ``Prepared.accumulate``."""
        outer = self.state.cut_short
        self.do(events.AccumulateEntered(last))
        try:
            yield
        finally:
            self.do(events.AccumulateLeft(outer))

    @contextmanager
    def averages_applied(self) -> Iterator[None]:
        """Inside, averages are in the place of the weights."""
        self.do(events.AveragesApplied())
        try:
            yield
        finally:
            self.do(events.AveragesLeft())

    def average(self, *, forced: bool | None) -> None:
        """Average in each backward from here on, or in none; None: as windows say it."""
        self.do(events.Averaging(forced))

    def forward_ran(self) -> None:
        """A forward has run that the wrapper is to average a backward of."""
        self.do(events.ForwardRan())

    def resumed(self, steps: int, batches: tuple[tuple[int, int, int], ...]) -> None:
        """A checkpoint was read: the scheduler is elsewhere, and no window is open."""
        self.steps, self._ticked = steps, None
        self._marks.forget()
        self.happens(events.Resumed(steps, batches))

    def close(self, model: Module, engine: Driver, *, failing: bool = False) -> None:
        """Let the optimizers alone; ``model`` is the one that was given, out of its wrappers."""
        self.release()
        self.happens(events.Closed(failing))
        self.model = self._marks.model = model
        self.engine, self._marks.holds, self.whole_gradients = engine, engine.holds, None

    # --- hooks ---

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, the optimizer may step and clear."""
        before, self._acting = self._acting, True
        try:
            yield
        finally:
            self._acting = before

    def watch(self) -> None:
        """Hear the wrapper's forward, and steps and ``zero_grad`` of the optimizers, until ``release``."""
        loop = weakref.ref(self)
        if isinstance(self.model, DistributedDataParallel):
            hear = lambda model, *_: _heard(loop, model, bool(model.require_backward_grad_sync))  # noqa: E731
            self._hooks.append(self.model.register_forward_hook(hear))
        if isinstance(self.model, FullyShardedDataParallel):
            hear = lambda model, *_: _heard(loop, model, bool(model._sync_gradients))  # noqa: E731
            self._hooks.append(self.model.register_forward_pre_hook(hear))
        self._hooks += watched(
            self.model,
            members(self.optimizer),
            engine_steps=self.plan.engine_steps,
            stepped=lambda optimizer: _stepped(loop, optimizer),
            inner_stepped=lambda name: _inner_stepped(loop, name),
            engine_stepped=lambda: _stepped(loop, None),
            cleared=lambda: _cleared(loop),
            before_state=self.before_state,
            before_weights=self.before_weights,
        )

    @property
    def acting(self) -> bool:
        """Whether it steps just now: what steps inside is a part of its optimizer, as under a Lookahead."""
        return self._acting

    @property
    def watches(self) -> bool:
        """Whether it hears of steps, from ``watch`` until ``release``."""
        return bool(self._hooks)

    def release(self) -> None:
        """Let the optimizers and the model alone again."""
        self.proven = None
        while self._hooks:
            self._hooks.pop().remove()

    def stepped_by_hand(self, optimizer: Optimizer | None) -> None:
        """Somebody else steps an optimizer of this run; None: calls the engine's own step.

        Nothing is said where every rate is 0: so torch makes state (``checkpoint.state_dict._init_optim_state``).
        """
        groups = () if optimizer is None else optimizer.param_groups
        if groups and not self.state.used and all(group.get("lr") == 0 for group in groups):
            return
        averaged = optimizer is None or not averages_nothing(self.model, optimizer)
        scaled = self.scaler is None or self.scaler._scale is not None
        self.do(events.SteppedByHand(averaged, scaled, call="optimizer.step()" if groups else "ready.model.step()"))
        if self.state.used:  # what it does not clear is found before the next backward
            self._marks.before_step()
            self._marks.after_step(ended=True)


def _heard(loop: weakref.ref[Loop], model: Module, averages: bool) -> None:
    if (own := loop()) is not None and own.model is model:  # and not a copy, which has the same hooks
        own.happens(events.ForwardRan(torch.is_grad_enabled(), averages))


def _stepped(loop: weakref.ref[Loop], optimizer: Optimizer | None) -> None:
    if (own := loop()) is not None and not own._acting:
        own.stepped_by_hand(optimizer)
        own.before_hand(optimizer)


def _inner_stepped(loop: weakref.ref[Loop], name: str) -> None:
    if (own := loop()) is not None and not own._acting:
        own.happens(events.SteppedByHand(inner=name))


def _cleared(loop: weakref.ref[Loop]) -> None:
    if (own := loop()) is not None and not own._acting:
        own.do(events.Cleared())
        own._tokens.forget()


def check_loss(loss: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what is no loss."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"ready.backward() takes the loss as a tensor, and a closure of ready.step() returns it; this is "
            f"{type(loss).__name__}: give what the model computed, such as output.loss, and call .item() after it"
        )
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise ValueError(f"ready.backward() takes one number, and this loss has the shape {shape}; write loss.mean()")

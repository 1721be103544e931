"""What each rule of the loop keeps from happening: a slip with its rule switched off, beside plain torch.

Truth is a loop of plain torch over the micro-batches that the script meant to train, or the same calls in their order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn

import prepkit as pk
from prepkit.findings import RunRefused
from prepkit.rules.run.loop import ASKED
from tests.audit.harms import Seen
from tests.training.test_evaluation import Averaging

RATE = 0.1


@frozen
class LoopHarm:
    """A slip, what it does, and what the weights come to with it and without it."""

    rule: str
    what: str
    slip: Callable[[], Seen]
    """Raises ``RunRefused`` with the rule."""
    right: Callable[[], Seen]
    also: tuple[str, ...] = ()
    """Rules that would refuse what follows from it."""


@contextmanager
def without(*rules: str) -> Iterator[None]:
    """Inside, nobody asks these rules of the loop."""
    with pytest.MonkeyPatch.context() as patch:
        for event, asked in ASKED.items():
            patch.setitem(ASKED, event, tuple(rule for rule in asked if rule.id not in rules))  # type: ignore[arg-type]
        yield


def seen(harm: LoopHarm) -> tuple[Seen, Seen]:
    """What the slip comes to where its rule is not asked, and what is right."""
    with without(harm.rule, *harm.also), torch.random.fork_rng(devices=[]):
        wrong = ended(harm.slip)
    with torch.random.fork_rng(devices=[]):
        return wrong, harm.right()


def ended(program: Callable[[], Seen]) -> Seen:
    """What it comes to, or the kind of exception that ended it; what prepkit refuses is no harm."""
    try:
        return program()
    except RunRefused:
        raise
    except Exception as error:
        return type(error).__name__


# --- the model, prepared and plain ---


def layers(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 4))


def batch(at: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, 8).view(2, 4).sin() * (1 + at)


def loss_of(model: Any, at: int) -> Tensor:
    return (model(batch(at)) - at).square().mean()


def size(model: nn.Module) -> float:
    """One number for all weights, which another step changes."""
    flat = torch.cat([param.detach().double().reshape(-1) for param in model.parameters()])
    return float((flat * torch.linspace(1.0, 2.0, len(flat))).sum())


def prepared(dropout: float = 0.0, **options: Any) -> Any:
    cfg = pk.Config(**{"optimizer": pk.optim.SGD(lr=RATE), **options})
    return pk.apply(pk.build_plan(cfg, layers(dropout)))


def train(ready: Any, *micro_batches: int) -> None:
    for at in micro_batches:
        ready.backward(loss_of(ready.model, at))
        ready.step()


def torch_after(*windows: Sequence[int], divide_by: int = 1) -> Callable[[], float]:
    """The weights after these windows of micro-batches in plain torch."""

    def right() -> float:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for window in windows:
            for at in window:
                (loss_of(model, at) / divide_by).backward()  # type: ignore[no-untyped-call]  # torch
            optimizer.step()
            optimizer.zero_grad()
        return size(model)

    return right


# --- slips ---


def averages_trained() -> float:
    ready = prepared()
    ema = pk.Ema(ready, 0.5)
    train(ready, 0, 1)
    with ema.applied():
        train(ready, 2)
    return size(ready.model)


def trained_while_evaluating() -> float:
    ready = prepared(dropout=0.5)
    torch.manual_seed(7)
    with ready.evaluating(), torch.enable_grad():
        train(ready, 0)
    return size(ready.model)


def trained_with_dropout() -> float:
    ready = prepared(dropout=0.5)
    torch.manual_seed(7)
    train(ready, 0)
    return size(ready.model)


class Halfway(torch.autograd.Function):
    """Passes values on, and has no gradient: an error between two layers of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError


def half_a_backward() -> float:
    ready = prepared()
    first, rest = ready.model[0], ready.model[1:]
    with suppress(MemoryError):
        ready.backward(rest(Halfway.apply(first(batch(0)))).square().mean())
    ready.step()
    return size(ready.model)


def loss_of_nothing() -> float:
    ready = prepared()
    ready.backward(loss_of(ready.model, 0).detach())
    ready.step()
    return size(ready.model)


def means_added() -> float:
    """Two losses of one micro-batch, means over 1 and over 7 tokens."""
    ready = prepared()
    ready.backward(loss_of(ready.model, 0), mean_over=1, more=True)
    ready.backward(loss_of(ready.model, 1), mean_over=7)
    ready.step()
    return size(ready.model)


def some_weighed() -> float:
    ready = prepared(accumulation=2)
    ready.backward(loss_of(ready.model, 0), mean_over=7)
    ready.step()
    ready.backward(loss_of(ready.model, 1))
    ready.step()
    return size(ready.model)


def all_weighed() -> float:
    ready = prepared(accumulation=2)
    for at, tokens in ((0, 7), (1, 1)):
        ready.backward(loss_of(ready.model, at), mean_over=tokens)
        ready.step()
    return size(ready.model)


def gradients_of_before() -> float:
    ready = prepared()
    loss_of(ready.model, 0).backward()  # type: ignore[no-untyped-call]  # torch
    train(ready, 1)
    return size(ready.model)


def step_forgotten() -> float:
    ready = prepared(accumulation=2)
    ready.backward(loss_of(ready.model, 0))
    train(ready, 1, 2, 3)
    return size(ready.model)


def cleared_by_the_model() -> float:
    ready = prepared(accumulation=2)
    train(ready, 0)
    ready.model.zero_grad()
    train(ready, 1)
    return size(ready.model)


def cleared_by_the_optimizer() -> float:
    ready = prepared(accumulation=2)
    train(ready, 0)
    ready.optimizer.zero_grad()
    train(ready, 1)
    return size(ready.model)


def no_optimizer() -> float:
    ready = pk.apply(pk.build_plan(pk.Config(), layers()))
    train(ready, 0)
    return size(ready.model)


def lbfgs() -> Any:
    model = layers()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=RATE, max_iter=2)
    return pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer))


def lbfgs_without_a_closure() -> float:
    ready = lbfgs()
    train(ready, 0)
    return size(ready.model)


def lbfgs_with_one() -> float:
    ready = lbfgs()
    ready.step(_closure(ready, 0))
    return size(ready.model)


def _closure(ready: Any, at: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss = loss_of(ready.model, at)
        ready.backward(loss)
        return loss

    return closure


def closure_at_the_end() -> float:
    ready = prepared(accumulation=2)
    train(ready, 0)
    ready.step(_closure(ready, 1))
    return size(ready.model)


def backward_by_hand() -> float:
    ready = prepared(accumulation=2)
    for at in (0, 1):
        loss_of(ready.model, at).backward()  # type: ignore[no-untyped-call]  # torch
        ready.step()
    return size(ready.model)


def cleared_before_the_step(by: str) -> Callable[[], float]:
    def slip() -> float:
        ready = prepared()
        train(ready, 0)
        ready.backward(loss_of(ready.model, 1))
        (ready.optimizer if by == "optimizer" else ready.model).zero_grad()
        ready.step()
        return size(ready.model)

    return slip


def second_loss_forgotten() -> float:
    ready = prepared()
    ready.backward(loss_of(ready.model, 0), more=True)
    ready.step()
    return size(ready.model)


def two_losses() -> float:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    (loss_of(model, 0) + loss_of(model, 1)).backward()  # type: ignore[no-untyped-call]  # torch
    optimizer.step()
    return size(model)


def clipped_while_scaled() -> float:
    ready = prepared(precision=pk.FP16(), overrides=("precision.fp16-unsupported",))
    ready.backward(loss_of(ready.model, 0) / 100)
    nn.utils.clip_grad_norm_(ready.model.parameters(), 1.0)
    ready.step()
    return size(ready.model)


def clipped_by_the_loop() -> float:
    ready = prepared(precision=pk.FP16(), clip=pk.ClipNorm(1.0), overrides=("precision.fp16-unsupported",))
    ready.backward(loss_of(ready.model, 0) / 100)
    ready.step()
    return size(ready.model)


def scheduled(*, by_hand: bool) -> Callable[[], float]:
    def rate() -> float:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer, scheduler=scheduler))
        for at in range(3):
            train(ready, at)
            if by_hand:
                ready.scheduler.step()
        return float(ready.optimizer.param_groups[0]["lr"])

    return rate


def half_a_window_stepped() -> float:
    ready = prepared(accumulation=2)
    ready.backward(loss_of(ready.model, 0))
    ready.optimizer.step()
    ready.optimizer.zero_grad()
    train(ready, 1)
    return size(ready.model)


def left_out_late() -> float:
    ready = prepared(accumulation=2)
    train(ready, 0)
    ready.backward(loss_of(ready.model, 9))
    ready.skip()
    train(ready, 1)
    return size(ready.model)


def averaging() -> Any:
    model = layers()
    return pk.apply(pk.build_plan(pk.Config(), model, optimizer=Averaging(model.parameters(), lr=RATE)))


def saved(*, evaluating: bool) -> Callable[[], float]:
    """The weights that a checkpoint holds of an optimizer that puts others into the model to evaluate."""

    def resumed() -> float:
        ready = averaging()
        train(ready, 0)
        with tempfile.TemporaryDirectory() as folder:
            if evaluating:
                with ready.evaluating():
                    ready.save(folder)
            else:
                ready.save(folder)
            again = averaging()
            again.resume(folder, only_model=True)
        return size(again.model)

    return resumed


def saved_inside_a_window() -> float:
    ready = prepared(accumulation=2)
    train(ready, 0, 1, 2)
    with tempfile.TemporaryDirectory() as folder:
        ready.save(folder)
        again = prepared(accumulation=2)
        again.resume(folder)
    train(again, 3, 4)
    return size(again.model)


INITIAL = "weights move by half a backward"

LOOP_HARMS: tuple[LoopHarm, ...] = (
    LoopHarm("loop.averages-applied", "a step is lost", averages_trained, torch_after([0], [1], [2])),
    LoopHarm("loop.evaluating", "nothing is dropped", trained_while_evaluating, trained_with_dropout),
    LoopHarm("loop.backward-failed", INITIAL, half_a_backward, torch_after()),
    LoopHarm("loop.loss-leads-nowhere", "torch raises", loss_of_nothing, torch_after([0])),
    LoopHarm("loop.weighed-in-vain", "one loss counts 1/8, the other 7/8", means_added, two_losses),
    LoopHarm("loop.weighed-in-some-losses", "losses have weights of two kinds", some_weighed, all_weighed),
    LoopHarm("loop.gradients-left-over", "another batch counts as well", gradients_of_before, torch_after([1])),
    LoopHarm(
        "loop.backward-twice",
        "three micro-batches are one window, and two would be",
        step_forgotten,
        torch_after([0, 1], [2, 3], divide_by=2),
    ),
    LoopHarm("loop.gradients-lost", "half a window is lost", cleared_by_the_model, torch_after([0, 1], divide_by=2)),
    LoopHarm(
        "loop.cleared-inside-window",
        "half a window is lost",
        cleared_by_the_optimizer,
        torch_after([0, 1], divide_by=2),
        also=("loop.gradients-lost",),
    ),
    LoopHarm("loop.nothing-to-step", "there is nothing to call", no_optimizer, torch_after([0])),
    LoopHarm("loop.closure-wanted", "torch raises", lbfgs_without_a_closure, lbfgs_with_one),
    LoopHarm(
        "loop.closure-without-place",
        "half a window is lost",
        closure_at_the_end,
        torch_after([0, 1], divide_by=2),
        also=("loop.gradients-lost",),
    ),
    LoopHarm("loop.step-without-backward", "a window counts twice", backward_by_hand, torch_after([0, 1], divide_by=2)),
    LoopHarm(
        "loop.cleared-before-step",
        "the step moves nothing",
        cleared_before_the_step("optimizer"),
        torch_after([0], [1]),
    ),
    LoopHarm("loop.gradients-gone", "the step moves nothing", cleared_before_the_step("model"), torch_after([0], [1])),
    LoopHarm("loop.backward-announced", "a loss is left out", second_loss_forgotten, two_losses),
    LoopHarm("loop.scaled-gradients-written", "weights hardly move", clipped_while_scaled, clipped_by_the_loop),
    LoopHarm("loop.scheduler-stepped", "the rate falls twice", scheduled(by_hand=True), scheduled(by_hand=False)),
    LoopHarm(
        "loop.stepped-by-hand",
        "each half of a window is stepped",
        half_a_window_stepped,
        torch_after([0, 1], divide_by=2),
    ),
    LoopHarm(
        "loop.skipped-inside-window",
        "what was before is lost as well",
        left_out_late,
        torch_after([0, 1], divide_by=2),
        also=("loop.gradients-lost",),
    ),
    LoopHarm("loop.saved-evaluating", "other weights are saved", saved(evaluating=True), saved(evaluating=False)),
    LoopHarm(
        "loop.unfinished-window",
        "the gradients of a micro-batch are lost",
        saved_inside_a_window,
        torch_after([0, 1], [2, 3], divide_by=2),
    ),
)
"""In the order of ``prepkit.rules.run.loop``."""

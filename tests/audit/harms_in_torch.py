"""What errors that show while a program runs do to a number, in loops of plain torch; see ``harms``.

Each row is a loop with an error, and the same without it. Nothing here is prepkit's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from tests.audit.case import WIDTH, net
from tests.audit.harms import STEPS, Seen, samples


@frozen
class Slip:
    """An error of a loop, what it does, and the numbers with it and without it."""

    rule: str
    what: str
    wrong: Callable[[], Seen]
    right: Callable[[], float]


def size(model: nn.Module) -> float:
    """One number for all weights, which another step changes."""
    flat = torch.cat([param.detach().double().reshape(-1) for param in model.parameters()])
    return float((flat * torch.linspace(1.0, 2.0, len(flat))).sum())


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def trained(
    model: nn.Module | None = None,
    *,
    prepare: Callable[[Tensor], Tensor] = lambda loss: loss,
    before_step: Callable[[nn.Module], Any] = lambda _: None,
    steps: Callable[[int], bool] = lambda _: True,
    clears: bool = True,
) -> float:
    """The weights after three micro-batches; ``prepare``: what a loss becomes, ``steps``: where the optimizer acts."""
    model = net() if model is None else model
    optimizer = sgd(model)
    for at, (inputs, classes) in enumerate(samples()):
        prepare(cross_entropy(model(inputs), classes)).backward()  # type: ignore[no-untyped-call]  # torch
        if steps(at):
            before_step(model)
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    return size(model)


# --- gradients ---


def without_gradients() -> Seen:
    try:
        with torch.set_grad_enabled(False):  # as a call of inference leaves it
            return trained()
    except RuntimeError as error:
        return type(error).__name__


def softmax_before_the_loss() -> float:
    inner = net()
    trained(nn.Sequential(inner, nn.Softmax(-1)))
    return size(inner)


def regressed(*, alike: bool) -> float:
    """The weights after three steps towards one number for each sample, of one shape or of two."""
    model = nn.Sequential(net(), nn.Linear(4, 1))
    optimizer = sgd(model)
    for inputs, classes in samples():
        optimizer.zero_grad()
        outputs, targets = model(inputs), classes.float()
        ((outputs - (targets[:, None] if alike else targets)) ** 2).mean().backward()
        optimizer.step()
    return size(model)


def drawn_of(weights: int) -> float:
    """Samples that a sampler with so many weights gives of 32."""
    torch.manual_seed(0)
    return float(len(set(WeightedRandomSampler([1.0] * weights, 512))))


def seen_of_later(ways: int) -> float:
    """How far what a recurrence says of a word changes with the next one; ``ways``: in how many it reads."""
    torch.manual_seed(0)
    cells, texts = nn.GRU(4, 8, batch_first=True, bidirectional=ways == 2), torch.randn(2, 6, 4)
    later = torch.cat([texts[:, :3], texts[:, 3:].flip(0)], 1)
    return float((cells(texts)[0] - cells(later)[0])[:, :3].abs().max().detach())


def under_reentrant_checkpoints(*, reentrant: bool) -> Callable[[], float]:
    """Gradients of a layer inside a checkpoint whose input comes from a frozen one."""

    def gradient() -> float:
        model = net()
        model.enter.requires_grad_(requires_grad=False)
        inputs, classes = next(samples())
        hidden = checkpoint(model.blocks[0], model.enter(inputs), use_reentrant=reentrant)
        cross_entropy(model.head(hidden), classes).backward()
        grads = [param.grad for param in model.blocks[0].parameters()]
        return float(sum(grad.abs().sum() for grad in grads if grad is not None))

    return gradient


# --- scales, windows ---


def stepped_while_scaled() -> float:
    return trained(prepare=lambda loss: loss * 1024.0)


def clipped_while_scaled() -> float:
    def clip_and_unscale(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= 1024.0

    return trained(prepare=lambda loss: loss * 1024.0, before_step=clip_and_unscale)


def clipped() -> float:
    return trained(before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def undivided() -> float:
    return trained(steps=lambda at: at == STEPS - 1)


def divided_twice() -> float:
    """Two libraries divide by a window of three."""
    return trained(prepare=lambda loss: loss / STEPS / STEPS, steps=lambda at: at == STEPS - 1)


def one_window() -> float:
    return trained(prepare=lambda loss: loss / STEPS, steps=lambda at: at == STEPS - 1)


def stepped_inside_the_window() -> float:
    return trained(prepare=lambda loss: loss / STEPS, clears=False)


# --- optimizers ---


def also_stepped_by_another() -> float:
    """A second optimizer steps the gradients before the one that they are for."""
    return trained(before_step=lambda model: sgd(model).step())


def optimizer_of_what_was_replaced(*, replaced: bool) -> Callable[[], float]:
    def moved() -> float:
        model = net()
        optimizer = sgd(model)
        if replaced:  # as sharding does
            model.head = nn.Linear(WIDTH, 4)
            torch.nn.init.ones_(model.head.weight)
        before = model.head.weight.detach().clone()
        inputs, classes = next(samples())
        cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        return float((model.head.weight.detach() - before).abs().sum())

    return moved


def stepped_past_its_masters(*, past: bool) -> Callable[[], float]:
    """Weights that an engine makes from its own in each step, and what is left of a step of the copies."""

    def left() -> float:
        masters, copies = net(), net()
        before = size(copies)
        inputs, classes = next(samples())
        cross_entropy(copies(inputs), classes).backward()
        for own, copied in zip(masters.parameters(), copies.parameters(), strict=True):
            own.grad = None if past else copied.grad
        sgd(copies if past else masters).step()
        copies.load_state_dict(masters.state_dict())  # the engine's own step, and every one after it
        return size(copies) - before

    return left


def cast_in_the_loop() -> float:
    """Steps of a rate that float32 has room for, on weights of 8 bits of mantissa."""
    return _slow(torch.bfloat16)


def _slow(dtype: torch.dtype) -> float:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    model.to(dtype)
    before = model.head.weight.detach().clone()
    for inputs, classes in samples():
        optimizer.zero_grad()
        cross_entropy(model(inputs.to(dtype)).float(), classes).backward()
        optimizer.step()
    return float((model.head.weight.detach() - before).abs().sum())


def ticked_by(schedulers: int) -> Callable[[], float]:
    def rate() -> float:
        model = net()
        optimizer = sgd(model)
        made = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for _ in range(schedulers)]
        for inputs, classes in samples():
            cross_entropy(model(inputs), classes).backward()
            optimizer.step()
            for one in made:
                one.step()
        return float(optimizer.param_groups[0]["lr"])

    return rate


# --- what is read ---


def loaded(*, prefix: str) -> Callable[[], float]:
    def weights() -> float:
        source, model = net(), net()
        with torch.no_grad():
            source.head.weight.mul_(2)
        held = {f"{prefix}{key}": value for key, value in source.state_dict().items()}
        model.load_state_dict(held, strict=False)
        return size(model)

    return weights


def averaged(*, apart: bool) -> Callable[[], float]:
    """The weights of an average of three steps."""

    def weights() -> float:
        model = net()
        average = copy.deepcopy(model) if apart else model
        optimizer = sgd(model)
        for inputs, classes in samples():
            optimizer.zero_grad()
            cross_entropy(model(inputs), classes).backward()
            optimizer.step()
            with torch.no_grad():
                for held, param in zip(average.parameters(), model.parameters(), strict=True):
                    held.lerp_(param, 0.1)
        return size(average)

    return weights


class Stream(IterableDataset[Tensor]):
    """Gives all of its samples in each worker."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((WIDTH,), float(at)) for at in range(8))


def read_by(workers: int) -> Callable[[], float]:
    return lambda: float(sum(len(rows) for rows in DataLoader(Stream(), 4, num_workers=workers)))


def language_model() -> Any:
    from tests.audit.by_libraries import llama

    return llama()


def padded(*, masked: bool) -> Callable[[], float]:
    """The loss of a text with pads at its left."""

    def loss() -> float:
        model = language_model().eval()
        ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8]])
        mask = (ids != 0).long() if masked else torch.ones_like(ids)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        labels = torch.where(ids == 0, -100, ids)
        with torch.no_grad():
            return float(model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels).loss)

    return loss


def labelled(*, shifted: bool) -> Callable[[], float]:
    """How likely the next number is, after a model has counted upwards for a while."""

    def loss() -> float:
        model, ids = language_model(), torch.arange(1, 33).reshape(4, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        given, labels = (ids[:, :-1], ids[:, 1:].contiguous()) if shifted else (ids, ids)
        for _ in range(20):
            taken = model(input_ids=given, labels=labels).loss
            optimizer.zero_grad()
            taken.backward()
            optimizer.step()
        with torch.no_grad():
            return float(model.eval()(input_ids=ids, labels=ids).loss)

    return loss


# --- processes ---


def apart_without_a_group(*, averaged: bool) -> Callable[[], float]:
    """How far two processes that were launched together are apart after a step, each on samples of its own."""

    def distance() -> float:
        both = [net(), net()]
        for model, (inputs, classes) in zip(both, samples(), strict=False):
            cross_entropy(model(inputs), classes).backward()
        for params in zip(*(model.parameters() for model in both), strict=True):
            if averaged:
                mean = torch.stack([param.grad for param in params if param.grad is not None]).mean(0)
                for param in params:
                    param.grad = mean.clone()
        for model in both:
            sgd(model).step()
        return size(both[0]) - size(both[1])

    return distance


SLIPS: tuple[Slip, ...] = (
    Slip("run.gradients-off", "backward raises", without_gradients, trained),
    Slip(
        "run.reentrant-frozen",
        "what is inside gets no gradient",
        under_reentrant_checkpoints(reentrant=True),
        under_reentrant_checkpoints(reentrant=False),
    ),
    Slip("run.left-over", "gradients of all steps add up", lambda: trained(clears=False), trained),
    Slip("run.softmax-twice", "gradients are smaller and turned", softmax_before_the_loss, trained),
    Slip(
        "run.loss-misgiven",
        "every output is drawn to every target",
        lambda: regressed(alike=False),
        lambda: regressed(alike=True),
    ),
    Slip("run.weights-misfit", "two samples are drawn of 32", lambda: drawn_of(2), lambda: drawn_of(32)),
    Slip(
        "run.sees-ahead",
        "what it says of a word changes with the next",
        lambda: seen_of_later(2),
        lambda: seen_of_later(1),
    ),
    Slip("run.scaled-stepped", "steps are 1024 times too long", stepped_while_scaled, trained),
    Slip("run.clipped-scaled", "weights hardly move", clipped_while_scaled, clipped),
    Slip("run.undivided", "steps are 3 times too long", undivided, one_window),
    Slip("run.two-accumulate", "steps are a third", divided_twice, one_window),
    Slip("run.raw-optimizer", "micro-batches count several times", stepped_inside_the_window, one_window),
    Slip("run.inside-window", "micro-batches count several times", stepped_inside_the_window, one_window),
    Slip("run.unknown-optimizer", "weights move twice", also_stepped_by_another, trained),
    Slip(
        "run.replaced",
        "the step moves nothing",
        optimizer_of_what_was_replaced(replaced=True),
        optimizer_of_what_was_replaced(replaced=False),
    ),
    Slip(
        "run.past-engine", "the step is lost", stepped_past_its_masters(past=True), stepped_past_its_masters(past=False)
    ),
    Slip("run.cast", "steps are rounded away", cast_in_the_loop, lambda: _slow(torch.float32)),
    Slip("run.two-schedulers", "the rate falls twice", ticked_by(2), ticked_by(1)),
    Slip("run.loaded-nothing", "nothing is loaded", loaded(prefix="module."), loaded(prefix="")),
    Slip("run.average-idle", "the average is the last step", averaged(apart=False), averaged(apart=True)),
    Slip("run.workers-alike", "each sample is read twice", read_by(2), read_by(0)),
    Slip("run.samples-odd", "pads are read as text", padded(masked=False), padded(masked=True)),
    Slip("run.text-odd", "the token after next is learnt", labelled(shifted=True), labelled(shifted=False)),
    Slip(
        "run.no-group",
        "two models are trained",
        apart_without_a_group(averaged=False),
        apart_without_a_group(averaged=True),
    ),
)

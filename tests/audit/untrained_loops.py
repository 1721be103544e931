"""Programs whose losses have a summand that lost its graph on the way; and their neighbours."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from tests.audit.loops import Loop

BATCH = 16


def begun() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(BATCH, 8)
    return model, torch.optim.Adam(model.parameters(), 1e-3), x, (x[:, :1] > 0).float()


def overlap(output: Tensor, y: Tensor) -> Tensor:
    share = (torch.sigmoid(output) > 0.5).float()
    both = (share * y).sum()
    return 1 - (2 * both + 1) / (share.sum() + y.sum() + 1)


def soft_overlap(share: Tensor, y: Tensor) -> Tensor:
    both = (share * y).sum()
    return 1 - (2 * both + 1) / (share.sum() + y.sum() + 1)


def slopes(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    part = torch.rand(real.size(0), 1)
    x = (part * real + (1 - part) * fake).requires_grad_()
    said = critic(x)
    (slope,) = torch.autograd.grad(
        outputs=said, inputs=x, grad_outputs=torch.ones_like(said), retain_graph=True, only_inputs=True
    )
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


def slopes_with_a_graph(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    x = torch.cat([real, fake]).requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


def once_in_a_while(critic: nn.Module, x: Tensor, step: int) -> Tensor:
    if step % 4 != 3:
        return torch.zeros(())
    return slopes_with_a_graph(critic, x, x)


def threshold_in_a_function(rank: int, world: int) -> None:
    model, optimizer, x, y = begun()
    output = model(x)
    loss = fn.binary_cross_entropy_with_logits(output, y) + overlap(output, y)
    loss.backward()
    optimizer.step()


def threshold_that_is_given(rank: int, world: int) -> None:
    model, optimizer, x, y = begun()
    output = model(x)
    loss = fn.binary_cross_entropy_with_logits(output, y) + 0.5 * soft_overlap((output > 0).float(), y)
    loss.backward()
    optimizer.step()


def threshold_by_name(rank: int, world: int) -> None:
    model, optimizer, x, y = begun()
    output = model(x)
    chosen = (output > 0).float()
    dice = soft_overlap(chosen, y)
    bce = fn.binary_cross_entropy_with_logits(output, y)
    (bce + dice).backward()
    optimizer.step()


def penalty_without_a_graph(rank: int, world: int) -> None:
    critic, optimizer, x, _ = begun()
    fake = nn.Linear(8, 8)(x).detach()
    loss = critic(fake).mean() - critic(x).mean() + 10 * slopes(critic, x, fake)
    loss.backward()
    optimizer.step()


def overlap_that_trains(rank: int, world: int) -> None:
    model, optimizer, x, y = begun()
    output = model(x)
    loss = fn.binary_cross_entropy_with_logits(output, y) + soft_overlap(torch.sigmoid(output), y)
    loss.backward()
    optimizer.step()


def penalty_with_a_graph(rank: int, world: int) -> None:
    critic, optimizer, x, _ = begun()
    loss = critic(-x).mean() - critic(x).mean() + 10 * slopes_with_a_graph(critic, x, -x)
    loss.backward()
    optimizer.step()


def penalty_once_in_a_while(rank: int, world: int) -> None:
    critic, optimizer, x, _ = begun()
    for step in range(2):
        loss = critic(-x).mean() - critic(x).mean() + once_in_a_while(critic, x, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def penalty_in_a_branch(rank: int, world: int) -> None:
    critic, optimizer, x, _ = begun()
    for step in range(2):
        penalty = torch.zeros(())
        if step % 4 == 3:
            penalty = slopes_with_a_graph(critic, x, -x)
        loss = critic(-x).mean() - critic(x).mean() + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def overlap_that_is_printed(rank: int, world: int) -> None:
    model, optimizer, x, y = begun()
    output = model(x)
    loss = fn.binary_cross_entropy_with_logits(output, y)
    print(float(overlap(output, y)))
    loss.backward()
    optimizer.step()


def value_shown_with_another_gradient(rank: int, world: int) -> None:
    model, optimizer, x, y = begun()
    output = model(x)
    near = soft_overlap(torch.sigmoid(output), y)
    loss = near - near.detach() + overlap(output, y)
    loss.backward()
    optimizer.step()


def threshold_of_a_teacher(rank: int, world: int) -> None:
    model, optimizer, x, y = begun()
    teacher = nn.Linear(8, 1)
    loss = fn.binary_cross_entropy_with_logits(model(x), y) + overlap(teacher(x), y)
    loss.backward()
    optimizer.step()


def share_of_samples(rank: int, world: int) -> None:
    """Added to what is divided by it, which counts and is no term of its own."""
    model, optimizer, x, y = begun()
    output = model(x)
    sure = (output.detach().abs() > 0.01).float()
    each = fn.binary_cross_entropy_with_logits(output, y, reduction="none")
    loss = (each * sure).sum() / (sure.sum() + 1) + 0.1 * sure.mean()
    loss.backward()
    optimizer.step()


def shifted_by_its_largest(rank: int, world: int) -> None:
    model, optimizer, x, _ = begun()
    output = model(x).squeeze(1)
    largest = output[output.argmax()].detach()
    loss = largest + (output - largest).exp().sum().log()
    loss.backward()
    optimizer.step()


# --- losses that are made elsewhere ---


class Criterion(nn.Module):
    """A loss of its own, with what it is made of to be printed."""

    part = 0.5

    def forward(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entropy = fn.binary_cross_entropy_with_logits(output, y)
        share = torch.sigmoid(output)
        seen = 1 - soft_overlap((share > 0.5).float(), y)
        missed = soft_overlap(share, y)
        return entropy + self.part * missed, entropy.detach(), seen


class BareCriterion(Criterion):
    """Of which a part is taken of what a threshold makes."""

    def forward(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entropy = fn.binary_cross_entropy_with_logits(output, y)
        share = (torch.sigmoid(output) > 0.5).float()
        missed = soft_overlap(share, y)
        return entropy + self.part * missed, entropy.detach(), 1 - missed


class ScoresItself(nn.Module):
    """Gives back its loss in a table."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.model(x)
        return {"output": output, "loss": fn.softplus(-output).mean() + fn.mse_loss(output, y)}


class CountsItself(ScoresItself):
    """Its loss has the share of wrong ones."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.model(x)
        wrong = ((output > 0).float() != y).float().mean()
        return {"output": output, "loss": wrong + fn.mse_loss(output, y)}


def by_a_criterion(criterion: nn.Module) -> None:
    model, optimizer, x, y = begun()
    loss, entropy, seen = criterion(model(x), y)
    assert float(entropy) > 0
    assert float(seen) <= 1
    loss.backward()
    optimizer.step()


def threshold_in_a_criterion(rank: int, world: int) -> None:
    by_a_criterion(BareCriterion())


def criterion_that_trains(rank: int, world: int) -> None:
    by_a_criterion(Criterion())


def scored(kind: type[ScoresItself]) -> None:
    model, optimizer, x, y = begun()
    kind(model)(x, y)["loss"].backward()
    optimizer.step()


def errors_counted_in_a_model(rank: int, world: int) -> None:
    scored(CountsItself)


def model_that_scores_itself(rank: int, world: int) -> None:
    scored(ScoresItself)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    missed = overlap(output, y)
    return fn.binary_cross_entropy_with_logits(output, y) + missed


def threshold_in_a_function_that_calls_the_model(rank: int, world: int) -> None:
    model, optimizer, x, y = begun()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()


class Lazy(dict[str, Tensor]):
    """A table that counts what it is asked for."""

    asked = 0

    def items(self) -> Any:
        type(self).asked += 1
        return super().items()


def table_of_its_own(rank: int, world: int) -> None:
    """Nobody asks it anything but the program."""
    model, optimizer, x, y = begun()

    def losses() -> Lazy:
        return Lazy(loss=fn.mse_loss(model(x), y))

    losses()["loss"].backward()
    assert Lazy.asked == 0
    optimizer.step()


def many_calls_and_no_backward(rank: int, world: int) -> None:
    """Python calls nobody for each function for ever."""
    model, optimizer, x, y = begun()
    for _ in range(1000):
        model(x)
    assert sys.getprofile() is None
    fn.mse_loss(model(x), y).backward()
    optimizer.step()


def listened_to_by_another(rank: int, world: int) -> None:
    """Who profiles the program goes on to hear it."""
    heard: list[str] = []
    sys.setprofile(lambda frame, event, _: heard.append(frame.f_code.co_name) if event == "return" else None)
    try:
        model, optimizer, x, y = begun()
        loss_of(model, x, y).backward()
        assert "loss_of" in heard
    finally:
        sys.setprofile(None)
    optimizer.step()


def residual(rank: int, world: int, *, graph: bool = False) -> None:
    """Of an equation that a network is to solve."""
    model, optimizer, x, y = begun()
    x.requires_grad_()
    said = model(x)
    slope = torch.autograd.grad(said.sum(), x, retain_graph=True, create_graph=graph)[0]
    along = slope[:, :1]
    rest = along - 0.5 * said * (1 - said)
    (rest.square().mean() + fn.mse_loss(said, y)).backward()
    optimizer.step()


def residual_with_a_graph(rank: int, world: int) -> None:
    residual(rank, world, graph=True)


def gradient_of_a_helper(said: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(outputs=said, inputs=x, grad_outputs=torch.ones_like(said), retain_graph=True)[0]


def residual_by_a_helper(rank: int, world: int) -> None:
    model, optimizer, x, _ = begun()
    x.requires_grad_()
    said = model(x)
    slope = gradient_of_a_helper(said, x)
    (slope.sum(1, keepdim=True) + said).square().mean().backward()
    optimizer.step()


def samples_moved_by_their_slope(rank: int, world: int) -> None:
    """Adversarial examples."""
    model, optimizer, x, y = begun()
    x.requires_grad_()
    loss = fn.mse_loss(model(x), y)
    slope = torch.autograd.grad(loss, x)[0]
    worse = x.detach() + 0.1 * slope.sign()
    (fn.mse_loss(model(x.detach()), y) + fn.mse_loss(model(worse), y)).backward()
    optimizer.step()


def forces(*, graph: bool = False, learned: bool = True) -> None:
    """Of an energy, which learns of them; or they are shown alone."""
    model, optimizer, x, y = begun()
    x.requires_grad_()
    energy = model(x).sum(1)
    slope = torch.autograd.grad(energy.sum(), x, retain_graph=True, create_graph=graph)[0]
    away = fn.mse_loss(-slope, torch.ones_like(slope))
    loss = fn.mse_loss(energy, y.sum(1))
    (loss + 0.5 * away if learned else 2.0 * loss).backward()
    optimizer.step()


def forces_without_a_graph(rank: int, world: int) -> None:
    forces()


def forces_with_a_graph(rank: int, world: int) -> None:
    forces(graph=True)


def forces_that_are_shown(rank: int, world: int) -> None:
    forces(learned=False)


WRONG_UNTRAINED: tuple[Loop, ...] = tuple(
    Loop(run, rule="run.term-constant")
    for run in (
        *(threshold_in_a_function, threshold_that_is_given, threshold_by_name, penalty_without_a_graph),
        *(threshold_in_a_criterion, errors_counted_in_a_model, threshold_in_a_function_that_calls_the_model),
        *(residual, residual_by_a_helper, forces_without_a_graph),
    )
)
RIGHT_UNTRAINED: tuple[Loop, ...] = tuple(
    Loop(run)
    for run in (
        *(overlap_that_trains, penalty_with_a_graph, penalty_once_in_a_while, penalty_in_a_branch),
        *(overlap_that_is_printed, value_shown_with_another_gradient, threshold_of_a_teacher, share_of_samples),
        *(shifted_by_its_largest, criterion_that_trains, model_that_scores_itself, listened_to_by_another),
        *(table_of_its_own, many_calls_and_no_backward),
        *(residual_with_a_graph, samples_moved_by_their_slope, forces_with_a_graph, forces_that_are_shown),
    )
)

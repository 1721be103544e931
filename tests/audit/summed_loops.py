"""Programs that add to a loss, in their own text, what has no graph or a wrong sign; and their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader, TensorDataset

from tests.audit.case import adam
from tests.audit.loops import Loop

BATCH, WIDE = 16, 8


class Coder(nn.Module):
    """What it says of a batch, and the mean and the logarithm of the variance of a code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh())
        self.mean, self.log, self.back = nn.Linear(16, 3), nn.Linear(16, 3), nn.Linear(3, WIDE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = self.body(x)
        mean, log = self.mean(inside), self.log(inside)
        return self.back(mean + torch.randn_like(mean) * (0.5 * log).exp()), mean, log


def begun() -> tuple[Coder, torch.optim.Optimizer, Tensor]:
    model = Coder()
    return model, adam(model), torch.randn(BATCH, WIDE)


# --- terms without a graph ---


def penalty_of_data(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    error = fn.mse_loss(model(x)[0], x)
    penalty = sum(one.data.abs().sum() for one in model.parameters())
    loss = error + 1e-3 * penalty
    loss.backward()
    optimizer.step()


def penalty_in_a_loop(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    loss = fn.mse_loss(model(x)[0], x)
    penalty = 0.0
    for param in model.parameters():
        penalty += param.detach().pow(2).sum()
    loss += 1e-3 * penalty
    loss.backward()
    optimizer.step()


def penalty_without_gradients(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    error = fn.mse_loss(model(x)[0], x)
    with torch.no_grad():
        penalty = sum(one.pow(2).sum() for one in model.parameters())
    loss = error + 1e-3 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def number_of_a_term(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, log = model(x)
    error = fn.mse_loss(output, x)
    spread = (mean.pow(2) + log.exp() - log).mean().item()
    (error + 0.1 * spread).backward()
    optimizer.step()


def detached_in_the_sum(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, _ = model(x)
    error, size = fn.mse_loss(output, x), mean.pow(2).mean()
    loss = error + 0.1 * size.detach()
    loss.backward()
    optimizer.step()


def penalty_that_trains(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    error = fn.mse_loss(model(x)[0], x)
    penalty = sum(one.abs().sum() for one in model.parameters())
    loss = error + 1e-3 * penalty
    loss.backward()
    optimizer.step()


def running_scale(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    running = 1.0
    for _ in range(3):
        loss = fn.mse_loss(model(x)[0], x)
        running = 0.9 * running + 0.1 * loss.item()
        (loss / running).backward()
        optimizer.step()


def running_offset(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    running = 1.0
    for _ in range(3):
        loss = fn.mse_loss(model(x)[0], x)
        running = 0.9 * running + 0.1 * loss.item()
        (loss - running).backward()
        optimizer.step()


def baseline_subtracted(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, _ = model(x)
    gain = x[:, 0] - mean[:, 0].detach()
    loss = -(output[:, 0] * gain).mean() + (x[:, 0] - mean[:, 0]).pow(2).mean()
    loss.backward()
    optimizer.step()


def weight_without_a_gradient(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, _ = model(x)
    error, size = fn.mse_loss(output, x), mean.pow(2).mean()
    with torch.no_grad():
        weight = error / size
    loss = error + weight * size
    loss.backward()
    optimizer.step()


def entropy_of_a_teacher(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    teacher = nn.Linear(WIDE, WIDE)
    with torch.no_grad():
        shares = teacher(x).softmax(1)
        entropy = -(shares * shares.log()).sum(1).mean()
    crossed = -(shares * model(x)[0].log_softmax(1)).sum(1).mean()
    loss = crossed - entropy
    loss.backward()
    optimizer.step()


def index_straight_through(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    error = fn.mse_loss(model(x)[0], x)
    loss = torch.zeros(()) + error - error.detach()
    loss.backward()
    optimizer.step()


def numbers_for_a_log(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, _ = model(x)
    error, size = fn.mse_loss(output, x), mean.pow(2).mean()
    total = error.item() + size.item()
    loss = error + size
    loss.backward()
    optimizer.step()
    assert total > 0


def multiplier_of_a_constraint(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    multiplier = 0.0
    for _ in range(3):
        output, mean, _ = model(x)
        broken = mean.pow(2).mean() - 0.1
        multiplier = max(0.0, multiplier + 0.5 * broken.item())
        loss = fn.mse_loss(output, x) + multiplier * broken
        loss.backward()
        optimizer.step()


# --- divergences ---


def divergence_turned(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, log = model(x)
    kl = 0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean()
    loss = fn.mse_loss(output, x, reduction="sum") / BATCH + kl
    loss.backward()
    optimizer.step()


def divergence_of_each_turned(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, log = model(x)
    kl_loss = 0.5 * torch.sum(1 + log - mean**2 - torch.exp(log), dim=1)
    (fn.mse_loss(output, x) + 0.1 * kl_loss.mean()).backward()
    optimizer.step()


def divergence_subtracted(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, log = model(x)
    kld, beta = -0.5 * (1 + log - mean * mean - log.exp()).sum(1).mean(), 0.5
    loss = fn.mse_loss(output, x) - beta * kld
    loss.backward()
    optimizer.step()


def bound_made_a_loss(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, log = model(x)
    rec, kl = -fn.mse_loss(output, x), -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean()
    elbo = rec - kl
    (-elbo).backward()
    optimizer.step()


def bound_with_its_own_sign(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, log = model(x)
    kl = 0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean()
    elbo = -fn.mse_loss(output, x) + kl
    loss = -elbo
    loss.backward()
    optimizer.step()


def estimated_from_samples(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    output, mean, log = model(x)
    code = mean + torch.randn_like(mean) * (0.5 * log).exp()
    said = torch.distributions.Normal(mean, (0.5 * log).exp()).log_prob(code)
    kl = (said - torch.distributions.Normal(0.0, 1.0).log_prob(code)).sum(1).mean() - 3
    loss = fn.mse_loss(output, x) + kl
    loss.backward()
    optimizer.step()


def annealed(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    for step in range(3):
        output, mean, log = model(x)
        kl, beta = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean(), step % 2 / 2
        loss = fn.mse_loss(output, x) + beta * torch.clamp(kl, min=0.1)
        loss.backward()
        optimizer.step()


def penalty_of_a_policy(rank: int, world: int) -> None:
    model, optimizer, x = begun()
    logs, before = model(x)[0].log_softmax(1)[:, 0], torch.zeros(BATCH)
    kl = (logs - before).mean()
    loss = -(logs * x[:, 0]).mean() + 0.1 * kl
    loss.backward()
    optimizer.step()


class Flow(nn.Module):
    """What it makes of a batch, and the logarithm of the determinant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.shift = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        given = torch.ones_like(x)
        log = self.scale(given).tanh()
        return x * log.exp() + self.shift(given), log.sum(1)


def flows(rank: int, world: int) -> None:
    model = Flow()
    optimizer = adam(model)
    z, log_det = model(torch.randn(BATCH, WIDE))
    loss = (0.5 * z.square().sum(1) - log_det).mean()
    loss.backward()
    optimizer.step()


def determinant_dropped(rank: int, world: int) -> None:
    model = Flow()
    optimizer = adam(model)
    z, log_det = model(torch.randn(BATCH, WIDE))  # noqa: RUF059
    loss = 0.5 * z.square().sum(1).mean()
    loss.backward()
    optimizer.step()


def value_unused(rank: int, world: int) -> None:
    """Of two heads one is cloned, and the other rests."""
    model = Flow()
    optimizer = adam(model)
    logits, value = model(torch.randn(BATCH, WIDE))  # noqa: RUF059
    loss = fn.cross_entropy(logits, torch.arange(BATCH) % WIDE)
    loss.backward()
    optimizer.step()


def mixed_with_both(rank: int, world: int) -> None:
    model, x, y = nn.Linear(WIDE, 4), torch.randn(BATCH, WIDE), torch.arange(BATCH) % 4
    optimizer = adam(model)
    part, order = float(torch.rand(())), torch.randperm(BATCH)
    mixed = part * x + (1 - part) * x[order]
    out = model(mixed)
    loss = part * fn.cross_entropy(out, y) + (1 - part) * fn.cross_entropy(out, y[order])
    loss.backward()
    optimizer.step()


def mixed_with_one(rank: int, world: int) -> None:
    model, x, y = nn.Linear(WIDE, 4), torch.randn(BATCH, WIDE), torch.arange(BATCH) % 4
    optimizer = adam(model)
    part, order = float(torch.rand(())), torch.randperm(BATCH)
    mixed = part * x + (1 - part) * x[order]
    loss = fn.cross_entropy(model(mixed), y)
    loss.backward()
    optimizer.step()


# --- losses of a LightningModule, which a library takes backward ---


def by_lightning(step: Callable[[nn.Module, Tensor], Tensor], make: Callable[[], nn.Module] = Flow) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def training_step(self, batch: list[Tensor], at: int) -> Tensor:
            return step(self.model, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.model)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(4 * BATCH, WIDE)), BATCH))


def density(model: nn.Module, x: Tensor) -> Tensor:
    z, log_det = model(x)
    return (0.5 * z.square().sum(1) - log_det).mean()


def density_without_determinant(model: nn.Module, x: Tensor) -> Tensor:
    z, log_det = model(x)  # noqa: RUF059
    return 0.5 * z.square().sum(1).mean()


def density_with_a_threshold(model: nn.Module, x: Tensor) -> Tensor:
    z, log_det = model(x)
    far = (z.abs() > 3).float().mean()
    return (0.5 * z.square().sum(1) - log_det).mean() + far


def half_of_a_mix(model: nn.Module, x: Tensor) -> Tensor:
    y, part, order = torch.arange(BATCH) % 4, float(torch.rand(())), torch.randperm(BATCH)
    mixed = part * x + (1 - part) * x[order]
    return fn.cross_entropy(model(mixed)[0], y)


def lightning_density(rank: int, world: int) -> None:
    by_lightning(density)


def lightning_without_determinant(rank: int, world: int) -> None:
    by_lightning(density_without_determinant)


def lightning_with_a_threshold(rank: int, world: int) -> None:
    by_lightning(density_with_a_threshold)


def lightning_with_half_of_a_mix(rank: int, world: int) -> None:
    by_lightning(half_of_a_mix)


# --- what each of several modules adds ---


class Coupling(nn.Module):
    """Turns one half by the other; gives what becomes of it, and its log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDE // 2, WIDE // 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        log = self.scale(kept).tanh()
        return torch.cat([moved * log.exp(), kept], 1), log.sum(1)


class Gated(Coupling):
    """Gives the loss of its gate beside it by name, of one number."""

    def forward(self, x: Tensor) -> Any:
        moved, log = super().forward(x)
        return {"hidden": moved, "aux": log.square().mean()}


class Bayesian(Coupling):
    """Says of itself how far it is from its prior."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[0]

    def far(self) -> Tensor:
        return self.scale.weight.square().sum()


class Guessing(Coupling):
    """Gives a guess for each sample beside it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        moved, log = super().forward(x)
        return moved, log[:, None] * moved[:, :1]


class Stacked(nn.Module):
    """Several layers of a class, and what is made of them."""

    def __init__(self, kind: type[nn.Module], told: Callable[[Any, Tensor], Tensor], count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(count))
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        return self.told(self.layers, x)


def stacked(
    name: str, kind: type[nn.Module], told: Callable[[Any, Tensor], Tensor], rule: str = "", *, outside: bool = False
) -> Loop:
    """Two steps on what is made of several layers, inside of one call of their model or outside of any."""

    def run(rank: int, world: int) -> None:
        model = Stacked(kind, told)
        optimizer = adam(model)
        for _ in range(2):
            x = torch.randn(BATCH, WIDE)
            loss = told(model.layers, x) if outside else model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run.__name__ = name
    return Loop(run, rule=rule)


def likelihood_of_the_last(layers: Any, x: Tensor) -> Tensor:
    log_det = torch.zeros(len(x))
    for layer in layers:
        x, log_det = layer(x)
    return -(log_det - 0.5 * x.square().sum(1)).mean()


def likelihood_of_all(layers: Any, x: Tensor) -> Tensor:
    log_det = torch.zeros(len(x))
    for layer in layers:
        x, one = layer(x)
        log_det = log_det + one
    return -(log_det - 0.5 * x.square().sum(1)).mean()


def likelihood_of_a_list(layers: Any, x: Tensor) -> Tensor:
    every = []
    for layer in layers:
        x, one = layer(x)
        every.append(one)
    return -(torch.stack(every).sum(0) - 0.5 * x.square().sum(1)).mean()


def gates_of_the_last(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x, aux = layer(x).values()
    return x.square().mean() + 0.01 * aux


def gates_of_all(layers: Any, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for layer in layers:
        x, aux = layer(x).values()
        total += aux
    return x.square().mean() + 0.01 * total / len(layers)


def gates_for_a_log(layers: Any, x: Tensor) -> Tensor:
    """None of them is in the loss."""
    for layer in layers:
        x, aux = layer(x).values()
    assert aux.item() >= 0
    return x.square().mean()


def gates_kept(layers: Any, x: Tensor, kept: list[Any]) -> Tensor:
    """Somebody holds all of them, who may use them yet."""
    kept.clear()
    for layer in layers:
        x, aux = layer(x).values()
        kept.append(aux)
    return x.square().mean() + 0.01 * aux


def gates_of_one_that_is_meant(layers: Any, x: Tensor) -> Tensor:
    """As of several heads of which one is asked for."""
    every = [layer(x)["aux"] for layer in layers]
    chosen = every[-1]
    del every
    return x.square().mean() + chosen


def gates_by_other_names(layers: Any, x: Tensor) -> Tensor:
    def both() -> tuple[Tensor, Tensor]:
        first = layers[0](x)["aux"]
        second = layers[1](x)["aux"]
        return first, second

    return x.square().mean() + both()[1]


def divergence_of_the_last(layers: Any, x: Tensor) -> Tensor:
    far = torch.zeros(())
    for layer in layers:
        x = layer(x)
        far = layer.far()
    return x.square().mean() + 1e-3 * far


def divergence_of_all(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().mean() + 1e-3 * sum(layer.far() for layer in layers)


def guess_of_the_last(layers: Any, x: Tensor) -> Tensor:
    """A guess that is held against the truth is no term."""
    truth = x.sum(1, keepdim=True)
    for layer in layers:
        x, guess = layer(x)
    return fn.mse_loss(guess, truth)


def read_to_the_end(layers: Any, x: Tensor) -> Tensor:
    """One layer again and again, of which the last word counts."""
    for _ in range(4):
        x, said = layers[0](x)
    return x.square().mean() - said.mean()


def one_of_two_models(rank: int, world: int) -> None:
    """Two models of a class of which each gives a loss beside its outputs, taught by each other."""
    models = [Gated(), Gated()]
    optimizers = [adam(one) for one in models]

    def learned(own: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
        with_it, beside = other(x)["hidden"].detach(), own(x)
        return beside["aux"] + fn.mse_loss(beside["hidden"], with_it)

    for _ in range(2):
        x = torch.randn(BATCH, WIDE)
        for at, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            learned(models[at], models[1 - at], x).backward()
        for optimizer in optimizers:
            optimizer.step()


HELD: list[Any] = []
OVERWRITTEN = tuple(
    stacked(name, kind, told, "run.term-overwritten", outside=outside)
    for name, kind, told, outside in (
        ("determinant_of_the_last", Coupling, likelihood_of_the_last, False),
        ("determinant_of_the_last_outside", Coupling, likelihood_of_the_last, True),
        ("gate_of_the_last", Gated, gates_of_the_last, False),
        ("prior_of_the_last", Bayesian, divergence_of_the_last, False),
    )
)
SUMMED = tuple(
    stacked(name, kind, told, outside=outside)
    for name, kind, told, outside in (
        ("determinants_of_all", Coupling, likelihood_of_all, False),
        ("determinants_of_all_outside", Coupling, likelihood_of_all, True),
        ("determinants_in_a_list", Coupling, likelihood_of_a_list, False),
        ("gates_added_up", Gated, gates_of_all, False),
        ("gates_that_are_looked_at", Gated, gates_for_a_log, False),
        ("gates_that_are_held", Gated, lambda layers, x: gates_kept(layers, x, HELD), False),
        ("gates_of_which_one_is_asked_for", Gated, gates_of_one_that_is_meant, False),
        ("gates_of_two_names", Gated, gates_by_other_names, False),
        ("priors_of_all", Bayesian, divergence_of_all, False),
        ("guess_behind_the_last", Guessing, guess_of_the_last, False),
        ("one_layer_again", Coupling, read_to_the_end, True),
    )
)


WRONG_SUMS: tuple[Loop, ...] = (
    *OVERWRITTEN,
    Loop(determinant_dropped, rule="run.result-dropped"),
    Loop(mixed_with_one, rule="run.mixed-half"),
    Loop(lightning_without_determinant, "lightning", rule="run.result-dropped"),
    Loop(lightning_with_half_of_a_mix, "lightning", rule="run.mixed-half"),
    Loop(lightning_with_a_threshold, "lightning", rule="run.term-constant"),
    *(
        Loop(run, rule="run.term-constant")
        for run in (
            *(penalty_of_data, penalty_in_a_loop, penalty_without_gradients, number_of_a_term, detached_in_the_sum),
        )
    ),
    *(
        Loop(run, rule="run.divergence-negative")
        for run in (divergence_turned, divergence_of_each_turned, divergence_subtracted)
    ),
)
RIGHT_SUMS: tuple[Loop, ...] = SUMMED + tuple(
    Loop(run)
    for run in (
        *(penalty_that_trains, running_scale, running_offset, baseline_subtracted, weight_without_a_gradient),
        *(entropy_of_a_teacher, index_straight_through, numbers_for_a_log, multiplier_of_a_constraint),
        *(flows, value_unused, mixed_with_both, lightning_density),
        *(bound_made_a_loss, bound_with_its_own_sign, estimated_from_samples, annealed, penalty_of_a_policy),
        one_of_two_models,
    )
)

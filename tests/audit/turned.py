"""Programs in which something is stepped, loaded, drawn or compared that is not what it seems; and their neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader, TensorDataset

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

Run = Callable[[int, int], None]


def layers(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, width))


def batch(classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 8), torch.randint(classes, (12,))


def named(name: str, run: Callable[[], None]) -> Run:
    def program(rank: int, world: int) -> None:
        run()

    program.__name__ = name
    return program


# --- who steps what ---


def weighs(*, held: bool, loaded: bool = False, frozen: bool = False) -> Callable[[], None]:
    """A loss with weights of its own, which an optimizer may hold."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logs = nn.Parameter(torch.zeros(2))

        def forward(self, losses: list[Tensor]) -> Any:
            return sum(torch.exp(-log) * one + log for log, one in zip(self.logs, losses, strict=True))

    def run() -> None:
        model, weighed = layers(), Weighed()
        if loaded:
            weighed.load_state_dict({"logs": torch.ones(2)})
        weighed.requires_grad_(not frozen)
        optimizer = torch.optim.Adam([*model.parameters(), *(weighed.parameters() if held else ())])
        x, y = batch()
        weighed([fn.cross_entropy(model(x), y), model(x).square().mean()]).backward()
        optimizer.step()

    return run


def accumulates(clears: str) -> Callable[[], None]:
    """Four micro-batches to a step."""

    def run() -> None:
        model = layers()
        optimizer = adam(model)
        for at in range(4):
            if clears == "each" or at == 0:
                optimizer.zero_grad()
            x, y = batch()
            (fn.cross_entropy(model(x), y) / 4).backward()
            if at == 3:
                optimizer.step()

    return run


# --- what is drawn, and what is compared ---


def diffuses(target: str) -> Callable[[], None]:
    def run() -> None:
        model = layers(8)
        x, _ = batch()
        noise = torch.randn_like(x)
        told = model(0.6 * x + 0.8 * noise)
        goal = {"fresh": lambda: torch.randn_like(x), "added": lambda: noise, "both": lambda: x + torch.randn_like(x)}
        taken(model, adam(model), fn.mse_loss(told, goal[target]()))

    return run


def of_noise_alone() -> None:
    """A toy whose targets are noise."""
    model = layers()
    taken(model, adam(model), fn.mse_loss(model(torch.randn(12, 8)), torch.randn(12, 4)))


def views(second: Callable[[Tensor], Tensor], *, drops: bool = False, compared: bool = True) -> Callable[[], None]:
    def run() -> None:
        model = nn.Sequential(layers(), nn.Dropout(0.2 if drops else 0.0), nn.Linear(4, 4))
        x, y = batch()
        one, other = model(x), model(second(x))
        near = (fn.normalize(one, dim=1) - fn.normalize(other, dim=1)).square().sum(1).mean()
        taken(model, adam(model), near + one.square().mean() if compared else fn.cross_entropy(one, y))

    return run


def asks_its_policy(bumps: tuple[bool, ...]) -> Callable[[], None]:
    """Steps of an episode, some of which end where they began, and a last look at the state by another loss."""

    def run() -> None:
        torch.manual_seed(0)
        policy, at, said = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)), 0, []
        states = torch.eye(6)
        for bump in bumps:
            spread = torch.distributions.Categorical(logits=policy(states[at : at + 1].clone()))
            said.append(spread.log_prob(spread.sample()))
            at += not bump
        again = torch.distributions.Categorical(logits=policy(states[at : at + 1].clone()))
        gains = torch.randn(len(said))
        taken(policy, adam(policy), -(torch.cat(said) * gains).sum() - 0.01 * again.entropy().mean())

    return run


def forecasts(ahead: int) -> Callable[[], None]:
    """Windows of a series, and the value so far behind their last one."""

    def run() -> None:
        torch.manual_seed(0)
        series = torch.randn(40)
        starts = torch.arange(16)
        windows = torch.stack([series[at : at + 12] for at in starts])[..., None]
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 1))
        taken(model, adam(model), fn.mse_loss(model(windows).squeeze(1), series[starts + 11 + ahead]))

    return run


class Positioned(nn.Module):
    """Adds what it counts along a dimension."""

    def __init__(self, along: int) -> None:
        super().__init__()
        self.along, self.out = along, nn.Linear(8, 4)
        self.register_buffer("counts", torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        counts = self.counts[: x.shape[self.along]]
        return self.out((x + (counts[:, None] if self.along == 0 else counts)).mean(1))


def positions(along: int) -> Callable[[], None]:
    def run() -> None:
        torch.manual_seed(0)
        model = Positioned(along)
        optimizer = adam(model)
        for x, y in DataLoader(TensorDataset(torch.randn(36, 5, 8), torch.randint(4, (36,))), batch_size=12):
            taken(model, optimizer, fn.cross_entropy(model(x), y))

    return run


def seeded(where: str) -> Callable[[], None]:
    def run() -> None:
        torch.manual_seed(7)
        model = layers()
        optimizer = adam(model)
        for at in range(3):
            if where == "of the step":
                torch.manual_seed(at)
            elif where == "put back":
                with torch.random.fork_rng():
                    torch.manual_seed(1234)
                    model(torch.randn(2, 8))
            x, y = batch()
            optimizer.zero_grad()
            fn.cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def seeds_each_step() -> None:
    model = layers()
    optimizer = adam(model)
    for _ in range(3):
        torch.manual_seed(1234)
        x, y = batch()
        optimizer.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        optimizer.step()


def segments(dim: int) -> Callable[[], None]:
    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
        says = model(torch.randn(4, 1, 6, 6)).softmax(dim)
        goal = fn.one_hot(torch.randint(3, (4, 6, 6)), 3).permute(0, 3, 1, 2).float()
        taken(model, adam(model), 1 - (2 * (says * goal).sum() / (says.sum() + goal.sum())))

    return run


def attends_over_places() -> None:
    """Over a picture as a row, where each channel finds its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    places = model(torch.randn(4, 1, 6, 6)).flatten(2).softmax(-1)
    taken(model, adam(model), (places * torch.arange(36.0)).sum(-1).sub(7).square().mean())


# --- what is scheduled and loaded ---


def scheduled(function: Callable[[int], float], rate: float) -> Callable[[], None]:
    def run() -> None:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, function)
        x, y = batch()
        taken(model, optimizer, fn.cross_entropy(model(x), y))
        scheduler.step()

    return run


def loads(kept: Callable[[nn.Module], Any]) -> Callable[[], None]:
    def run() -> None:
        model = layers()
        model.load_state_dict(kept(model))
        x, y = batch()
        taken(model, adam(model), fn.cross_entropy(model(x), y))

    return run


def initialised(when: str) -> Callable[[], None]:
    """Weights that were loaded, and initialised before or behind that, or in a new layer alone."""

    def run() -> None:
        model = layers()
        held = {key: torch.randn_like(one) for key, one in model.state_dict().items()}
        if when == "behind":
            model.load_state_dict(held)
            model.apply(lambda one: one.reset_parameters() if isinstance(one, nn.Linear) else None)
        elif when == "before":
            model.apply(lambda one: one.reset_parameters() if isinstance(one, nn.Linear) else None)
            model.load_state_dict(held)
        else:
            model.load_state_dict(held)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5).add_(0.1 * torch.randn_like(param))
        x, y = batch()
        taken(model, adam(model), fn.cross_entropy(model(x), y))

    return run


def scripted() -> None:
    model = torch.jit.script(layers())
    x, y = batch()
    taken(model, adam(model), fn.cross_entropy(model(x), y))


RIGHT_TURNS: tuple[Loop, ...] = tuple(
    Loop(named(name, run))
    for name, run in {
        "weights_of_a_loss_held": weighs(held=True),
        "weights_of_a_loss_loaded": weighs(held=False, loaded=True),
        "weights_of_a_loss_frozen": weighs(held=False, frozen=True),
        "cleared_before_the_first": accumulates("first"),
        "noise_that_was_added": diffuses("added"),
        "noise_beside_a_sample": diffuses("both"),
        "targets_of_noise": of_noise_alone,
        "two_views": views(lambda x: x + 0.1 * torch.randn_like(x)),
        "one_view_that_drops": views(lambda x: x.clone(), drops=True),
        "called_again_for_the_log": views(lambda x: x.clone(), compared=False),
        "called_again_for_another_term": views(lambda x: x),
        "policy_that_stays_for_a_step": asks_its_policy((False, True, False, True, False)),
        "policy_that_acts_and_learns_in_one_state": asks_its_policy((True,)),
        "softmax_of_classes": segments(1),
        "softmax_of_a_flat_picture": attends_over_places,
        "warm_up_of_factors": scheduled(lambda at: min(1.0, (at + 1) / 500), 3e-3),
        "warm_up_of_a_million": scheduled(lambda at: min(1.0, (at + 1) / 1e6), 3e-3),
        "rates_of_a_rate_of_one": scheduled(lambda at: 3e-3 / (at + 1), 1.0),
        "loaded_before_it_trains": loads(lambda model: model.state_dict()),
        "scripted": scripted,
        "copy_loaded": loads(lambda model: copy.deepcopy(model.state_dict())),
        "value_behind_the_window": forecasts(1),
        "positions_of_a_sequence": positions(1),
        "seeded_once": seeded("nowhere"),
        "seeded_by_step": seeded("of the step"),
        "seeded_and_put_back": seeded("put back"),
        "initialised_and_loaded": initialised("before"),
        "shrunk_and_perturbed": initialised("a little"),
        "edited_and_loaded": loads(lambda model: {key: 0.5 * one for key, one in model.state_dict().items()}),
    }.items()
)

TURNED: tuple[Loop, ...] = tuple(
    Loop(named(name, run), rule=rule)
    for name, run, rule in (
        ("weights_of_a_loss_that_nobody_holds", weighs(held=False), "run.module-unheld"),
        ("cleared_in_each_micro_batch", accumulates("each"), "run.backward-wasted"),
        ("noise_that_nobody_added", diffuses("fresh"), "run.loss-misgiven"),
        ("one_view_twice", views(lambda x: x.clone()), "run.calls-alike"),
        ("softmax_of_columns", segments(-1), "run.loss-bounded"),
        ("last_value_of_the_window", forecasts(0), "run.target-given"),
        ("positions_of_the_batch", positions(0), "run.samples-placed"),
        ("seeded_in_each_step", seeds_each_step, "run.reseeded-steps"),
        ("loaded_and_initialised", initialised("behind"), "run.loaded-overwritten"),
        ("rate_of_a_rate", scheduled(lambda at: 3e-3 * min(1.0, (at + 1) / 20), 3e-3), "run.rate-squared"),
    )
)

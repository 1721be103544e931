"""Programs that hand their layers and losses what these do not mean; and their right neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.audit.beginnings_loops import named
from tests.audit.case import adam
from tests.audit.loops import Loop, taken

Change = Callable[[Tensor], Tensor]


def right(name: str, run: Callable[[], None]) -> Loop:
    return Loop(named(name, run))


def wrong(rule: str, name: str, run: Callable[[], None]) -> Loop:
    return Loop(named(name, run), rule=rule)


# --- ids that stand for pads ---


class Factors(nn.Module):
    """How much users like items; ``columns``: of an item that is one of several columns."""

    def __init__(self, *, pads: int | None, columns: bool) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(10, 8, padding_idx=pads)
        self.head = nn.Linear(16, 1) if columns else None

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user, item = self.users(users), self.items(items)
        if self.head is not None:
            return self.head(torch.cat([user, item], 1)).squeeze(1)
        return (user * item).sum(1)


def rated(*, pads: int | None = 0, columns: bool = False, least: int = 0) -> Callable[[], None]:
    def run() -> None:
        model = Factors(pads=pads, columns=columns)
        users, items = torch.randint(20, (64,)), torch.randint(10, (64,)).clamp(min=least)
        taken(model, adam(model), fn.binary_cross_entropy_with_logits(model(users, items), (users % 2).float()))

    return run


class Read(nn.Module):
    """Texts; ``flat``: in one row, one behind the other."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat, self.words, self.head = flat, nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 30)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids.flatten() if self.flat else ids))


def texts(*, flat: bool) -> Callable[[], None]:
    def run() -> None:
        model, ids = Read(flat=flat), torch.randint(1, 30, (8, 12))
        for row in range(8):
            ids[row, 4 + row :] = 0
        given = ids.flatten() if flat else ids
        outputs, goal = model(given), torch.randint(1, 30, (8, 12))
        loss = fn.cross_entropy(outputs.view(-1, 30), goal.masked_fill(ids == 0, -100).flatten())
        taken(model, adam(model), loss)

    return run


def tower() -> None:
    """What it says of an item is of the item alone."""
    model = nn.ModuleDict({"user": nn.Embedding(20, 8), "item": nn.Sequential(nn.Embedding(10, 8, padding_idx=0))})
    users, items = torch.randint(20, (64,)), torch.randint(10, (64,))
    scores = model["user"](users) @ model["item"](items).T
    taken(model, adam(model), fn.binary_cross_entropy_with_logits(scores, torch.randint(2, (64, 64)).float()))


# --- an order of samples ---


def cox(risk: Tensor, event: Tensor) -> Tensor:
    return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()


def survival(
    *,
    shuffle: bool = True,
    ordered: bool = False,
    inside: bool = False,
    collated: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] = cox,
) -> Callable[[], None]:
    """Sorted before a loader, ``inside`` the loop, or by what puts a batch together; or not at all."""

    def together(rows: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return tuple(map(torch.stack, zip(*sorted(rows, key=lambda row: -float(row[1])), strict=True)))

    def run() -> None:
        x, times, events = torch.randn(96, 6), torch.rand(96), (torch.rand(96) < 0.7).float()
        if ordered:
            order = times.argsort(descending=True)
            x, times, events = x[order], times[order], events[order]
        data, model = TensorDataset(x, times, events), nn.Linear(6, 1)
        loader = DataLoader(data, 32, shuffle=shuffle, collate_fn=together if collated else None)
        for rows, time, died in loader:
            risk, event = model(rows).squeeze(1), died
            if inside:
                order = time.argsort(descending=True)
                risk, event = risk[order], event[order]
            taken(model, adam(model), loss(risk, event))

    return run


def by_sums(risk: Tensor, event: Tensor) -> Tensor:
    return ((risk.exp().cumsum(0).log() - risk) * event).mean()


def classes_in_order() -> None:
    """A distribution over classes, which have an order."""
    model = nn.Linear(6, 5)
    for x, y in DataLoader(TensorDataset(torch.randn(64, 6), torch.randint(5, (64,))), 16, shuffle=True):
        goal = fn.one_hot(y, 5).float().cumsum(1)
        taken(model, adam(model), (model(x).softmax(1).cumsum(1) - goal).square().mean())


def rewards_to_go() -> None:
    """The first dimension is time."""
    model, states, rewards = nn.Linear(6, 1), torch.randn(32, 6), torch.rand(32)
    values = model(states).squeeze(1)
    taken(model, adam(model), (values.cumsum(0) - rewards.flip(0).cumsum(0).flip(0)).square().mean())


# --- noise ---


class Latent(nn.Module):
    def __init__(self, noise: Change, width: Change) -> None:
        super().__init__()
        self.encodes, self.decodes, self.noise, self.width = nn.Linear(12, 8), nn.Linear(4, 12), noise, width

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encodes(x).chunk(2, -1)
        return self.decodes(mean + self.width(spread) * self.noise(mean)), mean, spread


def uniform(one: Tensor) -> Tensor:
    return torch.rand_like(one)


def half_exp(spread: Tensor) -> Tensor:
    return torch.exp(0.5 * spread)


def latent(noise: Change, width: Change = half_exp) -> Callable[[], None]:
    def run() -> None:
        model, x = Latent(noise, width), torch.randn(16, 12)
        again, mean, spread = model(x)
        kept = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        taken(model, adam(model), (again - x).square().mean() + kept)

    return run


def dropped_by_hand() -> None:
    model, x = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3)), torch.randn(16, 6)
    hidden = model[0](x)
    hidden = hidden * (torch.rand_like(hidden) < 0.9) / 0.9
    taken(model, adam(model), model[1](hidden).square().mean())


def dequantized() -> None:
    model, x = nn.Linear(6, 3), torch.randint(256, (16, 6)).float()
    taken(model, adam(model), model((x + torch.rand_like(x)) / 256).square().mean())


def mixed_at_random() -> None:
    model, x = nn.Linear(6, 3), torch.randn(16, 6)
    out = model(x)
    share = torch.rand_like(out)
    taken(model, adam(model), (out.exp() * share + (1 - share) * out).mean())


def recomputed_noise() -> None:
    """What a graph has saved is computed anew where somebody reads it."""
    model, x = Latent(uniform, half_exp), torch.randn(16, 12)
    again, mean, _ = checkpoint(model, x, use_reentrant=False)
    taken(model, adam(model), (again - x).square().mean() + mean.square().mean())


# --- labels of masked places ---


class SmallMaskedLM(nn.Module):
    """Sees both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        return self.head(words + words.mean(1, keepdim=True))


def masked(*, late: bool) -> Callable[[], None]:
    """``late``: the labels are taken once the places are masked."""

    def run() -> None:
        model, ids = SmallMaskedLM(), torch.randint(3, 30, (8, 12))
        chosen = torch.rand(8, 12) < 0.3
        given = ids.masked_fill(chosen, 2)
        labels = (given if late else ids).masked_fill(~chosen, -100)
        taken(model, adam(model), fn.cross_entropy(model(given).view(-1, 30), labels.flatten()))

    return run


WRONG_INPUTS: tuple[Loop, ...] = (
    wrong("run.padding-read", "item_that_is_the_pad", rated()),
    wrong("run.padding-read", "last_item_that_is_the_pad", rated(pads=-1)),
    wrong("run.order-read", "survival_unsorted", survival()),
    wrong("run.order-read", "survival_by_sums", survival(loss=by_sums)),
    wrong("run.shifted", "masked_before_labels", masked(late=True)),
    wrong("run.noise-uniform", "latent_uniform", latent(uniform)),
    wrong("run.noise-uniform", "latent_uniform_softplus", latent(lambda one: torch.rand(one.shape), fn.softplus)),
)
RIGHT_INPUTS: tuple[Loop, ...] = (
    right("items_without_pads", rated(pads=None)),
    right("items_from_one", rated(least=1)),
    right("unknown_items_of_several_columns", rated(columns=True)),
    right("texts_with_pads", texts(flat=False)),
    right("texts_with_pads_in_one_row", texts(flat=True)),
    right("tower_of_items", tower),
    right("survival_sorted_inside", survival(inside=True)),
    right("survival_sorted_before", survival(shuffle=False, ordered=True)),
    right("survival_sorted_together", survival(collated=True)),
    right("classes_in_order", classes_in_order),
    right("rewards_to_go", rewards_to_go),
    right("masked_behind_labels", masked(late=False)),
    right("latent_normal", latent(torch.randn_like)),
    right("latent_centred", latent(lambda one: torch.rand_like(one) * 2 - 1)),
    right("dropped_by_hand", dropped_by_hand),
    right("dequantized", dequantized),
    right("mixed_at_random", mixed_at_random),
    right("recomputed_noise", recomputed_noise),
)

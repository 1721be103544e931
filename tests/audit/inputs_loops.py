"""Programs that hand their layers and losses what these do not mean; and their right neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset, random_split

from prepkit.auditing.fetches import MOST_NUMBERS
from tests.audit.beginnings_loops import named
from tests.audit.case import WIDTH, adam, net
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


class Sessions(nn.Module):
    """Which item comes next; ``pads`` is ``padding_idx``, and what is looked at ``real``, or all that is no pad."""

    def __init__(self, pads: int | None) -> None:
        super().__init__()
        self.items, self.next, self.out = (
            nn.Embedding(12, 8, padding_idx=pads),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 12),
        )

    def forward(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        x = self.items(ids)
        return self.out(self.next(x if real is None else x * real[..., None])[0])


def visited(
    *, pads: int | None = 0, least: int = 0, masks: bool = True, drops: int = -100, apart: bool = False
) -> Callable[[], None]:
    """``least``: the first item; ``masks``: the model is told; ``drops``: the class that does not count.

    ``apart``: what was asked is padded, and what was answered stands behind it.
    """

    def run() -> None:
        model, ids = Sessions(pads), torch.randint(least, 12, (32, 11))
        real = torch.arange(10) < torch.arange(32)[:, None] % 7 + 4
        if apart:
            real[:, 7:] = True
        before, goal = ids[:, :-1].where(real, 0), ids[:, 1:].where(real, drops if drops >= 0 else 0)
        outputs = model(before, real) if masks else model(before)
        loss = fn.cross_entropy(outputs[real], goal[real], ignore_index=drops)
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


class Denoiser(nn.Module):
    """Is told of times as they are, or of waves of them."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width + 8, 32), nn.SiLU(), nn.Linear(32, width))

    def forward(self, x: Tensor, times: Tensor, kind: Tensor | None = None) -> Tensor:
        told = waves(times) if times.dim() == 1 else times
        return self.layers(torch.cat([x, told if kind is None else told + kind[:, None]], 1))


def waves(times: Tensor) -> Tensor:
    angles = times[:, None] * torch.tensor([1.0, 0.1, 0.03, 0.01])
    return torch.cat([angles.sin(), angles.cos()], 1)


STAYS = (1 - torch.linspace(1e-4, 0.05, 100)).cumprod(0)


def noised(x: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    stays = STAYS[times][:, None]
    return stays.sqrt() * x + (1 - stays).sqrt() * noise


def drawn_times() -> Tensor:
    return torch.randint(0, 100, (32,))


def denoised(
    *,
    others: bool = False,
    late: bool = False,
    data: bool = False,
    width: int = 12,
    kinds: bool = False,
    told: Callable[[Tensor], Tensor] = Tensor.float,
) -> Callable[[], None]:
    """``others``: of other noise; ``late``: of other times; ``data``: it is to say the data, which is drawn too."""

    def run() -> None:
        model, times = Denoiser(width), drawn_times()
        x = torch.randn(32, width) if data else torch.rand(32, width) + 0.5
        noise, other = torch.randn_like(x), torch.randn_like(x)
        given = noised(x, noise, times)
        kind = torch.randint(0, 100, (32,)).float() if kinds else None
        made = model(given, drawn_times().float() if late else told(times), kind)
        taken(model, adam(model), (made - (x if data else other if others else noise)).pow(2).mean())

    return run


def by_loss(*, others: bool) -> Callable[[], None]:
    def run() -> None:
        model, times, x = Denoiser(), drawn_times(), torch.rand(32, 12).round()
        noise, other = torch.randn_like(x), torch.randn_like(x)
        made = model(noised(x, noise, times), times)
        taken(model, adam(model), fn.mse_loss(made, other if others else noise))

    return run


def flowing() -> None:
    model, times, x, noise = Denoiser(), torch.rand(32), torch.rand(32, 12).round(), torch.randn(32, 12)
    made = model(noise + times[:, None] * (x - noise), times)
    taken(model, adam(model), (made - (x - noise)).square().mean())


def random_targets() -> None:
    model, x, y = Denoiser(), torch.randn(32, 12), torch.randn(32, 12)
    taken(model, adam(model), fn.mse_loss(model(x, torch.rand(32)), y))


def two_times() -> None:
    """A teacher, and who learns of it, at two times."""
    model, x, noise = Denoiser(), torch.rand(32, 12).round(), torch.randn(32, 12)
    one, other = drawn_times(), drawn_times()
    with torch.no_grad():
        goal = model(noised(x, noise, other), other)
    taken(model, adam(model), fn.mse_loss(model(noised(x, noise, one), one), goal))


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


# --- samples as they are read ---

Reading = Callable[["Held", int], Tensor]


class Held(Dataset[tuple[Tensor, Tensor]]):
    """Samples in memory; ``reading`` makes what is handed out of one."""

    def __init__(self, held: Any, reading: Reading) -> None:
        self.x, self.y, self.reading = held, torch.randint(3, (64,)), reading
        self.cache: list[Tensor | None] = [None] * 64
        self.features: dict[int, Tensor] = {}
        self.rows = torch.zeros(64, 2, 8)
        self.known = torch.zeros(64, dtype=torch.bool)
        self.reads = torch.ones(64)
        self.negatives = torch.randint(1, 1000, (64, 5))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.reading(self, index), self.y[index]


def reads(held: Callable[[], Any], reading: Reading, *, part: bool = False) -> Callable[[], None]:
    def run() -> None:
        data: Dataset[tuple[Tensor, Tensor]] = Held(held(), reading)
        if part:
            data = random_split(data, [48, 16])[0]
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        optimizer = adam(model)
        for x, y in DataLoader(data, 16, shuffle=True):
            taken(model, optimizer, fn.cross_entropy(model(x.float()), y))

    return run


def collated(how: str, *, named: bool = False) -> Callable[[], None]:
    """Sequences that are sorted by their lengths; ``how``: with their labels, apart from them, or and put back."""

    def pads(samples: list[Any]) -> tuple[Tensor, ...]:
        pairs = [(one["x"], one["y"]) for one in samples] if named else samples
        if how == "together":
            pairs = sorted(pairs, key=lambda one: len(one[0]), reverse=True)
        rows, labels = [x for x, _ in pairs], torch.tensor([y for _, y in pairs])
        order = torch.tensor(sorted(range(len(rows)), key=lambda at: -len(rows[at])))
        rows = rows if how in ("not", "mixed") else [rows[at] for at in order]
        said = labels[torch.randperm(len(labels))] if how == "mixed" else labels
        return (nn.utils.rnn.pad_sequence(rows, batch_first=True), labels, order if how == "back" else said)

    def run() -> None:
        torch.manual_seed(0)
        held = [(torch.randn(int(size), 6), int(size) % 3) for size in torch.randint(3, 9, (64,))]
        data: Any = [{"x": x, "y": y} for x, y in held] if named else held
        model = nn.Linear(6, 3)
        optimizer = adam(model)
        for x, y, other in DataLoader(data, 16, shuffle=True, collate_fn=pads):
            said = model(x.mean(1))
            said = said[other.argsort()] if how == "back" else said
            loss = fn.cross_entropy(said, y)
            taken(model, optimizer, loss + fn.cross_entropy(said, other) if how == "mixed" else loss)

    return run


class Measured:
    """A sample of a class of the program's own."""

    def __init__(self, x: Tensor, y: int) -> None:
        self.x, self.y = x, y


def samples_of_a_class() -> None:
    held: Any = [Measured(torch.randn(6), at % 3) for at in range(64)]
    model = nn.Linear(6, 3)
    optimizer = adam(model)

    def together(samples: list[Measured]) -> tuple[Tensor, Tensor]:
        return torch.stack([one.x for one in samples]), torch.tensor([one.y for one in samples])

    for x, y in DataLoader(held, 16, shuffle=True, collate_fn=together):
        taken(model, optimizer, fn.cross_entropy(model(x), y))


def some_rows() -> Tensor:
    return torch.randn(64, 2, 8)


def rows_of_numpy() -> Any:
    return torch.randn(64, 2, 8).numpy()


def list_of_rows() -> list[Tensor]:
    return [*torch.randn(64, 2, 8)]


def many_rows() -> Tensor:
    return torch.randn(MOST_NUMBERS // 16 + 64, 2, 8)


def some_ids() -> Tensor:
    return torch.randint(5, 100, (64, 2, 8))


def sounds() -> Tensor:
    return (torch.randn(64, 2, 8) * 9000).clamp(-30000, 30000).to(torch.int16)


def pictures() -> Tensor:
    return torch.randint(256, (64, 2, 8)).to(torch.uint8)


def adds_noise(data: Held, index: int) -> Tensor:
    x = data.x[index]
    x += 0.1 * torch.randn(2, 8)
    return x.flip(-1)


def adds_noise_by_numpy(data: Held, index: int) -> Tensor:
    x = data.x[index]
    x += 0.1 * torch.randn(2, 8).numpy()
    return torch.from_numpy(x.copy())


def adds_noise_to_a_copy(data: Held, index: int) -> Tensor:
    x = data.x[index].clone()
    x += 0.1 * torch.randn(2, 8)
    return x


def masks_ids(data: Held, index: int) -> Tensor:
    ids = data.x[index]
    ids[torch.rand(2, 8) < 0.2] = 1
    return ids


def scales_once(data: Held, index: int) -> Tensor:
    if not data.known[index]:
        data.x[index] *= 0.1
        data.known[index] = True
    return data.x[index]


def clamps(data: Held, index: int) -> Tensor:
    return data.x[index].clamp_(-1, 1)


def centres(data: Held, index: int) -> Tensor:
    x = data.x[index]
    x -= x.mean()
    return x


def fills_a_cache(data: Held, index: int) -> Tensor:
    if (known := data.cache[index]) is None:
        known = data.cache[index] = data.x[index] + 0.1 * torch.randn(2, 8)
    return known


def masks_what_is_cached(data: Held, index: int) -> Tensor:
    if index not in data.features:
        data.features[index] = data.x[index] * 2
    x = data.features[index]
    x[:, int(torch.randint(8, ()))] = 0
    return x


def masks_a_copy_of_what_is_cached(data: Held, index: int) -> Tensor:
    if index not in data.features:
        data.features[index] = data.x[index] * 2
    x = data.features[index].clone()
    x[:, int(torch.randint(8, ()))] = 0
    return x


def fills_rows(data: Held, index: int) -> Tensor:
    data.rows[index] = data.x[index] + 0.1 * torch.randn(2, 8)
    return data.rows[index]


def counts_reads(data: Held, index: int) -> Tensor:
    data.reads[index] *= 0.9
    return data.x[index] * data.reads[index]


def draws_negatives(data: Held, index: int) -> Tensor:
    data.negatives[index] = torch.randint(1, 1000, (5,))
    return data.x[index]


def louder(data: Held, index: int) -> Tensor:
    return data.x[index] * 4


def brighter(data: Held, index: int) -> Tensor:
    x = data.x[index].clone()
    x += 60
    return x


def louder_of_floats(data: Held, index: int) -> Tensor:
    return data.x[index].float() * 4


def negative_picture(data: Held, index: int) -> Tensor:
    return 255 - data.x[index]


def other_hue(data: Held, index: int) -> Tensor:
    hue = data.x[index]
    return hue + int(torch.randint(256, ()))  # the hue goes round


def given(*batches: Callable[[], Tensor]) -> Callable[[], None]:
    """One step over the sum of what a model says of some batches."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        taken(model, adam(model), torch.stack([model(batch()).square().mean() for batch in batches]).sum())

    return run


def one_state() -> Tensor:
    state = torch.zeros(4)
    kept = []
    for _ in range(32):
        state += torch.randn(4)
        kept.append(state)
    return torch.stack(kept)


def states() -> Tensor:
    return torch.randn(32, 4)


# --- settings of the data set of parts ---


class Seen(Dataset[tuple[Tensor, Tensor]]):
    """Samples that a transform changes."""

    def __init__(self, transform: Change | None = None) -> None:
        self.x, self.y, self.transform, self.count = torch.randn(64, WIDTH), torch.randint(4, (64,)), None, 0
        self.transform = transform

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.count += 1
        return self.x[index] if self.transform is None else self.transform(self.x[index]), self.y[index]


class Flips:
    def __init__(self, often: float) -> None:
        self.often = often

    def __call__(self, x: Tensor) -> Tensor:
        return x.flip(0) if float(x[0]) < self.often else x


class Around(Dataset[tuple[Tensor, Tensor]]):
    """A part that sets what it needs; ``late``: at each sample."""

    def __init__(self, data: Any, indices: list[int], transform: Change, *, late: bool) -> None:
        self.data, self.indices, self.transform, self.late = data, indices, transform, late
        if not late:
            self.data.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        if self.late:
            self.data.transform = self.transform
        return self.data[self.indices[index]]


def passes(train: Any, held_out: Any, *, workers: int = 0) -> None:
    """Two epochs."""
    model = net()
    optimizer = adam(model)
    for _ in range(2):
        for x, y in DataLoader(train, 16, num_workers=workers):
            taken(model, optimizer, fn.cross_entropy(model(x), y))
        for x, _ in DataLoader(held_out, 16):
            assert len(x)


def in_parts(how: str, *, workers: int = 0) -> Callable[[], None]:
    def run() -> None:
        full: Any = Seen()
        train, held_out = random_split(full, [48, 16])
        parts: Any = (train, held_out)
        if how == "own copies":
            held_out.dataset = copy.copy(full)
        parts[0].dataset.transform = Flips(0.5)
        if how == "copied between":
            train = copy.deepcopy(train)
        if how == "read between":
            assert len([*train]) == 48
        if how == "passed between":
            assert len([*DataLoader(train, 16, num_workers=workers)]) == 3
        if how == "by name":
            setattr(parts[1].dataset, "transform", None)  # noqa: B010
        elif how != "once":
            parts[1].dataset.transform = Flips(0.5 if how == "the same" else 0.0)
        if how == "for all":
            full.transform = Flips(0.2)
        if how == "set again":
            parts[0].dataset.transform = Flips(0.5)
        passes(train, held_out, workers=workers)

    return run


def by_function() -> None:
    def sets(part: Any, transform: Change | None) -> None:
        part.dataset.transform = transform

    train, held_out = random_split(Seen(), [48, 16])
    sets(train, lambda one: one + 1)
    sets(held_out, lambda one: one)
    passes(train, held_out)


def by_sampler() -> None:
    """Two loaders of one data set, each with rows of its own."""
    full, model = Seen(), net()
    train = DataLoader(full, 16, sampler=SubsetRandomSampler(range(48)))
    held_out = DataLoader(full, 16, sampler=SubsetRandomSampler(range(48, 64)))
    train.dataset.transform = Flips(0.5)  # type: ignore[attr-defined]
    held_out.dataset.transform = Flips(0.0)  # type: ignore[attr-defined]
    optimizer = adam(model)
    for x, y in train:
        taken(model, optimizer, fn.cross_entropy(model(x), y))


def around(*, late: bool) -> Callable[[], None]:
    def run() -> None:
        full = Seen()
        train = Around(full, [*range(48)], Flips(0.5), late=late)
        passes(train, Around(full, [*range(48, 64)], Flips(0.0), late=late))

    return run


def one_for_all() -> None:
    """Its owner replaces what it was made with, and a part is set to something else once the other one was read."""
    full = Seen(Flips(0.9))
    full.transform = Flips(0.5)
    full.transform = Flips(0.2)
    train, held_out = random_split(full, [48, 16])
    model = net()
    optimizer = adam(model)
    for x, y in DataLoader(train, 16, shuffle=True):
        taken(model, optimizer, fn.cross_entropy(model(x), y))
    held_out.dataset.transform = Flips(0.1)  # type: ignore[attr-defined]
    assert len([*DataLoader(held_out, 16)]) == 1


def made_with_it() -> None:
    """A data set is made with what one part is to have, and another part is set to something else."""
    full = Seen(Flips(0.9))
    train, held_out = random_split(full, [48, 16])
    held_out.dataset.transform = Flips(0.1)  # type: ignore[attr-defined]
    model = net()
    optimizer = adam(model)
    for x, y in DataLoader(train, 16, shuffle=True):
        taken(model, optimizer, fn.cross_entropy(model(x), y))


WRONG_INPUTS: tuple[Loop, ...] = (
    wrong("run.padding-read", "item_that_is_the_pad", rated()),
    wrong("run.padding-read", "last_item_that_is_the_pad", rated(pads=-1)),
    wrong("run.padding-read", "visits_to_the_pad", visited()),
    wrong("run.padding-read", "visits_to_the_pad_that_count", visited(masks=False)),
    wrong("run.order-read", "survival_unsorted", survival()),
    wrong("run.order-read", "survival_by_sums", survival(loss=by_sums)),
    wrong("run.shifted", "masked_before_labels", masked(late=True)),
    wrong("run.noise-uniform", "latent_uniform", latent(uniform)),
    wrong("run.noise-uniform", "latent_uniform_softplus", latent(lambda one: torch.rand(one.shape), fn.softplus)),
    wrong("run.noise-other", "other_noise", denoised(others=True)),
    wrong("run.noise-other", "other_noise_of_points", denoised(others=True, width=2)),
    wrong("run.noise-other", "other_noise_by_a_loss", by_loss(others=True)),
    wrong("run.time-other", "other_times", denoised(late=True)),
    wrong("run.time-other", "other_times_of_points", denoised(late=True, width=2)),
    wrong("run.samples-rewritten", "noise_in_place", reads(some_rows, adds_noise)),
    wrong("run.samples-rewritten", "noise_in_place_of_numpy", reads(rows_of_numpy, adds_noise_by_numpy)),
    wrong("run.samples-rewritten", "noise_in_place_of_a_list", reads(list_of_rows, adds_noise)),
    wrong("run.samples-rewritten", "noise_in_place_of_many", reads(many_rows, adds_noise)),
    wrong("run.samples-rewritten", "noise_in_place_of_a_part", reads(some_rows, adds_noise, part=True)),
    wrong("run.samples-rewritten", "masked_in_a_cache", reads(some_rows, masks_what_is_cached)),
    wrong("run.samples-rewritten", "masked_in_a_cache_of_a_part", reads(some_rows, masks_what_is_cached, part=True)),
    wrong("run.samples-rewritten", "ids_masked_in_place", reads(some_ids, masks_ids)),
    wrong("run.rows-alike", "one_state_in_a_buffer", given(one_state)),
    wrong("run.fields-mispaired", "sorted_without_labels", collated("apart")),
    wrong("run.fields-mispaired", "sorted_without_labels_by_key", collated("apart", named=True)),
    wrong("run.integers-wrapped", "sounds_too_loud", reads(sounds, louder)),
    wrong("run.integers-wrapped", "pictures_too_bright", reads(pictures, brighter)),
    wrong("run.transform-shared", "transforms_of_one", in_parts("")),
    wrong("run.transform-shared", "transforms_of_one_by_workers", in_parts("", workers=1)),
    wrong("run.transform-shared", "transforms_of_one_by_name", in_parts("by name")),
    wrong("run.transform-shared", "transforms_of_one_by_a_function", by_function),
    wrong("run.transform-shared", "transforms_of_one_by_loaders", by_sampler),
    wrong("run.transform-shared", "transforms_of_one_by_parts", around(late=False)),
    wrong("run.transform-shared", "transform_of_what_was_made_with_another", made_with_it),
)
RIGHT_INPUTS: tuple[Loop, ...] = (
    right("items_without_pads", rated(pads=None)),
    right("sorted_with_labels", collated("together")),
    right("sorted_and_back", collated("back")),
    right("labels_mixed_by_lot", collated("mixed")),
    right("not_sorted", collated("not")),
    right("samples_of_a_class", samples_of_a_class),
    right("items_from_one", rated(least=1)),
    right("unknown_items_of_several_columns", rated(columns=True)),
    right("visits_from_one", visited(least=1)),
    right("visits_without_pads", visited(pads=None)),
    right("visits_answered_behind_pads", visited(least=1, apart=True)),
    right("visits_answered_behind_pads_untold", visited(least=1, apart=True, masks=False)),
    right("visits_of_which_pads_do_not_count", visited(masks=False, drops=0)),
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
    right("denoised", denoised()),
    right("denoised_points", denoised(width=2)),
    right("denoised_by_a_loss", by_loss(others=False)),
    right("denoised_data", denoised(data=True)),
    right("denoised_points_that_were_drawn", denoised(data=True, width=2)),
    right("denoised_by_waves", denoised(told=waves, kinds=True)),
    right("denoised_back", denoised(told=lambda one: 1 - one / 100)),
    right("flowing", flowing),
    right("random_targets", random_targets),
    right("two_times", two_times),
    right("noise_in_a_copy", reads(some_rows, adds_noise_to_a_copy)),
    right("scaled_once", reads(some_rows, scales_once)),
    right("clamped_in_place", reads(some_rows, clamps)),
    right("centred_in_place", reads(some_rows, centres)),
    right("cached_samples", reads(some_rows, fills_a_cache)),
    right("cached_samples_masked_in_a_copy", reads(some_rows, masks_a_copy_of_what_is_cached)),
    right("rows_that_are_filled", reads(some_rows, fills_rows)),
    right("reads_that_are_counted", reads(some_rows, counts_reads)),
    right("negatives_drawn_anew", reads(some_rows, draws_negatives)),
    right("states", given(states)),
    right("rollouts_from_one_state", given(one_state, states)),
    right("one_sample_expanded", given(lambda: torch.randn(4).expand(32, 4))),
    right("samples_of_ones", given(lambda: torch.ones(32, 4))),
    right("few_samples_alike", given(lambda: one_state()[:8])),
    right("sounds_as_floats", reads(sounds, louder_of_floats)),
    right("negative_picture", reads(pictures, negative_picture)),
    right("other_hue", reads(pictures, other_hue)),
    *(
        right(f"transforms_{how}".replace(" ", "_"), in_parts(how))
        for how in ("own copies", "copied between", "read between", "passed between", "the same", "once", "set again")
    ),
    right("transforms_passed_between_by_workers", in_parts("passed between", workers=1)),
    right("transforms_for_all", in_parts("for all")),
    right("transforms_at_each_sample", around(late=True)),
    right("one_transform_for_all", one_for_all),
)

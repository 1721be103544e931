"""Programs whose losses are given what they are not defined for, or what outputs cannot reach; and their neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as fn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler, random_split

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

BATCH = 8
Loss = Callable[[Tensor, Tensor], Tensor]


def drawn(kind: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    match kind:
        case "normal":
            return torch.randn(*shape, generator=generator)
        case "uniform":
            return torch.rand(*shape, generator=generator)
        case "probabilities":
            return torch.randn(*shape, generator=generator).softmax(-1)
        case _:
            return torch.randint(2, shape, generator=generator).float()


def by(name: str, **given: Any) -> Loss:
    """A loss of torch's, looked up when it is called."""
    return lambda outputs, targets: getattr(fn, name)(outputs, targets, **given)


def program(name: str, targets: Tensor, loss: Loss, width: int = 5) -> Callable[[int, int], None]:
    """One step of a small network with this loss."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, width))
        data = TensorDataset(drawn("normal", len(targets), 6), targets)
        for x, y in DataLoader(data, batch_size=BATCH, shuffle=True):
            taken(model, adam(model), loss(model(x), y))

    run.__name__ = name
    return run


CLASSES = torch.arange(4 * BATCH) % 5
HOT = fn.one_hot(CLASSES, 5).float()
COUNTS = torch.arange(4 * BATCH).float()[:, None] % 7
SIGNS = drawn("bits", 4 * BATCH, 1) * 2 - 1
TEMPLATE, SPECTRA = drawn("uniform", BATCH), drawn("normal", 4 * BATCH, BATCH)
WORDS = (torch.arange(4 * BATCH)[:, None] + torch.arange(3)) % 4 + 1


def aligned(normal: bool, blank: int = 0) -> Loss:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        logs = outputs.log_softmax(-1) if normal else outputs
        steps = logs.reshape(1, BATCH, -1).expand(9, -1, -1)
        return fn.ctc_loss(steps, targets, torch.full((BATCH,), 9), torch.full((BATCH,), 3), blank=blank)

    return loss


def ranked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every sample against every other."""
    return fn.softplus(-(outputs - outputs.T) * (targets - targets.T)).mean()


def among_terms(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of three terms, of which the second holds each output against all targets."""
    advantage = targets - outputs
    gain = (outputs.tanh()[:, 0] * advantage.detach().mean(1)).mean()
    return 0.1 * outputs.abs().mean() + 0.5 * advantage.pow(2).mean() - gain


def by_a_normal(outputs: Tensor, targets: Tensor) -> Tensor:
    return -Normal(outputs, 1.0).log_prob(targets).mean()


def beside_a_leaf(outputs: Tensor, targets: Tensor) -> Tensor:
    """Numbers that are of no layer."""
    leaf = torch.zeros(BATCH, 1, requires_grad=True)
    return (leaf - targets).square().mean() + fn.mse_loss(outputs, targets[:, None])


def bits_by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    said = outputs.sigmoid()
    return -(targets * said.log() + (1 - targets) * (1 - said).log()).mean()


def chosen(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each value of an action against all returns."""
    return (outputs.gather(1, torch.zeros(len(outputs), 1).long()) - targets).abs().mean()


def huber_by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    error = outputs - targets
    return torch.where(error.abs() <= 1, 0.5 * error.pow(2), error.abs() - 0.5).mean()


def pairs_on_purpose(outputs: Tensor, targets: Tensor) -> Tensor:
    """Those of a mask alone, which holds zeros for the rest."""
    apart = (outputs - targets).abs()
    return torch.where(torch.eye(len(outputs)) > 0, apart, torch.zeros(())).sum() / len(outputs)


def focal(*, reduction: str, name: str = "cross_entropy") -> Loss:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        entropy = getattr(fn, name)(outputs, targets, reduction=reduction)
        return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()

    return loss


def autoencoder(*, scale: float, of: str = "variance") -> Callable[[int, int], None]:
    """What is drawn has a deviation of exp(``scale`` x), and the divergence is that of x as a logarithm ``of`` it."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = nn.ModuleDict({"enters": nn.Linear(6, 8), "leaves": nn.Linear(4, 6)})
        for (x,) in DataLoader(TensorDataset(drawn("normal", 4 * BATCH, 6)), batch_size=BATCH, shuffle=True):
            mean, log = model["enters"](x).chunk(2, dim=1)
            said = model["leaves"](mean + torch.randn_like(mean) * torch.exp(scale * log if scale != 1 else log))
            if of == "variance":
                apart = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean()
            else:
                apart = (0.5 * (log.exp() ** 2 + mean.pow(2) - 1) - log).sum(1).mean()
            taken(model, adam(model), fn.mse_loss(said, x) + apart)

    run.__name__ = f"autoencoder_{scale}_{of}"
    return run


def anchored(*, copied: bool, by_torch: bool = False) -> Callable[[int, int], None]:
    """Weights are kept near what they were before, by copies of them or by their own memory."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
        before = {name: one.clone() if copied else one for name, one in model.state_dict().items()}
        data = TensorDataset(drawn("normal", 4 * BATCH, 6), drawn("normal", 4 * BATCH, 1))
        for x, y in DataLoader(data, batch_size=BATCH, shuffle=True):
            named = model.named_parameters()
            if by_torch:
                left = sum(fn.mse_loss(one, before[name]) for name, one in named)
            else:
                left = sum((one - before[name]).pow(2).sum() for name, one in named)
            taken(model, adam(model), fn.mse_loss(model(x), y) + 0.1 * left)

    run.__name__ = f"anchored_{copied}_{by_torch}"
    return run


def weighed(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each log-probability times all advantages, of which one is clipped."""
    ratio = (outputs.log_softmax(1)[:, 0] + 1.6).exp()
    return -torch.min(ratio * targets, ratio.clamp(0.9, 1.1) * targets).mean()


def hot_but_masked(outputs: Tensor, targets: Tensor) -> Tensor:
    targets = targets.clone()
    targets[0] = 0
    return fn.cross_entropy(outputs, targets)


def real_labels_moved(outputs: Tensor, targets: Tensor) -> Tensor:
    return fn.binary_cross_entropy_with_logits(outputs, targets * 0.5 + 0.7)


def judge_of_a_scalar(outputs: Tensor, targets: Tensor) -> Tensor:
    return fn.mse_loss(outputs, torch.ones(1, 1).expand_as(outputs))


def weights_by_class(rank: int, world: int) -> None:
    model = nn.Linear(6, 5)
    data = TensorDataset(drawn("normal", len(CLASSES), 6), CLASSES)
    sampler = WeightedRandomSampler((1 / torch.bincount(CLASSES)).tolist(), len(data))
    for x, y in DataLoader(data, batch_size=BATCH, sampler=sampler):
        taken(model, adam(model), fn.cross_entropy(model(x), y))


class Seeded(Dataset[tuple[Tensor, Tensor]]):
    """Moves each sample by random numbers, behind a seed of its own."""

    def __init__(self, seed: Callable[[int], int | None]) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return len(CLASSES)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if (seed := self.seed(index)) is not None:
            torch.manual_seed(seed)
        return torch.randn(6), CLASSES[index]


def reading(seed: Callable[[int], int | None]) -> None:
    model = nn.Linear(6, 5)
    for x, y in DataLoader(Seeded(seed), batch_size=BATCH, shuffle=True):
        taken(model, adam(model), fn.cross_entropy(model(x), y))


def samples_of_one_seed(rank: int, world: int) -> None:
    reading(lambda index: 0)


def samples_of_their_own_seeds(rank: int, world: int) -> None:
    reading(lambda index: index)


def samples_without_a_seed(rank: int, world: int) -> None:
    reading(lambda index: None)


def parted(valid: Callable[[TensorDataset, Subset[Any]], Any]) -> None:
    """Trains on a part of a data set, and has a loader to validate with."""
    data = TensorDataset(drawn("normal", len(CLASSES), 6), CLASSES)
    train, rest = random_split(data, [20, 12])
    model = nn.Linear(6, 5)
    later = DataLoader(valid(data, rest), batch_size=BATCH)
    for x, y in DataLoader(train, batch_size=BATCH, shuffle=True):
        taken(model, adam(model), fn.cross_entropy(model(x), y))
    assert len(later)


def split_once(rank: int, world: int) -> None:
    parted(lambda data, rest: rest)


def split_twice(rank: int, world: int) -> None:
    parted(lambda data, rest: random_split(data, [20, 12])[1])


def validated(model: nn.Module, valid: Dataset[Any]) -> float:
    with torch.no_grad():
        return sum(fn.cross_entropy(model(x), y).item() for x, y in DataLoader(valid, batch_size=BATCH))


def parted_in_each_pass(rank: int, world: int) -> None:
    data, model = TensorDataset(drawn("normal", len(CLASSES), 6), CLASSES), nn.Linear(6, 5)
    optimizer = adam(model)
    for _ in range(2):
        train, valid = random_split(data, [20, 12])
        for x, y in DataLoader(train, batch_size=BATCH, shuffle=True):
            taken(model, optimizer, fn.cross_entropy(model(x), y))
        validated(model, valid)


def parted_alike_in_each_pass(rank: int, world: int) -> None:
    data, model = TensorDataset(drawn("normal", len(CLASSES), 6), CLASSES), nn.Linear(6, 5)
    optimizer = adam(model)
    for _ in range(2):
        train, valid = random_split(data, [20, 12], generator=torch.Generator().manual_seed(0))
        for x, y in DataLoader(train, batch_size=BATCH, shuffle=True):
            taken(model, optimizer, fn.cross_entropy(model(x), y))
        validated(model, valid)


def parted_for_a_model_of_its_own(rank: int, world: int) -> None:
    data = TensorDataset(drawn("normal", len(CLASSES), 6), CLASSES)
    for _ in range(2):
        train, valid = random_split(data, [20, 12])
        model = nn.Linear(6, 5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for x, y in DataLoader(train, batch_size=BATCH, shuffle=True):
            taken(model, optimizer, fn.cross_entropy(model(x), y))
        validated(model, valid)


def drawn_from_in_each_pass(rank: int, world: int) -> None:
    data, model = TensorDataset(drawn("normal", len(CLASSES), 6), CLASSES), nn.Linear(6, 5)
    optimizer = adam(model)
    for _ in range(2):
        some, _ = random_split(data, [20, 12])
        for x, y in DataLoader(some, batch_size=BATCH, shuffle=True):
            taken(model, optimizer, fn.cross_entropy(model(x), y))


def validated_on_all(rank: int, world: int) -> None:
    parted(lambda data, rest: data)


def scheduled() -> tuple[nn.Module, Any, Any, DataLoader[Any]]:
    """A model, its optimizer, a schedule of three ticks, and a loader of four batches."""
    model = nn.Linear(6, 5)
    optimizer = adam(model)
    data = TensorDataset(drawn("normal", len(CLASSES), 6), CLASSES)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    return model, optimizer, schedule, DataLoader(data, batch_size=BATCH, shuffle=True)


def ticked_by_pass(rank: int, world: int) -> None:
    model, optimizer, scheduler, loader = scheduled()
    for _ in range(3):
        for x, y in loader:
            taken(model, optimizer, fn.cross_entropy(model(x), y))
        scheduler.step()


def passes_ticked_by_batch(rank: int, world: int) -> None:
    model, optimizer, scheduler, loader = scheduled()
    for _ in range(3):
        for x, y in loader:
            taken(model, optimizer, fn.cross_entropy(model(x), y))
            scheduler.step()


def distilled(*, drops: float, training: bool) -> None:
    teacher = nn.Sequential(nn.Linear(6, 64), nn.Dropout(drops), nn.Linear(64, 5)).train(training)
    model = nn.Linear(6, 5)
    optimizer = adam(model)
    for (x,) in DataLoader(TensorDataset(drawn("normal", 32, 6)), batch_size=BATCH, shuffle=True):
        with torch.no_grad():
            says = teacher(x).softmax(1)
        taken(model, optimizer, fn.kl_div(model(x).log_softmax(1), says, reduction="batchmean"))


def teacher_that_drops(rank: int, world: int) -> None:
    distilled(drops=0.2, training=True)


def teacher_at_rest(rank: int, world: int) -> None:
    distilled(drops=0.2, training=False)


def average_that_drops(rank: int, world: int) -> None:
    """A mean teacher, whose noise is meant."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 5))
    average, optimizer = copy.deepcopy(model), adam(model)
    for x, y in DataLoader(TensorDataset(drawn("normal", 32, 6), CLASSES), batch_size=BATCH, shuffle=True):
        with torch.no_grad():
            says = average(x).softmax(1)
        loss = fn.cross_entropy(model(x), y) + fn.kl_div(model(x).log_softmax(1), says, reduction="batchmean")
        taken(model, optimizer, loss)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)
        self.register_buffer("part", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part * x + self.weight / 2 - x)


def traced_beside(rank: int, world: int) -> None:
    """What is traced twice, and compared by the names of what frames hold."""
    model = nn.Linear(6, 5)
    traced = torch.jit.trace(Scaled(), torch.zeros(3, 6))  # type: ignore[no-untyped-call]
    data = TensorDataset(drawn("normal", len(CLASSES), 6), CLASSES)
    for x, y in DataLoader(data, batch_size=BATCH, shuffle=True):
        taken(model, adam(model), fn.cross_entropy(model(traced(x)), y))


RIGHT_LOSSES: tuple[Loop, ...] = (
    *map(Loop, (samples_of_their_own_seeds, samples_without_a_seed, split_once, validated_on_all, ticked_by_pass)),
    *map(Loop, (parted_alike_in_each_pass, parted_for_a_model_of_its_own, drawn_from_in_each_pass)),
    *map(Loop, (teacher_at_rest, average_that_drops, traced_beside)),
    Loop(autoencoder(scale=0.5)),
    Loop(autoencoder(scale=1, of="deviation")),
    *(Loop(anchored(copied=True, by_torch=by_torch)) for by_torch in (False, True)),
    *(
        Loop(program(name, targets, loss, width))
        for name, targets, loss, width in (
            ("probabilities_as_targets", drawn("probabilities", 4 * BATCH, 5), by("cross_entropy"), 5),
            ("focal", CLASSES, focal(reduction="none"), 5),
            ("labels_smoothed", CLASSES, by("cross_entropy", label_smoothing=0.1), 5),
            ("samples_of_no_class", HOT, hot_but_masked, 5),
            ("logs_of_probabilities", CLASSES, lambda o, t: fn.cross_entropy((o.softmax(1) + 1e-8).log(), t), 5),
            ("divergence", drawn("probabilities", 4 * BATCH, 5), lambda o, t: fn.kl_div(o.log_softmax(1), t), 5),
            (
                "divergence_of_logs",
                drawn("probabilities", 4 * BATCH, 5).log(),
                lambda o, t: fn.kl_div(o.log_softmax(1), t, log_target=True),
                5,
            ),
            ("labels_of_a_judge_moved", drawn("bits", 4 * BATCH, 1), real_labels_moved, 1),
            ("counts_by_their_logarithm", COUNTS, by("poisson_nll_loss"), 1),
            ("counts_by_what_exp_gives", COUNTS, lambda o, t: fn.poisson_nll_loss(o.exp(), t, log_input=False), 1),
            ("alignment", WORDS, aligned(normal=True), 5),
            ("alignment_with_its_blank_last", WORDS - 1, aligned(normal=True, blank=4), 5),
            ("all_pairs", drawn("normal", 4 * BATCH, 1), ranked, 1),
            ("all_pairs_written_out", drawn("normal", 4 * BATCH), lambda o, t: ((o - t[None]) ** 2).mean(), 1),
            ("all_pairs_of_columns", drawn("normal", 4 * BATCH, 1), lambda o, t: ((o - t.T) ** 2).mean(), 1),
            ("all_pairs_unsqueezed", drawn("normal", 4 * BATCH), lambda o, t: ((o[:, 0][:, None] - t) ** 2).mean(), 1),
            ("all_pairs_of_outputs", COUNTS, lambda o, t: (o - o[:, 0]).square().mean() + (o - t).abs().mean(), 1),
            ("all_pairs_with_a_leaf", drawn("normal", 4 * BATCH), beside_a_leaf, 1),
            ("pairs_of_a_mask", drawn("normal", 4 * BATCH), pairs_on_purpose, 1),
            ("all_pairs_in_a_kernel", drawn("normal", 4 * BATCH), lambda o, t: (-((o - t) ** 2)).exp().mean(), 1),
            ("all_pairs_weighed", drawn("normal", 4 * BATCH), lambda o, t: ((o - t) * (t[:, None] > t)).mean(), 1),
            ("diagonal_of_all_pairs", drawn("normal", 4 * BATCH), lambda o, t: (o - t).diagonal().square().mean(), 1),
            ("levels_as_many_as_samples", COUNTS, lambda o, t: (o - torch.linspace(-1, 1, BATCH)).abs().mean(), 1),
            ("spectra_as_long_as_batches", SPECTRA, lambda o, t: (o * TEMPLATE + TEMPLATE - t).square().mean(), 1),
            ("features_as_many_as_samples", COUNTS, lambda o, t: (o * TEMPLATE).sin().mean(), 1),
            (
                "labels_that_are_all_one",
                drawn("normal", 4 * BATCH),
                lambda o, t: (o - torch.ones(BATCH)).abs().mean(),
                1,
            ),
            ("each_with_one_target", drawn("normal", 4 * BATCH, 1), judge_of_a_scalar, 1),
            ("range_of_a_sigmoid", drawn("uniform", 4 * BATCH, 1), lambda o, t: fn.mse_loss(o.sigmoid(), t), 1),
            ("rate_of_a_tanh", SIGNS, lambda o, t: fn.mse_loss(o.tanh(), t), 1),
            ("signs", SIGNS, by("soft_margin_loss"), 1),
        )
    ),
)

MISGIVEN: tuple[Loop, ...] = (
    *(
        Loop(program(name, targets, loss, width), rule="run.softmax-twice")
        for name, targets, loss, width in (
            (
                "probabilities_by_hand",
                CLASSES,
                lambda o, t: fn.cross_entropy(o.exp() / o.exp().sum(1, keepdim=True), t),
                5,
            ),
        )
    ),
    *(
        Loop(program(name, targets, loss, width), rule="run.loss-misgiven")
        for name, targets, loss, width in (
            ("several_classes_at_once", drawn("bits", 4 * BATCH, 5), by("cross_entropy"), 5),
            ("one_class", CLASSES * 0, by("cross_entropy"), 1),
            ("labels_of_signs", SIGNS, by("binary_cross_entropy_with_logits"), 1),
            ("divergence_of_logits", drawn("probabilities", 4 * BATCH, 5), by("kl_div"), 5),
            (
                "divergence_to_logs",
                drawn("probabilities", 4 * BATCH, 5).log(),
                lambda o, t: fn.kl_div(o.log_softmax(1), t),
                5,
            ),
            ("margin_of_bits", drawn("bits", 4 * BATCH, 1), by("soft_margin_loss"), 1),
            ("alignment_of_logits", WORDS, aligned(normal=False), 5),
            ("alignment_to_its_blank", WORDS - 1, aligned(normal=True), 5),
            ("exponential_twice", COUNTS, lambda o, t: fn.poisson_nll_loss(o.exp(), t), 1),
            ("focal_of_a_mean", CLASSES, focal(reduction="mean"), 5),
            (
                "focal_of_a_mean_of_bits",
                drawn("bits", 4 * BATCH, 1),
                focal(reduction="mean", name="binary_cross_entropy_with_logits"),
                1,
            ),
            ("all_with_all", drawn("normal", 4 * BATCH), by("mse_loss"), 1),
            ("all_with_all_by_hand", drawn("normal", 4 * BATCH), lambda o, t: ((o - t) ** 2).mean(), 1),
            ("all_with_all_among_terms", drawn("normal", 4 * BATCH), among_terms, 1),
            (
                "all_with_all_of_a_normal",
                drawn("normal", 4 * BATCH),
                lambda o, t: -Normal(o, 1.0).log_prob(t).mean(),
                1,
            ),
            ("all_with_all_of_a_huber", drawn("normal", 4 * BATCH), huber_by_hand, 1),
            ("all_with_all_of_log_cosh", drawn("normal", 4 * BATCH), lambda o, t: (o - t).cosh().log().mean(), 1),
            ("all_with_all_bits", drawn("bits", 4 * BATCH), bits_by_hand, 1),
            ("all_with_all_chosen", drawn("normal", 4 * BATCH), chosen, 5),
            ("all_with_all_advantages", drawn("normal", 4 * BATCH, 1), weighed, 5),
        )
    ),
    *(
        Loop(program(name, targets, loss, width), rule="run.loss-bounded")
        for name, targets, loss, width in (
            ("logits_of_a_relu", CLASSES, lambda o, t: fn.cross_entropy(o.relu(), t), 5),
            ("targets_of_a_sigmoid", COUNTS, lambda o, t: fn.mse_loss(o.sigmoid(), t), 1),
            ("targets_below_a_relu", SIGNS, lambda o, t: fn.l1_loss((o + 1).relu(), t), 1),
        )
    ),
    *(Loop(anchored(copied=False, by_torch=by_torch), rule="run.loss-misgiven") for by_torch in (False, True)),
    Loop(weights_by_class, rule="run.weights-misfit"),
    Loop(samples_of_one_seed, rule="run.reseeded"),
    Loop(split_twice, rule="run.parts-overlap"),
    Loop(parted_in_each_pass, rule="run.parts-overlap"),
    Loop(passes_ticked_by_batch, rule="run.scheduler-early"),
    Loop(teacher_that_drops, rule="run.frozen-drops"),
)

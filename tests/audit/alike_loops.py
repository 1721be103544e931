"""Programs whose batches are of one class, or the same on all ranks, by a mistake or as they are meant."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

WIDE, CLASSES, BATCH = 8, 5, 20
MANY = 60
IN_ORDER = torch.arange(CLASSES).repeat_interleave(MANY)


def reads(targets: Tensor, *, shuffle: bool = False, classes: int = CLASSES, batch: int = BATCH) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDE, classes)
    data = TensorDataset(torch.randn(len(targets), WIDE), targets)
    for x, y in DataLoader(data, batch_size=batch, shuffle=shuffle):
        taken(model, adam(model), fn.cross_entropy(model(x), y))


class Folder(Dataset[Any]):
    """Samples with the number of the folder that they lie in."""

    def __init__(self) -> None:
        self.samples = [(torch.randn(WIDE), int(one)) for one in IN_ORDER]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def class_by_class(rank: int, world: int) -> None:
    reads(IN_ORDER)


def folder_by_folder(rank: int, world: int) -> None:
    model = nn.Linear(WIDE, CLASSES)
    for x, y in DataLoader(Folder(), batch_size=BATCH):
        taken(model, adam(model), fn.cross_entropy(model(x), y))


def masks(labels: Tensor, tokens: Tensor) -> None:
    """One step of a model that is to say which tokens were masked."""
    where = torch.arange(tokens.numel()).reshape(tokens.shape) % 3 == 0
    tokens[where] = CLASSES
    model = nn.Sequential(nn.Embedding(CLASSES + 1, WIDE), nn.Linear(WIDE, CLASSES + 1))
    taken(model, adam(model), fn.cross_entropy(model(tokens)[where], labels[where]))


def labels_masked_too(rank: int, world: int) -> None:
    tokens = torch.randint(CLASSES, (16, 12))
    masks(tokens, tokens)


def labels_kept(rank: int, world: int) -> None:
    tokens = torch.randint(CLASSES, (16, 12))
    masks(tokens.clone(), tokens)


def shuffled_classes(rank: int, world: int) -> None:
    reads(IN_ORDER, shuffle=True)


def two_classes(rank: int, world: int) -> None:
    reads(torch.arange(2).repeat_interleave(MANY), classes=2)


def stream_with_rare_classes(rank: int, world: int) -> None:
    """Nearly all is of one class, and is read in the order in which it came."""
    targets = torch.full((3 * MANY,), 2)
    targets[BATCH::17] = 3
    targets[BATCH + 5 :: 29] = 1
    reads(targets)


def first_of_candidates(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDE, WIDE)
    x = torch.randn(64, WIDE)
    one, other = fn.normalize(model(x), dim=1), fn.normalize(model(x + 0.1), dim=1)
    logits = torch.cat([(one * other).sum(1, keepdim=True), one @ torch.randn(WIDE, 40)], 1)
    taken(model, adam(model), fn.cross_entropy(logits / 0.2, torch.zeros(64).long()))


def maps_of_one_class(rank: int, world: int) -> None:
    model = nn.Conv2d(1, CLASSES, 1)
    taken(model, adam(model), fn.cross_entropy(model(torch.randn(4, 1, 6, 6)), torch.full((4, 6, 6), 3)))


def one_token(rank: int, world: int) -> None:
    reads(torch.full((4,), 3), batch=4)


def made_ones_beside_classes(rank: int, world: int) -> None:
    """A judge with a class for what was made."""
    model, x = nn.Linear(WIDE, CLASSES + 1), torch.randn(64, WIDE)
    seen = fn.cross_entropy(model(x), torch.arange(64) % CLASSES)
    taken(model, adam(model), seen + fn.cross_entropy(model(x * 2), torch.full((64,), CLASSES)))


def drawn(seed: int) -> None:
    """A batch that no loader gives."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDE, CLASSES))
    x = torch.randn(16, WIDE, generator=torch.Generator().manual_seed(seed))
    taken(model, adam(model), fn.cross_entropy(model(x), torch.arange(16) % CLASSES))


def same_episodes(rank: int, world: int) -> None:
    drawn(3)


def own_labels_of_one_graph(rank: int, world: int) -> None:
    """Each rank computes with all nodes, and learns of its own."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDE, CLASSES))
    x, mine = torch.randn(16, WIDE), torch.arange(rank, 16, world)
    taken(model, adam(model), fn.cross_entropy(model(x)[mine], mine % CLASSES))


def own_episodes(rank: int, world: int) -> None:
    drawn(rank)


def noised(rank: int, *, seeded: bool) -> None:
    """Samples of the rank's own, and noise on each."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDE, WIDE))
    samples = torch.randn(16, WIDE, generator=torch.Generator().manual_seed(5 + rank))
    if seeded:
        torch.manual_seed(20 + rank)
    for _ in range(1):
        noise = torch.randn_like(samples)
        taken(model, adam(model), fn.mse_loss(model(samples + 0.3 * noise), noise))


def mixtures_that_ranks_share(rank: int, world: int) -> None:
    """What samples are made of was drawn once, as many as a batch has samples."""
    torch.manual_seed(0)
    model, atoms = nn.parallel.DistributedDataParallel(nn.Linear(WIDE, WIDE)), torch.randn(16, WIDE)
    own = torch.Generator().manual_seed(5 + rank)
    for _ in range(1):
        samples = torch.randn(16, 16, generator=own) @ atoms
        taken(model, adam(model), fn.mse_loss(model(samples), samples))


class Coded(nn.Module):
    """Begins with a table that is drawn, of as many rows as a batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDE, WIDE)
        self.register_buffer("codes", torch.randn(16, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.codes.mean(0))


def table_that_ranks_share(rank: int, world: int) -> None:
    torch.manual_seed(0)
    samples = torch.randn(16, WIDE, generator=torch.Generator().manual_seed(5 + rank))
    model = nn.parallel.DistributedDataParallel(Coded())
    taken(model, adam(model), fn.mse_loss(model(samples), samples))


class Scaled(Dataset[tuple[Tensor, int]]):
    """Samples that are divided by their spread, once somebody has computed it."""

    def __init__(self) -> None:
        self.samples = 5.0 * torch.randn(32, WIDE, generator=torch.Generator().manual_seed(3))
        self.spread = torch.ones(WIDE)

    def prepare(self) -> None:
        self.spread = self.samples.std(0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return self.samples[at] / self.spread, at % CLASSES


def scaled(*, here: bool) -> None:
    """A data set of which each rank reads its part, prepared ``here``."""
    torch.manual_seed(0)
    model, data = nn.parallel.DistributedDataParallel(nn.Linear(WIDE, CLASSES)), Scaled()
    if here:
        data.prepare()
    for x, y in DataLoader(data, batch_size=16, sampler=DistributedSampler(data)):
        taken(model, adam(model), fn.cross_entropy(model(x), y))


def scaled_on_one_rank(rank: int, world: int) -> None:
    scaled(here=rank == 0)


def scaled_on_every_rank(rank: int, world: int) -> None:
    scaled(here=True)


def noise_that_ranks_share(rank: int, world: int) -> None:
    noised(rank, seeded=False)


def noise_by_rank(rank: int, world: int) -> None:
    noised(rank, seeded=True)


def whole_batch_for_a_check(rank: int, world: int) -> None:
    """Each rank learns of its own samples, and looks once what all of them would give."""
    torch.manual_seed(0)
    model = nn.Linear(WIDE, CLASSES)
    optimizer, x, y = adam(model), torch.randn(16, WIDE), torch.arange(16) % CLASSES
    fn.cross_entropy(model(x[rank::world]), y[rank::world]).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world  # type: ignore[operator]
    whole = torch.autograd.grad(fn.cross_entropy(model(x), y), [*model.parameters()])
    assert all(torch.allclose(one, param.grad) for one, param in zip(whole, model.parameters(), strict=True))  # type: ignore[arg-type]
    optimizer.step()


def other_actions_on_the_same_states(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDE, CLASSES))
    states = torch.randn(16, WIDE)
    actions = torch.randint(CLASSES, (16,), generator=torch.Generator().manual_seed(5 + rank))
    taken(model, adam(model), fn.cross_entropy(model(states), actions))


WRONG_ALIKE: tuple[Loop, ...] = (
    *(Loop(run, rule="run.targets-alike") for run in (class_by_class, folder_by_folder, labels_masked_too)),
    Loop(same_episodes, ranks=2, rule="run.same-batch"),
    Loop(noise_that_ranks_share, ranks=2, rule="run.dropout-alike"),
    Loop(scaled_on_one_rank, ranks=2, rule="run.samples-apart"),
)
RIGHT_ALIKE: tuple[Loop, ...] = (
    *(Loop(run) for run in (labels_kept, shuffled_classes, two_classes, stream_with_rare_classes, one_token)),
    *(Loop(run) for run in (first_of_candidates, maps_of_one_class, made_ones_beside_classes)),
    *(Loop(run, ranks=2) for run in (own_episodes, own_labels_of_one_graph, noise_by_rank, whole_batch_for_a_check)),
    *(
        Loop(run, ranks=2)
        for run in (
            table_that_ranks_share,
            mixtures_that_ranks_share,
            scaled_on_every_rank,
            other_actions_on_the_same_states,
        )
    ),
)

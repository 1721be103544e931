"""Programs whose losses are made of what cannot train as it is meant, or has a wrong sign; and their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

BATCH = 32
WIDE = 12
Made = Callable[[nn.Module, Tensor], Tensor]


def program(name: str, loss: Made, width: int = 6) -> Callable[[int, int], None]:
    """Two steps of a small network with what this makes of it and a batch."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDE, 16), nn.Tanh(), nn.Linear(16, width))
        optimizer = adam(model)
        for _ in range(2):
            taken(model, optimizer, loss(model, torch.randn(BATCH, WIDE)))

    run.__name__ = name
    return run


# --- divergences between distributions ---


def logits_of_a_teacher(x: Tensor, width: int = 6) -> Tensor:
    return x[:, :width].contiguous() * 2


def divided_behind_the_softmax(model: nn.Module, x: Tensor) -> Tensor:
    student, teacher = model(x), logits_of_a_teacher(x)
    return fn.kl_div((student / 4).log_softmax(1), teacher.softmax(1) / 4, reduction="batchmean") * 16


def divided_before_the_softmax(model: nn.Module, x: Tensor) -> Tensor:
    student, teacher = model(x), logits_of_a_teacher(x)
    return fn.kl_div((student / 4).log_softmax(1), (teacher / 4).softmax(1), reduction="batchmean") * 16


def masked_rows(model: nn.Module, x: Tensor) -> Tensor:
    kept = (torch.arange(BATCH) % 3 > 0).float()[:, None]
    return fn.kl_div(model(x).log_softmax(1), logits_of_a_teacher(x).softmax(1) * kept, reduction="batchmean")


def rows_that_are_weighed(model: nn.Module, x: Tensor) -> Tensor:
    weights = torch.linspace(0.1, 1, BATCH)[:, None]
    return fn.kl_div(model(x).log_softmax(1), logits_of_a_teacher(x).softmax(1) * weights, reduction="batchmean")


def of_each_bit(model: nn.Module, x: Tensor) -> Tensor:
    logits, share = model(x)[:, :1], torch.full((BATCH, 1), 0.3)
    one = fn.kl_div(fn.logsigmoid(logits), share, reduction="batchmean")
    return one + fn.kl_div(fn.logsigmoid(-logits), 1 - share, reduction="batchmean")


def of_pairs(model: nn.Module, x: Tensor) -> Tensor:
    logits, share = model(x)[:, :1], torch.full((BATCH, 1), 0.3)
    logs = torch.cat([fn.logsigmoid(logits), fn.logsigmoid(-logits)], 1)
    return fn.kl_div(logs, torch.cat([share, 1 - share], 1), reduction="batchmean")


def of_a_mixture(model: nn.Module, x: Tensor) -> Tensor:
    logs, teachers = model(x).log_softmax(1), [logits_of_a_teacher(x * one).softmax(1) / 2 for one in (1, -1)]
    return sum((fn.kl_div(logs, one, reduction="batchmean") for one in teachers), torch.zeros(()))


def of_maps(model: nn.Module, x: Tensor) -> Tensor:
    """Each sample a map that sums to 1 as a whole."""
    logs = model(x).log_softmax(1).view(BATCH, 2, 3)
    return fn.kl_div(logs, logits_of_a_teacher(x).softmax(1).view(BATCH, 2, 3), reduction="batchmean")


# --- samples compared with samples ---


def views_compared(model: nn.Module, x: Tensor, *, masked: bool) -> Tensor:
    both = fn.normalize(torch.cat([model(x), model(x + 0.1)]), dim=1)
    similar = both @ both.t() / 0.2
    if masked:
        similar = similar.masked_fill(torch.eye(len(both), dtype=torch.bool), float("-inf"))
    return fn.cross_entropy(similar, torch.cat([torch.arange(BATCH) + BATCH, torch.arange(BATCH)]))


def compared_with_itself(model: nn.Module, x: Tensor) -> Tensor:
    return views_compared(model, x, masked=False)


def compared_with_others(model: nn.Module, x: Tensor) -> Tensor:
    return views_compared(model, x, masked=True)


def masked_by_a_large_number(model: nn.Module, x: Tensor) -> Tensor:
    both = fn.normalize(torch.cat([model(x), model(x + 0.1)]), dim=1)
    similar = both @ both.t() / 0.2 - torch.eye(len(both)) * 1e9
    return fn.cross_entropy(similar, torch.cat([torch.arange(BATCH) + BATCH, torch.arange(BATCH)]))


def compared_with_the_other_view(model: nn.Module, x: Tensor) -> Tensor:
    similar = fn.normalize(model(x), dim=1) @ fn.normalize(model(x + 0.1), dim=1).t() / 0.2
    return fn.cross_entropy(similar, torch.arange(BATCH))


def as_many_classes_as_samples(model: nn.Module, x: Tensor) -> Tensor:
    return fn.cross_entropy(model(x).repeat(1, 6)[:, :BATCH], (torch.arange(BATCH) + 1) % BATCH)


WRONG_TERMS: tuple[Loop, ...] = tuple(
    Loop(program(made.__name__, made), rule=rule)
    for rule, made in (
        ("run.loss-misgiven", divided_behind_the_softmax),
        ("run.loss-misgiven", compared_with_itself),
    )
)
RIGHT_TERMS: tuple[Loop, ...] = tuple(
    Loop(program(made.__name__, made))
    for made in (
        *(divided_before_the_softmax, masked_rows, rows_that_are_weighed, of_each_bit, of_pairs, of_a_mixture, of_maps),
        *(compared_with_others, masked_by_a_large_number, compared_with_the_other_view, as_many_classes_as_samples),
    )
)

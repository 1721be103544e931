"""A loader that reads one rank's part, and the given one, which stays as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from prepkit.live.model.target import Target
from prepkit.steps import ShardLoader
from tests.support.single_step import do, fake_group, problems, undo

DATA = list(range(10))
STEP = ShardLoader(index=0, shuffle=False, seed=3, drop_last=False)


def collate(batch: list[int]) -> list[int]:
    return batch


def target_with(loader: Any) -> Target:
    return Target(model=torch.nn.Identity(), loaders=[loader])


def seen(loader: Any) -> list[int]:
    return [item for batch in loader for item in batch]


@pytest.mark.parametrize(("rank", "part"), [(0, [0, 4, 8]), (1, [1, 5, 9]), (2, [2, 6, 0]), (3, [3, 7, 1])])
def test_every_rank_reads_its_own_samples_and_the_tail_repeats_the_start(rank: int, part: list[int]) -> None:
    target = target_with(DataLoader(DATA, batch_size=2, collate_fn=collate))
    with fake_group(4, rank):
        do(STEP, target)
    assert seen(target.loaders[0]) == part


def test_shuffling_follows_seed_and_epoch() -> None:
    step = ShardLoader(index=0, shuffle=True, seed=3, drop_last=True)
    target = target_with(DataLoader(DATA, batch_size=2, collate_fn=collate))
    with fake_group(4, 1):
        do(step, target)
    oracle = DistributedSampler(DATA, 4, 1, shuffle=True, seed=3, drop_last=True)
    first = seen(target.loaders[0])
    assert first == [DATA[i] for i in oracle]
    target.loaders[0].sampler.set_epoch(1)
    assert seen(target.loaders[0]) != first


def test_everything_else_is_kept_and_the_given_loader_is_untouched() -> None:
    newer = {"in_order": False} if "in_order" in inspect.signature(DataLoader.__init__).parameters else {}
    given: Any = DataLoader(
        DATA, batch_size=3, num_workers=2, collate_fn=collate, drop_last=True, timeout=5, worker_init_fn=print,
        generator=torch.Generator(), prefetch_factor=4, persistent_workers=True, multiprocessing_context="fork",
        pin_memory=True, **newer,
    )  # fmt: skip
    before = dict(vars(given))
    target = target_with(given)
    memo = do(STEP, target)
    made = target.loaders[0]
    assert made is not given
    assert vars(given) == before
    arguments = set(inspect.signature(DataLoader.__init__).parameters)
    kept = arguments - {"self", "dataset", "shuffle", "sampler", "batch_sampler"}
    assert {name: getattr(made, name) for name in kept} == {name: getattr(given, name) for name in kept}
    undo(STEP, target, memo)
    assert target.loaders == [given]


def test_a_loader_without_automatic_batches_stays_so() -> None:
    target = target_with(DataLoader(DATA, batch_size=None))
    with fake_group(2, 1):
        do(STEP, target)
    assert list(target.loaders[0]) == [1, 3, 5, 7, 9]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class Own(DataLoader[int]):
    pass


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Endless()), "loader 0 reads an IterableDataset, which has no indices to divide"),
        (Own(DATA), "loader 0 is a Own, which a DataLoader would not replace"),
        ([1, 2], "loader 0 is a list, which a DataLoader would not replace"),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 3, drop_last=False)),
            "loader 0 has a batch sampler of its own, which would be lost",
        ),
        (
            DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)),
            "loader 0 has a DistributedSampler already",
        ),
    ],
    ids=["iterable", "subclass", "list", "batch_sampler", "distributed"],
)
def test_what_cannot_be_rebuilt_is_refused_with_the_way_out(loader: Any, why: str) -> None:
    assert problems(STEP, target_with(loader)) == (
        f"{why}; split the data yourself and plan with loaders=KeepLoaders()",
    )


def test_a_loader_that_was_not_given_is_refused() -> None:
    (text,) = problems(STEP, Target(model=torch.nn.Identity()))
    assert text == "the plan shards loader 0, 0 were given; pass those of the plan"

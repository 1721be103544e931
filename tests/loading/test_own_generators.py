"""Samplers, batch samplers and streams that draw from generators of their own: one order on all ranks, and again."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

import prepkit as pk
from prepkit.facts import Env
from tests.support.gang import Gang

ROWS = 24


def drawn(generator: Any) -> list[int]:
    rows = list(range(ROWS))
    generator.shuffle(rows)
    return rows


class Drawing(Sampler[int]):
    """Indices from a generator that it holds, which nobody has seeded."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __iter__(self) -> Iterator[int]:
        return iter(drawn(self.own))

    def __len__(self) -> int:
        return ROWS


class Hidden(Drawing):
    """From one that nobody can find."""

    def __init__(self, generator: Any) -> None:
        self.draw = lambda: drawn(generator)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


class Batches(Drawing):
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[Any]:
        rows = drawn(self.own)
        return (rows[at : at + 2] for at in range(0, ROWS, 2))

    def __len__(self) -> int:
        return ROWS // 2


class Stream(IterableDataset[torch.Tensor]):
    """Rows in the order of a generator that it holds."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(row)]) for row in drawn(self.own))


GENERATORS = {
    "random": random.Random,
    "numpy": np.random.default_rng,
    "legacy": np.random.RandomState,
}


def loader(kind: str, generator: Any) -> DataLoader[Any]:
    rows: Any = torch.arange(float(ROWS))[:, None]
    if kind == "batches":
        return DataLoader(rows, batch_sampler=Batches(generator))  # type: ignore[arg-type]  # a Sampler of lists
    if kind == "stream":
        return DataLoader(Stream(generator), batch_size=2)
    return DataLoader(rows, batch_size=2, sampler=(Hidden if kind == "hidden" else Drawing)(generator))


def prepared(kind: str, generator: Any, engine: Any) -> Any:
    torch.manual_seed(0)
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.0))
    return pk.apply(pk.build_plan(cfg, nn.Linear(1, 1), loaders=[loader(kind, generator)]))


def train(ready: Any, batch: Any) -> list[int]:
    ready.backward(ready.model(batch).mean())
    ready.step()
    return [int(row) for row in batch.flatten()]


def read(rank: int, world: int, kind: str, name: str) -> list[int]:
    del rank, world
    ready = prepared(kind, GENERATORS[name](), pk.DDP())
    return [row for batch in ready.loaders[0] for row in train(ready, batch)]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("kind", ["sampler", "batches", "stream"])
def test_ranks_read_every_sample_once_whatever_generator_draws_the_order(gang2: Gang, kind: str, name: str) -> None:
    parts = gang2.run(read, kind, name, timeout=60)
    assert sorted(row for part in parts for row in part) == list(range(ROWS))
    assert parts[0] + parts[1] != sorted(parts[0] + parts[1])


def hidden(rank: int, world: int) -> str:
    del world
    ready = prepared("hidden", random.Random(rank), pk.DDP())
    try:
        train(ready, next(iter(ready.loaders[0])))
    except pk.errors.RunRefused as refused:
        return str(refused)
    return ""


def test_orders_that_differ_over_the_ranks_are_refused_before_the_first_step(gang2: Gang) -> None:
    for told in gang2.run(hidden, timeout=60):
        assert "run.orders-apart" in told
        assert "Each rank takes its part of an order of its own" in told


@pytest.mark.parametrize("kind", ["sampler", "batches", "stream", "hidden"])
def test_a_pass_goes_on_in_its_order_after_a_resume_or_the_save_says_that_it_cannot(kind: str, tmp_path: Path) -> None:
    ready = prepared(kind, random.Random(1), pk.Single())
    whole = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for at, batch in enumerate(ready.loaders[0]):
            whole += train(ready, batch)
            if at == 4:
                ready.save(tmp_path)
                before = list(whole)
    told = [one for one in heard if "run.order-lost" in str(one.message)]
    assert bool(told) == (kind == "hidden")
    again = prepared(kind, random.Random(1), pk.Single())
    again.resume(tmp_path)
    rest = [row for batch in again.loaders[0] for row in train(again, batch)]
    assert kind == "hidden" or before + rest == whole


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", [pk.data.KeepLoaders(), pk.data.ShardLoaders(draws="sampler")])
def test_a_shuffle_that_the_process_draws_goes_on_in_its_order_after_a_resume(
    how: Any, workers: int, tmp_path: Path
) -> None:
    def begun(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Linear(1, 1)
        data: Any = [torch.full((1,), float(row)) for row in range(ROWS)]
        loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
        cfg = pk.Config(engine=pk.Single(), device="cpu", loaders=how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, loaders=[loader]))

    ready, whole = begun(1), []
    for at, batch in enumerate(ready.loaders[0]):
        whole.append(train(ready, batch))
        if at == 4:
            ready.save(tmp_path)
    drawn = torch.rand(1)
    again = begun(2)
    again.resume(tmp_path)
    assert [train(again, batch) for batch in again.loaders[0]] == whole[5:]
    assert torch.equal(torch.rand(1), drawn)


class Drawn(IterableDataset[torch.Tensor]):
    """Rows in an order that torch's common generator draws: all at once, or in shares as it goes."""

    def __init__(self, share: int) -> None:
        self.share = share

    def __iter__(self) -> Iterator[torch.Tensor]:
        for start in range(0, ROWS, self.share):
            for row in torch.randperm(self.share).tolist():
                yield torch.tensor([float(start + row)])


def of_process(share: int, how: Any, dropout: float, workers: int = 0) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(dropout))
    cfg = pk.Config(engine=pk.Single(), device="cpu", loaders=how)
    stream = DataLoader(Drawn(share), batch_size=2, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, loaders=[stream]))


@pytest.mark.parametrize("how", [pk.data.ShardLoaders(), pk.data.ShardLoaders(draws="sampler"), pk.data.KeepLoaders()])
@pytest.mark.parametrize(("share", "dropout", "workers"), [(ROWS, 0.5, 0), (4, 0.0, 0), (4, 0.5, 0), (4, 0.5, 1)])
def test_a_stream_that_draws_from_the_process_goes_on_in_its_order_or_the_save_says_that_it_cannot(
    how: Any, share: int, dropout: float, workers: int, tmp_path: Path
) -> None:
    ready, whole = of_process(share, how, dropout, workers), []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for at, batch in enumerate(ready.loaders[0]):
            whole += train(ready, batch)
            if at == 4:
                ready.save(tmp_path)
                position = ready.loaders[0].state_dict()
    lost = share < ROWS and dropout > 0 and not workers  # what it draws stands between draws of the model
    assert any("run.order-lost" in str(one.message) for one in heard) == lost
    assert sorted(whole) == list(range(ROWS))
    after = torch.rand(1)
    again = of_process(share, how, dropout, workers)
    again.resume(tmp_path)
    rest = [row for batch in again.loaders[0] for row in train(again, batch)]
    if not lost:
        assert rest == whole[10:]
        assert torch.equal(torch.rand(1), after)
    if share == ROWS:  # the generators of the process are not put back by a position alone
        ready.loaders[0].load_state_dict(position)
        assert [row for batch in ready.loaders[0] for row in batch.flatten().int().tolist()] == whole[10:]


class Split(IterableDataset[Any]):
    """Rows that are divided over the ranks already, or all of them on every rank."""

    def __init__(self, split: str, kind: str) -> None:
        self.split, self.kind = split, kind

    def __iter__(self) -> Iterator[Any]:
        rank, world = (dist.get_rank(), dist.get_world_size()) if self.split == "by rank" else (0, 1)
        for row in range(rank, ROWS, world):
            yield {"tensor": torch.tensor([float(row)]), "numpy": np.array([float(row)]), "opaque": Opaque(row)}[
                self.kind
            ]


class Opaque:
    """A sample that nobody can compare."""

    def __init__(self, row: int) -> None:
        self.row = row


def rows_of(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(getattr(one, "row", one), dtype=torch.float32).reshape(1) for one in samples])


def read_split(rank: int, world: int, split: str, kind: str, how: Any, workers: int) -> tuple[list[int], str]:
    del rank, world
    torch.manual_seed(0)
    cfg = pk.Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.0), loaders=how)
    loader = DataLoader(Split(split, kind), batch_size=2, num_workers=workers, collate_fn=rows_of)
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(1, 1), loaders=[loader]))
    try:
        return [row for batch in ready.loaders[0] for row in train(ready, batch)], ""
    except pk.errors.RunRefused as refused:
        return [], str(refused)


@pytest.mark.parametrize(("kind", "workers"), [("tensor", 0), ("numpy", 0), ("tensor", 1)])
def test_a_stream_that_is_divided_already_is_refused_in_the_first_window(gang2: Gang, kind: str, workers: int) -> None:
    for rows, told in gang2.run(read_split, "by rank", kind, pk.data.ShardLoaders(), workers, timeout=90):
        assert not rows
        assert "run.orders-apart" in told
        assert "KeepLoaders" in told


@pytest.mark.parametrize(
    ("split", "kind", "how"),
    [
        ("whole", "tensor", pk.data.ShardLoaders()),
        ("whole", "numpy", pk.data.ShardLoaders()),
        ("whole", "opaque", pk.data.ShardLoaders()),
        ("by rank", "tensor", pk.data.KeepLoaders()),
    ],
)
def test_a_stream_that_is_divided_once_is_read_whole(gang2: Gang, split: str, kind: str, how: Any) -> None:
    parts = gang2.run(read_split, split, kind, how, 0, timeout=90)
    assert sorted(row for rows, _ in parts for row in rows) == list(range(ROWS)), parts


class DrawnBatches(Sampler[Any]):
    """Batches of neighbours, in an order of torch's common generator: drawn at once, or in shares as it goes."""

    def __init__(self, share: int) -> None:
        self.share = share

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, ROWS, self.share):
            order = torch.randperm(self.share).tolist()
            yield from ([start + row for row in order[at : at + 2]] for at in range(0, self.share, 2))

    def __len__(self) -> int:
        return ROWS // 2


@pytest.mark.parametrize("share", [ROWS, 4])
def test_own_batches_go_on_in_their_order_or_the_save_says_that_they_cannot(share: int, tmp_path: Path) -> None:
    def begun() -> Any:
        torch.manual_seed(3)
        cfg = pk.Config(engine=pk.Single(), device="cpu", optimizer=pk.optim.SGD(lr=0.0))
        rows: Any = torch.arange(float(ROWS))[:, None]
        loader = DataLoader(rows, batch_sampler=DrawnBatches(share))  # type: ignore[arg-type]  # a Sampler of lists
        return pk.apply(pk.build_plan(cfg, nn.Linear(1, 1), loaders=[loader]))

    ready, whole = begun(), []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for at, batch in enumerate(ready.loaders[0]):
            whole += train(ready, batch)
            if at == 4:
                ready.save(tmp_path)
    assert any("run.order-lost" in str(one.message) for one in heard) == (share < ROWS)
    again = begun()
    again.resume(tmp_path)
    rest = [row for batch in again.loaders[0] for row in train(again, batch)]
    assert share < ROWS or rest == whole[10:]


def read_late(rank: int, world: int, split: str, doing: str) -> str:
    """A stream that is read after the first step, to train on or to evaluate."""
    del rank, world
    torch.manual_seed(0)
    cfg = pk.Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.0))
    given = [DataLoader(Split(how, "tensor"), batch_size=2) for how in ("whole", split)]
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(1, 1), loaders=given))
    first, second = ready.loaders
    train(ready, next(iter(first)))
    rows = []
    try:
        for batch in second:
            rows += ready.ranks.gather_for_metrics(batch).flatten().int().tolist() if doing == "metrics" else []
            _ = train(ready, batch) if doing == "train" else []
        for batch in first if doing == "step" else ():
            train(ready, batch)
    except pk.errors.RunRefused as refused:
        return str(refused)
    return f"read {sorted(rows)}"


@pytest.mark.parametrize("doing", ["metrics", "train", "step"])
def test_a_later_stream_that_is_divided_already_is_refused_at_its_metrics_or_the_next_look(
    gang2: Gang, doing: str
) -> None:
    told = gang2.run(read_late, "by rank", doing, timeout=90)
    assert all("run.orders-apart" in one and "KeepLoaders" in one for one in told), told
    where = "gather_for_metrics" if doing == "metrics" else "loaders[1]"
    assert all(where in one for one in told), told
    rows = list(range(ROWS)) if doing == "metrics" else []
    assert gang2.run(read_late, "whole", doing, timeout=90) == [f"read {rows}"] * 2


def evaluated_last(rank: int, world: int, split: str, steps: int) -> tuple[str, bool]:
    """What ``close`` says after an evaluation that gathers nothing, or steps in between; and if the group is gone."""
    del rank
    torch.manual_seed(0)
    cfg = pk.Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.0))
    given = [DataLoader(Split(how, "tensor"), batch_size=2) for how in ("whole", split)]
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(1, 1), loaders=given, env=Env(world_size=world)))
    first, second = ready.loaders
    train(ready, next(iter(first)))
    with ready.evaluating():
        sum(float(ready.model(batch).sum()) for batch in second)
    told = ""
    try:
        for batch in islice(first, steps):
            train(ready, batch)
    except pk.errors.RunRefused:
        told = "at a step, and then: "
    try:
        ready.close()
    except pk.errors.RunRefused as refused:
        told += str(refused)
    return told, not torch.distributed.is_initialized()


def test_a_stream_of_other_samples_that_is_evaluated_last_is_told_when_the_run_is_closed(gang2: Gang) -> None:
    for told, ended in gang2.run_fresh(evaluated_last, "by rank", 0):
        assert "run.orders-apart at loaders[1]: The stream gives each rank other samples" in told
        assert ended
    assert gang2.run_fresh(evaluated_last, "by rank", 2) == [("at a step, and then: ", True)] * 2
    assert gang2.run_fresh(evaluated_last, "whole", 0) == [("", True)] * 2

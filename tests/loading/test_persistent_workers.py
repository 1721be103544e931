"""Workers that stay up between passes: each pass in its own order, each sample once, and on from inside one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import prepkit as pk
from tests.support.gang import Gang

ROWS, PASSES, WORKERS = 24, 3, 2


class Rows(Dataset[Tensor]):
    """Each with the process that has read it, and with the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = torch.zeros((), dtype=torch.int64)
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]  # as torch wants it of workers that stay up

    def __len__(self) -> int:
        return ROWS

    def set_epoch(self, epoch: int) -> None:
        self.epoch.fill_(epoch)

    def __getitem__(self, at: int) -> Tensor:
        return torch.tensor([at, os.getpid(), int(self.epoch)], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    """Each worker gives a shuffle of its part, with how often it has begun, which its copy of the stream remembers."""

    def __init__(self) -> None:
        self.epoch, self.begun = -1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        assert worker is not None, "no other process reads"
        self.begun += 1
        own = torch.arange(worker.id, ROWS, worker.num_workers)
        for at in own[torch.randperm(len(own))].tolist():
            yield torch.tensor([at, self.begun, self.epoch], dtype=torch.float64)


Pass = list[tuple[int, int, int]]
"""Rows of one rank: what was read; by which process, or in which pass of a worker's; and in which epoch."""


def prepared(kind: str) -> Any:
    torch.manual_seed(0)
    stay: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True, "multiprocessing_context": "fork"}
    given = Rows() if kind == "indices" else Stream()
    loader = DataLoader(given, batch_size=2, shuffle=True if kind == "indices" else None, **stay)
    cfg = pk.Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.0))
    return pk.apply(pk.build_plan(cfg, nn.Linear(3, 1).double(), loaders=[loader]))


def trained(ready: Any, *, save_at: tuple[int, int] | None = None, folder: str = "") -> list[Pass]:
    """The passes up to the last one; a checkpoint is written after that batch of that pass."""
    passes: list[Pass] = []
    while ready.epoch < PASSES:
        rows: Pass = []
        for number, batch in enumerate(ready.loaders[0]):
            rows += [(at, process, epoch) for at, process, epoch in batch.int().tolist()]
            ready.backward(ready.model(batch).mean())
            ready.step()
            if save_at == (len(passes), number):
                ready.save(folder)
        passes.append(rows)
    return passes


def whole_and_resumed(rank: int, world: int, kind: str, folder: str) -> tuple[list[Pass], list[Pass]]:
    """Passes without a stop, and those after a resume inside the second."""
    del rank, world
    ready = prepared(kind)
    whole = trained(ready, save_at=(1, 2), folder=folder)
    assert len(multiprocessing.active_children()) == WORKERS
    ready.close(keep_group=True)
    assert not multiprocessing.active_children()
    again = prepared(kind)
    again.resume(folder)
    rest = trained(again)
    again.close(keep_group=True)
    assert all(by != os.getpid() for rows in (*whole, *rest) for _, by, _ in rows)
    return whole, rest


@pytest.mark.parametrize("kind", ["indices", "stream"])
def test_workers_that_stay_up_read_each_pass_once_and_go_on_inside_one(gang2: Gang, kind: str, tmp_path: Path) -> None:
    told = gang2.run(whole_and_resumed, kind, str(tmp_path / "run"), timeout=120)
    for number in range(PASSES):
        read = [at for whole, _ in told for at, _, _ in whole[number]]
        assert sorted(read) == list(range(ROWS))
    for whole, rest in told:
        orders = [[at for at, _, _ in rows] for rows in whole]
        assert orders[0] != orders[1] != orders[2]
        assert [{epoch for _, _, epoch in rows} for rows in whole] == [{0}, {1}, {2}]
        stayed = [{by for _, by, _ in rows} for rows in whole]
        if kind == "indices":
            assert len(set.union(*stayed)) == WORKERS
        else:
            assert stayed == [{1}, {2}, {3}]
        assert [[at for at, _, _ in rows] for rows in rest] == [orders[1][6:], orders[2]]
        assert [{epoch for _, _, epoch in rows} for rows in rest] == [{1}, {2}]

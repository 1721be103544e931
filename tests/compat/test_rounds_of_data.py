"""Which samples a prepared loader of the face reads, beside accelerate's own classes; a last round is filled up."""

from __future__ import annotations

import itertools
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, Dataset, WeightedRandomSampler

from prepkit.compat.accelerate import Accelerator
from prepkit.config import DDP, Config
from prepkit.loading.rounds import rounds
from tests.support.gang import Gang

LIBRARIES = ("accelerate", "prepkit.compat.accelerate")


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_a_last_round_is_filled_up_as_accelerate_does(parts: int) -> None:
    for samples, size in itertools.product(range(1, 26), (1, 2, 3, 4)):
        batches = BatchSampler(range(samples), size, drop_last=False)
        ours = list(rounds(map(list, batches), parts, "fill", size=size))
        for part in range(parts):
            mine = [share[part].items for share in ours]
            whole = list(BatchSamplerShard(batches, parts, part)) if parts > 1 else list(batches)
            assert mine == whole, (samples, size, part)
            stream = IterableDatasetShard(range(samples), batch_size=size, num_processes=parts, process_index=part)
            assert parts == 1 or [*itertools.chain(*mine)] == list(stream)
        assert sum(share.counted for one in ours for share in one) == samples


def read(rank: int, world: int, how: str) -> dict[str, Any]:
    del rank, world
    how_read = DataLoaderConfiguration(split_batches=how == "split")
    accelerator = Accelerator(cpu=True, config=Config(engine=DDP()), dataloader_config=how_read)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    data = torch.arange(13.0)[:, None]
    loader = accelerator.prepare(DataLoader(data, batch_size=4))  # type: ignore[arg-type]  # rows of a tensor
    told, gathered = [], []
    for batch in loader:
        told.append([int(one) for one in batch])
        gathered += [int(one) for one in accelerator.gather_for_metrics(model(batch) * 0 + batch)]
    accelerator.end_training()
    return {"told": told, "gathered": gathered, "length": len(loader)}


def test_ranks_read_whole_batches_and_metrics_hear_of_each_sample_once(gang2: Gang) -> None:
    first, second = gang2.run(read, "each")
    assert first["told"] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert second["told"] == [[4, 5, 6, 7], [12, 0, 1, 2]]
    assert first["gathered"] == second["gathered"] == [*range(13)]
    assert first["length"] == 2
    first, second = gang2.run(read, "split")
    assert first["told"] == [[0, 1], [4, 5], [8, 9], [12, 0]]
    assert second["told"] == [[2, 3], [6, 7], [10, 11], [1, 2]]
    assert first["gathered"] == [*range(13)]


class Drawn(Dataset[torch.Tensor]):
    """Samples that draw a number each, as pictures that are turned at random do."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.cat((torch.tensor([float(at)]), torch.rand(1)))


KEPT: list[Any] = []
"""Wrappers of accelerate's, each of which may wait for a thread of gloo if it goes before its process."""


def drawn_by(rank: int, world: int, library: str, alike: bool) -> list[Any]:
    """What a script reads and draws in two passes over shuffled data and over data in order; ends all."""
    del world
    AcceleratorState._reset_state(reset_partial_state=True)  # of whoever was here before
    accelerator = import_module(library).Accelerator(cpu=True)
    torch.manual_seed(5 if alike else 5 + rank)
    model = torch.nn.Linear(2, 1)
    loaders = (DataLoader(Drawn(), batch_size=2, shuffle=shuffle) for shuffle in (True, False))
    weighted = DataLoader(Drawn(), batch_size=3, sampler=WeightedRandomSampler([1.0] * 13, 13))
    wrapper, *prepared = accelerator.prepare(model, *loaders, weighted)
    KEPT.append(wrapper)
    passes = [loader for _ in range(2) for loader in prepared]
    told = [(batch.tolist(), torch.rand(1).item()) for loader in passes for batch in loader]
    accelerator.end_training()
    return told


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_read_and_draw_what_they_do_under_accelerate(gang2: Gang, alike: bool) -> None:
    """To the bit: orders, the last round, and what samples and steps draw, whatever the seed of each rank."""
    expected, found = (gang2.run_fresh(drawn_by, library, alike) for library in LIBRARIES)
    assert found == expected
    assert (found[0][0] == found[1][0]) is False


def test_one_process_reads_and_draws_as_torch_alone_that_reads_a_batch_ahead() -> None:
    told = drawn_by(0, 1, LIBRARIES[1], alike=True)
    torch.manual_seed(5)
    torch.nn.Linear(2, 1)
    loaders: list[Any] = [DataLoader(Drawn(), batch_size=2, shuffle=shuffle) for shuffle in (True, False)]
    loaders.append(DataLoader(Drawn(), batch_size=3, sampler=WeightedRandomSampler([1.0] * 13, 13)))
    expected = []
    for loader in loaders * 2:
        source = iter(loader)
        ahead = next(source, None)
        while (batch := ahead) is not None:
            ahead = next(source, None)
            expected.append((batch.tolist(), torch.rand(1).item()))
    assert told == expected


def saved_by(rank: int, world: int, who: str, folder: str) -> tuple[list[Any], list[Any], list[Any]]:
    """What is read and lost in three steps, in the rest of the pass and the next, and from a checkpoint in between.

    The samples draw, and the order is drawn by the process.
    """
    del world
    torch.manual_seed(rank)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Drawn(), batch_size=1, shuffle=True))

    def trained(rows: Any) -> list[Any]:
        told = []
        for row in rows:
            loss = (model(row) + torch.rand(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            told.append((row.tolist(), loss.item()))
        return told

    batches = iter(loader)
    first = trained(itertools.islice(batches, 3))
    if who == "all" or accelerator.is_main_process:
        accelerator.save_state(folder)
    rest = [*trained(batches), *trained(loader)]
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    again = [*trained(loader), *trained(loader)]
    accelerator.end_training()
    return first, rest, again


def numbers(told: list[Any]) -> list[int]:
    return [int(row[0]) for rows, _ in told for row in rows]


@pytest.mark.parametrize("who", ["all", "main"])
def test_a_checkpoint_inside_a_pass_goes_on_to_the_bit_whether_all_ranks_or_the_main_process_alone_save_it(
    gang2: Gang, tmp_path: Path, who: str
) -> None:
    told = gang2.run_fresh(saved_by, who, str(tmp_path / who))
    for first, rest, again in told if who == "all" else ():
        assert again == rest
        assert len(first) == 3
    for _, rest, again in told:
        assert numbers(again)[: len(rest) - 7] == numbers(rest)[: len(rest) - 7], "the rest of the pass"
    read = [at for first, rest, _ in told for at in numbers([*first, *rest[:4]])]
    assert set(read) == set(range(13))
    assert len(read) == 14


def test_one_process_goes_on_to_the_bit_too(tmp_path: Path) -> None:
    first, rest, again = saved_by(0, 1, "all", str(tmp_path))
    assert again == rest
    assert sorted(numbers([*first, *rest[:10]])) == [*range(13)]

"""Which samples a prepared loader of the face reads, beside accelerate's own classes; a last round is filled up."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, Dataset

from prepkit.compat.accelerate import Accelerator
from prepkit.config import DDP, Config
from prepkit.loading.rounds import rounds
from tests.support.gang import Gang


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
        return 6

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.rand(1) + at


def test_samples_draw_before_the_step_that_comes_before_them() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Drawn(), batch_size=2))
    torch.manual_seed(3)
    drawn = [(batch, torch.rand(1)) for batch in loader]
    torch.manual_seed(3)
    source, expected = iter(DataLoader(Drawn(), batch_size=2)), []
    ahead = next(source, None)
    while (batch := ahead) is not None:
        ahead = next(source, None)
        expected.append((batch, torch.rand(1)))
    assert all(
        torch.equal(one, other) for pair in zip(drawn, expected, strict=True) for one, other in zip(*pair, strict=True)
    )
    accelerator.end_training()


def saved_by(rank: int, world: int, who: str, folder: str) -> list[float]:
    """Two steps, a checkpoint of whoever comes, two more; then back, and these two again."""
    del world
    torch.manual_seed(rank)
    accelerator = Accelerator(cpu=True, config=Config(engine=DDP()))
    model, data = torch.nn.Linear(4, 1), torch.arange(64.0).reshape(16, 4) / 64
    model.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.zeros(1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(data, batch_size=2)  # type: ignore[arg-type]  # rows of a tensor
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    told = []

    def train(rows: Any) -> None:
        for row in rows:
            loss = (model(row) + torch.rand(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())

    batches = iter(loader)
    train(itertools.islice(batches, 2))
    if who == "all" or accelerator.is_main_process:
        accelerator.save_state(folder)
    train(batches)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    train(loader)
    accelerator.end_training()
    return told


@pytest.mark.parametrize("who", ["all", "main"])
def test_a_checkpoint_is_whole_whether_all_ranks_or_the_main_process_alone_save_it(
    gang2: Gang, tmp_path: Path, who: str
) -> None:
    first, second = gang2.run_fresh(saved_by, who, str(tmp_path / who))
    assert first[4:] == first[2:4]
    assert who == "main" or second[4:] == second[2:4]  # what nobody has written of a rank does not come back
    assert len(second) == 6

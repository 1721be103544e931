"""Which samples a prepared loader of the face reads, beside accelerate's own classes; a last round is filled up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader

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

"""An average of sharded weights equals torch's average of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import prepkit as pk
from prepkit.findings import RunRefused
from prepkit.objects import names
from tests.support.gang import Gang


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.head.bias.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


BATCH = torch.arange(16.0).reshape(4, 4) / 16


def plain() -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the trained model and of its average."""
    torch.manual_seed(0)
    model = Layers()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)  # torch's first update copies
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(BATCH).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    with torch.no_grad():
        return model(BATCH), average(BATCH)


def averaged(rank: int, world: int, engine: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[bool]]:
    """Outputs of the average, of the model afterwards, of an average that was loaded; which averages are shards."""
    torch.manual_seed(0)
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1))
    ready: Any = pk.apply(pk.build_plan(cfg, Layers()))
    ema = pk.Ema(ready, decay=0.5)
    for _ in range(3):
        ready.backward(ready.model(BATCH.chunk(world)[rank]).square().mean())
        with torch.no_grad():
            ready.model(BATCH)  # leaves the root gathered when the optimizer steps
        assert ready.step()
        ema.update()
    other = pk.Ema(ready, decay=0.5)
    other.load_state_dict(ema.state_dict())
    with torch.no_grad():
        with ema.applied():
            found = ready.model(BATCH)
        after = ready.model(BATCH)
        with other.applied():
            loaded = ready.model(BATCH)
    assert set(ema.averages) == {n for n, p in names.named_parameters(ready.model).items() if p.requires_grad}
    return found, after, loaded, [isinstance(average, DTensor) for average in ema.averages.values()]


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2()], ids=["ddp", "fsdp2"])
def test_an_average_of_shards_equals_torchs_of_the_whole_model(gang2: Gang, engine: Any) -> None:
    own, average = plain()
    assert not torch.allclose(own, average, rtol=1e-4)
    for found, after, loaded, sharded in gang2.run(averaged, engine, timeout=60):
        torch.testing.assert_close(found, average, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(after, own, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(loaded, found)
        assert set(sharded) == {isinstance(engine, pk.FSDP2)}


def test_a_decay_that_averages_nothing_is_refused() -> None:
    ready: Any = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1)), Layers()))
    with pytest.raises(ValueError, match="no average"):
        pk.Ema(ready, decay=1.0)


def test_no_average_is_taken_of_parameters_that_are_elsewhere() -> None:
    ready: Any = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1)), Layers()))
    next(ready.model.parameters()).ds_tensor = torch.zeros(1)  # ZeRO-3's mark
    with pytest.raises(RunRefused, match=r"ema\.zero3 at model: ZeRO-3 keeps parameters"):
        pk.Ema(ready)


def test_while_averages_stand_in_the_place_of_weights_nothing_is_trained_or_saved(tmp_path: Path) -> None:
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1)), nn.Linear(2, 1)))
    average = pk.Ema(ready, 0.5)
    loss = ready.model(torch.ones(1, 2)).sum()
    with average.applied():
        for call in (lambda: ready.backward(loss), ready.step, lambda: ready.save(str(tmp_path))):
            with pytest.raises(RunRefused, match=r"inside ema\.applied\(\), where averages are in the place"):
                call()
        ready.export(str(tmp_path / "average"))
    ready.backward(ready.model(torch.ones(1, 2)).sum())
    assert ready.step()
    ready.save(str(tmp_path))

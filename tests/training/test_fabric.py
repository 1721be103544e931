"""Lightning's Fabric: prepkit inside the processes that it starts, and a look at what it has prepared."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import prepkit as pk
from tests.support.gang import Gang

fabric = pytest.importorskip("lightning.fabric")


def made() -> tuple[nn.Module, DataLoader[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=8)


def curve(engine: pk.Single | pk.FSDP2) -> list[float]:
    """Losses over two passes, as means over the ranks."""
    model, loader = made()
    cfg = pk.Config(engine=engine, optimizer=pk.optim.AdamW(lr=1e-2), loaders=pk.data.ShardLoaders(split_batches=True))
    ready = pk.apply(pk.build_plan(cfg, model, loaders=[loader]))
    losses = []
    for _ in range(2):
        for inputs, targets in ready.loaders[0]:
            loss = nn.functional.mse_loss(ready.model(inputs), targets)
            ready.backward(loss)
            ready.step()
            losses.append(ready.ranks.reduce(float(loss.detach())))
    ready.close()
    return losses


def in_fabric(rank: int, world: int) -> tuple[list[float], str, bool, list[str]]:
    """Losses of prepkit's FSDP2; what prepares a model of Fabric's, the refusal of it, and its audit."""
    del rank
    runs = fabric.Fabric(accelerator="cpu", devices=world, strategy="ddp")
    runs.launch()
    losses = curve(pk.FSDP2())
    stays = torch.distributed.is_initialized()  # close() leaves a group that it has not started
    model, _ = made()
    other, _ = made()
    prepared, optimizer = runs.setup(model, torch.optim.AdamW(other.parameters(), lr=1e-2))
    try:
        pk.build_plan(pk.Config(engine=pk.DDP()), prepared)
    except pk.PlanRejected as refused:
        said = str(refused)
    return losses, said, stays, [one.rule for one in pk.audit(prepared, optimizer).findings]


def test_prepkit_prepares_in_fabrics_processes_and_audits_what_fabric_has_prepared(gang2: Gang) -> None:
    (losses, refused, stays, found), *_ = gang2.run_fresh(in_fabric)
    assert losses == pytest.approx(curve(pk.Single()), abs=1e-6)
    assert stays
    assert "model.already-wrapped" in refused
    assert "Already fabric" in refused
    assert found == ["run.orphans"]

"""Defaults of the process, as by ``torch.set_default_dtype(torch.float64)``, change nothing of what prepkit counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import prepkit as pk
from tests.support.gang import Gang


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def whole_run(rank: int, world: int, engine: Any, folder: str) -> tuple[float, str]:
    del rank, world
    with defaults(torch.float64, None):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=2)
        config = pk.Config(engine=engine, device="cpu", clip=pk.ClipNorm(max_norm=0.5))
        ready = pk.apply(pk.build_plan(config, model, optimizer=optimizer, loaders=[loader]))
        for (x,) in ready.loaders[0]:
            ready.backward(ready.model(x).square().mean(), mean_over=2)
            ready.step()
        ready.save(folder)
        ready.resume(folder)
        ready.export(f"{folder}/export")
        assert ready.grad_norm is not None
        return float(ready.grad_norm), str(next(ready.unwrap().parameters()).dtype)


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2(), pk.FSDP1()], ids=["ddp", "fsdp2", "fsdp1"])
def test_a_run_goes_on_under_a_default_of_float64(gang2: Gang, engine: Any, tmp_path: Any) -> None:
    for norm, dtype in gang2.run(whole_run, engine, str(tmp_path), timeout=60):
        assert norm > 0
        assert dtype == "torch.float64"


def test_gradients_are_told_in_float32_on_the_host() -> None:
    from prepkit.observe.prepared.gradients import gradients, rows

    with defaults(torch.float64, "meta"):
        model = torch.nn.Linear(4, 1, device="cpu")
        model(torch.ones(1, 4, device="cpu")).sum().backward()
        told = rows(tuple(gradients(model, ())))
    assert (told.dtype, told.device.type) == (torch.float32, "cpu")
    assert told[4].tolist() == [1.0, 1.0]

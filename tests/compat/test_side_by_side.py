"""What a script sees under accelerate's own ``Accelerator`` and under the face: the same, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import accelerate
import pytest
import torch
from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader, IterableDataset

from tests.support.gang import Gang

KEPT: list[Any] = []
"""Wrappers of accelerate's, each of which may wait for a thread of gloo if it goes before its process."""


def net(width: int = 2) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(width, 1)


def data(rows: int, size: int = 1, **options: Any) -> DataLoader[Any]:
    rows_of = torch.arange(2.0 * rows).reshape(rows, 2) / rows
    return DataLoader(rows_of, batch_size=size, **options)  # type: ignore[arg-type]


def trained(accelerator: Any, batches: Callable[[Any], Any], *loaders: DataLoader[Any]) -> list[Any]:
    """Per micro-batch of two passes: whether its window ends, and the weights behind it."""
    model = net()
    model, optimizer, *prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders)
    KEPT.append(model)
    seen = []
    for _ in range(2):
        for batch in batches(prepared):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            weight = accelerator.unwrap_model(model).weight
            seen.append((accelerator.sync_gradients, accelerator.step, weight.detach().clone()))
    return seen


def two_loaders(kind: Any) -> list[Any]:
    """Side by side: the one that was begun last says where a pass ends."""
    seen = []
    for sizes in ((6, 8), (8, 6)):
        accelerator = kind(cpu=True, gradient_accumulation_steps=2)
        seen += trained(accelerator, lambda two: (a + b for a, b in zip(*two, strict=False)), *map(data, sizes))
        accelerator.free_memory()
    return seen


def several_of_one_batch(kind: Any) -> list[Any]:
    accelerator = kind(cpu=True, gradient_accumulation_steps=2)
    return trained(accelerator, lambda one: (part for batch in one[0] for part in batch.split(1)), data(16, 4))


def three_of_a_window(kind: Any) -> list[Any]:
    return trained(kind(cpu=True, gradient_accumulation_steps=3), lambda one: one[0], data(16, 2))


class Ascending(torch.optim.SGD):
    """Asks for the gradients where it has gone up to, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(0.05)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.sub_(0.05)
        super().step()
        return loss


def again(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    return loss


def closures(kind: Any) -> list[Any]:
    seen = []
    for optimizer_of in (Ascending, torch.optim.LBFGS):
        accelerator = kind(cpu=True)
        model = net()
        model, optimizer, loader = accelerator.prepare(model, optimizer_of(model.parameters(), lr=0.1), data(8, 2))
        KEPT.append(model)
        for batch in loader:
            optimizer.step(partial(again, accelerator, model, optimizer, batch))
            optimizer.zero_grad()
            seen.append(accelerator.unwrap_model(model).weight.detach().clone())
        accelerator.free_memory()
    return seen


def loaders_tell(kind: Any) -> list[Any]:
    seen: list[Any] = []
    for rows, size, drop in ((7, 2, False), (8, 2, False), (7, 2, True)):
        accelerator = kind(cpu=True)
        loader = accelerator.prepare_data_loader(data(rows, size, drop_last=drop), device_placement=False)
        for _ in range(2):
            for _ in loader:
                told = (loader.end_of_dataloader, loader.iteration, loader.total_dataset_length)
                seen.append((*told, loader.remainder, accelerator.gradient_state.remainder))
        seen.append((loader.iteration, loader.total_batch_size, accelerator.gradient_state.remainder))
        accelerator.free_memory()
    names = ("rng_types", "multi_device", "save_iteration", "should_save_model", "step")
    return [*seen, *((name, getattr(accelerator, name)) for name in names)]


class Stream(IterableDataset[torch.Tensor]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(26.0).reshape(13, 2)


def read(loader: Any) -> list[Any]:
    return [batch.clone() for _ in range(2) for batch in loader]


def ends_of_dispatched_passes(kind: Any) -> list[Any]:
    """Streams, which are dispatched unless somebody says otherwise; a last round of one batch, and of two."""
    seen = []
    for asked in ({}, {"split_batches": True}, {"split_batches": True, "dispatch_batches": True}):
        accelerator = kind(cpu=True, dataloader_config=DataLoaderConfiguration(**asked))
        seen += read(accelerator.prepare(DataLoader(Stream(), batch_size=4)))
        accelerator.free_memory()
    for rows in (11, 13, 14):
        accelerator = kind(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        seen += read(accelerator.prepare(data(rows, 4)))
        accelerator.free_memory()
    return seen


def orders_by_a_seed_that_nobody_gives(kind: Any) -> list[Any]:
    accelerator = kind(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(21)
    seen = read(accelerator.prepare(data(12, 2, shuffle=True)))
    accelerator.free_memory()
    return seen


def a_loader_of_all_folds(kind: Any) -> list[Any]:
    """Prepared once, and read behind each ``free_memory``: what is gathered is cut to its samples all the same."""
    accelerator, seen = kind(cpu=True, rng_types=["generator"]), list[Any]()
    held_out = accelerator.prepare(data(7, 2))
    for _ in range(3):
        trained(accelerator, lambda one: one[0], data(8, 2))
        seen += [accelerator.gather_for_metrics(batch).clone() for batch in held_out]
        seen.append((len(accelerator._models), len(accelerator._dataloaders)))
        accelerator.free_memory()
    return [*seen, accelerator.reduce(torch.ones(2), "mean", scale=3.0), len(accelerator._models)]


def files_of_a_size(kind: Any) -> list[Any]:
    accelerator, seen = kind(cpu=True), list[Any]()
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    KEPT.append(model)
    for asked in ({"max_shard_size": 300}, {"safe_serialization": False}):
        with TemporaryDirectory() as own:
            (folder,) = accelerate.utils.broadcast_object_list([own])
            accelerator.save_model(model, folder, **asked)
            accelerator.wait_for_everyone()
            seen.append(sorted(one.name for one in Path(folder).iterdir()))
            accelerator.wait_for_everyone()
    accelerator.free_memory()
    return seen


SCRIPTS = (two_loaders, several_of_one_batch, three_of_a_window, closures, loaders_tell, ends_of_dispatched_passes)
SCRIPTS += (orders_by_a_seed_that_nobody_gives, a_loader_of_all_folds, files_of_a_size)


def under(library: str) -> list[Any]:
    AcceleratorState._reset_state(reset_partial_state=True)  # of whoever was here before
    kind = import_module(library).Accelerator
    seen = [script(kind) for script in SCRIPTS]
    kind(cpu=True).end_training()
    return seen


def on_ranks(rank: int, world: int, library: str) -> list[Any]:
    del rank, world
    return under(library)


def alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return bool(torch.equal(found, expected))
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(alike, found, expected))
    return bool(found == expected)


def compared(ours: list[Any], theirs: list[Any]) -> None:
    for script, found, expected in zip(SCRIPTS, ours, theirs, strict=True):
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert alike(one, other), (script.__name__, at, one, other)


def test_on_one_rank() -> None:
    compared(under("prepkit.compat.accelerate"), under("accelerate"))


def test_on_two_ranks(gang2: Gang) -> None:
    ours, theirs = (gang2.run_fresh(on_ranks, library) for library in ("prepkit.compat.accelerate", "accelerate"))
    for one, other in zip(ours, theirs, strict=True):
        compared(one, other)


class Coder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return self.into(rows)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.encode(rows))


@pytest.mark.filterwarnings("error::prepkit.findings.FindingWarning")
def test_methods_beside_forward_compute_as_they_stand_on_one_process() -> None:
    told = []
    for library in ("prepkit.compat.accelerate", "accelerate"):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = import_module(library).Accelerator(cpu=True, mixed_precision="bf16")
        torch.manual_seed(0)
        model = Coder()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        bare, rows = accelerator.unwrap_model(model), torch.randn(2, 8)
        outside = bare.encode(rows)
        with accelerator.autocast():
            inside = bare.encode(rows)
        told.append((outside, inside, model(rows)))
        accelerator.end_training()
    assert [part.dtype for part in told[0]] == [torch.float32, torch.bfloat16, torch.float32]
    assert alike(*told)

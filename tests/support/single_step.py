"""One step at a time, and process groups of one process, for the tests beside this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.applying.step_kinds import handlers
from prepkit.objects.target import Target
from prepkit.rules import by_id
from prepkit.steps import Step


def problems(step: Step, target: Target) -> tuple[str, ...]:
    """What the step's check says, one line for each finding, with the fix where that is not its rule's."""
    found = handlers()[type(step)].ready(step, target)
    fixes = (one.fix if one.fix != by_id()[one.rule].fix else "" for one in found)
    return tuple(
        f"{one.rule} at {one.where}: {one.what}; {fix}".removesuffix("; ")
        for one, fix in zip(found, fixes, strict=True)
    )


def do(step: Step, target: Target) -> Any:
    """Does a step that is ready, and returns its memo."""
    assert problems(step, target) == ()
    return handlers()[type(step)].do(step, target)


def undo(step: Step, target: Target, memo: Any) -> str:
    """Takes a step back; what of it stays."""
    back = handlers()[type(step)].undo
    assert back is not None
    return back(step, target, memo) or ""


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    """A group of any size that carries no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def gloo_alone() -> Iterator[None]:
    """A real group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_mesh(world: int) -> Any:
    """A CPU mesh with one axis."""
    return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))

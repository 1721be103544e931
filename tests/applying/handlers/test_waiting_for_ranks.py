"""A handler begins what all ranks do together only once all are there, or one that failed would be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim import SGD

from prepkit.applying.step_kinds import KINDS
from prepkit.objects.target import Target
from prepkit.steps import (
    Agree,
    Axis,
    BuildMesh,
    CheckFiles,
    InitializeDeepSpeed,
    InitializeMSAMP,
    LocalDevice,
    ParallelizeModules,
    PartitionParameters,
    ReadTensors,
    SendTensors,
    StartProcessGroup,
    StashTensors,
    Step,
)
from tests.applying.handlers import test_ddp, test_fsdp1
from tests.support import library_doubles
from tests.support.deepspeed_cpu import lean
from tests.support.fragile_model import Tiny
from tests.support.single_step import fake_group, shard_mesh


class OneHasFailed(Exception):
    """What waiting for the others raises."""


def wait() -> None:
    raise OneHasFailed


AXES = (Axis(name="shard", size=2),)
STEPS: dict[str, Step] = {
    "StartProcessGroup": StartProcessGroup(backend="gloo", world_size=1, timeout_s=30),
    "Agree": Agree(),
    "BuildMesh": BuildMesh(device="cpu", axes=AXES),
    "WrapDDP": test_ddp.wrapping(),
    "WrapFSDP1": test_fsdp1.wrapping(),
    "ParallelizeModules": ParallelizeModules(axis="shard", styles=()),
    "CheckFiles": CheckFiles(files=()),
    "ReadTensors": ReadTensors(files=(), sources=(), axes=()),
    "StashTensors": StashTensors(params=(), buffers=()),
    "SendTensors": SendTensors(tensors=(), axes=()),
    "InitializeMSAMP": InitializeMSAMP(opt_level="O2", linears=(), kept=(), reduced=False),
    "PartitionParameters": PartitionParameters(device=LocalDevice(type="cpu"), settings=()),
    "InitializeDeepSpeed": InitializeDeepSpeed(
        device="cpu",
        data_parallel=2,
        stage=2,
        dtype=None,
        optimizer="given",
        names=(),
        scheduler="outside",
        settings=(),
    ),
}


@contextmanager
def surroundings(kind: str, patches: pytest.MonkeyPatch) -> Iterator[None]:
    """A fake group, but where the step starts one; libraries that the step calls."""
    if kind == "InitializeMSAMP":
        library_doubles.msamp(patches)
    if kind in ("PartitionParameters", "InitializeDeepSpeed"):
        pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
        patches.setenv("LOCAL_RANK", "0")
        lean()
    if kind == "StartProcessGroup":
        yield
    else:
        with fake_group(2):
            yield


@pytest.mark.parametrize("kind", STEPS)
def test_nothing_is_done_together_before_all_ranks_are_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, model = STEPS[kind], Tiny()
    optimizer = SGD(model.parameters())
    with surroundings(kind, monkeypatch):
        mesh: Any = None if kind in ("StartProcessGroup", "BuildMesh") else shard_mesh(2)
        target = Target(model=model, optimizer=optimizer, mesh=mesh, together=wait)
        with pytest.raises(OneHasFailed):
            KINDS[type(step)].handler.do(step, target)
        assert dist.is_initialized() is (kind != "StartProcessGroup")
    assert (target.model, target.optimizer, target.mesh) == (model, optimizer, mesh)

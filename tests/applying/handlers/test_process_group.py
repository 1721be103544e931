"""The process group, the agreement and the mesh: started, checked, refused and taken back."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import prepkit as pk
from prepkit.applying.step_kinds import handlers
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.steps import Agree, Axis, BuildMesh, LocalDevice, StartProcessGroup
from tests.support.fragile_model import Tiny
from tests.support.gang import Gang
from tests.support.single_step import do, fake_group, gloo_alone, problems, undo

TWO = StartProcessGroup(backend="gloo", world_size=2, timeout_s=30.0)
ONE = StartProcessGroup(backend="gloo", world_size=1, timeout_s=30.0)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launcher.VARIABLES, *launcher.WORLD_SIZE, *launcher.PER_NODE, *launcher.RANK, *launcher.LOCAL_RANK):
        monkeypatch.delenv(name, raising=False)


def nothing() -> Target:
    return Target(model=Tiny())


def test_one_process_needs_no_launcher_and_the_group_is_ended_again() -> None:
    target = nothing()
    memo = do(ONE, target)
    assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
    undo(ONE, target, memo)
    assert not dist.is_initialized()


def test_a_group_that_ran_before_is_used_and_not_ended() -> None:
    with gloo_alone():
        target = nothing()
        undo(ONE, target, do(ONE, target))
        assert dist.is_initialized()


def test_several_ranks_without_a_launcher_are_refused_with_the_command_to_type() -> None:
    assert problems(TWO, nothing()) == (
        (
            "plan.other-environment at launch: the plan is for 2 ranks, but this process was started alone; "
            "Type torchrun --nproc-per-node=2 your_script.py."
        ),
    )


def test_a_launcher_that_forgot_variables_is_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (text,) = problems(TWO, nothing())
    assert text.startswith(
        "plan.other-environment at launch: the launcher's MASTER_ADDR, MASTER_PORT are not set; Start with torchrun"
    )


def test_a_launch_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert problems(TWO, nothing()) == (
        (
            "plan.other-environment at env.WORLD_SIZE: is 3, the plan is for 2 ranks; "
            "Start 2 processes, or build the plan again here."
        ),
    )


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_mpirun_on_one_node_says_all_that_a_start_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert problems(TWO, nothing()) == ()
    assert (launcher.place(), launcher.local_rank(), launcher.processes()) == ((1, 2), 1, 2)


@pytest.mark.parametrize(
    "names",
    [
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ],
    ids=["mpich", "mvapich"],
)
def test_every_mpi_says_who_this_process_is(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(names, "1212", strict=True):
        monkeypatch.setenv(name, value)
    assert problems(TWO, nothing()) == ()
    assert (launcher.place(), launcher.local_rank(), launcher.processes()) == ((1, 2), 1, 2)


def test_mpirun_on_several_nodes_is_told_what_to_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    (text,) = problems(TWO, nothing())
    assert text.startswith(
        "plan.other-environment at env.MASTER_ADDR: "
        "MPI started 2 processes on several nodes, and MASTER_ADDR is not set; "
    )
    assert text.endswith("Type mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...")
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    assert problems(TWO, nothing()) == ()
    assert launcher.local_rank() == 0


def test_one_process_that_mpirun_started_is_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    target = nothing()
    undo(ONE, target, do(ONE, target))
    assert launcher.processes() == 1


def applied_under_mpirun(rank: int, world: int) -> tuple[int, float]:
    """Size of the group and the averaged gradient of rank + 1, where MPI's variables alone say rank and size."""
    port, names = os.environ["MASTER_PORT"], (*launcher.VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    mpi = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": world, "OMPI_COMM_WORLD_LOCAL_SIZE": world}
    os.environ.update({name: str(value) for name, value in mpi.items()} | {"MASTER_PORT": port})
    try:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        cfg = pk.Config(engine=pk.DDP(), device="cpu", timeout_s=30.0)
        ready = pk.apply(pk.build_plan(cfg, model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)))
        size = dist.get_world_size()
        ready.backward(ready.model(torch.full((1, 1), rank + 1.0)).sum())
        ready.step()
        ready.close()
        return size, float(model.weight)
    finally:
        for name in (*mpi, "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ.update(before)


def test_processes_that_mpirun_started_train_as_under_torchrun(gang2: Gang) -> None:
    assert gang2.run_fresh(applied_under_mpirun) == [(2, -0.5)] * 2


def test_a_running_group_of_another_size_or_backend_is_refused() -> None:
    with gloo_alone():
        assert problems(TWO, nothing()) == (
            (
                "plan.other-environment at process group: has 1 ranks, the plan is for 2; "
                "Start 2 processes, or build the plan again here."
            ),
        )
        (text,) = problems(StartProcessGroup(backend="nccl", world_size=1, timeout_s=1.0), nothing())
        assert text.startswith("plan.other-environment at process group: has backend cpu:gloo")
        assert "the plan wants nccl; Call init_process_group('nccl'), or plan with backend=" in text
        assert problems(StartProcessGroup(backend="cpu:gloo", world_size=1, timeout_s=1.0), nothing()) == ()
        (text,) = problems(StartProcessGroup(backend="cpu:gloo,cuda:nccl", world_size=1, timeout_s=1.0), nothing())
        assert "the plan wants cpu:gloo,cuda:nccl" in text


def test_a_fake_group_stands_for_any_backend() -> None:
    with fake_group(2):
        assert problems(StartProcessGroup(backend="nccl", world_size=2, timeout_s=1.0), nothing()) == ()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="shows what is said where there is no accelerator")
def test_a_backend_for_an_accelerator_that_is_not_here_is_refused() -> None:
    (text,) = problems(StartProcessGroup(backend="nccl", world_size=1, timeout_s=1.0), nothing())
    assert text == "environment.device at device 'cuda': not available here; Plan with device='cpu'."


class Cards:
    """A device module with so many devices; records the current one."""

    def __init__(self, count: int) -> None:
        self.count, self.current = count, -1

    def device_count(self) -> int:
        return self.count

    def is_available(self) -> bool:
        return True

    def set_device(self, index: int) -> None:
        self.current = index


@pytest.mark.parametrize(("count", "rank", "index"), [(8, 3, 3), (1, 3, 0), (8, 0, 0)])
def test_the_device_is_the_local_rank_s_unless_one_alone_is_visible(
    monkeypatch: pytest.MonkeyPatch, count: int, rank: int, index: int
) -> None:
    cards = Cards(count)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: cards)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert launcher.device_problems("cuda") == ()
    assert launcher.bind(LocalDevice(type="cuda")) == torch.device("cuda", index)
    assert cards.current == index


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: Cards(4))
    monkeypatch.setenv("LOCAL_RANK", "4")
    (found,) = launcher.device_problems("cuda")
    assert found.rule == "environment.device"
    assert found.what == "4 are visible, and there is none for local rank 4"
    assert found.fix == "Start at most 4 processes here."


def test_a_mesh_has_the_planned_axes_and_is_forgotten_again() -> None:
    step = BuildMesh(device="cpu", axes=(Axis(name="replicate", size=2), Axis(name="shard", size=4)))
    with fake_group(8):
        target = nothing()
        memo = do(step, target)
        assert target.mesh is not None
        assert (target.mesh.mesh_dim_names, tuple(target.mesh.shape)) == (("replicate", "shard"), (2, 4))
        undo(step, target, memo)
        assert target.mesh is None


def test_a_mesh_that_does_not_multiply_to_the_world_is_refused() -> None:
    step = BuildMesh(device="cpu", axes=(Axis(name="replicate", size=2), Axis(name="shard", size=3)))
    with fake_group(8):
        (text,) = problems(step, nothing())
        assert text == (
            "plan.other-environment at mesh: replicate=2 x shard=3 is for 6 ranks, the process group has 8; "
            "Build the plan again here."
        )
    assert problems(step, nothing()) == ()


def start(rank: int, world: int) -> tuple[int, bool, Any, bool]:
    target = Target(model=Tiny(), digests=(("plan", "same"),))
    memo = do(TWO, target)
    do(Agree(), target)
    do(BuildMesh(device="cpu", axes=(Axis(name="shard", size=2),)), target)
    assert target.mesh is not None
    found = dist.get_rank(), memo, target.mesh.get_local_rank()
    undo(TWO, target, memo)
    return (*found, dist.is_initialized())


def disagree(rank: int, world: int) -> str:
    target = Target(model=Tiny(), digests=(("plan", f"of rank {rank}"),))
    try:
        handlers()[Agree].do(Agree(), target)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_launcher_s_group_is_started_agreed_on_laid_out_and_ended(gang2: Gang) -> None:
    assert gang2.run_fresh(start) == [(0, True, 0, False), (1, True, 1, False)]


def test_a_disagreement_is_raised_on_every_rank(gang2: Gang) -> None:
    first, second = gang2.run(disagree)
    assert first == second
    assert "plan.ranks-differ at plan: the 2 ranks do not hold the same plan" in first

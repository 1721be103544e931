"""The environment that is here: what launcher, devices and metadata say, and nothing that differs from rank to rank."""

from __future__ import annotations

import os
import platform
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.facts import Env
from prepkit.observe import env as here
from prepkit.observe import observe
from prepkit.observe.env import observe_env
from prepkit.ranks import launcher
from prepkit.rules.launcher_flags import FLAGS

RANKED = {"RANK": "5", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, no variable that counts."""
    for name in (*launcher.WORLD_SIZE, *launcher.PER_NODE, *launcher.RANK, *launcher.LOCAL_RANK, *here.VARIABLES):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_it_is_one_process() -> None:
    found = observe_env()
    assert (found.world_size, found.per_node, found.variables, found.assumed) == (1, None, (), ())
    assert (found.torch, found.python) == (torch.__version__, platform.python_version())


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_each_launcher_says_how_many_processes_there_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "16")
    assert observe_env().world_size == 16


def test_torchruns_variables_come_before_those_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (observe_env().world_size, observe_env().per_node) == (16, 8)


def test_the_running_group_is_asked_before_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "9")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        found = observe(nn.Linear(1, 1))
    finally:
        dist.destroy_process_group()
    assert (found.facts.env.world_size, found.local.rank) == (4, 3)


def test_slurms_number_of_tasks_is_told_and_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "64")
    found = observe_env()
    assert (found.world_size, found.variables) == (1, (("SLURM_NTASKS", "64"),))


@pytest.mark.parametrize("text", ["four", "0", "-1", "2.5", ""])
def test_a_launcher_that_says_no_number_is_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ValueError, match="environment variable WORLD_SIZE is") as said:
        observe_env()
    assert str(said.value) == (
        f"environment variable WORLD_SIZE is {text!r}, and should be a whole number of at least 1; "
        f"start with torchrun, which sets it, or type: unset WORLD_SIZE"
    )


def test_facts_do_not_change_with_the_rank_and_local_facts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    first = observe(nn.Linear(1, 1))
    for name, value in RANKED.items():
        monkeypatch.setenv(name, value)
    second = observe(nn.Linear(1, 1))
    assert first.facts == second.facts
    assert (first.local.rank, first.local.local_rank) == (0, 0)
    assert (second.local.rank, second.local.local_rank) == (5, 1)


def test_the_variables_that_matter_are_recorded_sorted_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCH_COMPILE_DISABLE": "1", "ACCELERATE_USE_FSDP": "true", "HF_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    assert observe_env().variables == (("ACCELERATE_USE_FSDP", "true"), ("TORCH_COMPILE_DISABLE", "1"))


def test_no_variable_of_the_table_differs_from_rank_to_rank_or_holds_a_secret() -> None:
    assert set(here.VARIABLES).isdisjoint({*launcher.RANK, *launcher.LOCAL_RANK, *RANKED, "HIP_VISIBLE_DEVICES"})
    assert not [name for name in here.VARIABLES if "TOKEN" in name or "KEY" in name]


def test_every_flag_that_a_rule_knows_is_recorded() -> None:
    assert set(FLAGS) <= set(here.VARIABLES)


def test_installed_libraries_are_found_with_their_versions_within_milliseconds() -> None:
    import transformers

    observe_env()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        found = dict(observe_env().libraries)
        times.append(time.perf_counter() - began)
    assert found["transformers"] == transformers.__version__
    assert "msamp" not in found
    assert min(times) < 0.1


def test_a_declared_environment_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "no number")
    declared = Env.declare(world_size=512, memory="80GiB")
    assert observe(nn.Linear(1, 1), env=declared).facts.env is declared


def test_a_cpu_computes_in_bfloat16_and_has_no_device_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    found = observe_env()
    assert (found.device, found.memory, found.capability, found.bf16) == ("cpu", None, None, True)


def test_an_accelerator_is_asked_at_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # A recording double: the calls are torch's, the answers those of a machine with four unequal devices.
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=1000 + i))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, i))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    found = observe_env()
    assert (found.device, found.memory, found.capability, found.bf16) == ("cuda", 1002, (9, 2), True)


@pytest.mark.gpu
def test_a_real_accelerator_has_memory_and_a_capability() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    found = observe_env()
    assert found.device == "cuda"
    assert found.memory == torch.cuda.get_device_properties(0).total_memory
    assert found.capability is not None
    assert found.capability >= (5, 0)


def test_free_host_memory_is_a_part_of_what_is_there() -> None:
    free = observe(nn.Linear(1, 1), env=Env()).local.host_memory
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        assert free is not None
        assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        assert free is None


def test_observing_twice_gives_the_same_value() -> None:
    assert observe_env() == observe_env()
    assert evolve(observe_env(), world_size=2) != observe_env()

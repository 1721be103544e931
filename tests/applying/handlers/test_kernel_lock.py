"""A lock that a killed compilation has left is named before DeepSpeed waits for it; one that is held is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import cpp_extension

from prepkit.applying.handlers import deepspeed
from prepkit.applying.handlers.deepspeed import LONGEST_BUILD_S, lock_problems
from prepkit.findings import Finding
from prepkit.objects.deepspeed import SHARED_MEMORY
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.ranks.group_limits import default_limit
from prepkit.rules import found
from prepkit.steps import ConvertOptimizer, InitializeDeepSpeed, Setting
from tests.support.deepspeed_cpu import lean, own_extensions
from tests.support.single_step import do, gloo_alone, problems


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch keeps what it compiles."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def planted(folder: Path, kernel: str) -> Path:
    lock = folder / kernel / "lock"
    lock.parent.mkdir()
    lock.touch()
    return lock


def finding_of(lock: Path) -> Finding:
    fix = f"Type rm {lock}, unless another machine compiles in this folder now."
    what = "left by a compilation that was killed: DeepSpeed would wait for it for ever"
    return found("deepspeed.stale-lock", str(lock), what, fix)


def line_of(lock: Path) -> str:
    one = finding_of(lock)
    return f"{one.rule} at {one.where}: {one.what}; {one.fix}"


def test_a_lock_that_nobody_holds_is_named_with_what_to_type(folder: Path) -> None:
    assert lock_problems(("cpu_adam", "cpu_lion")) == ()
    lock = planted(folder, "cpu_adam")
    assert lock_problems(("cpu_adam", "cpu_lion", "cpu_adam")) == (finding_of(lock),)
    assert lock_problems(("cpu_lion",)) == ()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only a lock's age is known")
def test_a_lock_is_stale_from_when_its_builder_is_killed(folder: Path) -> None:
    (folder / "cpu_adam").mkdir()
    lock = folder / "cpu_adam" / "lock"
    code = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(600)"
    builder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)  # as torch's FileBaton
    assert builder.stdout is not None
    builder.stdout.readline()
    try:
        os.utime(lock, (0, 0))
        assert lock_problems(("cpu_adam",)) == (), "it takes long, and lives"
        own_extensions()
        assert lock.exists()
    finally:
        builder.kill()
        builder.wait()
        builder.stdout.close()
    assert lock_problems(("cpu_adam",)) == (finding_of(lock),)


def test_where_nobody_can_tell_who_holds_it_a_lock_is_stale_once_it_is_old(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "PROCESSES", folder / "no such folder")
    lock = planted(folder, "cpu_adam")
    assert lock_problems(("cpu_adam",)) == ()
    old = time.time() - LONGEST_BUILD_S - 1
    os.utime(lock, (old, old))
    assert lock_problems(("cpu_adam",)) == (finding_of(lock),)


def test_a_session_of_tests_removes_stale_locks_from_its_own_folder(folder: Path) -> None:
    locks = [planted(folder, kernel) for kernel in ("cpu_adam", "whatever")]
    own_extensions()
    assert not any(lock.exists() for lock in locks)
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder), "a folder that somebody has chosen stays"


def test_the_folder_is_the_one_in_which_torch_compiles(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torch_s_own() -> Path:
        return Path(cpp_extension._get_build_directory("kernel", verbose=False)).parent

    assert launcher.extensions_root() == torch_s_own() == folder
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path / "home"))
    assert launcher.extensions_root() == torch_s_own()


@pytest.mark.parametrize(("algorithm", "kernel"), deepspeed.CPU_KERNELS.items())
def test_converting_an_optimizer_is_refused_while_its_kernel_is_locked(
    folder: Path, algorithm: Any, kernel: str
) -> None:
    pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
    step, target = ConvertOptimizer(algorithm=algorithm, decoupled=True), Target(model=nn.Linear(2, 2))
    assert problems(step, target) == ()
    planted(folder, "fused_adam")
    lock = planted(folder, kernel)
    assert problems(step, target) == (line_of(lock),)


def initializing(**changes: Any) -> InitializeDeepSpeed:
    usual: dict[str, Any] = {"optimizer": "none", "names": (), "scheduler": "outside", "settings": ()}
    return InitializeDeepSpeed(**{"device": "cpu", "data_parallel": 1, "stage": 2, "dtype": None, **usual, **changes})


def section(kind: str, device: str | None) -> InitializeDeepSpeed:
    offload = () if device is None else (("zero_optimization", "offload_optimizer", "device"), f'"{device}"')
    pairs = ((("optimizer", "type"), f'"{kind}"'), offload)
    settings = tuple(Setting(path=pair[0], value=pair[1]) for pair in pairs if pair)
    return initializing(optimizer="section", settings=settings)


@pytest.mark.parametrize(
    ("step", "kernel"),
    [
        (section("AdamW", "cpu"), "cpu_adam"),
        (section("Adagrad", "cpu"), "cpu_adagrad"),
        (section("Adam", "none"), "fused_adam"),
        (section("Lion", None), "fused_lion"),
    ],
)
def test_initializing_is_refused_while_the_kernel_of_its_own_optimizer_is_locked(
    folder: Path, step: InitializeDeepSpeed, kernel: str
) -> None:
    pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
    lean()
    target = Target(model=nn.Linear(2, 2))
    lock = planted(folder, kernel)
    assert line_of(lock) in problems(step, target)
    assert problems(initializing(), target) == ()


def test_deepspeed_meets_its_group_without_collectives_that_wait_for_ever_and_its_groups_have_the_default_one_s_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
    lean()
    import deepspeed as library
    from deepspeed import ops
    from deepspeed.comm.torch import build_shm_op

    monkeypatch.setattr(ops, "__compatible_ops__", {**ops.__compatible_ops__, SHARED_MEMORY: True})
    planted(folder, SHARED_MEMORY)
    target = Target(model=nn.Linear(2, 2))
    assert problems(initializing(), target) == ()
    seen: list[Any] = []

    def initialize(**_: Any) -> None:
        limit = default_limit()
        assert limit is not None
        made: Any = dist.new_group([0])
        seen.append((build_shm_op(), made._get_backend(torch.device("cpu")).options._timeout == limit))
        raise ValueError("seen enough")

    monkeypatch.setattr(library, "initialize", initialize)
    with gloo_alone(), pytest.raises(RuntimeError, match="seen enough"):
        do(initializing(), target)
    assert seen == [(None, True)]
    assert ops.__compatible_ops__[SHARED_MEMORY] is True

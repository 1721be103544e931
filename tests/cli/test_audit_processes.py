"""``prepkit audit --torchrun 2 SCRIPT``: real processes under gloo, started by the command itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.command_line import ROOT, python, run
from tests.support.fork_server import ForkServers
from tests.support.script import ran

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
{wrapped}
optimizer = torch.optim.SGD({params}, lr=0.1)
model(torch.ones(2, 4)).sum().backward()
{fails}
optimizer.step()
"""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DDP = "model = DistributedDataParallel(model)"


def _script(folder: Path, **parts: str) -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(**{"wrapped": DDP, "params": "model.parameters()", "fails": ""} | parts))
    return str(path)


def test_a_wrong_one_under_torchrun_gives_one_and_says_it_once(tmp_path: Path) -> None:
    script = _script(tmp_path, params="torch.nn.Linear(4, 4).parameters()")  # of another model
    done = python("-m", "prepkit", "audit", "--torchrun", "2", "--json", script)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert json.loads(text[text.index("{") : text.rindex("}") + 1])["findings"]
    assert "ChildFailedError" not in text


@pytest.fixture
def forked(fork_servers: ForkServers, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Processes of torchrun are forked from one that has imported torch; what they write."""
    said: list[str] = []

    def start(command: tuple[str, ...], env: Mapping[str, str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        assert not check
        ours = {name: value for name, value in env.items() if name not in LAUNCHER}
        each = ran(fork_servers, 2, command[5:], {**ours, "PYTHONPATH": str(ROOT)}, 120)
        said.extend(f"{one.out}{one.err}" for one in each)
        return subprocess.CompletedProcess(command, int(any(one.code for one in each)))

    monkeypatch.setattr(subprocess, "run", start)
    return said


def test_a_right_script_is_fine_in_two_processes(tmp_path: Path, forked: list[str]) -> None:
    assert run("audit", "--torchrun", "2", _script(tmp_path)).exit_code == 0, forked
    assert "".join(forked).count("audit of Linear, 20 parameters, 20 trained; ddp over 2 ranks") == 1


def test_a_script_that_fails_gives_three(tmp_path: Path, forked: list[str]) -> None:
    assert run("audit", "--torchrun", "2", _script(tmp_path, fails="raise OSError('gone')")).exit_code == 3, forked
    assert "OSError: gone" in "".join(forked)

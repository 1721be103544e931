"""``prepkit audit --torchrun 2 SCRIPT``: real processes under gloo, started by the command itself."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from prepkit.cli.audit import audit
from tests.support.command_line import python, run
from tests.support.script import Ran

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
DDP = "model = DistributedDataParallel(model)"


ONE_WITHOUT_SYNC = """
import torch.distributed as dist
import torch
from contextlib import nullcontext

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with nullcontext() if dist.get_rank() else model.no_sync():
    model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
EACH_FOR_THE_OTHER = """
import torch.distributed as dist
import torch

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = dist.new_group([0, 1])
loss = model(torch.ones(2, 4)).sum()
if dist.get_rank() == 0:
    dist.barrier(other)
loss.backward()
dist.barrier(other)
optimizer.step()
"""
ONE_LEAVES_A_STEP_OUT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for at in range(6):
    model(torch.randn(2, 4)).square().sum().backward()
    if at != 2 or dist.get_rank() == 0:
        optimizer.step()
    optimizer.zero_grad()
"""
ONE_SCALER_LEAVES_OUT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
scaler.scale(model(torch.ones(2, 4)).sum() * (float("inf") if dist.get_rank() else 1.0)).backward()
scaler.step(optimizer)
dist.barrier()
"""
ONE_HAS_NOTHING = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for at in range(6):
    rows = 0 if at % 3 == 1 and dist.get_rank() else 4
    optimizer.zero_grad()
    if rows:
        model(torch.randn(rows, 4, generator=generator)).square().mean(1).sum().backward()
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    sums = torch.cat([*(one.flatten() for one in grads), torch.tensor([float(rows)])])
    dist.all_reduce(sums)
    parts = (sums / sums[-1])[:-1].split([one.numel() for one in grads])
    for one, part in zip(model.parameters(), parts):
        one.grad = part.view_as(one)
    optimizer.step()
"""
SLOW = "import time; time.sleep(13 * dist.get_rank())  # as one rank reads a large file"


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


def test_a_right_script_is_fine_in_two_processes(tmp_path: Path, forked_torchrun: list[Ran]) -> None:
    assert run("audit", _script(tmp_path), "--torchrun", "2").exit_code == 0, forked_torchrun
    assert (
        "".join(one.out for one in forked_torchrun).count(
            "audit of Linear, 20 parameters, 20 trained; ddp over 2 ranks"
        )
        == 1
    )


def test_a_script_that_fails_gives_three(tmp_path: Path, forked_torchrun: list[Ran]) -> None:
    assert run("audit", "--torchrun", "2", _script(tmp_path, fails="raise OSError('gone')")).exit_code == 3, (
        forked_torchrun
    )
    assert "OSError: gone" in "".join(one.err for one in forked_torchrun)


def _hangs(folder: Path, text: str, *options: str) -> str:
    """What is written of a script that would hang until gloo gives up, after half an hour."""
    (folder / "train.py").write_text(text)
    began = time.monotonic()
    done = python("-m", "prepkit", "audit", "--torchrun", "2", *options, str(folder / "train.py"), TMPDIR=str(folder))
    assert time.monotonic() - began < 90.0
    assert done.returncode == 3, done.stderr
    return done.stderr


def test_a_rank_that_waits_in_a_backward_for_one_without_sync_is_named(tmp_path: Path) -> None:
    said = _hangs(tmp_path, ONE_WITHOUT_SYNC)
    assert "Rank 0 has come to its first step, and rank 1 has not" in said
    assert "rank 0 has called a model 1 time (1 inside no_sync())" in said
    assert re.search(r"Rank 1 has waited for other ranks for 1\d s, in backward \(train.py:10\)", said), said


def test_a_rank_that_leaves_out_a_later_step_is_named_and_not_asked_in_another(tmp_path: Path) -> None:
    said = _hangs(tmp_path, ONE_LEAVES_A_STEP_OUT, "--steps", "6")
    assert "Rank 0 has come to step 3, and rank 1 has not: rank 1 has called a model 4 times, gone backward" in said
    assert "rank 0 has called a model 3 times, gone backward 3 times and stepped 2 times" in said
    assert re.search(r"Rank 1 has waited for other ranks for 1\d s, in backward \(train.py:10\)", said), said


def test_a_rank_that_has_no_sample_in_its_next_step_ends_its_window_with_the_others(
    tmp_path: Path, forked_torchrun: list[Ran]
) -> None:
    (tmp_path / "train.py").write_text(ONE_HAS_NOTHING)
    assert run("audit", str(tmp_path / "train.py"), "--torchrun", "2", "--prove").exit_code == 0, forked_torchrun
    assert "2 gradients, 2 steps: trained as plain torch trains it" in "".join(one.out for one in forked_torchrun)


def test_a_rank_whose_scaler_leaves_its_step_out_is_named(tmp_path: Path) -> None:
    said = _hangs(tmp_path, ONE_SCALER_LEAVES_OUT)
    assert "rank 1 has called a model 1 time and gone backward 1 time, and its GradScaler has left out 1 step" in said
    assert re.search(r"Rank 1 has waited for other ranks for 1\d s, in barrier \(train.py:11\)", said), said


def test_ranks_that_wait_for_each_other_are_named_and_ended(tmp_path: Path) -> None:
    said = _hangs(tmp_path, EACH_FOR_THE_OTHER)
    first = "rank 0 has called a model 1 time and gone backward 0 times, in barrier (train.py:11)"
    second = "rank 1 has called a model 1 time and gone backward 1 time, in backward (train.py:12)"
    assert f"Every rank waits for another one: {first}; {second}" in said


def test_a_rank_that_is_slow_before_its_backward_is_waited_for(tmp_path: Path, forked_torchrun: list[Ran]) -> None:
    script = _script(tmp_path, wrapped=f"{DDP}\n{SLOW}")
    assert run("audit", "--torchrun", "2", script).exit_code == 0, forked_torchrun
    assert [one.code for one in forked_torchrun] == [0, 0]


@pytest.mark.parametrize(
    ("behind", "processes", "proves", "as_json", "arguments"),
    [
        (["--torchrun", "2", "--prove", "a", "--json"], 2, True, False, ("a", "--json")),
        (["--torchrun=2", "--lr", "--prove"], 2, False, False, ("--lr", "--prove")),
        (["--json", "--", "--json", "--torchrun", "2"], None, False, True, ("--json", "--torchrun", "2")),
        (["-h"], None, False, False, ("-h",)),
    ],
)
def test_options_right_behind_the_script_are_those_of_audit(
    tmp_path: Path, behind: list[str], processes: int | None, proves: bool, as_json: bool, arguments: tuple[str, ...]
) -> None:
    script = _script(tmp_path)
    found = audit.make_context("audit", [script, *behind]).params
    asked = {"processes": processes, "prove": proves, "as_json": as_json, "arguments": arguments}
    assert found == {"script": script, "keep": None, "steps": 1, **asked}

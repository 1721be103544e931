"""``prepkit audit --torchrun 2 SCRIPT``: real processes under gloo, started by the command itself."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command_line import python

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


def _audit(tmp_path: Path, *words: str, **parts: str) -> tuple[int, str]:
    (tmp_path / "train.py").write_text(
        SCRIPT.format(**{"wrapped": DDP, "params": "model.parameters()", "fails": ""} | parts)
    )
    done = python("-m", "prepkit", "audit", "--torchrun", "2", *words, str(tmp_path / "train.py"))
    return done.returncode, done.stdout + done.stderr


def test_a_right_script_is_fine_in_two_processes(tmp_path: Path) -> None:
    code, text = _audit(tmp_path)
    assert code == 0, text


def test_a_wrong_one_gives_one_and_says_it_once(tmp_path: Path) -> None:
    code, text = _audit(tmp_path, "--json", params="torch.nn.Linear(4, 4).parameters()")  # of another model
    assert code == 1, text
    assert json.loads(text[text.index("{") : text.rindex("}") + 1])["findings"]
    assert "ChildFailedError" not in text


def test_a_script_that_fails_gives_three(tmp_path: Path) -> None:
    assert _audit(tmp_path, fails="raise OSError('gone')")[0] == 3

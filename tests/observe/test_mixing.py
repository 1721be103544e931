"""What a program writes into weights behind a step while ZeRO-3 has them empty."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from prepkit.auditing.libraries import LibraryCalls
from prepkit.observe.prepared.mixing import mixes_empty, writes_lost
from tests.audit.by_libraries import engine_of
from tests.support.gang import Gang
from tests.support.launch import launched

WITHIN = "for param in engine.module.parameters():\n                param.data.clamp_(-0.01, 0.01)"
CLAMPED = "for param in engine.module.parameters():\n            param.data.clamp_(-0.01, 0.01)"
PROGRAMS = {
    "clamped": ("", CLAMPED, "clamp_"),
    "named": ("", "for name, one in engine.named_parameters():\n            one.copy_(one.clamp(-1, 1))", "copy_"),
    "one weight": ("", "weight = engine.module.head.weight\n        weight.mul_(0.9)", "mul_"),
    "in its place": ("", "engine.module.head.weight.data.clamp_(-1, 1).mul_(2)", "clamp_"),
    "gathered": (
        "",
        f"with GatheredParameters(engine.parameters(), modifier_rank=0):\n            {WITHIN}",
        "",
    ),
    "gathered to be read": (
        "",
        f"with GatheredParameters(engine.parameters()):\n            {WITHIN}",
        "lost: ",
    ),
    "before the loop": (CLAMPED.replace("    " * 3, "    " * 2), "pass", ""),
    "gradients": ("", "for param in engine.parameters():\n            param.grad.zero_()", ""),
    "others": ("", "other = torch.zeros(3)\n        other.mul_(0.9)", ""),
    "read": ("", "weight = engine.module.head.weight\n        told.append(weight.mean())", ""),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


def told_of(rank: int, world: int, texts: dict[str, str], stage: int, folder: str) -> dict[str, tuple[str, ...]]:
    torch.manual_seed(0)
    model = Net()
    with launched(rank, world):
        engine, *_ = engine_of(model, stage, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found = {}
    for at, (name, text) in enumerate(texts.items()):
        program = Path(folder, f"program-{rank}-{at}.py")
        program.write_text(text)
        found[name] = runpy.run_path(str(program), {"told_now": told_now})["train"](engine)
    return found


def told_now(engine: nn.Module) -> tuple[str, ...]:
    return (*mixes_empty(engine), *(f"lost: {one}" for one in writes_lost(engine)))


def program(before: str, behind: str) -> str:
    return f"""
def train(engine):
    {before or "pass"}
    for _ in range(3):
        told = told_now(engine)
        if told is not None:
            return told
        {behind}
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_still_to_be_written_into_empty_weights_is_told(gang2: Gang, stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    texts = {name: program(before, behind) for name, (before, behind, _) in PROGRAMS.items()}
    for found in gang2.run(told_of, texts, stage, str(tmp_path), timeout=120):
        for name, (_, _, says) in PROGRAMS.items():
            told = found[name]
            assert len(told) == bool(says and stage == 3), (name, told)
            assert all(says in one for one in told)


def test_what_torch_begins_while_it_is_empty_is_told_with_its_line() -> None:
    empty, whole = nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(2))
    empty.ds_tensor = torch.ones(4)  # type: ignore[attr-defined]  # as deepspeed.zero.Init leaves it
    heard = LibraryCalls()
    with heard.on():
        nn.init.zeros_(whole)
        assert heard.facts().begun_empty == ()
        nn.init.zeros_(empty)
    nn.init.ones_(empty)
    assert whole.tolist() == [0, 0]
    ((name, line),) = heard.facts().begun_empty
    assert (name, line.partition(":")[0]) == ("zeros_", "test_mixing.py")

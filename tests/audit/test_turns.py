"""What an audit says of programs by how their loops stand to their schedules, and that right ones hear nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prepkit.observe.prepared.optimizers import end_of_factors
from tests.audit import test_script
from tests.audit.test_script import Auditor

run = test_script.run

HEAD = """import torch
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 4), torch.randn(40, 2))
loader = DataLoader(data, batch_size=4, shuffle=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
EPOCHS = 3
settings = {"epochs": EPOCHS}


def step(x, y):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


"""
COSINE = "scheduler = rates.CosineAnnealingLR(optimizer, {})\n"
IN_STEP = "for epoch in range(EPOCHS):\n    for x, y in loader:\n        step(x, y)\n        {}\n"
BY_PASS = "for epoch in range(EPOCHS):\n    for at, (x, y) in enumerate(loader):\n        step(x, y)\n    {}\n"
IN_PASS = """def train(epoch):
    for x, y in loader:
        step(x, y)


for epoch in range(EPOCHS):
    train(epoch)
    scheduler.step()
"""
OF_ALL = "EPOCHS * len(loader)"
OUTER = """import copy
outer = torch.optim.SGD(model.parameters(), 1.0)
scheduler = rates.LinearLR(outer, 1.0, 0.1, total_iters=EPOCHS)
for epoch in range(EPOCHS):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), 0.1)
    for x, y in loader:
        inner.zero_grad()
        (fast(x) - y).square().mean().backward()
        inner.step()
    for param, new in zip(model.parameters(), fast.parameters()):
        param.grad = param.detach() - new.detach()
    outer.step()
    scheduler.step()
"""
FUNCTION = """import math
total = {}


def factor(at):
    return (at + 1) / 3 if at < 3 else 0.01 + 0.5 * (1 + math.cos(math.pi * min(1.0, (at - 3) / (total - 3))))


scheduler = rates.LambdaLR(optimizer, factor)
"""
PARTS = "parts = [rates.LinearLR(optimizer, 0.1), rates.CosineAnnealingLR(optimizer, 9)]\n"
KEPT = """class Turns:
    def __init__(self, things):
        self.things = things

    def turn(self):
        for one in self.things:
            one.step()


turns = Turns([rates.CosineAnnealingLR(optimizer, EPOCHS)])
"""
OTHERS = """other = torch.nn.Linear(4, 2)
other_scheduler = rates.StepLR(torch.optim.SGD(other.parameters(), 0.1), 5)
"""
PLATEAU = "plateau = rates.ReduceLROnPlateau(optimizer)\n"
AVERAGED = "from torch.optim.swa_utils import SWALR\nswa = SWALR(optimizer, 0.05)\n"
GOT = COSINE.format(3) + "tick = getattr(scheduler, 'step')\n"
ACCUMULATES = """from accelerate import Accelerator
ours = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader, scheduler = ours.prepare(model, optimizer, loader, scheduler)
for epoch in range(EPOCHS):
    for x, y in loader:
        with ours.accumulate(model):
            ours.backward((model(x) - y).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""

WRONG = {
    "forgotten": (COSINE.format(3) + BY_PASS.format("print(scheduler.get_last_lr())"), "schedule-idle"),
    "another's ticked": (COSINE.format(3) + OTHERS + BY_PASS.format("other_scheduler.step()"), "schedule-idle"),
    "plateau forgotten": (PLATEAU + BY_PASS.format("pass"), "schedule-idle"),
    "by pass": (COSINE.format(OF_ALL) + BY_PASS.format("scheduler.step()"), "ticked-by-pass"),
    "by pass, in a function": (COSINE.format(OF_ALL) + IN_PASS, "ticked-by-pass"),
    "by window": (COSINE.format(OF_ALL) + ACCUMULATES, "ticked-by-pass"),
    "by window, of settings": (
        COSINE.format(OF_ALL) + ACCUMULATES.replace("EPOCHS", 'settings["epochs"]'),
        "ticked-by-pass",
    ),
    "by pass, of a function": (FUNCTION.format(OF_ALL) + BY_PASS.format("scheduler.step()"), "ticked-by-pass"),
}
RIGHT = {
    "by step": COSINE.format(OF_ALL) + IN_STEP.format("scheduler.step()"),
    "a function by step": FUNCTION.format(OF_ALL) + IN_STEP.format("scheduler.step()"),
    "a function for passes": FUNCTION.format("EPOCHS + 1") + BY_PASS.format("scheduler.step()"),
    "a power for passes": "scheduler = rates.LambdaLR(optimizer, lambda at: 0.9**at)\n"
    + BY_PASS.format("scheduler.step()"),
    "of an outer loop": OUTER,
    "for passes": COSINE.format("EPOCHS") + BY_PASS.format("scheduler.step()"),
    "for passes, in a function": COSINE.format("EPOCHS") + IN_PASS,
    "kept in a list": KEPT + BY_PASS.format("turns.turn()"),
    "parts in a row": PARTS + "row = rates.SequentialLR(optimizer, parts, [3])\n" + IN_STEP.format("row.step()"),
    "parts chained": PARTS + "chain = rates.ChainedScheduler(parts)\n" + IN_STEP.format("chain.step()"),
    "plateau": PLATEAU + BY_PASS.format("plateau.step(1.0)"),
    "averaged": AVERAGED + BY_PASS.format("swa.step()"),
    "by window": COSINE.format(f"{OF_ALL} // 2") + ACCUMULATES,
    "by a name": GOT + BY_PASS.format("tick()"),
}


def told(run: Auditor, text: str) -> list[str]:
    """Findings above a note, by their ids."""
    code, out, err = run(text, "train.py")
    assert code == 0, out + err
    return [one.split()[1] for one in out.splitlines() if one.startswith(("error ", "warning "))]


@pytest.mark.parametrize("name", WRONG)
def test_a_loop_that_misses_its_schedule_is_named_by_its_rule(run: Auditor, name: str) -> None:
    text, rule = WRONG[name]
    assert told(run, HEAD + text) == [f"run.{rule}"]


@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_that_keeps_to_its_schedule_has_nothing_above_a_note(run: Auditor, name: str) -> None:
    assert told(run, HEAD + RIGHT[name]) == []


def test_a_schedule_that_another_file_ticks_is_not_idle(run: Auditor, tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("def turned(thing):\n    thing.step()\n")
    text = "from helpers import turned\n" + HEAD + COSINE.format("EPOCHS") + BY_PASS.format("turned(scheduler)")
    assert told(run, text) == []


@pytest.mark.parametrize(
    ("factor", "end"),
    [
        (lambda at: max(0.0, 1 - at / 40), 40),
        (lambda at: max(0.1, 0.5 * (1 + math.cos(math.pi * min(1.0, at / 100)))), 80),
        (lambda at: min(1.0, at / 10), None),
        (lambda at: 1 / (1 + at), None),
        (lambda at: 0.5**at, None),
        (lambda at: [1.0, 0.5, 0.1][at], None),
    ],
    ids=["line", "cosine", "warm-up alone", "no end", "rounded to nothing", "knows its ticks alone"],
)
def test_the_end_of_a_function_is_where_it_stays_small(factor: Callable[[int], float], end: int | None) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    assert end_of_factors(torch.optim.lr_scheduler.LambdaLR(optimizer, factor)) == end

"""A model that trains while it is evaluated, what is kept though it is worse, and transforms that are fitted again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.test_script import Auditor
from tests.support.fork_server import ForkServers


@pytest.fixture
def run(fork_servers: ForkServers, tmp_path: Path) -> Auditor:
    return Auditor(fork_servers, tmp_path)


EVALUATED = """import torch
from torch import nn
from torch.nn import functional as fn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(48, 6)
y = (x[:, 0] > 0).long()
train_loader = DataLoader(TensorDataset(x[:32], y[:32]), batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(x[32:], y[32:]), batch_size=8)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = ReduceLROnPlateau(optimizer, patience=1)
class Stopper:
    def __init__(self):
        self.best = None
    def __call__(self, measured):
        if self.best is None or measured < self.best:
            self.best = measured
def correct(out, b):
    return int((out.argmax(1) == b).sum())
@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    return sum(correct(model(a), b) for a, b in loader) / 16
stopper = Stopper()
best = 0.0
for epoch in range(3):
    model.train()
    for a, b in train_loader:
        optimizer.zero_grad()
        fn.cross_entropy(model(a), b).backward()
        optimizer.step()
    val_acc = evaluate(model, val_loader)
    val_loss = 1 - val_acc
    scheduler.step(val_loss)
    stopper(val_loss)
    if val_acc > best:
        best = val_acc
"""


def changed(*pairs: tuple[str, str]) -> str:
    text = EVALUATED
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


INLINE = """    with torch.no_grad():
        val_acc = sum(correct(model(a), b) for a, b in val_loader) / 16
"""
IN_A_LOOP = """    val_acc = 0
    for a, b in val_loader:
        val_acc += correct(model(a), b) / 16
"""
CALL = "    val_acc = evaluate(model, val_loader)\n"
SPREAD = """    model.train()
    return sum(correct(model(a), b) for a, b in loader) / 16"""
SEVERAL = """    total = 0
    for a, b in loader:
        for _ in range(4):
            total += correct(model(a), b)
    return total / 64"""
ONCE = """    return sum(correct(model(a), b) for a, b in loader) / 16"""
MADE = """    val_acc = 0.5
    with torch.no_grad():
        made = model(torch.randn(4, 6))
"""
LEARNED_FROM = """    val_acc = 0.5
    for a, b in val_loader:
        optimizer.zero_grad()
        fn.cross_entropy(model(a), b).backward()
        optimizer.step()
"""
FIRST = ("best = 0.0", "best_loss = -9.0")
FORGETS = ("    model.eval()\n", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (changed(FORGETS), "evaluated-training at train.py:24: In step 4: It evaluates Sequential in training mode"),
        (changed((CALL, INLINE)), "evaluated-training at train.py:35"),
        (changed((CALL, IN_A_LOOP)), "evaluated-training at train.py:36"),
        (changed((CALL, "    model.eval()\n" + IN_A_LOOP)), ""),
        (changed(FORGETS, ("nn.BatchNorm1d(8), nn.Dropout(0.2), ", "nn.ReLU(), ")), ""),
        (changed(FORGETS, (ONCE, SPREAD)), ""),
        (changed(FORGETS, (ONCE, SEVERAL)), ""),
        (changed((CALL, MADE)), ""),
        (changed((CALL, LEARNED_FROM)), ""),
        (EVALUATED, ""),
        (
            changed(("val_acc > best", "val_acc < best")),
            "worst-kept at train.py:38: `val_acc < best` takes lower values",
        ),
        (
            changed(("best = 0.0", "best = float('inf')")),
            "worst-kept at train.py:38: `val_acc > best` begins with float",
        ),
        (changed(("step(val_loss)", "step(val_acc)")), "worst-kept at train.py:36: `ReduceLROnPlateau.step(val_acc)`"),
        (changed(("step(val_loss)", "step(val_acc)"), ("patience=1", "mode='max'")), ""),
        (changed(("measured", "val_loss"), ("< self", "> self")), "worst-kept at train.py:18: `val_loss > self.best`"),
        (changed(("measured", "val_loss")), ""),
        (changed(("measured", "neg_loss"), ("< self", "> self")), ""),
        (changed(("val_acc > best", "-val_loss > best_loss"), ("best = val_acc", "best_loss = -val_loss"), FIRST), ""),
        (changed(("measured", "loss"), ("< self", "> self"), ("self.best", "self.worst")), ""),
    ],
)
def test_what_a_program_makes_of_its_evaluation(run: Auditor, text: str, said: str) -> None:
    code, out, err = run(text, "--steps", "6", "train.py")
    assert code == 0, (out, err)
    assert (f"warning run.{said}" in out and out.count("warning") == 1) if said else ("warning" not in out), out


CHOOSES = """import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
class EarlyStopping:
    def __init__(self, **given):
        pass
TrainingArguments = ModelCheckpoint = EarlyStopping
class StandardScaler:
    def fit_transform(self, x):
        return x
    transform = fit_transform
scaler = StandardScaler()
train, x_test = torch.randn(3, 4), torch.randn(3, 4)
x = scaler.fit_transform(train)
kept = LINE
for _ in range(2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("EarlyStopping(monitor='val_acc', patience=2)", "takes lower values for better, and of `val_acc` the higher"),
        ("EarlyStopping(monitor='val_acc', mode='max')", ""),
        ("EarlyStopping(monitor='val_loss')", ""),
        (
            "ModelCheckpoint(monitor='val/wer', mode='max')",
            "takes higher values for better, and of `val/wer` the lower",
        ),
        ("ModelCheckpoint(monitor='val_score', mode='max')", ""),
        ("TrainingArguments(metric_for_best_model='wer')", "takes higher values for better, and of `wer` the lower"),
        ("TrainingArguments(metric_for_best_model='wer', greater_is_better=False)", ""),
        ("TrainingArguments(metric_for_best_model='eval_loss')", ""),
        ("TrainingArguments(metric_for_best_model='f1', greater_is_better=False)", "takes lower values for better"),
        ("scaler.fit_transform(x_test)", "`scaler.fit_transform(x_test)` fits once more, on what validates"),
        ("scaler.transform(x_test)", ""),
    ],
)
def test_what_the_text_of_a_program_chooses_by(run: Auditor, line: str, said: str) -> None:
    code, out, err = run(CHOOSES.replace("LINE", line), "train.py")
    assert code == 0, (out, err)
    assert (said in out and out.count("warning") == 1) if said else ("warning" not in out), out

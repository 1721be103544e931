"""Scripts that ask libraries for what does not come, by their whole text, and their right twins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ADAPTED = """import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

folder = "adapter"
get_peft_model(body(), LoraConfig(r=2, target_modules=["0"])).save_pretrained(folder)
loaded = PeftModel.from_pretrained(body(), folder{how})
model = nn.Sequential(loaded, nn.Linear(8, 4)).train()
{then}
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-3)
for _ in range(3):
    nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.arange(6) % 4).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

APART = """head = nn.Linear(8, 4)
model = lambda x: head(loaded.train()(x))
model.parameters = lambda: [*loaded.parameters(), *head.parameters()]"""


@pytest.mark.parametrize(
    ("how", "then", "told"),
    [
        ("", "", True),
        ("", APART, True),
        (", is_trainable=True", "", False),
        ("", "loaded.requires_grad_(False)", False),
    ],
    ids=["as loaded", "apart from its head", "to be trained", "frozen on purpose"],
)
def test_adapters_that_were_loaded_frozen_are_told(tmp_path: Path, how: str, then: str, *, told: bool) -> None:
    """In a process of its own, where no file of a test is a part of the program."""
    pytest.importorskip("peft")
    script = tmp_path / "train.py"
    script.write_text(ADAPTED.format(how=how, then=then), encoding="utf-8")
    command = [sys.executable, "-c", "from prepkit.cli import main; main()", "audit", str(script)]
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False).stdout
    assert ("warning run.adapters-frozen" in out, "audit of" in out) == (told, True), out

"""A loss that the model computes in its forward: in which dtype, under which engine, and what the plan says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prepkit as pk
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang

TOLD = "a loss that forward computes is in bfloat16, unless under torch.autocast"


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(512, 64), nn.Linear(64, 512)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.words(tokens))
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def losses(rank: int, world: int, engine: Any) -> tuple[float, float, float, bool]:
    """The same loss computed inside, inside under autocast, and outside; and whether the plan tells of it."""
    del world
    if isinstance(engine, pk.DeepSpeed):
        lean()
    torch.manual_seed(0)
    plan = pk.build_plan(pk.Config(engine=engine, precision=pk.BF16(), optimizer=pk.optim.AdamW(lr=1e-3)), WithLoss())
    ready = pk.apply(plan)
    torch.manual_seed(rank)
    tokens, labels = torch.randint(512, (2, 2, 16))
    with torch.no_grad():
        inside = ready.model(tokens, labels)
        with torch.autocast("cpu", torch.bfloat16):
            cast = ready.model(tokens, labels)
        outside = nn.functional.cross_entropy(ready.model(tokens).flatten(0, 1), labels.flatten())
    assert inside.dtype == cast.dtype == outside.dtype == torch.float32
    return float(inside), float(cast), float(outside), any(TOLD in step.reason for step in plan.steps)


@pytest.mark.parametrize(
    ("engine", "rounded"),
    [(pk.DDP(), False), (pk.FSDP1(), False), (pk.FSDP2(), True), (pk.DeepSpeed(stage=1, micro_batch=2), True)],
    ids=["ddp", "fsdp1", "fsdp2", "zero1"],
)
def test_a_loss_of_the_forward_is_as_the_plan_says_and_whole_under_autocast(
    gang2: Gang, engine: Any, rounded: bool
) -> None:
    for inside, cast, outside, told in gang2.run(losses, engine, timeout=90):
        assert cast == pytest.approx(outside, abs=1e-3)
        assert told is rounded
        assert (inside == float(torch.tensor(inside, dtype=torch.bfloat16))) is rounded
        assert (inside == pytest.approx(outside, abs=1e-3)) is not rounded

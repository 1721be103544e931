"""That ``make drawn`` would see a config that fails, and one that learns otherwise."""

from __future__ import annotations

import torch
from attrs import evolve

from prepkit import config as c
from tests.support.drawn_training import Case, Sizes, cases, judged
from tests.support.gang import Gang

SIZES = Sizes(blocks=2, width=4, vocab=8, tied=True, dtype=torch.float32, frozen=("norm.weight",))
CASE = Case(
    cfg=c.Config(engine=c.FSDP2(), accumulation=2, clip=c.ClipNorm(0.5), optimizer=c.AdamW(lr=0.05)),
    sizes=SIZES,
    given=False,
    parts=1,
)


def test_what_trains_as_by_hand_is_right_and_everything_else_is_told(gang2: Gang) -> None:
    assert judged(gang2, CASE) == ""
    doubled = judged(gang2, evolve(CASE, parts=2))  # both ranks read the same, as tensor ranks do: still right
    assert doubled == ""
    assert "nothing-trainable" in judged(gang2, evolve(CASE, sizes=evolve(SIZES, frozen=_everything())))
    assert "apart" in judged(gang2, evolve(CASE, cfg=evolve(CASE.cfg, precision=c.BF16())), nearest=0.0)


def _everything() -> tuple[str, ...]:
    layers = tuple(f"layers.{index}.{name}.weight" for index in range(2) for name in ("attn", "mlp"))
    return ("embed.weight", *layers, "norm.weight")


def test_drawn_cases_are_many_and_differ() -> None:
    found = cases(2, 40, 0)
    assert len(found) == len({str(case) for case in found}) > 3

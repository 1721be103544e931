"""What the calls of the loop cannot take is refused before anything is done."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import prepkit as pk


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (lambda ready: ready.export(None), TypeError, r"ready\.export\(None\): give the path of a folder"),
        (lambda ready: ready.export(b"out"), TypeError, "give the path of a folder"),
        (lambda ready: ready.export(""), ValueError, "names no folder"),
        (lambda ready: ready.save("x", keep=0), ValueError, "keep=0 is too few; give 1 or more"),
        (lambda ready: ready.save("x", keep="3"), TypeError, "keep='3' is no whole number"),
        (lambda ready: ready.loop.passes.set_epoch("1"), TypeError, "epoch='1' is no whole number"),
        (lambda ready: ready.loop.passes.set_epoch(-1), ValueError, "epoch=-1 is too few"),
        (lambda ready: pk.Ema(ready, "0.9"), ValueError, "a decay of '0.9' is no average"),
        (lambda ready: ready.step(3), TypeError, r"ready\.step\(3\): a step takes nothing, or a function"),
        (lambda ready: ready.ranks.progress(3), TypeError, r"ready\.ranks\.progress\(3\): give what is iterated"),
    ],
)
def test_what_a_call_cannot_take_is_refused_by_name(call: Any, kind: type[Exception], told: str) -> None:
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1)), nn.Linear(2, 2)))
    with pytest.raises(kind, match=told):
        call(ready)

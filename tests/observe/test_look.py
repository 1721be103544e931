"""One look at prepared objects: what it gathers is what was asked for, and one exchange carries all of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import prepkit as pk
from prepkit.facts.run import RunFacts
from prepkit.objects.names import sites
from prepkit.observe.prepared.look import BEFORE_A_STEP, look
from prepkit.observe.prepared.modules import dropping, drops
from prepkit.rules.rule import Need
from tests.audit.test_rules import GATHERED
from tests.support.gang import Gang


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))


@pytest.mark.parametrize("need", sorted(BEFORE_A_STEP))
def test_a_look_without_a_need_leaves_what_it_gathers_at_the_default(need: Need) -> None:
    given = model()
    optimizer = torch.optim.AdamW(given.parameters())
    given[0].weight.data.fill_(float("nan"))
    seen = look(given, optimizer, needs=BEFORE_A_STEP - {need})
    assert {name: getattr(seen, name) for name in GATHERED[need]} == {
        name: getattr(RunFacts(), name) for name in GATHERED[need]
    }
    everything = look(given, optimizer)
    assert everything.nan
    assert everything.optimizers
    if need is Need.STATE:
        assert seen.optimizers


def test_attention_and_recurrent_layers_drop_as_the_loop_and_the_audit_see_it() -> None:
    given = nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(4, 4, num_layers=2, dropout=0.2))
    assert dropping(sites(given)) == ("0", "1")
    assert drops(given) == look(given).drops == 2
    assert drops(given.eval()) == look(given).drops == 0


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "reduce", "gather")


def collectives(rank: int, world: int) -> list[int]:
    """Collectives of prepkit's in each of ten windows, those of DDP's own reducer aside."""
    del rank, world
    made: Counter[str] = Counter()

    def counted(name: str) -> Any:
        does = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made[name] += 1
            return does(*args, **kwargs)

        return call

    torch.manual_seed(0)
    ready: Any = pk.apply(pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW()), nn.Linear(4, 4)))
    kept = {name: getattr(dist, name) for name in COLLECTIVES}
    found = []
    try:
        for name in COLLECTIVES:
            setattr(dist, name, counted(name))
        for _ in range(10):
            made.clear()
            ready.backward(ready.model(torch.ones(2, 4)).square().mean())
            ready.step()
            found.append(made.total())
    finally:
        for name, does in kept.items():
            setattr(dist, name, does)
    return found


def test_a_step_makes_one_exchange_where_it_is_due_and_none_elsewhere(gang2: Gang) -> None:
    agreed = 1  # at the first loss of all: whether the ranks weigh their losses
    for found in gang2.run(collectives, timeout=60):
        assert found == [1 + agreed, 1, 0, 1, 0, 0, 0, 1, 0, 0]

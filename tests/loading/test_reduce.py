"""``ready.ranks.reduce`` and ``ready.ranks.gather``: numbers of all ranks for a script to use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import prepkit as pk
from prepkit.config import Config
from prepkit.findings import RunRefused
from tests.support.gang import Gang

PLAN = pk.tp.TPPlan((pk.tp.TPLayer("0", "colwise"), pk.tp.TPLayer("1", "rowwise", output_layout="replicate")))


def prepared(engine: Any, mesh: pk.Mesh | None = None) -> Any:
    cfg = Config(engine=engine, mesh=mesh, optimizer=pk.optim.SGD(lr=0.1), tp_plan=PLAN)
    return pk.apply(pk.build_plan(cfg, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))


def numbers(rank: int, world: int, tensor: int = 1) -> dict[str, Any]:
    """What each call gives where data rank ``r`` has ``r + 1``."""
    mesh = pk.Mesh(shard=2, tensor=2) if tensor > 1 else None
    ready = prepared(pk.FSDP2() if tensor > 1 else pk.DDP(), mesh)
    mine = rank // tensor + 1
    value = {"loss": torch.tensor([float(mine), 0.5]), "seen": (mine, [torch.tensor(mine)]), "rate": mine / 4}
    got = {how: ready.ranks.reduce(value, how) for how in ("mean", "sum", "max", "min")}
    got["default"] = ready.ranks.reduce(float(mine))
    got["wide"] = ready.ranks.reduce(torch.tensor(mine, dtype=torch.bfloat16), "sum")
    got["flag"] = (ready.ranks.reduce(torch.tensor(mine == 1), "sum"), ready.ranks.reduce(mine == 1, "max"))
    got["gather"] = ready.ranks.gather({"at": mine, "rows": torch.arange(mine)})
    if mesh is None:
        return got
    sharded = distribute_tensor(torch.arange(4.0), next(ready.model.parameters()).device_mesh)
    return got | {"sharded": ready.ranks.reduce(sharded, "mean").tolist()}


@pytest.mark.parametrize("tensor", [1, 2], ids=["ddp", "tensor"])
def test_numbers_are_those_of_the_data_ranks_and_tensor_ranks_count_once(gang2: Gang, gang4: Gang, tensor: int) -> None:
    for got in (gang4 if tensor > 1 else gang2).run(numbers, tensor, timeout=60):
        for how, number in (("sum", 3), ("max", 2), ("min", 1)):
            of = got[how]
            assert of["loss"].tolist() == [float(number), 1.0 if how == "sum" else 0.5]
            assert of["seen"][0] == number
            assert isinstance(of["seen"][0], int)
            assert (of["seen"][1][0].item(), of["seen"][1][0].dtype) == (number, torch.int64)
            assert of["rate"] == number / 4
        assert got["mean"]["loss"].tolist() == [1.5, 0.5]
        assert got["mean"]["seen"] == (1.5, [torch.tensor(1.5)])
        assert got["default"] == 1.5
        assert (got["wide"].item(), got["wide"].dtype) == (3.0, torch.bfloat16)
        assert (got["flag"][0].item(), got["flag"][1]) == (1, 1)
        assert [item["at"] for item in got["gather"]] == [1, 2]
        assert [item["rows"].tolist() for item in got["gather"]] == [[0], [0, 1]]
        assert got.get("sharded", [0.0, 1.0, 2.0, 3.0]) == [0.0, 1.0, 2.0, 3.0]


def test_one_process_has_its_own_numbers() -> None:
    ready = prepared(pk.Single())
    assert ready.ranks.reduce({"a": 3, "b": torch.tensor([2.0])}, "sum") == {"a": 3, "b": torch.tensor([2.0])}
    assert ready.ranks.reduce(3) == 3.0
    assert ready.ranks.reduce({}) == {}
    assert ready.ranks.gather("x") == ["x"]
    loss = torch.tensor(2.0, requires_grad=True)
    assert not ready.ranks.reduce(loss).requires_grad


@pytest.mark.parametrize(
    ("value", "how", "error", "text"),
    [
        (1.0, "average", ValueError, "how='average': write one of mean, sum, max, min"),
        ({"a": "x"}, "mean", TypeError, "takes tensors and numbers, nested or not, and not 'x'"),
        (torch.tensor(1j), "mean", TypeError, "takes tensors and numbers"),
        (None, "sum", TypeError, "takes tensors and numbers, nested or not, and not None"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, how: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        prepared(pk.Single()).ranks.reduce(value, how)


def differing(rank: int, world: int) -> list[str]:
    ready = prepared(pk.DDP())
    texts = []
    for mine in ({"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 2.0}), (torch.ones(2), torch.ones(3)), (1.0, torch.ones(())):
        with pytest.raises(RunRefused, match="different structure, shape or dtype") as refused:
            ready.ranks.reduce(mine[rank])
        texts.append(str(refused.value))
    return [*texts, str(ready.ranks.reduce(rank, "sum"))]


def test_ranks_that_do_not_mean_the_same_are_told_so_on_all_of_them_and_nobody_waits(gang2: Gang) -> None:
    """Keys in another order would be added crosswise."""
    for texts in gang2.run(differing, timeout=40):
        assert texts[-1] == "1"


def unlike(rank: int, world: int) -> tuple[Any, bool]:
    """A sum where one rank has met no batch yet, and whether another ``how`` on one rank is told."""
    del world
    ready = prepared(pk.DDP())
    total = ready.ranks.reduce(1 if rank else 1.5, "sum")
    with pytest.raises(RunRefused, match="or another how"):
        ready.ranks.reduce(rank + 1, "sum" if rank else "max")
    return total, True


def test_a_rank_that_gives_a_whole_number_gets_what_the_others_get(gang2: Gang) -> None:
    assert gang2.run(unlike, timeout=40) == [(2.5, True)] * 2


def cannot(rank: int, world: int) -> list[str]:
    """What each rank is told where one of them gives what cannot travel; then both go on."""
    del world
    ready = prepared(pk.DDP())
    texts = []
    for mine in (None, "x", 2**52 + 1, torch.tensor(2**53)):
        with pytest.raises((TypeError, ValueError, RunRefused)) as refused:
            ready.ranks.reduce(mine if rank else 1)
        texts.append(str(refused.value))
    with pytest.raises(TypeError) as unsent:
        ready.ranks.gather((lambda: 0) if rank else 1)
    return [*texts, str(unsent.value), str(ready.ranks.reduce(rank, "sum")), str(ready.ranks.reduce(2**51, "sum"))]


def test_what_one_rank_cannot_give_is_told_on_every_rank_and_both_go_on(gang2: Gang) -> None:
    other, own = gang2.run(cannot, timeout=40)
    assert all("different structure, shape or dtype" in text for text in other[:4])
    assert "and not None" in own[0]
    assert "and not 'x'" in own[1]
    assert all("needs more than the 53 bits" in text for text in own[2:4])
    assert other[4] == own[4]
    assert other[4].startswith("what rank 1 gives ready.ranks.gather cannot be sent: ")
    assert other[5:] == own[5:] == ["1", str(2**52)]

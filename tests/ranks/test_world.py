"""``world()``: who this process is, and what the ranks answer together, in a group, alone and under the fake group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.ranks.world import Ranks, ranks_of, world
from tests.support.gang import Gang


def answers(rank: int, group_size: int) -> dict[str, Any]:
    ranks = world()
    values = torch.tensor([float(rank), 3.0, -float(rank)])
    before = values.clone()
    least, most = ranks.spread(values)
    found = {
        "who": (ranks.rank, ranks.size, ranks.running, ranks.carries_data, ranks.is_first),
        "same": (ranks.same(("plan", 1)), ranks.same(("plan", rank)), ranks.same(("plan", min(rank, 1)))),
        "gather": ranks.gather({"rank": rank}),
        "first": ranks.from_first(f"from {rank}"),
        "last": ranks.sent_by(group_size - 1, f"from {rank}"),
        "worst": ranks.worst(values).tolist(),
        "least": ranks.least(values).tolist(),
        "spread": (least.tolist(), most.tolist()),
        "flags": ranks.worst(torch.tensor([rank == 1, False])).tolist(),
        "total": ranks.total(torch.tensor([rank, 1])).tolist(),
    }
    ranks.meet()
    assert torch.equal(values, before), "what a rank gives stays as it was"
    return found


def test_every_rank_of_a_group_gets_the_same_answers(gang2: Gang) -> None:
    of_zero, of_one = gang2.run(answers)
    assert of_zero.pop("who") == (0, 2, True, True, True)
    assert of_one.pop("who") == (1, 2, True, True, False)
    assert of_zero == of_one
    assert of_zero == {
        "same": (True, False, False),
        "gather": [{"rank": 0}, {"rank": 1}],
        "first": "from 0",
        "last": "from 1",
        "worst": [1.0, 3.0, 0.0],
        "least": [0.0, 3.0, -1.0],
        "spread": ([0.0, 3.0, -1.0], [1.0, 3.0, 0.0]),
        "flags": [True, False],
        "total": [1, 2],
    }


def in_a_subgroup(rank: int, group_size: int) -> list[Any]:
    """Ranks 2 and 3 of four talk to each other; the first of them is rank 0 of the subgroup."""
    del group_size
    group = dist.new_group([2, 3])
    if rank < 2:
        return []
    ranks = ranks_of(group)
    total = ranks.total(torch.tensor(rank)).item()
    return [ranks.rank, ranks.size, ranks.gather(rank), ranks.from_first(rank), ranks.sent_by(1, rank), total]


def test_a_subgroup_asks_its_own_ranks_and_counts_them_from_0(gang4: Gang) -> None:
    assert gang4.run(in_a_subgroup)[2:] == [[0, 2, [2, 3], 2, 3, 5], [1, 2, [2, 3], 2, 3, 5]]


def asked_alone() -> list[Any]:
    ranks, values = world(), torch.tensor([2.0, -1.0])
    ranks.meet()
    asked = [ranks.worst(values), ranks.least(values), *ranks.spread(values)]
    assert all(torch.equal(one, values) and one is not values for one in asked)
    asked[0].zero_()
    assert values.tolist() == [2.0, -1.0], "the answer is a tensor of its own"
    return [ranks.same(object()), ranks.gather("mine"), ranks.from_first("mine"), ranks.total(values).tolist()]


def test_a_process_without_a_group_answers_itself() -> None:
    assert world() == Ranks(rank=0, size=1, backend="", group=None)
    assert not world().running
    assert not world().carries_data
    assert asked_alone() == [True, ["mine"], "mine", [2.0, -1.0]]
    assert world().wire() == torch.device("cpu")
    assert world().wire(torch.device("meta")) == torch.device("meta"), "nothing travels, so nothing moves"


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_group_of_one_runs_and_has_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "barrier"):
        monkeypatch.setattr(dist, name, None)  # a call would raise
    assert world().running
    assert not world().carries_data
    assert asked_alone() == [True, ["mine"], "mine", [2.0, -1.0]]


@pytest.fixture
def fake() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake")
def test_ranks_of_the_fake_group_count_as_holding_what_this_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "barrier"):
        monkeypatch.setattr(dist, name, None)
    ranks = world()
    assert (ranks.rank, ranks.size, ranks.running, ranks.carries_data, ranks.is_first) == (3, 8, True, False, False)
    assert asked_alone() == [True, ["mine"] * 8, "mine", [16.0, -8.0]]


@pytest.mark.parametrize(
    ("backend", "near", "wire"),
    [
        ("cpu:gloo,cuda:gloo", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:gloo", None, "cpu"),
        ("cpu:gloo", "mps", "cpu"),
        ("cuda:nccl", "cpu", "cuda"),
        ("cuda:nccl", None, "cuda"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:3", "cuda:3"),
    ],
)
def test_tensors_travel_where_they_are_if_the_backend_serves_it(backend: str, near: str | None, wire: str) -> None:
    asked = Ranks(size=2, backend=backend).wire(None if near is None else torch.device(near))
    assert asked == torch.device(wire)

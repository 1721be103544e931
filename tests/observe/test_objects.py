"""Optimizer, scheduler and loaders as facts, and what is refused because it is none of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from prepkit.facts import Env, LoaderFacts, OptimizerFacts, SchedulerFacts
from prepkit.observe import observe
from tests.objects.test_names import Net

DATA = TensorDataset(torch.arange(10))
CLASS = "the class {} itself, not an instance of it".format


def optimizer_facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerFacts:
    found = observe(model, optimizer=optimizer, env=Env()).facts.optimizer
    assert found is not None
    return found


def loader_facts(loader: Any) -> LoaderFacts:
    return observe(nn.Linear(1, 1), loaders=(loader,), env=Env()).facts.loaders[0]


# --- optimizer -----------------------------------------------------------------------------------------------------


def test_every_slot_names_what_it_holds_by_identity() -> None:
    net, stranger = Net(), nn.Parameter(torch.zeros(2))
    groups = [
        {"params": [net.head.weight, net.layers[1].up.bias], "lr": 0.5},
        {"params": [stranger, net.layers[0].down.weight]},
    ]
    found = optimizer_facts(net, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    assert (found.name, found.module) == ("SGD", "torch.optim.sgd")
    assert found.groups[0].slots == ("embed.weight", "layers.1.up.bias"), "a tied parameter has its first name"
    assert found.groups[1].slots == (None, "layers.0.down.weight")


def test_equal_values_are_not_the_same_parameter() -> None:
    net, twin = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    twin.load_state_dict(net.state_dict())
    assert optimizer_facts(net, torch.optim.SGD(twin.parameters(), lr=0.1)).groups[0].slots == (None,)


def test_options_are_the_scalars_sorted_and_plain() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5), betas=(0.8, 0.9))
    optimizer.param_groups[0]["note"] = "slow"
    options = dict(optimizer_facts(net, optimizer).groups[0].options)
    assert list(options) == sorted(options)
    assert options["lr"] == 0.5
    assert isinstance(options["lr"], float)
    assert (options["note"], options["foreach"], options["amsgrad"]) == ("slow", None, False)
    assert "betas" not in options
    assert "params" not in options


def test_parameters_with_state_are_named_in_the_order_of_the_model() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(reversed(list(net.parameters())))
    assert optimizer_facts(net, optimizer).stateful == ()
    net[1](torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.state[net[0].bias] = {}
    assert optimizer_facts(net, optimizer).stateful == ("1.weight", "1.bias")


def test_a_list_of_its_own_is_found_however_it_is_held() -> None:
    class Hoarder(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.shadows = {"first": [self.param_groups[0]["params"][0]]}

    class Averaging(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.average = [nn.Parameter(p.detach().clone()) for p in self.param_groups[0]["params"]]

    net = nn.Linear(2, 2)
    assert optimizer_facts(net, torch.optim.LBFGS(net.parameters())).keeps_own_list
    assert optimizer_facts(net, Hoarder(net.parameters())).keeps_own_list
    assert optimizer_facts(net, Averaging(net.parameters())).keeps_own_list


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor])
def test_ordinary_optimizers_keep_no_list_of_their_own(kind: Any) -> None:
    net = nn.Linear(2, 2)
    assert not optimizer_facts(net, kind(net.parameters(), lr=0.1)).keeps_own_list


def test_slots_of_a_wrapped_model_have_canonical_names() -> None:
    net = torch.compile(nn.Linear(2, 2))
    assert optimizer_facts(net, torch.optim.SGD(net.parameters(), lr=0.1)).groups[0].slots == ("weight", "bias")


# --- scheduler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda o: LambdaLR(o, lambda _: 1.0), ReduceLROnPlateau])
def test_a_scheduler_drives_the_optimizer_that_it_holds_and_no_other(make: Any) -> None:
    net = nn.Linear(2, 2)
    own, other = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    scheduler = make(own)
    name = type(scheduler).__name__
    for optimizer, drives in ((own, True), (other, False), (None, False)):
        found = observe(net, optimizer=optimizer, scheduler=scheduler, env=Env()).facts.scheduler
        metric = name == "ReduceLROnPlateau"
        assert found == SchedulerFacts(name=name, drives_optimizer=drives, needs_metric=metric)


# --- loaders -------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("observing draws nothing")


class Sharded(Stream):
    num_shards, _distributed = 6, (0, 2)

    def shard(self, num_shards: int, index: int) -> None:
        raise AssertionError("observing divides nothing")


class Eager(DataLoader[int]):
    def __iter__(self) -> Any:
        raise AssertionError("observing draws nothing")


class Unsized(Dataset[int]):
    def __len__(self) -> int:
        raise NotImplementedError


class Own(SequentialSampler):
    pass


class Pairs(BatchSampler):
    pass


LOADERS = [
    (DataLoader(DATA, batch_size=4), LoaderFacts(batch_size=4, length=10, sampler="sequential")),
    (
        DataLoader(DATA, 2, shuffle=True, drop_last=True),
        LoaderFacts(batch_size=2, length=10, sampler="random", drop_last=True),
    ),
    (
        DataLoader(DATA, 2, sampler=DistributedSampler(DATA, num_replicas=2, rank=1)),
        LoaderFacts(batch_size=2, length=10, sampler="distributed"),
    ),
    (DataLoader(DATA, 2, sampler=Own(DATA)), LoaderFacts(batch_size=2, length=10, sampler="custom")),
    (DataLoader(DATA, 2, sampler=SubsetRandomSampler([1])), LoaderFacts(batch_size=2, length=1, sampler="custom")),
    (
        DataLoader(DATA, 2, sampler=RandomSampler(DATA, replacement=True)),
        LoaderFacts(batch_size=2, length=10, sampler="custom"),
    ),
    (
        DataLoader(DATA, 2, sampler=RandomSampler(DATA, num_samples=3)),
        LoaderFacts(batch_size=2, length=3, sampler="custom"),
    ),
    (
        DataLoader(DATA, batch_sampler=Pairs(SequentialSampler(DATA), 2, drop_last=False)),
        LoaderFacts(batch_size=None, length=10, sampler="sequential", custom_batches=True, batches=5),
    ),
    (
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, drop_last=True), num_workers=2),
        LoaderFacts(batch_size=3, length=10, sampler="random", drop_last=True, workers=2),
    ),
    (
        DataLoader(DATA, 2, num_workers=1, in_order=False),
        LoaderFacts(batch_size=2, length=10, sampler="sequential", workers=1, in_order=False),
    ),
    (
        Eager(DATA, 4, pin_memory=True),
        LoaderFacts(name="Eager", batch_size=4, length=10, sampler="sequential", own_iteration=True, pin_memory=True),
    ),
    (
        DataLoader(Sharded(), 3),
        LoaderFacts(batch_size=3, length=None, sampler="sequential", iterable=True, shards=6, divided=True),
    ),
    (DataLoader(DATA, batch_size=None), LoaderFacts(batch_size=None, length=10, sampler="sequential")),
    (DataLoader(Stream(), 3), LoaderFacts(batch_size=3, length=None, sampler="sequential", iterable=True)),
    (DataLoader(Unsized(), 3, sampler=[1]), LoaderFacts(batch_size=3, length=1, sampler="custom")),
    (
        [torch.zeros(1)],
        LoaderFacts(batch_size=None, length=None, sampler="custom", custom_batches=True, name="list", foreign=True),
    ),
]


@pytest.mark.parametrize(("loader", "expected"), LOADERS)
def test_a_loader_is_described_without_drawing_from_it(loader: Any, expected: LoaderFacts) -> None:
    assert loader_facts(loader) == expected


# --- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": nn.Linear}, f"model is {CLASS('Linear')}; pass a torch.nn.Module, which may be on the meta device"),
        ({"model": "gpt2"}, "model is 'gpt2' (str); pass a torch.nn.Module, which may be on the meta device"),
        (
            {"optimizer": 0.1},
            "optimizer is 0.1 (float); pass a torch.optim.Optimizer over the model's parameters",
        ),
        ({"scheduler": LambdaLR}, f"scheduler is {CLASS('LambdaLR')}; pass one of torch's, or any object with step()"),
        ({"scheduler": 3}, "scheduler is 3 (int); pass one of torch's, or any object with step()"),
        ({"loaders": [5]}, "loaders[0] is 5 (int); pass a torch.utils.data.DataLoader"),
    ],
)
def test_an_object_of_the_wrong_kind_is_named_with_what_to_pass(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as said:
        observe(**{"model": nn.Linear(1, 1), "env": Env(), **given})
    assert str(said.value) == text


def test_a_single_loader_is_not_taken_for_a_sequence_of_loaders() -> None:
    with pytest.raises(TypeError, match=r"pass a tuple of loaders: loaders=\(loader,\)"):
        observe(nn.Linear(1, 1), loaders=DataLoader(DATA), env=Env())  # type: ignore[arg-type]


def test_the_state_that_adagrad_begins_with_is_told_from_that_of_a_step() -> None:
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters())
    fresh = optimizer_facts(model, optimizer)
    assert fresh.stateful
    assert fresh.initial_state
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    optimizer.step()
    stepped = optimizer_facts(model, optimizer)
    assert stepped.stateful
    assert not stepped.initial_state
    assert not optimizer_facts(model, torch.optim.AdamW(model.parameters())).initial_state, "which has none"

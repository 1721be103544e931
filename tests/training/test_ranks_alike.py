"""Ranks that no longer train alike, or train on what is no number, hear of it in one of the first windows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit.findings import RunRefused
from tests.support.gang import Gang


def prepared(engine: Any, **given: Any) -> Any:
    torch.manual_seed(0)
    return pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.AdamW(lr=0.1)), nn.Linear(4, 4), **given))


def window(ready: Any, value: float = 1.0) -> None:
    ready.backward(ready.model(torch.full((2, 4), value)).square().mean())
    ready.step()


def own_rates(rank: int, world: int, engine: Any) -> tuple[str, bool]:
    """What is raised when each rank has set a rate of its own, and whether the step was taken."""
    del world
    ready = prepared(engine)
    for _ in range(3):
        window(ready)
    ready.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    try:
        window(ready)
    except RunRefused as error:
        return str(error), ready.steps == 3
    return "", False


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2()], ids=["ddp", "fsdp2"])
def test_rates_that_differ_over_ranks_are_refused_on_all_of_them(gang2: Gang, engine: Any) -> None:
    for told, same in gang2.run(own_rates, engine, timeout=60):
        assert "Ranks step with different options: lr of group 0 is 0.1 on rank 0, 0.2 on rank 1." in told
        assert "give it ready.ranks.reduce(metric)" in told
        assert same


def passes(rank: int, world: int) -> list[tuple[bool, bool]]:
    """Whether a warning of passes is heard, and points here: where ranks end passes together, and where not."""
    del world
    found = []
    for leaves in (False, True):
        ready: Any = prepared(pk.DDP(), loaders=[DataLoader(torch.ones(16, 4), batch_size=2)])  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            while ready.steps < 4:
                for batch in ready.loaders[0]:
                    ready.backward(ready.model(batch).square().mean())
                    ready.step()
                    if ready.steps == 4 or (leaves and rank == 0):
                        break
        said = [one for one in heard if "Ranks are in different passes over their data" in str(one.message)]
        found.append((bool(said), all(one.filename == __file__ for one in said)))
    return found


def test_a_rank_that_leaves_a_pass_early_is_told_of(gang2: Gang) -> None:
    for rank, (together, apart) in enumerate(gang2.run(passes, timeout=60)):
        assert together == (False, True)
        assert apart == (rank == 0, True)


def test_a_loss_that_is_no_number_is_told_once() -> None:
    ready = prepared(pk.Single())
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for value in (1.0, 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0):
            window(ready, value)
    (said,) = (str(one.message) for one in heard)
    assert "run.loss-not-finite at loop: The loss is not finite in window 4 on this rank" in said


def test_a_mean_over_tokens_that_is_no_number_is_told_unless_it_is_over_none() -> None:
    ready = prepared(pk.Single())
    for tokens, told in ((0, 0), (torch.tensor(0), 0), (0, 0), (3, 1)):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            loss = ready.model(torch.full((2, 4), float("nan"))).sum() if told else ready.model(torch.ones(2, 4)).sum()
            ready.backward(loss * float("nan"), mean_over=tokens)
            for param in ready.model.parameters():
                param.grad = torch.ones_like(param)
            ready.step()
        assert sum("The loss is not finite in window 4" in str(one.message) for one in heard) == told


def draws(rank: int, world: int, rate: float) -> list[list[str]]:
    """What is said of draws where ranks draw alike, and where each has a seed of its own."""
    del world
    said = []
    for own in (0, rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate))
        ready: Any = pk.apply(pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW()), model))
        torch.manual_seed(own)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(4):
                window(ready)
        ours = [one for one in heard if "random generators" in str(one.message)]
        assert all(one.filename == __file__ for one in ours)
        said.append([str(one.message) for one in ours])
        ready.close()
    return said


def test_data_ranks_that_drop_the_same_elements_are_told_once_and_what_to_type(gang2: Gang) -> None:
    (alike, apart), second = gang2.run(draws, 0.5, timeout=60)
    (told,) = alike
    assert "The random generators of all 2 ranks are in one state: dropout in 1 module takes the same elements" in told
    assert "Write torch.manual_seed(seed + dist.get_rank()) once the model is built" in told
    assert (apart, second) == ([], [[], []])
    with_none = gang2.run(draws, 0.0, timeout=60)
    assert with_none == [[[], []]] * 2, "nothing drops"


def tensor_parallel(rank: int, world: int) -> list[str]:
    """What is said where both ranks hold parts of each layer and drop alike, as they have to."""
    del rank, world
    torch.manual_seed(0)
    model = nn.Sequential()
    model.first, model.drop, model.second = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)
    styles = pk.tp.TPPlan((pk.tp.TPLayer("first", "colwise"), pk.tp.TPLayer("second", "rowwise")))
    config = pk.Config(engine=pk.TensorParallel(), tp_plan=styles, optimizer=pk.optim.AdamW())
    ready: Any = pk.apply(pk.build_plan(config, model))
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        window(ready)
    return [str(one.message) for one in heard if "random generators" in str(one.message)]


def test_ranks_that_hold_parts_of_one_layer_draw_alike_without_a_word(gang2: Gang) -> None:
    assert gang2.run(tensor_parallel, timeout=60) == [[], []]


def drawn_anew(rank: int, world: int, engine: Any) -> list[tuple[str, int]]:
    """What is raised, and after how many steps, where a layer is drawn anew with each rank's seed, and with one."""
    del world
    found = []
    for seed in (0, rank):
        ready = prepared(engine)
        for _ in range(3):
            window(ready)
        torch.manual_seed(seed)
        ready.unwrap().reset_parameters()
        told = ""
        try:
            for _ in range(6):
                window(ready)
        except RunRefused as error:
            told = str(error)
        found.append((told, ready.steps))
        ready.close()
    return found


def test_weights_that_ranks_have_written_unlike_are_refused_in_the_next_window_that_is_due(gang2: Gang) -> None:
    for alike, (told, steps) in gang2.run(drawn_anew, pk.DDP(), timeout=60):
        assert alike == ("", 9)
        assert "run.ranks-values at model.weight: Every rank holds 2 tensors with values of its own" in told
        assert "`weight`, `bias`" in told
        assert "dist.broadcast(param.data, src=0)" in told
        assert steps == 3, "the fourth window is due"


class Shared(nn.Module):
    """Two cut layers, with a factor between them and dropout before."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.factor, self.behind = nn.Parameter(torch.ones(1)), nn.Linear(8, 1)
        self.between = self.drops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.before(x), 0.3 * self.drops)
        inner = self.first(x).relu()
        return self.behind(self.second(inner * self.factor if self.between else inner) * self.factor)


def step_of_sharers(rank: int, world: int, otherwise: str) -> str:
    """What is refused where ranks that share layers have something otherwise."""
    torch.manual_seed(0)
    styles = pk.tp.TPPlan((pk.tp.TPLayer("first", "colwise"), pk.tp.TPLayer("second", "rowwise")))
    model = Shared()
    model.between, model.drops = otherwise == "a part", otherwise == "draws"
    ready = pk.apply(
        pk.build_plan(pk.Config(engine=pk.TensorParallel(), tp_plan=styles, optimizer=pk.optim.SGD(lr=0.1)), model)
    )
    if otherwise == "weights" and rank:
        with torch.no_grad():
            model.behind.weight.mul_(1.5)
    torch.manual_seed(rank * (otherwise == "draws"))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank * (otherwise == "samples")))
    ready.backward(ready.model(x).square().mean())
    try:
        ready.step()
    except RunRefused as error:
        return str(error)
    finally:
        ready.close()
    return ""


SHARERS = {
    "nothing": ("", ""),
    "samples": ("have read other samples", "the same samples"),
    "draws": ("drawn from generators in other states", "torch.manual_seed(seed + dist.get_rank() // 2)"),
    "weights": ("hold other weights beside them: `behind.weight`", "before apply"),
    "a part": ("what lies between cut layers gets a part", "TPLayer in tp_plan"),
}


@pytest.mark.parametrize("otherwise", SHARERS)
@pytest.mark.filterwarnings("ignore:warning run.not-read")
def test_what_ranks_that_share_layers_have_otherwise_is_named(gang2: Any, otherwise: str) -> None:
    why, fix = SHARERS[otherwise]
    for told in gang2.run(step_of_sharers, otherwise):
        assert why in told, told
        assert fix in told, told
        assert bool(told) == (otherwise != "nothing"), told
        assert "no_sync" not in told

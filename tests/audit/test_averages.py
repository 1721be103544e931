"""Averages of weights whose norms stand still, or that rounding stops, and their right neighbours."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.audit.test_phases import said

Train = Callable[[], None]
STEPS = 24
BUFFERS, ROUNDS = ["run.average-buffers"], ["run.average-rounds"]


def normed(*, norm: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.ReLU(), nn.Linear(16, 4))


def learns(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    fn.cross_entropy(model(2 + 3 * torch.randn(16, 8)), torch.randint(4, (16,))).backward()
    optimizer.step()


def follows(average: nn.Module, model: nn.Module, keep: float = 0.9) -> None:
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 1 - keep)


def copies_buffers(average: nn.Module, model: nn.Module) -> None:
    for old, new in zip(average.buffers(), model.buffers(), strict=True):
        old.copy_(new)


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model.eval()(torch.randn(16, 8))


def by_hand(*, then: str = "", norm: bool = True, late: bool = False) -> Train:
    """An average that is evaluated every six steps; ``then``: what is done for its buffers, or with it."""

    def train() -> None:
        torch.manual_seed(0)
        model = normed(norm=norm)
        average = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at in range(STEPS):
            if late and at == 4:
                average = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
            model.train()
            if then == "frozen norms":
                model[1].eval()  # type: ignore[index]
            learns(model, optimizer)
            if then != "never updated":
                follows(average, model)
            if then == "copied":
                copies_buffers(average, model)
            if at % 6 == 5:
                if then == "saved":
                    kept = copy.deepcopy(average.state_dict())
                    assert kept
                    evaluated(model)
                elif then == "loaded":
                    other = copy.deepcopy(model)
                    other.load_state_dict(dict(average.named_parameters()), strict=False)
                    evaluated(other)
                else:
                    evaluated(average)

    return train


def by_torch(*, buffers: bool, anew: bool, decay: bool) -> Train:
    def train() -> None:
        torch.manual_seed(0)
        model = normed()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if decay else None, use_buffers=buffers)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at in range(STEPS):
            learns(model, optimizer)
            average.update_parameters(model)
            if at % 6 == 5:
                if anew:
                    update_bn([torch.randn(16, 8) for _ in range(3)], average)
                evaluated(average)

    return train


def test_weights_that_have_no_shape_yet_stop_no_look() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    assert said(by_hand(then="copied")) == []
    assert len([*lazy.parameters()]) == 4


@pytest.mark.parametrize(
    "train",
    [by_hand(), by_hand(late=True)],
    ids=["own", "late"],
)
def test_an_average_whose_norms_stand_still_is_told(train: Train) -> None:
    assert said(train) == BUFFERS


@pytest.mark.parametrize("then", ["copied", "saved", "loaded", "never updated", "frozen norms"])
def test_an_average_that_takes_its_buffers_from_somewhere_is_right(then: str) -> None:
    assert "run.average-buffers" not in said(by_hand(then=then))


@pytest.mark.parametrize("then", ["copied", "saved"])
def test_a_right_average_has_nothing(then: str) -> None:
    assert said(by_hand(then=then)) == []


@pytest.mark.parametrize(
    "train",
    [
        by_hand(norm=False),
        by_torch(buffers=True, anew=False, decay=True),
        by_torch(buffers=True, anew=False, decay=False),
        by_torch(buffers=False, anew=False, decay=True),
        by_torch(buffers=False, anew=True, decay=True),
        by_torch(buffers=False, anew=True, decay=False),
    ],
    ids=["no norm", "buffers", "buffers swa", "torch copies them", "update_bn", "update_bn swa"],
)
def test_averages_of_torch_that_bring_their_buffers_are_right(train: Train) -> None:
    assert said(train) == []


Update = Callable[[Tensor, Tensor], None]


def shadowed(update: Update, *, dtype: torch.dtype = torch.bfloat16, every: int = 1, low: bool = False) -> Train:
    """A dict of averages in this dtype; ``low``: the model is in bfloat16."""

    def train() -> None:
        torch.manual_seed(0)
        model = normed(norm=False)
        model = model.bfloat16() if low else model
        shadow = {name: one.detach().to(dtype).clone() for name, one in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for at in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(16, 8, dtype=torch.bfloat16 if low else torch.float32)
            fn.cross_entropy(model(x).float(), torch.randint(4, (16,))).backward()
            optimizer.step()
            if at % every == 0:
                with torch.no_grad():
                    for name, one in model.named_parameters():
                        update(shadow[name], one)

    return train


def lerps(old: Tensor, new: Tensor) -> None:
    old.lerp_(new.to(old.dtype), 1e-3)


def adds(old: Tensor, new: Tensor) -> None:
    old.mul_(0.999).add_(new.to(old.dtype), alpha=1e-3)


def quickly(old: Tensor, new: Tensor) -> None:
    old.lerp_(new.to(old.dtype), 0.2)


def each(old: Tensor, new: Tensor) -> None:
    torch._foreach_lerp_([old], [new.to(old.dtype)], 1e-3)


def copied(old: Tensor, new: Tensor) -> None:
    old.lerp_(new.to(old.dtype), 1.0)


def stochastic(old: Tensor, new: Tensor) -> None:
    exact = torch.lerp(old.float(), new.float(), 1e-3)
    noise = torch.randint_like(exact, 1 << 16, dtype=torch.int32)
    old.copy_(((exact.view(torch.int32) + noise) & -65536).view(torch.float32))


def but_masters(train: Train) -> list[str]:
    """What is said of anything but weights that are trained in few digits."""
    return [one for one in said(train) if one != "run.no-master-weights"]


LOST: dict[int, Tensor] = {}


def compensated(old: Tensor, new: Tensor) -> None:
    lost = LOST.get(id(old))
    exact = old.float() + (lost if lost is not None and lost.shape == old.shape else 0)
    exact = torch.lerp(exact, new.float(), 1e-3)
    old.copy_(exact)
    LOST[id(old)] = exact - old.float()


@pytest.mark.parametrize("update", [lerps, adds, each])
@pytest.mark.parametrize("low", [True, False])
def test_an_average_that_rounding_stops_is_told(update: Update, low: bool) -> None:
    assert but_masters(shadowed(update, low=low)) == ROUNDS
    assert but_masters(shadowed(update, every=4, low=low)) == ROUNDS


@pytest.mark.parametrize("update", [copied, stochastic, compensated])
def test_an_average_of_few_digits_that_moves_is_right(update: Update) -> None:
    assert said(shadowed(update)) == []


@pytest.mark.parametrize("update", [lerps, adds, each])
@pytest.mark.parametrize("every", [1, 4])
def test_an_average_of_many_digits_is_right(update: Update, every: int) -> None:
    for low in (True, False):
        assert but_masters(shadowed(update, dtype=torch.float32, every=every, low=low)) == []


def test_a_quick_average_of_few_digits_is_right() -> None:
    assert said(shadowed(quickly)) == []


def test_the_moments_of_an_optimizer_are_no_averages_of_weights() -> None:
    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).bfloat16()
        shadow = [one.detach().clone() for one in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, 8, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(shadow, model.parameters(), strict=True):
                    old.lerp_(new, 1e-3)

    assert but_masters(train) == ROUNDS


Moves = Callable[[dict[str, Tensor], nn.Module], None]


def in_place(shadow: dict[str, Tensor], model: nn.Module) -> None:
    for name, one in model.named_parameters():
        shadow[name].lerp_(one, 0.2)


def anew(shadow: dict[str, Tensor], model: nn.Module) -> None:
    for name, one in model.named_parameters():
        shadow[name] = 0.8 * shadow[name] + 0.2 * one.detach()


def put_in(moves: Moves = in_place, *, then: str = "", every: int = 1, data: bool = False) -> Train:
    """An average, updated at so many steps, that is put into the model before it is evaluated, each six steps."""

    def train() -> None:
        torch.manual_seed(0)
        model = normed(norm=False)
        shadow = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at in range(1, STEPS + 1):
            learns(model.train(), optimizer)
            if at % every == 0:
                with torch.no_grad():
                    moves(shadow, model)
            if at % every == 0 and then == "slow weights":
                model.load_state_dict(shadow)
            if at % 6 == 0:
                kept = copy.deepcopy(model.state_dict())
                asked = copy.deepcopy(model) if then == "in a copy" else model
                for name, one in asked.named_parameters():
                    if data:
                        one.data = shadow[name]
                    else:
                        one.data.copy_(shadow[name])
                evaluated(asked)
                if then == "taken out":
                    model.load_state_dict(kept)
                if then == "begun anew":
                    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    return train


@pytest.mark.parametrize("moves", [in_place, anew])
@pytest.mark.parametrize("data", [True, False])
def test_an_average_that_stays_in_the_model_is_told(moves: Moves, data: bool) -> None:
    assert said(put_in(moves, data=data and moves is anew)) == ["run.average-stays"]


@pytest.mark.parametrize("then", ["taken out", "in a copy"])
@pytest.mark.parametrize("moves", [in_place, anew])
def test_an_average_that_is_taken_out_again_is_right(moves: Moves, then: str) -> None:
    assert said(put_in(moves, then=then)) == []


@pytest.mark.parametrize("every", [2, 6])
def test_slow_weights_from_which_training_goes_on_are_right(every: int) -> None:
    assert said(put_in(then="slow weights", every=every)) == []


def test_an_optimizer_that_begins_with_the_average_is_right() -> None:
    assert said(put_in(then="begun anew")) == []


def test_weights_of_an_earlier_step_that_are_loaded_are_right() -> None:
    def stands(shadow: dict[str, Tensor], model: nn.Module) -> None:
        assert shadow
        assert model

    assert said(put_in(stands)) == []

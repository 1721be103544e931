"""What is done to a model after apply and would train wrongly is told before an optimizer acts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import prepkit as pk
from prepkit.findings import RunRefused
from prepkit.training.looks import OFTEN
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inside, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.inside.bias.requires_grad = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inside(self.embed(ids)))  # type: ignore[no-any-return]


IDS = torch.arange(4)


def prepared(engine: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # as most scripts write it: frozen ones as well
    ready = pk.apply(pk.build_plan(pk.Config(engine=engine, device="cpu", **options), model, optimizer=optimizer))
    return ready, ready.unwrap(), optimizer


def train(ready: Any, windows: int = 1) -> None:
    for _ in range(windows):
        ready.backward(ready.model(IDS).float().square().mean())
        ready.step()


def said(act: Callable[[], Any]) -> str:
    """What it raises as ``RunRefused`` or ``RunRefused``; empty: nothing."""
    try:
        act()
    except RunRefused as error:
        return str(error)
    return ""


def break_tie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def replace_layer(model: Any) -> None:
    model.inside = nn.Linear(4, 4)


def cast(model: Any) -> None:
    model.inside.to(torch.bfloat16)
    model.head.to(torch.float64).to(torch.float32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            break_tie,
            "run.missed at model.head.weight: The model has 1 trained parameter that nothing trains",
        ),
        (replace_layer, "The model has 2 trained parameters that nothing trains: `inside.weight`, `inside.bias`"),
        (
            cast,
            "cast to fewer bits, without master weights: `inside.weight (was float32, is bfloat16)`",
        ),
    ],
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_model_that_is_no_longer_the_prepared_one_is_told_before_a_step(change: Any, told: str, before: int) -> None:
    ready, model, _ = prepared(pk.Single())
    train(ready, before)
    change(model)
    kept = model.embed.weight.detach().clone()
    ready.backward(sum(param.double().square().sum() for param in model.parameters() if param.requires_grad))
    what = said(ready.step)
    assert told in what
    assert "ready.resume(folder, only_model=True)" in what
    assert torch.equal(model.embed.weight, kept)


def test_it_is_looked_for_now_and_then_for_as_long_as_the_run_lasts() -> None:
    ready, model, _ = prepared(pk.Single())
    train(ready, OFTEN + 1)
    break_tie(model)
    train(ready, OFTEN - 2)
    assert "`head.weight`" in said(lambda: train(ready))


def test_what_one_process_may_do_to_its_model_is_not_told() -> None:
    ready, model, optimizer = prepared(pk.Single())
    model.inside.bias.requires_grad = True  # the optimizer holds it
    model.embed.weight.requires_grad = False
    with torch.no_grad():
        model.inside.weight.mul_(0.5)
    replace_layer(model)
    optimizer.add_param_group({"params": list(model.inside.parameters())})
    before = [param.detach().clone() for param in model.parameters()]
    train(ready)
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert moved == [False, True, True]


def test_a_loop_of_ones_own_is_told_as_well() -> None:
    ready, model, optimizer = prepared(pk.Single())
    break_tie(model)
    ready.model(IDS).square().mean().backward()
    assert "`head.weight`" in said(optimizer.step)


def replaced_under_shards(rank: int, world: int) -> tuple[str, list[int]]:
    """What the first forward raises after a tie was broken, and how many hooks a closed model keeps."""
    del rank, world
    ready, model, _ = prepared(pk.FSDP2())
    break_tie(model)
    what = said(lambda: ready.model(IDS))
    ready.close()
    return what, [len(model._forward_pre_hooks), len(model._forward_hooks)]


def test_what_fsdp2_would_put_back_is_told_before_its_first_forward(gang2: Gang) -> None:
    for what, hooks in gang2.run(replaced_under_shards):
        assert "run.missed at model.head.weight" in what
        assert hooks == [1, 1], "those of FSDP2 itself"


def unfrozen(rank: int, world: int, engine: Any) -> tuple[str, bool]:
    del world
    ready, model, _ = prepared(engine)
    model.inside.bias.requires_grad = True
    ready.backward(ready.model(IDS + 4 * rank).square().mean())
    what = said(ready.step)
    bias = model.inside.bias
    return what, bool(bias.detach().any()) if isinstance(engine, pk.FSDP2) else False


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2()], ids=["ddp", "fsdp2"])
def test_a_layer_that_is_unfrozen_is_refused_where_no_rank_would_average_it(gang2: Gang, engine: Any) -> None:
    for what, _ in gang2.run(unfrozen, engine, timeout=60):
        expected = "unfrozen since the model was prepared, and no rank averages the gradient: `inside.bias`"
        assert (expected in what) if isinstance(engine, pk.DDP) else not what


def under_zero(rank: int, world: int, stage: int, folder: str) -> dict[str, Any]:
    del rank, world
    lean()
    ready, model, given = prepared(pk.DeepSpeed(stage=stage, micro_batch=4), precision=pk.BF16())
    train(ready)
    found: dict[str, Any] = {"given": said(given.step)}
    ready.save(folder)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    found["loaded"] = [said(lambda: ready.export(folder)), said(lambda: ready.save(folder)), said(lambda: train(ready))]
    ready2, model2, _ = prepared(pk.DeepSpeed(stage=stage, micro_batch=4), precision=pk.BF16())
    ready2.resume(folder, only_model=True)
    found["resumed"] = said(lambda: train(ready2))
    model2.inside.bias.requires_grad = True
    model2.inside.weight.requires_grad = False
    ready2.backward(ready2.model(IDS).float().square().mean())
    found["switched"] = said(ready2.step)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_deepspeed_would_throw_away_is_refused(gang2: Gang, stage: int, tmp_path: Path) -> None:
    for found in gang2.run(under_zero, stage, str(tmp_path), timeout=120):
        assert "AdamW that was given to build_plan was stepped by hand" in found["given"]
        export, save, step = found["loaded"]
        assert "master weights are what they were: the next step would undo that" in step
        assert "a checkpoint or an export would hold those" in export
        assert export == save == step
        assert found["resumed"] == ""
        assert "1 parameter unfrozen since the model was prepared, and nothing uses the gradient" in found["switched"]
        assert "frozen since the model was prepared, and trained all the same: `inside.weight`" in found["switched"]


def averages(rank: int, world: int, folder: str) -> tuple[float, float, bool, str]:
    """How far what is exported inside ``applied`` is from average and weights, whether that moved, the next step."""
    del rank, world
    lean()
    ready, model, _ = prepared(pk.DeepSpeed(stage=2, micro_batch=4), precision=pk.BF16())
    ema = pk.Ema(ready, 0.999)
    start = ema.averages["inside.weight"].float().clone()
    train(ready, 2)
    ema.update()
    with ema.applied():
        ready.export(folder)
    ready.ranks.barrier()
    written = load_file(f"{folder}/model.safetensors")["inside.weight"].float()
    average, own = ema.averages["inside.weight"].float(), model.inside.weight.detach().float()
    moved = bool(((average - start).abs() > 0).all())
    return float((written - average).abs().max()), float((written - own).abs().max()), moved, said(lambda: train(ready))


def test_an_average_under_zero_moves_by_a_thousandth_and_is_what_is_exported(gang2: Gang, tmp_path: Path) -> None:
    for to_average, to_weights, moved, after in gang2.run(averages, str(tmp_path / "out"), timeout=60):
        assert to_average < 0.01 < to_weights
        assert moved, "a thousandth of a step is below what bfloat16 can tell"
        assert after == "", "what was put there and taken away is no write of the user's"


def frozen_behind_ddp(rank: int, world: int, before: int, options: dict[str, bool]) -> tuple[str, float]:
    """What is said of layers that are frozen after some windows, and by how much the ranks part then."""
    ready, model, _ = prepared(pk.DDP(**options))
    for window in range(before):
        ready.backward(ready.model(IDS).square().mean() * (1 + rank + window))
        ready.step()
    model.inside.weight.requires_grad = False
    what = said(lambda: (ready.backward(ready.model(IDS).square().mean() * (1 + rank)), ready.step()))
    apart = ready.ranks.gather(model.embed.weight.detach().clone())
    ready.close()
    return what, float((apart[0] - apart[1]).abs().max())


@pytest.mark.parametrize("before", [2, 3, 4])
def test_a_layer_that_ddp_waits_for_is_told_in_every_window_before_the_step(gang2: Gang, before: int) -> None:
    """torch says so in the next forward, when each rank has stepped gradients of its own."""
    for what, apart in gang2.run(frozen_behind_ddp, before, {}):
        assert "run.frozen at model.inside.weight: 1 parameter frozen" in what
        assert "awaited by DDP, which averages no gradient" in what
        assert apart == 0


def test_a_layer_that_ddp_does_not_wait_for_may_be_frozen(gang2: Gang) -> None:
    assert gang2.run(frozen_behind_ddp, 2, {"find_unused_parameters": True}) == [("", 0.0)] * 2


def two_backwards_behind_ddp(rank: int, world: int) -> list[str]:
    """What is said of two losses, each of a forward of its own, in windows of two micro-batches."""
    del rank, world
    ready, *_ = prepared(pk.DDP(), accumulation=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            ready.backward(ready.model(IDS).square().mean(), more=True)
            ready.backward(ready.model(IDS.flip(0)).abs().mean())
            ready.step()
    ready.close()
    return [str(one.message) for one in told if "gradients-written" in str(one.message)]


def test_gradients_that_ddp_lays_anew_in_a_forward_are_written_by_nobody_else(gang2: Gang) -> None:
    assert gang2.run(two_backwards_behind_ddp) == [[], []]


def in_groups(optimizer: Any) -> Any:
    return optimizer.param_groups


def merged(optimizer: Any) -> None:
    groups = in_groups(optimizer)
    groups[:] = [{**groups[0], "params": [param for one in groups for param in one["params"]]}]


def split(optimizer: Any) -> None:
    groups = in_groups(optimizer)
    groups[:] = [{**one, "params": [param]} for one in groups for param in one["params"]]


def made_again(optimizer: Any) -> None:
    optimizer.__init__([param for one in in_groups(optimizer) for param in one["params"]], lr=0.1)


def moved_into_the_first(optimizer: Any) -> None:
    first, second = in_groups(optimizer)
    first["params"] += second["params"]
    second["params"] = []


def decay_scheduled(optimizer: Any) -> None:
    for at, one in enumerate(in_groups(optimizer)):
        one["weight_decay"] = 0.05 * (at == 0)


REGROUPED: dict[str, tuple[Any, bool]] = {
    "merged": (merged, True),
    "made again": (made_again, True),
    "moved": (moved_into_the_first, True),
    "split": (split, False),
    "in another order": (lambda one: in_groups(one).reverse(), False),
    "one frozen": (lambda one: in_groups(one).pop(), False),
    "one more": (lambda one: one.add_param_group({"params": [nn.Parameter(torch.ones(2))]}), False),
    "a schedule of decay": (decay_scheduled, False),
    "loaded": (lambda one: one.load_state_dict(one.state_dict()), False),
    "another rate": (lambda one: in_groups(one)[0].update(lr=1.0), False),
}
"""What is done to an optimizer of two groups behind apply, and whether decay is lost by it."""


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", REGROUPED)
def test_groups_that_have_become_one_behind_apply_are_told(name: str, at: int) -> None:
    change, lost = REGROUPED[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    by = [[one for one in model.parameters() if (one.ndim > 1) == decays] for decays in (True, False)]
    given = [{"params": one, "weight_decay": decay} for one, decay in zip(by, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(given, lr=0.1)
    ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(4):
            if step == at:
                change(ready.optimizer)
            ready.backward(ready.model(torch.randn(3, 4)).square().mean())
            ready.step()
    said = [str(one.message) for one in heard if "run.drift-options" in str(one.message)]
    assert len(said) == lost
    assert all("0.1 for `0.weight`, `1.weight` and 0.0 for `0.bias`, `1.bias` as weight_decay" in one for one in said)


def test_groups_of_rates_alone_may_become_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD([{"params": one.parameters(), "lr": 0.1 / (1 + at)} for at, one in enumerate(model)])
    ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer))
    merged(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready.backward(ready.model(torch.randn(3, 4)).square().mean())
        ready.step()

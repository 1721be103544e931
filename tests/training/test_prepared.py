"""The same two lines for every engine: they equal a plain training loop in one process."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import prepkit as pk
from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    Clip,
    ClipNorm,
    ClipValue,
    Config,
    Engine,
    KeepLoaders,
    ShardLoaders,
    Single,
)
from prepkit.objects import names
from prepkit.training.drivers import clip, total_norm
from prepkit.training.prepared import MOVED, Prepared
from tests.support.fragile_model import WORDS, Tiny, applied, planned, stepped
from tests.support.gang import Gang
from tests.support.single_step import shard_mesh

WINDOWS, MICRO = 3, 2
NORM, VALUE = ClipNorm(0.05), ClipValue(0.001)


def batches() -> Tensor:
    """Token ids of shape (windows, micro-batches, samples, length)."""
    return torch.randint(WORDS, (WINDOWS, MICRO, 4, 5), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def fresh() -> tuple[nn.Module, Optimizer]:
    """A model whose optimizer has stepped once already."""
    torch.manual_seed(7)
    model = Tiny()
    return model, stepped(model)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_loop(how: Clip) -> tuple[dict[str, Tensor], list[float]]:
    """What prepared training must equal: torch, one process, no prepkit."""
    model, optimizer = fresh()
    scheduler = StepLR(optimizer, 1, 0.5)
    norms = []
    for window in batches():
        for tokens in window:
            (loss_of(model, tokens) / MICRO).backward()
        match how:
            case ClipNorm(max_norm=most):
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), most)))
            case ClipValue(max_value=most):
                nn.utils.clip_grad_value_(model.parameters(), most)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def prepare(cfg: Config, world: int) -> Prepared:
    model, optimizer = fresh()
    scheduler = StepLR(optimizer, 1, 0.5)
    plan = planned(cfg, model, optimizer, world=world)
    target = applied(plan, model, optimizer, scheduler=scheduler)
    return Prepared(
        model=target.model,
        optimizer=target.optimizer,
        scheduler=target.scheduler,
        plan=plan,
    )


def train(
    rank: int, world: int, engine: Engine, how: Clip, *, each: bool = False
) -> tuple[dict[str, Tensor], list[float], list[bool], float]:
    ready = prepare(Config(engine=engine, accumulation=MICRO, clip=how, average_each=each), world)
    norms, stepped_ = [], []
    for window in batches():
        for tokens in window:
            ready.backward(loss_of(ready.model, tokens.chunk(world)[rank]))
            stepped_.append(ready.step())
        if ready.grad_norm is not None:
            norms.append(float(ready.grad_norm))
    assert ready.optimizer is not None
    weights = {name: whole(p.detach()) for name, p in names.named_parameters(ready.model).items()}
    return weights, norms, stepped_, ready.optimizer.param_groups[1]["lr"]


def assert_equals_the_plain_loop(found: Any, how: Clip) -> None:
    weights, norms, stepped_, lr = found
    expected, expected_norms = plain_loop(how)
    assert stepped_ == [False, True] * WINDOWS
    assert lr == 0.5 * 0.5**WINDOWS
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_clipping_is_active_in_these_tests() -> None:
    norms = plain_loop(NORM)[1]
    assert min(norms) > 2 * NORM.max_norm
    free, clipped, valued = (plain_loop(how)[0]["embed.weight"] for how in (None, NORM, VALUE))
    assert not torch.allclose(free, clipped, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(free, valued, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [None, NORM, VALUE], ids=["free", "norm", "value"])
@pytest.mark.parametrize("engine", [DDP(), DDP(static_graph=True), FSDP2()], ids=["ddp", "static", "fsdp2"])
def test_two_processes_equal_the_plain_loop(gang2: Gang, engine: Engine, how: Clip) -> None:
    for found in gang2.run(train, engine, how):
        assert_equals_the_plain_loop(found, how)


@pytest.mark.parametrize("how", [NORM, VALUE], ids=["norm", "value"])
def test_one_process_equals_the_plain_loop(how: Clip) -> None:
    assert_equals_the_plain_loop(train(0, 1, Single(), how), how)


# --- gradient averaging --------------------------------------------------------------------------------------------


def averaged(rank: int, world: int, engine: Engine, last: int | None = None, *, each: bool = False) -> list[bool]:
    """For the first micro-batches of a window of three, of which ``last`` ends it: does every rank see one gradient?"""
    ready = prepare(Config(engine=engine, accumulation=3, average_each=each), world)
    found = []
    for index, tokens in enumerate(batches()[0]):
        with ready.accumulate(last=index == last):
            ready.backward(loss_of(ready.model, tokens.chunk(world)[rank]))
            grad = ready.model.get_parameter("module.embed.weight" if isinstance(engine, DDP) else "embed.weight").grad
            found.append(grad is not None and same_everywhere(whole(grad)))
            stepped_ = ready.step()
            assert stepped_ == (index == last)
    return found


def same_everywhere(tensor: Tensor) -> bool:
    held = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(held, tensor.contiguous())
    return torch.equal(held[0], held[1])


@pytest.mark.parametrize("engine", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
def test_gradients_are_averaged_at_the_end_of_a_window_only(gang2: Gang, engine: Engine) -> None:
    assert gang2.run(averaged, engine) == [[False, False]] * 2


def in_each(rank: int, world: int, engine: Engine) -> tuple[list[bool], Any]:
    """Whether every rank sees one gradient after each micro-batch, and what training ends with."""
    found = averaged(rank, world, engine, each=True)
    return found, train(rank, world, engine, NORM, each=True)


def flat_runs(rank: int, world: int) -> list[tuple[int, Any, list[float]]]:
    """Of FSDP1 without and with averages in every micro-batch: reductions, this rank's weights, and norms."""
    from torch.distributed.fsdp import _runtime_utils

    real, runs = _runtime_utils._reduce_grad, []
    for each in (False, True):
        calls: list[int] = []

        def counted(*args: Any, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls.append(1)
            return real(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_runtime_utils, "_reduce_grad", counted)
            weights, norms, *_ = train(rank, world, FSDP1(), NORM, each=each)
        runs.append((len(calls), weights, norms))
    return runs


def test_flat_units_average_in_every_micro_batch_and_learn_the_same(gang2: Gang) -> None:
    expected = plain_loop(NORM)[1]
    for (last, weights, norms), (every, weights_each, norms_each) in gang2.run(flat_runs):
        assert every == MICRO * last > 0
        assert norms == pytest.approx(expected, rel=1e-5)
        assert norms_each == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(weights_each, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
def test_averaging_in_every_micro_batch_gives_the_same_and_keeps_no_whole_gradients(
    gang2: Gang, engine: Engine
) -> None:
    for found, trained in gang2.run(in_each, engine):
        assert found == [True, True]
        assert_equals_the_plain_loop(trained, NORM)


@pytest.mark.parametrize("engine", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
def test_a_window_that_is_ended_early_is_averaged_and_stepped(gang2: Gang, engine: Engine) -> None:
    assert gang2.run(averaged, engine, 1) == [[False, True]] * 2


# --- one process ---------------------------------------------------------------------------------------------------


def test_a_window_counts_from_its_last_step_and_an_early_end_begins_a_new_one() -> None:
    ready = prepare(Config(accumulation=3), 1)
    found = []
    for last in (False, True, False, False, False):
        with ready.accumulate(last=last):
            ready.backward(loss_of(ready.model, batches()[0, 0]))
            found.append(ready.step())
    assert found == [False, True, False, False, True]


def test_an_early_end_that_raised_is_forgotten() -> None:
    ready = prepare(Config(accumulation=2), 1)
    with pytest.raises(ZeroDivisionError), ready.accumulate(last=True):
        raise ZeroDivisionError
    ready.backward(loss_of(ready.model, batches()[0, 0]))
    assert ready.step() is False


@pytest.mark.parametrize("ticks", [1, 2])
def test_the_scheduler_ticks_as_often_as_the_plan_says(ticks: int) -> None:
    ready = prepare(Config(scheduler_ticks=ticks), 1)
    ready.backward(loss_of(ready.model, batches()[0, 0]))
    assert ready.step()
    assert ready.scheduler.last_epoch == ticks


def test_gradients_are_cleared_after_a_step_and_kept_before_it() -> None:
    ready = prepare(Config(accumulation=2), 1)
    for expected in (True, False):
        ready.backward(loss_of(ready.model, batches()[0, 0]))
        ready.step()
        assert (ready.model.embed.weight.grad is not None) is expected


def test_stepping_without_an_optimizer_says_what_to_do() -> None:
    model = Tiny()
    ready = Prepared(model=model, plan=planned(Config(), *fresh()))
    ready.backward(loss_of(model, batches()[0, 0]))
    with pytest.raises(
        RuntimeError,
        match=r"there is no optimizer to step: the plan was made without one\.\n  fix: Build the plan with",
    ):
        ready.step()


def test_a_new_epoch_reaches_the_sharded_loaders_and_passes_the_others_by() -> None:
    whole_data = DataLoader(list(range(8)), shuffle=True)
    sampler = DistributedSampler(range(8), 2, 0)
    model, optimizer = fresh()
    loaders = (whole_data, DataLoader(list(range(8)), sampler=sampler), [1])
    ready = Prepared(model=model, plan=planned(Config(), model, optimizer), loaders=loaders)
    first = list(sampler)
    ready.loop.passes.set_epoch(5)
    assert sampler.epoch == 5
    assert list(sampler) != first


# --- loaders -------------------------------------------------------------------------------------------------------


def looped(cfg: Config, batches: int) -> tuple[Prepared, list[bool]]:
    """What ``step`` said in one pass over so many batches."""
    model, optimizer = fresh()
    loader = DataLoader(torch.arange(4 * batches) % 4, batch_size=4)  # type: ignore[arg-type]  # it is a data set
    plan = planned(cfg, model, optimizer, loaders=(loader,))
    target = applied(plan, model, optimizer, loaders=[loader])
    ready = Prepared(model=target.model, optimizer=target.optimizer, loaders=tuple(target.loaders), plan=plan)
    stepped = []
    for batch in ready.loaders[0]:
        ready.backward(loss_of(ready.model, batch.reshape(1, 4)))
        stepped.append(ready.step())
    return ready, stepped


def test_the_last_batch_of_a_pass_ends_the_window() -> None:
    ready, stepped = looped(Config(accumulation=4), 6)
    assert stepped == [False, False, False, True, False, True]
    assert ready.loop.pending == 0


@pytest.mark.parametrize("how", [ShardLoaders(ends_window=False), KeepLoaders(purpose="evaluation")])
def test_a_window_goes_on_in_the_next_pass_where_the_config_says_so(how: ShardLoaders | KeepLoaders) -> None:
    ready, stepped = looped(Config(accumulation=4, loaders=how), 6)
    assert stepped == [False, False, False, True, False, False]
    assert ready.loop.pending == 2


def test_metrics_are_gathered_inside_a_loop_and_by_sample() -> None:
    ready, _ = looped(Config(), 2)
    with pytest.raises(RuntimeError, match=r"loop\.gathered-outside-pass"):
        ready.ranks.gather_for_metrics(torch.zeros(4))
    for batch in ready.loaders[0]:
        assert ready.ranks.gather_for_metrics({"x": batch, "loss": batch.sum()})["x"].tolist() == batch.tolist()
        assert ready.ranks.gather_for_metrics(["a", "b", "c", "d"]) == ["a", "b", "c", "d"]
        with pytest.raises(ValueError, match=r"shape \(2,\) for a batch of 4 samples; give it one row per sample"):
            ready.ranks.gather_for_metrics(batch[:2])
        with pytest.raises(ValueError, match="takes tensors or a list with an item per sample, not 3"):
            ready.ranks.gather_for_metrics(3)


# --- clipping ------------------------------------------------------------------------------------------------------


def gradient(*values: float) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(len(values)))
    param.grad = torch.tensor(values)
    return param


def mixed(rank: int, world: int, power: float) -> tuple[float, float, list[float]]:
    """Norm before, norm after and all gradients, of one sharded, one plain and one absent gradient."""
    mesh = shard_mesh(world)
    sharded = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.tensor([3.0, -4.0]), mesh, [Shard(0)])
    plain = gradient(12.0, 0.5, -1.0)  # more than one element: DTensor lets a lone one pass for a shard
    before = clip(ClipNorm(1.0, power), [sharded, plain, nn.Parameter(torch.zeros(2))])
    assert type(before) is Tensor
    after = total_norm([plain, sharded], power)
    clip(ClipValue(0.01), [sharded, plain])
    assert plain.grad is not None
    return float(before), float(after), [*whole(sharded.grad).tolist(), *plain.grad.tolist()]


@pytest.mark.parametrize("power", [2.0, 1.0, torch.inf])
def test_whole_and_sharded_gradients_have_one_norm_together(gang2: Gang, power: float) -> None:
    expected = torch.linalg.vector_norm(torch.tensor([3.0, -4.0, 12.0, 0.5, -1.0]), power).item()
    for before, after, gradients in gang2.run(mixed, power):
        assert before == pytest.approx(expected)
        assert after == pytest.approx(1.0, rel=1e-5)
        assert gradients == pytest.approx([0.01, -0.01, 0.01, 0.01, -0.01])


def test_without_gradients_the_norm_is_zero() -> None:
    assert float(total_norm([], 2.0)) == 0.0
    assert float(clip(ClipNorm(1.0), [nn.Parameter(torch.zeros(1))]) or 0.0) == 0.0


def test_a_member_that_has_moved_says_what_to_write() -> None:
    plan = pk.build_plan(pk.Config(engine=pk.Single()), nn.Linear(2, 2))
    ready = pk.apply(plan)
    for name, now in MOVED.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; write {re.escape(now)}$"):
            getattr(ready, name)
        if now.startswith("ready."):
            assert operator.attrgetter(now.removeprefix("ready.").partition("(")[0])(ready) is not None
        else:
            assert getattr(pk, now.removeprefix("pk.").partition("(")[0])
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = ready.nonsense  # type: ignore[attr-defined]

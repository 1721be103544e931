"""Forward, backward and step in another order, or past the wrapper, raise in every window and change nothing."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.findings import RunRefused
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.inner(x))
        return out


def prepared(engine: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1), **options)
    return pk.apply(pk.build_plan(cfg, Layers()))


def batch(rank: int) -> torch.Tensor:
    return torch.full((2, 4), rank + 1.0)


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except RunRefused as error:
        return str(error)
    return ""


def window(ready: Any, rank: int) -> bool:
    ready.backward(ready.model(batch(rank)).sum())
    stepped: bool = ready.step()
    return stepped


def past_ddp(rank: int, world: int) -> tuple[str, str, bool, bool]:
    """Of a later window: a forward past DDP, the second backward of one forward; and whether anything was changed."""
    del world
    ready = prepared(pk.DDP())
    assert window(ready, rank)
    before = [param.detach().clone() for param in ready.model.parameters()]
    bypassed = told(lambda: ready.backward(ready.unwrap()(batch(rank)).sum()))
    loss = ready.model(batch(rank)).sum()
    ready.backward(loss, more=True)
    second = told(lambda: ready.backward(ready.unwrap()(batch(rank)).sum()))
    same = all(torch.equal(one, other) for one, other in zip(before, ready.model.parameters(), strict=True))
    ready.backward(ready.model(batch(rank)).sum())
    return bypassed, second, same, ready.step()


def test_what_ddp_would_not_average_raises_in_every_window(gang2: Gang) -> None:
    for bypassed, second, same, stepped in gang2.run(past_ddp, timeout=60):
        assert "these gradients would be each rank's alone." in bypassed
        assert "fix: Call ready.model(...) itself" in bypassed
        assert 'Config(entry_points=("<method>",))' in bypassed
        assert second.partition("before:")[0] == bypassed.partition("before:")[0]
        assert "backward(more)" in second.partition("before:")[2]
        assert same
        assert stepped


def unsynced(rank: int, world: int, engine: Any) -> list[str]:
    """What is said where averaging is off around one window, and around a loop over windows of two."""
    del world
    said = []
    for accumulation in (1, 2):
        ready = prepared(engine, accumulation=accumulation)
        with contextlib.nullcontext() if isinstance(engine, pk.FSDP2) else ready.model.no_sync():
            if isinstance(engine, pk.FSDP2):
                ready.model.set_requires_gradient_sync(False)
            for _ in range(accumulation - 1):
                window(ready, rank)
            ready.backward(ready.model(batch(rank)).sum())
            said.append(told(ready.step))
    return said


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP1(), pk.FSDP2()], ids=lambda engine: type(engine).__name__)
def test_a_window_that_no_sync_left_unaveraged_is_not_stepped(gang2: Gang, engine: Any) -> None:
    off = "set_requires_gradient_sync(False)" if isinstance(engine, pk.FSDP2) else "no_sync()"
    for said in gang2.run(unsynced, engine, timeout=60):
        assert [f"its {off} was used" in text for text in said] == [True, True], said


def losses(rank: int, world: int, engine: Any, calls: int) -> list[float]:
    """The parameters' sums after one window of two micro-batches with two losses each, in one backward or in two."""
    del world
    ready = prepared(engine, accumulation=2)
    for at in range(2):
        if calls == 2:
            ready.backward(ready.model(batch(rank + at)).sum(), more=True)
            ready.backward(ready.model(batch(rank + at)).square().sum())
        else:
            out = ready.model(batch(rank + at))
            ready.backward(out.sum() + out.square().sum())
        assert ready.step() is (at == 1)
    return [float(getattr(p, "_local_tensor", p).detach().sum()) for p in ready.model.parameters()]


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2()], ids=["ddp", "fsdp2"])
def test_several_losses_of_one_micro_batch_are_their_sum(gang2: Gang, engine: Any) -> None:
    at_once = gang2.run(losses, engine, 1, timeout=60)
    assert gang2.run(losses, engine, 2, timeout=60) == [pytest.approx(sums, rel=1e-5) for sums in at_once]


def test_a_forgotten_step_is_noticed_at_the_next_backward_and_when_saving() -> None:
    ready = prepared(pk.Single())
    ready.backward(ready.model(batch(0)).sum())
    assert ready.loop.pending == 1
    with pytest.raises(RuntimeError, match="a checkpoint holds no gradients"):
        ready.save("nowhere")
    with pytest.raises(RunRefused, match=r"called again without ready\.step\(\) since"):
        ready.backward(ready.model(batch(0)).sum())
    assert ready.step()
    assert ready.loop.pending == 0


def test_a_micro_batch_whose_gradients_were_thrown_away_needs_no_step() -> None:
    ready = prepared(pk.Single())
    ready.backward(ready.model(batch(0)).sum())
    ready.optimizer.zero_grad()
    assert window(ready, 0)


def test_a_step_after_a_backward_by_hand_is_refused() -> None:
    ready = prepared(pk.Single(), accumulation=2)
    ready.model(batch(0)).sum().backward()
    with pytest.raises(RunRefused, match=r"without ready\.backward\(loss\) since the last step"):
        ready.step()


def test_an_announced_backward_has_to_come() -> None:
    ready = prepared(pk.Single())
    ready.backward(ready.model(batch(0)).sum(), more=True)
    with pytest.raises(RunRefused, match="has announced another backward"):
        ready.step()


def test_gradients_that_are_cleared_inside_a_window_are_missed_before_more_are_added() -> None:
    ready = prepared(pk.Single(), accumulation=3)
    assert not window(ready, 0)
    ready.model.zero_grad()
    loss = ready.model(batch(0)).sum()
    assert "zero_grad() was called inside it" in told(lambda: ready.backward(loss))


@pytest.mark.parametrize("place", ["after step", "before the forward"])
def test_clearing_at_the_end_of_a_window_is_fine(place: str) -> None:
    again = prepared(pk.Single(), accumulation=3)
    stepped = []
    for _ in range(6):
        if place == "before the forward" and not again.loop.pending:
            again.optimizer.zero_grad()
        stepped.append(window(again, 0))
        if place == "after step" and stepped[-1]:
            again.optimizer.zero_grad()
    assert stepped == 2 * [False, False, True], "at the end of a window it clears nothing"
    window(again, 0)
    copied, state = copy.deepcopy(again.optimizer), pickle.dumps(again.optimizer)
    for other in (copied, pickle.loads(state)):
        other.zero_grad()  # is nobody's, and not asked
    again.close()
    again.optimizer.zero_grad()
    assert "zero_grad" not in vars(again.optimizer)


def cleared(rank: int, world: int, engine: Any) -> tuple[list[str], list[bool]]:
    """What two places of ``zero_grad`` inside a window say, and the windows that end all the same."""
    del world
    if isinstance(engine, pk.DeepSpeed):
        lean()
    ready = prepared(engine, accumulation=2)
    texts, ended = [], []
    for _ in range(2):
        ended.append(window(ready, rank))
        texts.append(told(ready.optimizer.zero_grad))
        loss = ready.model(batch(rank)).sum()
        texts.append(told(ready.optimizer.zero_grad))
        ready.backward(loss)
        ended.append(ready.step())
        ready.optimizer.zero_grad()
    return texts, ended


@pytest.mark.parametrize(
    "engine",
    [pk.DDP(), pk.FSDP2(), pk.FSDP1(), pk.DeepSpeed(stage=1, micro_batch=2), pk.DeepSpeed(stage=3, micro_batch=2)],
    ids=["ddp", "fsdp2", "fsdp1", "zero1", "zero3"],
)
def test_zero_grad_inside_a_window_is_refused_under_every_engine_and_clears_nothing(gang2: Gang, engine: Any) -> None:
    for texts, ended in gang2.run(cleared, engine, timeout=90):
        assert len(texts) == 4
        assert all("optimizer.zero_grad() was called inside an accumulation window" in text for text in texts)
        assert ended == [False, True, False, True]


def scheduled(ticks: int) -> Any:
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    plan = pk.build_plan(pk.Config(scheduler_ticks=ticks), model, optimizer=optimizer, scheduler=scheduler)
    return pk.apply(plan)


def test_a_scheduler_that_is_stepped_twice_is_refused_before_the_optimizer_acts() -> None:
    ready = scheduled(1)
    assert window(ready, 0)
    ready.scheduler.step()
    before = [param.detach().clone() for param in ready.model.parameters()]
    assert "the scheduler was stepped beside ready.step(), from 1 to 2" in told(lambda: window(ready, 0))
    assert all(map(torch.equal, before, ready.model.parameters()))


def test_a_scheduler_of_the_user_s_own_may_be_stepped_at_will(tmp_path: Any) -> None:
    ready = scheduled(0)
    for _ in range(3):
        assert window(ready, 0)
        ready.scheduler.step()
    ours = scheduled(1)
    window(ours, 0)
    ours.save(str(tmp_path))
    window(ours, 0)
    ours.resume(str(tmp_path))
    assert window(ours, 0), "resume puts the scheduler back"
    assert ours.scheduler.last_epoch == 2


def written(rank: int, world: int, engine: Any, which: str) -> list[str]:
    """What is warned of in two windows in which something else has written the gradients, or nothing has."""
    del world
    ready = prepared(engine)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = ready.model(batch(rank)).sum()
            ready.backward(loss)
            if which == "clipped":
                nn.utils.clip_grad_norm_(ready.model.parameters(), 1e-3)
            if which == "beside":
                ready.model(batch(rank)).sum().backward()
            ready.step()
    return [str(one.message) for one in heard if "ready.backward()" in str(one.message)]


@pytest.mark.parametrize("engine", [pk.Single(), pk.DDP(), pk.FSDP2()], ids=lambda engine: type(engine).__name__)
def test_gradients_that_something_else_has_written_are_warned_of_once(engine: Any, gang2: Gang) -> None:
    def said(which: str) -> list[str]:
        if isinstance(engine, pk.Single):
            return written(0, 1, engine, which)
        first, second = gang2.run(written, engine, which, timeout=60)
        assert second == [], "rank 0 says it"
        return list(first)

    assert said("nothing") == []
    for which in ("clipped", "beside"):
        (what,) = said(which)
        assert "Where it clips remove it: write Config(clip=pk.ClipNorm(1.0))" in what
        assert "A mask of param.grad that is the same on every rank may stay." in what


def test_scaled_gradients_that_something_else_has_written_are_refused() -> None:
    ready = prepared(pk.Single(), precision=pk.FP16(), overrides=("precision.fp16-unsupported",))
    ready.backward(ready.model(batch(0)).sum())
    nn.utils.clip_grad_norm_(ready.model.parameters(), 1.0)
    assert "still multiplied by the loss scale" in told(ready.step)


@pytest.mark.parametrize(("accumulation", "before"), [(1, 0), (1, 2), (2, 0), (2, 4)])
def test_a_step_behind_zero_grad_is_refused_in_every_window(accumulation: int, before: int) -> None:
    ready = prepared(pk.Single(), accumulation=accumulation)
    for _ in range(before):
        window(ready, 0)
    ready.backward(ready.model(batch(0)).sum())
    ready.optimizer.zero_grad()
    assert "loop.cleared-before-step" in told(ready.step)
    assert [window(ready, 0) for _ in range(accumulation)][-1], "the batch was left out, and its window begins anew"


def by_the_engine(rank: int, world: int, stage: int) -> dict[str, list[str]]:
    """What is told where the engine of DeepSpeed steps by its own method, by the place of the call."""
    del world
    lean()
    found: dict[str, list[str]] = {}
    for where, accumulation in (("before", 1), ("before", 2), ("behind", 1), ("instead", 1), ("own", 1), ("own", 2)):
        ready = prepared(pk.DeepSpeed(stage=stage, micro_batch=2), accumulation=accumulation)
        said = found[f"{where}, {accumulation}"] = []
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                loss = ready.model(batch(rank)).sum()
                if where == "own":
                    ready.model.backward(loss)
                    ready.model.step()
                    continue
                ready.backward(loss)
                if where == "behind":
                    ready.step()
                said.append(told(ready.model.step))
                if where == "instead":
                    break
                if where == "before":
                    ready.step()  # what was refused has changed nothing
        said += [str(one.message) for one in heard if "loop." in str(one.message)]
        ready.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_engine_that_is_stepped_beside_the_loop_is_told_by_the_name_of_that_call(gang2: Gang, stage: int) -> None:
    pytest.importorskip("deepspeed")
    for rank, found in enumerate(gang2.run(by_the_engine, stage, timeout=120)):
        own, accumulates = found.pop("own, 1"), found.pop("own, 2")
        assert own == [], "a loop of one's own, which the engine serves as always"
        assert rank or "ready.model.step() was called and ready.backward(loss) never" in accumulates[0]
        assert [len(said) for said in found.values()] == [2, 2, 2, 1]
        for one in (one for said in found.values() for one in said):
            assert "loop.stepped-by-hand at ready.model.step(): ready.model.step() was called after" in one


def test_gradients_that_are_gone_at_the_end_of_a_later_window_are_missed() -> None:
    ready = prepared(pk.Single())
    window(ready, 0)
    ready.backward(ready.model(batch(0)).sum())
    ready.model.zero_grad()
    assert "no parameter has a gradient: something has set them to None" in told(ready.step)


def test_gradients_that_are_written_from_a_later_window_on_are_warned_of_once() -> None:
    ready = prepared(pk.Single())
    for _ in range(2):
        window(ready, 0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            ready.backward(ready.model(batch(0)).sum())
            nn.utils.clip_grad_norm_(ready.model.parameters(), 1e-3)
            ready.step()
    assert ["the gradients of a window were written" in str(one.message) for one in heard] == [True]
    assert [one.filename for one in heard] == [__file__]


def beside(rank: int, world: int, engine: Any) -> list[str]:
    """What is raised where a backward by hand came before ``ready.backward``, in the first and in the third window.

    And where a step is forgotten, in the last.
    """
    del world
    if isinstance(engine, pk.DeepSpeed):
        lean()
    ready, found = prepared(engine), []
    for at in range(4):
        if at in (0, 2):
            ready.model(batch(rank)).sum().backward()
            loss = ready.model(batch(rank)).sum()
            found.append(told(lambda loss=loss: ready.backward(loss)))  # type: ignore[misc]
            ready.optimizer.zero_grad()
        window(ready, rank)
    ready.backward(ready.model(batch(rank)).sum())
    loss = ready.model(batch(rank)).sum()
    return [*found, told(lambda: ready.backward(loss))]


@pytest.mark.parametrize(
    "engine",
    [
        pk.Single(), pk.FSDP1(), pk.FSDP1(use_orig_params=True), pk.FSDP2(),
        *(pk.DeepSpeed(stage=stage, micro_batch=2) for stage in (1, 2, 3)),
    ],
    ids=["alone", "fsdp1", "fsdp1-orig", "fsdp2", "zero1", "zero2", "zero3"],
)  # fmt: skip
def test_a_backward_by_hand_and_a_forgotten_step_are_refused_in_every_window(engine: Any, gang2: Gang) -> None:
    ranks = [beside(0, 1, engine)] if isinstance(engine, pk.Single) else gang2.run(beside, engine, timeout=60)
    for *found, forgotten in ranks:
        assert ["gradients are in the model before the first ready.backward()" in what for what in found] == 2 * [True]
        assert "called again without ready.step()" in forgotten


@pytest.mark.parametrize(
    ("read", "accumulation", "late"),
    [(iter, 2, False), (list, 2, True), (list, 1, False)],
    ids=["as they come", "all at once", "all at once, each a window"],
)
def test_batches_that_were_read_ahead_of_a_window_s_end_are_told_once(read: Any, accumulation: int, late: bool) -> None:
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)  # type: ignore[arg-type]
    cfg = pk.Config(engine=pk.Single(), optimizer=pk.optim.SGD(lr=0.1), accumulation=accumulation)
    ready = pk.apply(pk.build_plan(cfg, Layers(), loaders=[loader]))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            for data in read(ready.loaders[0]):
                ready.backward(ready.model(data).sum())
                ready.step()
    said = [one for one in heard if "a batch is trained after its loader has come to its end" in str(one.message)]
    assert len(said) == late
    assert all(one.filename == __file__ for one in said)


def test_a_prefetcher_of_one_batch_is_told_at_the_end_of_its_first_pass() -> None:
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)  # type: ignore[arg-type]
    cfg = pk.Config(engine=pk.Single(), optimizer=pk.optim.SGD(lr=0.1), accumulation=2)
    ready = pk.apply(pk.build_plan(cfg, Layers(), loaders=[loader]))
    batches = iter(ready.loaders[0])
    held = next(batches)
    said: list[int] = []
    for at in range(4):
        coming = next(batches, None)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            ready.backward(ready.model(held).sum())
            ready.step()
        said += [at for one in heard if "a prefetcher that reads one batch ahead" in str(one.message)]
        held = coming
    assert said == [3]


@pytest.mark.parametrize(
    ("loss", "kind", "told"),
    [
        (1.0, TypeError, "takes the loss as a tensor, .* returns it; this is float"),
        (torch.ones(2, 3, requires_grad=True), ValueError, r"has the shape \(2, 3\); write loss.mean\(\)"),
        (torch.ones(()), RunRefused, "it was detached, or computed under torch.no_grad"),
    ],
    ids=["number", "several", "detached"],
)
def test_what_is_no_loss_is_refused_before_anything_runs(loss: Any, kind: type[Exception], told: str) -> None:
    ready = prepared(pk.Single())
    with pytest.raises(kind, match=told):
        ready.backward(loss)
    assert ready.loop.pending == 0
    assert window(ready, 0)


def test_gradients_that_are_written_behind_a_step_inside_a_window_are_warned_of_once() -> None:
    ready = prepared(pk.Single(), accumulation=3)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(6):
            window(ready, 0)
            nn.utils.clip_grad_norm_(ready.model.parameters(), 1e-3)
    said = [one for one in heard if "the gradients of a window were written" in str(one.message)]
    assert len(said) == 1

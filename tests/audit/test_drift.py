"""Drift is found by name at the step where it happens, and in programs that only train there is none."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import prune
from torch.optim import lr_scheduler
from torch.optim import lr_scheduler as rates
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, DistributedSampler

import prepkit as pk
from prepkit.auditing.running import ROUND, Rotation
from prepkit.auditing.watch import DriftWatch
from prepkit.findings import FindingWarning
from tests.audit import clean
from tests.audit.by_libraries import llama
from tests.audit.case import WIDTH, Case, adam, net, rows
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang
from tests.support.launch import launched


def stepped(case: Case, rank: int = 0, count: int = 1) -> None:
    """As a loop does it, each rank with samples of its own."""
    generator = torch.Generator().manual_seed(rank)
    optimizers = case.optimizer if isinstance(case.optimizer, list) else [case.optimizer]
    for _ in range(count):
        dtype = next(case.model.parameters()).dtype if hasattr(case.model, "global_steps") else torch.float32
        loss = case.model(torch.randn(4, WIDTH, generator=generator).to(dtype)).square().mean()
        if hasattr(case.model, "global_steps"):
            case.model.backward(loss)
            case.model.step()
            continue
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if case.scheduler is not None:
            case.scheduler.step()


def cast(case: Case) -> None:
    case.model.head.half()


def unfrozen(case: Case) -> None:
    case.model.enter.requires_grad_(requires_grad=False)


def untied(case: Case) -> None:
    case.model.blocks[1].inner.weight = nn.Parameter(case.model.blocks[1].inner.weight.detach().clone())


def replaced(case: Case) -> None:
    case.model.head = nn.Linear(WIDTH, 4)


def forgotten(case: Case) -> None:
    case.optimizer.state.clear()


def rate_written(case: Case) -> None:
    case.optimizer.param_groups[0]["lr"] = 0.5


def layer_added(case: Case) -> None:
    case.model.extra = nn.Linear(2, 2)


PLANTED: dict[str, tuple[Callable[[Case], None], str, str]] = {
    "cast": (cast, "run.cast", "cast to fewer bits, without master weights: `head.weight (was float32, is float16)`"),
    "added": (layer_added, "run.drift-params", "The model has 2 parameters more than at the audit"),
    "frozen": (unfrozen, "run.drift-trained", "2 parameters frozen since the audit: `enter.weight`, `enter.bias`"),
    "untied": (untied, "run.tie-broken", "`blocks.1.inner.weight` are no longer one parameter"),
    "replaced": (replaced, "run.orphans", "no longer steps `head.weight`, `head.bias`, and steps 2 tensors"),
    "forgotten": (forgotten, "run.state-lost", "The state of 9 parameters is gone"),
    "rate": (rate_written, "run.drift-rate", "The learning rate is 0.5, and the scheduler has set 0.00025"),
}


def tied_with_a_hook() -> Case:
    model = net()
    model.blocks[1].inner.weight = model.blocks[0].inner.weight
    model.enter.register_forward_hook(lambda *_: None)
    optimizer = adam(model)
    return Case(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))


@pytest.mark.parametrize("name", PLANTED)
def test_what_changes_between_two_steps_is_found_by_its_rule(name: str) -> None:
    plant, rule, text = PLANTED[name]
    case = tied_with_a_hook()
    audit = pk.audit(case.model, case.optimizer, case.scheduler)
    assert audit.fine
    assert audit.drift() == ()
    stepped(case, count=2)
    assert audit.drift() == ()
    plant(case)
    found = {finding.rule: finding for finding in audit.drift()}
    assert rule in found
    assert any(part in str(found[rule]).replace("\n     ", "") for part in text.split("|"))
    assert rule == "run.drift-rate" or rule not in {finding.rule for finding in audit.drift()}  # told once


def pruned() -> Case:
    model = net()
    prune.l1_unstructured(model.head, "weight", 0.5)
    return Case(model=model, optimizer=adam(model))


def held_and_frozen() -> Case:
    model = net()
    optimizer = adam(model)
    model.enter.requires_grad_(requires_grad=False)
    return Case(model=model, optimizer=optimizer)


def frozen_first() -> Case:
    model = net()
    model.enter.requires_grad_(requires_grad=False)
    return Case(model=model, optimizer=adam(model))


def critic_beside() -> Case:
    model = net()
    body = [param for name, param in model.named_parameters() if "head" not in name]
    return Case(model=model, optimizer=[torch.optim.AdamW(body), adam(model.head)])


def thaw(case: Case) -> None:
    case.model.enter.requires_grad_()


def added(case: Case) -> None:
    thaw(case)
    case.optimizer.add_param_group({"params": [*case.model.enter.parameters()], "lr": 1e-4})


def of_another(case: Case) -> None:
    thaw(case)
    case.model.stepped_by = adam(case.model.enter)


def hooks_cleared(case: Case) -> None:
    case.model.head._forward_pre_hooks.clear()


CHANGED: dict[str, tuple[Callable[[], Case], Callable[[Case], object], set[str]]] = {
    "pruned again": (pruned, lambda case: prune.l1_unstructured(case.model.head, "weight", 0.3), set()),
    "pruning taken off": (pruned, hooks_cleared, {"run.drift-hooks"}),
    "a hook of its own": (tied_with_a_hook, lambda case: case.model.enter._forward_hooks.popitem(), set()),
    "unfrozen, and held": (held_and_frozen, thaw, set()),
    "unfrozen, and added": (frozen_first, added, set()),
    "unfrozen, and held by another": (frozen_first, of_another, set()),
    "unfrozen, and held by none": (frozen_first, thaw, {"run.drift-trained"}),
    "frozen for a turn": (critic_beside, lambda case: case.model.head.requires_grad_(requires_grad=False), set()),
    "frozen": (critic_beside, lambda case: case.model.enter.requires_grad_(requires_grad=False), {"run.drift-trained"}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_program_changes_on_purpose_is_no_drift(name: str) -> None:
    make, change, rules = CHANGED[name]
    case = make()
    audit = pk.audit(case.model, case.optimizer)
    stepped(case, count=2)
    assert audit.drift() == ()
    change(case)
    assert {one.rule for one in audit.drift()} == rules
    assert audit.drift() == ()


def thawed(rank: int, world: int) -> dict[str, set[str]]:
    """Under wrappers that were made of a model whose first layer was frozen."""
    found: dict[str, set[str]] = {}
    for make in (clean.ddp, fully_shard):
        case = frozen_first()
        model: Any = make(case.model)
        case = Case(model=model, optimizer=adam(model))
        audit = pk.audit(case.model, case.optimizer)
        stepped(case, rank, 2)
        enter = getattr(model, "module", model).enter.requires_grad_()
        case.optimizer.add_param_group({"params": [*enter.parameters()]})
        stepped(case, rank)
        found[make.__name__] = {one.rule for one in audit.drift()}
    return found


def test_what_is_unfrozen_after_ddp_was_made_is_averaged_by_nobody_and_by_fully_shard_it_is(gang2: Gang) -> None:
    for seen in gang2.run(thawed, timeout=60):
        assert seen == {"ddp": {"run.unfrozen", "run.ranks-values"}, "fully_shard": set()}


@pytest.mark.parametrize("prepared", [False, True])
def test_a_cast_is_told_in_words_of_who_drives(prepared: bool) -> None:
    model = net()
    optimizer = adam(model)
    if prepared:
        ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer))
        model = ready.model
    audit = pk.audit(model, optimizer)
    copy.deepcopy(model).bfloat16()
    assert audit.drift() == ()
    model.bfloat16()
    (found,) = audit.drift()
    assert (found.rule, "ready.resume" in found.fix) == ("run.cast", prepared)
    assert ("copy.deepcopy(model).bfloat16()" in found.fix) is not prepared


def evaluating(case: Case) -> None:
    case.model.eval()


def spoiled(case: Case) -> None:
    case.model.blocks[2].inner.weight.data[3, 3] = float("nan")


def zeroed(case: Case) -> None:
    for state in case.optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def begun_anew(case: Case) -> None:
    for state in case.optimizer.state.values():
        state["step"].zero_()


def decay_written(case: Case) -> None:
    case.optimizer.param_groups[0]["weight_decay"] = 0.5


def betas_written(case: Case) -> None:
    case.optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def ticked_twice(case: Case) -> None:
    for _ in range(3):
        stepped(case)
        case.scheduler.step()


def ticked_on(case: Case) -> None:
    stepped(case, count=3)


COURSE: dict[str, tuple[Callable[[Case], None], str, str]] = {
    "evaluating": (evaluating, "run.drift-mode", "3 modules with dropout or batch norm went into evaluation mode"),
    "spoiled": (spoiled, "run.nan", "since the last look: `blocks.2.inner.weight`"),
    "zeroed": (zeroed, "run.drift-zeroed", "The moments of 10 parameters are zero, and were not"),
    "begun anew": (begun_anew, "run.drift-counts", "has counted 0 steps, and 2 at the last look"),
    "decay": (
        decay_written,
        "run.drift-options",
        "weight_decay: It is 0.5 since the last look, and was 0.01",
    ),
    "betas": (
        betas_written,
        "run.drift-options",
        "(0.5, 0.999) since the last look, and was (0.9, 0.999)",
    ),
    "ticked twice": (ticked_twice, "run.drift-ticks", "It was ticked 6 times in 3 steps"),
    "ticked on": (ticked_on, "run.drift-ticks", "made for 4 ticks, and was ticked 5 times: its end is behind it"),
}


@pytest.mark.parametrize("name", COURSE)
def test_where_a_run_goes_wrong_is_found_at_the_next_look(name: str) -> None:
    plant, rule, text = COURSE[name]
    model = net(dropout=0.1)
    optimizer = adam(model)
    case = Case(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4))
    audit = pk.audit(case.model, case.optimizer, case.scheduler)
    stepped(case, count=2)
    assert audit.drift() == ()
    plant(case)
    looks = [audit.drift() for _ in range(1 + (rule == "run.drift-options"))]  # which might be a schedule's at first
    told = [str(one).replace("\n     ", "") for one in looks[-1] if one.rule == rule]
    assert any(text in one for one in told), looks
    assert rule in {"run.nan"} or rule not in {one.rule for one in audit.drift()}  # told once


def test_an_option_that_a_schedule_moves_at_each_step_is_no_drift() -> None:
    case = tied_with_a_hook()
    watch = pk.watch(case.model, case.optimizer, every=1)
    for at in range(6):
        case.optimizer.param_groups[0]["weight_decay"] = 0.01 * (at + 1)
        stepped(case)
    watch.close()
    assert watch.findings == ()


@pytest.mark.parametrize("kind", [rates.OneCycleLR, rates.CyclicLR])
def test_a_momentum_that_a_cycle_writes_once_in_many_steps_is_no_option_that_drifted(kind: Any) -> None:
    model = net()
    for optimizer in (torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), adam(model)):
        given = {"total_steps": 90} if kind is rates.OneCycleLR else {"base_lr": 0.01}
        scheduler = kind(optimizer, max_lr=0.1, **given)
        watch = pk.watch(model, optimizer, every=2)
        for at in range(24):
            stepped(Case(model=model, optimizer=optimizer, scheduler=scheduler if at % 10 == 9 else None))
        watch.close()
        assert watch.findings == ()


def test_a_scheduler_of_another_optimizer_is_told_at_the_first_look() -> None:
    model = net()
    driven, made_again = adam(model), adam(model)
    scheduler = rates.CosineAnnealingLR(driven, 100)
    for optimizer, found in ((made_again, ["run.scheduler-elsewhere"]), (driven, []), ([made_again, driven], [])):
        watch = pk.watch(model, optimizer, scheduler, every=2)
        for _ in range(2):
            assert watch.findings == ()
            stepped(Case(model=model, optimizer=optimizer))
        watch.close()
        assert [one.rule for one in watch.findings] == found


def in_bfloat16(lr: float) -> Case:
    model = net().bfloat16()
    return Case(model=model, optimizer=torch.optim.SGD(model.parameters(), lr))


def warming_up(ticked: bool) -> Case:
    model = net()
    optimizer = adam(model)
    scheduler = rates.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    return Case(model=model, optimizer=optimizer, scheduler=scheduler if ticked else None)


def all_but_the_smallest() -> Case:
    """Of which the smallest weight has a gradient of zero, and stands."""
    model = net()
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    return Case(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def kept_in_masters() -> Case:
    model = net().bfloat16()
    return Case(model=model, optimizer=torch.optim.SGD([one.detach().float() for one in model.parameters()], 1e-9))


STILL: dict[str, tuple[Callable[[], Case], str]] = {
    "too small": (partial(in_bfloat16, 1e-6), "No weight has changed in 32 steps at a rate of 1e-06"),
    "not ticked": (partial(warming_up, ticked=False), "Its learning rate is 0, as it was 2 steps ago"),
    "moving": (partial(in_bfloat16, 0.1), ""),
    "ticked": (partial(warming_up, ticked=True), ""),
    "all but one": (all_but_the_smallest, ""),
    "masters": (kept_in_masters, ""),
}


@pytest.mark.parametrize("name", STILL)
def test_steps_that_change_no_weight_are_told(name: str) -> None:
    make, text = STILL[name]
    case = make()
    dtype = next(case.model.parameters()).dtype
    watch = pk.watch(case.model, case.optimizer, every=2)
    for _ in range(50):
        sum(one.float().sum() * 0 for one in case.model.parameters()).backward()  # each has a gradient, if of zero
        case.model(torch.randn(4, WIDTH).to(dtype)).float().square().mean().backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
        if case.scheduler is not None:
            case.scheduler.step()
    watch.close()
    assert [one.rule for one in watch.findings] == ["run.drift-still"] * bool(text), watch.findings
    assert all(text in str(one).replace("\n     ", "") for one in watch.findings)


def test_a_buffer_that_is_no_longer_a_number_is_told_and_a_mask_is_none() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model.register_buffer("mask", torch.zeros(4))
    model.register_buffer("bound", torch.full((), float("inf")))
    model.register_buffer("scale", torch.ones(()))
    case = Case(model=model, optimizer=adam(model))
    watch = pk.watch(model, case.optimizer, every=1)
    stepped(case, count=3)
    model.mask[1:] = float("-inf")
    stepped(case)
    assert watch.findings == ()
    with torch.no_grad():
        model(torch.full((8, WIDTH), float("inf")))
    stepped(case)
    model.scale.fill_(float("inf"))
    stepped(case)
    watch.close()
    spoiled, infinite = watch.findings
    assert "2 buffers came to be NaN since the last look: `1.running_mean`, `1.running_var`." in str(spoiled)
    assert "1 buffer came to be infinite since the last look: `scale`." in str(infinite)
    assert (spoiled.severity.value, infinite.severity.value) == ("error", "warning")


def test_passes_of_one_order_are_found_where_nobody_sets_the_epoch() -> None:
    for sets, found in ((True, set()), (False, {"run.drift-epoch"})):
        case = tied_with_a_hook()
        sampler: Any = DistributedSampler(rows(), num_replicas=1, rank=0)
        plain = DistributedSampler.__iter__
        watch = pk.watch(case.model, case.optimizer, every=1)
        for epoch in range(3):
            if sets:
                sampler.set_epoch(epoch)
            for x, _ in DataLoader(rows(), 8, sampler=sampler):
                case.model(x).square().mean().backward()
                case.optimizer.step()
                case.optimizer.zero_grad()
        watch.close()
        assert {one.rule for one in watch.findings} == found
        assert DistributedSampler.__iter__ is plain


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types
    return loss.detach()


class Sharp(torch.optim.SGD):
    """As SAM: a step uphill by one gradient, and down again by another."""

    def first_step(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.add_(param.grad, alpha=0.01)

    second_step = torch.optim.SGD.step


def steps(how: str, model: nn.Module) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    """Optimizers of a loop, and a window of it."""
    params = [*model.parameters()]
    each: list[torch.optim.Optimizer] = [torch.optim.SGD(params, lr=0.01, weight_decay=0.1)]
    if how == "of two optimizers":
        each = [torch.optim.AdamW(params[:2], lr=0.01), torch.optim.SGD(params[2:], lr=0.01)]
    elif how == "of a closure":
        each = [torch.optim.LBFGS(params, lr=0.01, max_iter=2)]
    elif how == "uphill and down":
        each = [Sharp(params, lr=0.01)]
    one, clears = each[0], how not in ("that clears nothing", "that clears in place")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def window() -> None:
        if how == "of a closure":
            one.step(lambda: (one.zero_grad(), backward(model))[1])  # type: ignore[arg-type]
            return
        for optimizer in each:
            backward(model)
            if isinstance(one, Sharp):
                one.first_step()
                one.zero_grad()
                backward(model)
            if how == "that a scaler refuses":
                scaler.scale(torch.zeros(()))
                params[0].grad[0, 0] = float("inf")  # type: ignore[index]
                scaler.step(one)
                scaler.update()
            else:
                optimizer.step()
            if clears or how == "that clears in place":
                model.zero_grad(set_to_none=clears)

    return each, window


@pytest.mark.parametrize(
    "how",
    [
        *("that clears", "that clears in place", "that clears nothing", "of two optimizers", "of a closure"),
        *("uphill and down", "that a scaler refuses"),
    ],
)
def test_a_loop_that_steps_each_gradient_once_hears_nothing_and_one_that_steps_it_twice_does(how: str) -> None:
    for twice in (False, True):
        model = net()
        each, window = steps(how, model)
        watch = pk.watch(model, each, every=1000)
        for _ in range(4):
            window()
        before = ["run.left-over"] if how == "that clears nothing" else []
        assert [one.rule for one in watch.findings] == before
        if twice and how != "of a closure":
            backward(model)
            each[0].step()
            with pytest.warns(FindingWarning, match="steps once more over the gradients of its last step"):
                each[0].step()
            assert [one.rule for one in watch.findings] == [*before, "run.stepped-again"]
        watch.close()


def test_passes_of_an_evaluation_may_have_one_order() -> None:
    case = tied_with_a_hook()
    watch = pk.watch(case.model, case.optimizer, every=1)
    held_out = DataLoader(rows(), 8, sampler=DistributedSampler(rows(), num_replicas=1, rank=0))
    for _ in range(3):
        with torch.no_grad():
            for x, _ in held_out:
                case.model(x)
        stepped(case)
    watch.close()
    assert watch.findings == ()


def test_a_hook_that_came_later_may_go() -> None:
    case = tied_with_a_hook()
    watch = pk.watch(case.model, case.optimizer, every=1)
    stepped(case)
    handle = case.model.head.register_forward_hook(lambda *_: None)
    stepped(case)
    handle.remove()
    stepped(case, count=2)
    watch.close()
    assert watch.findings == ()


def test_a_copy_of_a_watched_model_is_not_watched() -> None:
    case = tied_with_a_hook()
    watch = pk.watch(case.model, case.optimizer, every=1)
    stepped(case)
    for _ in range(40):
        copy.deepcopy(case.model)(torch.randn(4, WIDTH))
    watch.close()
    assert watch.findings == ()
    assert not case.model._forward_pre_hooks


@pytest.mark.parametrize("again", [False, True])
def test_an_optimizer_that_another_has_replaced_is_told(again: bool) -> None:
    case = tied_with_a_hook()
    watch = pk.watch(case.model, case.optimizer, every=1)
    stepped(case, count=2)
    if again:
        case = evolve(case, optimizer=adam(case.model))
    stepped(case, count=40)
    watch.close()
    assert [one.rule for one in watch.findings] == (["run.drift-unstepped"] if again else [])


@pytest.mark.parametrize("ticks", [1, 2])
def test_ticks_behind_steps_that_a_scaler_refused_are_no_ticks_too_many(ticks: int) -> None:
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    watch = pk.watch(model, optimizer, scheduler, every=2)
    for at in range(16):
        loss = model(torch.randn(4, WIDTH)).square().mean()
        scaler.scale(loss * (float("inf") if at % 4 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for _ in range(ticks):
            scheduler.step()
    watch.close()
    assert torch.amp.GradScaler.step.__module__ == "torch.amp.grad_scaler"
    assert {one.rule for one in watch.findings} == ({"run.drift-ticks"} if ticks == 2 else set())


@pytest.mark.parametrize("written", [False, True])
def test_a_scheduler_that_another_takes_over_from_has_not_been_overwritten(written: bool) -> None:
    """As torch's recipe of stochastic weight averaging does it."""
    case = evolve(tied_with_a_hook(), scheduler=None)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    case, scheduler = evolve(case, optimizer=optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 200)
    then = SWALR(optimizer, swa_lr=0.01, anneal_epochs=5)
    watch = pk.watch(case.model, optimizer, scheduler, every=2)
    for at in range(60):
        stepped(case)
        (scheduler if at < 20 else then).step()
        if written and at > 40:
            optimizer.param_groups[0]["lr"] = 0.3
    watch.close()
    assert {one.rule for one in watch.findings} == ({"run.drift-rate", "run.drift-ticks"} if written else set())


@pytest.mark.parametrize("cycles", [True, False])
def test_a_momentum_that_the_scheduler_cycles_once_in_a_pass_is_no_drift(cycles: bool) -> None:
    case = evolve(tied_with_a_hook(), scheduler=None)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6, cycle_momentum=cycles)
    case, watch = evolve(case, optimizer=optimizer), pk.watch(case.model, optimizer, scheduler, every=5)
    for at in range(120):
        stepped(case)
        if at % 40 == 39:
            scheduler.step()
            optimizer.param_groups[0]["momentum"] -= 0.0 if cycles else 0.1
    watch.close()
    assert {one.rule for one in watch.findings} == (set() if cycles else {"run.drift-options"})


def test_windows_may_grow() -> None:
    case = tied_with_a_hook()
    watch = pk.watch(case.model, case.optimizer, every=1)
    for window in (1, 8, 64):
        for _ in range(3):
            for _ in range(window):
                case.model(torch.randn(4, WIDTH)).square().mean().backward()
            case.optimizer.step()
            case.optimizer.zero_grad()
    watch.close()
    assert watch.findings == ()


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], Callable[[int], bool], str]] = {
    "no longer": (partial(lr_scheduler.LinearLR, total_iters=1000), lambda at: at < 5, "last 32 steps, many more"),
    "steps on, without an end": (partial(lr_scheduler.ExponentialLR, gamma=0.9), lambda at: at < 5, "last 32 steps"),
    "by passes of twenty": (partial(lr_scheduler.StepLR, step_size=3), lambda at: at % 20 == 19, ""),
    "by passes, and no longer": (partial(lr_scheduler.StepLR, step_size=3), lambda at: at in (2, 5), "last 96 steps"),
    "by passes that grow": (partial(lr_scheduler.StepLR, step_size=3), lambda at: at in (4, 9, 69), ""),
    "one pass": (partial(lr_scheduler.StepLR, step_size=3), lambda at: at == 9, ""),
    "never, and made for steps": (
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=1000),
        lambda at: False,
        "last 32 steps, and is ticked by the step",
    ),
    "never, and made for fewer": (partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9), lambda at: False, ""),
    "never, and made for passes": (partial(lr_scheduler.StepLR, step_size=3), lambda at: False, ""),
    "at its end": (partial(lr_scheduler.LinearLR, end_factor=0.0, total_iters=5), lambda at: at < 5, ""),
    "warm": (partial(lr_scheduler.LambdaLR, lr_lambda=lambda at: min(1.0, (at + 1) / 5)), lambda at: at < 5, ""),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_is_ticked_no_longer_is_told(name: str) -> None:
    make, ticks, says = SCHEDULERS[name]
    case = tied_with_a_hook()
    case = evolve(case, optimizer=adam(case.model), scheduler=None)
    scheduler = make(case.optimizer)
    watch = pk.watch(case.model, case.optimizer, scheduler, every=10)
    for at in range(130):
        stepped(case)
        if ticks(at):
            scheduler.step()
    watch.close()
    told = [one for one in watch.findings if one.rule != "run.drift-still"]  # at an end of which the rate is 0
    assert [one.rule for one in told] == ["run.drift-ticks"] * bool(says)
    assert all(f"It was not ticked in the {says}" in one.what for one in told)
    assert (len(told) < len(watch.findings)) == (name == "at its end")


class Renamed(nn.Module):
    """Compiled anew in each step, until torch gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.name = nn.Linear(WIDTH, 4), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.name == "" else self.inner(x) / 10


def test_code_that_is_compiled_in_each_step_is_found() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.guard_failures.clear()
    model = Renamed()
    optimizer = adam(model)
    fast: Any = torch.compile(model, backend="eager")
    watch = pk.watch(fast, optimizer, every=4)
    for at in range(12):
        model.name = f"step {at}"
        fast(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    torch._dynamo.utils.guard_failures.clear()
    assert [one.rule for one in watch.findings] == ["run.recompiled"]


def test_an_audit_of_facts_alone_says_what_to_call() -> None:
    facts = pk.audit(net()).facts
    with pytest.raises(ValueError, match=r"call pk\.audit\(model, optimizer\) in the program that trains"):
        pk.Audit(facts=facts, findings=()).drift()


def tensor_parallel(rank: int, world: int) -> Case:
    """The inner layers in parts, and what stands beside them whole on both ranks, which read the same samples."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    whole = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(net(), mesh, {f"blocks.{at}.inner": whole for at in range(3)})
    return Case(model=model, optimizer=adam(model))


CLEAN_ALONE = (clean.alone, clean.alone_with_a_schedule, clean.checkpointed, clean.frozen_body)
CLEAN_PAIR = (
    *(clean.plain_ddp, clean.ddp_with_batch_norm, clean.ddp_checkpointed, clean.fsdp1, clean.fsdp1_flat),
    *(clean.fsdp1_checkpointed, clean.fsdp2, clean.fsdp2_mixed, clean.fsdp2_hybrid),
    *(tensor_parallel, clean.accelerated, clean.accelerated_mixed),
)
CLEAN_ZERO = (clean.zero_0, clean.zero_1, clean.zero_2, clean.zero_3)


@pytest.mark.parametrize("make", [*CLEAN_ALONE, clean.two_optimizers], ids=lambda make: make.__name__)
def test_a_program_that_only_trains_does_not_drift(make: Callable[[int, int], Case]) -> None:
    case = make(0, 1)
    watch = pk.watch(case.model, case.optimizer, case.scheduler, every=2)
    stepped(case, count=5)
    assert (watch.findings, watch.steps, watch.looks) == ((), 5, 2)


def watched(rank: int, world: int, programs: str) -> dict[str, Any]:
    if programs == "zero":
        lean()
    found: dict[str, Any] = {}
    for make in CLEAN_ZERO if programs == "zero" else CLEAN_PAIR:
        with launched(rank, world):
            case = make(rank, world)
            watch = pk.watch(case.model, case.optimizer, case.scheduler, every=1, share=1.0)
            stepped(case, 0 if make is tensor_parallel else rank, 4)
            watch.close()
        found[make.__name__] = tuple(map(str, watch.findings)) or (watch.steps, watch.looks)
    return found


def test_wrapped_programs_that_only_train_do_not_drift(gang2: Gang) -> None:
    pytest.importorskip("accelerate")
    for seen in gang2.run(watched, "pair", timeout=120):
        assert seen == dict.fromkeys(seen, (4, 4))
        assert len(seen) == len(CLEAN_PAIR)


def test_what_deepspeed_trains_does_not_drift(gang2: Gang) -> None:
    pytest.importorskip("deepspeed")
    for seen in gang2.run(watched, "zero", timeout=120):
        assert seen == dict.fromkeys(seen, (4, 4))


def parting(rank: int, world: int) -> dict[str, list[str]]:
    """On rank 1 one bit of one weight, then a rate, then a parameter that is gone; and ranks that nobody averages."""
    case = clean.plain_ddp(rank, world)
    audit = pk.audit(case.model, case.optimizer)
    stepped(case, rank, 2)
    found = {"nothing": [str(one) for one in audit.drift()]}
    bits = case.model.module.blocks[1].inner.weight.detach().view(torch.int32)
    bits[3, 3] ^= rank
    found["bit"] = [str(one) for one in audit.drift()]
    bits[3, 3] ^= rank
    found["back"] = [str(one) for one in audit.drift()]
    with case.model.no_sync():
        found["no sync"] = [one.rule for one in audit.drift()]
    audit.drift()
    case.optimizer.param_groups[0]["lr"] += rank
    found["rate"] = [str(one) for one in audit.drift()]
    if rank == 1:
        del case.model.module.head
    found["gone"] = [one.rule for one in audit.drift()]
    model = net()
    case = Case(model=model, optimizer=adam(model))
    watch = pk.watch(case.model, case.optimizer, every=1)
    stepped(case, rank, 60)
    found["averaged by nobody"] = [one.rule for one in watch.findings]
    return found


def test_ranks_that_part_are_told_on_all_of_them(gang2: Gang) -> None:
    first, second = gang2.run(parting)
    for seen in (first, second):
        assert seen["nothing"] == seen["back"] == []
        assert "Ranks that hold the same of 1 parameter differ: `blocks.1.inner.weight`" in seen["bit"][0]
        assert seen["no sync"] == ["run.averaging-off"]
        assert "Ranks step with different options: lr of group 0 is 0.001 on rank 0, 1.001 on rank 1" in seen["rate"][0]
        assert set(seen["averaged by nobody"]) == {"run.ranks-values"}
    apart = {"run.ranks-values", "run.ranks-optimizers"}  # the rates still differ
    assert set(first["gone"]) == apart  # nobody hangs where a rank has lost a parameter
    assert set(second["gone"]) == {"run.drift-params", "run.orphans", "run.state-lost", *apart}


def flipped(rank: int, world: int) -> int:
    """Looks until a flipped bit of rank 1 is told, at the share that a watch has by itself."""
    case = clean.plain_ddp(rank, world)
    watch = pk.watch(case.model, case.optimizer, every=1)
    stepped(case, rank, 3)
    case.model.module.blocks[1].inner.weight.detach().view(torch.int32)[3, 3] ^= rank
    while not watch.findings and watch.looks < 100:
        stepped(case, rank)
    watch.close()
    return watch.looks - 3


def test_a_flipped_bit_is_told_within_a_round_of_looks(gang2: Gang) -> None:
    first, second = gang2.run(flipped)
    assert first == second <= ROUND + 1


def test_what_is_found_is_reported_once_or_given_to_a_function() -> None:
    case = tied_with_a_hook()
    watch = pk.watch(case.model, case.optimizer, case.scheduler, every=1)
    stepped(case)
    rate_written(case)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", FindingWarning)
        stepped(case)
        rate_written(case)
        stepped(case)
    (one,) = (one for one in heard if isinstance(one.message, FindingWarning))
    assert str(one.message).startswith(
        "warning run.drift-rate at optimizer.param_groups[0].lr: In step 2: The learning"
    )
    watch.close()
    rate_written(case)
    stepped(case)
    assert (watch.steps, watch.looks, len(watch.findings)) == (3, 3, 1)

    def stop(findings: tuple[pk.Finding, ...]) -> None:
        raise RuntimeError(findings[0].rule)

    pk.watch(case.model, case.optimizer, case.scheduler, every=1, act=stop)
    rate_written(case)
    with pytest.raises(RuntimeError, match=r"run\.drift-rate"):
        stepped(case)


def test_weights_are_compared_in_turn_within_their_share_of_the_time() -> None:
    """A look that reads 1e8 elements a second, and takes a millisecond besides, every 60 seconds."""
    sizes = {f"w{at}": 10 ** (2 + at % 5) for at in range(40)}
    rotation = Rotation(names=tuple(sorted(sizes)), sizes=sizes)
    spent, total, seen, looks = 0.0, 0.0, set[str](), 2000
    for _ in range(looks):
        taken = rotation.take(every=False)
        rotation.account(taken, 60.0, spent, 0.001)
        spent = 0.001 + sum(sizes[name] for name in taken) / 1e8
        total += spent
        seen |= set(taken)
    assert seen == set(sizes)
    assert 0.0005 < total / (60.0 * looks) < 0.0011
    assert rotation.take(every=True) != ()
    slow, seen = Rotation(names=rotation.names, sizes=sizes, speed=1.0), set()  # its share is nothing
    for _ in range(ROUND):
        seen |= set(slow.take(every=False))
    assert seen == set(sizes)
    rotation.drop({"w0"})
    assert "w0" not in rotation.take(every=True)


def test_groups_that_deepspeed_steps_one_by_one_are_one_step() -> None:
    case = tied_with_a_hook()
    watch = pk.watch(case.model, case.optimizer, every=1)
    engine = watch._engine = SimpleNamespace(global_steps=0)
    for _ in range(3):
        case.optimizer.step()
    assert (watch.steps, watch.looks) == (1, 1)
    engine.global_steps = 1
    case.optimizer.step()
    assert (watch.steps, watch.looks) == (2, 2)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"model": 3}, TypeError, "model is 3 .*pass the prepared"),
        ({"model": nn.Linear(2, 2)}, TypeError, r"optimizer is None; pass the one that steps"),
        ({"model": nn.Linear(2, 2), "every": 0}, ValueError, "every is 0"),
        ({"model": nn.Linear(2, 2), "share": 0.0}, ValueError, "share is 0.0"),
    ],
)
def test_what_cannot_be_watched_is_named(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        pk.watch(**given)


def data() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.arange(8) + at % 3, "labels": torch.arange(8)} for at in range(16)]


def test_a_trainer_of_transformers_is_watched_by_one_line(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    class Meddles(transformers.TrainerCallback):  # type: ignore[misc,name-defined]  # imported where it is there
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 3:
                given["model"].lm_head.weight.data = given["model"].lm_head.weight.data.double().float()
                given["model"].model.norm.weight.requires_grad_(requires_grad=False)

    def trained(callbacks: list[Any]) -> DriftWatch:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=2, num_train_epochs=1,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=llama(), args=arguments, train_dataset=data(), callbacks=callbacks)
        watch = pk.watch(trainer, every=2)
        trainer.train()
        return watch

    watch = trained([])
    assert (watch.findings, watch.steps, watch.looks) == ((), 8, 4)
    assert [finding.rule for finding in trained([Meddles()]).findings] == ["run.drift-trained"]
    with pytest.raises(TypeError, match=r"write pk\.watch\(trainer\)"):
        pk.watch(transformers.Trainer(model=llama()), adam(net()))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_of_lightning_is_watched_by_one_line(package: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip(package)

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # imported where it is there
        meddle = False

        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def on_train_batch_start(self, batch: Any, at: int) -> None:
            if at == 3 and self.meddle:
                self.optimizers().param_groups[0]["lr"] = 0.5

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = adam(self.net)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]

    def trained(*, meddle: bool) -> DriftWatch:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False, **quiet
        )
        watch = pk.watch(trainer, every=2)
        module = Module()
        module.meddle = meddle
        trainer.fit(module, DataLoader(rows(), batch_size=4))
        return watch

    watch = trained(meddle=False)
    assert (watch.findings, watch.steps, watch.looks) == ((), 8, 4)
    assert [finding.rule for finding in trained(meddle=True).findings] == ["run.drift-rate"]


@pytest.mark.parametrize(("phase", "ticks", "told"), [(6, 1, []), (1, 1, []), (1, 2, ["run.drift-ticks"])])
def test_ticks_of_optimizers_in_turn_are_counted_over_the_steps_of_both(
    phase: int, ticks: int, told: list[str]
) -> None:
    model = net()
    params = [*model.parameters()]
    pair = [torch.optim.SGD(half, 0.01) for half in (params[:4], params[4:])]
    schedulers = [rates.CosineAnnealingLR(one, 200) for one in pair]
    watch = pk.watch(model, pair, schedulers[1], every=1)
    for at in range(24):
        turn = at // phase % 2
        stepped(Case(model=model, optimizer=pair[turn]))
        model.zero_grad()
        for each in schedulers if phase == 1 else schedulers[turn : turn + 1]:
            for _ in range(ticks):
                each.step()
    watch.close()
    assert [one.rule for one in watch.findings] == told

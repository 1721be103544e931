"""What is merely odd warns, or is silent, and trains as plain torch does; what trains otherwise is still refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import prepkit as pk
from prepkit.facts.run import Unlike
from prepkit.findings import FindingWarning, RunRefused, Severity
from prepkit.rules import LAW
from prepkit.rules.rule import Hit, Moment
from tests.audit.case import WIDTH, Case, adam, net
from tests.audit.test_rules import FINE, RANK
from tests.support.gang import Gang, GangError

# --- the loop ---


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(rank: int, at: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, 8).view(2, 4) * (1 + rank + at)


def whole(model: nn.Module) -> list[Tensor]:
    """The parameters, put together from their shards."""
    return [getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for one in model.parameters()]


def evaluated_between(rank: int, world: int, engine: Any, times: int) -> list[Tensor]:
    """Weights after three steps, with so many evaluations between each backward and its step."""
    del world
    ready = pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1)), layers()))
    for at in range(3):
        ready.backward(ready.model(batch(rank, at)).square().mean())
        for _ in range(times):
            with ready.evaluating():
                ready.model(batch(rank, 9))
        assert ready.step()
    return whole(ready.model)


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2()], ids=["ddp", "fsdp2"])
def test_an_evaluation_between_backward_and_step_changes_nothing_where_gradients_stay(gang2: Gang, engine: Any) -> None:
    found = gang2.run(evaluated_between, engine, 1, timeout=60)
    for one, other in zip(found, gang2.run(evaluated_between, engine, 0, timeout=60), strict=True):
        assert all(map(torch.equal, one, other))


def test_an_evaluation_between_backward_and_step_is_refused_where_fsdp1_may_lose_them(gang2: Gang) -> None:
    with pytest.raises(GangError, match="FSDP1 may lose the"):
        gang2.run(evaluated_between, pk.FSDP1(), 1, timeout=60)


def test_a_checkpoint_inside_an_evaluation_that_puts_no_other_weights_is_that_of_outside(tmp_path: Any) -> None:
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), layers()))
    ready.backward(ready.model(batch(0, 0)).mean())
    ready.step()
    before = whole(ready.model)
    with ready.evaluating():
        ready.save(str(tmp_path))
    again = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), layers()))
    with again.evaluating():
        assert again.resume(str(tmp_path))
    assert all(map(torch.equal, before, again.model.parameters()))


def by_hand(**options: Any) -> Any:
    return pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1), **options), layers()))


def test_a_step_by_hand_where_ready_step_does_no_more_trains_as_torch_does_and_warns_once() -> None:
    ready, plain = by_hand(), layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for at in range(3):
            ready.backward(ready.model(batch(0, at)).square().mean())
            ready.optimizer.step()
            ready.optimizer.zero_grad()
            plain(batch(0, at)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, ready.model.parameters(), plain.parameters()))
    told = [one.message.finding.rule for one in caught if isinstance(one.message, FindingWarning)]
    assert told == ["loop.stepped-by-hand"]
    ready.backward(ready.model(batch(0, 3)).square().mean())
    ready.optimizer.step()
    with pytest.raises(RunRefused, match="gradients-left-over"):
        ready.backward(ready.model(batch(0, 4)).square().mean())


def test_a_step_by_hand_after_a_micro_batch_of_several_is_refused_although_another_was_warned_of() -> None:
    for options in ({"clip": pk.ClipNorm(1.0)}, {"accumulation": 2}):
        ready = by_hand(**options)
        for _ in range(2):
            ready.optimizer.zero_grad()
            ready.backward(ready.model(batch(0, 0)).square().mean())
            before = whole(ready.model)
            with pytest.raises(RunRefused, match=r"Write ready\.step\(\) in its place"):
                ready.optimizer.step()
            assert all(map(torch.equal, before, ready.model.parameters()))
        assert ready.step() is ("clip" in options)


# --- prepared objects ---


def eval_mode() -> Case:
    model = net(dropout=0.1).eval()
    return Case(model=model, optimizer=adam(model))


def branch_off() -> Case:
    model = net()
    model.blocks[1].drop.p = 1.0
    return Case(model=model, optimizer=adam(model))


def no_evaluation() -> Case:
    model = net()
    full = DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=4, shuffle=True)
    short = DataLoader(TensorDataset(torch.randn(2, WIDTH)), batch_size=4, drop_last=True)
    return Case(model=model, optimizer=adam(model), loaders=(full, short))


def rate_to_come() -> Case:
    model = net()
    return Case(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.0))


def like_another_name() -> Case:
    model = net()
    model.enter.trainning = False
    return Case(model=model, optimizer=adam(model))


def trained(case: Case, steps: int = 2) -> None:
    for at in range(steps):
        for group in case.optimizer.param_groups:
            group["lr"] = group["lr"] or 1e-2  # as a loop that sets it
        case.optimizer.zero_grad()
        case.model(torch.full((4, WIDTH), 0.1 * (1 + at))).square().mean().backward()
        case.optimizer.step()


ODD: dict[str, Callable[[], Case]] = {
    "run.eval-mode": eval_mode,
    "run.drops-all": branch_off,
    "run.no-batches": no_evaluation,
    "run.rate-zero": rate_to_come,
    "run.unread-setting": like_another_name,
}


@pytest.mark.parametrize("rule", ODD)
def test_a_program_that_is_merely_odd_is_warned_of_and_trains(rule: str) -> None:
    case = ODD[rule]()
    found = pk.audit(case.model, case.optimizer, case.scheduler, case.loaders).findings
    assert [(one.rule, one.severity) for one in found if one.rule != "run.in-order"] == [(rule, Severity.WARNING)]
    before = whole(case.model)
    trained(case)
    moved = [not torch.equal(one, other) for one, other in zip(before, case.model.parameters(), strict=True)]
    assert sum(moved) >= len(moved) - 2, "all but what a branch that is switched off holds"


def test_what_hurts_beside_the_odd_is_still_an_error() -> None:
    frozen, empty = net(), no_evaluation()
    frozen.enter.requires_grad = False
    for case, rule in (
        (Case(model=frozen, optimizer=adam(frozen)), "run.unread-setting"),
        (evolve(empty, loaders=empty.loaders[::-1]), "run.no-batches"),
    ):
        found = pk.audit(case.model, case.optimizer, case.scheduler, case.loaders).findings
        assert (rule, Severity.ERROR) in {(one.rule, one.severity) for one in found}


def test_pads_behind_the_text_that_no_label_counts_change_no_gradient_and_are_silent() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.audit.by_habit import llama

    del transformers
    model = llama(pad_token_id=0)
    ids = torch.tensor([5, 6, 7, 0, 0, 0])
    sample = {"input_ids": ids, "labels": torch.where(ids == 0, -100, ids)}
    grads = []
    for more in ({}, {"attention_mask": (ids != 0).long()[None]}):
        copied = copy.deepcopy(model)
        copied(input_ids=ids[None], labels=sample["labels"][None], **more).loss.backward()
        grads.append([param.grad for param in copied.parameters() if param.requires_grad])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*grads, strict=True))
    counted = {"input_ids": ids, "labels": ids}
    for given, wanted in ((sample, False), (counted, True)):
        loader = DataLoader([given] * 4, batch_size=2, shuffle=True)  # type: ignore[arg-type]
        found = {one.rule for one in pk.audit(model, adam(model), None, (loader,)).findings}
        assert ("run.samples-odd" in found) is wanted


# --- while a loop runs ---


def widened(case: Case) -> None:
    case.model.head.double()
    case.model.head.float()
    case.model.extra = nn.Linear(2, 2).requires_grad_(requires_grad=False)


def warmed_up(case: Case) -> None:
    for group in case.optimizer.param_groups:
        group["lr"] = 1e-5


def restarted(case: Case) -> None:
    case.optimizer.state.clear()


def frozen_on_the_way(case: Case) -> None:
    case.model.enter.requires_grad_(requires_grad=False)
    first = {id(param) for param in case.model.enter.parameters()}
    for group in case.optimizer.param_groups:
        group["params"] = [param for param in group["params"] if id(param) not in first]


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (widened, {"run.drift-params"}),
        (warmed_up, {"run.drift-rate"}),
        (restarted, {"run.state-lost"}),
        (frozen_on_the_way, {"run.drift-trained", "run.state-lost"}),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_a_change_on_purpose_while_a_loop_runs_is_no_error(change: Callable[[Case], None], rules: set[str]) -> None:
    model = net()
    optimizer = adam(model)
    case = Case(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    audit = pk.audit(model, optimizer, case.scheduler)
    trained(case)
    audit.drift()
    change(case)
    found = audit.drift()
    assert {one.rule for one in found} <= rules
    assert {one.severity for one in found} == {Severity.WARNING}
    trained(case)


def test_stages_of_a_pipeline_may_step_with_options_of_their_own() -> None:
    ask = [rule for rule in LAW if rule.id in ("run.ranks-optimizers", "run.ranks-schedulers")]

    unlike = (Unlike(name="lr of group 0", held="0.1 on rank 0, 0.2 on rank 1"),)

    def found(names: str) -> list[Hit]:
        ranks = (evolve(RANK, names="a"), evolve(RANK, rank=1, names=names, scheduler="b"))
        return [hit for rule in ask for hit in rule.check(evolve(FINE, ranks=ranks, unlike=unlike))]

    assert found("b") == []
    assert len(found("a")) == 2


# --- all rows ---


def test_an_error_of_the_running_half_that_cannot_be_accepted_says_why_nothing_goes_on() -> None:
    early = {Moment.PLAN, Moment.PLANNED, Moment.FORWARD}
    running = [rule for rule in LAW if not rule.told_by and not set(rule.at) & early]
    hard = {rule.id for rule in running if rule.severity is Severity.ERROR and not rule.overridable}
    assert hard == {rule.id for rule in running if rule.stops}
    assert len(hard) <= 20

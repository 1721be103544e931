"""Programs of several phases: what one leaves to the next, and that right ones have nothing there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

from prepkit.auditing import looks
from prepkit.auditing.script import audit_run

Train = Callable[[], None]
WIDTH = 8


def said(train: Train, steps: int = 200) -> list[str]:
    """Rules of what is above a note."""
    found = audit_run(train, steps=steps)
    assert found is not None
    return [one.rule for one in found.findings if one.severity.name != "NOTE"]


def net(*, drops: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(drops), nn.Linear(16, 3))


def learn(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    fn.cross_entropy(model(torch.randn(6, WIDTH)), torch.randint(3, (6,))).backward()
    optimizer.step()


def schedule(optimizer: Any) -> Any:
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 200)]
    return SequentialLR(optimizer, parts, milestones=[4])


def in_stages(*, then: str, length: int = 36, new: bool = True) -> Train:
    """A new optimizer for each stage; ``then``: what becomes of the rate."""

    def train() -> None:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        ticked = schedule(optimizer)
        for stage in range(4):
            if stage and new:
                optimizer = torch.optim.AdamW(model.parameters(), ticked.get_last_lr()[0])
                ticked = schedule(optimizer) if then == "new" else ticked
            for _ in range(length):
                learn(model, optimizer)
                if then != "none":
                    ticked.step()
                if then == "by hand":
                    for group in optimizer.param_groups:
                        group["lr"] = ticked.get_last_lr()[0]

    return train


def finished() -> None:
    """Adam first, and an LBFGS behind it in the same loop, where the scheduler of Adam is ticked on."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(6, WIDTH)
    adam, last = torch.optim.Adam(model.parameters(), 1e-3), torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    ticked = ExponentialLR(adam, 0.99)

    def closes() -> torch.Tensor:
        last.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    for at in range(20):
        if at < 10:
            learn(model, adam)
        else:
            last.step(closes)
        ticked.step()


def in_turns() -> None:
    """Two optimizers of one model in turn, with a scheduler each."""
    torch.manual_seed(0)
    model = net()
    both = [torch.optim.AdamW(model.parameters(), 1e-3) for _ in range(2)]
    ticked = [ExponentialLR(one, 0.99) for one in both]
    for at in range(24):
        learn(model, both[at // 6 % 2])
        for one in ticked:
            one.step()


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("then", ["new", "by hand", "none"])
def test_stages_with_optimizers_of_their_own_are_right(then: str, new: bool) -> None:
    assert said(in_stages(then=then, new=new)) == []


@pytest.mark.parametrize("train", [finished, in_turns])
def test_other_optimizers_behind_a_scheduler_are_right(train: Train) -> None:
    assert "run.scheduler-elsewhere" not in said(train)


def test_a_closure_that_is_called_several_times_wastes_nothing() -> None:
    assert said(finished) == []


def test_a_scheduler_whose_optimizer_was_replaced_is_told_with_its_line() -> None:
    assert said(in_stages(then="old")) == ["run.scheduler-elsewhere"]
    found = audit_run(in_stages(then="old"), steps=200)
    assert found is not None
    (told,) = found.findings
    assert "test_phases.py:" in told.what
    assert "ticks a `SequentialLR` of an optimizer that steps no more" in told.what


def test_an_optimizer_for_each_step_is_told_still() -> None:
    assert "run.optimizer-anew" in said(in_stages(then="none", length=1))


def two_trainings(*, second: str, steps: int = 5) -> Train:
    """A short training of one model, and then that of another, by one function."""

    def fits(model: nn.Module, optimizer: Any, steps: int, scheduler: Any = None) -> None:
        for _ in range(steps):
            learn(model, optimizer)
            for _ in range(0 if scheduler is None else 1 + (second == "ticks twice")):
                scheduler.step()

    def train() -> None:
        torch.manual_seed(0)
        first, then = net(), net()
        fits(first, torch.optim.Adam(first.parameters(), 1e-3), 5)
        if second == "holds another":
            other = torch.optim.Adam(net().parameters(), 1e-3)
            fits(then, other, 5)
        else:
            optimizer = torch.optim.AdamW(then.parameters(), 1e-3)
            fits(then, optimizer, 12, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200))

    return train


def test_a_second_training_is_looked_at_and_named() -> None:
    found = audit_run(two_trainings(second="right"), steps=50)
    assert found is not None
    assert found.fine
    assert "looked at too: Sequential, which AdamW trains behind it, up to its step 12" in str(found)
    assert said(two_trainings(second="holds another"), 50) != []


def tuned_behind(clears: bool) -> Train:
    """All is trained, then a part, with more behind it, by another optimizer; the rest keeps its gradients, frozen."""

    def train() -> None:
        torch.manual_seed(0)
        model = net()
        whole = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(5):
            learn(model, whole)
        model[0].requires_grad_(requires_grad=False)
        if clears:
            model.zero_grad()
        model.append(nn.Linear(3, 3))
        part = torch.optim.SGD([*model[3].parameters(), *model[4].parameters()], 0.01)
        for _ in range(5):
            learn(model, part)
        assert whole.state

    return train


@pytest.mark.parametrize("clears", [False, True])
def test_what_is_tuned_behind_a_first_training_is_stepped_once(clears: bool) -> None:
    assert said(tuned_behind(clears), 20) == []


def one_optimizer_twice(*, between: str) -> Train:
    """Two trainings of one model by one optimizer; ``between``: what is done before the second."""

    def fits(model: nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            learn(model, optimizer)

    def train() -> None:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        fits(model, optimizer, 12)
        if between != "nothing":
            model[3] = nn.Linear(16, 3)  # type: ignore[index]
        if between == "held":
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        fits(model, optimizer, 9)

    return train


def test_a_second_training_by_the_same_optimizer_is_looked_at() -> None:
    assert set(said(one_optimizer_twice(between="a new head"), 3)) == {"run.orphans", "run.state-lost"}
    for fine in ("nothing", "held"):
        assert said(one_optimizer_twice(between=fine), 3) == []


def passes(*, fixed: bool) -> Train:
    """An average is put into the model behind a pass, and stays there."""

    def train() -> None:
        torch.manual_seed(0)
        model, data = net(), [(torch.randn(WIDTH), at % 3) for at in range(48)]
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        average = copy.deepcopy(model).requires_grad_(requires_grad=False)
        for _ in range(3):
            model.train()
            for x, y in DataLoader(data, 6, shuffle=True):  # type: ignore[arg-type]  # a list is a data set too
                optimizer.zero_grad()
                fn.cross_entropy(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for kept, param in zip(average.parameters(), model.parameters(), strict=True):
                        kept.lerp_(param, 0.1)
            trained = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            model.eval()
            with torch.no_grad():
                model(torch.randn(6, WIDTH))
            if fixed:
                model.load_state_dict(trained)

    return train


@pytest.mark.parametrize("steps", [4, 8])
def test_the_first_step_behind_a_short_pass_is_looked_at(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(passes(fixed=False), steps) == ["run.average-stays"]
    assert said(passes(fixed=True), steps) == []
    monkeypatch.setattr(looks, "WAITS_S", 0.0)
    assert said(passes(fixed=False), steps) == []


def backbone(model: nn.Module) -> list[nn.Parameter]:
    return [*model[0].parameters()]  # type: ignore[index]


def learn_backbone(model: nn.Module, optimizer: Any) -> None:
    for param in backbone(model):
        param.requires_grad = True
    for _ in range(4):
        learn(model[0], optimizer)  # type: ignore[index]
    for param in backbone(model):
        param.requires_grad = False


def steps_by_hand(model: nn.Module, optimizer: Any) -> None:
    """The backbone without an optimizer."""
    learn(model, optimizer)
    with torch.no_grad():
        for param in backbone(model):
            if param.grad is not None:
                param.sub_(0.1 * param.grad)
    model.zero_grad()


def pretrains() -> None:
    """Something else, which is looked at as the first model."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        learn(model, optimizer)


def thawed(*, then: str, steps: int = 8, second: bool = True) -> Train:
    """A head, and its backbone behind some steps; ``then``: who steps that."""

    def train() -> None:
        torch.manual_seed(0)
        if second:
            pretrains()
        model = net()
        for param in backbone(model):
            param.requires_grad = False
        every = [*model.parameters()] if then == "all held" else [*model[3].parameters()]  # type: ignore[index]
        other = torch.optim.SGD(backbone(model), 0.1)
        if then == "nobody any more":
            learn_backbone(model, other)
        optimizer: Any = torch.optim.AdamW(every, 1e-3)
        often = {"another": 1, "now and then": 6}.get(then, 0)
        if not often:
            del other
        for _ in range(steps):
            learn(model, optimizer)
        for param in backbone(model):
            param.requires_grad_(requires_grad=then != "never")
        if then == "group":
            optimizer.add_param_group({"params": backbone(model)})
        if then == "anew":
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for at in range(3 * steps):
            (steps_by_hand if then == "by hand" else learn)(model, optimizer)
            if often and at % often == often - 1:
                other.step()
                other.zero_grad()

    return train


def probed() -> None:
    """How much a frozen backbone would change, now and then."""
    torch.manual_seed(0)
    model = net()
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    optimizer = torch.optim.AdamW(model[3].parameters(), 1e-3)  # type: ignore[index]
    for _ in range(12):
        model[0].requires_grad_(requires_grad=True)  # type: ignore[index]
        taken = torch.autograd.grad(model(torch.randn(6, WIDTH)).square().mean(), backbone(model))
        assert len(taken) == 2
        model[0].requires_grad_(requires_grad=False)  # type: ignore[index]
        learn(model, optimizer)


def test_weights_that_are_unfrozen_and_held_by_nobody_are_told_once() -> None:
    assert [said(thawed(then="nobody", second=one)) for one in (False, True)] == [["run.drift-trained"]] * 2
    found = audit_run(thawed(then="nobody any more"), steps=200)
    assert found is not None
    (told,) = (one for one in found.findings if one.severity.name != "NOTE")
    assert told.rule == "run.unfrozen-unheld"
    assert "`0.weight` and 1 more weight of Sequential" in told.what


@pytest.mark.parametrize("then", ["group", "anew", "another", "now and then", "all held", "never", "by hand"])
def test_weights_that_are_unfrozen_and_stepped_are_right(then: str) -> None:
    assert said(thawed(then=then)) == (["run.drift-trained"] if then == "by hand" else [])  # which a watch cannot see
    assert "run.unfrozen-unheld" not in said(thawed(then=then, second=False))


def test_a_probe_of_frozen_weights_is_right() -> None:
    assert said(probed) == []


class Adapted(nn.Module):
    """A frozen layer, and what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Parameter(0.1 * torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))
        self.merged, self.rests = False, False

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.base(x)
        return said if self.merged or self.rests else said + x @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self, *, sign: int) -> None:
        self.base.weight.data += sign * self.up @ self.down
        self.merged = sign > 0


def with_adapters(*, then: str) -> Train:
    """Evaluates twice; ``then``: what becomes of the adapters."""

    def train() -> None:
        torch.manual_seed(0)
        first, second = Adapted(), Adapted()
        model: Any = nn.ModuleDict({"body": nn.Sequential(first, nn.GELU(), second), "head": nn.Linear(WIDTH, 3)})
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = model

            def forward(self, x: Tensor) -> Tensor:
                said: Tensor = self.parts["head"](self.parts["body"](x))
                return said

        whole = Whole()
        for at in range(30):
            whole.train()
            learn(whole, optimizer)
            if at == 6:
                whole.eval()
                for one in (first, second) if then not in ("rests", "frozen", "written always") else ():
                    one.merge(sign=1)
                with torch.no_grad():
                    whole(torch.randn(6, WIDTH))
                for one in (first, second):
                    if then == "unmerged":
                        one.merge(sign=-1)
                    one.rests = then in ("rests", "written always")
                    if then in ("frozen", "merged for good"):
                        one.requires_grad_(requires_grad=False)
                if then == "head alone":
                    optimizer = torch.optim.AdamW(model["head"].parameters(), 1e-2)
            if then == "written always":
                with torch.no_grad():
                    first.base.weight.mul_(0.99)

    return train


def test_adapters_that_stay_merged_are_told() -> None:
    found = audit_run(with_adapters(then="merged"), steps=200)
    assert found is not None
    (told,) = (one for one in found.findings if one.severity.name != "NOTE")
    assert told.rule == "run.merged-trained"
    assert "`parts.body.0` and 1 more module of Whole" in told.what


@pytest.mark.parametrize(
    "then", ["unmerged", "rests", "frozen", "merged for good", "head alone", "written always"], ids=str
)
def test_adapters_that_train_on_or_rest_on_purpose_are_right(then: str) -> None:
    assert "run.merged-trained" not in said(with_adapters(then=then))


@pytest.mark.parametrize("steps", [50, 8])
def test_a_second_training_is_watched_as_the_first_one_is(steps: int) -> None:
    found = audit_run(two_trainings(second="ticks twice"), steps=steps)
    assert found is not None
    (told,) = found.findings
    assert (told.rule, told.where) == ("run.drift-ticks", "Sequential: scheduler")
    assert told.what == "In step 5 of AdamW: It was ticked 8 times in 4 steps."
    assert found.beside == (f"Sequential, which AdamW trains behind it, up to its step {min(steps, 12)}",)


class Distiller(nn.Module):
    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(requires_grad=False), student

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            says = self.teacher(x)
        return fn.mse_loss(self.student(x), says)


def distilled(*, rests: bool) -> Train:
    """A teacher that is trained first; ``rests``: and then evaluated."""

    def train() -> None:
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
        first = torch.optim.Adam(teacher.parameters(), 1e-3)
        for _ in range(5):
            learn(teacher, first)
        model = Distiller(teacher, net())
        optimizer = torch.optim.Adam(model.student.parameters(), 1e-3)
        for _ in range(12):
            model.train()
            teacher.train(not rests)
            optimizer.zero_grad()
            model(torch.randn(6, WIDTH)).backward()
            optimizer.step()

    return train


def test_a_teacher_that_was_trained_before_is_to_rest() -> None:
    assert set(said(distilled(rests=False), 50)) == {"run.frozen-drops", "run.frozen-norms"}


def test_a_training_behind_the_last_step_is_waited_for_where_the_first_one_ends_soon() -> None:
    found = audit_run(distilled(rests=False), steps=3)
    assert found is not None
    assert {one.rule for one in found.findings} >= {"run.frozen-drops", "run.frozen-norms"}
    assert found.steps == 3
    assert found.beside == ("Distiller, which Adam trains behind it, up to its step 3",)


def test_no_training_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "WAITS_S", 0.0)
    found = audit_run(distilled(rests=False), steps=3)
    assert found is not None
    assert (found.steps, found.beside) == (3, ())


def test_a_teacher_that_was_trained_before_and_rests_is_right() -> None:
    assert said(distilled(rests=True), 50) == []


def test_a_parameter_that_the_program_steps_itself_is_right() -> None:
    def train() -> None:
        model, shift = net(), nn.Parameter(torch.zeros(WIDTH))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            fn.cross_entropy(model(torch.randn(6, WIDTH) + shift), torch.randint(3, (6,))).backward()
            optimizer.step()
            with torch.no_grad():
                shift -= 0.1 * shift.grad  # type: ignore[operator]
                shift.grad = None

    assert said(train) == []


def test_a_parameter_that_was_trained_before_the_program_began_is_none_of_its() -> None:
    before = nn.Parameter(torch.zeros(2))
    before.square().sum().backward()

    def train() -> None:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(4):
            learn(model, optimizer)

    assert said(train) == []
    assert before.grad is not None


class Tuned(nn.Module):
    """A new head on what was trained before, which is frozen, and goes on to average or rests."""

    def __init__(self, body: nn.Module, *, rests: bool) -> None:
        super().__init__()
        self.body, self.head, self.rests = body.requires_grad_(requires_grad=False), nn.Linear(16, 2), rests

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rests:
            self.body.eval()
        return self.head(self.body(x))


def tuned(*, rests: bool) -> Train:
    body, first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()), nn.Linear(16, 3)

    def one(model: nn.Module, optimizer: Any, classes: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(12, 8)), torch.arange(12) % classes).backward()
        optimizer.step()

    def train() -> None:
        whole = nn.Sequential(body, first)
        optimizer = torch.optim.Adam(whole.parameters())
        for _ in range(3):
            one(whole, optimizer, 3)
        model = Tuned(body, rests=rests)
        head = torch.optim.SGD(model.head.parameters(), 0.1)
        for _ in range(3):
            one(model, head, 2)

    return train


@pytest.mark.parametrize("rests", [False, True])
def test_norms_of_what_is_frozen_behind_a_first_training_rest(*, rests: bool) -> None:
    """Its optimizer lives on, and holds a first head beside it that nobody has frozen."""
    assert said(tuned(rests=rests)) == ([] if rests else ["run.frozen-norms"])

"""Gradients that a step has left are told where the next adds to them or takes them again, and in no right loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import prepkit as pk
from tests.audit.case import WIDTH, adam, net
from tests.audit.odd import Sam
from tests.support.gang import Gang

STEPS = 6
Program = Callable[[Callable[..., Any]], None]
"""Trains, and is given what watches."""


def loss_of(model: Any, seed: int = 0) -> Tensor:
    return model(torch.randn(4, WIDTH)).square().mean()


def found_in(program: Program) -> set[str]:
    watches = []

    def watch(*given: Any, **options: Any) -> None:
        watches.append(pk.watch(*given, act=lambda _: None, **{"every": 2, **options}))

    plain = torch.autograd.backward
    program(watch)
    for one in watches:
        one.close()
    assert torch.autograd.backward is plain
    return {one.rule for each in watches for one in each.findings}


def plain(clear: Callable[[Any, Any], None], at: str = "after", **options: Any) -> Program:
    def run(watch: Callable[..., Any]) -> None:
        model = net()
        optimizer = adam(model)
        watch(model, optimizer, **options)
        for _ in range(STEPS):
            if at == "forward":
                clear(model, optimizer)
            loss = loss_of(model)
            if at == "backward":
                clear(model, optimizer)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if at == "after":
                clear(model, optimizer)

    return run


def by_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def to_zero(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_model(model: Any, optimizer: Any) -> None:
    model.zero_grad()


def by_hand(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None


def zeros_by_hand(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = torch.zeros_like(param.grad)


def decayed(model: Any, optimizer: Any) -> None:
    """Momentum in the gradients themselves."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.9)


def never(model: Any, optimizer: Any) -> None:
    pass


def accumulated(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer = adam(model)
    watch(model, optimizer)
    for _ in range(STEPS):
        for _ in range(4):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_and_never_cleared(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer = adam(model)
    watch(model, optimizer)
    for _ in range(STEPS):
        for _ in range(4):
            loss_of(model).backward()
        optimizer.step()


def gan(watch: Callable[..., Any]) -> None:
    """The generator's backward adds to gradients of the critic, which are cleared before the critic's turn."""
    maker, critic = net(), nn.Linear(4, 1)
    first, second = adam(maker), adam(critic)
    watch(maker, [first, second], every=1)
    watch(critic, second, every=1)
    for _ in range(STEPS):
        second.zero_grad(set_to_none=False)
        critic(maker(torch.randn(4, WIDTH)).detach()).mean().backward()
        second.step()
        first.zero_grad()
        (-critic(maker(torch.randn(4, WIDTH))).mean()).backward()
        first.step()


def two_parts(watch: Callable[..., Any]) -> None:
    model = net()
    body, head = adam(model.blocks), adam(model.head)
    watch(model, [body, head])
    for _ in range(STEPS):
        loss_of(model).backward()
        body.step()
        head.step()
        model.zero_grad()


def sharpness_aware(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.1)
    watch(model, optimizer)
    for _ in range(STEPS):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
        optimizer.step()


def by_closure(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    watch(model, optimizer)
    x = torch.randn(4, WIDTH)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def by_closure_that_clears_nothing(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer = adam(model)
    watch(model, optimizer)

    def closure() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def scaled_with_refusals(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    watch(model, optimizer, every=1)
    for at in range(12):
        scaler.scale(loss_of(model) * (float("inf") if at % 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def in_the_backward(watch: Callable[..., Any]) -> None:
    model = net()
    each = {param: torch.optim.SGD([param], lr=0.01) for param in model.parameters()}
    watch(model, [*each.values()], every=1)

    def step(param: Tensor) -> None:
        each[param].step()  # type: ignore[index]
        each[param].zero_grad()  # type: ignore[index]

    for param in each:
        param.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        loss_of(model).backward()


def checkpointed(*, clears: bool, reentrant: bool) -> Program:
    """What is followed stands outside, and has its gradient before that of what is recomputed begins."""

    def run(watch: Callable[..., Any]) -> None:
        body, head = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 1))
        model = nn.Sequential(body, head)
        optimizer = adam(model)
        watch(model, optimizer)
        for _ in range(STEPS):
            x = torch.randn(4, WIDTH, requires_grad=True)
            head(checkpoint(body, x, use_reentrant=reentrant)).square().mean().backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()

    return run


def several_losses(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer = adam(model)
    watch(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(torch.randn(4, WIDTH))
        out.mean().backward(retain_graph=True)
        out.square().mean().backward()
        optimizer.step()


class Clearing(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        returned = super().step(closure)
        self.zero_grad(set_to_none=False)
        return returned


def cleared_by_the_step(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer = Clearing(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step()


def one_gradient_for_two(watch: Callable[..., Any]) -> None:
    model = net()
    both, head = adam(model), torch.optim.SGD(model.head.parameters(), lr=0.1)
    watch(model, both)
    for _ in range(STEPS):
        loss_of(model).backward()
        both.step()
        head.step()
        model.zero_grad()


def one_gradient_for_two_the_other_way_round(watch: Callable[..., Any]) -> None:
    model = net()
    both, head = adam(model), torch.optim.SGD(model.head.parameters(), lr=0.1)
    watch(model, both)
    for _ in range(STEPS):
        loss_of(model).backward()
        head.step()
        both.step()
        model.zero_grad()


def one_optimizer_after_another(watch: Callable[..., Any]) -> None:
    """A phase of each, as Adam and then SGD."""
    model = net()
    optimizers = adam(model), torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizers[0], every=1)
    for at in range(12):
        loss_of(model).backward()
        optimizers[at // 6].step()
        optimizers[at // 6].zero_grad()


def an_optimizer_for_each_loss(watch: Callable[..., Any]) -> None:
    model = net()
    optimizers = adam(model), torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizers[0], every=1)
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
            loss_of(model).backward()
            optimizer.step()


class Around(torch.optim.Optimizer):
    """As Lookahead: an optimizer that steps another one."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__([*inside.param_groups[0]["params"]], {})
        self.inside, self.param_groups = inside, inside.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


def one_around_another(watch: Callable[..., Any]) -> None:
    model = net()
    optimizer = Around(adam(model))
    watch(model, optimizer, every=1)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def a_copy_that_steps(watch: Callable[..., Any]) -> None:
    """As meta-learning does it."""
    model = net()
    optimizer = adam(model)
    watch(model, optimizer, every=1)
    for _ in range(STEPS):
        inner = copy.deepcopy(model)
        fast = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            fast.zero_grad()
            loss_of(inner).backward()
            fast.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


RIGHT: dict[str, Program] = {
    **{f"by optimizer, {at}": plain(by_optimizer, at) for at in ("forward", "backward", "after")},
    **{f"to zero, {at}": plain(to_zero, at) for at in ("forward", "backward", "after")},
    "by model": plain(by_model),
    "by hand": plain(by_hand, "backward"),
    "zeros by hand": plain(zeros_by_hand),
    "decayed": plain(decayed),
    "checkpointed": checkpointed(clears=True, reentrant=False),
    "checkpointed, reentrant": checkpointed(clears=True, reentrant=True),
    **{
        one.__name__: one
        for one in (
            *(accumulated, gan, two_parts, sharpness_aware, by_closure, scaled_with_refusals, in_the_backward),
            *(several_losses, cleared_by_the_step, one_optimizer_after_another, an_optimizer_for_each_loss),
            *(one_around_another, a_copy_that_steps),
        )
    },
}
LEFT: dict[str, Program] = {
    "never": plain(never),
    "never, seldom looked at": plain(never, every=100),
    "checkpointed": checkpointed(clears=False, reentrant=False),
    "checkpointed, reentrant": checkpointed(clears=False, reentrant=True),
    **{one.__name__: one for one in (accumulated_and_never_cleared, by_closure_that_clears_nothing)},
}
TWICE = (one_gradient_for_two, one_gradient_for_two_the_other_way_round)


@pytest.mark.parametrize("name", RIGHT)
def test_gradients_that_are_cleared_in_time_are_no_finding(name: str) -> None:
    assert found_in(RIGHT[name]) == set()


@pytest.mark.parametrize("name", LEFT)
def test_gradients_that_nobody_clears_are_told_at_the_next_step(name: str) -> None:
    assert found_in(LEFT[name]) == {"run.left-over"}


@pytest.mark.parametrize("program", TWICE)
def test_a_gradient_that_two_optimizers_step_is_told(program: Program) -> None:
    assert found_in(program) == {"run.stepped-twice"}


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "ddp, views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fsdp1, own": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": fully_shard,
}


def found_under(rank: int, world: int) -> dict[tuple[str, str], set[str]]:
    """By wrapper, and by what clears."""

    def under(wrap: Callable[[nn.Module], nn.Module], clear: Callable[[Any, Any], None]) -> Program:
        def run(watch: Callable[..., Any]) -> None:
            model = wrap(net())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            watch(model, optimizer)
            for _ in range(STEPS):
                loss_of(model).backward()
                optimizer.step()
                clear(model, optimizer)

        return run

    return {
        (name, clear.__name__): found_in(under(wrap, clear))
        for name, wrap in WRAPPED.items()
        for clear in (by_optimizer, to_zero, never)
    }


@pytest.fixture(scope="module")
def pair(gang2: Gang) -> list[dict[tuple[str, str], set[str]]]:
    return gang2.run(found_under, timeout=120.0)


@pytest.mark.parametrize("name", WRAPPED)
def test_what_averages_and_shards_gradients_hides_none_that_are_left(
    pair: list[dict[tuple[str, str], set[str]]], name: str
) -> None:
    hides = name == "fsdp1, own"  # whose parameters have no gradient between a forward and the end of its backward
    for found in pair:
        assert found[name, "by_optimizer"] == found[name, "to_zero"] == set()
        assert found[name, "never"] == (set() if hides else {"run.left-over"})

"""``pk.apply(plan, prove=1)``: the first window of a run is proven where it ran, whatever the engine."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as through
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit import config as c
from prepkit.findings import Finding, FindingWarning, RunRefused, Severity
from prepkit.proving import live
from prepkit.proving.proof import prove_record
from prepkit.proving.recorder import Recorder
from tests.proving.sending import Norms, summed_without_the_others
from tests.proving.window import loss_of, micros, net
from tests.support.deepspeed_cpu import lean

CFG = c.Config(optimizer=c.AdamW(lr=1e-2), accumulation=2, clip=c.ClipNorm(0.05))


@frozen
class Run:
    cfg: c.Config
    ranks: int = 2


RUNS = {
    "FSDP2": Run(evolve(CFG, engine=c.FSDP2())),
    "FSDP2 in bfloat16": Run(evolve(CFG, engine=c.FSDP2(), precision=c.BF16())),
    "HSDP": Run(evolve(CFG, engine=c.FSDP2(), mesh=c.Mesh(replicate=2, shard=2)), 4),
    "DeepSpeed, stage 0": Run(evolve(CFG, engine=c.DeepSpeed(stage=0, micro_batch=6))),
    "DeepSpeed, stage 2": Run(evolve(CFG, engine=c.DeepSpeed(stage=2, micro_batch=6))),
}
"""What ``tests/test_engines.py`` does not prove already."""


def trained(rank: int, world: int, run: Run, wrong: float = 1.0, *, tokens: bool = False) -> tuple[Any, ...]:
    """One window; what the attestation says of the proof, and what was refused."""
    if isinstance(run.cfg.engine, c.DeepSpeed):
        lean()
    ready = pk.apply(pk.build_plan(run.cfg, net()), prove=1)
    refused = ""
    try:
        for at, (x, y) in enumerate(micros(run.cfg.accumulation)):
            samples = 3 + rank + at if tokens else 6
            loss = loss_of(ready.model, (x[:samples], y[:samples])) / wrong
            ready.backward(loss, mean_over=float(samples) if tokens else None)
            ready.step()
    except RunRefused as error:
        refused = str(error)
    found = [asked for asked in ready.attestation.asked if asked.rule.startswith("prove.")]
    hooks = len(ready.model._forward_hooks), ready.loop.proven
    ready.close()
    return len(found), [(one.rule, one.severity, one.what) for asked in found for one in asked.found], refused, hooks


def by_tokens(rank: int, world: int, run: Run) -> tuple[Any, ...]:
    return trained(rank, world, run, tokens=True)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_window_is_proven_where_it_ran(request: Any, name: str) -> None:
    run = RUNS[name]
    if name.startswith("DeepSpeed"):
        pytest.importorskip("deepspeed")
    for asked, found, refused, (_, proven) in request.getfixturevalue(f"gang{run.ranks}").run(trained, run):
        assert asked > 15
        assert [one for one in found if one[1] is not Severity.NOTE] == []
        assert [text for _, _, text in found if "not compared" in text or "not replayed" in text] == []
        assert (refused, proven) == ("", None)


@pytest.mark.parametrize("engine", [c.DDP(), c.DeepSpeed(stage=2, micro_batch=6)], ids=["DDP", "DeepSpeed"])
def test_a_window_that_is_weighed_by_tokens_is_averaged_over_them(gang2: Any, engine: Any) -> None:
    for _, found, refused, _ in gang2.run(by_tokens, Run(evolve(CFG, engine=engine))):
        assert ([one for one in found if one[1] is not Severity.NOTE], refused) == ([], "")


def test_a_difference_is_refused_on_every_rank_and_the_attestation_has_it(gang2: Any) -> None:
    for _, found, refused, (_, proven) in gang2.run(trained, RUNS["FSDP2"], 2.0):
        assert "prove.accumulation" in {rule for rule, _, _ in found}
        assert "0.500 x" in refused
        assert proven is None


def asked_for(rank: int, world: int, run: Run, at_once: int) -> tuple[Any, ...]:
    """As ``trained`` with a wrong loss, with so many bytes of each record that travel before they are asked for."""
    with patch.object(live, "AT_ONCE", world * at_once):
        return trained(rank, world, run, 2.0)


def test_what_travels_at_once_and_what_is_asked_for_prove_the_same(gang2: Any) -> None:
    for name in ("FSDP2", "FSDP2 in bfloat16"):
        at_once, asked, both = (gang2.run(asked_for, RUNS[name], size) for size in (1 << 20, 0, 900))
        assert "0.500 x" in at_once[1][2]
        assert at_once == asked == both


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(12, 300), nn.Linear(300, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.enter(x) * (1 + dist.get_rank())))


def asking(rank: int, world: int, engine: Any, wrong: float) -> tuple[list[str], str]:
    """A window of a model that asks for its rank; its record travels when it is asked for."""
    torch.manual_seed(0)
    ready = pk.apply(pk.build_plan(evolve(CFG, engine=engine, clip=None), Asks()), prove=1)
    refused = ""
    with patch.object(live, "AT_ONCE", 0):
        try:
            for batch in micros(2):
                ready.backward(loss_of(ready.model, batch) / wrong)
                ready.step()
        except RunRefused as error:
            refused = str(error)
    found = [one.what for one in told_of(ready) if one.severity is not Severity.NOTE or "asks for its rank" in one.what]
    ready.close()
    return found, refused


def sending(rank: int, world: int, *, right: bool) -> tuple[list[str], str]:
    """A window of a model that norms by the samples of all ranks, where it is wrong with its own gradient alone."""
    torch.manual_seed(0)
    model = Norms(through.all_reduce if right else summed_without_the_others)
    ready = pk.apply(pk.build_plan(evolve(CFG, engine=c.DDP(), clip=None), model), prove=1)
    refused = ""
    try:
        for batch in micros(2):
            ready.backward(loss_of(ready.model, batch))
            ready.step()
    except RunRefused as error:
        refused = str(error)
    found = [one.rule for one in told_of(ready) if one.severity is not Severity.NOTE]
    ready.close()
    return found, refused


def test_a_forward_that_sends_what_trains_is_proven_by_slopes_where_it_ran(gang2: Any) -> None:
    assert gang2.run(partial(sending, right=True)) == [([], "")] * 2
    for found, refused in gang2.run(partial(sending, right=False)):
        assert found == ["prove.slope"]
        assert "a part that crosses to other ranks does not come back" in refused


@pytest.mark.parametrize("engine", [c.DDP(), c.FSDP2()], ids=["DDP", "FSDP2"])
def test_a_forward_that_asks_for_its_rank_is_replayed_with_the_answer_of_each_rank(gang2: Any, engine: Any) -> None:
    for found, refused in gang2.run(asking, engine, 1.0):
        assert (len(found), refused) == (1, "")
        assert "each call was replayed as on the rank that made it" in found[0]
    for _, refused in gang2.run(asking, engine, 2.0):
        assert "0.500 x" in refused


def test_one_process_is_proven_too() -> None:
    run = Run(evolve(CFG, engine=c.Single()), 1)
    ready = pk.apply(pk.build_plan(run.cfg, nn.Linear(12, 4)), prove=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        x, y = torch.randn(6, 12, generator=generator), torch.randint(4, (6,), generator=generator)
        ready.backward(nn.functional.cross_entropy(ready.model(x), y))
        ready.step()
    found = [asked for asked in ready.attestation.asked if asked.rule.startswith("prove.")]
    assert len(found) > 15
    assert [one for asked in found for one in asked.found if one.severity is not Severity.NOTE] == []
    with pytest.raises(ValueError, match="prove=True is no number of windows"):
        pk.apply(ready.plan, model=nn.Linear(12, 4), prove=True)


def two_losses(ready: pk.Prepared, by: float) -> None:
    for x in ready.loaders[0]:
        ready.backward(ready.model(x).square().mean() / by, more=True)
        ready.backward(ready.model(x + 1).abs().mean() / by)
        ready.step()


def one_loss(ready: pk.Prepared, by: float) -> None:
    for x in ready.loaders[0]:
        ready.backward(ready.model(x).square().mean() / by)
        ready.step()


def ended_at_once(ready: pk.Prepared, by: float) -> None:
    with ready.accumulate(last=True):
        ready.backward(ready.model(torch.ones(4, 4)).square().mean() / by)
        assert ready.step()


WINDOWS: dict[str, tuple[Callable[[pk.Prepared, float], None], int]] = {
    "two losses of one micro-batch": (two_losses, 1),
    "two losses of each micro-batch": (two_losses, 2),
    "the end of a pass": (one_loss, 4),
    "the last of accumulate": (ended_at_once, 3),
}
"""What trains two batches, and the micro-batches of a full window."""


@pytest.mark.parametrize("name", WINDOWS)
def test_each_loss_is_divided_by_the_micro_batches_of_a_full_window(name: str) -> None:
    """Whatever the number of backwards; a second division is told all the same."""
    train, accumulation = WINDOWS[name]
    for by in {1, accumulation}:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.randn(8, 4), 4)  # type: ignore[arg-type]  # a tensor is a data set too
        cfg = c.Config(accumulation=accumulation)
        ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, loaders=[loader]), prove=1)
        if by == 1:
            train(ready, by)
        else:
            with pytest.raises(RunRefused, match=rf"divided twice by the accumulation \({accumulation}\)"):
                train(ready, by)
        found = [one for asked in ready.attestation.asked for one in asked.found if one.rule.startswith("prove.")]
        assert {one.rule for one in found if one.severity is not Severity.NOTE} == (
            set() if by == 1 else {"prove.accumulation"}
        )
        assert ready.loop.proven is None
        ready.close()


@pytest.mark.parametrize(("first", "later", "told"), [(1.0, 0.1, ()), (1.0, 1.0, ("prove.tokens",))])
@pytest.mark.filterwarnings("ignore:warning prove.tokens")
def test_losses_of_one_micro_batch_may_weigh_as_they_like(first: float, later: float, told: tuple[str, ...]) -> None:
    """Where each has its weight in every micro-batch, no sample weighs more than another."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ready = pk.apply(pk.build_plan(c.Config(accumulation=2), model, optimizer=optimizer), prove=1)
    for at in range(2):
        x, more = torch.randn(3, 4), 1.0 if later < 1 or at else 5.0
        ready.backward(first * more * ready.model(x).square().mean(), more=True)
        ready.backward(later * ready.model(x + 1).abs().mean())
        ready.step()
    assert {one.rule for one in told_of(ready) if one.severity is not Severity.NOTE} == {*told}
    ready.close()


def by_hand(by: float, windows: int = 2, prove: int = 2) -> pk.Prepared:
    """A run whose loop goes backward and steps by itself, over two micro-batches that are divided by ``by``."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ready = pk.apply(pk.build_plan(c.Config(), model, optimizer=optimizer), prove=prove)
    for _ in range(windows):
        for _ in range(2):
            (ready.model(torch.randn(3, 4)).square().mean() / by).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ready


def told_of(ready: pk.Prepared) -> list[Finding]:
    assert ready.attestation is not None
    return [one for asked in ready.attestation.asked for one in asked.found if one.rule.startswith("prove.")]


def test_a_loop_that_steps_by_itself_is_proven_too() -> None:
    ready = by_hand(2.0)
    asked = [one for one in ready.attestation.asked if one.rule.startswith("prove.")]
    assert len(asked) > 40, "two windows were to be proven"
    ready.close()
    assert told_of(ready) == []
    with pytest.raises(RunRefused, match=r"2\.000 x what they should be: the loss is not divided by the 2 micro"):
        by_hand(1.0)


@pytest.mark.parametrize("by", [0.9, 1.0])
def test_what_is_left_of_the_step_before_is_a_momentum_by_hand_where_it_is_one_number_times_that(by: float) -> None:
    """A gradient that is left whole was not cleared."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ready = pk.apply(pk.build_plan(c.Config(), model, optimizer=optimizer), prove=2)

    def train() -> None:
        for _ in range(2):
            for param in ready.model.parameters():
                if param.grad is not None:
                    param.grad.mul_(by)
            ready.model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()

    if by == 1.0:
        with pytest.raises(RunRefused, match="had a gradient before the first backward of the step"):
            train()
        return
    train()
    (found,) = told_of(ready)
    assert found.severity is Severity.NOTE
    assert found.what.startswith("what was left of the step before, 0.9 x of each of its gradients, is in these")
    ready.close()


def test_a_run_that_is_closed_before_its_window_was_complete_says_that_nothing_is_proven() -> None:
    ready = by_hand(2.0, windows=0, prove=1)
    ready.model(torch.ones(3, 4)).square().mean().backward()
    assert told_of(ready) == []
    with pytest.warns(FindingWarning, match="closed before an optimizer of it had stepped what the model trains"):
        ready.close()
    assert [one.rule for one in told_of(ready)] == ["prove.unproven"]


@pytest.mark.parametrize("fails", ["sizes", "micro_of", "evaluating", "places"])
def test_what_cannot_be_recorded_is_told_and_the_run_goes_on_as_it_would(fails: str) -> None:
    def cannot(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such dtype")

    home = "prepkit.proving.hooks.sizes" if fails == "sizes" else f"prepkit.proving.recorder.{fails}"
    with patch(home, cannot), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ready = by_hand(2.0, windows=1, prove=1)
        ready.close()
    assert "could not be recorded (RuntimeError: no such dtype)" in "".join(str(one.message) for one in told)
    plain = by_hand(2.0, windows=1, prove=0)
    assert [one.rule for one in told_of(ready)] == ["prove.unproven"]
    assert all(map(torch.equal, ready.model.parameters(), plain.model.parameters()))


class Noise:
    """What a program keeps its generator in."""

    def __init__(self, drawn: Any) -> None:
        self.drawn = [drawn]

    def __call__(self) -> float:
        return float(self.drawn[0].random())


KINDS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "python": lambda: random.Random(3),
    **{
        f"numpy, {kind.__name__}": lambda kind=kind: numpy.random.Generator(kind(3))
        for kind in (numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64)
    },
    "numpy, RandomState": lambda: numpy.random.RandomState(3),
    "torch, shared": lambda: torch.Generator().manual_seed(3),
    "python, inside of an object": lambda: Noise(random.Random(3)),
    "python's, of the process": lambda: random,
    "numpy's, of the process": lambda: numpy.random,
    "torch's, of the process": lambda: torch.default_generator,
    "numpy's, held": lambda: numpy.random.mtrand._rand,
}


class Draws(nn.Module):
    """Its forward draws from generators of its own, or of the process."""

    def __init__(self, drawn: Any) -> None:
        super().__init__()
        self.layer, self.drop, self.drawn = nn.Linear(4, 4), nn.Dropout(0.5), drawn
        self.inner = nn.Identity()
        self.inner.drawn = drawn

    def number(self) -> float:
        match self.drawn:
            case torch.Generator():
                more = torch.rand((), generator=self.inner.drawn)
                return float(torch.rand((), generator=self.drawn)) + float(more)
            case Noise():
                return self.drawn()
            case _:
                return float(self.drawn.random()) if hasattr(self.drawn, "random") else float(self.drawn.rand())

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x)) * (0.1 + self.number())


class Counts(nn.Module):
    """Its forward depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def proven_alone(model: nn.Module, tripled: str = "") -> list[Finding]:
    """What the proof of a window has found; ``tripled``: the parameter of which a hook triples the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ready = pk.apply(pk.build_plan(c.Config(accumulation=2), model, optimizer=optimizer), prove=1)
    if tripled:
        model.get_parameter(tripled).register_hook(lambda grad: 3 * grad)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        ready.backward(ready.model(torch.randn(3, 4, generator=generator)).square().mean())
        ready.step()
    found = [one for asked in ready.attestation.asked for one in asked.found if one.rule.startswith("prove.")]
    ready.close()
    return found


@pytest.mark.filterwarnings("ignore:warning prove.unproven")
def test_a_forward_that_does_not_repeat_is_the_limit_of_the_proof() -> None:
    told = [one for one in proven_alone(Counts()) if one.severity is not Severity.NOTE]
    assert [one.rule for one in told] == ["prove.unproven"]
    assert "The forward does not repeat: output 0 of call " in told[0].what


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_draws_is_drawn_again_and_the_generators_go_on_as_without_a_proof(kind: str) -> None:
    def started() -> Draws:
        for one in (random.seed, numpy.random.seed, torch.manual_seed):
            one(0)
        return Draws(KINDS[kind]())

    model = started()
    assert proven_alone(model) == []
    found = [model.number(), random.random(), numpy.random.rand(), float(torch.rand(()))]
    model = started()
    for _ in range(2):
        model(torch.zeros(3, 4))
    assert found == [model.number(), random.random(), numpy.random.rand(), float(torch.rand(()))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_gradient_of_what_draws_is_told(kind: str) -> None:
    with pytest.raises(RunRefused, match=r"`layer\.weight`\) are 3\.000 x"):
        proven_alone(Draws(KINDS[kind]()), tripled="layer.weight")


@pytest.mark.parametrize("planted", [False, True])
def test_of_several_optimizers_each_step_is_taken_again(planted: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters(), lr=1e-2)]
    ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=both), prove=1)
    if planted:  # behind the back of the second one
        both[1].register_step_post_hook(lambda *_: model[2].bias.data.mul_(3))
    ready.backward(ready.model(torch.randn(6, 4)).square().mean())
    if planted:
        with pytest.raises(pk.RunRefused, match=r"2\.bias"):
            ready.step()
        return
    ready.step()
    assert told_of(ready) == []
    ready.close()


def test_a_parameter_that_came_with_a_hook_is_named_and_the_others_are_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    found = proven_alone(model)
    assert {one.rule for one in found} == {"prove.limit"}
    assert any("hooks of the program's own change the gradients of `0.weight`" in one.what for one in found)
    with pytest.raises(RunRefused, match=r"`1\.weight`\) are 3\.000 x"):  # put on behind the plan
        proven_alone(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), tripled="1.weight")


class Deep(nn.Module):
    """Layers that use their weights, tied and through a function of its own."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for at in range(len(self.layers)):
            x = torch.tanh(nn.functional.linear(x, self.layers[at]))
        return x @ self.layers[0]


def test_a_replay_holds_a_layer_at_a_time_and_finds_the_same() -> None:
    """The weights are 24 times the limit."""
    torch.manual_seed(0)
    model = Deep(64, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (recorder := Recorder(root=model)).on():
        model(torch.randn(3, 64)).square().mean().backward()
        optimizer.step()
    record = recorder.record()
    layer = 64 * 64 * 8
    wide, narrow = (prove_record(model, (record,), limit=limit) for limit in (1 << 30, layer))
    assert (str(wide.failed), wide.fine, narrow.fine) == ("()", True, True)
    assert narrow.held < 3 * layer < 20 * layer < wide.held
    assert any("elements were compared" in limit for limit in narrow.facts.limits)


def test_a_step_is_taken_again_from_the_state_as_it_was_recorded() -> None:
    """Torch counts steps in place: the second replay of a step may not begin where the first has ended."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        with (recorder := Recorder(root=model)).on():
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    record = recorder.record()
    proof = prove_record(model, (record,))
    assert proof.fine, str(proof)
    assert float(record.tensors["number.step/weight"]) == 1.0
    assert all(one.noise < 1e-5 * one.expected**0.5 for one in proof.facts.steps)


def hooked_behind_apply(rank: int, world: int, engine: Any) -> list[tuple[str, str]]:
    """What is told of a hook that is put on what the loop calls."""
    model = net()
    ready = pk.apply(pk.build_plan(c.Config(engine=engine, optimizer=c.SGD(lr=0.1)), model), prove=1)
    ready.model.register_forward_hook(lambda _, __, output: output * 1.5)
    for batch in micros(1):
        ready.backward(loss_of(ready.model, batch))
        ready.step()
    found = told_of(ready)
    ready.close()
    return [(one.rule, one.what) for one in found]


@pytest.mark.filterwarnings("ignore:warning prove.outputs")
def test_a_hook_on_what_the_loop_calls_is_told_alike_with_every_engine(gang2: Any) -> None:
    first, second = (gang2.run(hooked_behind_apply, engine)[0] for engine in (c.DDP(), c.FSDP2()))
    assert first == second
    assert [rule for rule, _ in first] == ["prove.outputs"]
    assert "output 0 of call 0 on rank 0 is 1.500 x what the model returns" in first[0][1]


def hooked_before(rank: int, world: int, engine: Any, where: str) -> list[str]:
    """What is told of two windows with a hook that changes what the root is given."""
    if isinstance(engine, c.DeepSpeed):
        lean()
    ready = pk.apply(pk.build_plan(c.Config(engine=engine, optimizer=c.SGD(lr=0.1)), net()), prove=2)
    model = ready.unwrap() if where == "inside" else ready.model

    def doubles(_: nn.Module, args: Any, named: Any) -> Any:
        return (2 * args[0],), named

    model.register_forward_pre_hook(doubles, prepend=where == "before all", with_kwargs=True)
    for batch in micros(2):
        ready.backward(loss_of(ready.model, batch))
        ready.step()
    found = [one.what for one in told_of(ready)]
    ready.close()
    return found


@pytest.mark.parametrize("where", ["around", "inside", "before all"])
@pytest.mark.parametrize(
    "engine", [c.DDP(), c.FSDP1(), c.FSDP2(), c.DeepSpeed(stage=2, micro_batch=6)], ids=lambda one: type(one).__name__
)
def test_a_hook_before_what_the_loop_calls_is_a_part_of_the_program_with_every_engine(
    gang2: Any, engine: Any, where: str
) -> None:
    if isinstance(engine, c.DeepSpeed):
        pytest.importorskip("deepspeed")
    assert gang2.run(hooked_before, engine, where) == [[], []]


@pytest.mark.filterwarnings("ignore:warning (run.without-gradient|prove.no-gradient)")
def test_what_the_forward_computes_with_and_no_gradient_comes_to_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model[0].register_forward_hook(lambda _, __, output: output.detach())
    (found,) = [one for one in proven_alone(model) if one.rule == "prove.no-gradient"]
    assert found.severity is Severity.WARNING
    assert found.what.startswith("The loss is computed with `0.weight`, `0.bias`, and detach() at test_live.py:")
    assert "1.weight" not in found.what


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(12, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x))


def odd_window(rank: int, world: int, odd: str) -> list[tuple[str, str]]:
    """What is told of a window in which something is odd on some ranks, or in some micro-batch."""
    torch.manual_seed(0)
    cfg = c.Config(engine=c.DDP() if world > 1 else c.Single(), optimizer=c.SGD(lr=0.1), accumulation=2)
    ready = pk.apply(pk.build_plan(cfg, Labelled()), prove=1)
    torch.manual_seed(1 + rank)
    for at, (x, y) in enumerate(micros(2, rank=rank % 2 if odd == "pairs" else rank)):
        if "labels" in odd:
            y[: 1 + rank] = -100
        counted = float((y != -100).sum()) if odd == "counted labels" else 6.0 if odd == "labels" else None
        loss = nn.functional.cross_entropy(ready.model(x), y)
        ready.backward(loss, mean_over=counted)
        ready.step()
        ready.model.train(odd != "eval" or at > 0)
    found = told_of(ready)
    ready.close()
    return [(one.rule, one.what) for one in found]


ODD: dict[str, tuple[int, str, str]] = {
    "labels": (2, "prove.tokens", "is a mean over 4, and mean_over=6 was given"),
    "counted labels": (2, "", ""),
    "pairs": (4, "prove.same-samples", "(ranks 0, 2; ranks 1, 3)"),
    "nothing": (4, "", ""),
    "eval": (2, "prove.limit", "was computed with 3 modules in another mode"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.filterwarnings("ignore:warning")
def test_what_is_odd_between_ranks_or_micro_batches_is_told(request: Any, odd: str) -> None:
    ranks, rule, says = ODD[odd]
    found = request.getfixturevalue(f"gang{ranks}").run(odd_window, odd)[0]
    assert ({rule} if rule else set()) == {rule for rule, _ in found}, found
    assert not says or any(says in what for _, what in found), found


def test_several_optimizers_that_step_as_one_are_each_replayed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4))
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters(), lr=0.1)]
    ready = pk.apply(pk.build_plan(c.Config(), model, optimizer=both), prove=1)
    both[1].register_step_post_hook(lambda *_: model[1].weight.data.mul_(1.5))
    ready.backward(ready.model(torch.randn(3, 12)).square().mean())
    with pytest.raises(RunRefused, match=r"prove\.step-size"):
        ready.step()
    assert not any("was not replayed" in one.what for one in told_of(ready))
    ready.close()


def with_a_head(where: str) -> list[Finding]:
    """A window of an encoder that was prepared, under a head, or beside something else, that the plan does not know."""
    torch.manual_seed(0)
    encoder, head = nn.Linear(4, 4), nn.Linear(4, 2)
    outer = torch.optim.SGD(head.parameters(), lr=0.1) if where not in ("no optimizer", "frozen") else None
    head.requires_grad_(where != "frozen")
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    ready = pk.apply(pk.build_plan(c.Config(), encoder, optimizer=optimizer), prove=1)
    for _ in range(2):
        hidden = ready.model(torch.randn(3, 4))
        with torch.set_grad_enabled(where != "no graph"):
            out = hidden if where == "not called" else head(hidden)
        ready.backward((hidden.mean() if where == "no graph" else 0) + out.square().mean())
        if where == "before":
            outer.step()
            outer.zero_grad()
        ready.step()
        if where == "behind":
            outer.step()
            outer.zero_grad()
    found = told_of(ready)
    ready.close()
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    return found


@pytest.mark.parametrize("where", ["before", "behind", "never", "no optimizer", "frozen", "no graph", "not called"])
def test_what_trains_outside_of_the_plan_is_named_as_not_proven(where: str) -> None:
    found = with_a_head(where)
    assert {one.severity for one in found} <= {Severity.NOTE}
    named = [one.what for one in found if "`Linear` trains beside the model of the plan" in one.what]
    assert len(named) == (where in ("before", "behind", "never"))
    assert len(found) == len(named)


def test_a_loop_of_the_program_s_own_leaves_no_wrapper_of_calls_behind() -> None:
    by_hand(2.0, windows=3, prove=2)
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"

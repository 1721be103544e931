"""What is planned to be compiled is compiled, and its code is what runs: counted by a backend, in every engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.config import (
    BF16,
    DDP,
    FSDP2,
    CheckpointBlocks,
    Compile,
    CompileBlocks,
    CompileModel,
    Config,
    Engine,
    Single,
)
from prepkit.objects.target import Target
from tests.applying.handlers.test_model import compiling
from tests.support.fragile_model import TOKENS, Tiny, applied, planned
from tests.support.gang import Gang
from tests.support.single_step import do, problems

COUNTS = {"compiled": 0, "ran": 0}


def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend of ``torch.compile`` that counts the graphs it is given, and how often each one runs."""
    COUNTS["compiled"] += 1

    def run(*args: Any) -> Any:
        COUNTS["ran"] += 1
        return graph.forward(*args)

    return run


def counted() -> None:
    """The backend under its name, with counts and caches at zero."""
    if "counting" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(counting, name="counting")  # type: ignore[arg-type]
    torch._dynamo.reset()
    COUNTS.update(compiled=0, ran=0)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    counted()
    yield
    torch._dynamo.reset()


WHOLE, BLOCKS = CompileModel(backend="counting"), CompileBlocks(backend="counting")


def run(rank: int, world: int, engine: Engine, how: Compile, checkpointed: bool = False) -> tuple[int, int, int, float]:
    """Graphs that were compiled, graphs that ran in a first and in a second step, and the distance to eager."""
    counted()
    torch.manual_seed(0)
    model = Tiny()
    expected = model(TOKENS).detach()
    checkpoint = {"checkpointing": CheckpointBlocks()} if checkpointed else {}
    target = applied(
        planned(Config(engine=engine, compile=how, **checkpoint), model, sgd(model), world=world), model, sgd(model)
    )  # type: ignore[arg-type]
    out = target.model(TOKENS)
    out.square().mean().backward()
    first = COUNTS["ran"]
    target.model(TOKENS)
    return COUNTS["compiled"], first, COUNTS["ran"] - first, float((out - expected).abs().max())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_a_whole_model_is_one_graph_that_runs_at_every_call() -> None:
    assert run(0, 1, Single(), WHOLE) == (1, 1, 1, 0.0)


def test_equal_blocks_share_one_compilation_and_each_runs_it() -> None:
    assert run(0, 1, Single(), BLOCKS) == (1, 3, 3, 0.0)


def test_a_checkpointed_block_runs_compiled() -> None:
    compiled, first, second, apart = run(0, 1, Single(), BLOCKS, checkpointed=True)
    assert compiled >= 1
    assert min(first, second) >= 3
    assert apart == 0.0


@pytest.mark.parametrize("how", [WHOLE, BLOCKS], ids=["whole", "blocks"])
@pytest.mark.parametrize("engine", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
def test_compiled_code_runs_on_every_rank_of_every_engine(gang2: Gang, engine: Engine, how: Compile) -> None:
    blocks = 3 if how is BLOCKS else 1
    for compiled, first, second, apart in gang2.run(run, engine, how):
        assert compiled >= 1
        assert first >= blocks
        assert second >= blocks
        assert apart < 1e-6


def test_autocast_is_inside_the_compiled_graph() -> None:
    model = Tiny()
    plan = planned(Config(precision=BF16(), compile=WHOLE), model, sgd(model))
    target = applied(plan, model, sgd(model))
    assert target.model(TOKENS).dtype == torch.float32
    assert (COUNTS["compiled"], COUNTS["ran"]) == (1, 1)


def test_nothing_is_compiled_twice_by_whatever_it_was_compiled_before() -> None:
    inner, child, whole = Tiny(), Tiny(), torch.compile(Tiny(), backend="counting")
    inner.layers[0].compile(backend="counting")
    child.layers[1] = torch.compile(child.layers[1], backend="counting")
    for model, path in ((inner, "layers.0"), (child, "layers.1"), (whole, "")):
        (text,) = problems(compiling(path, backend="counting"), Target(model=model))
        assert "compiled already" in text


def test_compiling_keeps_parameter_names_and_the_state_dict() -> None:
    model = Tiny()
    before = (list(dict(model.named_parameters())), list(model.state_dict()))
    do(compiling("", "layers.0", backend="counting"), Target(model=model))
    assert (list(dict(model.named_parameters())), list(model.state_dict())) == before


def by_hand(rank: int, world: int) -> tuple[int, float]:
    """Graphs that ran where a loop compiles what was prepared by itself, and the distance of its loss to eager's."""
    del rank, world
    counted()
    losses = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = Tiny()
        ready = pk.apply(pk.build_plan(Config(engine=FSDP2()), model, optimizer=sgd(model)))
        called = torch.compile(ready.model, backend="counting") if compiled else ready.model
        ready.backward(called(TOKENS).square().mean())
        assert ready.step()
        losses.append(float(called(TOKENS).detach().square().mean()))
        ready.close(keep_group=True)
    return COUNTS["ran"], abs(losses[0] - losses[1])


def test_a_loop_may_compile_what_fsdp2_was_prepared_for(gang2: Gang) -> None:
    for ran, apart in gang2.run(by_hand, timeout=120):
        assert ran > 0
        assert apart < 1e-6

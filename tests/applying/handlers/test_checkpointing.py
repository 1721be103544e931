"""Activation checkpointing: what is recomputed, what is kept, and what waits in host memory; in every engine."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prepkit import config as c
from prepkit.applying.handlers import checkpointing
from prepkit.objects.deepspeed import give_back_linear
from prepkit.objects.target import Target
from prepkit.steps import CheckpointModules
from tests.applying.handlers.test_compiled_runs import COUNTS, counted
from tests.applying.handlers.test_model import compiling
from tests.support.deepspeed_cpu import lean
from tests.support.drawn_training import trained
from tests.support.fragile_model import TOKENS, Tiny, applied, planned
from tests.support.gang import Gang
from tests.support.single_step import do, problems
from tests.test_engines import ENGINES, case

BLOCKS = ("layers.0", "layers.1", "layers.2")
ALL = CheckpointModules(paths=BLOCKS, preserve_rng_state=True)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch calls a mode by its class
    """Counts the linear layers with a bias that run below it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def ran(step: CheckpointModules | None) -> tuple[int, int, dict[str, Tensor]]:
    """Linear layers of the blocks that run in forward and in backward, and the gradients."""
    torch.manual_seed(0)
    model = Tiny()
    if step:
        do(step, Target(model=model))
    with Products() as seen:
        loss = model(TOKENS).square().mean()
        forward = seen.count
        loss.backward()
    grads = {
        n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters() if p.grad is not None
    }
    return forward, seen.count - forward, grads


@pytest.mark.parametrize(
    ("step", "again"),
    [
        (None, 0),
        (ALL, 6),
        (evolve(ALL, paths=BLOCKS[1:2]), 2),
        (evolve(ALL, keep_ops=("aten.addmm.default",)), 0),
        (evolve(ALL, keep_ops=("aten.addmm",)), 0),
        (evolve(ALL, keep_ops=("aten.relu.default",)), 6),
        (evolve(ALL, offload=True), 6),
        (evolve(ALL, offload=True, keep_ops=("aten.addmm.default",)), 0),
    ],
)
def test_backward_recomputes_what_is_not_kept_and_gives_the_same_gradients(
    step: CheckpointModules | None, again: int
) -> None:
    expected = ran(None)[2]
    forward, backward, grads = ran(step)
    assert (forward, backward) == (6, again)
    assert grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def inputs_alive(step: CheckpointModules) -> int:
    """Inputs of the blocks whose memory is still held when forward is over."""
    model = Tiny()
    do(step, Target(model=model))
    alive = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, given: alive.append(weakref.ref(given[0].untyped_storage())))
    logits = model(TOKENS)
    held = sum(storage() is not None for storage in alive)
    logits.square().mean().backward()
    return held


def test_inputs_of_offloaded_blocks_leave_the_device_in_forward() -> None:
    """The last block's is kept by what it is added to; torch's ``save_on_cpu`` copies on the CPU as on a card."""
    assert inputs_alive(ALL) == 3
    assert inputs_alive(evolve(ALL, offload=True)) < 3


def test_an_operator_that_torch_does_not_have_is_refused_before_anything_is_wrapped() -> None:
    (text,) = problems(evolve(ALL, keep_ops=("aten.mn", "aten.mm.default", "nose.mm")), Target(model=Tiny()))
    assert text.startswith("checkpoint.operator at aten.mn, nose.mm: torch has no such operator; ")
    assert len(checkpointing.overloads("aten.mm")) > 1
    assert checkpointing.overloads("aten.mm.default") == (torch.ops.aten.mm.default,)


@pytest.mark.parametrize(("offload", "compiles"), [(False, True), (True, False)])
def test_torch_compiles_no_block_whose_inputs_are_offloaded_which_is_why_a_rule_refuses_it(
    offload: bool, compiles: bool
) -> None:
    counted()
    model = Tiny()
    do(evolve(ALL, offload=offload), Target(model=model))
    do(evolve(compiling(*BLOCKS, backend="counting"), fullgraph=False), Target(model=model))
    model(TOKENS).square().mean().backward()
    torch._dynamo.reset()
    assert bool(COUNTS["ran"]) is compiles


def test_every_second_block_is_the_second_the_fourth_and_so_on_in_the_model_s_order() -> None:
    cfg = c.Config(checkpointing=c.CheckpointBlocks(every=2, blocks=c.WrapClasses(("Linear",))))
    model = Tiny()
    (step,) = (p.step for p in planned(cfg, model).steps if isinstance(p.step, CheckpointModules))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert step.paths == tuple(linears[1::2])
    applied(planned(cfg, model), model)


# --- engines -------------------------------------------------------------------------------------------------------


HOW = (
    None,
    c.CheckpointBlocks(every=2),
    c.CheckpointBlocks(keep_ops=("aten.addmm", "aten.mm.default")),
    c.CheckpointBlocks(offload=True),
    c.CheckpointBlocks(offload=True, keep_ops=("aten.mm",), every=2),
)


def losses(rank: int, world: int, name: str) -> list[list[float]]:
    """The losses of a run for each of ``HOW``."""
    if name.startswith("DeepSpeed"):
        lean()
    asked = case(name)
    return [trained(rank, world, evolve(asked, cfg=evolve(asked.cfg, checkpointing=how))) for how in HOW]


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in ("Single", "DeepSpeed, stage 1")])
def test_what_is_recomputed_kept_or_offloaded_changes_no_loss(gang2: Gang, name: str) -> None:
    if name.startswith("DeepSpeed"):
        pytest.importorskip("deepspeed")
    for plain, *others in gang2.run(losses, name, timeout=120):
        assert len(plain) > 1
        assert others == [plain] * (len(HOW) - 1)


def test_outputs_are_not_kept_of_the_linear_that_zero_3_has_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut layers would learn something else, without a word."""

    def zero3_linear_wrap(*args: Any) -> Any:
        return torch._C._nn.linear(*args)

    zero3_linear_wrap.__module__ = "deepspeed.runtime.zero.linear"
    monkeypatch.setattr(nn.functional, "linear", zero3_linear_wrap)
    kept = evolve(ALL, keep_ops=("aten.mm",))
    (said,) = problems(kept, Target(model=Tiny()))
    assert said.startswith("checkpoint.replaced-linear at torch.nn.functional.linear: ")
    assert problems(ALL, Target(model=Tiny())) == ()
    give_back_linear()
    assert nn.functional.linear is torch._C._nn.linear
    assert problems(kept, Target(model=Tiny())) == ()

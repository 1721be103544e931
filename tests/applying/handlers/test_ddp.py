"""``DistributedDataParallel``: its arguments, its refusals, and the model that comes out again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.steps import CompileModules, LocalDevice, WrapDDP
from tests.applying.handlers.test_fsdp2 import proven_steps, seeded, sharding
from tests.support.fragile_model import TOKENS, Tiny
from tests.support.gang import Gang
from tests.support.single_step import do, fake_group, gloo_alone, problems, shard_mesh, undo


def wrapping(**how: Any) -> WrapDDP:
    given = {
        "device": LocalDevice(type="cpu"),
        "broadcast_buffers": True,
        "bucket_cap_mb": 25.0,
        "find_unused_parameters": False,
        "gradient_as_bucket_view": True,
        "static_graph": False,
    }
    return WrapDDP(**(given | how))


def test_every_option_reaches_the_wrapper() -> None:
    with gloo_alone():
        target = Target(model=Tiny())
        step = wrapping(
            broadcast_buffers=False,
            bucket_cap_mb=0.5,
            find_unused_parameters=True,
            gradient_as_bucket_view=False,
            static_graph=True,
            device=None,
        )
        do(step, target)
        ddp = target.model
        assert isinstance(ddp, DistributedDataParallel)
        assert (ddp.broadcast_buffers, ddp.bucket_bytes_cap, ddp.find_unused_parameters) == (False, 2**19, True)
        assert (ddp.gradient_as_bucket_view, ddp.static_graph, ddp.device_ids) == (False, True, None)
        other = Target(model=Tiny())
        do(wrapping(gradient_as_bucket_view=True), other)
        assert other.model.gradient_as_bucket_view


def test_the_model_comes_out_again_and_trains_alone() -> None:
    with gloo_alone():
        model = Tiny()
        target = Target(model=model)
        before = names.named_parameters(model)
        memo = do(wrapping(), target)
        assert names.named_parameters(target.model) == before
        undo(wrapping(), target, memo)
        assert target.model is model
    model(TOKENS).square().mean().backward()
    assert model.embed.weight.grad is not None


def test_compiling_the_whole_model_afterwards_compiles_the_wrapper() -> None:
    with gloo_alone():
        target = Target(model=Tiny())
        do(wrapping(), target)
        do(CompileModules(paths=("",), backend="eager", mode="default", fullgraph=False, dynamic=None), target)
        assert target.model._compiled_call_impl is not None
        assert target.model.module._compiled_call_impl is None


def test_wrapped_frozen_and_sharded_models_are_refused() -> None:
    with gloo_alone():
        target = Target(model=Tiny())
        do(wrapping(), target)
        (text,) = problems(wrapping(), target)
        assert (
            text
            == "model.already-wrapped at '' (the root): in DistributedDataParallel already; Give the module inside it."
        )
    (text,) = problems(wrapping(), Target(model=Tiny().requires_grad_(requires_grad=False)))
    assert text == "model.nothing-trainable at model: no parameter requires a gradient, and DDP averages nothing"
    with fake_group(2):
        target = Target(model=Tiny(), mesh=shard_mesh(2))
        do(sharding(), target)
        (text,) = problems(wrapping(), target)
        assert text.startswith("model.sharded-parameters at ")
        assert text.endswith(": DDP needs whole parameters")


def learn(rank: int, world: int) -> tuple[bool, list[str]]:
    """Whether rank 0's weights have won, and what proofs of two windows find."""
    model = seeded()
    if rank:
        torch.nn.init.zeros_(model.embed.weight)
    target = Target(model=model)
    do(wrapping(), target)
    won = torch.equal(model.embed.weight, seeded().embed.weight)
    return won, proven_steps(target.model, [part.chunk(world)[rank] for part in (TOKENS, TOKENS.flip(1))])


def test_two_ranks_learn_what_one_process_learns_from_rank_0_s_weights(gang2: Gang) -> None:
    assert gang2.run(learn) == [(True, [])] * 2


def undone_is_alone(rank: int, world: int) -> tuple[bool, str]:
    """Whether gradients stay a rank's own once the wrapper has been taken off again, and what is told to stay."""
    target = Target(model=seeded())
    stays = undo(wrapping(), target, do(wrapping(), target))
    target.model(TOKENS.chunk(world)[rank]).square().mean().backward()
    grad = target.model.embed.weight.grad
    held = [torch.empty_like(grad) for _ in range(world)]
    dist.all_gather(held, grad)
    return not torch.equal(held[0], held[1]), stays


def test_a_model_that_came_out_again_averages_nothing(gang2: Gang) -> None:
    (first, stays), (second, told) = gang2.run(undone_is_alone)
    assert (first, second, stays) == (True, True, "")
    assert "may hold the values of rank 0" in told


def with_buffer(buffer: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Linear(4, 4)
    model.register_buffer("table", buffer)
    return model


def sent(rank: int, world: int, buffer: torch.Tensor) -> tuple[list[float], bool]:
    """The buffer after two forwards, and whether it is the object that was given."""
    del world
    model = with_buffer(buffer.mul_(1 + rank))
    given = model.table
    target = Target(model=model)
    do(wrapping(), target)
    for _ in range(2):
        target.model(torch.ones(1, 4)).sum().backward()
    return model.table.reshape(-1).tolist(), model.table is given


def test_a_buffer_with_unusual_strides_of_one_element_is_sent(gang2: Gang) -> None:
    """As ``pe.unsqueeze(0).transpose(0, 1)`` of many a positional encoding, where no other buffer has its dtype."""
    for found, same in gang2.run(sent, torch.arange(6.0).reshape(3, 2).unsqueeze(0).transpose(0, 1), timeout=60):
        assert found == [0, 1, 2, 3, 4, 5]
        assert same


def test_a_buffer_whose_elements_share_memory_is_refused() -> None:
    with gloo_alone():
        target = Target(model=with_buffer(torch.ones(1).expand(4)))
        (told,) = problems(wrapping(), target)
        assert "ddp.overlapping-buffers" in str(told)
        assert problems(wrapping(broadcast_buffers=False), target) == ()

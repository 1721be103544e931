"""What a proof tells is wrong: a planted error makes other gradients or weights than one process of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.proving import by_hand, unseen, unusual, wrong
from tests.proving.window import DDP, Window, adam, loop, loss_of, micros, net
from tests.support.gang import Gang


def right(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 2))


def clipped_nowhere(rank: int, world: int) -> Window:
    return right(rank, world)


def moved_on_rank_1(rank: int, world: int) -> Window:
    """A hook of one rank writes into a weight after the step."""
    model = DDP(net())
    optimizer = adam(model)
    if rank == 1:
        optimizer.register_step_post_hook(lambda *_: model.module.head.weight.data.mul_(1.1))
    return Window(model, lambda: loop(model, optimizer, 2))


def stepped_twice(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        loop(model, optimizer, 2)
        optimizer.step()

    return Window(model, train)


def orthogonalizing(model: nn.Module) -> torch.optim.Optimizer:
    return by_hand.Orthogonalizing(model.parameters(), lr=0.02)


@frozen
class ProofHarm:
    """An error of a window, and how many micro-batches each rank meant to train."""

    rule: str
    make: Callable[[int, int], Window]
    micro_batches: int = 2
    ranks: int = 2
    clip: float = 0.0
    """The norm that the run was to clip to; 0: it was not to."""
    stepper: Callable[[nn.Module], torch.optim.Optimizer] = adam


PROOF_HARMS: tuple[ProofHarm, ...] = (
    ProofHarm("prove.outputs", wrong.outputs_in_another_order),
    ProofHarm("prove.first-weights", wrong.one_layer_of_rank_1_other),
    ProofHarm("prove.left-over", unseen.gradients_left_from_before),
    ProofHarm("prove.moved", unusual.other_weights_until_the_step),
    ProofHarm("prove.uneven", wrong.batch_skipped_on_rank_1, 4),
    ProofHarm("prove.summed", wrong.hook_that_sums, 1),
    ProofHarm("prove.averaged-twice", wrong.hook_that_averages_twice, 1),
    ProofHarm("prove.accumulation", wrong.loss_divided_twice, 4),
    ProofHarm("prove.scaled", wrong.stepped_while_scaled, 1),
    ProofHarm("prove.clipped-scaled", wrong.clipped_while_scaled, 1, clip=0.5),
    ProofHarm("prove.unlike-losses", unseen.each_rank_scales_its_loss),
    ProofHarm("prove.not-clipped", clipped_nowhere, clip=0.05),
    ProofHarm("prove.not-averaged", wrong.head_beside_ddp),
    ProofHarm("prove.past-wrapper", unusual.past_the_wrapper_in_the_last_micro_batch, 3),
    ProofHarm("prove.part-of-ranks", wrong.group_of_two_under_ddp, ranks=4),
    ProofHarm("prove.micro-batch", wrong.cleared_between_micro_batches, 3),
    ProofHarm("prove.ratio", wrong.gradient_of_one_layer_doubled),
    ProofHarm("prove.direction", wrong.gradients_of_another_sign),
    ProofHarm("prove.no-gradient", wrong.gradient_cleared_of_one_layer),
    ProofHarm("prove.stepped-twice", stepped_twice),
    ProofHarm("prove.options", wrong.rate_by_rank),
    ProofHarm("prove.not-stepped", wrong.layer_that_nobody_steps),
    ProofHarm("prove.step-size", wrong.rate_of_one_group_changed_behind),
    ProofHarm("prove.step-in-parts", by_hand.matrices_orthogonalized_by_parts, stepper=orthogonalizing),
    ProofHarm("prove.after-apart", moved_on_rank_1),
)
"""One for each error of a proof, in their order."""


def in_one_process(harm: ProofHarm, world: int) -> nn.Module:
    """The net after the step that was meant: the mean over all micro-batches of all ranks, in plain torch."""
    model = net()
    optimizer = harm.stepper(model)
    for rank in range(world):
        for batch in micros(harm.micro_batches, rank=rank):
            (loss_of(model, batch) / (harm.micro_batches * world)).backward()  # type: ignore[no-untyped-call]
    if harm.clip:
        nn.utils.clip_grad_norm_(model.parameters(), harm.clip)
    optimizer.step()
    return model


def numbers(model: nn.Module) -> Tensor:
    """All gradients and weights in order; where there is no gradient zeros."""
    params = [param for _, param in sorted(model.named_parameters(), key=lambda one: _bare(one[0]))]
    found = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    whole = (one.full_tensor() if isinstance(one, DTensor) else one for one in (*found, *params))
    return torch.cat([one.detach().reshape(-1) for one in whole])


def _bare(name: str) -> str:
    return name.replace("module.", "").replace("body.", "")


def apart(rank: int, world: int, at: int) -> float:
    """How far gradients and weights are from those of one process, on the rank where that is furthest."""
    harm = PROOF_HARMS[at] if at >= 0 else ProofHarm("", right)
    window = harm.make(rank, world)
    window.train()
    furthest = (numbers(window.model) - numbers(in_one_process(harm, world))).abs().max()
    dist.all_reduce(furthest, op=dist.ReduceOp.MAX)
    return float(furthest)


@pytest.mark.parametrize("at", range(len(PROOF_HARMS)), ids=[harm.rule for harm in PROOF_HARMS])
def test_an_error_of_a_proof_makes_other_gradients_or_weights_than_plain_torch(at: int, request: Any) -> None:
    gang: Gang = request.getfixturevalue(f"gang{PROOF_HARMS[at].ranks}")
    for furthest in gang.run(apart, at, timeout=60):
        assert furthest > 1e-3


def test_a_right_window_makes_the_same(gang2: Gang) -> None:
    for furthest in gang2.run(apart, -1, timeout=60):
        assert furthest < 1e-5

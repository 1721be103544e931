"""The mean over all tokens of a window and all ranks, as one process that sees all of them has it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS

import prepkit as pk
from prepkit.config import Config, Engine
from prepkit.findings import RunRefused
from prepkit.training.prepared import Prepared
from prepkit.training.token_loss import TokenWindow
from tests.support.deepspeed_cpu import lean
from tests.support.drawn_training import found_by_proof
from tests.support.gang import Gang

READERS = 2
WORDS, LENGTH = 7, 11
WINDOWS = (((11, 1), (2, 7)), ((3, 5), (0, 9)), ((6, 1),))
"""By window and micro-batch how many tokens each of the two readers has; the last window is cut short."""
LIMIT = 0.05


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS, bias=False))


def micro_batch(window: int, at: int, reader: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of two rows, of which the first tokens count."""
    draw = torch.Generator().manual_seed(100 * window + 10 * at + reader)
    inputs, labels = (torch.randint(WORDS, (2, LENGTH), generator=draw) for _ in range(2))
    labels.view(-1)[WINDOWS[window][at][reader] :] = -100
    return inputs, labels


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def trained(rank: int, world: int, engine: Engine, mesh: pk.Mesh | None = None, tensor: int = 1) -> list[str]:
    """What proofs of all windows find: the mean over all tokens is that of one process that has them."""
    if isinstance(engine, pk.DeepSpeed):
        lean()
    layers = pk.tp.TPLayer("1", "colwise"), pk.tp.TPLayer("2", "rowwise", output_layout="replicate")
    cfg = Config(
        engine=engine,
        mesh=mesh,
        accumulation=2,
        clip=pk.ClipNorm(LIMIT),
        optimizer=pk.optim.SGD(lr=0.5, momentum=0.9),
        tp_plan=pk.tp.TPPlan(layers),
    )
    ready = pk.apply(pk.build_plan(cfg, model()), prove=len(WINDOWS))
    for window, micro_batches in enumerate(WINDOWS):
        for at in range(len(micro_batches)):
            with ready.accumulate(last=at == len(micro_batches) - 1):
                inputs, labels = micro_batch(window, at, rank // tensor % READERS)
                count = (labels != -100).sum()
                ready.backward(mean_loss(ready.model(inputs), labels), mean_over=count if at else int(count))
                stepped = ready.step()
        assert stepped
        assert float(ready.grad_norm) > LIMIT, "clipping has to be active"  # type: ignore[arg-type]  # it clips by norm
    return found_by_proof(ready)


@pytest.mark.parametrize(
    "engine",
    [
        pk.DDP(), pk.FSDP1(), pk.FSDP1(use_orig_params=True), pk.FSDP2(),
        *(pk.DeepSpeed(stage=stage, micro_batch=2) for stage in range(4)),
    ],
    ids=["ddp", "fsdp1", "fsdp1-orig", "fsdp2", "zero0", "zero1", "zero2", "zero3"],
)  # fmt: skip
def test_uneven_tokens_over_ranks_and_micro_batches_train_as_one_process_does(gang2: Gang, engine: Engine) -> None:
    assert gang2.run(trained, engine, timeout=120) == [[], []]


@pytest.mark.parametrize(
    ("mesh", "tensor"), [(pk.Mesh(shard=2, tensor=2), 2), (pk.Mesh(replicate=2, shard=2), 1)], ids=["tensor", "hybrid"]
)
def test_ranks_that_read_the_same_tokens_count_once(gang4: Gang, mesh: pk.Mesh, tensor: int) -> None:
    """Under HSDP readers 0 and 1 stand twice: as many tokens of each, so that the mean stays."""
    told = "Some ranks have read the same samples as others (ranks 0, 2; ranks 1, 3): these count as one of them."
    assert gang4.run(trained, pk.FSDP2(), mesh, tensor, timeout=120) == [[told] * len(WINDOWS) * (tensor == 1)] * 4


def norms_in_bf16(rank: int, world: int) -> list[float]:
    """Norms that ZeRO 0 gives in bfloat16, where its optimizer is not fused."""
    lean()
    cfg = Config(
        engine=pk.DeepSpeed(stage=0, micro_batch=2),
        precision=pk.BF16(),
        clip=pk.ClipNorm(LIMIT),
        optimizer=pk.optim.SGD(lr=0.0),
    )
    ready = pk.apply(pk.build_plan(cfg, model()))
    for mean_over in (None, 200):
        inputs, labels = micro_batch(0, 0, 0)
        ready.backward(mean_loss(ready.model(inputs), labels), mean_over=mean_over)
        ready.step()
    return [float(ready.grad_norm)]  # type: ignore[arg-type]  # the plan clips by norm


def test_the_norm_under_zero_0_is_that_of_the_gradients_that_are_stepped(gang2: Gang) -> None:
    reference = model()
    mean_loss(reference(micro_batch(0, 0, 0)[0]), micro_batch(0, 0, 0)[1]).backward()  # type: ignore[no-untyped-call]
    wanted = float(nn.utils.clip_grad_norm_(reference.parameters(), LIMIT))
    for (norm,) in gang2.run(norms_in_bf16, timeout=60):
        assert norm == pytest.approx(wanted, rel=0.05)


def alone(**options: object) -> Prepared:
    cfg = Config(**({"accumulation": 2, "optimizer": pk.optim.SGD(lr=0.5)} | options))  # type: ignore[arg-type]
    return pk.apply(pk.build_plan(cfg, model()))


def test_float16_gradients_are_divided_before_they_are_clipped_and_stay_where_float16_has_room() -> None:
    """Sums over hundreds of tokens would leave float16 at a scale that means over them take."""
    ready = alone(
        precision=pk.FP16(init_scale=2.0**12), clip=pk.ClipNorm(LIMIT), overrides=("precision.fp16-unsupported",)
    )
    inputs, labels = (part.repeat(200, 1) for part in micro_batch(0, 0, 0))
    for count in (4096, 1024):
        ready.backward(mean_loss(ready.model(inputs), labels), mean_over=count)
        stepped = ready.step()
    assert stepped
    assert not ready.skipped
    reference = model()
    mean_loss(reference(inputs), labels).backward()  # type: ignore[no-untyped-call]  # torch has no types
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), LIMIT)
    assert float(ready.grad_norm) == pytest.approx(float(wanted), rel=0.01)  # type: ignore[arg-type]
    assert float(wanted) > LIMIT
    for mine, theirs, before in zip(
        ready.model.parameters(), reference.parameters(), model().parameters(), strict=True
    ):
        assert theirs.grad is not None
        assert torch.allclose(mine, before - 0.5 * theirs.grad, atol=1e-3)


def test_a_counter_that_is_used_again_changes_no_window() -> None:
    """A float32 tensor of the loss's own device needs no conversion, and is copied all the same."""
    learnt = []
    for counter in (None, torch.zeros(())):
        ready = alone()
        for at, count in enumerate((11, 2)):
            inputs, labels = micro_batch(0, at, 0)
            given = count if counter is None else counter.fill_(count)
            ready.backward(mean_loss(ready.model(inputs), labels), mean_over=given)
            if counter is not None:
                counter.zero_()
            stepped = ready.step()
        assert stepped
        learnt.append([param.detach() for param in ready.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*learnt, strict=True))


def test_a_window_without_a_token_moves_nothing_and_leaves_the_next_as_it_is() -> None:
    ready = alone()
    inputs, labels = micro_batch(0, 0, 0)
    none = torch.full_like(labels, -100)
    for _ in range(2):
        ready.backward(mean_loss(ready.model(inputs), none), mean_over=0)
        ready.step()
    assert all(
        torch.equal(mine, given) for mine, given in zip(ready.model.parameters(), model().parameters(), strict=True)
    )
    for _ in range(2):
        ready.backward(mean_loss(ready.model(inputs), labels), mean_over=11)
        ready.step()
    reference = model()
    mean_loss(reference(inputs), labels).backward()  # type: ignore[no-untyped-call]  # torch has no types
    for mine, theirs in zip(ready.model.parameters(), reference.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.allclose(mine, theirs - 0.5 * theirs.grad, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "error", "text"),
    [
        (torch.ones(2, 3), TypeError, r"shape \(2, 3\); give the number, as \(labels != -100\).sum\(\)"),
        (True, TypeError, "mean_over=True is no number of tokens"),
        ("3", TypeError, "mean_over='3' is no number of tokens"),
        (-1, ValueError, "mean_over=-1 is no number"),
        (math.nan, ValueError, "mean_over=nan is no number"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused_and_nothing_has_run(
    count: object, error: type[Exception], text: str
) -> None:
    ready = alone()
    inputs, labels = micro_batch(0, 0, 0)
    with pytest.raises(error, match=text):
        ready.backward(mean_loss(ready.model(inputs), labels), mean_over=count)  # type: ignore[arg-type]
    assert ready.loop.pending == 0
    ready.backward(mean_loss(ready.model(inputs), labels), mean_over=11)
    assert ready.loop.pending == 1


def test_a_window_has_weights_in_all_of_its_losses_or_in_none() -> None:
    ready = alone()
    inputs, labels = micro_batch(0, 0, 0)
    ready.backward(mean_loss(ready.model(inputs), labels), mean_over=11)
    ready.step()
    with pytest.raises(RunRefused, match="some losses of this window say mean_over"):
        ready.backward(mean_loss(ready.model(inputs), labels))
    ready.backward(mean_loss(ready.model(inputs), labels), mean_over=11)
    assert ready.step()
    ready.backward(mean_loss(ready.model(inputs), labels))  # another window may go without
    ready.step()
    with pytest.raises(RunRefused, match="some losses of this window say mean_over"):
        ready.backward(mean_loss(ready.model(inputs), labels), mean_over=11)


def test_where_gradients_cannot_be_weighed_once_it_is_said() -> None:
    ready = alone()
    inputs, labels = micro_batch(0, 0, 0)
    with pytest.raises(RuntimeError, match="more=True announces another"):
        ready.backward(mean_loss(ready.model(inputs), labels), mean_over=11, more=True)
    given = model()
    closing = pk.apply(pk.build_plan(Config(), given, optimizer=LBFGS(given.parameters())))

    def closure() -> Tensor:
        loss = mean_loss(closing.model(inputs), labels)
        closing.backward(loss, mean_over=11)
        return loss

    with pytest.raises(RuntimeError, match="a closure makes the gradients of one step anew"):
        closing.step(closure)


def test_the_unit_of_weights_is_no_part_of_what_a_checkpoint_has_to_hold() -> None:
    """A resumed run begins with a unit of its own, and its gradients are the same to the bit."""
    factors = []
    for unit in (None, 1.0, 64.0):
        window = TokenWindow(unit=None if unit is None else torch.tensor(unit))
        losses = [torch.tensor(value, requires_grad=True) for value in (0.3, 0.7)]
        for loss, count in zip(losses, (11, 3), strict=True):
            window.weighed(loss, count).backward()  # type: ignore[no-untyped-call]  # torch has no types
        factor = window.end(2)
        assert factor is not None
        factors.append([loss.grad * factor for loss in losses if loss.grad is not None])
    assert factors[0] == factors[1] == factors[2]


def on_one_rank(rank: int, world: int) -> str:
    del world
    ready = pk.apply(pk.build_plan(Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.1)), nn.Linear(2, 1)))
    loss = ready.model(torch.ones(1, 2)).sum()
    with pytest.raises(RunRefused) as refused:
        ready.backward(loss, mean_over=3 if rank else None)
    return str(refused.value)


def test_weights_on_some_ranks_alone_are_refused_on_every_rank(gang2: Gang) -> None:
    other, own = gang2.run(on_one_rank, timeout=40)
    assert "some ranks give ready.backward a mean_over=... and some do not: this rank gives none." in other
    assert "this rank gives one." in own

"""A forward that fails under a sharded or cast engine says whose parameter it met, or which buffers, and what helps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prepkit as pk
from prepkit.training.failed_forward import Explains
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang

BLOCKS = pk.wrap.WrapClasses(("Block",))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class Borrows(nn.Module):
    """Its forward computes with a weight of a block, by its name or as an argument, and may fail at something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.body = how, Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.embed(x))
        if self.how == "by name":
            return nn.functional.linear(
                x,
                self.embed.layer.weight,
            )
        if self.how == "as an argument":
            return projected(x, self.embed.layer.weight)
        return x @ torch.ones(3, 3)


def projected(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class Placed(nn.Module):
    """Adds a float32 table to what its weights have made; beside it a buffer that no forward reads."""

    def __init__(self, *, cast: bool) -> None:
        super().__init__()
        self.cast = cast
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.idle = nn.Buffer(torch.ones(8)), nn.Buffer(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(x + (self.table.to(x.dtype) if self.cast else self.table))
        return out


def notes(rank: int, world: int, engine: Any, model: nn.Module, precision: Any = None) -> list[str] | None:
    """What is added to the error of a forward; None where it does not fail."""
    del rank, world
    if isinstance(engine, pk.DeepSpeed):
        lean()
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1), precision=precision)
    ready = pk.apply(pk.build_plan(cfg, model))
    low = precision is not None and isinstance(engine, pk.DeepSpeed)  # which casts no inputs
    x = torch.ones(2, 8, dtype=torch.bfloat16 if low else torch.float32)
    try:
        ready.model(x)
    except (RuntimeError, TypeError) as error:
        return list(getattr(error, "__notes__", ()))
    finally:
        ready.close(keep_group=True)
    return None


@pytest.mark.parametrize("how", ["by name", "as an argument"])
@pytest.mark.parametrize("engine", [pk.FSDP1(wrap=BLOCKS), pk.FSDP2(wrap=BLOCKS)], ids=["fsdp1", "fsdp2"])
def test_a_parameter_that_another_unit_gathers_is_named_with_its_unit(gang2: Gang, engine: Any, how: str) -> None:
    for (note,) in gang2.run(notes, engine, Borrows(how), timeout=60):
        assert note.startswith(
            "forward.used-elsewhere at model.embed.layer.weight: The forward of the root computes with "
            "`embed.layer.weight`, which is gathered for that of the unit `embed` alone. Leave `embed` out of"
        )


def test_what_the_note_says_to_write_makes_the_forward_run(gang2: Gang) -> None:
    class_of_none = pk.FSDP2(wrap=pk.wrap.WrapPaths(("body",)))
    assert gang2.run(notes, class_of_none, Borrows("by name"), timeout=60) == [None, None]


def test_a_forward_that_fails_at_something_else_is_torch_s_alone(gang2: Gang) -> None:
    assert gang2.run(notes, pk.FSDP2(wrap=BLOCKS), Borrows("at nothing of ours"), timeout=60) == [[], []]


@pytest.mark.parametrize(
    ("engine", "instead"),
    [
        (pk.FSDP2(), "."),
        (pk.DeepSpeed(stage=2, micro_batch=2), ', or write "data_types": {"buffer_dtype": "bf16"} into the JSON of'),
    ],
    ids=["fsdp2", "zero2"],
)
def test_a_float32_buffer_that_meets_bfloat16_is_named_with_what_to_write(
    gang2: Gang, engine: Any, instead: str
) -> None:
    for (note,) in gang2.run(notes, engine, Placed(cast=False), pk.BF16(), timeout=90):
        assert note.startswith(
            "forward.unlike-dtypes at model.table: Buffers stay in the dtype that they were made in, here above 16 "
            "bits: `table`. Cast them in the forward where they meet activations: self.table.to(x.dtype)" + instead
        )
    assert gang2.run(notes, engine, Placed(cast=True), pk.BF16(), timeout=90) == [None, None]


def test_fsdp1_computes_under_autocast_where_buffers_may_be_float32(gang2: Gang) -> None:
    assert gang2.run(notes, pk.FSDP1(), Placed(cast=False), pk.BF16(), timeout=60) == [None, None]


def test_a_forward_that_runs_inside_an_except_adds_nothing_to_that_error(gang2: Gang) -> None:
    assert gang2.run(while_handling, timeout=60) == [[], []]


def while_handling(rank: int, world: int) -> list[str]:
    del rank, world
    cfg = pk.Config(engine=pk.FSDP2(), optimizer=pk.optim.SGD(lr=0.1), precision=pk.BF16())
    ready = pk.apply(pk.build_plan(cfg, Block()))
    (hook,) = (one for one in ready.model._forward_hooks.values() if isinstance(one, Explains))
    try:
        raise RuntimeError("expected dtype BFloat16")  # somebody else's
    except RuntimeError as error:
        ready.model(torch.ones(2, 8))
        found = list(getattr(error, "__notes__", ()))
    assert copy.deepcopy(hook) is hook
    assert pickle.loads(pickle.dumps(hook))(ready.model, (), None) is None  # ours
    ready.close(keep_group=True)
    assert hook not in ready.model._forward_hooks.values()
    return found

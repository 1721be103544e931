"""What steps refuse before anything is changed, one step at a time."""

from __future__ import annotations

import sys

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import fully_shard

from prepkit.applying.step_kinds import handlers
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.steps import (
    FlatUnit,
    InitializeMSAMP,
    LocalDevice,
    MakeContiguous,
    MoveToXLA,
    ParallelizeModules,
    ParallelStyle,
    PrecomputeFloat8Scales,
    RegisterEntryPoints,
    SendTensors,
    ShardUnits,
    StartProcessGroup,
    StashTensors,
    Step,
    Transfer,
    WrapFSDP1,
    WrapLoader,
)
from tests.support.single_step import do, fake_group, problems, shard_mesh


def test_batches_do_not_go_to_a_device_that_is_not_there() -> None:
    target = Target(model=nn.Identity(), loaders=[[1]])
    step = WrapLoader(index=0, device=LocalDevice(type="cpu"), ends_window=False, evaluation=False)
    assert problems(step, target) == ()
    assert problems(evolve(step, device=LocalDevice(type="xpu")), target) != ()


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_a_layer_without_rows_and_columns_is_not_cut(style: str) -> None:
    cut = ParallelStyle(paths=("0", "1"), style=style, input_layout="replicate", output_layout="replicate")  # type: ignore[arg-type]  # one of two literals
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert problems(ParallelizeModules(styles=(cut,), axis="tensor"), Target(model=model)) == (
        "tensor.not-a-layer at 1: neither a Linear nor an Embedding, so it has no rows and columns to cut",
    )


def test_a_library_that_is_not_there_is_named_with_its_package() -> None:
    step = InitializeMSAMP(opt_level="O1", linears=(), kept=(), reduced=False)
    said = problems(step, Target(model=nn.Linear(2, 2)))
    assert any(
        text.startswith("fp8.library-missing at msamp: cannot be imported: ") and text.endswith("pip install msamp.")
        for text in said
    )


class Running(nn.ModuleList):
    """A list that has a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def wrapped(path: str) -> WrapFSDP1:
    return WrapFSDP1(
        units=(FlatUnit(path=path), FlatUnit(path="")),
        sharding="FULL_SHARD",
        device=LocalDevice(type="cpu"),
        param_dtype=None,
        reduce_dtype=None,
        buffer_dtype=None,
        offload=False,
        backward_prefetch=None,
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=True,
        sync_module_states=False,
        ignored=(),
    )


def test_a_list_of_modules_is_a_unit_where_it_has_a_forward() -> None:
    runs = nn.Sequential(Running([nn.Linear(2, 2)]))
    assert problems(wrapped("0"), Target(model=runs)) == ()
    hollow = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    assert problems(wrapped("0"), Target(model=hollow)) == (
        "wrap.container at 0: a container without forward cannot be a unit",
    )


def test_units_that_nobody_planned_are_listed_in_order() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    with fake_group(2):
        for layer in model:
            fully_shard(layer, mesh=shard_mesh(2))
        step = ShardUnits(
            units=(), param_dtype=None, reduce_dtype=None, offload=False, pin_memory=False, already_sharded=True
        )
        (said,) = problems(step, Target(model=model))
    assert said.startswith("plan.model-changed at 0, 1, 2")


def test_a_device_is_bound_before_its_group_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl takes the device that is current when the group is formed."""

    def bind(device: LocalDevice) -> torch.device:
        raise LookupError(device.type)

    monkeypatch.setattr(launcher, "bind", bind)
    step = StartProcessGroup(backend="nccl", world_size=1, timeout_s=5)
    with pytest.raises(LookupError, match="cuda"):
        handlers()[StartProcessGroup].do(step, Target(model=nn.Identity()))


ABSENT: dict[str, Step] = {
    "parameter": MakeContiguous(names=("nowhere",)),
    "tensor": StashTensors(params=(), buffers=("nowhere",)),
}


@pytest.mark.parametrize("kind", ABSENT)
def test_a_name_that_the_model_does_not_have_is_said_with_what_it_would_be(kind: str) -> None:
    (said,) = problems(ABSENT[kind], Target(model=nn.Linear(2, 2)))
    assert "nowhere" in said
    assert kind in said


def test_ignored_parameters_that_are_not_there_are_said() -> None:
    step = ShardUnits(
        units=(), param_dtype=None, reduce_dtype=None, offload=False, pin_memory=False, ignored=("nowhere",)
    )
    assert any("nowhere" in text and "parameter" in text for text in problems(step, Target(model=nn.Linear(2, 2))))


@pytest.mark.parametrize(
    ("backend", "device"),
    [("cpu:gloo,xpu:xccl", "xpu"), ("xpu:xccl,cpu:gloo", "xpu"), ("cpu:gloo", None), ("gloo", None)],
)
def test_the_device_that_is_bound_is_the_one_of_the_backend(
    backend: str, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    monkeypatch.setattr(launcher, "bind", lambda device: bound.append(device.type))

    def failing() -> None:
        raise LookupError

    target = Target(model=nn.Identity(), together=failing)
    with pytest.raises(LookupError):
        handlers()[StartProcessGroup].do(StartProcessGroup(backend=backend, world_size=1, timeout_s=5), target)
    assert bound == ([device] if device else [])


def test_entry_points_are_registered_once() -> None:
    step = RegisterEntryPoints(names=("extra_repr",), through="forward")
    target = Target(model=nn.Linear(2, 2))
    do(step, target)
    said = (
        "model.already-wrapped at model: its methods are entry points already; Apply to a model that was not prepared."
    )
    assert said in problems(step, target)


def test_scales_are_not_computed_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    (said,) = problems(PrecomputeFloat8Scales(), Target(model=nn.Linear(2, 2)))
    assert said.startswith("fp8.library-missing at torchao.float8: cannot be imported: ")
    assert said.endswith("Type pip install torchao.")


def test_a_tensor_of_another_shape_is_not_sent() -> None:
    transfers = tuple(
        Transfer(name=name, shape=shape, dtype="float32", placements=())
        for name, shape in (("weight", (3, 2)), ("bias", (2,)))
    )
    said = problems(SendTensors(tensors=transfers, axes=()), Target(model=nn.Linear(2, 2)))
    assert said == ("plan.other-model at weight: not of the planned shape",)


def test_what_is_on_meta_does_not_move_to_an_xla_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    said = problems(MoveToXLA(forked=False), Target(model=model))
    assert "plan.no-weights at weight, bias: on meta, without data" in said


def test_devices_of_an_optimizer_that_are_not_the_models_are_listed_in_order() -> None:
    held = [nn.Parameter(torch.empty(1, device=torch.device("meta"))), nn.Parameter(torch.empty(1))]
    optimizer = torch.optim.SGD([held[1], held[0]], lr=1.0)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    said = problems(MoveToXLA(forked=False), Target(model=model, optimizer=optimizer))
    assert any("optimizer: holds parameters on cpu, the model's are on meta" in text for text in said)

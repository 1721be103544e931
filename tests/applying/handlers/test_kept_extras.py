"""What somebody has put on modules and parameters is there after a step that replaces what it was put on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from prepkit.objects.target import Target
from prepkit.steps import (
    AllocateTensors,
    AverageGradients,
    ConvertSyncBatchNorm,
    FlatUnit,
    InitializeMSAMP,
    LocalDevice,
    RegisterEntryPoints,
    WrapFSDP1,
)
from tests.support import library_doubles
from tests.support.single_step import do, fake_group, gloo_alone, shard_mesh, undo

CPU = LocalDevice(type="cpu")


def test_parameters_that_get_storage_keep_their_attributes_and_hooks() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    heard: list[str] = []
    vars(model.weight)["no_decay"] = True
    model.weight.register_hook(lambda grad: heard.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda param: heard.append("accumulated"))
    target = Target(model=model)
    do(AllocateTensors(device=CPU), target)
    assert target.unfilled == {"weight", "bias"}
    assert vars(model.weight)["no_decay"] is True
    nn.init.ones_(model.weight)
    model(torch.ones(1, 2)).sum().backward()
    assert heard == ["gradient", "accumulated"]


def test_modules_that_fsdp1_leaves_whole_get_storage_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    step = WrapFSDP1(
        units=(FlatUnit(path=""),),
        sharding="FULL_SHARD",
        device=CPU,
        param_dtype=None,
        reduce_dtype=None,
        buffer_dtype=None,
        offload=False,
        backward_prefetch=None,
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=True,
        sync_module_states=False,
        ignored=("1",),
        allocates=True,
    )
    with gloo_alone():
        target = Target(model=model, mesh=shard_mesh(1))
        do(step, target)
        assert {"1.weight", "1.bias"} <= target.unfilled
        assert not any(param.is_meta for param in target.model.parameters())


def nothing(*_: Any, **__: Any) -> None:
    """A hook."""


def test_a_batch_norm_keeps_every_hook_and_what_torch_has_noted_of_it() -> None:
    """torch calls a hook by what the module says of it: full ones get gradients of inputs and outputs."""
    norm = nn.BatchNorm1d(3)
    norm.register_forward_hook(nothing, with_kwargs=True, always_call=True)
    norm.register_forward_pre_hook(nothing, with_kwargs=True)
    norm.register_full_backward_hook(nothing)
    norm.register_full_backward_pre_hook(nothing)
    norm.register_state_dict_post_hook(nothing)
    norm.register_state_dict_pre_hook(nothing)
    norm.register_load_state_dict_pre_hook(nothing)
    norm.register_load_state_dict_post_hook(nothing)
    target = Target(model=nn.Sequential(norm))
    do(ConvertSyncBatchNorm(paths=("0",)), target)
    (converted,) = target.model.children()
    assert isinstance(converted, nn.SyncBatchNorm)
    noted = {key: value for key, value in vars(norm).items() if "hook" in key and value}
    assert len(noted) == 12, "every table that torch has"
    assert {key: vars(converted)[key] for key in noted} == noted


class Writes(nn.Linear):
    """Has a ``generate``, as transformers' models have."""

    def generate(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs)


def test_modules_that_generate_are_told_that_ranks_go_in_step_until_it_is_undone() -> None:
    model = nn.Sequential(Writes(2, 2), nn.Linear(2, 2))
    before = [dict(vars(module)) for module in model.modules()]
    step = RegisterEntryPoints(names=("extra_repr",), through="forward", in_step=True)
    target = Target(model=model)
    memo = do(step, target)
    assert [name for name in vars(model[0]) if name not in before[1]], "the one that generates"
    assert [*vars(model[1])] == [*before[2]]
    undo(step, target, memo)
    assert [dict(vars(module)) for module in model.modules()] == before


IGNORED = "_ddp_params_and_buffers_to_ignore"


def test_what_ddp_is_to_leave_out_and_who_drives_the_optimizer_are_as_before_ms_amp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library_doubles.msamp(monkeypatch)
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model)[IGNORED] = ["0.bias"]
    optimizer: Optimizer = AdamW(model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    target = Target(model=model, optimizer=optimizer, scheduler=scheduler)
    step = InitializeMSAMP(opt_level="O1", linears=("0",), kept=(), reduced=False)
    memo = do(step, target)
    undo(step, target, memo)
    assert vars(model)[IGNORED] == ["0.bias"]
    assert scheduler.optimizer is optimizer


def test_an_optimizer_is_watched_no_longer_once_averaging_is_undone() -> None:
    model = nn.Linear(2, 2)
    step = AverageGradients(names=("weight",))
    with fake_group(2):
        target = Target(model=model, optimizer=SGD(model.parameters(), lr=1.0), mesh=shard_mesh(2))
        memo = do(step, target)
        assert target.whole_gradients is memo
        undo(step, target, memo)
    assert target.whole_gradients is None

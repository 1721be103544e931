"""Every module of torch's own test suite, as a unit: observed, planned, sharded or copied, and verified."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attrs import evolve
from torch import nn

import prepkit as pk
from prepkit.applying.rehearse import rehearse_here
from prepkit.observe import observe

pytest.importorskip("expecttest", reason="torch's own tests need it: pip install 'prepkit[dev]'")
from torch.testing._internal.common_modules import ModuleInfo, module_db

WORLD = 4
CPU = pk.Env.declare(world_size=WORLD, device="cpu", torch="2.13")
FSDP2 = pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapPaths(("part",))), optimizer=pk.optim.AdamW(lr=1e-3))
DDP = pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW(lr=1e-3))
LAZY = {info.name for info in module_db if info.name.startswith("nn.Lazy")}


class Holder(nn.Module):
    """The module beside a layer that is trained whatever the module is."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.head = nn.Linear(3, 5)  # nothing that divides by four


def made(info: ModuleInfo) -> Iterator[nn.Module]:
    """The module once for each set of tensors that torch's own inputs give it: names, shapes and dtypes."""
    seen = set()
    given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    for case in given:
        part = info.module_cls(*case.constructor_input.args, **case.constructor_input.kwargs)
        tensors = tuple((name, one.shape, one.dtype) for name, one in part.state_dict().items())
        if tensors not in seen:
            seen.add(tensors)
            yield part


def as_planned(model: nn.Module, part: nn.Module) -> None:
    """Observed, planned and verified under FSDP2 with the part as unit, and under DDP; left as it was."""
    before = state(model)
    facts = observe(model, env=CPU).facts.model
    assert [one.name for one in facts.params] == [name for name, _ in model.named_parameters()]
    assert {one.name for one in facts.buffers if one.persistent} == set(before) - {one.name for one in facts.params}
    trains = any(True for _ in part.parameters())
    sharded = FSDP2 if trains else evolve(FSDP2, engine=pk.FSDP2(wrap=pk.wrap.WrapRoot()))
    for cfg, units in ((sharded, ("", "part") if trains else ("",)), (DDP, ())):
        seen = rehearse_here(pk.build_plan(cfg, model, env=CPU), model, rank=WORLD - 1)
        assert seen.fine, f"{part}: {seen}"
        assert seen.units == units
        assert [name for name, _ in seen.params] == [one.name for one in facts.params]
    after = state(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", [one for one in module_db if one.name not in LAZY], ids=lambda info: info.name)
def test_a_module_of_torch_is_observed_planned_and_as_planned_as_a_unit(info: ModuleInfo) -> None:
    for part in made(info):
        as_planned(Holder(part), part)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", [one for one in module_db if one.name in LAZY], ids=lambda info: info.name)
def test_a_lazy_module_of_torch_is_refused_until_it_has_been_run(info: ModuleInfo) -> None:
    given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)[0]
    part = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
    for cfg in (FSDP2, DDP):
        assert "model.lazy-parameters" in [finding.rule for finding in pk.check(cfg, Holder(part), env=CPU)]
    part(*given.forward_input.args, **given.forward_input.kwargs)
    as_planned(Holder(part), part)


def test_the_modules_are_those_that_torch_tests() -> None:
    assert len(module_db) >= 100
    assert len(LAZY) == 6

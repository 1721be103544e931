"""What one tensor-parallel rank does by itself, under torch's group without other processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from prepkit.applying.handlers import tensor_parallel
from prepkit.applying.step_kinds import handlers
from prepkit.objects.target import Target
from prepkit.steps import ParallelizeModules, ParallelStyle, ShardLoader
from tests.support.single_step import fake_group

WIDTH = 4


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group without processes compares nothing."""
    monkeypatch.setattr(tensor_parallel, "agree", lambda digests: None)


def style(path: str, style: str, layout: str = "replicate") -> ParallelStyle:
    return ParallelStyle(paths=(path,), style=style, input_layout=layout, output_layout=layout)  # type: ignore[arg-type]  # literals


def cut(model: nn.Module, *styles: ParallelStyle) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    step = ParallelizeModules(styles=styles, axis="tensor")
    handlers()[ParallelizeModules].do(step, Target(model=model, mesh=mesh))


class Sized(nn.LayerNorm):
    """Notes the local shape of what it normalises."""

    seen: torch.Size

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        self.seen = x.to_local().shape
        return super().forward(x)


def test_a_sequence_style_divides_the_positions_and_not_the_samples() -> None:
    model = nn.Sequential(Sized(WIDTH))
    with fake_group(2):
        cut(model, style("0", "sequence"))
        model(torch.zeros(6, 10, WIDTH))
    assert model[0].seen == (6, 5, WIDTH)


@pytest.mark.parametrize(("name", "dim"), [("colwise", 0), ("rowwise", 1)])
def test_a_rank_keeps_its_part_of_its_own_weights_and_waits_for_nobodys(name: str, dim: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    whole = model[0].weight.detach().clone()
    with fake_group(2, rank=1):
        cut(model, style("0", name))
        assert isinstance(model[0].weight, DTensor)
        assert torch.equal(model[0].weight.to_local(), whole.chunk(2, dim)[1])


def test_a_module_that_cannot_be_cut_is_named_with_how_many_were() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    with fake_group(2), pytest.raises(RuntimeError, match=r"module 1: could not be cut colwise \(1 cut before it\): "):
        cut(model, style("0", "colwise"), style("1", "colwise"))


def test_without_the_axis_of_the_plan_nothing_is_cut() -> None:
    step = ParallelizeModules(styles=(style("0", "colwise"),), axis="tensor")
    target = Target(model=nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(RuntimeError, match="there is no device mesh to cut over, with an axis 'tensor'"):
        handlers()[ParallelizeModules].do(step, target)
    with fake_group(2):
        target.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        with pytest.raises(RuntimeError, match="there is no device mesh to cut over, with an axis 'tensor'"):
            handlers()[ParallelizeModules].do(step, target)
    assert type(target.model[0].weight) is nn.Parameter  # type: ignore[index, union-attr]  # a Sequential


def test_a_loader_is_not_divided_over_a_mesh_that_is_not_there() -> None:
    step = ShardLoader(index=0, shuffle=False, seed=3, drop_last=False, axes=("shard",))
    target = Target(model=nn.Identity(), loaders=[DataLoader([1, 2])])
    with pytest.raises(RuntimeError, match="there is no device mesh to divide the data over"):
        handlers()[ShardLoader].do(step, target)

"""The replacement of torch's chunking: the same shards bit for bit, while sharding only, and on a known torch only."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

import prepkit as pk
from prepkit.applying.handlers import fsdp2
from prepkit.applying.handlers.fsdp2 import KNOWN, Chunks, known, lean_chunks
from prepkit.applying.rehearse import rehearse_here
from prepkit.objects.target import Target
from prepkit.steps import ShardUnits, Unit
from tests.support.single_step import do, fake_group, shard_mesh

OWN = _fsdp_param._chunk_with_empty
SIZES = (0, 1, 2, 5, 7, 8, 64, 65)
WORLDS = (1, 2, 3, 7, 8, 64, 512)
SHARD = ShardUnits(
    units=(Unit(path="2", reshard_after_forward=True), Unit(path="", reshard_after_forward=False)),
    param_dtype=None,
    reduce_dtype=None,
    offload=False,
    pin_memory=False,
)


class Odd(nn.Module):
    """Parameters of every size in ``SIZES``, of one and of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.ParameterList(torch.rand(size) for size in SIZES)
        self.wide = nn.ParameterList(torch.rand(size, 3) for size in SIZES)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 9), Odd(), nn.Linear(9, 3))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also in what lies around them: the padding is part of what is sent."""
    return (
        (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
        and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        and torch.equal(a, b)
    )


def held(sharded: nn.Module) -> list[Any]:
    """What torch keeps of every parameter of the unit; the newer releases have several groups in one."""
    state: Any = sharded._get_fsdp_state()  # type: ignore[operator]  # FSDPModule's
    group = state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group
    found: list[Any] = group.fsdp_params
    return found


@pytest.mark.parametrize("count", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_chunk_is_the_one_that_torch_cuts(size: int, count: int) -> None:
    for tensor in (torch.rand(size), torch.rand(size, 3)):
        theirs, ours = OWN(tensor, count, dim=0), Chunks(tensor, count, dim=0)
        for index, chunk in enumerate(theirs):
            assert same(chunk, ours[index]), (size, count, index)
            assert chunk.untyped_storage().data_ptr() == ours[index].untyped_storage().data_ptr() or not chunk.numel()
        with pytest.raises(IndexError):
            ours[count]


def test_another_dimension_is_cut_alike() -> None:
    tensor = torch.rand(3, 8)
    assert all(same(a, Chunks(tensor, 4, dim=1)[i]) for i, a in enumerate(OWN(tensor, 4, dim=1)))


@pytest.mark.skipif(not known(torch.__version__), reason="this torch shards by its own code")
@pytest.mark.parametrize("world", WORLDS)
def test_shards_are_torchs_own_bit_for_bit(world: int) -> None:
    for rank in sorted({0, world // 2, world - 1}):
        with fake_group(world, rank):
            target = Target(model=model(), mesh=shard_mesh(world))
            do(SHARD, target)
            twin, mesh = model(), init_device_mesh("cpu", (world,))
            fully_shard(twin[2], mesh=mesh)
            fully_shard(twin, mesh=mesh, reshard_after_forward=False)
            pairs = [*zip(target.model.parameters(), twin.parameters(), strict=True)]
            assert len(pairs) == 4 + 2 * len(SIZES)
            for ours, theirs in pairs:
                a: Any = ours
                b: Any = theirs
                assert same(a._local_tensor, b._local_tensor), (world, rank, a.shape)
                assert (a.shape, a.placements) == (b.shape, b.placements)
            for ours, theirs in zip(held(target.model), held(twin), strict=True):
                assert torch.equal(ours._sharded_param_data, theirs._sharded_param_data)
                assert ours.padded_sharded_param_size == theirs.padded_sharded_param_size


def test_torchs_function_stands_again_after_sharding_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = fsdp2.fully_shard

    def watch(module: nn.Module, **how: Any) -> Any:
        seen.append(_fsdp_param._chunk_with_empty)
        if len(seen) == 4:
            raise ValueError("no")
        return real(module, **how)

    monkeypatch.setattr(fsdp2, "fully_shard", watch)
    with fake_group(2):
        do(SHARD, Target(model=model(), mesh=shard_mesh(2)))
        assert _fsdp_param._chunk_with_empty is OWN
        with pytest.raises(RuntimeError, match="could not be sharded"):
            do(SHARD, Target(model=model(), mesh=shard_mesh(2)))
    assert _fsdp_param._chunk_with_empty is OWN
    assert seen == [Chunks] * 4 if known(torch.__version__) else [OWN] * 4


def test_on_a_torch_that_was_not_compared_torchs_own_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.14.0", "2.12.1", "2.130.0", "2.13.0a0+git12", "3.13", ""):
        with lean_chunks(version) as leaner:
            assert not leaner
            assert _fsdp_param._chunk_with_empty is OWN
    monkeypatch.delattr(_fsdp_param, "_chunk_with_empty")
    with lean_chunks(f"{KNOWN[0]}.1+cu130") as leaner:
        assert not leaner


def test_the_table_of_versions_holds_the_torch_that_the_tests_run_on() -> None:
    with lean_chunks() as leaner:
        assert leaner
    assert known(torch.__version__), f"compare shards on {torch.__version__}, then add it to {fsdp2.__name__}"


class Attention(nn.Module):
    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, size, bias=False) for size in (width, narrow, narrow, width))


class Block(nn.Module):
    def __init__(self, width: int, narrow: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, narrow)
        self.up, self.gate = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)


def llama_405b() -> nn.Module:
    """The shapes of Llama 3.1 405B, on meta."""
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "embed": nn.Embedding(128256, 16384),
                "layers": nn.ModuleList(Block(16384, 1024, 53248) for _ in range(126)),
                "norm": nn.RMSNorm(16384),
                "head": nn.Linear(16384, 128256, bias=False),
            }
        )


@pytest.mark.skipif(not known(torch.__version__), reason="this torch shards by its own code, in two minutes")
def test_planning_and_sharding_cost_no_more_at_16384_ranks_than_at_8() -> None:
    whole = nn.Sequential(llama_405b())
    whole.forward = lambda *args: args  # type: ignore[method-assign]
    times = {}
    for world in (8, 16384):
        twin = copy.deepcopy(whole)
        began = time.process_time()
        plan = pk.build_plan(pk.Config(engine=pk.FSDP2()), twin, env=pk.Env.declare(world_size=world))
        found = rehearse_here(plan, whole, rank=world - 1)
        times[world] = time.process_time() - began
        assert found.fine, str(found)
        assert len(found.params) == 1137
    assert times[16384] < 2 * times[8] + 1, times
    assert times[16384] < 10, times  # planned and rehearsed; torch's own chunks alone take two minutes

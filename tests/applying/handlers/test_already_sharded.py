"""A model that ``fully_shard`` has cut before prepkit sees it stays the object it is, and trains as it does by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import prepkit as pk
from prepkit.applying.handlers.fsdp2 import shard_ready
from prepkit.findings import PlanRejected
from prepkit.objects.target import Target
from prepkit.observe import observe
from prepkit.plan.drift import drift
from prepkit.steps import RebindOptimizer, ReleaseOptimizer, ShardUnits
from tests.support.fragile_model import TOKENS, Tiny
from tests.support.gang import Gang
from tests.support.single_step import fake_group, gloo_alone

FSDP2 = pk.FSDP2()


def by_hand(model: nn.Module, **how: Any) -> Any:
    """Each block a unit, then the root."""
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def plain() -> Any:
    return by_hand(Tiny())


def hybrid() -> Any:
    return by_hand(Tiny(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def mixed() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return by_hand(Tiny(), mp_policy=policy)


def low() -> Any:
    """A policy that leaves the reduction to torch, which takes the dtype of the gathered parameters."""
    return by_hand(Tiny(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def offloaded() -> Any:
    return by_hand(Tiny(), offload_policy=CPUOffloadPolicy(pin_memory=False), reshard_after_forward=False)


def together() -> Any:
    """The last two blocks are one group, and the first frees nothing."""
    model = Tiny()
    fully_shard(model.layers[0], reshard_after_forward=False)
    fully_shard([model.layers[1], model.layers[2]])  # type: ignore[arg-type]  # torch's own hints leave lists out
    return fully_shard(model)


def frozen_whole() -> Any:
    """The frozen scales are left whole."""
    model = Tiny()
    return by_hand(model, ignored_params={layer.get_parameter("scale") for layer in model.layers})


def trained_whole() -> Any:
    """Some layers are left whole, and trained."""
    model = Tiny()
    return by_hand(model, ignored_params={layer.get_parameter("outer.weight") for layer in model.layers})


WAYS: dict[str, tuple[Callable[[], Any], pk.Config]] = {
    "plain": (plain, pk.Config(engine=FSDP2)),
    "accumulated": (plain, pk.Config(engine=FSDP2, accumulation=2, clip=pk.ClipNorm(0.5))),
    "hybrid": (hybrid, pk.Config(engine=FSDP2, mesh=pk.Mesh(replicate=2, shard=2))),
    "bfloat16": (mixed, pk.Config(engine=FSDP2, precision=pk.BF16(output_dtype="bfloat16"))),
    "bfloat16 alone": (
        low,
        pk.Config(engine=FSDP2, precision=pk.BF16(reduce_dtype="bfloat16", output_dtype="bfloat16")),
    ),
    "offloaded": (offloaded, pk.Config(engine=pk.FSDP2(offload=pk.OffloadToCPU(pin_memory=False)))),
    "other units": (together, pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapRoot()))),
    "frozen whole": (frozen_whole, pk.Config(engine=FSDP2)),
    "trained whole": (trained_whole, pk.Config(engine=FSDP2, accumulation=2)),
    "compiled": (plain, pk.Config(engine=FSDP2, compile=pk.CompileModel(backend="aot_eager"))),
    "blocks compiled": (plain, pk.Config(engine=FSDP2, compile=pk.CompileBlocks(backend="aot_eager"))),
}


def _used(made: Callable[[], Any]) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model and its optimizer after one step by hand."""
    torch.manual_seed(0)
    model = made()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    _by_hand(model, optimizer, pk.Config())
    return model, optimizer


def _batch(rank: int, step: int) -> Tensor:
    return (TOKENS + rank + 3 * step) % 11


def _by_hand(model: Any, optimizer: torch.optim.Optimizer, cfg: pk.Config, rank: int = 0) -> None:
    for micro in range(cfg.accumulation or 1):
        model.set_requires_gradient_sync(micro == (cfg.accumulation or 1) - 1)
        (model(_batch(rank, micro)).float().square().mean() / (cfg.accumulation or 1)).backward()
    for param in model.parameters():
        if not isinstance(param, DTensor) and param.grad is not None:
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            param.grad /= dist.get_world_size()
    if isinstance(cfg.clip, pk.ClipNorm):
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip.max_norm)
    optimizer.step()
    optimizer.zero_grad()


def _values(model: nn.Module) -> list[Tensor]:
    return [getattr(param, "full_tensor", lambda kept=param: kept)().detach().cpu() for param in model.parameters()]


def trained(rank: int, world: int, way: str) -> tuple[bool, bool, float, list[str]]:
    """Whether the objects are what they were, and how far two steps are from those by hand; kinds of the steps."""
    del world
    made, cfg = WAYS[way]
    hand, theirs = _used(made)
    model, optimizer = _used(made)
    before = [id(param) for param in model.parameters()]
    plan = pk.build_plan(cfg, model, optimizer=optimizer)
    ready: Any = pk.apply(plan)
    same = ready.model is model and before == [id(param) for param in ready.model.parameters()]
    for _ in range(2):
        _by_hand(hand, theirs, cfg, rank)
        for micro in range(cfg.accumulation or 1):
            ready.backward(ready.model(_batch(rank, micro)).float().square().mean())
            ready.step()
    gap = max(float((a - b).abs().max()) for a, b in zip(_values(ready.model), _values(hand), strict=True))
    return same, not ready.attestation.failed, gap, [type(one.step).__name__ for one in plan.steps]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_arrives_sharded_stays_and_trains_as_by_hand(gang2: Gang, gang4: Gang, way: str) -> None:
    gang = gang4 if way == "hybrid" else gang2
    for same, attested, gap, kinds in gang.run(trained, way, timeout=120):
        assert same
        assert attested
        assert gap == 0.0
        assert not {"ReleaseOptimizer", "RebindOptimizer"} & set(kinds)


def loaded(rank: int, world: int, path: str) -> tuple[float, bool]:
    """A model that was sharded on meta, with an optimizer over it, gets its values from a file."""
    del rank, world
    with torch.device("meta"):
        model = by_hand(Tiny())
    for name, buffer in list(model.named_buffers()):
        model.register_buffer(name, torch.zeros_like(buffer, device="cpu"), persistent=name == "kept")
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    cfg = pk.Config(engine=FSDP2, weights=pk.LoadWeights(path))
    ready: Any = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer))
    torch.manual_seed(5)
    gap = max(float((a - b).abs().max()) for a, b in zip(_values(ready.model), _values(Tiny()), strict=True))
    before = _values(ready.model)
    ready.backward(ready.model(TOKENS).square().mean())
    ready.step()
    return gap, any(not torch.equal(a, b) for a, b in zip(before, _values(ready.model), strict=True))


def test_a_model_that_was_sharded_on_meta_gets_its_values_from_a_file(gang2: Gang, tmp_path: Path) -> None:
    torch.manual_seed(5)
    values = {name: value for name, value in Tiny().state_dict().items() if name != "head.weight"}
    save_file(values, tmp_path / "model.safetensors")
    assert gang2.run(loaded, str(tmp_path)) == [(0.0, True), (0.0, True)]


def _found(cfg: pk.Config, model: nn.Module) -> dict[str, str]:
    return {f"{one.rule} {one.where}": one.fix for one in pk.check(cfg, model) if one.rule.startswith("sharded.")}


def test_a_config_that_says_otherwise_is_told_what_to_write() -> None:
    with gloo_alone():
        odd = pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapRoot(), reshard_after_forward=False), precision=pk.BF16())
        assert _found(pk.Config(engine=FSDP2), plain()) == {}
        assert _found(pk.Config(engine=FSDP2, precision=pk.BF16()), mixed()) == {
            "sharded.differs config.precision": 'Write precision=BF16(output_dtype="bfloat16").'
        }
        kept = "What stands is kept; write the same into config.engine, or pass the model before it is sharded."
        assert _found(odd, offloaded()) == {
            "sharded.differs config.precision": "Write precision=None.",
            "sharded.differs config.engine.offload": "Write offload=OffloadToCPU().",
            "sharded.kept config.engine.wrap": kept,
        }
        late = pk.Config(engine=FSDP2, weights=pk.BroadcastWeights(), checkpointing=pk.CheckpointBlocks())
        assert list(_found(late, plain())) == [
            "sharded.too-late config.checkpointing",
            "sharded.too-late config.weights",
        ]


def test_a_mesh_that_is_another_one_is_told() -> None:
    with fake_group(4):
        model = by_hand(Tiny(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        assert _found(pk.Config(engine=FSDP2), model) == {
            "sharded.differs config.mesh": "Write mesh=Mesh(replicate=2, shard=2)."
        }
        assert _found(pk.Config(engine=FSDP2, mesh=pk.Mesh(replicate=2, shard=2)), model) == {}


def test_what_would_train_wrongly_is_refused() -> None:
    with gloo_alone():
        rootless = Tiny()
        fully_shard(rootless.layers[0])
        assert "sharded.not-to-plan model" in _found(pk.Config(engine=FSDP2), rootless)
        two = Tiny()
        fully_shard(two.layers[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert "sharded.not-to-plan model" in _found(pk.Config(engine=FSDP2), fully_shard(two))
        flat = by_hand(Tiny(), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))
        assert "sharded.not-to-plan model.embed.weight" in _found(pk.Config(engine=FSDP2), flat)
        low = by_hand(Tiny(torch.bfloat16))
        assert "sharded.too-late model.embed.weight" in _found(pk.Config(engine=FSDP2, precision=pk.BF16()), low)


def test_a_plan_for_other_units_is_not_applied() -> None:
    with gloo_alone():
        plan = pk.build_plan(pk.Config(engine=FSDP2, intent=pk.Intent.INFERENCE), plain())
        rest = fully_shard(Tiny())
        with pytest.raises(PlanRejected, match=r"layers\.0"):
            pk.apply(plan, model=rest)
        (step,) = (one.step for one in plan.steps if isinstance(one.step, ShardUnits))
        assert shard_ready(step, Target(model=plain())) == ()
        (problem,) = shard_ready(step, Target(model=rest))
        assert (problem.rule, problem.where) == ("plan.model-changed", "layers.0, layers.1, layers.2")
        assert problem.what == "planned as a unit already, which it is not"
        (problem,) = shard_ready(evolve(step, units=step.units[1:]), Target(model=plain()))
        assert (problem.rule, problem.where) == ("plan.model-changed", "layers.0")
        assert problem.what == "a unit already, which was not planned"


def test_a_unit_that_was_asked_for_something_else_since_is_drift() -> None:
    with gloo_alone():
        seen, now = (observe(model).facts for model in (plain(), by_hand(Tiny(), reshard_after_forward=False)))
        assert [one.where for one in drift(seen, now)] == [f"unit layers.{index}" for index in range(3)]


def test_it_is_rehearsed_before_it_is_sharded_only() -> None:
    with gloo_alone():
        plan = pk.build_plan(pk.Config(engine=FSDP2, intent=pk.Intent.INFERENCE), model := plain())
        with pytest.raises(ValueError, match="Tiny is sharded already"):
            pk.rehearse(plan, model)


def test_steps_that_move_the_optimizer_stay_where_values_are_filled_in() -> None:
    with gloo_alone():
        model = plain()
        optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
        plan = pk.build_plan(pk.Config(engine=FSDP2), model, optimizer=optimizer)
        assert not any(isinstance(one.step, ReleaseOptimizer | RebindOptimizer) for one in plan.steps)

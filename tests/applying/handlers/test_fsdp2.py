"""``fully_shard`` per unit: what is sharded, in which dtype, what is refused, and what a failure says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import SGD

import prepkit as pk
from prepkit.applying.handlers import fsdp2
from prepkit.applying.step_kinds import handlers
from prepkit.applying.verification import verify
from prepkit.config import BF16, FSDP1, FSDP2, Config, WrapPaths
from prepkit.interpreter import Halted, interpret
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.steps import AutocastForward, CheckpointModules, CompileModules, ShardUnits, Unit, WrapFSDP1
from tests.support.drawn_training import found_by_proof, found_in_windows
from tests.support.fragile_model import TOKENS, Tiny, applied, planned
from tests.support.gang import Gang
from tests.support.single_step import do, fake_group, gloo_alone, problems, shard_mesh

BLOCKS = ("layers.0", "layers.1", "layers.2")


def sharding(*paths: str, dtype: str | None = None, output: str | None = None, offload: bool = False) -> ShardUnits:
    units = tuple(Unit(path=path, reshard_after_forward=True) for path in paths)
    root = Unit(path="", reshard_after_forward=False, output_dtype=output)
    reduce = "float32" if dtype else None
    return ShardUnits(units=(*units, root), param_dtype=dtype, reduce_dtype=reduce, offload=offload, pin_memory=True)


def test_every_unit_is_sharded_on_dim_0_and_ties_hold() -> None:
    with fake_group(4):
        model = Tiny()
        shapes = {name: p.shape for name, p in model.named_parameters()}
        do(sharding(*BLOCKS), Target(model=model, mesh=shard_mesh(4)))
        assert [name for name, m in model.named_modules() if isinstance(m, FSDPModule)] == ["", *BLOCKS]
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            assert (param.placements, param.shape) == ((Shard(0),), shapes[name])
        assert model.head.weight is model.embed.weight


def test_two_axes_replicate_and_shard() -> None:
    with fake_group(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = Tiny()
        do(sharding(*BLOCKS), Target(model=model, mesh=mesh))
        assert isinstance(model.embed.weight, DTensor)
        assert model.embed.weight.placements == (Replicate(), Shard(0))
        assert model.embed.weight.to_local().shape == (3, 6)


def test_units_compute_in_the_planned_dtype_and_the_root_returns_its_own() -> None:
    seen: dict[str, torch.dtype] = {}
    with gloo_alone():
        model = Tiny()
        model.layers[0].inner.register_forward_hook(lambda m, args, out: seen.update(inner=out.dtype))
        do(sharding(*BLOCKS, dtype="bfloat16", output="float32"), Target(model=model, mesh=shard_mesh(1)))
        assert model.embed.weight.dtype == torch.float32
        assert model(TOKENS).dtype == torch.float32
    assert seen == {"inner": torch.bfloat16}


class TakesFloats(nn.Module):
    """Notes the dtype of a float32 input of each of its units, and casts what it multiplies by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        made: Tensor = self.inner(x.to(self.inner.weight.dtype))
        return made.float()


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("engine", [FSDP1(), FSDP2()], ids=["fsdp1", "fsdp2"])
def test_units_cast_their_inputs_or_take_them_as_they_come(engine: FSDP1 | FSDP2, casts: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TakesFloats(), TakesFloats())
    first, second = model
    how = {"cast_forward_inputs": casts} | ({"cast_root_forward_inputs": casts} if isinstance(engine, FSDP1) else {})
    asked = evolve(engine, wrap=WrapPaths(("0", "1")), **how)  # type: ignore[arg-type]
    with gloo_alone():
        optimizer = SGD(model.parameters(), lr=0.1)
        made = planned(Config(engine=asked, precision=BF16()), model, optimizer)
        target = applied(made, model, optimizer)
        assert not verify(made, target).failed
        target.model(torch.ones(2, 3))
        assert first.seen + second.seen == [torch.bfloat16 if casts else torch.float32] * 2
        (index,) = (i for i, p in enumerate(made.steps) if isinstance(p.step, ShardUnits | WrapFSDP1))
        other = evolve(made.steps[index].step, cast_forward_inputs=not casts)
        steps = (*made.steps[:index], evolve(made.steps[index], step=other), *made.steps[index + 1 :])
        (told,) = verify(evolve(made, steps=steps), target).failed
        assert "cast" in str(told)


def test_a_checkpointed_block_becomes_a_unit_as_its_wrapper_and_keeps_its_names() -> None:
    with fake_group(2):
        model = Tiny()
        before = list(names.named_parameters(model))
        saved = list(model.state_dict())
        target = Target(model=model, mesh=shard_mesh(2))
        do(CheckpointModules(paths=BLOCKS, preserve_rng_state=True), target)
        do(sharding(*BLOCKS), target)
        assert [isinstance(layer, CheckpointWrapper) and isinstance(layer, FSDPModule) for layer in model.layers] == [
            True
        ] * 3
        assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 4
        assert list(names.named_parameters(model)) == before
        assert list(model.state_dict()) == saved


def test_pinning_is_left_out_where_there_is_no_accelerator_to_pin_for() -> None:
    with gloo_alone():
        model = Tiny()
        do(sharding(*BLOCKS, offload=True), Target(model=model, mesh=shard_mesh(1)))
        assert model.embed.weight.to_local().is_pinned() is torch.accelerator.is_available()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.layers[0].weight.grad = torch.ones(2, 2)


def test_what_fully_shard_would_refuse_half_way_is_refused_before_it_begins() -> None:
    assert problems(sharding("layers", "nose"), Target(model=Scaled())) == (
        "plan.other-model at nose: the model has no such module",
        "wrap.container at layers: a container without forward cannot be a unit",
        "units.scalar at scale: a scalar cannot be sharded; Plan it among the ignored ones.",
        "apply.gradient-lost at layers.0.weight: there is a gradient, which would be lost",
    )


def test_a_sharded_model_is_refused() -> None:
    with fake_group(2):
        target = Target(model=Tiny(), mesh=shard_mesh(2))
        do(sharding("layers.0"), target)
        (text,) = problems(sharding("layers.1"), target)
        assert text == (
            "model.already-wrapped at '' (the root), layers.0: sharded already; Apply to a model that was not prepared."
        )


@pytest.mark.parametrize("accelerator", [False, True])
def test_every_option_reaches_torch(monkeypatch: pytest.MonkeyPatch, accelerator: bool) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(fsdp2, "fully_shard", lambda module, **options: given.append({"module": module, **options}))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    step = ShardUnits(
        units=(
            Unit(path="layers.0", reshard_after_forward=4, output_dtype="float16"),
            Unit(path="", reshard_after_forward=False),
        ),
        param_dtype="bfloat16",
        reduce_dtype="float32",
        offload=True,
        pin_memory=True,
        axes=("shard",),
        ignored=("layers.1.scale",),
    )
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        model = Tiny()
        fsdp2.SHARD.do(step, Target(model=model, mesh=mesh))
        fsdp2.SHARD.do(evolve(step, pin_memory=False, ignored=()), Target(model=model, mesh=mesh))
        fsdp2.SHARD.do(evolve(step, offload=False), Target(model=model, mesh=mesh))
        assert all(options["mesh"] == mesh["shard"] for options in given)
    block, root = given[:2]
    assert (block["module"], root["module"]) == (model.layers[0], model)
    assert (block["reshard_after_forward"], root["reshard_after_forward"]) == (4, False)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16)
    assert block["mp_policy"] == precision
    assert root["mp_policy"] == replace(precision, output_dtype=None)
    assert block["ignored_params"] == {model.layers[1].scale}
    assert "ignored_params" not in given[2], "torch 2.6 does not know it"
    assert [given[at]["offload_policy"] for at in (0, 2, 4)] == [
        CPUOffloadPolicy(pin_memory=accelerator),
        CPUOffloadPolicy(pin_memory=False),
        OffloadPolicy(),
    ]


def test_a_failure_says_which_units_stand_and_that_there_is_no_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = fsdp2.fully_shard, []

    def fail_on_third(module: nn.Module, **how: Any) -> Any:
        calls.append(module)
        if len(calls) == 3:
            raise ValueError("uneven")
        return real(module, **how)

    monkeypatch.setattr(fsdp2, "fully_shard", fail_on_third)
    with fake_group(2):
        halted = interpret((sharding(*BLOCKS),), handlers(), Target(model=Tiny(), mesh=shard_mesh(2)))
    assert isinstance(halted, Halted)
    assert halted.torn
    assert "unit layers.2: could not be sharded (sharded before it: layers.0, layers.1): uneven" in str(halted)
    assert "build model and optimizer again" in str(halted)


def test_sharding_without_a_mesh_names_the_step_that_is_missing() -> None:
    with pytest.raises(RuntimeError, match="BuildMesh has to come before this step"):
        do(sharding(), Target(model=Tiny()))


# --- against one process -------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def proven_steps(model: nn.Module, parts: list[Tensor]) -> list[str]:
    """What a proof of each window finds: it is one micro-batch of every rank."""
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)

    def window(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return found_in_windows(model, *(partial(window, tokens) for tokens in parts))


def seeded() -> Tiny:
    torch.manual_seed(3)
    return Tiny()


def combined(rank: int, world: int, sizes: tuple[int, ...], compiled: bool = False, offload: bool = False) -> list[str]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    target = Target(model=seeded(), mesh=mesh)
    do(CheckpointModules(paths=BLOCKS, preserve_rng_state=True), target)
    if compiled:
        how = CompileModules(paths=BLOCKS, backend="eager", mode="default", fullgraph=False, dynamic=None)
        do(how, target)
    do(sharding(*BLOCKS, offload=offload), target)
    return proven_steps(target.model, [part.chunk(world)[rank] for part in (TOKENS, TOKENS.flip(1))])


@pytest.mark.parametrize(("compiled", "offload"), [(False, False), (True, False), (False, True)])
def test_checkpointed_compiled_offloaded_shards_learn_what_one_process_learns(
    gang2: Gang, compiled: bool, offload: bool
) -> None:
    assert gang2.run(combined, (2,), compiled, offload, timeout=120) == [[], []]


def test_copies_of_shards_learn_what_one_process_learns(gang2: Gang) -> None:
    assert gang2.run(combined, (2, 1)) == [[], []]


def test_autocast_and_compile_of_the_whole_model_work_together() -> None:
    target = Target(model=seeded())
    do(AutocastForward(device="cpu", dtype="bfloat16", output_dtype="float32"), target)
    do(CheckpointModules(paths=BLOCKS, preserve_rng_state=True), target)
    do(CompileModules(paths=("",), backend="eager", mode="default", fullgraph=False, dynamic=None), target)
    assert proven_steps(target.model, [TOKENS]) == []


class Chosen(nn.Module):
    """Every rank's tokens choose another of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor, chosen: int) -> Tensor:
        return self.head(self.experts[chosen](inputs))  # type: ignore[no-any-return]


def with_experts(rank: int, world: int) -> list[str]:
    """What proofs of three windows find."""
    torch.manual_seed(3)
    engine = pk.FSDP2(wrap=pk.wrap.WrapRoot(), reduce_unused=True)
    plan = pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1)), Chosen())
    ready = pk.apply(plan, prove=3)
    for at in range(3):
        inputs = torch.full((2, 4), 1.0 + at + rank)
        ready.backward(ready.model(inputs, (rank + at) % 2).square().mean())
        ready.step()
    return found_by_proof(ready)


def test_ranks_that_choose_other_experts_learn_what_one_process_learns(gang2: Gang) -> None:
    """The third expert is chosen by nobody: its gradient is zeros in the place of none."""
    assert gang2.run(with_experts) == [[], []]

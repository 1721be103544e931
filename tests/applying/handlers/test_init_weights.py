"""A model without weights is initialised by its own methods, equal on all ranks, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.facts import Env
from prepkit.objects.names import canonical
from tests.support.gang import Gang
from tests.support.transformers_models import FAMILIES, build

WEIGHTS = pk.InitWeights(5)


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        made = make()
    return made[0] if isinstance(made, tuple) else made


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()


def values(ready: Any) -> dict[str, torch.Tensor]:
    model = getattr(ready.model, "module", ready.model)
    every = [*model.named_parameters(), *model.named_buffers()]
    return {canonical(name): whole(tensor).clone() for name, tensor in every}


def initialised(rank: int, world: int, family: str, engine: pk.FSDP2 | pk.DDP, seed: int) -> dict[str, torch.Tensor]:
    del world
    torch.manual_seed(rank)  # what the ranks have drawn before must not matter
    before = torch.get_rng_state()
    model = on_meta(FAMILIES[family])
    cfg = pk.Config(engine=engine, weights=pk.InitWeights(seed), checkpointing=pk.CheckpointBlocks())
    ready = pk.apply(pk.build_plan(cfg, model))
    assert torch.equal(torch.get_rng_state(), before), "nor must it change what they draw next"
    return values(ready)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral", "vit"])
def test_values_are_equal_on_all_ranks_for_every_engine_and_unit(gang2: Gang, family: str) -> None:
    alone = values(pk.apply(pk.build_plan(pk.Config(weights=WEIGHTS), on_meta(FAMILIES[family]))))
    every = [
        *gang2.run(initialised, family, pk.FSDP2(), 5, timeout=120),
        *gang2.run(initialised, family, pk.FSDP2(wrap=pk.wrap.WrapRoot()), 5),
        *gang2.run(initialised, family, pk.DDP(), 5),
    ]
    for found in every:
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], value) for name, value in alone.items())
    other = values(pk.apply(pk.build_plan(pk.Config(weights=pk.InitWeights(6)), on_meta(FAMILIES[family]))))
    assert any(not torch.equal(other[name], value) for name, value in alone.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_distributed_as_the_constructor_distributes_them(family: str) -> None:
    found = values(pk.apply(pk.build_plan(pk.Config(weights=WEIGHTS), on_meta(FAMILIES[family]))))
    full, _ = build(family)
    buffers = dict(full.named_buffers())
    for name, expected in [*full.named_parameters(), *buffers.items()]:
        value = found[name]
        assert value.dtype == expected.dtype
        if name in buffers or expected.numel() < 64 or float(expected.detach().std()) == 0:
            assert torch.equal(value, expected) or expected.numel() < 64, name
        else:
            ratio = float(value.std() / expected.detach().std())
            assert 0.7 < ratio < 1.4, (name, ratio)


def test_what_a_parent_writes_into_its_children_counts() -> None:
    """GPT-2 scales its residual projections by depth in the modules that hold them."""
    ready = pk.apply(pk.build_plan(pk.Config(weights=WEIGHTS), on_meta(FAMILIES["gpt2"])))
    block = ready.model.transformer.h[0]
    ratio = float(block.mlp.c_proj.weight.detach().std() / block.mlp.c_fc.weight.detach().std())
    assert 0.4 < ratio < 0.6  # 1 / sqrt(2 * 2 layers)


def trained(rank: int, world: int) -> int:
    """How many parameters one step changes, with an optimizer that was made over the meta model (G-5)."""
    del world
    model = on_meta(FAMILIES["llama-tied"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plan = pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=WEIGHTS), model, optimizer=optimizer)
    ready = pk.apply(plan)
    before = values(ready)
    batch = {key: value[2 * rank : 2 * rank + 2] for key, value in build("llama-tied")[1].items()}
    ready.backward(ready.model(**batch).loss)
    ready.step()
    after = values(ready)
    return sum(not torch.equal(before[name], after[name]) for name, _ in ready.model.named_parameters())


def test_an_optimizer_over_a_newly_initialised_model_steps_every_parameter(gang2: Gang) -> None:
    count = sum(1 for _ in build("llama-tied")[0].parameters())
    assert gang2.run(trained) == [count, count]


# --- refused -------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A parameter that nothing initialises after the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Forgetful(Scale):
    def reset_parameters(self) -> None:
        """Writes half of it."""
        with torch.no_grad():
            self.scale[:1] = 1


class Flags(nn.Linear):
    """Buffers that NaN cannot mark; one of them is never written."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("written", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("left", torch.zeros(2, dtype=torch.int64))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "written"):
            self.written.copy_(torch.tensor([True, False]))


class Reaching(nn.Module):
    """The root writes what its blocks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.own = nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)) + self.own


def test_a_module_with_neither_method_is_refused_at_plan_time() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale()))
    with pytest.raises(pk.PlanRejected, match=r"weights\.no-initialiser at model\.1\.scale"):
        pk.build_plan(pk.Config(weights=WEIGHTS), model)


@pytest.mark.parametrize(("make", "name"), [(Forgetful, "1.scale"), (Flags, "1.left")])
def test_a_method_that_leaves_something_unwritten_is_an_error(make: type[nn.Module], name: str) -> None:
    plan = pk.build_plan(pk.Config(weights=WEIGHTS), on_meta(lambda: nn.Sequential(nn.Linear(3, 3), make())))
    with pytest.raises(pk.errors.ApplyHalted, match=rf"{name}: still without values"):
        pk.apply(plan)


def reaching(rank: int, world: int) -> str:
    del rank, world
    model = on_meta(Reaching)
    try:
        pk.apply(pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=WEIGHTS), model))
    except pk.errors.ApplyHalted as halted:
        return str(halted)
    return ""


def test_a_method_that_reaches_into_another_unit_is_an_error_and_writes_nothing(gang2: Gang) -> None:
    for text in gang2.run(reaching):
        assert "an initialiser calls zero_ on a parameter of shape (3, 3) of another unit" in text


class Looking(Reaching):
    """The root looks at what its blocks hold, and writes its own."""

    seen: tuple[object, ...] = ()

    def reset_parameters(self) -> None:
        weight = self.blocks[0].weight
        self.seen = weight.dtype, weight.device.type, tuple(weight.shape), weight.size(dim=1), weight.numel()
        nn.init.zeros_(self.own)


def looking(rank: int, world: int) -> tuple[object, ...]:
    del rank, world
    model = on_meta(Looking).to(torch.bfloat16)
    wrap = pk.wrap.WrapPaths(("blocks.0",))
    ready = pk.apply(pk.build_plan(pk.Config(engine=pk.FSDP2(wrap=wrap), weights=WEIGHTS), model))
    seen: tuple[object, ...] = ready.model.seen
    return seen


def test_a_method_may_ask_what_another_unit_holds_which_costs_no_memory(gang2: Gang) -> None:
    assert gang2.run(looking) == [(torch.bfloat16, "meta", (3, 3), 3, 9)] * 2


def test_a_buffer_on_meta_that_nothing_computes_is_refused_before_anything_is_changed() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3))
        model.register_buffer("table", torch.arange(3.0), persistent=False)
        return model

    model = on_meta(make)
    plan = pk.build_plan(pk.Config(weights=WEIGHTS), model)
    assert "weights.buffer-not-computed" in {one.rule for one in plan.warnings}
    with pytest.raises(pk.errors.ApplyHalted, match="table: without values, and nothing initialises it"):
        pk.apply(plan)
    assert all(param.is_meta for param in model.parameters())
    model.table = torch.arange(3.0)
    ready = pk.apply(pk.build_plan(pk.Config(weights=WEIGHTS), model))
    assert torch.equal(ready.model.table, torch.arange(3.0))


def test_a_rehearsal_says_that_values_are_not_rehearsed() -> None:
    model = on_meta(FAMILIES["llama"])
    plan = pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=WEIGHTS), model, env=Env(world_size=8, torch="2.13.0"))
    found = pk.rehearse(plan, model, rank=3)
    assert found.fine, str(found)
    assert {one.step for one in found.omitted} >= {"AllocateTensors", "InitializeTensors"}

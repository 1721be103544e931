"""torchao's float8 for real, emulated on the CPU: what is converted, that it trains, and the way back."""

from __future__ import annotations

import copy
import sys
from typing import Any, Literal

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import prepkit as pk
from prepkit.applying.rehearse import rehearse_here
from prepkit.applying.verification import verify
from prepkit.config import BF16, DDP, FP8, FSDP1, FSDP2, CheckpointBlocks, ClipNorm, CompileBlocks, Config, TorchAO
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.steps import ConvertFP8Linears, PrecomputeFloat8Scales, RebindOptimizer
from tests.support.fp8_model import FITTING, TOKENS, Wide, loss_of, planned, seeded, stepped
from tests.support.fragile_model import applied
from tests.support.gang import Gang
from tests.support.single_step import do, problems, undo

EMULATED = FP8(backend=TorchAO(emulate=True))


def step(*paths: str, recipe: str = "tensorwise", pad: bool = True, gather: bool = False) -> ConvertFP8Linears:
    return ConvertFP8Linears(paths=paths, recipe=recipe, pad_inner_dim=pad, all_gather=gather, emulate=True)


def kinds(model: nn.Module) -> dict[str, str]:
    return {path: type(module).__name__ for path, module in names.named_modules(model).items()}


# --- one step ------------------------------------------------------------------------------------------------------


def test_exactly_the_named_layers_are_converted_and_keep_their_parameters() -> None:
    model = Wide()
    before = dict(model.named_parameters())
    do(step("layers.0.inner", "layers.2.outer"), Target(model=model))
    assert [path for path, kind in kinds(model).items() if kind == "Float8Linear"] == [
        "layers.0.inner",
        "layers.2.outer",
    ]
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is param for name, param in before.items())


def test_the_way_back_puts_the_same_layers_into_their_places() -> None:
    model = Wide().eval()
    before = dict(model.named_modules())
    target = Target(model=model)
    convert = step(*FITTING, gather=True)
    memo = do(convert, target)
    assert not any(module.training for module in model.modules())
    assert type(model.get_parameter("layers.1.inner.weight")).__name__ == "WeightWithDynamicFloat8CastTensor"
    undo(convert, target, memo)
    assert dict(model.named_modules()) == before
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


def test_a_layer_in_two_places_is_converted_once_for_both() -> None:
    model = Wide()
    model.layers[2].outer = model.layers[1].outer  # type: ignore[union-attr]  # a ModuleList of Blocks
    do(step("layers.1.outer"), Target(model=model))
    assert model.layers[1].outer is model.layers[2].outer  # type: ignore[union-attr]  # likewise
    assert kinds(model)["layers.1.outer"] == "Float8Linear"


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_every_recipe_reaches_the_layer_with_its_options(recipe: str, pad: bool) -> None:
    from torchao.float8 import Float8LinearConfig

    model = Wide()
    do(step("layers.1.inner", recipe=recipe, pad=pad), Target(model=model))
    found = model.get_submodule("layers.1.inner").config
    asked = Float8LinearConfig.from_recipe_name(recipe)
    assert found.cast_config_input == asked.cast_config_input
    assert found.cast_config_weight == asked.cast_config_weight
    assert (found.emulate, found.pad_inner_dim, found.enable_fsdp_float8_all_gather) == (True, pad, False)


class Sub(nn.Linear):
    pass


def test_what_cannot_be_converted_is_refused_before_anything_is_changed() -> None:
    model = Wide()
    model.layers[0].outer = Sub(32, 16)  # type: ignore[union-attr]  # a ModuleList of Blocks
    model.get_submodule("layers.1.inner").register_forward_hook(lambda *args: None)
    model.get_parameter("layers.2.inner.weight").ds_id = 7
    assert problems(step("nose", "layers.0.outer", "layers.1.inner", "layers.2.inner"), Target(model=model)) == (
        "plan.other-model at nose: the model has no such module",
        "plan.other-model at layers.0.outer: Sub, where the plan says Linear",
        "params.hooks-lost at layers.1.inner: hooks would be lost with the layer; Register them after preparing.",
        (
            "model.sharded-parameters at layers.2.inner.weight: divided by deepspeed.zero.Init; "
            "Build the model outside deepspeed.zero.Init."
        ),
    )


def test_a_library_that_is_not_here_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    (text,) = problems(step("layers.1.inner"), Target(model=Wide()))
    assert text.startswith("fp8.library-missing at torchao.float8: cannot be imported: ")
    assert text.endswith("Type pip install torchao.")


def test_a_layer_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao.float8

    real, model = torchao.float8.convert_to_float8_training, Wide()
    before = dict(model.named_modules())

    def fail(layer: nn.Linear, **how: Any) -> Any:
        if layer is model.get_submodule("layers.2.outer"):
            raise ValueError("no kernel")
        return real(layer, **how)

    monkeypatch.setattr(torchao.float8, "convert_to_float8_training", fail)
    with pytest.raises(ValueError, match="no kernel"):
        do(step(*FITTING), Target(model=model))
    assert dict(model.named_modules()) == before


def test_the_hook_for_scales_needs_an_optimizer_and_goes_away_again() -> None:
    model = Wide()
    with pytest.raises(RuntimeError, match=r"plan\.model-changed at optimizer"):
        do(PrecomputeFloat8Scales(), Target(model=model))
    target = Target(model=model, optimizer=AdamW(model.parameters()))
    memo = do(PrecomputeFloat8Scales(), target)
    assert len(target.optimizer._optimizer_step_post_hooks) == 1
    undo(PrecomputeFloat8Scales(), target, memo)
    assert not target.optimizer._optimizer_step_post_hooks


# --- whole plans ---------------------------------------------------------------------------------------------------


def losses(ready: Any, parts: list[torch.Tensor]) -> list[float]:
    out = []
    for tokens in parts:
        loss = loss_of(ready.model, tokens)
        ready.backward(loss)
        ready.step()
        out.append(loss.item())
    return out


def test_a_model_trains_in_float8_near_the_wider_dtype_and_not_as_in_it() -> None:
    found = {}
    for precision in (EMULATED, evolve(EMULATED, backend=TorchAO(emulate=True, recipe="rowwise")), BF16()):
        model = seeded()
        plan = pk.build_plan(Config(precision=precision), model, optimizer=AdamW(model.parameters(), lr=1e-2))
        found[str(precision)] = losses(pk.apply(plan), [TOKENS] * 6)
    tensorwise, rowwise, wide = found.values()
    assert tensorwise[-1] < tensorwise[0] - 0.5
    assert tensorwise != rowwise != wide != tensorwise
    torch.testing.assert_close(torch.tensor([tensorwise, rowwise]), torch.tensor([wide, wide]), rtol=0.03, atol=0.0)


def test_float8_lives_with_checkpointing_compilation_and_16_bit_weights() -> None:
    model = seeded(torch.bfloat16)
    cfg = Config(
        precision=EMULATED, checkpointing=CheckpointBlocks(), compile=CompileBlocks(backend="eager"), clip=ClipNorm(1.0)
    )
    plan = pk.build_plan(cfg, model, optimizer=AdamW(model.parameters(), lr=1e-2))
    found = losses(pk.apply(plan), [TOKENS] * 4)
    assert found[-1] < found[0] - 0.3
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def train(rank: int, world: int, engine: DDP | FSDP1 | FSDP2, backend: TorchAO, steps: int) -> dict[str, Any]:
    model = seeded()
    optimizer = stepped(model)
    cfg = Config(engine=engine, precision=FP8(backend=backend), clip=ClipNorm(1.0))
    plan = pk.build_plan(cfg, model, optimizer=optimizer)
    ready = pk.apply(plan)
    from torchao.float8 import fsdp_utils

    part, calls, real = TOKENS.chunk(world)[rank], [], fsdp_utils.hp_tensor_to_float8_dynamic
    found = losses(ready, [part] * (steps - 1))
    fsdp_utils.hp_tensor_to_float8_dynamic = lambda *args, **how: calls.append(1) or real(*args, **how)
    found += losses(ready, [part])
    fsdp_utils.hp_tensor_to_float8_dynamic = real
    weight = names.named_parameters(ready.model)["layers.1.inner.weight"]
    local = weight._local_tensor if isinstance(weight, DTensor) else weight  # to_local() is a copy without its scale
    scale = getattr(local, "_precomputed_scale", None)
    average = optimizer.state[weight].get("exp_avg")  # FSDP1 may have left this rank nothing of the weight
    return {
        "losses": found,
        "own scales": len(calls),
        "steps": [type(one.step).__name__ for one in plan.steps],
        "local": type(local).__name__,
        "scale": None if scale is None else scale.item(),
        "largest": weight.full_tensor().abs().max().item() if isinstance(weight, DTensor) else None,
        "averages": average is not None and average.shape == weight.shape,
        "moved": isinstance(average, DTensor),
    }


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """Losses of one process over the whole batch."""
    model = seeded()
    plan = pk.build_plan(Config(precision=EMULATED, clip=ClipNorm(1.0)), model, optimizer=stepped(model))
    return torch.tensor(losses(pk.apply(plan), [TOKENS] * 4))


def together(found: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([one["losses"] for one in found]).mean(0)


def test_two_ranks_of_ddp_train_in_float8_what_one_process_trains(gang2: Gang, alone: torch.Tensor) -> None:
    found = gang2.run(train, DDP(), TorchAO(emulate=True), 4, timeout=120)
    torch.testing.assert_close(together(found), alone, rtol=0.02, atol=0.0)
    assert found[0]["steps"][:4] == ["StartProcessGroup", "Agree", "ConvertFP8Linears", "MoveModel"]
    assert found[0]["local"] == "Parameter"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_two_ranks_of_fsdp1_train_in_float8_what_one_process_trains(
    gang2: Gang, alone: torch.Tensor, recipe: Literal["tensorwise", "rowwise"]
) -> None:
    found = gang2.run(train, FSDP1(), TorchAO(emulate=True, recipe=recipe), 4, timeout=120)
    torch.testing.assert_close(together(found), alone, rtol=0.03, atol=0.0)
    changes = ("ConvertFP8Linears", "AutocastForward", "WrapFSDP1", "RebindOptimizer")
    assert tuple(kind for kind in found[0]["steps"] if kind in changes) == changes


def test_two_ranks_of_fsdp2_gather_float8_weights_with_scales_from_the_step_before(
    gang2: Gang, alone: torch.Tensor
) -> None:
    found = gang2.run(train, FSDP2(), TorchAO(emulate=True), 4, timeout=120)
    torch.testing.assert_close(together(found), alone, rtol=0.02, atol=0.0)
    for one in found:
        assert one["local"] == "WeightWithDynamicFloat8CastTensor"
        assert one["own scales"] == 0
        assert one["averages"]
        assert one["moved"]
        assert one["scale"] == pytest.approx(448.0 / one["largest"], rel=1e-5)


def test_fsdp2_gathers_the_wider_weights_where_float8_is_not_asked_for(gang2: Gang, alone: torch.Tensor) -> None:
    found = gang2.run(train, FSDP2(), TorchAO(emulate=True, recipe="rowwise"), 4, timeout=120)
    torch.testing.assert_close(together(found), alone, rtol=0.03, atol=0.0)
    assert found[0]["scale"] is None
    assert "PrecomputeFloat8Scales" not in found[0]["steps"]


def test_without_precomputed_scales_every_gather_computes_its_own(gang2: Gang, alone: torch.Tensor) -> None:
    found = gang2.run(train, FSDP2(), TorchAO(emulate=True, precompute_scales=False), 4, timeout=120)
    torch.testing.assert_close(together(found), alone, rtol=0.02, atol=0.0)
    assert found[0]["scale"] is None
    assert found[0]["own scales"] >= len(FITTING)


# --- rehearsal and verification ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [FSDP2(), FSDP1(), DDP()], ids=["fsdp2", "fsdp1", "ddp"])
def test_a_plan_for_a_cluster_is_rehearsed_without_a_gpu(engine: DDP | FSDP1 | FSDP2) -> None:
    model = seeded(torch.bfloat16)
    cfg = Config(engine=engine, precision=FP8(), checkpointing=CheckpointBlocks())
    made = planned(cfg, model, stepped(model), world_size=8, device="cuda", capability=(9, 0))
    before = copy.deepcopy(model.state_dict())
    seen = rehearse_here(made, model, rank=3)
    assert seen.fine, str(seen)
    assert not {"ConvertFP8Linears", "PrecomputeFloat8Scales"} & {one.step for one in seen.omitted}
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


def test_what_was_converted_is_attested_and_what_was_not_is_named() -> None:
    model = seeded()
    made = planned(Config(precision=EMULATED), model, AdamW(model.parameters()))
    target = applied(made, model, AdamW(model.parameters()))
    assert not [one for one in verify(made, target).failed if one.where == "ConvertFP8Linears"]
    model.layers[1].inner = nn.Linear(16, 32)  # type: ignore[union-attr]  # a ModuleList of Blocks
    model.get_submodule("layers.2.inner").config = None
    model.get_submodule("layers.1.outer").config = copy.copy(model.get_submodule("layers.1.outer").config)
    object.__setattr__(model.get_submodule("layers.1.outer").config, "emulate", False)
    told = [one.what for one in verify(made, target).failed if one.where == "ConvertFP8Linears"]
    wrong = "layers.1.outer has emulate, all_gather (False, False), planned (True, False)"
    assert told == [
        "layers compute in float8: layers.1.inner is Linear",
        f"layers are configured as planned: {wrong}",
    ]


def test_a_failure_after_conversion_leaves_the_user_with_the_model_that_was_given() -> None:
    model = seeded()
    before = dict(model.named_modules())
    optimizer = AdamW(model.parameters())
    made = planned(Config(precision=EMULATED), model, optimizer)
    broken = evolve(made.steps[0], step=RebindOptimizer(slots=(("embed.weight", "gone"),)))
    from prepkit.applying.step_kinds import handlers
    from prepkit.interpreter import Halted, interpret

    table = handlers()
    table[RebindOptimizer] = evolve(table[RebindOptimizer], ready=lambda step, target: ())
    steps = (*(one.step for one in made.steps), broken.step)
    halted = interpret(steps, table, Target(model=model, optimizer=optimizer))
    assert isinstance(halted, Halted)
    assert halted.clean
    assert dict(model.named_modules()) == before
    assert "forward" not in vars(model)

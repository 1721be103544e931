"""Move, upcast, autocast, checkpoint and compile: what each does, refuses and takes back."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import define, evolve, frozen
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper

from prepkit.applying.checks import forward
from prepkit.objects import names
from prepkit.objects.forward import cast_floats
from prepkit.objects.state import inspect as inspect_model
from prepkit.objects.target import Target
from prepkit.steps import (
    AutocastForward,
    BackendOption,
    CheckpointModules,
    CompileModules,
    LocalDevice,
    MoveModel,
    UpcastParameters,
)
from tests.support.fragile_model import TOKENS, Tiny, stepped
from tests.support.single_step import do, problems, undo

BLOCKS = ("layers.0", "layers.1", "layers.2")
AUTOCAST = AutocastForward(device="cpu", dtype="bfloat16", output_dtype="float32")

# --- move ----------------------------------------------------------------------------------------------------------


def test_a_move_keeps_every_parameter_object_and_its_tie() -> None:
    model = Tiny()
    before = dict(model.named_parameters())
    assert do(MoveModel(device=LocalDevice(type="cpu")), Target(model=model)) == {}
    assert all(before[name] is param for name, param in model.named_parameters())


def test_a_move_reaches_every_parameter_and_every_buffer_and_says_where_they_were() -> None:
    """To meta, the one other device that every machine has."""
    model = Tiny()
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    memo = do(MoveModel(device=LocalDevice(type="meta")), Target(model=model))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert memo == dict.fromkeys(names, torch.device("cpu"))


@frozen
class Values:
    """Stands in for a tensor's data on a device that is not here."""

    device: torch.device

    def to(self, device: torch.device) -> Values:
        return Values(device)


@define
class Placed:
    """Stands in for a parameter or buffer on such a device."""

    data: Values
    grad: Placed | None = None


def test_the_way_back_of_a_move_returns_parameters_gradients_and_buffers_and_no_others() -> None:
    card, host = torch.device("cuda", 3), torch.device("cpu")
    weight, bias = Placed(Values(card), grad=Placed(Values(card))), Placed(Values(card))
    table, stays = Placed(Values(card)), Placed(Values(card), grad=Placed(Values(card)))
    model: Any = SimpleNamespace(
        named_parameters=lambda: [("weight", weight), ("bias", bias), ("stays", stays)],
        named_buffers=lambda: [("table", table)],
    )
    undo(
        MoveModel(device=LocalDevice(type="cuda")),
        Target(model=model),
        dict.fromkeys(("weight", "bias", "table"), host),
    )
    assert [weight.data.device, bias.data.device, table.data.device] == [host] * 3
    assert weight.grad is not None
    assert stays.grad is not None
    assert weight.grad.data.device == host
    assert stays.data.device == stays.grad.data.device == card


def test_a_move_refuses_meta_tensors_by_name() -> None:
    model = Tiny().to("meta")
    (text,) = problems(MoveModel(device=LocalDevice(type="cpu")), Target(model=model))
    assert text.startswith("plan.no-weights at embed.weight, ")
    assert text.endswith(": on meta, without data")


def test_a_move_refuses_a_device_that_is_not_here() -> None:
    (text,) = problems(MoveModel(device=LocalDevice(type="mtia")), Target(model=Tiny()))
    assert text.startswith("environment.device at device 'mtia': not available here; Plan with device=")
    (text,) = problems(MoveModel(device=LocalDevice(type="abacus")), Target(model=Tiny()))
    assert text.startswith("environment.device at device 'abacus': torch has no such device type")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves a model to CUDA and back")
def test_a_move_goes_to_the_device_and_back() -> None:
    model = Tiny()
    step, target = MoveModel(device=LocalDevice(type="cuda")), Target(model=model)
    before = copy.deepcopy(model.state_dict())
    memo = do(step, target)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    undo(step, target, memo)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# --- upcast --------------------------------------------------------------------------------------------------------


def narrow() -> tuple[Target, UpcastParameters]:
    model = Tiny(torch.bfloat16)
    names_ = tuple(name for name, param in model.named_parameters() if param.requires_grad)
    return Target(model=model, optimizer=stepped(model)), UpcastParameters(names=names_, dtype="float32")


def test_an_upcast_keeps_objects_and_leaves_unnamed_parameters_alone() -> None:
    target, step = narrow()
    before = dict(target.model.named_parameters())
    do(step, target)
    after = dict(target.model.named_parameters())
    assert all(before[name] is after[name] for name in before)
    assert {name for name, p in after.items() if p.dtype == torch.float32} == set(step.names)
    assert target.model.head.weight is target.model.embed.weight


def test_state_in_the_parameters_dtype_follows_the_upcast_and_the_optimizer_still_steps() -> None:
    target, step = narrow()
    do(step, target)
    assert target.optimizer is not None
    assert {s["exp_avg"].dtype for s in target.optimizer.state.values()} == {torch.float32}
    target.model(TOKENS).float().square().mean().backward()
    target.optimizer.step()


def test_state_of_another_shape_or_dtype_than_its_parameter_stays_as_it_is() -> None:
    target, step = narrow()
    assert target.optimizer is not None
    state = target.optimizer.state[target.model.embed.weight]
    state["row"] = torch.zeros(3, dtype=torch.bfloat16)
    state["low"] = torch.zeros_like(target.model.embed.weight, dtype=torch.float16)
    do(step, target)
    assert (state["row"].dtype, state["low"].dtype) == (torch.bfloat16, torch.float16)


def test_an_upcast_is_taken_back_to_the_bit() -> None:
    target, step = narrow()
    assert target.optimizer is not None
    wide = target.optimizer.state[target.model.embed.weight]
    wide["exp_avg_sq"] = wide["exp_avg_sq"].float()  # was wide before, must stay so
    before = copy.deepcopy(target.model.state_dict())
    state = copy.deepcopy(target.optimizer.state_dict())
    memo = do(step, target)
    undo(step, target, memo)
    for name, value in target.model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])
    for key, held in target.optimizer.state_dict()["state"].items():
        for entry, value in held.items():
            assert (value.dtype, value.tolist()) == (
                state["state"][key][entry].dtype,
                state["state"][key][entry].tolist(),
            )


def test_an_upcast_refuses_unknown_names_gradients_and_narrowing() -> None:
    target, step = narrow()
    assert problems(UpcastParameters(names=("nose",), dtype="float32"), target) == (
        "plan.other-model at nose: the model has no such parameter",
    )
    target.model.embed.weight.grad = torch.zeros_like(target.model.embed.weight)
    assert problems(step, target) == ("apply.gradient-lost at embed.weight: there is a gradient, which would be lost",)
    (text,) = problems(UpcastParameters(names=("embed.weight",), dtype="bfloat16"), Target(model=Tiny()))
    assert text == "plan.other-model at embed.weight: torch.float32 does not fit into bfloat16"


# --- autocast ------------------------------------------------------------------------------------------------------


class Spy(nn.Module):
    """Says in which dtype it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out = self.linear(x) * scale
        self.seen.append(out.dtype)
        return out


def test_autocast_computes_in_bf16_and_returns_float32() -> None:
    model = Spy()
    do(AUTOCAST, Target(model=model))
    assert model(torch.ones(2, 4)).dtype == torch.float32
    assert model.seen == [torch.bfloat16]
    assert model.linear.weight.dtype == torch.float32


def test_autocast_keeps_the_signature_that_trainers_read() -> None:
    model = Spy()
    before = inspect.signature(model.forward)
    do(AUTOCAST, Target(model=model))
    assert inspect.signature(model.forward) == before


def test_autocast_taken_back_leaves_no_trace() -> None:
    model = Spy()
    target, before = Target(model=model), set(vars(model))
    undo(AUTOCAST, target, do(AUTOCAST, target))
    assert set(vars(model)) == before
    assert model(torch.ones(2, 4)).dtype == torch.float32
    assert model.seen == [torch.float32]


def plain(x: Tensor) -> Tensor:
    return x @ torch.ones(4, 4)


def test_a_plain_function_as_forward_is_wrapped_and_put_back_as_itself() -> None:
    model = Spy()
    model.forward = plain
    target = Target(model=model)
    memo = do(AUTOCAST, target)
    out = model(torch.full((2, 4), 1 + 2**-10))  # in bfloat16 it is 1
    assert (out.dtype, out.tolist()) == (torch.float32, [[4.0] * 4] * 2)
    undo(AUTOCAST, target, memo)
    assert vars(model)["forward"] is plain


def test_a_second_autocast_is_refused() -> None:
    target = Target(model=Spy())
    do(AUTOCAST, target)
    assert problems(AUTOCAST, target) == (
        (
            "model.already-wrapped at model.forward: runs under prepkit's autocast already; "
            "Apply to a model that was not prepared."
        ),
    )


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_an_autocasted_model_computes_with_its_own_weights(duplicate: Any) -> None:
    model = Spy()
    do(AUTOCAST, Target(model=model))
    twin = duplicate(model)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.fill_(7.0)
    assert twin(torch.ones(1, 4)).tolist() == [[7.0] * 4]
    assert model(torch.ones(1, 4)).tolist() != [[7.0] * 4]
    assert model.seen == twin.seen == [torch.bfloat16]


def test_a_saved_autocasted_model_loads_whole() -> None:
    model, file = Spy(), io.BytesIO()
    do(AUTOCAST, Target(model=model))
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_autocast_compiles_without_a_graph_break() -> None:
    model = Tiny()
    do(AUTOCAST, Target(model=model))
    eager = model(TOKENS)
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(model(TOKENS), eager)


Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: Tensor
    extra: list[Tensor]
    name: str = "out"
    computed: int = field(init=False, default=3)


@dataclass(frozen=True)
class Frozen:
    logits: Tensor


def test_16_bit_floats_are_cast_wherever_they_are_nested() -> None:
    low, double, count = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64), torch.ones(2).int()
    given = {"a": [low, (double,)], "b": Pair(low.half(), count), "c": Output(low, [low]), "d": Frozen(low), "e": None}
    cast = cast_floats(given, torch.float32)
    assert cast["a"][0].dtype == cast["b"].left.dtype == torch.float32
    assert cast["c"].logits.dtype == cast["c"].extra[0].dtype == cast["d"].logits.dtype == torch.float32
    assert (type(cast["b"]), type(cast["c"]), cast["c"].name, cast["c"].computed) == (Pair, Output, "out", 3)
    assert cast["a"][1][0] is double
    assert cast["b"].right is count
    assert given["c"].logits is low


def test_model_outputs_of_transformers_are_cast_and_keep_their_class() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    low = torch.ones(2, dtype=torch.bfloat16)
    given = outputs.CausalLMOutputWithPast(loss=None, logits=low, hidden_states=(low, low))
    cast = cast_floats(given, torch.float32)
    assert type(cast) is type(given)
    assert cast.logits.dtype == cast["logits"].dtype == cast.hidden_states[1].dtype == torch.float32
    assert cast.loss is None


def test_float16_is_computed_in_where_it_is_planned() -> None:
    model = Spy()
    do(evolve(AUTOCAST, dtype="float16"), Target(model=model))
    assert model(torch.ones(2, 4)).dtype == torch.float32
    assert model.seen == [torch.float16]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_model_with_a_plain_forward_stays_patched(duplicate: Any) -> None:
    model: Any = nn.Module()
    model.forward = plain
    do(AUTOCAST, Target(model=model))
    twin = duplicate(model)
    assert twin.forward.forward is plain
    assert twin(torch.ones(2, 4)).tolist() == model(torch.ones(2, 4)).tolist() == [[4.0] * 4] * 2


def test_outputs_that_hold_no_16_bit_float_are_the_same_objects() -> None:
    wide = torch.ones(2)
    given = {"loss": wide, "count": 3, "text": "x", "none": None, "kind": torch.bfloat16}
    cast = cast_floats(given, torch.float32)
    assert all(cast[name] is value for name, value in given.items())


def test_a_forward_that_raises_leaves_no_autocast_behind() -> None:
    model = Spy()
    do(AUTOCAST, Target(model=model))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert not torch.is_autocast_enabled("cpu")


# --- checkpoint ----------------------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(TOKENS).square().mean().backward()
    return {name: p.grad for name, p in names.named_parameters(model).items() if p.grad is not None}


def test_checkpointed_blocks_run_twice_and_give_the_same_gradients() -> None:
    model, calls = Tiny(), []
    expected = {name: grad.clone() for name, grad in gradients(model).items()}
    for layer in model.layers:
        layer.inner.register_forward_hook(lambda module, args, out: calls.append(module))
    do(CheckpointModules(paths=BLOCKS, preserve_rng_state=True), Target(model=model))
    found = gradients(model)
    assert len(calls) == 2 * len(BLOCKS)
    assert {name: grad.tolist() for name, grad in found.items()} == {name: g.tolist() for name, g in expected.items()}


def test_checkpointing_keeps_names_state_dict_and_mode() -> None:
    model = Tiny().eval()
    before, blocks = names.named_parameters(model), list(model.layers)
    saved = list(model.state_dict())
    step, target = CheckpointModules(paths=BLOCKS, preserve_rng_state=False), Target(model=model)
    memo = do(step, target)
    assert [type(layer) for layer in model.layers] == [CheckpointWrapper] * 3
    assert names.named_parameters(model) == before
    assert list(model.state_dict()) == saved
    assert not any(module.training for module in model.modules())
    assert model.layers[0].checkpoint_fn.keywords["preserve_rng_state"] is False
    assert model.layers[0].checkpoint_impl is CheckpointImpl.NO_REENTRANT
    undo(step, target, memo)
    assert all(layer is block for layer, block in zip(model.layers, blocks, strict=True))


def test_a_shared_module_is_replaced_in_every_parent() -> None:
    model = Tiny()
    shared = model.layers[0]
    model.again = nn.Sequential(shared, model.layers[1])
    step, target = CheckpointModules(paths=("layers.0",), preserve_rng_state=True), Target(model=model)
    memo = do(step, target)
    assert model.again[0] is model.layers[0]
    assert isinstance(model.again[0], CheckpointWrapper)
    undo(step, target, memo)
    assert model.again[0] is model.layers[0] is shared


def test_nested_checkpoints_are_taken_back_whole() -> None:
    model = Tiny()
    block, inner = model.layers[0], model.layers[0].inner
    step, target = CheckpointModules(paths=("layers.0.inner", "layers.0"), preserve_rng_state=True), Target(model=model)
    memo = do(step, target)
    assert gradients(model)
    undo(step, target, memo)
    assert (model.layers[0] is block, block.inner is inner) == (True, True)
    assert not any(isinstance(module, CheckpointWrapper) for module in model.modules())


def test_checkpointing_refuses_what_is_wrapped_absent_or_the_root() -> None:
    target = Target(model=Tiny())
    do(CheckpointModules(paths=BLOCKS[:1], preserve_rng_state=True), target)
    assert problems(CheckpointModules(paths=("layers.0", "nose", ""), preserve_rng_state=True), target) == (
        "plan.other-model at nose: the model has no such module",
        "model.already-checkpointed at layers.0: checkpointed already; Apply to a model that was not prepared.",
        (
            "wrap.container at '' (the root): cannot be checkpointed: its wrapper would have no parent; "
            "Name modules inside it."
        ),
    )


# --- compile -------------------------------------------------------------------------------------------------------


def compiling(*paths: str, backend: str = "eager") -> CompileModules:
    return CompileModules(paths=paths, backend=backend, mode="default", fullgraph=True, dynamic=None)


def test_compiling_binds_code_in_place_and_is_taken_back() -> None:
    model = Tiny()
    expected, before = model(TOKENS), set(vars(model.layers[0]))
    step, target = compiling(*BLOCKS), Target(model=model)
    memo = do(step, target)
    assert all(layer._compiled_call_impl is not None for layer in model.layers)
    assert model.embed._compiled_call_impl is None
    assert torch.equal(model(TOKENS), expected)
    undo(step, target, memo)
    assert set(vars(model.layers[0])) == before
    assert model.layers[0]._compiled_call_impl is None


class DeepSpeedEngine(nn.Module):
    """Its ``compile`` takes torch's options as one argument, and notes that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.given, self._is_compiled = nn.Linear(2, 2), [], False

    def compile(self, backend: str, compile_kwargs: dict[str, Any]) -> None:  # type: ignore[override]
        self.given.append({"backend": backend, **compile_kwargs})
        self._is_compiled = True
        self.module.compile(backend="eager")


ASKED = {"backend": "aot_eager", "fullgraph": False, "dynamic": True}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("default", ASKED), ("reduce-overhead", {**ASKED, "mode": "reduce-overhead"})],
)
def test_every_option_of_compiling_reaches_torch_and_deepspeed(
    monkeypatch: pytest.MonkeyPatch, mode: Any, expected: dict[str, Any]
) -> None:
    step = CompileModules(paths=("",), mode=mode, **ASKED)
    monkeypatch.setattr(names, "known_bases", lambda cls: {cls.__name__})
    engine: Any = DeepSpeedEngine()
    memo = do(step, Target(model=engine))
    assert engine.given == [expected]
    undo(step, Target(model=engine), memo)
    assert engine._is_compiled is False
    assert engine.module._compiled_call_impl is None
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: given.append(options))
    do(step, Target(model=Tiny()))
    assert given == [expected]


MORE = evolve(
    CompileModules(paths=("",), mode="default", **ASKED),  # type: ignore[arg-type]
    options=(BackendOption(name="max_autotune", value=False), BackendOption(name="max_fusion_size", value=8)),
    recompile_limit=3,
    isolate_recompiles=True,
)


def test_options_and_limits_of_compiling_are_given_to_torch_as_it_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: given.append(options))
    do(MORE, Target(model=Tiny()))
    more = {"options": {"max_autotune": False, "max_fusion_size": 8}, "recompile_limit": 3, "isolate_recompiles": True}
    assert given == [{**ASKED, **more}]


def test_inductor_compiles_with_the_options_and_they_are_verified() -> None:
    step, model = evolve(MORE, backend="inductor"), Tiny()
    do(step, Target(model=model))
    live = inspect_model(Target(model=model))
    assert list(forward.compiled(step, live)) == []
    other = evolve(step, options=(BackendOption(name="max_fusion_size", value=9),))
    (bad,) = forward.compiled(other, live)
    assert bad.what.endswith(": the model: max_fusion_size planned 9, found 8")
    whole, model = evolve(step, fullgraph=True), Tiny()
    do(whole, Target(model=model))
    assert not list(forward.compiled(whole, inspect_model(Target(model=model)))), "torch says nothing"


def test_options_that_inductor_would_refuse_are_told_before_anything_is_compiled() -> None:
    wrong = (BackendOption(name="max_fusion_sze", value=8), BackendOption(name="max_fusion_size", value="8"))
    first, second = problems(evolve(MORE, backend="inductor", options=wrong), Target(model=Tiny()))
    assert first.endswith("it knows none of that name; did you mean max_fusion_size?")
    assert "Unexpected type of attr max_fusion_size" in second


def test_an_argument_that_this_torch_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(model: Any = None, *, fullgraph: Any, dynamic: Any, backend: Any, mode: Any, options: Any) -> None: ...

    monkeypatch.setattr(torch, "compile", older)
    (text,) = problems(MORE, Target(model=Tiny()))
    assert text.startswith("compile.unknown-option at recompile_limit, isolate_recompiles: torch.compile of torch ")


def test_a_checkpointed_block_is_compiled_with_its_wrapper() -> None:
    model = Tiny()
    target = Target(model=model)
    do(CheckpointModules(paths=BLOCKS, preserve_rng_state=True), target)
    do(compiling(*BLOCKS), target)
    assert [type(m) for m in model.modules() if m._compiled_call_impl is not None] == [CheckpointWrapper] * 3


def test_compiling_refuses_what_is_compiled_or_absent() -> None:
    model = Tiny()
    model.layers[0].compile(backend="eager")
    assert problems(compiling("layers.0", "nose"), Target(model=model)) == (
        "plan.other-model at nose: the model has no such module",
        "model.already-compiled at layers.0: compiled already; Give the model before torch.compile.",
    )
    (text,) = problems(evolve(compiling("layers.1"), backend="indctor"), Target(model=model))
    assert text.startswith("compile.foreign-backend at indctor: torch.compile knows no such backend; ")
    whole = torch.compile(Tiny(), backend="eager")
    assert problems(compiling(""), Target(model=whole)) == (
        "model.already-compiled at '' (the root): compiled already; Give the model before torch.compile.",
    )


def test_a_compilation_that_fails_to_bind_leaves_no_block_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = Tiny(), nn.Module.compile

    def fail_on_last(self: nn.Module, **how: Any) -> None:
        if self is model.layers[2]:
            raise RuntimeError("no")
        real(self, **how)

    monkeypatch.setattr(nn.Module, "compile", fail_on_last)
    with pytest.raises(RuntimeError, match="no"):
        do(compiling(*BLOCKS), Target(model=model))
    assert not any(module._compiled_call_impl for module in model.modules())

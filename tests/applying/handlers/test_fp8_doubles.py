"""TransformerEngine and MS-AMP through recording doubles of their exact calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from prepkit.applying.rehearse import rehearse_here
from prepkit.applying.step_kinds import handlers
from prepkit.applying.verification import verify
from prepkit.config import (
    DDP,
    FP8,
    FSDP1,
    FSDP2,
    MSAMP,
    Config,
    DelayedScaling,
    MXFP8BlockScaling,
    TransformerEngine,
)
from prepkit.interpreter import Halted, interpret
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.objects.unwrap import unwrap
from prepkit.observe import observe
from prepkit.plan import Plan
from prepkit.steps import AutocastFP8Forward, ConvertTransformerEngine, InitializeMSAMP
from tests.support import library_doubles
from tests.support.fp8_model import TOKENS, Wide, loss_of, planned, seeded, stepped
from tests.support.fragile_model import applied
from tests.support.single_step import do, gloo_alone, problems, undo

HERE = ("fp8.unsupported-device",)
"""The doubles run on the CPU, where the rule rightly refuses the real libraries."""
LINEARS = tuple(f"layers.{index}.{name}" for index in range(3) for name in ("inner", "outer"))
NORMS = tuple(f"layers.{index}.norm" for index in range(3))
BLOCKS = AutocastFP8Forward(recipe="MXFP8BlockScaling", fp8_format="E4M3", margin=1, during_eval=True)
DELAYED = AutocastFP8Forward(
    recipe="DelayedScaling",
    fp8_format="HYBRID",
    margin=0,
    during_eval=False,
    amax_history_len=16,
    amax_compute_algo="most_recent",
)


def config(backend: Any = TransformerEngine(), **more: Any) -> Config:  # noqa: B008  # frozen
    return Config(precision=FP8(backend=backend), overrides=HERE, **more)


# --- TransformerEngine: layers -------------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> library_doubles.Calls:
    return library_doubles.transformer_engine(monkeypatch)


def test_layers_are_replaced_with_their_values_dtypes_and_names(engine: library_doubles.Calls) -> None:
    model = seeded(torch.bfloat16)
    model.get_parameter("layers.1.inner.weight").requires_grad = False
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    expected = model(TOKENS)
    do(ConvertTransformerEngine(linears=LINEARS, norms=NORMS), Target(model=model))
    found = {path: type(model.get_submodule(path)).__module__ for path in (*LINEARS, *NORMS)}
    assert set(found.values()) == {"transformer_engine.pytorch"}
    assert type(model.layers[0].gate) is nn.Linear  # type: ignore[union-attr]  # a ModuleList of Blocks
    torch.testing.assert_close({name: param.detach() for name, param in model.named_parameters()}, before)
    assert not model.get_parameter("layers.1.inner.weight").requires_grad
    torch.testing.assert_close(model(TOKENS).float(), expected.float(), rtol=0.1, atol=0.05)


def test_the_plan_leaves_what_does_not_fit_and_norms_without_bias(engine: library_doubles.Calls) -> None:
    model = seeded()
    model.layers[1].norm = nn.LayerNorm(16, bias=False)  # type: ignore[union-attr]  # a ModuleList of Blocks
    model.layers[2].norm = nn.LayerNorm(16, elementwise_affine=False)  # type: ignore[union-attr]  # likewise
    made = planned(config(), model, AdamW(model.parameters()))
    (step,) = [one.step for one in made.steps if isinstance(one.step, ConvertTransformerEngine)]
    assert (step.linears, step.norms) == (LINEARS, NORMS[:1])


def test_the_way_back_puts_torchs_layers_back(engine: library_doubles.Calls) -> None:
    model = seeded()
    before, params = dict(model.named_modules()), dict(model.named_parameters())
    target, step = Target(model=model), ConvertTransformerEngine(linears=LINEARS, norms=NORMS)
    undo(step, target, do(step, target))
    assert dict(model.named_modules()) == before
    assert all(params[name] is param for name, param in model.named_parameters())


def test_a_subclass_of_layernorm_is_refused(engine: library_doubles.Calls) -> None:
    model = seeded()
    model.layers[0].norm = nn.Identity()  # type: ignore[union-attr]  # a ModuleList of Blocks
    (text,) = problems(ConvertTransformerEngine(linears=(), norms=NORMS), Target(model=model))
    assert text == "plan.other-model at layers.0.norm: Identity, where the plan says LayerNorm"


def test_without_the_library_both_steps_are_refused() -> None:
    for step in (ConvertTransformerEngine(linears=(), norms=()), DELAYED):
        (text,) = problems(step, Target(model=Wide()))
        assert text.endswith("Type pip install 'transformer_engine[pytorch]'.")


@pytest.mark.parametrize("steps", [0, 1])
def test_the_optimizer_trains_the_new_parameters_and_keeps_its_state(engine: library_doubles.Calls, steps: int) -> None:
    model = seeded()
    optimizer: Any = stepped(model) if steps else AdamW(model.parameters(), lr=1e-2)
    made = planned(config(), model, optimizer)
    target = applied(made, model, optimizer)
    assert verify(made, target).failed == ()
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in model.parameters()}
    weight = model.get_parameter("layers.1.inner.weight")
    assert ("exp_avg" in optimizer.state[weight]) is bool(steps)
    before = weight.detach().clone()
    loss_of(target.model).backward()
    optimizer.step()
    assert not torch.equal(weight, before)


# --- TransformerEngine: autocast -----------------------------------------------------------------------------------


def test_the_autocast_is_outside_that_of_bfloat16_and_on_while_the_model_trains(engine: library_doubles.Calls) -> None:
    model = seeded()
    optimizer = AdamW(model.parameters())
    target = applied(planned(config(), model, optimizer), model, optimizer)
    assert target.model(TOKENS).dtype == torch.float32
    target.model.eval()(TOKENS)
    said = {"margin": 0, "fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "max"}
    assert engine == [("autocast", True, said, False), ("autocast", False, said, False)]


def test_only_what_was_asked_for_is_passed_to_older_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = library_doubles.transformer_engine(monkeypatch, older=True)
    recipe = DelayedScaling(interval=2, override_linear_precision=(False, False, True), amax_history_len=16)
    model = seeded()
    optimizer = AdamW(model.parameters())
    target = applied(planned(config(TransformerEngine(recipe=recipe)), model, optimizer), model, optimizer)
    target.model(TOKENS)
    (call,) = calls
    assert call[0] == "fp8_autocast"
    assert call[2] == {
        "margin": 0,
        "fp8_format": "HYBRID",
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "interval": 2,
        "override_linear_precision": (False, False, True),
    }


def test_a_recipe_that_the_library_refuses_is_refused_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.transformer_engine(monkeypatch)
    monkeypatch.setattr(library_doubles, "OLDER", frozenset())
    (text,) = problems(evolve(DELAYED, interval=2), Target(model=Wide()))
    assert text == (
        "fp8.recipe-refused at DelayedScaling: TransformerEngine refuses it: unexpected keyword argument 'interval'"
    )
    assert problems(DELAYED, Target(model=Wide())) == ()


def test_block_scaling_gets_no_history_and_may_run_in_evaluation(engine: library_doubles.Calls) -> None:
    backend = TransformerEngine(recipe=MXFP8BlockScaling(margin=1), autocast_during_eval=True)
    model = seeded().eval()
    optimizer = AdamW(model.parameters())
    applied(planned(config(backend), model, optimizer), model, optimizer).model(TOKENS)
    assert engine == [("autocast", True, {"margin": 1, "fp8_format": "E4M3"}, False)]


def test_under_ddp_the_autocast_is_on_the_wrapper(engine: library_doubles.Calls) -> None:
    with gloo_alone():
        model = seeded()
        optimizer = AdamW(model.parameters())
        made = planned(config(engine=DDP()), model, optimizer)
        target = applied(made, model, optimizer)
        assert isinstance(target.model, DistributedDataParallel)
        assert "_prepkit_fp8" in vars(target.model)
        assert "_prepkit_fp8" not in vars(model)
        loss_of(target.model).backward()
        assert [call[:2] for call in engine] == [("autocast", True)]
        assert verify(made, target).failed == ()


def test_under_fsdp1_the_autocast_is_on_the_wrapper_around_flat_parameters(engine: library_doubles.Calls) -> None:
    with gloo_alone():
        model = seeded()
        optimizer = stepped(model)
        made = planned(config(engine=FSDP1(use_orig_params=False)), model, AdamW(model.parameters()))
        assert [type(one.step).__name__ for one in made.steps][-3:] == [
            "WrapFSDP1",
            "AutocastFP8Forward",
            "RegroupOptimizer",
        ]
        made = planned(config(engine=FSDP1()), model, optimizer)
        target = applied(made, model, optimizer)
        assert "_prepkit_fp8" in vars(target.model)
        assert "_prepkit_fp8" not in vars(model)
        loss_of(target.model).backward()
        optimizer.step()
        assert [call[:2] for call in engine] == [("autocast", True)]
        assert verify(made, target).failed == ()


def test_under_fsdp2_the_model_enters_float8_and_returns_float32(engine: library_doubles.Calls) -> None:
    with gloo_alone():
        model = seeded()
        optimizer = AdamW(model.parameters())
        made = planned(config(engine=FSDP2()), model, optimizer)
        target = applied(made, model, optimizer)
        assert verify(made, target).failed == ()
        assert target.model(TOKENS).dtype == torch.float32
        assert [call[:2] for call in engine] == [("autocast", True)]


def test_a_plain_function_as_forward_is_called_as_it_is_and_put_back(engine: library_doubles.Calls) -> None:
    model = nn.Linear(16, 16)
    plain = lambda x: x + 1  # noqa: E731  # a function without self is the case
    model.forward = plain  # type: ignore[method-assign]  # likewise
    target = Target(model=model)
    memo = do(DELAYED, target)
    assert model(1) == 2
    (text,) = problems(DELAYED, target)
    assert text.startswith("model.already-wrapped at model.forward: runs under prepkit's float8 autocast")
    assert {mark for m in observe(model).facts.model.modules for mark in m.marks} == {"autocast"}
    undo(DELAYED, target, memo)
    assert vars(model)["forward"] is plain
    assert "_prepkit_fp8" not in vars(model)


def test_a_copy_of_the_model_follows_its_own_mode(engine: library_doubles.Calls) -> None:
    model = nn.Linear(16, 16)
    do(DELAYED, Target(model=model))
    twin = copy.deepcopy(model)
    twin.eval()
    twin(torch.ones(16))
    model(torch.ones(16))
    assert [call[1] for call in engine] == [False, True]


@pytest.mark.parametrize("own", [False, True])
def test_a_model_comes_out_of_both_autocasts_with_the_forward_that_it_had(
    engine: library_doubles.Calls, own: bool
) -> None:
    model: Any = seeded()
    if own:
        model.forward = lambda tokens: Wide.forward(model, tokens) + 1
    before = dict(vars(model))
    optimizer = AdamW(model.parameters())
    target = applied(planned(config(), model, optimizer), model, optimizer)
    assert unwrap(target.model) is model
    (text,) = problems(DELAYED, target)
    assert "runs under prepkit's float8 autocast" in text
    model(TOKENS)
    assert len(engine) == 1
    assert unwrap(target.model, keep_autocast=False) is model
    model(TOKENS)
    assert len(engine) == 1
    assert vars(model) == before


def test_a_model_built_from_its_layers_gets_the_autocast_alone(engine: library_doubles.Calls) -> None:
    import transformer_engine.pytorch as te

    model = seeded()
    model.layers[1].inner = te.Linear(16, 32, device="cpu")  # type: ignore[union-attr]  # a ModuleList of Blocks
    made = planned(config(), model, AdamW(model.parameters()))
    kinds = [type(one.step).__name__ for one in made.steps]
    assert "ConvertTransformerEngine" not in kinds
    assert "AutocastFP8Forward" in kinds


def test_a_lost_autocast_and_a_lost_layer_are_named(engine: library_doubles.Calls) -> None:
    model = seeded()
    optimizer = AdamW(model.parameters())
    made = planned(config(), model, optimizer)
    target = applied(made, model, optimizer)
    object.__setattr__(vars(model)["forward"], "during_eval", True)  # frozen
    (told,) = [f"{one.where}: {one.what}" for one in verify(made, target).failed]
    assert told == "AutocastFP8Forward: float8 autocast: found DelayedScaling, always"
    vars(model).pop("_prepkit_fp8")
    model.layers[0].norm = nn.LayerNorm(16)  # type: ignore[union-attr]  # a ModuleList of Blocks
    lost = [f"{one.where}: {one.what}" for one in verify(made, target).failed]
    assert "AutocastFP8Forward: float8 autocast: Wide has its own forward" in lost
    assert "ConvertTransformerEngine: layers are TransformerEngine's: layers.0.norm is LayerNorm" in lost


# --- MS-AMP --------------------------------------------------------------------------------------------------------


def prepared(cfg: Config, scheduled: bool = False) -> tuple[Plan, Target, AdamW, Wide]:
    model = seeded()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, 1, 0.5) if scheduled else None
    made = planned(cfg, model, optimizer, scheduler=scheduler)
    target = applied(made, model, optimizer, scheduler=scheduler)
    return made, target, optimizer, model


def test_ms_amp_takes_model_and_optimizer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = library_doubles.msamp(monkeypatch)
    made, target, _, _ = prepared(config(MSAMP(opt_level="O1")))
    assert calls == [("initialize", "AdamW", "O1")]
    assert verify(made, target).failed == ()
    assert type(target.optimizer).__name__ == "LBAdamW"
    layouts = {one.name: (one.cls, one.dtype) for one in made.layout}
    assert layouts["layers.0.gate.weight"] == ("ScalingParameter", "float16")  # also of odd sizes
    assert target.model.head.weight is target.model.embed.weight  # MS-AMP alone would tear them apart
    assert layouts["embed.weight"] == ("Parameter", "float32")
    assert layouts["layers.0.inner.bias"] == ("Parameter", "float32")
    assert made.owners.master_weights == "none: MS-AMP keeps scaled float16 weights"


def test_the_scheduler_drives_the_optimizer_that_ms_amp_made(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.msamp(monkeypatch)
    _, target, given, _ = prepared(config(MSAMP()), scheduled=True)
    assert target.scheduler.optimizer is target.optimizer is not given
    loss_of(target.model).backward()
    assert target.optimizer is not None
    target.optimizer.step()
    with pytest.warns(UserWarning, match="overridden"):  # torch sees that the optimizer is another one
        target.scheduler.step()
    assert target.optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)


@pytest.mark.parametrize("fails", [False, True])
def test_the_way_back_from_ms_amp_is_whole(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    library_doubles.msamp(monkeypatch, fails=fails)
    model = seeded()
    optimizer = AdamW(model.parameters())
    modules, params, defaults = dict(model.named_modules()), dict(model.named_parameters()), dict(optimizer.defaults)
    scheduler = StepLR(optimizer, 1)
    target = Target(model=model, optimizer=optimizer, scheduler=scheduler)
    step = InitializeMSAMP(opt_level="O2", linears=("layers.0.inner",), kept=("head",), reduced=False)
    met: list[str] = []
    target.together = lambda: met.append("all ranks")
    if fails:
        with pytest.raises(RuntimeError, match="no float8 kernel"):
            do(step, target)
    else:
        undo(step, target, do(step, target))
    assert met == ["all ranks"]  # before MS-AMP sends weights to them
    assert (target.model, target.optimizer, scheduler.optimizer) == (model, optimizer, optimizer)
    assert dict(model.named_modules()) == modules
    assert all(params[name] is param for name, param in model.named_parameters())
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert optimizer.defaults == defaults
    assert "_ddp_params_and_buffers_to_ignore" not in vars(model)
    assert "use_fp32_linear" not in vars(model.head)


def test_ddp_is_ms_amps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.msamp(monkeypatch)
    with gloo_alone():
        made, target, _, _ = prepared(config(MSAMP(), engine=DDP()))
        assert type(target.model).__module__ == "msamp.nn"
        assert verify(made, target).failed == ()


def test_an_ms_amp_without_a_ddp_of_its_own_is_refused_under_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.msamp(monkeypatch, own_ddp=False)
    model = seeded()
    step = InitializeMSAMP(opt_level="O2", linears=("layers.0.inner",), kept=("head",), reduced=True)
    (text,) = problems(step, Target(model=model, optimizer=SGD(model.parameters(), lr=0.1)))
    assert text.startswith("fp8.library-too-old at msamp: this msamp leaves torch's DistributedDataParallel as it is")
    (text,) = problems(step, Target(model=model))
    assert text == (
        "plan.model-changed at optimizer: the plan was made with one; "
        "Give it to apply(), or build the plan again without one."
    )


def test_a_step_after_ms_amp_that_fails_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.msamp(monkeypatch)
    model = seeded()
    optimizer = AdamW(model.parameters())
    made = planned(config(MSAMP()), model, optimizer)
    before = dict(model.named_modules())

    def fail(*_: Any) -> None:
        raise RuntimeError("late")

    kind = type(made.steps[-1].step)
    table = {**handlers(), kind: evolve(handlers()[kind], do=fail)}
    halted = interpret(tuple(one.step for one in made.steps), table, Target(model=model, optimizer=optimizer))
    assert isinstance(halted, Halted)
    assert halted.clean
    assert dict(model.named_modules()) == before


def test_what_ms_amp_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library_doubles.msamp(monkeypatch)
    made, target, given, model = prepared(config(MSAMP()))
    model.layers[0].inner = nn.Linear(16, 32)  # type: ignore[union-attr]  # a ModuleList of Blocks
    target.optimizer = given
    told = [f"{one.where}: {one.what}" for one in verify(made, target).failed]
    assert "InitializeMSAMP: layers are MS-AMP's: layers.0.inner is Linear" in told
    assert "InitializeMSAMP: the optimizer is MS-AMP's: it is AdamW" in told
    assert names.named_parameters(model)["layers.0.inner.weight"].dtype == torch.float32


# --- rehearsal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [TransformerEngine(), MSAMP()], ids=["te", "msamp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_needs_a_gpu_is_left_out_of_a_rehearsal_and_said(backend: Any, dtype: torch.dtype) -> None:
    model = seeded(dtype)
    cfg = Config(engine=DDP(), precision=FP8(backend=backend))
    made = planned(cfg, model, AdamW(model.parameters()), world_size=8, device="cuda", capability=(9, 0))
    seen = rehearse_here(made, model, rank=3)
    assert seen.fine, str(seen)
    assert any("runs on a GPU only" in one.why for one in seen.omitted)
